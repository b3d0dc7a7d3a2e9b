"""``jit``, ``pmap``, ``shard_map``: :mod:`jax`'s, over local devices x ranks.

Each traces its function once with the full sizes of the named axes, discharges the collectives over them, and runs
the rest on this rank's devices: by :func:`jax.shard_map` where there are several.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from pycollective import buckets, checks, discharge, jaxprs, primitives
from pycollective.agreement import noted
from pycollective.checks import AxisName
from pycollective.communicator import Communicator, devices_of_this_rank
from pycollective.errors import message
from pycollective.jitted import Jitted
from pycollective.members import Members
from pycollective.mesh import Mesh, line

P = ParamSpec("P")
R = TypeVar("R")


def _run(closed: ClosedJaxpr, mesh: Mesh, *args: Any) -> list[Any]:
    """``closed`` on ``args`` with the collectives over ``mesh`` replaced, and sums joined."""
    program = discharge.discharge(closed, mesh)
    joined = buckets.join_reductions(program.jaxpr)
    return jaxprs.evaluate(ClosedJaxpr(joined, program.consts), *args)


def _named(fun: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """``fun`` with the axes of ``mesh``, which has one device of this rank, bound: rank-local arrays in and out."""

    @functools.wraps(fun)
    def bound(*args: Any, **kwargs: Any) -> Any:
        arrays, with_arrays = jaxprs.split_arrays(args, kwargs)
        out_tree: Any = None

        def flat(*arrays: Any) -> list[Any]:
            nonlocal out_tree
            args, kwargs = with_arrays(arrays)
            outs, out_tree = jax.tree.flatten(fun(*args, **kwargs))
            return outs

        def trace() -> tuple[ClosedJaxpr, Callable[[], list[str]]]:
            _check_unbound("jit", mesh)
            closed = discharge.bind_axes(flat, mesh, *arrays)
            return closed, lambda: [repr(mesh), *discharge.collectives(closed.jaxpr, mesh)]

        closed = noted(mesh.comm, "jit", _name(fun), trace)
        return jax.tree.unflatten(out_tree, _run(closed, mesh, *arrays))

    return bound


@overload
def jit(
    fun: Callable[P, R], *, axis_name: AxisName | None = None, comm: Communicator | None = None, **options: Any
) -> Jitted[P, R]: ...


@overload
def jit(
    fun: None = None, *, axis_name: AxisName | None = None, comm: Communicator | None = None, **options: Any
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


def jit(
    fun: Callable[P, R] | None = None,
    *,
    axis_name: AxisName | None = None,
    comm: Communicator | None = None,
    **options: Any,
) -> Any:
    """Compiles a function whose body may call collectives; also a decorator, with or without options.

    The function runs on one device of each rank and its arrays are the rank's own. All ranks must call it in the
    same order. A call costs about as much as one of :func:`jax.jit` without collectives; plain ``jax.jit`` works too,
    but its programs with ordered effects take JAX's slow dispatch.

    Args:
        fun: a function that :func:`jax.jit` can compile.
        axis_name: name of the axis of ranks, for :mod:`jax.lax`'s collectives in ``fun`` and whatever it calls.
        comm: the ranks along that axis; default the world.
        **options: those of :func:`jax.jit`: ``static_argnums``, ``static_argnames``, ``donate_argnums``, ... A donated
            array's buffer is reduced in place.

    Returns:
        The compiled function. It can be differentiated, batched and called inside other JAX functions.

    Raises:
        NotImplementedError: at trace time, for a collective over ``axis_name`` that this package does not know.

    Order: calls happen in the order of the program, and programs in the order in which one Python thread calls them.
    Source: :func:`jax.jit`.

    Example:
        >>> import jax, jax.numpy as jnp, pycollective as pc
        >>> @pc.jit(axis_name="ranks")
        ... def norm(x):
        ...     return jnp.sqrt(jax.lax.psum(jnp.vdot(x, x), "ranks"))
        >>> bool(jnp.isclose(norm(jnp.ones(4)), jnp.sqrt(4.0 * pc.axis_size())))
        True
    """
    if fun is None:
        return functools.partial(jit, axis_name=axis_name, comm=comm, **options)
    ranks = checks.communicator("jit", comm)  # MPI and the transport start before anything is compiled
    if axis_name is None:
        return Jitted(fun, options)
    return Jitted(_named(fun, line(axis_name, ranks, devices_of_this_rank()[:1])), options)


# Several devices of each rank -------------------------------------------------------------------------------


def _is_spec(x: Any) -> bool:
    return x is None or isinstance(x, (int, PartitionSpec))


def _broadcast_prefix(where: str, name: str, prefix: Any, tree: Any) -> list[Any]:
    """One entry of ``prefix`` for each leaf of ``tree``."""
    try:
        spread = jax.tree.map(lambda spec, part: [spec] * len(jax.tree.leaves(part)), prefix, tree, is_leaf=_is_spec)
    except ValueError as error:
        raise ValueError(
            message(
                where,
                f"{name} to be a prefix of the tree of arrays",
                f"{prefix} for {jax.tree.structure(tree)} ({error})",
                "Give one entry for each argument or result, or one for all.",
            )
        ) from None
    return [spec for part in jax.tree.leaves(spread, is_leaf=lambda x: isinstance(x, list)) for spec in part]


def _names_of(spec: PartitionSpec) -> list[AxisName]:
    return [name for part in spec if part is not None for name in (part if isinstance(part, tuple) else (part,))]


def _local_spec(mesh: Mesh, spec: PartitionSpec) -> PartitionSpec:
    """How this rank's own block lies on its devices."""
    local = {axis.name: axis.local_name for axis in mesh.axes if axis.local > 1}

    def of(part: Any) -> Any:
        names = tuple(local[name] for name in (part if isinstance(part, tuple) else (part,)) if name in local)
        return names if len(names) > 1 else names[0] if names else None

    return PartitionSpec(*map(of, spec))


