"""``jit``, ``pmap``, ``shard_map``: :mod:`jax`'s, over local devices x ranks.

Each traces its function once with the full sizes of the named axes (``mapped``); what runs on this rank's devices is
found when the program is lowered.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, NoReturn, ParamSpec, SupportsIndex, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pycollective import checks, jaxprs, named, sharded
from pycollective.agreement import noted
from pycollective.checks import AxisName
from pycollective.communicator import Communicator, devices_of_this_rank, world_if_known
from pycollective.jitted import Jitted
from pycollective.mapped import local_spec, names_of, whole
from pycollective.mesh import Mesh, line

P = ParamSpec("P")
R = TypeVar("R")


class _Placed(NamedTuple):
    """The arrays among some arguments, and how they lie.

    Attributes:
        mesh: ranks x devices.
        arrays: this rank's own blocks.
        specs: one for each.
        put: makes the arguments with other arrays in their places.
    """

    mesh: Mesh
    arrays: Sequence[Any]
    specs: Sequence[PartitionSpec]
    put: Callable[[Sequence[Any]], tuple[Any, Any]]

    def wholes(self) -> list[jax.ShapeDtypeStruct]:
        """The global arrays."""
        return [whole(self.mesh, *pair) for pair in zip(self.arrays, self.specs, strict=True)]

    def on_devices(self) -> tuple[Any, Any]:
        """The arguments, with every array on the devices of the mesh."""
        local = self.mesh.local_mesh
        targets = [NamedSharding(local, local_spec(self.mesh, spec)) for spec in self.specs]
        return self.put([jax.device_put(*pair) for pair in zip(self.arrays, targets, strict=True)])


class _Program(NamedTuple):
    """A traced function of one device's arrays.

    Attributes:
        structure: of its results.
        run: on this rank's own blocks.
    """

    structure: Any
    run: Callable[[Sequence[Any]], list[Any]]


def _sharded(fun: Callable[..., Any], placed: _Placed, **options: Any) -> _Program:
    """``fun`` with the meaning of :func:`jax.shard_map`."""
    mesh = placed.mesh
    closed, structure = sharded.trace(fun, mesh, placed.wholes(), **options)
    return _Program(structure, lambda arrays: sharded.apply(closed, mesh, arrays))


def _pmapped(fun: Callable[..., Any], placed: _Placed, out_specs: Any) -> _Program:
    """``fun`` with the meaning of :func:`jax.pmap`; ``out_specs`` is a prefix of the tree of its results."""
    mesh = placed.mesh
    untyped = {"in_specs": tuple(placed.specs), "out_specs": out_specs, "check_vma": False}
    if jaxprs.manual_sizes(jax.sharding.get_abstract_mesh()):  # inside another, whose types JAX would take for ours
        return _sharded(fun, placed, **untyped)
    try:
        closed, structure = named.trace(fun, mesh, placed.arrays, placed.specs)
    except AssertionError as error:
        # lax.pcast, which says something about types where there are none, looks for a mesh around.
        if not any(isinstance(arg, frozenset) or hasattr(arg, "varying") for arg in error.args):
            raise
        return _sharded(fun, placed, **untyped)
    results = jax.tree.unflatten(structure, range(structure.num_leaves))
    specs = [spec for _, spec in _broadcast_prefix(out_specs, results)]
    return _Program(structure, lambda arrays: named.apply(closed, mesh, arrays, placed.specs, specs))


def _results(where: str, fun: Any, comm: Communicator, trace: Callable[[], tuple[_Placed, _Program]]) -> Any:
    """Traces a program, and runs it on this rank's own blocks. ``trace`` may raise for arguments that do not fit."""
    placed, program = noted(comm, where, fun, trace)
    return jax.tree.unflatten(program.structure, program.run(placed.arrays))


def _named(
    fun: Callable[..., Any], axis_name: AxisName, mesh: Callable[[], Mesh], check_vma: bool
) -> Callable[..., Any]:
    """``fun`` with the axis of ``mesh()``, which has one device of this rank, bound: rank-local arrays in and out."""
    spec = PartitionSpec(axis_name)  # of an axis in front, along which the global arrays have one for each rank

    @functools.wraps(fun)
    def bound(*args: Any, **kwargs: Any) -> Any:
        arrays, with_arrays = jaxprs.split_arrays(args, kwargs)

        def one_device(*blocks: Any) -> Any:
            args, kwargs = with_arrays([jnp.squeeze(x, 0) for x in blocks])
            return jax.tree.map(lambda y: jnp.expand_dims(y, 0), fun(*args, **kwargs))

        def trace() -> tuple[_Placed, _Program]:
            stacked = [jnp.expand_dims(x, 0) for x in arrays]
            placed = _Placed(mesh(), stacked, [spec] * len(arrays), with_arrays)
            if check_vma:
                return placed, _sharded(one_device, placed, in_specs=spec, out_specs=spec, check_vma=True)
            return placed, _pmapped(one_device, placed, spec)

        results = _results("jit", fun, mesh().comm, trace)
        return jax.tree.map(lambda y: jnp.squeeze(y, 0), results)

    return bound


