"""Device programs: functions of one device's arrays over the devices of all ranks, each one primitive until lowering.

The operands and results of the primitive are this rank's own blocks of global arrays. Its parameter is the function's
jaxpr, traced with the full sizes of the axes, so that JAX's rules can differentiate and batch it. There are two such
primitives, with the meanings of :func:`jax.shard_map` (``shard_map_semantics``) and of :func:`jax.pmap`
(``pmap_semantics``). Each of these modules has the rules of its primitive.

After all transforms, in its lowering or in a region, the primitive is replaced by the program of this rank's devices:
the collectives are discharged and the sums joined. If the rank has several devices, the program runs on them through
:func:`jax.shard_map`.
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
from pycollective.jax_support import donation, jax_internals, jaxprs, rewriting
from pycollective.named_axes import discharge, fusion
from pycollective.named_axes.mesh import Mesh
from pycollective.named_axes.names import AxisName
from pycollective.ordering import dispatch
from pycollective.ordering.effect import effect
from pycollective.ranks.agreement import CollectiveLine
from pycollective.ranks.communicator import Communicator

# How arrays lie -------------------------------------------------------------------------------------------------


def names_of(spec: PartitionSpec) -> list[AxisName]:
    """Returns the axes that a spec names."""
    return [name for part in spec if part is not None for name in (part if isinstance(part, tuple) else (part,))]


def local_spec(mesh: Mesh, spec: PartitionSpec) -> PartitionSpec:
    """Returns the spec by which this rank's own block is cut among this rank's devices."""
    local = {axis.name: axis.local_name for axis in mesh.axes}

    def of(part: Any) -> Any:
        return tuple(local[name] for name in part) if isinstance(part, tuple) else None if part is None else local[part]

    return PartitionSpec(*map(of, spec))


def _multiplied(mesh: Mesh, spec: PartitionSpec, shape: Sequence[int], attribute: str) -> tuple[int, ...]:
    """Multiplies each length of ``shape`` by ``attribute`` of the axes that the spec names for it.

    Args:
        mesh: the mesh of the axes.
        spec: the axes of the mesh along which each axis of an array is cut.
        shape: the shape of a part of the array.
        attribute: "ranks" for the shape of the global array from that of a rank's block; "local" for the shape of a
            rank's block from that of one device.
    """
    sizes = {axis.name: getattr(axis, attribute) for axis in mesh.axes}
    lengths = list(shape)
    for i, part in enumerate(spec):
        for name in part if isinstance(part, tuple) else () if part is None else (part,):
            lengths[i] *= sizes[name]
    return tuple(lengths)


def global_aval(mesh: Mesh, x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of a global array from ``x``, this rank's own block of it."""
    shape = _multiplied(mesh, spec, x.shape, "ranks")
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=getattr(x, "weak_type", False))


def device_aval(mesh: Mesh, x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    """Returns the shape and dtype of one device's part of ``x``, this rank's own block."""
    sizes = {axis.name: axis.local for axis in mesh.axes}
    shape = list(x.shape)
    for i, part in enumerate(spec):
        for name in part if isinstance(part, tuple) else () if part is None else (part,):
            shape[i] //= sizes[name]
    return jax.ShapeDtypeStruct(tuple(shape), x.dtype, weak_type=getattr(x, "weak_type", False))


def _rank_aval(mesh: Mesh, aval: Any, spec: PartitionSpec) -> jax.core.ShapedArray:
    """Returns the type of this rank's own block from that of one device's part of it, outside any mesh."""
    shape = _multiplied(mesh, spec, aval.shape, "local")
    return jax.core.ShapedArray(shape, aval.dtype, weak_type=aval.weak_type)


# The primitive --------------------------------------------------------------------------------------------------


def new_primitive(name: str) -> Primitive:
    """Makes a primitive with the parameters of :func:`parameters`, without rules for JAX's transforms."""
    new = Primitive(name)
    new.multiple_results = True
    new.def_effectful_abstract_eval(abstract_eval)
    new.def_impl(run_on_this_rank)
    jax_internals.never_high(new)  # its body may have high-level primitives: `run_on_this_rank` replaces them
    mlir.register_lowering(new, mlir.lower_fun(run_on_this_rank, multiple_results=True))
    discharge.DEVICE_PROGRAMS[new] = run_on_this_rank
    return new


def parameters(
    mesh: Mesh,
    body: Any,
    in_specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec],
    effects: Any,
    *,
    repeated: bool = False,
) -> dict[str, Any]:
    """Returns the parameters of a primitive.

    Args:
        mesh: the mesh over ranks x devices.
        body: the jaxpr from one device's blocks to one device's blocks. It names the axes at their full sizes.
        in_specs: the spec of each operand.
        out_specs: the spec of each result.
        effects: the effects of the body, without JAX's effects for its named axes.
        repeated: whether the program is one that :func:`jax.checkpoint` repeats, whose unused results may be removed.
    """
    jax_internals.checkify()
    body_effects = frozenset(jax_internals.without_references(effects))
    if discharge.communicates(body, frozenset(mesh.shape)):
        body_effects |= {effect}
    return {
        "mesh": mesh,
        "body": body,
        "in_specs": tuple(in_specs),
        "out_specs": tuple(out_specs),
        "body_effects": body_effects,
        "repeated": repeated,
        "devices_jaxpr": None if _is_default_device(mesh) else _jaxpr_on_devices(mesh.local_mesh),
    }


