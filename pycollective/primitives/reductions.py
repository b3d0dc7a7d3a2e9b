"""Reductions over ranks, and the collectives that are their transposes.

The rules of differentiation use the functions of this file, so that cotangents of bfloat16 are summed in float32 as
values are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.interpreters import ad, batching

from pycollective.config import config
from pycollective.jax_support import jax_internals
from pycollective.ordering import transforms
from pycollective.ordering.effect import effect
from pycollective.primitives import define, dtypes
from pycollective.primitives.define import Collective
from pycollective.primitives.passed import Passed
from pycollective.ranks.participants import Participants

Array = jax.Array

# y = op_s x_s over the ranks s, for any number of arrays in one call.
allreduce_p = define.primitive("allreduce", multiple_results=True)
transforms.repeat_by_policy(allreduce_p)


@allreduce_p.def_effectful_abstract_eval
def _allreduce_abstract_eval(*xs: Any, **_: Any) -> Any:
    return [jax_internals.result(x.shape, x.dtype, x) for x in xs], {effect}


def allreduce_attributes(comm: Participants, op: str) -> dict[str, Any]:
    """The attributes of allreduce's handler."""
    return {**define.attributes(comm=comm, op=op), "bucket_bytes": config.bucket_bytes}


define.lower(allreduce_p, allreduce_attributes)


def allreduce_all(xs: Sequence[Array], *, comm: Participants, op: str, passed: Passed | None = None) -> list[Array]:
    """``y = op_s x_s`` for each of ``xs``, on every rank. ``passed``: what the user passed; None: ``xs``."""
    if not xs:
        return []
    wide = [dtypes.wide(x, op) for x in xs]
    ys = allreduce_p.bind(*wide, **_allreduce_parameters(xs, comm, op, passed))
    return [dtypes.narrow(y, x) for y, x in zip(ys, xs, strict=True)]


def _allreduce_parameters(xs: Sequence[Any], comm: Participants, op: str, passed: Passed | None) -> dict[str, Any]:
    passed = Passed.of(xs) if passed is None else passed
    return {"comm": comm, "op": op, "passed": passed, "in_place": (True,) * len(xs)}


def allreduce_equation(like: JaxprEqn, *, comm: Participants, op: str) -> JaxprEqn | None:
    """The one equation of :func:`allreduce_all` for the operands of an equation, with the same results.

    None if :func:`allreduce_all` makes none, or changes the dtype of an operand, which is another equation.
    """
    xs = [atom.aval for atom in like.invars]
    if not xs or not all(dtypes.is_wide(x, op) for x in xs):
        return None
    return like.replace(primitive=allreduce_p, params=_allreduce_parameters(xs, comm, op, None), effects={effect})


def _allreduce_nonzero(
    values: Sequence[Any], zeros: list[Any], *, comm: Participants, op: str, passed: Passed
) -> list[Any]:
    """The reductions of the values that are not symbolic zeros; the other results are those of ``zeros``."""
    places = [i for i, value in enumerate(values) if type(value) is not ad.Zero]
    results = allreduce_all([values[i] for i in places], comm=comm, op=op, passed=passed.at(places))
    for place, result in zip(places, results, strict=True):
        zeros[place] = result
    return zeros


def _allreduce_jvp_rule(
    primals: Sequence[Array],
    tangents: Sequence[Any],
    *,
    comm: Participants,
    op: str,
    passed: Passed,
    in_place: tuple[bool, ...],
) -> Any:
    ys = allreduce_all(primals, comm=comm, op=op, passed=passed)
    zeros = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in ys]
    if op in dtypes.SUMS:
        return ys, _allreduce_nonzero(tangents, zeros, comm=comm, op=op, passed=passed.tangent())
    if op in ("min", "max"):
        # dy = sum_s m_s dx_s / sum_s m_s with m_s = [x_s == y]: the mean over the ranks that hold the extreme. JAX's
        # reduce_max takes the same mean over elements.
        for i, (x, y, t) in enumerate(zip(primals, ys, tangents, strict=True)):
            if type(t) is not ad.Zero:
                mask = (x == y).astype(t.dtype)
                of_tangent = passed.at([i]).tangent()
                # These are two calls: the first must not depend on the tangent, the second must be linear in it.
                (holders,) = allreduce_all([mask], comm=comm, op="sum", passed=of_tangent)
                (total,) = allreduce_all([t * mask], comm=comm, op="sum", passed=of_tangent)
                zeros[i] = total / holders
        return ys, zeros
    remedy = "Use allreduce(x, op=jnp.multiply) for a product, which gathers the arrays, or lax.stop_gradient."
    return define.refuse_derivative("allreduce", "op='sum', 'min' or 'max'", remedy, {"op": op})


def _allreduce_transpose_rule(
    cts: Sequence[Any], *xs: Any, comm: Participants, op: str, passed: Passed, in_place: tuple[bool, ...]
) -> list[Any]:
    # y_r = sum_s x_s  =>  ct_s = sum_r ct_r
    zeros = [ad.Zero(x.aval.to_tangent_aval()) for x in xs]
    return _allreduce_nonzero(cts, zeros, comm=comm, op=op, passed=passed.transpose())


def _allreduce_batching_rule(args: Sequence[Array], dims: Sequence[Any], **params: Any) -> Any:
    return allreduce_p.bind(*args, **params), dims


ad.primitive_jvps[allreduce_p] = _allreduce_jvp_rule
ad.primitive_transposes[allreduce_p] = _allreduce_transpose_rule
batching.primitive_batchers[allreduce_p] = _allreduce_batching_rule


reduce: Collective = Collective(
    "reduce",
    transpose=lambda ct, *, op, **params: bcast(ct, **params),
    in_place=True,
)
"""``y_root = op_s x_s``; zeros on the other ranks."""

bcast: Collective = Collective("bcast", transpose=lambda ct, **params: reduce(ct, op="sum", **params), in_place=True)
"""``y = x_root`` on every rank."""

reduce_scatter: Collective = Collective(
    "reduce_scatter",
    transpose=lambda ct, *, op, **params: allgather(ct, **params),
    operand_blocks=True,
)
"""``y_r = op_s x_s[r]``."""

allgather: Collective = Collective(
    "allgather", transpose=lambda ct, **params: reduce_scatter(ct, op="sum", **params), result_blocks=True
)
"""``y[s] = x_s`` on every rank."""

# y_r = sum_{s <= r} x_s  =>  ct_s = sum_{r >= s} ct_r, which is a scan with the ranks in opposite order.
scan: Collective = Collective(
    "scan", transpose=lambda ct, *, comm, **params: scan(ct, comm=comm._reversed(), **params), in_place=True
)
"""``y_r = op_{s <= r} x_s``."""

exscan: Collective = Collective(
    "exscan",
    transpose=lambda ct, *, comm, **params: exscan(ct, comm=comm._reversed(), **params),
    in_place=True,
    alone=lambda x, **_: jnp.zeros_like(x),
)
"""``y_r = op_{s < r} x_s``; zeros on rank 0."""