def _same_on(mesh: Mesh, spec: PartitionSpec) -> Members | None:
    """The ranks that have the same block under ``spec``; None if no other has."""
    rest = tuple(axis.name for axis in mesh.axes if axis.ranks > 1 and axis.name not in _names_of(spec))
    return mesh.over(rest).comm if rest else None


@dataclass
class _Plan:
    """One device's part of a program on this rank's devices.

    Attributes:
        mesh: ranks x devices.
        fun: from one device's blocks to one device's blocks; may name the axes of ``mesh``.
        arrays: this rank's own blocks.
        in_specs: how they lie on the mesh.
        out_specs: the same of the results; set when ``fun`` is traced.
    """

    mesh: Mesh
    fun: Callable[..., list[Any]]
    arrays: Sequence[Any]
    in_specs: Sequence[PartitionSpec]
    out_specs: Sequence[PartitionSpec] = ()

    def block(self, x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        """What one device has of this rank's block."""
        shape = list(x.shape)
        for i, part in enumerate(_local_spec(self.mesh, spec)):
            for name in part if isinstance(part, tuple) else (part,) if part is not None else ():
                shape[i] //= self.mesh.local_mesh.shape[name]
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype, weak_type=getattr(x, "weak_type", False))


def _on_devices(where: str, name: str, comm: Communicator, plan: Callable[[], _Plan]) -> list[Any]:
    """Traces a program and runs it on this rank's devices. ``plan`` may raise for arguments that do not fit."""

    def trace() -> tuple[tuple[_Plan, ClosedJaxpr], Callable[[], list[str]]]:
        planned = plan()
        mesh = planned.mesh
        _check_unbound(where, mesh)
        closed = discharge.bind_axes(planned.fun, mesh, *map(planned.block, planned.arrays, planned.in_specs))
        return (planned, closed), lambda: [repr(mesh), *discharge.collectives(closed.jaxpr, mesh)]

    planned, closed = noted(comm, where, name, trace)
    mesh = planned.mesh

    def one_device(*blocks: Any) -> tuple[Any, ...]:
        shared = [_shared(primitives.fan_out, mesh, *pair) for pair in zip(blocks, planned.in_specs, strict=True)]
        results = zip(_run(closed, mesh, *shared), planned.out_specs, strict=True)
        return tuple(_shared(primitives.replicated, mesh, *pair) for pair in results)

    if mesh.devices == (jax.local_devices()[0],):  # where JAX runs a program by default
        return list(one_device(*planned.arrays))
    on_all = jax.shard_map(
        one_device,
        mesh=mesh.local_mesh,
        in_specs=tuple(_local_spec(mesh, spec) for spec in planned.in_specs),
        out_specs=tuple(_local_spec(mesh, spec) for spec in planned.out_specs),
        check_vma=False,
    )
    return list(on_all(*planned.arrays))


def _shared(identity: Callable[..., Any], mesh: Mesh, x: Any, spec: PartitionSpec) -> Any:
    """``identity(x)`` over the ranks that have the same block under ``spec``, for what can have a cotangent."""
    comm = _same_on(mesh, spec)
    return identity(x, comm=comm) if comm is not None and jnp.issubdtype(x.dtype, jnp.inexact) else x