def abstract_eval(
    *args: Any, body: Any, mesh: Mesh, in_specs: Any, out_specs: Any, body_effects: Any, **_: Any
) -> tuple[list[Any], Any]:
    """Returns the types of the results of a device program, and its effects."""
    for x, var, spec in zip(args, body.invars, in_specs, strict=True):
        own = _multiplied(mesh, spec, var.aval.shape, "local")
        assert x.shape == own, f"{x.shape} in the place of {own}"
    results = [
        jax_internals.result(_multiplied(mesh, spec, var.aval.shape, "local"), var.aval.dtype, *args)
        for var, spec in zip(body.outvars, out_specs, strict=True)
    ]
    return results, set(body_effects)


class Batch(NamedTuple):
    """A device program under :func:`jax.vmap`.

    Attributes:
        operands: the operands. The first axis of a batched operand is the batch.
        in_specs: the spec of each operand.
        function: the function of one device's blocks of these operands.
        out_specs: the spec of each result.
        out_dims: for each result the axis of its batch: 0, or None if it has none.
    """

    operands: list[Any]
    in_specs: list[PartitionSpec]
    function: Callable[..., list[Any]]
    out_specs: list[PartitionSpec]
    out_dims: list[int | None]


def batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], *, body: Any, mesh: Mesh, in_specs: Any, out_specs: Any
) -> Batch:
    """Batches a device program. ``dims`` are the batch axes of ``args``; ``axis_data`` has the batch's size and name.

    Raises:
        NotImplementedError: ``spmd_axis_name`` names an axis of the mesh.
    """
    spread = [name for name in axis_data.spmd_name or () if name in mesh.shape]
    if spread:
        got = f"spmd_axis_name={axis_data.spmd_name}"
        remedy = "Leave it out, or map the function over the axis: name the axis in in_specs and vmap inside."
        expected = f"jax.vmap around a program over {mesh!r} without spmd_axis_name={spread[0]!r}"
        errors.fail(NotImplementedError, "vmap", mesh.comm, expected, got, remedy)
    # If the mesh has an axis of the same name, the name means the axis of the mesh in the body.
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

    def with_batch(specs: Sequence[PartitionSpec], dims: Sequence[int | None]) -> list[PartitionSpec]:
        return [spec if dim is None else PartitionSpec(None, *spec) for spec, dim in zip(specs, dims, strict=True)]

    batched_specs = with_batch(in_specs, axes), with_batch(out_specs, out_dims)
    return Batch(operands, batched_specs[0], lambda *blocks: function(*blocks), batched_specs[1], out_dims)