@overload
def jit(
    fun: Callable[P, R],
    *,
    axis_name: AxisName | None = None,
    comm: Communicator | None = None,
    check_vma: bool = False,
    **options: Any,
) -> Jitted[P, R]: ...


@overload
def jit(
    fun: None = None,
    *,
    axis_name: AxisName | None = None,
    comm: Communicator | None = None,
    check_vma: bool = False,
    **options: Any,
) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


def jit(
    fun: Callable[P, R] | None = None,
    *,
    axis_name: AxisName | None = None,
    comm: Communicator | None = None,
    check_vma: bool = False,
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
        check_vma: False for the meaning of :func:`jax.pmap`, where the cotangent of a sum over the axis is the sum of
            all ranks' cotangents; True for that of :func:`jax.shard_map`, whose types tell what varies along the axis:
            the sum is one value that all ranks share, and the gradient of a summed loss counts it once. The arguments
            vary along the axis.
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
        return functools.partial(jit, axis_name=axis_name, comm=comm, check_vma=check_vma, **options)
    ranks = checks.later("jit", comm)
    if axis_name is None:
        return Jitted(fun, options)

    @functools.cache
    def mesh() -> Mesh:
        comm = ranks()  # before devices are asked for: MPI and the transport start with it
        return line(axis_name, comm, devices_of_this_rank()[:1])

    def place(args: Any, kwargs: Any) -> Any:
        arrays, with_arrays = jaxprs.split_arrays(args, kwargs)
        return _Placed(mesh(), arrays, [PartitionSpec()] * len(arrays), with_arrays).on_devices()

    return Jitted(_named(fun, axis_name, mesh, check_vma), options, place)


# Several devices of each rank -------------------------------------------------------------------------------


def _broadcast_prefix(prefix: Any, tree: Any) -> list[tuple[str, Any]]:
    """For each leaf of ``tree`` the entry of ``prefix`` that stands for it, and that one's place.

    Raises:
        ValueError: it is no prefix.
    """
    spread: list[tuple[str, Any]] = []

    def add(path: Any, entry: Any, part: Any) -> None:
        spread.extend([(jax.tree_util.keystr(path), entry)] * len(jax.tree.leaves(part)))

    jax.tree_util.tree_map_with_path(add, prefix, tree, is_leaf=lambda entry: entry is None)
    return spread


def _indices(numbers: SupportsIndex | Iterable[SupportsIndex]) -> tuple[int, ...]:
    return tuple(map(operator.index, numbers if isinstance(numbers, Iterable) else (numbers,)))


def _arrays(leaves: Sequence[Any]) -> list[Any]:
    return [x if hasattr(x, "ndim") else jnp.asarray(x) for x in leaves]


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
    ranks = checks.later("pmap", comm)
    name = "mapped axis" if axis_name is None else axis_name
    statics = _indices(static_broadcasted_argnums)

    def fail(expected: str, got: Any, remedy: str) -> NoReturn:
        checks.fail(ValueError, "pmap", comm or world_if_known(), expected, got, remedy)

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
            return _broadcast_prefix(axes, tree)
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

    def place(args: Any, kwargs: Any) -> tuple[_Placed, list[int | None]]:
        """How the arrays among the arguments lie, and which axis of each is mapped."""
        static = {i % len(args) for i in statics if -len(args) <= i < len(args)}
        dynamic = [i for i in range(len(args)) if i not in static]
        given = tuple(args[i] for i in dynamic)
        axes = axes_in
        if isinstance(axes, tuple) and len(axes) == len(args):
            axes = tuple(axes[i] for i in dynamic)
        leaves, tree = jax.tree.flatten((given, kwargs))
        arrays = _arrays(leaves)
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

        return _Placed(mesh, arrays, list(map(spec, mapped_axes)), put), mapped_axes

    out_specs = jax.tree.map(lambda axis: spec(None if axis is None else max(axis, 0)), axes_out, is_leaf=_is_none)

    @functools.wraps(fun)
    def bound(*args: Any, **kwargs: Any) -> Any:
        last: list[int | None] = []  # for each result its mapped axis, where that is counted from the end

        def trace() -> tuple[_Placed, _Program]:
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

            return placed, _pmapped(one_device, placed, out_specs)

        outs, tree = jax.tree.flatten(_results("pmap", fun, ranks(), trace))
        moved = [y if axis is None else jnp.moveaxis(y, 0, axis) for y, axis in zip(outs, last, strict=True)]
        return jax.tree.unflatten(tree, moved)

    options = {"static_argnums": statics, "donate_argnums": _indices(donate_argnums)}
    return Jitted(bound, options, lambda args, kwargs: place(args, kwargs)[0].on_devices(), "pmap")


def _is_none(x: Any) -> bool:
    return x is None


_INFERRED = object()


def shard_map(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Mesh,
    in_specs: Any = _INFERRED,
    out_specs: Any,
    axis_names: Iterable[AxisName] = frozenset(),
    check_vma: bool = True,
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
        axis_names: those of the mesh, or empty: JAX's functions of some axes alone have no counterpart here.
        check_vma: as :func:`jax.shard_map`'s: whether types tell along which axes a value varies. Then a result that a
            spec of ``out_specs`` calls the same everywhere must be so by its type, and derivatives that are taken
            inside follow the types: the gradient of a summed loss counts the sum once.
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
            shard_map,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=axis_names,
            check_vma=check_vma,
            donate_argnums=donate_argnums,
        )

    if not isinstance(mesh, Mesh):
        checks.fail(TypeError, "shard_map", None, "a pycollective.Mesh", repr(mesh), "Make it with pc.make_mesh.")
    if in_specs is _INFERRED:
        remedy = "A mesh of pycollective has no explicit axes, from which JAX could tell them: write them down."
        checks.fail(TypeError, "shard_map", mesh.comm, "in_specs", "none", remedy)
    if axis_names and set(axis_names) != set(mesh.shape):
        remedy = "Leave axis_names out, and name in the specs what is cut."
        expected = f"a function of all axes of {mesh!r}"
        checks.fail(NotImplementedError, "shard_map", mesh.comm, expected, f"axis_names={axis_names}", remedy)

    def fail(expected: str, got: Any, remedy: str) -> NoReturn:
        checks.fail(ValueError, "shard_map", mesh.comm, expected, got, remedy)

    def check(place: str, x: Any, spec: Any) -> None:
        if not isinstance(spec, PartitionSpec):
            fail(f"a PartitionSpec in in_specs{place}", repr(spec), "Write P() for one that all devices share.")
        names = names_of(spec)
        if len(set(names)) < len(names) or any(name not in mesh.shape for name in names):
            fail(f"axes of {mesh!r} in in_specs{place}, each once", spec, "Name axes of the mesh.")
        if len(spec) > x.ndim:
            expected = f"a spec of at most {x.ndim} entries in in_specs{place} for shape {tuple(x.shape)}"
            fail(expected, spec, "Drop the last entries.")

    def check_division(place: str, x: Any, spec: PartitionSpec) -> None:
        for length, part in zip(x.shape, spec, strict=False):
            along = part if isinstance(part, tuple) else (part,)
            local = math.prod(axis.local for axis in mesh.axes if axis.name in along)
            if length % local:
                expected = f"an axis that divides by the {local} local devices along {part!r} of in_specs{place}"
                fail(expected, x.shape, "Pad it.")

    def place(args: Any, _: Any) -> _Placed:
        leaves, tree = jax.tree.flatten(args)
        entries = _broadcast_prefix(in_specs, args)
        # A spec of None is for what is no operand.
        places = [i for i, (_, spec) in enumerate(entries) if spec is not None]
        arrays = _arrays([leaves[i] for i in places])
        for x, i in zip(arrays, places, strict=True):
            check(entries[i][0], x, entries[i][1])

        def put(arrays: Sequence[Any]) -> tuple[Any, Any]:
            return jax.tree.unflatten(tree, jaxprs.replaced(leaves, places, arrays)), {}

        return _Placed(mesh, arrays, [entries[i][1] for i in places], put)

    @functools.wraps(fun)
    def bound(*args: Any) -> Any:
        options = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": check_vma}

        def trace() -> tuple[_Placed, _Program]:
            try:
                placed = place(args, {})
            except (ValueError, TypeError):
                sharded.trace(fun, mesh, args, **options)  # JAX's own words, where it has some
                raise
            entries = [entry for entry in _broadcast_prefix(in_specs, args) if entry[1] is not None]
            for (entry, spec), x in zip(entries, placed.arrays, strict=True):
                check_division(entry, x, spec)

            def arguments(arrays: Sequence[Any]) -> tuple[Any, ...]:
                return tuple(placed.put(arrays)[0])

            return placed, _sharded(fun, placed, arguments=arguments, **options)

        return _results("shard_map", fun, mesh.comm, trace)

    options = {"donate_argnums": _indices(donate_argnums)}
    return Jitted(bound, options, lambda *given: place(*given).on_devices(), "shard_map")