def _check_unbound(where: str, mesh: Mesh) -> None:
    for axis in mesh.axes:
        try:
            jax.lax.axis_size(axis.name)
        except NameError:
            continue
        checks.fail(
            ValueError,
            where,
            mesh.comm,
            f"an axis name that nothing around binds, for {mesh!r}",
            repr(axis.name),
            "Give each of nested axes a name of its own.",
        )


def _name(fun: Callable[..., Any]) -> str:
    return getattr(fun, "__name__", repr(fun))


def _indices(numbers: int | Iterable[int]) -> tuple[int, ...]:
    return (numbers,) if isinstance(numbers, int) else tuple(numbers)


def pmap(
    fun: Callable[..., Any] | None = None,
    axis_name: AxisName | None = None,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    devices: Sequence[jax.Device] | None = None,
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
        "axis_size": axis_size,
        "donate_argnums": donate_argnums,
        "comm": comm,
    }
    if fun is None:
        return functools.partial(pmap, axis_name=axis_name, **options)
    ranks = checks.communicator("pmap", comm)
    name = "mapped axis" if axis_name is None else axis_name
    statics = _indices(static_broadcasted_argnums)

    def fail(expected: str, got: Any, remedy: str) -> NoReturn:
        checks.fail(ValueError, "pmap", ranks, expected, got, remedy)

    for which, tree in (("in_axes", in_axes), ("out_axes", out_axes)):
        for axis in jax.tree.leaves(tree):
            if not isinstance(axis, int):
                fail(f"{which} to be ints, None, or trees of them", repr(axis), "Write 0 for the leading axis.")

    def mesh_for(arrays: Sequence[Any], axes: Sequence[int | None]) -> Mesh:
        own = devices_of_this_rank() if devices is None else tuple(devices)
        lengths = []
        for x, axis in zip(arrays, axes, strict=True):
            if axis is not None and not -x.ndim <= axis < x.ndim:
                fail("in_axes to be axes of the arguments", f"{axis} for shape {tuple(x.shape)}", "Check in_axes.")
            lengths += [x.shape[axis]] if axis is not None else []
        if not lengths and axis_size is None and devices is None:
            fail("an argument with a mapped axis", f"in_axes={in_axes}", "Map one, or pass axis_size.")
        if axis_size is not None and not lengths:
            local = axis_size // ranks.size
            if local * ranks.size != axis_size or not 1 <= local <= len(own):
                most = ranks.size * len(own)
                fail(f"axis_size to be a multiple of {ranks.size} ranks, at most {most}", axis_size, "See jax.pmap.")
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
        if axis_size is not None and axis_size != local * ranks.size:
            fail(f"axis_size {local * ranks.size}, {ranks.size} ranks x {local}", axis_size, "Leave it out.")
        return line(name, ranks, own[:local])

    @functools.wraps(fun)
    def mapped(*args: Any, **kwargs: Any) -> Any:
        out_tree: Any = None

        def spec(axis: int | None) -> PartitionSpec:
            return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, name)

        def plan() -> _Plan:
            dynamic = [i for i in range(len(args)) if i not in statics]
            given = tuple(args[i] for i in dynamic)
            axes = in_axes
            if isinstance(in_axes, (tuple, list)):
                axes = tuple(in_axes[i] for i in dynamic) if len(in_axes) == len(args) else tuple(in_axes)
            leaves, in_tree = jax.tree.flatten((given, kwargs))
            arrays = [x if hasattr(x, "ndim") else jnp.asarray(x) for x in leaves]
            flat_axes = _broadcast_prefix("pmap", "in_axes", axes, given) + [0] * len(jax.tree.leaves(kwargs))
            mesh = mesh_for(arrays, flat_axes)
            places = [None if axis is None else axis % x.ndim for x, axis in zip(arrays, flat_axes, strict=True)]

            def one_device(*blocks: Any) -> list[Any]:
                nonlocal out_tree
                own = [x if at is None else jnp.squeeze(x, at) for x, at in zip(blocks, places, strict=True)]
                positional, keywords = jax.tree.unflatten(in_tree, own)
                results = fun(*jaxprs.replaced(args, dynamic, positional), **keywords)
                outs, out_tree = jax.tree.flatten(results)
                outs = [jnp.asarray(y) for y in outs]
                out_places = []
                for y, axis in zip(outs, _broadcast_prefix("pmap", "out_axes", out_axes, results), strict=True):
                    if axis is not None and not -y.ndim - 1 <= axis <= y.ndim:
                        fail(f"out_axes from {-y.ndim - 1} to {y.ndim} for shape {y.shape}", axis, "Check out_axes.")
                    out_places.append(None if axis is None else axis % (y.ndim + 1))
                planned.out_specs = [spec(at) for at in out_places]
                return [y if at is None else jnp.expand_dims(y, at) for y, at in zip(outs, out_places, strict=True)]

            planned = _Plan(mesh, one_device, arrays, [spec(at) for at in places])
            return planned

        results = _on_devices("pmap", _name(fun), ranks, plan)
        return jax.tree.unflatten(out_tree, results)

    return Jitted(mapped, {"static_argnums": statics, "donate_argnums": _indices(donate_argnums)})


