"""Device programs with the meaning of :func:`jax.pmap`: the cotangent of a collective is always a collective.

A function is traced with the axes bound and without a surrounding mesh. So its values have no types of a mesh, and it
may use meshes of its own. The rules for differentiation and batching transform this function. Each device keeps its own
residuals. As in :func:`jax.shard_map` with ``check_vma=False``, an operand that several devices share gets the sum of
their cotangents, and each of N devices that share a result gets ``1 / N`` of its cotangent.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, Var
from jax.interpreters import ad, batching
from jax.sharding import PartitionSpec

from pycollective.jax_support import jax_internals, jaxprs
from pycollective.named_axes.mesh import Mesh
from pycollective.named_axes.names import explain_unbound_names
from pycollective.spmd import checkpoints, device_program
from pycollective.spmd.device_program import device_aval, names_of, zero_if_none

pmap_p = device_program.new_primitive("pycollective_pmap")

Specs = Sequence[PartitionSpec]


def trace(fun: Callable[..., Any], mesh: Mesh, arrays: Sequence[Any], specs: Specs) -> tuple[ClosedJaxpr, Any]:
    """Traces a function of one device's blocks. Returns its jaxpr, and the tree structure of its results.

    Args:
        fun: the function; it may name the axes of ``mesh``.
        mesh: the mesh, whose axes are bound.
        arrays: this rank's own blocks of the arguments.
        specs: the spec of each argument.
    """
    blocks = [device_aval(mesh, *pair) for pair in zip(arrays, specs, strict=True)]
    with explain_unbound_names(*mesh.shape), _axes_bound(mesh):
        closed, results = jax.make_jaxpr(fun, return_shape=True)(*blocks)
    return closed, jax.tree.structure(results)


def apply(closed: ClosedJaxpr, mesh: Mesh, args: Sequence[Any], in_specs: Specs, out_specs: Specs) -> list[Any]:
    """Applies a jaxpr of :func:`trace` to this rank's own blocks. All devices share its constants."""
    body = jaxprs.with_constants_as_inputs(closed.jaxpr)
    shared = [PartitionSpec()] * len(closed.consts)
    effects = jax_internals.without_names(body.effects, mesh.shape)
    return list(
        pmap_p.bind(
            *closed.consts, *args, **device_program.parameters(mesh, body, [*shared, *in_specs], out_specs, effects)
        )
    )


@contextlib.contextmanager
def _axes_bound(mesh: Mesh) -> Iterator[None]:
    with jax_internals.axes_bound(mesh.shape), jax.sharding.use_abstract_mesh(jaxprs.NO_MESH):
        yield


def _traced(fun: Callable[..., Any], mesh: Mesh, blocks: Sequence[Any]) -> ClosedJaxpr:
    with _axes_bound(mesh):
        return jax.make_jaxpr(fun)(*blocks)


def _block_avals(body: Any) -> list[Any]:
    return [jaxprs.aval_like(var.aval) for var in body.invars]


def _jvp_rule(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    body: Any,
    mesh: Mesh,
    in_specs: Specs,
    out_specs: Specs,
    **_: Any,
) -> Any:
    function = jaxprs.as_function(body)
    places = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    tree: Any = None

    def forward(*operands: Any) -> list[Any]:
        nonlocal tree
        values = [operands[i] for i in places]
        outs, linear = jax.linearize(lambda *values: function(*jaxprs.replaced(operands, places, values)), *values)
        leaves, tree = jax.tree.flatten(linear)
        scalars.extend(jnp.ndim(x) == 0 for x in leaves)
        return [*outs, *(jnp.expand_dims(x, 0) if jnp.ndim(x) == 0 else x for x in leaves)]

    # Two programs: the first needs no tangents, and the second is linear in them. Reverse mode keeps the results of the
    # first program and transposes the second.
    scalars: list[bool] = []  # whether a residual is a scalar: then it gets an axis with the devices' own scalars
    first = _traced(forward, mesh, _block_avals(body))
    outs, residuals, specs = _with_residuals(first, mesh, primals, in_specs, out_specs)

    def linear(*args: Any) -> list[Any]:
        leaves = [jnp.squeeze(x, 0) if scalar else x for x, scalar in zip(args, scalars, strict=False)]
        return list(jax.tree.unflatten(tree, leaves)(*args[len(scalars) :]))

    blocks = [jaxprs.aval_like(aval) for aval in first.out_avals[len(out_specs) :]]
    second = _traced(linear, mesh, [*blocks, *(device_aval(mesh, tangents[i], in_specs[i]) for i in places)])
    args = [*residuals, *(tangents[i] for i in places)]
    derivatives = _apply_where_dependent(second, mesh, args, [*specs, *(in_specs[i] for i in places)], out_specs)
    return outs, [zero_if_none(t, jax.typeof(y)) for t, y in zip(derivatives, outs, strict=True)]


