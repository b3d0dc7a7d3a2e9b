"""A function of one device's arrays over the devices of all ranks, as one primitive until it is lowered.

Its operands and results are this rank's own blocks. It holds the function's jaxpr, traced with the full sizes of the
axes, so that JAX's rules can differentiate and batch it: how, says the module of each such primitive (``sharded``,
``named``). Where nothing transforms it any more, in the lowering or in a region, it becomes the program of this rank's
devices: its collectives are discharged, sums joined, and the rest runs through :func:`jax.shard_map` where the rank has
several.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, Var
from jax.interpreters import ad, mlir
from jax.sharding import PartitionSpec

from pycollective import errors
from pycollective.named_axes import discharge, fusion
from pycollective.named_axes.mesh import Mesh
from pycollective.named_axes.names import AxisName
from pycollective.ordering import dispatch, donation, jax_internals, jaxprs
from pycollective.ordering.effect import effect
from pycollective.ranks.communicator import Communicator

# How arrays lie -------------------------------------------------------------------------------------------------


def names_of(spec: PartitionSpec) -> list[AxisName]:
    """The axes that a spec names."""
    return [name for part in spec if part is not None for name in (part if isinstance(part, tuple) else (part,))]


def local_spec(mesh: Mesh, spec: PartitionSpec) -> PartitionSpec:
    """How this rank's own block lies on its devices."""
    local = {axis.name: axis.local_name for axis in mesh.axes if axis.local > 1}

    def of(part: Any) -> Any:
        names = tuple(local[name] for name in (part if isinstance(part, tuple) else (part,)) if name in local)
        return names if len(names) > 1 else names[0] if names else None

    return PartitionSpec(*map(of, spec))


def _times(mesh: Mesh, spec: PartitionSpec, shape: Sequence[int], attribute: str) -> tuple[int, ...]:
    """``shape`` with each axis as many times as long as its spec's axes count in ``attribute``."""
    sizes = {axis.name: getattr(axis, attribute) for axis in mesh.axes}
    lengths = list(shape)
    for i, part in enumerate(spec):
        for name in part if isinstance(part, tuple) else () if part is None else (part,):
            lengths[i] *= sizes[name]
    return tuple(lengths)


def global_aval(mesh: Mesh, x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    """The global array of which ``x`` is this rank's own block."""
    shape = _times(mesh, spec, x.shape, "ranks")
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=getattr(x, "weak_type", False))


def device_aval(mesh: Mesh, x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    """What one device has of this rank's own block ``x``."""
    sizes = {axis.name: axis.local for axis in mesh.axes}
    shape = list(x.shape)
    for i, part in enumerate(spec):
        for name in part if isinstance(part, tuple) else () if part is None else (part,):
            shape[i] //= sizes[name]
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype, weak_type=getattr(x, "weak_type", False))


# The primitive --------------------------------------------------------------------------------------------------


def primitive(name: str) -> Primitive:
    """A primitive with the parameters that :func:`parameters` makes; without rules for JAX's transforms."""
    new = Primitive(name)
    new.multiple_results = True
    new.def_effectful_abstract_eval(_abstract_eval)
    new.def_impl(run)
    jax_internals.never_high(new)  # whatever its body is: `run` has it replaced
    mlir.register_lowering(new, mlir.lower_fun(run, multiple_results=True))
    discharge.PROGRAMS[new] = run
    return new


def parameters(
    mesh: Mesh, body: Any, in_specs: Sequence[PartitionSpec], out_specs: Sequence[PartitionSpec], effects: Any
) -> dict[str, Any]:
    """Those of a primitive.

    Args:
        mesh: ranks x devices.
        body: the jaxpr, from one device's blocks to one device's blocks; names the axes at their full sizes.
        in_specs: how the operands lie.
        out_specs: how the results lie.
        effects: of the body, but for those that say that it names the axes.
    """
    kinds = frozenset(jax_internals.without_references(effects))
    if discharge.speaks(body, frozenset(mesh.shape)):
        kinds |= {effect}
    return {
        "mesh": mesh,
        "body": body,
        "in_specs": tuple(in_specs),
        "out_specs": tuple(out_specs),
        "kinds": kinds,
        "devices": None if _on_default_device(mesh) else _devices(mesh),
    }