def shard_map(
    fun: Callable[..., Any] | None = None,
    *,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    donate_argnums: int | Iterable[int] = (),
) -> Any:
    """:func:`jax.shard_map` over the devices of all ranks; also a decorator.

    Each rank passes and gets its own block of each global array: the part that its devices hold. A rank whose devices
    lie along ``"model"`` alone, say, passes an array with spec ``P("data", "model")`` cut along its first axis only.

    Args:
        fun: maps one device's blocks to one device's blocks; may name the axes of ``mesh``.
        mesh: from :func:`pycollective.make_mesh`.
        in_specs: for each argument a :class:`jax.sharding.PartitionSpec` of mesh axes, or a prefix of the tree of
            arguments. What a spec does not name is the same on all devices along that axis.
        out_specs: the same of the results.
        donate_argnums: arguments whose buffers the results may take.

    Returns:
        The compiled function. It can be differentiated, batched and called inside other JAX functions.

    Raises:
        ValueError: at trace time, for a block that does not divide, or a spec that names no axis of the mesh.
        NotImplementedError: at trace time, for a collective that this package does not know.

    Source: :func:`jax.shard_map`.

    Example:
        >>> import jax, jax.numpy as jnp, pycollective as pc
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = pc.make_mesh((-1,), ("data",))
        >>> total = pc.shard_map(lambda x: jax.lax.psum(x.sum(), "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
        >>> float(total(jnp.ones(jax.local_device_count()))) == mesh.shape["data"]
        True
    """
    if fun is None:
        return functools.partial(
            shard_map, mesh=mesh, in_specs=in_specs, out_specs=out_specs, donate_argnums=donate_argnums
        )

    if not isinstance(mesh, Mesh):
        checks.fail(TypeError, "shard_map", None, "a pycollective.Mesh", repr(mesh), "Make it with pc.make_mesh.")

    def fail(expected: str, got: Any, remedy: str) -> NoReturn:
        checks.fail(ValueError, "shard_map", mesh.comm, expected, got, remedy)

    def check(x: Any, spec: Any) -> PartitionSpec:
        if not isinstance(spec, PartitionSpec):
            fail("a PartitionSpec for each array", repr(spec), "Write P() for one that all devices share.")
        names = _names_of(spec)
        if len(set(names)) < len(names) or any(name not in mesh.shape for name in names):
            fail(f"axes of {mesh!r}, each once", spec, "Name axes of the mesh.")
        if len(spec) > x.ndim:
            fail(f"a spec of at most {x.ndim} entries for shape {tuple(x.shape)}", spec, "Drop the last entries.")
        return spec

    @functools.wraps(fun)
    def mapped(*args: Any) -> Any:
        out_tree: Any = None

        def plan() -> _Plan:
            leaves, in_tree = jax.tree.flatten(args)
            arrays = [x if hasattr(x, "ndim") else jnp.asarray(x) for x in leaves]
            specs = list(map(check, arrays, _broadcast_prefix("shard_map", "in_specs", in_specs, args)))
            for x, spec in zip(arrays, specs, strict=True):
                for length, part in zip(x.shape, spec, strict=False):
                    names = part if isinstance(part, tuple) else (part,)
                    local = math.prod(axis.local for axis in mesh.axes if axis.name in names)
                    if length % local:
                        fail(f"an axis that divides by the {local} local devices along {part!r}", x.shape, "Pad it.")

            def one_device(*blocks: Any) -> list[Any]:
                nonlocal out_tree
                results = fun(*jax.tree.unflatten(in_tree, blocks))
                outs, out_tree = jax.tree.flatten(results)
                outs = [jnp.asarray(y) for y in outs]
                prefix = _broadcast_prefix("shard_map", "out_specs", out_specs, results)
                planned.out_specs = list(map(check, outs, prefix))
                return outs

            planned = _Plan(mesh, one_device, arrays, specs)
            return planned

        results = _on_devices("shard_map", _name(fun), mesh.comm, plan)
        return jax.tree.unflatten(out_tree, results)

    return Jitted(mapped, {"donate_argnums": _indices(donate_argnums)})
