"""Device programs under :func:`jax.checkpoint`: the residuals of the forward program, and the repeated program.

JAX asks the policy for each equation inside, as under :func:`jax.pmap` and :func:`jax.shard_map`. The device program is
split into two. The first returns all results and the residuals that the policy saves. The second, in the backward pass,
computes from these the values that the derivative needs. Equations that are not needed are removed from both programs,
collectives included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Primitive, Var
from jax.interpreters.partial_eval import dce_jaxpr, dce_rules, partial_eval_jaxpr_custom_rules
from jax.sharding import PartitionSpec

from pycollective.jax_support import jax_internals
from pycollective.ordering import transforms
from pycollective.spmd import device_program
from pycollective.spmd.device_program import names_of

WithAxesBound = Callable[[dict[str, Any], Callable[[], Any]], Any]
"""Calls a function in a context in which the axes of a program with these parameters are bound."""


def register(
    primitive: Primitive, with_axes_bound: WithAxesBound, own_axes: Callable[[dict[str, Any], Any], Sequence[Any]]
) -> None:
    """Registers the rules of a device program for :func:`jax.checkpoint`.

    Args:
        primitive: the primitive.
        with_axes_bound: see :data:`WithAxesBound`.
        own_axes: a function that returns the axes along which a value may differ between devices, from the parameters
            and the type of a value inside.
    """
    partial_eval_jaxpr_custom_rules[primitive] = partial(_partial_eval_rule, with_axes_bound, own_axes)
    dce_rules[primitive] = partial(_dce_rule, with_axes_bound)


def call_inside(trace: Callable[[Callable[[], Any]], Any], call: Callable[[], Any]) -> Any:
    """Returns the result of ``call`` inside a function that ``trace`` traces, that is, in the context of the trace."""
    returned = []

    def fun() -> tuple[()]:
        returned.append(call())
        return ()

    trace(fun)
    return returned[0]


def _part(
    eqn: JaxprEqn,
    body: Any,
    operands: Sequence[tuple[Any, PartitionSpec]],
    results: Sequence[tuple[Any, PartitionSpec]],
    *,
    repeated: bool,
) -> JaxprEqn:
    """A part of a device program as an equation.

    Args:
        eqn: the equation of the whole program.
        body: the jaxpr of the part.
        operands: the operands and their specs.
        results: the variables and specs of the results; None stands for a new variable.
        repeated: see :func:`device_program.parameters`.
    """
    mesh = eqn.params["mesh"]
    (invars, in_specs), (outvars, out_specs) = _unzipped(operands), _unzipped(results)
    effects = jax_internals.without_names(body.effects, mesh.shape)
    of_part = device_program.parameters(mesh, body, in_specs, out_specs, effects, repeated=repeated)
    params = {**eqn.params, **of_part}
    avals, own_effects = device_program.abstract_eval(*(var.aval for var in invars), **params)
    outvars = [Var(aval) if var is None else var for var, aval in zip(outvars, avals, strict=True)]
    return eqn.replace(invars=invars, outvars=outvars, params=params, effects=own_effects)


def _partial_eval_rule(
    with_axes_bound: WithAxesBound,
    own_axes: Callable[[dict[str, Any], Any], Sequence[Any]],
    saveable: Callable[..., Any],
    unks_in: Sequence[bool],
    inst_in: Sequence[bool],
    eqn: JaxprEqn,
) -> transforms.Split:
    """The rule of a device program for :func:`jax.checkpoint`.

    A program with an unknown operand is linear in it: the jvp rule has put everything else into another program.
    """
    if any(unks_in):
        return transforms.left_to_backward(inst_in, eqn)
    params, count = eqn.params, len(eqn.outvars)
    operands = list(zip(eqn.invars, params["in_specs"], strict=True))
    results = list(zip(eqn.outvars, params["out_specs"], strict=True))
    divide = partial(jax_internals.divided_by_policy, params["body"], inst_in, saveable)
    first, second, inst_out = with_axes_bound(params, divide)
    residuals = first.outvars[count:]
    assert second.invars[: len(residuals)] == residuals, "residuals in another order"

    # The variable and spec of each residual. It may be an operand, or a result with the spec of a new residual.
    places = dict(zip(first.invars, operands, strict=True))
    for var, (result, spec) in zip(first.outvars, results, strict=False):
        has_new_spec = isinstance(var, Var) and set(names_of(spec)) == set(own_axes(params, var.aval))
        if has_new_spec and type(result) is Var:  # not a result without readers
            places.setdefault(var, (result, spec))
    new = [var for var in residuals if var not in places]
    specs = [PartitionSpec(tuple(own_axes(params, var.aval))) for var in new]
    # A scalar residual gets an axis with the devices' own scalars.
    kept = {var: Var(jax_internals.result((1,), var.aval.dtype, var.aval)) for var in new if not var.aval.shape}
    expand, squeeze = partial(lax.expand_dims, dimensions=(0,)), partial(lax.squeeze, dimensions=(0,))

    outvars = [*first.outvars[:count], *(kept.get(var, var) for var in new)]
    body = first.replace(outvars=outvars, eqns=[*first.eqns, *(_equation(expand, x, y) for x, y in kept.items())])
    new_results = [(None, spec) for spec in specs]
    forward = _part(eqn, body, operands, [*results, *new_results], repeated=False)
    places |= dict(zip(new, zip(forward.outvars[count:], specs, strict=True), strict=True))

    of_residuals = [places[var] for var in residuals]
    invars = [*(kept.get(var, var) for var in residuals), *second.invars[len(residuals) :]]
    body = second.replace(invars=invars, eqns=[*(_equation(squeeze, y, x) for x, y in kept.items()), *second.eqns])
    wanted = _chosen(results, inst_out)
    backward = _part(eqn, body, [*of_residuals, *_chosen(operands, inst_in)], wanted, repeated=True)
    needed = [var for var, _ in of_residuals if isinstance(var, Var)]
    return forward, backward if wanted else None, [False] * count, inst_out, needed


def _chosen(items: Iterable[Any], which: Sequence[bool]) -> list[Any]:
    return [item for item, chosen in zip(items, which, strict=True) if chosen]


def _unzipped(pairs: Sequence[tuple[Any, PartitionSpec]]) -> tuple[list[Any], list[PartitionSpec]]:
    return [var for var, _ in pairs], [spec for _, spec in pairs]


def _equation(fun: Callable[[Any], Any], operand: Var, result: Var) -> JaxprEqn:
    """Returns the equation of a function with one operand that is one primitive of JAX."""
    struct = jax.ShapeDtypeStruct(operand.aval.shape, operand.aval.dtype)
    (eqn,) = jax.make_jaxpr(fun)(struct).jaxpr.eqns
    return eqn.replace(invars=[operand], outvars=[result])


def _dce_rule(with_axes_bound: WithAxesBound, used: Sequence[bool], *rest: Any) -> tuple[list[bool], JaxprEqn | None]:
    """The rule for dead-code elimination: a repeated program loses collectives whose results are not used.

    Other programs keep all their collectives: one rank may read a result that another rank does not read, and both must
    make the call.
    """
    eqn = rest[-1]  # from JAX 0.12 on, an argument before it says which references are read
    params = eqn.params
    body, read, effects = params["body"], [True] * len(eqn.invars), eqn.effects
    if params["repeated"]:
        body, read = with_axes_bound(params, partial(dce_jaxpr, body, list(used)))
        effects = body.effects
    if not any(used) and not jax_internals.effects_kept_by_checkpoint(effects):
        return [False] * len(eqn.invars), None
    if not params["repeated"]:
        return read, eqn
    operands = zip(eqn.invars, params["in_specs"], strict=True)
    results = zip(eqn.outvars, params["out_specs"], strict=True)
    return read, _part(eqn, body, _chosen(operands, read), _chosen(results, used), repeated=True)