def _abstract_eval(
    *args: Any, body: Any, mesh: Mesh, in_specs: Any, out_specs: Any, kinds: Any, **_: Any
) -> tuple[list[Any], Any]:
    for x, var, spec in zip(args, body.invars, in_specs, strict=True):
        own = _times(mesh, spec, var.aval.shape, "local")
        assert x.shape == own, f"{x.shape} in the place of {own}"
    results = [
        jax_internals.result(_times(mesh, spec, var.aval.shape, "local"), var.aval.dtype, *args)
        for var, spec in zip(body.outvars, out_specs, strict=True)
    ]
    return results, set(kinds)


class Batch(NamedTuple):
    """A program under :func:`jax.vmap`.

    Attributes:
        operands: with the batch in front.
        in_specs: how they lie.
        function: of blocks that have the batch in front where the operands do.
        out_specs: how the results lie.
        out_dims: for each result where its batch is: in front, or nowhere.
    """

    operands: list[Any]
    in_specs: list[PartitionSpec]
    function: Callable[..., list[Any]]
    out_specs: list[PartitionSpec]
    out_dims: list[int | None]


def batched(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], *, body: Any, mesh: Mesh, in_specs: Any, out_specs: Any
) -> Batch:
    """The program with these arguments batched along ``dims``, on an axis that may have a name."""
    # A name that the mesh hides is not that of the batch inside.
    named = {} if axis_data.name in mesh.shape else {"axis_name": axis_data.name}
    if named:
        discharge.refuse_mixed(body, mesh, axis_data.name)
    uses = functools.partial(discharge.mentions, names=frozenset(named.values()))
    sources = [var for var, dim in zip(body.invars, dims, strict=True) if dim is not None]
    reached = jaxprs.dependents(body, sources, uses)
    out_dims = [0 if isinstance(var, Var) and var in reached else None for var in body.outvars]
    axes = [None if dim is None else 0 for dim in dims]
    pairs = list(zip(args, dims, strict=True))
    operands = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in pairs]
    options = {"in_axes": axes, "out_axes": out_dims, "axis_size": axis_data.size, **named}
    function = jax.vmap(jaxprs.as_function(body), **options)

    def lie(specs: Sequence[PartitionSpec], dims: Sequence[int | None]) -> list[PartitionSpec]:
        return [spec if dim is None else PartitionSpec(None, *spec) for spec, dim in zip(specs, dims, strict=True)]

    return Batch(operands, lie(in_specs, axes), lambda *blocks: function(*blocks), lie(out_specs, out_dims), out_dims)


def or_zero(ct: Any, aval: Any) -> Any:
    """A tangent or cotangent; a symbolic zero for None."""
    return ad.Zero(aval.to_tangent_aval()) if ct is None else ct


def _on_default_device(mesh: Mesh) -> bool:
    """Whether JAX runs a program there by default."""
    return mesh.devices == dispatch.default_devices()


@functools.lru_cache(maxsize=256)
def _devices(mesh: Mesh) -> Any:
    """A jaxpr that lies on the devices of the mesh: JAX looks for such in the parameters of equations.

    It must know over which devices a program goes before it lowers it.
    """
    somewhere = jax.shard_map(lambda: jnp.zeros(()), mesh=mesh.local_mesh, in_specs=(), out_specs=PartitionSpec())
    with jax.sharding.use_abstract_mesh(jaxprs.NO_MESH):
        return jax.make_jaxpr(somewhere)().jaxpr