def _with_residuals(
    closed: ClosedJaxpr, mesh: Mesh, args: Sequence[Any], in_specs: Specs, out_specs: Specs
) -> tuple[list[Any], list[Any], list[PartitionSpec]]:
    """Applies a jaxpr that returns results, followed by residuals for the derivative.

    A residual that is also an operand or a result is not returned again by the program.

    Returns:
        The results, the residuals, and the specs of the residuals.
    """
    jaxpr, count = closed.jaxpr, len(out_specs)
    known: dict[Any, tuple[Any, PartitionSpec]] = {
        **dict(zip(jaxpr.constvars, ((x, PartitionSpec()) for x in closed.consts), strict=True)),
        **dict(zip(jaxpr.invars, zip(args, in_specs, strict=True), strict=True)),
    }
    results = list(jaxpr.outvars[:count])
    new = [var for var in jaxpr.outvars[count:] if isinstance(var, Var) and var not in known and var not in results]
    new = list(dict.fromkeys(new))
    own = PartitionSpec(tuple(mesh.shape))  # the devices' own residuals, concatenated along the first axis
    reduced = ClosedJaxpr(jaxpr.replace(outvars=[*results, *new]), closed.consts)
    specs = [*out_specs, *[own] * len(new)]
    values = apply(reduced, mesh, args, in_specs, specs)
    known.update(
        (var, pair)
        for var, pair in zip([*results, *new], zip(values, specs, strict=True), strict=True)
        if isinstance(var, Var)
    )
    pairs = [(var.val, PartitionSpec()) if isinstance(var, Literal) else known[var] for var in jaxpr.outvars[count:]]
    return values[:count], [x for x, _ in pairs], [spec for _, spec in pairs]


def _apply_where_dependent(
    closed: ClosedJaxpr, mesh: Mesh, args: Sequence[Any], in_specs: Specs, out_specs: Specs
) -> list[Any]:
    """Applies a jaxpr as :func:`apply` does. A result that depends on no operand is None: its derivative is zero."""
    reached = jaxprs.dependents(closed.jaxpr, closed.jaxpr.invars)
    outvars = closed.jaxpr.outvars
    places = [i for i, var in enumerate(outvars) if isinstance(var, Var) and var in reached]
    # Before JAX 0.10.1 jax.linearize keeps such results as constants of a finished trace, so the program omits them.
    jaxpr = closed.jaxpr.replace(outvars=[outvars[i] for i in places])
    used = jaxprs.all_reads(jaxpr)
    pairs = [pair for pair in zip(jaxpr.constvars, closed.consts, strict=True) if pair[0] in used]
    reduced = ClosedJaxpr(jaxpr.replace(constvars=[var for var, _ in pairs]), [const for _, const in pairs])
    results = apply(reduced, mesh, args, in_specs, [out_specs[i] for i in places])
    return jaxprs.replaced([None] * len(out_specs), places, results)


def _transposed(fun: Callable[..., Any], operands: Sequence[Any], references: bool) -> Callable[..., Any]:
    """Returns the transpose of a linear function.

    :func:`jax.linear_transpose` cannot take functions with references; :func:`jax.vjp` can.
    """
    if not references:
        return jax.linear_transpose(fun, *operands)
    return jax.vjp(fun, *(jnp.zeros(x.shape, x.dtype) for x in operands))[1]


