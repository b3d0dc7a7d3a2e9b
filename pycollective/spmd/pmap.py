"""``pmap``: :func:`jax.pmap` over the local devices of all ranks."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, overload

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pycollective import errors
from pycollective.jax_support import jaxprs
from pycollective.named_axes.mesh import Mesh, one_axis_mesh
from pycollective.named_axes.names import AxisName
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.setup import devices_of_this_rank
from pycollective.ranks.world import when_needed, world_if_known
from pycollective.spmd.compiled import CompiledFunction, P, R
from pycollective.spmd.tracing import (
    PlacedArguments,
    TracedFunction,
    as_arrays,
    as_indices,
    broadcast_prefix,
    trace_and_apply,
    trace_as_pmap,
)


@overload
def pmap(
    fun: Callable[P, R],
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
) -> CompiledFunction[P, R]: ...


@overload
def pmap(
    fun: None = None,
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
) -> Callable[[Callable[P, R]], CompiledFunction[P, R]]: ...


def pmap(
    fun: Callable[P, R] | None = None,
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
    """Maps a function over the local devices of all ranks, as :func:`jax.pmap` does over the devices of one process.

    ``y[i] = fun(x[i])`` on local device i. It is also a decorator, with or without options. Each array has a *mapped
    axis* (``in_axes``, ``out_axes``) with one entry for each of this rank's own devices. Collectives over
    ``axis_name``, in ``fun`` and in the functions that it calls, go over all devices of all ranks. The index of a
    device along the axis is ``rank * local devices + local index``.

    Args:
        fun: a function from the arrays of one device to the arrays of one device. None, the default, makes a decorator.
        axis_name: the name of the axis. Default None: the axis has no name.
        in_axes: the mapped axis of each positional argument: an int; None for a value that all devices of all ranks
            share; or a prefix of the tree of arguments with such leaves. Default 0. Keyword arguments are mapped over
            axis 0.
        out_axes: the place of the mapped axis in each result, in the same form; None for a result that is the same on
            all devices of all ranks. Default 0.
        static_broadcasted_argnums: the positional arguments that are compile-time constants. Default: none.
        devices: this rank's devices. Default: the first devices of :func:`pycollective.init`, as many as the mapped
            axis has entries.
        backend: None. ``devices`` and :func:`pycollective.init` choose the devices.
        axis_size: the size of the whole axis, ranks x devices. It is needed only if no argument is mapped.
        donate_argnums: the positional arguments whose buffers the results may reuse. Default: none.
        comm: the communicator whose ranks take part. Default None: the world.

    Returns:
        The compiled function of this rank's own arrays. It can be differentiated, batched, and called inside other JAX
        functions. It has the methods ``lower``, ``trace``, ``eval_shape`` and ``clear_cache`` of :func:`jax.jit`.

    Raises:
        ValueError: while tracing, for a mapped axis of a wrong length, or a bad ``in_axes`` or ``out_axes``.
        NotImplementedError: while tracing, for a collective that this package does not know.
        RuntimeError: at the first call, if the ranks' collectives over ``axis_name`` differ.

    Differentiation:
        Both modes, with the meaning of :func:`jax.pmap` in one process with as many devices: a derivative outside the
        function is that of the sum of all devices' results, so an argument with ``in_axes=None`` gets the sum of all
        devices' cotangents.

    Order:
        As for :func:`pycollective.jit`.

    Source:
        :func:`jax.pmap`.

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
    statics = as_indices(static_broadcasted_argnums)

    def fail(expected: str, got: Any, remedy: str) -> NoReturn:
        errors.fail(ValueError, "pmap", comm or world_if_known(), expected, got, remedy)

    if backend is not None:
        fail("backend=None", repr(backend), "Choose devices with pycollective.init(devices=...).")

    def checked_axes(which: str, tree: Any) -> Any:
        def checked(path: Any, axis: Any) -> int | None:
            if axis is not None and (isinstance(axis, bool) or not hasattr(axis, "__index__")):
                place = f"{which}{jax.tree_util.keystr(path)}"
                fail(f"{place} to be an int or None", repr(axis), "Write 0 for the leading axis.")
            return None if axis is None else operator.index(axis)

        tree = tuple(tree) if isinstance(tree, list) and which == "in_axes" else tree  # as JAX does
        return jax.tree_util.tree_map_with_path(checked, tree, is_leaf=lambda axis: axis is None)

    axes_in, axes_out = checked_axes("in_axes", in_axes), checked_axes("out_axes", out_axes)

    def for_each_leaf(which: str, axes: Any, tree: Any) -> list[tuple[str, int | None]]:
        try:
            return broadcast_prefix(axes, tree)
        except ValueError as error:
            fail(
                f"{which} to be a prefix of the tree of arrays",
                f"{axes} for {jax.tree.structure(tree)} ({error})",
                "Give one entry for each argument or result, or one for all.",
            )

    def mesh_for(lengths: list[int]) -> Mesh:
        size = ranks().size  # first: ranks() starts MPI and the transport, which must come before JAX's devices
        own = devices_of_this_rank() if devices is None else tuple(devices)
        if not lengths and axis_size is None and devices is None:
            fail("an argument with a mapped axis", f"in_axes={in_axes}", "Map one, or pass axis_size.")
        if axis_size is not None and not lengths:
            local = axis_size // size
            if local * size != axis_size or not 1 <= local <= len(own):
                most = size * len(own)
                fail(f"axis_size to be a multiple of {size} ranks, at most {most}", axis_size, "Pass ranks x devices.")
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
        return one_axis_mesh(name, ranks(), own[:local])

    def spec(axis: int | None) -> PartitionSpec:
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, name)

    def place(args: Any, kwargs: Any) -> tuple[PlacedArguments, list[int | None]]:
        """Finds the specs of the arrays among the arguments, and the mapped axis of each."""
        static = {i % len(args) for i in statics if -len(args) <= i < len(args)}
        dynamic = [i for i in range(len(args)) if i not in static]
        given = tuple(args[i] for i in dynamic)
        axes = axes_in
        if isinstance(axes, tuple) and len(axes) == len(args):
            axes = tuple(axes[i] for i in dynamic)
        leaves, tree = jax.tree.flatten((given, kwargs))
        arrays = as_arrays(leaves)
        entries = for_each_leaf("in_axes", axes, given) + [("", 0)] * len(jax.tree.leaves(kwargs))
        mapped_axes: list[int | None] = []
        for i, (x, (entry, axis)) in enumerate(zip(arrays, entries, strict=True)):
            if axis is not None and not -x.ndim <= axis < x.ndim:
                at = jax.tree_util.keystr(jax.tree_util.tree_leaves_with_path((given, kwargs))[i][0])
                which = f"args{at[3:]}" if at.startswith("[0]") else f"kwargs{at[3:]}"
                expected = f"in_axes{entry} to be an axis of {which}"
                fail(expected, f"{axis} for shape {tuple(x.shape)}", "Check in_axes.")
            mapped_axes.append(None if axis is None else axis % x.ndim)
        pairs = list(zip(arrays, mapped_axes, strict=True))
        mesh = mesh_for([x.shape[axis] for x, axis in pairs if axis is not None])

        def with_arrays(arrays: Sequence[Any]) -> tuple[Any, Any]:
            positional, keywords = jax.tree.unflatten(tree, arrays)
            return tuple(jaxprs.replaced(args, dynamic, positional)), keywords

        return PlacedArguments(mesh, arrays, list(map(spec, mapped_axes)), with_arrays), mapped_axes

    out_specs = jax.tree.map(
        lambda axis: spec(None if axis is None else max(axis, 0)), axes_out, is_leaf=lambda axis: axis is None
    )

    @functools.wraps(fun)
    def bound(*args: Any, **kwargs: Any) -> Any:
        # For each result its mapped axis if the axis is negative, else None. The trace puts a negative axis first.
        from_end: list[int | None] = []

        def trace() -> tuple[PlacedArguments, TracedFunction]:
            placed, axes = place(args, kwargs)

            def one_device(*blocks: Any) -> Any:
                own = [x if at is None else jnp.squeeze(x, at) for x, at in zip(blocks, axes, strict=True)]
                positional, keywords = placed.with_arrays(own)
                results = fun(*positional, **keywords)
                outs, tree = jax.tree.flatten(results)
                entries = for_each_leaf("out_axes", axes_out, results)
                expanded = []
                for y, (entry, axis) in zip(map(jnp.asarray, outs), entries, strict=True):
                    if axis is not None and not -y.ndim - 1 <= axis <= y.ndim:
                        expected = f"out_axes{entry} from {-y.ndim - 1} to {y.ndim} for shape {y.shape}"
                        fail(expected, axis, "Check out_axes.")
                    from_end.append(axis if axis is not None and axis < 0 else None)
                    expanded.append(y if axis is None else jnp.expand_dims(y, max(axis, 0)))
                return jax.tree.unflatten(tree, expanded)

            return placed, trace_as_pmap(one_device, placed, out_specs)

        outs, tree = jax.tree.flatten(trace_and_apply("pmap", fun, ranks(), trace))
        moved = [y if axis is None else jnp.moveaxis(y, 0, axis) for y, axis in zip(outs, from_end, strict=True)]
        return jax.tree.unflatten(tree, moved)

    options = {"static_argnums": statics, "donate_argnums": as_indices(donate_argnums)}
    return CompiledFunction(bound, options, lambda args, kwargs: place(args, kwargs)[0].on_mesh_devices(), "pmap", fun)
