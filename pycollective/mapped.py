"""A function of one device's arrays over the devices of all ranks, as one primitive.

:func:`jax.shard_map` over an abstract mesh of the full sizes needs no devices: traced on the shapes of the global
arrays it gives one equation, with JAX's checks, JAX's types and the derivatives inside taken. The primitive here holds
that equation's parts, while its operands and results are this rank's own blocks. Its rules for differentiation and
batching transform JAX's equation, on global shapes, so they are JAX's own; what comes out are equations of that kind
again. Where nothing transforms it any more, in the lowering or in a region, it becomes the program of this rank's
devices: its collectives are discharged, sums joined, and the rest runs through :func:`jax.shard_map` where the rank has
several.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import PartitionSpec

from pycollective import buckets, checks, discharge, jaxprs, ordering, turns
from pycollective.checks import AxisName
from pycollective.mesh import Mesh

mapped_p = Primitive("pycollective_map")
mapped_p.multiple_results = True


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


def whole(mesh: Mesh, x: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    """The global array of which ``x`` is this rank's own block."""
    shape = _times(mesh, spec, x.shape, "ranks")
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=getattr(x, "weak_type", False))


# The primitive --------------------------------------------------------------------------------------------------


def trace(
    fun: Callable[..., Any],
    mesh: Mesh,
    arrays: Sequence[Any],
    *,
    in_specs: Any,
    out_specs: Any,
    check_vma: bool,
    arguments: Callable[[Sequence[Any]], Sequence[Any]] = tuple,
) -> tuple[ClosedJaxpr, Any]:
    """The jaxpr of :func:`jax.shard_map` of ``fun`` on global arrays, and the structure of its results.

    Args:
        fun: from one device's blocks to one device's blocks; may name the axes of ``mesh``.
        mesh: binds them.
        arrays: of the shapes of the global arrays.
        in_specs: as that of :func:`jax.shard_map`.
        out_specs: the same.
        check_vma: the same.
        arguments: makes those of ``fun`` from arrays.
    """
    program = _shard_map(fun, mesh, in_specs, out_specs, check_vma)
    with checks.naming_axes(*mesh.shape), jax.sharding.use_abstract_mesh(jaxprs.NO_MESH):
        closed, results = jax.make_jaxpr(lambda *xs: program(*arguments(xs)), return_shape=True)(*arrays)
    return closed, jax.tree.structure(results)


def _shard_map(fun: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, check_vma: bool) -> Any:
    return jax.shard_map(fun, mesh=mesh.abstract_mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def collectives(closed: ClosedJaxpr, mesh: Mesh) -> list[str]:
    """One line for each collective over the axes in a jaxpr of :func:`trace`."""
    bodies = [eqn.params["jaxpr"] for eqn in closed.jaxpr.eqns if eqn.primitive.name == "shard_map"]
    return [line for body in bodies for line in discharge.collectives(body, frozenset(mesh.shape))]


def apply(closed: ClosedJaxpr, mesh: Mesh, args: Sequence[Any]) -> list[Any]:
    """A jaxpr of :func:`trace`, or one that JAX made of such, on this rank's own blocks.

    Returns:
        The results; None for what depends on no argument: zeros, where JAX made the jaxpr.
    """
    values: dict[Any, Any] = dict(
        zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *args], strict=True)
    )
    used = {var for eqn in closed.jaxpr.eqns for var in eqn.invars if not isinstance(var, Literal)}
    used |= {var for var in closed.jaxpr.outvars if not isinstance(var, Literal)}
    for eqn in closed.jaxpr.eqns:
        operands = [var.val if isinstance(var, Literal) else values.get(var) for var in eqn.invars]
        if eqn.primitive.name == "shard_map":
            if not eqn.effects and used.isdisjoint(eqn.outvars):
                continue
            assert all(x is not None for x in operands), "a constant of global shape"
            results: Sequence[Any] = mapped_p.bind(*operands, **_params(eqn, mesh))
        elif any(x is None for x in operands) or all(isinstance(var, Literal) for var in eqn.invars):
            continue
        else:  # such as the division of a cotangent by the number of devices that share it
            results = jaxprs.bind(eqn, operands, eqn.params)
            assert all(y.shape in {jnp.shape(x) for x in operands} for y in results), (
                f"{eqn.primitive} is not elementwise"
            )
        values.update(zip(eqn.outvars, results, strict=True))
    return [None if isinstance(var, Literal) else values.get(var) for var in closed.jaxpr.outvars]