def _transpose_rule(
    cts: Sequence[Any], *args: Any, body: Any, mesh: Mesh, in_specs: Specs, out_specs: Specs, **_: Any
) -> list[Any]:
    function = jaxprs.as_function(body)
    # Indices of the operands that get cotangents, of the other operands, and of the results that have cotangents.
    linear = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    known = [i for i in range(len(args)) if i not in linear]
    wanted = [i for i, ct in enumerate(cts) if type(ct) is not ad.Zero]
    blocks = _block_avals(body)
    references = jax_internals.without_references(body.effects) != body.effects

    def shared_along(spec: PartitionSpec) -> tuple[Any, ...]:
        return tuple(name for name in mesh.shape if name not in names_of(spec))

    def transposed(*values: Any) -> list[Any]:
        constants, given = values[: len(known)], values[len(known) :]

        def of_linear(*operands: Any) -> list[Any]:
            results = function(*jaxprs.replaced(jaxprs.replaced(blocks, known, constants), linear, operands))
            return [results[i] for i in wanted]

        counts = [math.prod(mesh.shape[name] for name in shared_along(out_specs[i])) for i in wanted]
        parts = [ct / count if count > 1 else ct for ct, count in zip(given, counts, strict=True)]
        results = list(_transposed(of_linear, [blocks[i] for i in linear], references)(parts))
        # One sum for all operands that are shared along the same axes.
        for names in dict.fromkeys(shared_along(in_specs[i]) for i in linear):
            places = [k for k, i in enumerate(linear) if shared_along(in_specs[i]) == names]
            if names:
                results = jaxprs.replaced(results, places, lax.psum([results[k] for k in places], names))
        return results

    closed = _traced(
        transposed, mesh, [*(blocks[i] for i in known), *(device_aval(mesh, cts[i], out_specs[i]) for i in wanted)]
    )
    values = [*(args[i] for i in known), *(cts[i] for i in wanted)]
    specs = [*(in_specs[i] for i in known), *(out_specs[i] for i in wanted)]
    results = _apply_where_dependent(closed, mesh, values, specs, [in_specs[i] for i in linear])
    given = [zero_if_none(ct, args[i].aval) for i, ct in zip(linear, results, strict=True)]
    return jaxprs.replaced([None] * len(args), linear, given)


def _batching_rule(
    axis_data: Any,
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    body: Any,
    mesh: Mesh,
    in_specs: Specs,
    out_specs: Specs,
    **_: Any,
) -> Any:
    batch = device_program.batch(axis_data, args, dims, body=body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    blocks = [device_aval(mesh, *pair) for pair in zip(batch.operands, batch.in_specs, strict=True)]
    closed = _traced(batch.function, mesh, blocks)
    return apply(closed, mesh, batch.operands, batch.in_specs, batch.out_specs), batch.out_dims


def _error_check_rule(
    error: Any, enabled: Any, *args: Any, body: Any, mesh: Mesh, in_specs: Specs, out_specs: Specs, **_: Any
) -> tuple[Any, list[Any]]:
    def applied(fun: Callable[..., Any], operands: Sequence[Any], specs: Specs, own: PartitionSpec) -> list[Any]:
        closed = _traced(fun, mesh, [device_aval(mesh, *pair) for pair in zip(operands, specs, strict=True)])
        count = len(closed.jaxpr.outvars) - len(out_specs)
        return apply(closed, mesh, operands, specs, [*[own] * count, *out_specs])

    return device_program.return_errors(error, enabled, args, body=body, mesh=mesh, in_specs=in_specs, apply=applied)


def _check(*, body: Any, mesh: Mesh, **_: Any) -> None:
    """Checks a body under its axes, for ``jax_enable_checks``."""
    with _axes_bound(mesh):
        jax_internals.check(body)


jax_internals.check_with(pmap_p, _check)
jax_internals.return_errors_with(pmap_p, _error_check_rule)
ad.primitive_jvps[pmap_p] = _jvp_rule
ad.primitive_transposes[pmap_p] = _transpose_rule
batching.fancy_primitive_batchers[pmap_p] = _batching_rule
checkpoints.register(
    pmap_p,
    lambda params, call: checkpoints.call_inside(lambda fun: _traced(fun, params["mesh"], ()), call),
    lambda params, _: tuple(params["mesh"].shape),
)
