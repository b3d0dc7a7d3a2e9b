"""Rules of JAX's transforms that take for granted that nobody batches or differentiates an ordered effect.

JAX refuses to batch its own ordered effects. So its lowering of a while loop whose condition has such an effect is
wrong if the condition is batched: it runs the body for all elements until the last one has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.extend.core import primitives as jax_primitives
from jax.interpreters import mlir

from pycollective.ordering import jax_internals


def mask_batched_loops(effect: jax_internals.OrderedEffect) -> None:
    """Lets each element of a batched while loop end by itself, where the condition of the loop has ``effect``.

    The loop goes on while the condition holds for any element, and an element for which it does not hold keeps its
    values. That is what JAX's own lowering does for a condition without effects. A trip evaluates the condition once,
    and the body once, for all elements: the collectives in them are made for the whole batch.
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
    """``new`` for the elements for which ``which`` is true, else ``old``; these may have more axes than ``which``."""
    return lax.select(lax.broadcast_in_dim(which, new.shape, range(which.ndim)), new, old)