def _params(eqn: JaxprEqn, mesh: Mesh) -> dict[str, Any]:
    body = eqn.params["jaxpr"]
    kinds = frozenset(ordering.without_references(eqn.effects))
    if discharge.speaks(body, frozenset(mesh.shape)):
        kinds |= {ordering.effect}
    return {
        "body": body,
        "mesh": mesh,
        "in_specs": tuple(eqn.params["in_specs"]),
        "out_specs": tuple(eqn.params["out_specs"]),
        "check_vma": eqn.params["check_vma"],
        "kinds": kinds,
        "devices": None if _on_default_device(mesh) else _devices(mesh),
    }


def _on_default_device(mesh: Mesh) -> bool:
    """Whether JAX runs a program there by default."""
    return mesh.devices == turns.default_devices()


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
        checks.fail(
            NotImplementedError, "pmap", mesh.comm, f"a program over {mesh!r} by itself", f"one inside {around}", remedy
        )

    def one_device(*blocks: Any) -> list[Any]:
        avals = [jaxprs.aval_like(var.aval) for var in body.invars]
        local = [(axis.local_name, axis.local) for axis in mesh.axes if axis.local > 1]
        program = jax.make_jaxpr(discharge.discharge(body, mesh), axis_env=local)(*avals)
        joined = ClosedJaxpr(buckets.join_reductions(program.jaxpr), program.consts)
        return jaxprs.evaluate(joined, lambda eqn, operands: jaxprs.bind(eqn, operands, eqn.params), *blocks)

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


discharge.PROGRAMS[mapped_p] = run


def expand(closed: ClosedJaxpr) -> ClosedJaxpr:
    """A program that nothing transforms any more, with each :data:`mapped_p` in it replaced."""
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
        if eqn.primitive is mapped_p:
            return run(*operands, **eqn.params)
        if not any(map(_holds, jaxprs.inner_jaxprs(eqn))):
            return jaxprs.bind(eqn, operands, eqn.params)
        if eqn.primitive.name == "shard_map":
            return jaxprs.rebuilt_shard_map(eqn, equation)(*operands)
        if (inner := jaxprs.called(eqn)) is not None:
            return jaxprs.evaluate(inner, equation, *operands)
        return jaxprs.bind_mapped(eqn, operands, changed)

    return changed(closed)


def _holds(jaxpr: Any) -> bool:
    return any(eqn.primitive is mapped_p or any(map(_holds, jaxprs.inner_jaxprs(eqn))) for eqn in jaxpr.eqns)


@mapped_p.def_effectful_abstract_eval
def _abstract_eval(
    *args: Any, body: Any, mesh: Mesh, in_specs: Any, out_specs: Any, kinds: Any, **_: Any
) -> tuple[list[Any], Any]:
    for x, var, spec in zip(args, body.invars, in_specs, strict=True):
        own = _times(mesh, spec, var.aval.shape, "local")
        assert x.shape == own, f"{x.shape} in the place of {own}"
    results = [
        ordering.result(_times(mesh, spec, var.aval.shape, "local"), var.aval.dtype, *args)
        for var, spec in zip(body.outvars, out_specs, strict=True)
    ]
    return results, set(kinds)


mapped_p.def_impl(run)
mlir.register_lowering(mapped_p, mlir.lower_fun(run, multiple_results=True))


# Derivatives and batches: JAX's own, of the equation on global arrays ---------------------------------------------


def _function(
    body: Any, mesh: Mesh, in_specs: Sequence[PartitionSpec], out_specs: Sequence[PartitionSpec], check_vma: bool
) -> Callable[..., list[Any]]:
    function: Callable[..., list[Any]] = _shard_map(
        jaxprs.function(body), mesh, tuple(in_specs), list(out_specs), check_vma
    )
    return function


