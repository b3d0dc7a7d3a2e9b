"""``pmap``: :func:`jax.pmap` over the local devices of all ranks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pycollective import errors
from pycollective.named_axes.mesh import Mesh, line
from pycollective.named_axes.names import AxisName
from pycollective.ordering import jaxprs
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.setup import devices_of_this_rank
from pycollective.ranks.world import when_needed, world_if_known
from pycollective.spmd.compiled import CompiledFunction
from pycollective.spmd.tracing import PlacedArguments, Program, as_arrays, broadcast_prefix, indices, pmapped, run


def pmap(
    fun: Callable[..., Any] | None = None,
    axis_name: AxisName | None = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    devices: Sequence[jax.Device] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Iterable[int] = (),
    comm: Communicator | None = None,
) -> Any:
    """:func:`jax.pmap` whose axis spans the local devices of all ranks; also a decorator with options.

    Arrays have a leading axis (``in_axes``, ``out_axes``) over this rank's own devices. Collectives over
    ``axis_name``, in ``fun`` and whatever it calls, go over all ranks x devices; the index of a device is
    ``rank * local devices + local index``.

    Args:
        fun: maps arrays of one device to arrays of one device.
        axis_name: name of the axis.
        in_axes: for each positional argument the axis to map over, or None for a value that all devices of all ranks
            share; an int, or a prefix of the tree of arguments. Keyword arguments are mapped over axis 0.
        out_axes: where the mapped axis is in the results; None for a result that is the same on all devices.
        static_broadcasted_argnums: positional arguments that are compile-time constants.
        devices: this rank's devices; default the first of :func:`pycollective.init` as the mapped axis is long.
        backend: None.
        axis_size: of the whole axis, ranks x devices; needed only where nothing is mapped.
        donate_argnums: positional arguments whose buffers the results may take.
        comm: the ranks; default the world.

    Returns:
        The compiled function. It can be differentiated, batched and called inside other JAX functions; an argument
        with ``in_axes=None`` gets the sum of all devices' cotangents, as on one process with as many devices.

    Raises:
        ValueError: at trace time, for an axis of the wrong length or a bad ``in_axes`` or ``out_axes``.
        NotImplementedError: at trace time, for a collective that this package does not know.

    Source: :func:`jax.pmap`.

    Example:
        >>> import jax, jax.numpy as jnp, pycollective as pc
        >>> share = pc.pmap(lambda x: x / jax.lax.psum(x, "batch"), "batch")
        >>> n = jax.local_device_count()
        >>> bool(jnp.allclose(share(jnp.ones(n)), 1 / (n * pc.axis_size())))
        True
    """
    options = {
        "in_axes": in_axes,
        "out_axes": out_axes,
        "static_broadcasted_argnums": static_broadcasted_argnums,
        "devices": devices,
        "backend": backend,
        "axis_size": axis_size,
        "donate_argnums": donate_argnums,
        "comm": comm,
    }
    if fun is None:
        return functools.partial(pmap, axis_name=axis_name, **options)
    ranks = when_needed("pmap", comm)
    name = "mapped axis" if axis_name is None else axis_name
    statics = indices(static_broadcasted_argnums)

    def fail(expected: str, got: Any, remedy: str) -> NoReturn:
        errors.fail(ValueError, "pmap", comm or world_if_known(), expected, got, remedy)

    if backend is not None:
        fail("backend=None", repr(backend), "Choose devices with pycollective.init(devices=...).")

    def numbers(which: str, tree: Any) -> Any:
        def number(path: Any, axis: Any) -> int | None:
            if axis is not None and (isinstance(axis, bool) or not hasattr(axis, "__index__")):
                place = f"{which}{jax.tree_util.keystr(path)}"
                fail(f"{place} to be an int or None", repr(axis), "Write 0 for the leading axis.")
            return None if axis is None else operator.index(axis)

        tree = tuple(tree) if isinstance(tree, list) and which == "in_axes" else tree  # as JAX does
        return jax.tree_util.tree_map_with_path(number, tree, is_leaf=lambda axis: axis is None)

    axes_in, axes_out = numbers("in_axes", in_axes), numbers("out_axes", out_axes)

    def spread(which: str, axes: Any, tree: Any) -> list[tuple[str, int | None]]:
        try:
            return broadcast_prefix(axes, tree)
        except ValueError as error:
            fail(
                f"{which} to be a prefix of the tree of arrays",
                f"{axes} for {jax.tree.structure(tree)} ({error})",
                "Give one entry for each argument or result, or one for all.",
            )

    def mesh_for(lengths: list[int]) -> Mesh:
        size = ranks().size  # before devices are asked for: MPI and the transport start with it
        own = devices_of_this_rank() if devices is None else tuple(devices)
        if not lengths and axis_size is None and devices is None:
            fail("an argument with a mapped axis", f"in_axes={in_axes}", "Map one, or pass axis_size.")
        if axis_size is not None and not lengths:
            local = axis_size // size
            if local * size != axis_size or not 1 <= local <= len(own):
                most = size * len(own)
                fail(f"axis_size to be a multiple of {size} ranks, at most {most}", axis_size, "See jax.pmap.")
        else:
            local = lengths[0] if lengths else len(own)
        if len(set(lengths)) > 1:
            fail("mapped axes of one length", f"lengths {lengths}", "Each has one entry for each local device.")
        if not 1 <= local <= len(own) or (devices is not None and local != len(own)):
            fail(
                f"a mapped axis of this rank's {len(own)} device(s)",
                f"length {local}",
                "Reshape the arguments to (devices, ...), or set JAX_NUM_CPU_DEVICES.",
            )
        if axis_size is not None and axis_size != local * size:
            fail(f"axis_size {local * size}, {size} ranks x {local}", axis_size, "Leave it out.")
        return line(name, ranks(), own[:local])

    def spec(axis: int | None) -> PartitionSpec:
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, name)

    def place(args: Any, kwargs: Any) -> tuple[PlacedArguments, list[int | None]]:
        """How the arrays among the arguments lie, and which axis of each is mapped."""
        static = {i % len(args) for i in statics if -len(args) <= i < len(args)}
        dynamic = [i for i in range(len(args)) if i not in static]
        given = tuple(args[i] for i in dynamic)
        axes = axes_in
        if isinstance(axes, tuple) and len(axes) == len(args):
            axes = tuple(axes[i] for i in dynamic)
        leaves, tree = jax.tree.flatten((given, kwargs))
        arrays = as_arrays(leaves)
        entries = spread("in_axes", axes, given) + [("", 0)] * len(jax.tree.leaves(kwargs))
        where = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path((given, kwargs))]
        mapped_axes: list[int | None] = []
        for x, (entry, axis), at in zip(arrays, entries, where, strict=True):
            if axis is not None and not -x.ndim <= axis < x.ndim:
                which = f"args{at[3:]}" if at.startswith("[0]") else f"kwargs{at[3:]}"
                expected = f"in_axes{entry} to be an axis of {which}"
                fail(expected, f"{axis} for shape {tuple(x.shape)}", "Check in_axes.")
            mapped_axes.append(None if axis is None else axis % x.ndim)
        pairs = list(zip(arrays, mapped_axes, strict=True))
        mesh = mesh_for([x.shape[axis] for x, axis in pairs if axis is not None])

        def put(arrays: Sequence[Any]) -> tuple[Any, Any]:
            positional, keywords = jax.tree.unflatten(tree, arrays)
            return tuple(jaxprs.replaced(args, dynamic, positional)), keywords

        return PlacedArguments(mesh, arrays, list(map(spec, mapped_axes)), put), mapped_axes

    out_specs = jax.tree.map(
        lambda axis: spec(None if axis is None else max(axis, 0)), axes_out, is_leaf=lambda axis: axis is None
    )

    @functools.wraps(fun)
    def bound(*args: Any, **kwargs: Any) -> Any:
        last: list[int | None] = []  # for each result its mapped axis, where that is counted from the end

        def trace() -> tuple[PlacedArguments, Program]:
            placed, axes = place(args, kwargs)

            def one_device(*blocks: Any) -> Any:
                own = [x if at is None else jnp.squeeze(x, at) for x, at in zip(blocks, axes, strict=True)]
                positional, keywords = placed.put(own)
                results = fun(*positional, **keywords)
                outs, tree = jax.tree.flatten(results)
                entries = spread("out_axes", axes_out, results)
                expanded = []
                for y, (entry, axis) in zip(map(jnp.asarray, outs), entries, strict=True):
                    if axis is not None and not -y.ndim - 1 <= axis <= y.ndim:
                        expected = f"out_axes{entry} from {-y.ndim - 1} to {y.ndim} for shape {y.shape}"
                        fail(expected, axis, "Check out_axes.")
                    last.append(axis if axis is not None and axis < 0 else None)
                    expanded.append(y if axis is None else jnp.expand_dims(y, max(axis, 0)))
                return jax.tree.unflatten(tree, expanded)

            return placed, pmapped(one_device, placed, out_specs)

        outs, tree = jax.tree.flatten(run("pmap", fun, ranks(), trace))
        moved = [y if axis is None else jnp.moveaxis(y, 0, axis) for y, axis in zip(outs, last, strict=True)]
        return jax.tree.unflatten(tree, moved)

    options = {"static_argnums": statics, "donate_argnums": indices(donate_argnums)}
    return CompiledFunction(bound, options, lambda args, kwargs: place(args, kwargs)[0].on_devices(), "pmap")