def return_errors(
    error: Any,
    enabled: Any,
    operands: Sequence[Any],
    *,
    body: Any,
    mesh: Mesh,
    in_specs: Sequence[PartitionSpec],
    apply: Callable[[Callable[..., Any], Sequence[Any], Sequence[PartitionSpec], PartitionSpec], list[Any]],
) -> tuple[Any, list[Any]]:
    """The rule of ``jax.experimental.checkify``: a program that returns the errors that it finds and its results.

    As with :func:`jax.pmap`, the errors have a first axis with an entry for each device of this rank. On a rank with
    one device they have no such axis, so JAX can join them with the errors of other operations.

    Args:
        error: the errors so far.
        enabled: the kinds of errors to find.
        operands: this rank's own blocks.
        body: the jaxpr from one device's blocks to one device's blocks.
        mesh: the mesh over ranks x devices.
        in_specs: the spec of each operand.
        apply: a function that traces a function of one device's blocks, and applies it to operands with these specs.
            The traced function returns errors, whose spec is the last argument, and results.
    """
    checkify = jax_internals.checkify()
    earlier, tree = jax.tree.flatten(error)
    function = jaxprs.as_function(body)
    trees: list[Any] = []

    def after_earlier_errors(*blocks: Any) -> list[Any]:
        checkify.check_error(jax.tree.unflatten(tree, blocks[: len(earlier)]))
        return function(*blocks[len(earlier) :])

    def one_device(*blocks: Any) -> tuple[list[Any], list[Any]]:
        error, results = checkify.checkify(after_earlier_errors, errors=enabled)(*blocks)
        errors, tree = jax.tree.flatten(error)
        trees.append(tree)
        return [jnp.expand_dims(x, 0) for x in errors], results

    specs = [*[PartitionSpec()] * len(earlier), *in_specs]
    own = PartitionSpec(tuple(mesh.shape))
    found = apply(one_device, [*map(jnp.asarray, earlier), *operands], specs, own)
    count = len(found) - len(body.outvars)
    errors = found[:count] if len(mesh.lane_ids) > 1 else [jnp.squeeze(x, 0) for x in found[:count]]
    return jax.tree.unflatten(trees[-1], errors), found[count:]


def zero_if_none(ct: Any, aval: Any) -> Any:
    """Returns the tangent or cotangent ``ct``, or a symbolic zero for None."""
    return ad.Zero(aval.to_tangent_aval()) if ct is None else ct


def _is_default_device(mesh: Mesh) -> bool:
    """Returns whether the mesh has one device of this rank, JAX's default device."""
    return mesh.devices == dispatch.default_devices()


@dispatch.emptied_by_jax
@functools.lru_cache(maxsize=256)
def _jaxpr_on_devices(mesh: jax.sharding.Mesh) -> Any:
    """Returns a jaxpr that names the devices of the mesh, as a parameter of the primitive.

    JAX must know a program's devices before it lowers the program. It finds them in the jaxprs of its equations.
    """
    somewhere = jax.shard_map(lambda: jnp.zeros(()), mesh=mesh, in_specs=(), out_specs=PartitionSpec())
    with jax.sharding.use_abstract_mesh(jaxprs.NO_MESH):
        return jax.make_jaxpr(somewhere)().jaxpr


def run_on_this_rank(*args: Any, mesh: Mesh, **params: Any) -> list[Any]:
    """Evaluates a device program on this rank's own blocks, inside a program that is no region.

    Its sums are joined. It may overwrite its operands: XLA copies an operand that the surrounding program reads again.
    """

    def finished(program: ClosedJaxpr) -> ClosedJaxpr:
        jaxpr = fusion.join_reductions(program.jaxpr)
        return ClosedJaxpr(donation.without_copies(jaxpr, frozenset(jaxpr.invars)), program.consts)

    run = partial(jaxprs.evaluate, program_of_this_rank(mesh=mesh, **params, finish=finished), jaxprs.rebind)
    return run(*args) if _is_default_device(mesh) else jaxprs.outside_meshes(run)(*args)