def _jaxpr(fun: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    with jax.sharding.use_abstract_mesh(jaxprs.NO_MESH):
        return jax.make_jaxpr(fun)(*args)


def _jvp_rule(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    body: Any,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    check_vma: bool,
    **_: Any,
) -> Any:
    function = _function(body, mesh, in_specs, out_specs, check_vma)
    places = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    operands = list(map(partial(whole, mesh), primals, in_specs))
    tree: Any = None

    def forward(*operands: Any) -> list[Any]:
        nonlocal tree
        values = [operands[i] for i in places]
        outs, linear = jax.linearize(lambda *values: function(*jaxprs.replaced(operands, places, values)), *values)
        leaves, tree = jax.tree.flatten(linear)
        return [*outs, *leaves]

    first = _jaxpr(forward, *operands)
    results = apply(first, mesh, primals)
    outs = results[: len(out_specs)]
    residuals = [
        var.val if isinstance(var, Literal) else x for var, x in zip(first.jaxpr.outvars, results, strict=True)
    ][len(out_specs) :]

    def linear(*args: Any) -> list[Any]:
        derivative = jax.tree.unflatten(tree, args[: len(residuals)])
        return list(derivative(*args[len(residuals) :]))

    directions = [tangents[i] for i in places]
    second = _jaxpr(
        linear,
        *(jaxprs.aval_like(aval) for aval in first.out_avals[len(out_specs) :]),
        *(whole(mesh, t, in_specs[i]) for t, i in zip(directions, places, strict=True)),
    )
    derivatives = apply(second, mesh, [*residuals, *directions])
    return outs, [_or_zero(t, y) for t, y in zip(derivatives, outs, strict=True)]


def _or_zero(ct: Any, x: Any) -> Any:
    return ad.Zero(jax.typeof(x).to_tangent_aval()) if ct is None else ct


def _transpose_rule(
    cts: Sequence[Any],
    *args: Any,
    body: Any,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    check_vma: bool,
    **_: Any,
) -> list[Any]:
    function = _function(body, mesh, in_specs, out_specs, check_vma)
    linear = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    known = [i for i in range(len(args)) if i not in linear]
    wanted = [i for i, ct in enumerate(cts) if type(ct) is not ad.Zero]
    wholes = [whole(mesh, x.aval if i in linear else x, in_specs[i]) for i, x in enumerate(args)]

    def transposed(*values: Any) -> Any:
        constants, given = values[: len(known)], values[len(known) :]

        def of_linear(*operands: Any) -> list[Any]:
            everything = jaxprs.replaced(jaxprs.replaced(wholes, known, constants), linear, operands)
            results = function(*everything)
            return [results[i] for i in wanted]

        return jax.linear_transpose(of_linear, *(wholes[i] for i in linear))(list(given))

    closed = _jaxpr(transposed, *(wholes[i] for i in known), *(whole(mesh, cts[i], out_specs[i]) for i in wanted))
    results = apply(closed, mesh, [*(args[i] for i in known), *(cts[i] for i in wanted)])
    zeros = [
        ad.Zero(args[i].aval.to_tangent_aval()) if ct is None else ct for i, ct in zip(linear, results, strict=True)
    ]
    return jaxprs.replaced([None] * len(args), linear, zeros)


def _batching_rule(
    axis_data: Any,
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    body: Any,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    check_vma: bool,
    **_: Any,
) -> Any:
    # Inside, each device has the whole batch. A name that the mesh hides is not that of the batch there.
    named = {} if axis_data.name in mesh.shape else {"axis_name": axis_data.name}
    if named:
        discharge.refuse_mixed(body, mesh, axis_data.name)
    axes = [None if dim is None else 0 for dim in dims]
    operands = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(args, dims, strict=True)]
    specs = [spec if axis is None else _behind(spec) for spec, axis in zip(in_specs, axes, strict=True)]
    batched = jax.vmap(jaxprs.function(body), in_axes=axes, axis_size=axis_data.size, **named)
    function = _shard_map(
        lambda *blocks: batched(*blocks), mesh, tuple(specs), list(map(_behind, out_specs)), check_vma
    )
    closed = _jaxpr(function, *map(partial(whole, mesh), operands, specs))
    return apply(closed, mesh, operands), [0] * len(out_specs)


def _behind(spec: PartitionSpec) -> PartitionSpec:
    return PartitionSpec(None, *spec)


ad.primitive_jvps[mapped_p] = _jvp_rule
ad.primitive_transposes[mapped_p] = _transpose_rule
batching.fancy_primitive_batchers[mapped_p] = _batching_rule
