"""``shard_map``: :func:`jax.shard_map` over a mesh of ranks x local devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import jax
from jax.sharding import PartitionSpec

from pycollective import errors
from pycollective.named_axes.mesh import Mesh
from pycollective.named_axes.names import AxisName
from pycollective.ordering import jaxprs
from pycollective.spmd import shard_map_semantics
from pycollective.spmd.compiled import CompiledFunction
from pycollective.spmd.device_program import names_of
from pycollective.spmd.tracing import PlacedArguments, Program, as_arrays, broadcast_prefix, indices, run, sharded

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
        errors.fail(TypeError, "shard_map", None, "a pycollective.Mesh", repr(mesh), "Make it with pc.make_mesh.")
    if in_specs is _INFERRED:
        remedy = "A mesh of pycollective has no explicit axes, from which JAX could tell them: write them down."
        errors.fail(TypeError, "shard_map", mesh.comm, "in_specs", "none", remedy)
    if axis_names and set(axis_names) != set(mesh.shape):
        remedy = "Leave axis_names out, and name in the specs what is cut."
        expected = f"a function of all axes of {mesh!r}"
        errors.fail(NotImplementedError, "shard_map", mesh.comm, expected, f"axis_names={axis_names}", remedy)

    def fail(expected: str, got: Any, remedy: str) -> NoReturn:
        errors.fail(ValueError, "shard_map", mesh.comm, expected, got, remedy)

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

    def place(args: Any, _: Any) -> PlacedArguments:
        leaves, tree = jax.tree.flatten(args)
        entries = broadcast_prefix(in_specs, args)
        # A spec of None is for what is no operand.
        places = [i for i, (_, spec) in enumerate(entries) if spec is not None]
        arrays = as_arrays([leaves[i] for i in places])
        for x, i in zip(arrays, places, strict=True):
            check(entries[i][0], x, entries[i][1])

        def put(arrays: Sequence[Any]) -> tuple[Any, Any]:
            return jax.tree.unflatten(tree, jaxprs.replaced(leaves, places, arrays)), {}

        return PlacedArguments(mesh, arrays, [entries[i][1] for i in places], put)

    @functools.wraps(fun)
    def bound(*args: Any) -> Any:
        options = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": check_vma}

        def trace() -> tuple[PlacedArguments, Program]:
            try:
                placed = place(args, {})
            except (ValueError, TypeError):
                shard_map_semantics.trace(fun, mesh, args, **options)  # JAX's own words, where it has some
                raise
            entries = [entry for entry in broadcast_prefix(in_specs, args) if entry[1] is not None]
            for (entry, spec), x in zip(entries, placed.arrays, strict=True):
                check_division(entry, x, spec)

            def arguments(arrays: Sequence[Any]) -> tuple[Any, ...]:
                return tuple(placed.put(arrays)[0])

            return placed, sharded(fun, placed, arguments=arguments, **options)

        return run("shard_map", fun, mesh.comm, trace)

    options = {"donate_argnums": indices(donate_argnums)}
    return CompiledFunction(bound, options, lambda *given: place(*given).on_devices(), "shard_map")
