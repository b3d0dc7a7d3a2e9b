"""Replacements of JAX's rules that assume that equations with an ordered effect are never batched or differentiated.

JAX refuses to batch its own ordered effects, and :func:`jax.checkpoint` does not repeat them. So two of its rules are
wrong, or costly, for our effect:

- if the condition of a while loop has an ordered effect and is batched, the body runs for all elements until the last
  element has ended, and the elements that have ended earlier do not keep their results;
- :func:`jax.checkpoint` keeps each result of an equation with an effect, independently of its policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Primitive, Var, jaxpr_as_fun
from jax.extend.core import primitives as jax_primitives
from jax.interpreters import mlir
from jax.interpreters.partial_eval import partial_eval_jaxpr_custom_rules

from pycollective.jax_support import jax_internals
from pycollective.jax_support.jaxprs import inner_jaxprs

# While loops ----------------------------------------------------------------------------------------------------


def mask_batched_loops(effect: jax_internals.OrderedEffect) -> None:
    """Lets each element of a batched while loop end by itself, if the condition of the loop has ``effect``.

    The loop runs as long as the condition is true for some element. An element for which it is false keeps its values.
    JAX's own lowering does the same for a condition without effects. An iteration evaluates the condition and the body
    once for all elements, so each collective in them is one call for the whole batch.
    """

    def lowering(
        ctx: Any, *args: Any, cond_jaxpr: Any, body_jaxpr: Any, cond_nconsts: int, body_nconsts: int
    ) -> Sequence[Any]:
        if effect not in cond_jaxpr.effects or not cond_jaxpr.out_avals[0].shape:
            numbers = {"cond_nconsts": cond_nconsts, "body_nconsts": body_nconsts}
            results: Sequence[Any] = jax_internals.while_lowering(
                ctx, *args, cond_jaxpr=cond_jaxpr, body_jaxpr=body_jaxpr, **numbers
            )
            return results
        cond, body = jaxpr_as_fun(cond_jaxpr), jaxpr_as_fun(body_jaxpr)

        def loop(*args: Any) -> list[Any]:
            of_cond, of_body = args[:cond_nconsts], args[cond_nconsts : cond_nconsts + body_nconsts]

            def trip(state: Any) -> Any:
                going, carry = state
                new = body(*of_body, *carry)
                carry = [_select(going, *pair) for pair in zip(new, carry, strict=True)]
                return cond(*of_cond, *carry)[0], carry

            carry = list(args[cond_nconsts + body_nconsts :])
            first = cond(*of_cond, *carry)[0]
            outs: list[Any] = lax.while_loop(lambda state: state[0].any(), trip, (first, carry))[1]
            return outs

        lowered: Sequence[Any] = mlir.lower_fun(loop)(ctx, *args)
        return lowered

    mlir.register_lowering(jax_primitives.while_p, lowering)


def _select(which: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Selects ``new`` where ``which`` is true, else ``old``; both may have more axes than ``which``."""
    return lax.select(lax.broadcast_in_dim(which, new.shape, range(which.ndim)), new, old)


# Rematerialisation ----------------------------------------------------------------------------------------------

Split = tuple[JaxprEqn | None, JaxprEqn | None, Sequence[bool], Sequence[bool], list[Var]]
"""The result of a rule for :func:`jax.checkpoint` for one equation, five items.

The equation of the forward program; the equation of the backward program; for each result whether the forward program
does not compute it; for each result whether the backward program has it; and the variables that the backward program
needs from the forward program.
"""

_collectives: set[Primitive] = set()


def repeat_by_policy(primitive: Primitive) -> None:
    """Lets :func:`jax.checkpoint` repeat equations of a collective in the backward program, if its policy says so.

    All ranks make a collective, so all ranks repeat it. A message (send, recv) is not repeated, since the program of
    the peer need not be under a checkpoint. Its result is kept, as JAX does for all effects.
    """
    _collectives.add(primitive)
    partial_eval_jaxpr_custom_rules[primitive] = _split


def _is_repeatable(eqn: JaxprEqn) -> bool:
    """Whether all effects of an equation are those of collectives that a backward program may repeat."""
    inner = inner_jaxprs(eqn)
    return (
        eqn.primitive in _collectives
        or not jax_internals.effects_kept_by_checkpoint(eqn.effects)
        or (bool(inner) and all(_is_repeatable(each) for jaxpr in inner for each in jaxpr.eqns))
    )


def left_to_backward(inst_in: Sequence[bool], eqn: JaxprEqn) -> Split:
    """Leaves an equation with an unknown operand to the backward program."""
    count = len(eqn.outvars)
    return None, eqn, [True] * count, [True] * count, _needed(inst_in, eqn)


def _needed(inst_in: Sequence[bool], eqn: JaxprEqn) -> list[Var]:
    """Returns the variables of the forward program that the backward program needs for an equation."""
    return [var for var, inst in zip(eqn.invars, inst_in, strict=True) if isinstance(var, Var) and not inst]


def _split(saveable: Callable[..., Any], unks_in: Sequence[bool], inst_in: Sequence[bool], eqn: JaxprEqn) -> Split:
    """JAX's default rule, except that an equation of collectives counts as an equation without effects."""
    count = len(eqn.outvars)
    if any(unks_in):
        return left_to_backward(inst_in, eqn)
    policy = saveable(eqn.primitive, *(var.aval for var in eqn.invars), **eqn.params)
    if not _is_repeatable(eqn) or jax_internals.saves(policy):
        return eqn, None, [False] * count, [False] * count, []
    return eqn, eqn, [False] * count, [True] * count, _needed(inst_in, eqn)


for _primitive in (
    jax_internals.linear_call_p,
    jax_primitives.linear_solve_p,
    jax_primitives.custom_jvp_call_p,
    jax_primitives.custom_vjp_call_p,
):
    # JAX has no rule for these, which may hold collectives.
    partial_eval_jaxpr_custom_rules.setdefault(_primitive, _split)