def run(
    *args: Any, body: Any, mesh: Mesh, in_specs: Sequence[PartitionSpec], out_specs: Sequence[PartitionSpec], **_: Any
) -> list[Any]:
    """The program of this rank's devices, discharged, on its own blocks.

    Raises:
        NotImplementedError: something around runs this program on several devices.
    """
    around = jax.sharding.get_abstract_mesh()
    if any(size > 1 for size in jaxprs.manual_sizes(around)):
        remedy = "Bind all axes in one pycollective.shard_map, or name a communicator inside."
        errors.fail(
            NotImplementedError, "pmap", mesh.comm, f"a program over {mesh!r} by itself", f"one inside {around}", remedy
        )

    def one_device(*blocks: Any) -> list[Any]:
        avals = [jaxprs.aval_like(var.aval) for var in body.invars]
        local = [(axis.local_name, axis.local) for axis in mesh.axes if axis.local > 1]
        program = jax.make_jaxpr(discharge.discharge(body, mesh), axis_env=local)(*avals)
        joined = fusion.join_reductions(program.jaxpr)
        # Only the program around knows what becomes of the operands.
        frugal = donation.without_copies(joined, frozenset(joined.invars))
        return jaxprs.evaluate(ClosedJaxpr(frugal, program.consts), jaxprs.rebind, *blocks)

    if _on_default_device(mesh):
        return one_device(*args)
    on_all = jax.shard_map(
        one_device,
        mesh=mesh.local_mesh,
        in_specs=tuple(local_spec(mesh, spec) for spec in in_specs),
        out_specs=[local_spec(mesh, spec) for spec in out_specs],
        check_vma=False,
    )
    return list(jaxprs.outside_meshes(on_all)(*args))


def collectives(jaxpr: Any) -> dict[Communicator, list[str]]:
    """What the ranks of each communicator must have in common of a program: its collectives over axes of ours."""
    lines: dict[Communicator, list[str]] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive in discharge.PROGRAMS:
            mesh, body = eqn.params["mesh"], eqn.params["body"]
            lines.setdefault(mesh.comm, []).extend([repr(mesh), *discharge.collectives(body, mesh.shape)])
        hidden = jaxprs.hidden_program(eqn, ()) if effect in eqn.effects else None
        for inner in jaxprs.inner_jaxprs(eqn) if hidden is None else [hidden.jaxpr]:
            for comm, more in collectives(inner).items():
                lines.setdefault(comm, []).extend(more)
    return lines


def expand(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program that nothing transforms any more, with each such primitive in it replaced.

    And each of a library that holds calls without saying so, and what JAX would replace where it lowers a program.
    """
    if not _holds(closed.jaxpr):
        return closed
    known: dict[int, tuple[Any, ClosedJaxpr]] = {}

    def changed(closed: ClosedJaxpr) -> ClosedJaxpr:
        if not _holds(closed.jaxpr):
            return closed
        if id(closed.jaxpr) not in known:
            args = [jaxprs.aval_like(var.aval) for var in closed.jaxpr.invars]
            new = jax.make_jaxpr(partial(jaxprs.evaluate, closed, equation))(*args)
            known[id(closed.jaxpr)] = closed.jaxpr, new
        return known[id(closed.jaxpr)][1]

    def equation(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
        if eqn.primitive in discharge.PROGRAMS:
            return run(*operands, **eqn.params)
        if not _concerns(eqn):
            return jaxprs.rebind(eqn, operands)
        if eqn.primitive.name == "shard_map":
            return jaxprs.rebuilt_shard_map(eqn, equation)(*operands)
        if (inner := jaxprs.called_jaxpr(eqn)) is not None:
            return jaxprs.evaluate(inner, equation, *operands)
        if (inner := jaxprs.hidden_program(eqn, ())) is not None:
            return jaxprs.evaluate(inner, equation, *operands)
        return jaxprs.bind_with_jaxprs(eqn, operands, changed)

    return changed(closed)


def _holds(jaxpr: Any) -> bool:
    return any(map(_concerns, jaxpr.eqns))


def _concerns(eqn: JaxprEqn) -> bool:
    inner = jaxprs.inner_jaxprs(eqn)
    # A primitive of some library may not say that what it holds speaks with other ranks.
    hides = effect not in eqn.effects and any(effect in jaxpr.effects for jaxpr in inner)
    return hides or eqn.primitive in discharge.PROGRAMS or jaxprs.is_high(eqn) or any(map(_holds, inner))