def program_of_this_rank(
    *,
    body: Any,
    mesh: Mesh,
    in_specs: Sequence[PartitionSpec],
    out_specs: Sequence[PartitionSpec],
    finish: Callable[[ClosedJaxpr], ClosedJaxpr] = lambda program: program,
    **_: Any,
) -> ClosedJaxpr:
    """Returns the program of this rank's devices for its own blocks: each device runs the discharged device program.

    Args:
        body: see :func:`parameters`.
        mesh: see :func:`parameters`.
        in_specs: see :func:`parameters`.
        out_specs: see :func:`parameters`.
        finish: a pass over the discharged program of one device.

    Raises:
        NotImplementedError: the surrounding program runs this program on several devices.
    """
    around = jax.sharding.get_abstract_mesh()
    if any(size > 1 for size in jaxprs.manual_sizes(around)):
        remedy = "Bind all axes in one pycollective.shard_map, or name a communicator inside."
        errors.fail(
            NotImplementedError, "pmap", mesh.comm, f"a program over {mesh!r} by itself", f"one inside {around}", remedy
        )
    with jax.sharding.use_abstract_mesh(jaxprs.NO_MESH):
        program = finish(discharge.discharge(body, mesh))
    if _is_default_device(mesh):
        return program
    places = (body.invars, in_specs), (body.outvars, out_specs)
    type_of, spec_of = functools.cache(partial(_rank_aval, mesh)), functools.cache(partial(local_spec, mesh))
    types = [[type_of(atom.aval, spec) for atom, spec in zip(*pair, strict=True)] for pair in places]
    specs = [list(map(spec_of, each)) for each in (in_specs, out_specs)]
    return jaxprs.on_devices(program, mesh.local_mesh, *types, *specs)


def collective_lines(jaxpr: Any) -> dict[Communicator, list[CollectiveLine]]:
    """Returns for each communicator a description of the program's collectives over axes of its ranks, as lines.

    The ranks compare these lines: they must be the same on all ranks of the communicator.
    """
    lines: dict[Communicator, list[CollectiveLine]] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive in jaxprs.PLAIN:
            continue
        if eqn.primitive in discharge.DEVICE_PROGRAMS:
            mesh, body = eqn.params["mesh"], eqn.params["body"]
            own = [CollectiveLine(repr(mesh)), *discharge.collective_lines(body, mesh)]
            lines.setdefault(mesh.comm, []).extend(own)
        hidden = jaxprs.hidden_program(eqn, ()) if effect in eqn.effects else None
        for inner in jaxprs.inner_jaxprs(eqn) if hidden is None else [hidden.jaxpr]:
            for comm, more in collective_lines(inner).items():
                lines.setdefault(comm, []).extend(more)
    return lines


def replace_device_programs(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Replaces each device program by the program of this rank's devices. It runs after all transforms.

    It also replaces two kinds of primitives with inner functions: primitives of other libraries that hold collectives
    but lack our effect, and JAX's high-level primitives, which JAX would replace when it lowers the program.
    """

    def program(closed: ClosedJaxpr) -> ClosedJaxpr:
        return rewriter(closed) if _has_replaceable(closed.jaxpr) else closed

    def change(eqn: JaxprEqn) -> rewriting.Replacement | None:
        if eqn.primitive in discharge.DEVICE_PROGRAMS:
            if jax.sharding.get_abstract_mesh().empty:
                return program_of_this_rank(**eqn.params)
            return partial(run_on_this_rank, **eqn.params)
        if not _is_replaceable(eqn):
            return None
        if eqn.primitive.name == "shard_map":
            return jaxprs.rebuilt_shard_map(eqn, rewriting.changing(change))
        inner = jaxprs.called_jaxpr(eqn) or jaxprs.hidden_program(eqn, ())
        if inner is not None:
            return partial(rewriting.evaluate, inner, change)
        return lambda *operands: jaxprs.bind_with_jaxprs(eqn, operands, program)

    rewriter = rewriting.Rewriter(change)
    return program(closed)


def _has_replaceable(jaxpr: Any) -> bool:
    return any(map(_is_replaceable, jaxpr.eqns))


def _is_replaceable(eqn: JaxprEqn) -> bool:
    """Returns whether ``replace_device_programs`` replaces an equation or an equation inside it."""
    if eqn.primitive in jaxprs.PLAIN:
        return False
    if eqn.primitive in discharge.DEVICE_PROGRAMS or jaxprs.is_high(eqn):
        return True
    inner = jaxprs.inner_jaxprs(eqn)
    # A primitive of another library may lack the effect of the collectives that it holds.
    hides = effect not in eqn.effects and any(effect in jaxpr.effects for jaxpr in inner)
    return hides or any(map(_has_replaceable, inner))
