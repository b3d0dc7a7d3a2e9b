"""Joins sums over an axis that do not depend on each other into one call, such as all leaves of a gradient tree.

:func:`jax.lax.psum` makes one equation for each leaf of a tree, :func:`jax.lax.pmean` divides after each of them, and a
program may have several sums in a row. One call of the transport can take any number of arrays. So this pass collects
such equations in a *bucket* and replaces them by one equation, at the place of the last one. Equations that read a
result of the bucket move after it. No equation moves past another collective. Maxima and minima are joined in the same
way.

The pass joins only sums over named axes. A program that names axes has the same sums, in the same order, on all ranks.
In a program that names a communicator, the dependencies between sums may differ between ranks, so there only the leaves
of one tree are joined.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Var

from pycollective.config import config
from pycollective.jax_support.jaxprs import map_jaxprs, reads
from pycollective.named_axes.mesh import DeviceGroup
from pycollective.primitives.reductions import allreduce_p


def join_reductions(jaxpr: Any) -> Any:
    """Returns an equivalent program with fewer and larger calls; ``jaxpr`` itself if no calls can be joined."""
    return map_jaxprs(jaxpr, join_own_reductions)


def join_own_reductions(jaxpr: Any) -> Any:
    """Joins the reductions of a program, and not those of the programs in it."""
    first = next((place for place, eqn in enumerate(jaxpr.eqns) if is_over_axes(eqn)), None)
    if first is None:
        return jaxpr
    joiner = _Joiner(jaxpr.eqns[:first])
    for eqn in jaxpr.eqns[first:]:
        joiner.add(eqn)
    joiner.flush()
    same = len(joiner.eqns) == len(jaxpr.eqns) and all(map(operator.is_, joiner.eqns, jaxpr.eqns))
    return jaxpr if same else jaxpr.replace(eqns=joiner.eqns)


def split_reductions(jaxpr: Any) -> Any:
    """Returns an equivalent program with one call for each operand of its sums over named axes."""
    eqns: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if not is_over_axes(eqn) or len(eqn.invars) == 1:
            eqns.append(eqn)
            continue
        arrays = zip(eqn.invars, eqn.outvars, eqn.params["in_place"], strict=True)
        for i, (operand, result, hint) in enumerate(arrays):
            params = {**eqn.params, "in_place": (hint,), "passed": eqn.params["passed"].at([i])}
            eqns.append(eqn.replace(invars=[operand], outvars=[result], params=params))
    return jaxpr if len(eqns) == len(jaxpr.eqns) else jaxpr.replace(eqns=eqns)


def is_over_axes(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is an allreduce over named axes."""
    return eqn.primitive is allreduce_p and isinstance(eqn.params["comm"], DeviceGroup)


class _Joiner:
    """Takes the equations of a jaxpr one after another, and collects sums in a bucket.

    Attributes:
        eqns: the equations so far, in their new order: at first those before the first sum.
    """

    def __init__(self, eqns: Sequence[JaxprEqn]) -> None:
        self.eqns: list[JaxprEqn] = [*eqns]
        self._bucket: list[JaxprEqn] = []  # sums that differ only in their operands
        self._readers: list[JaxprEqn] = []  # equations that depend on the bucket, so they must follow it
        self._pending: set[Var] = set()  # results of the bucket and of its readers
        self._nbytes = 0  # of the bucket's operands

    def add(self, eqn: JaxprEqn) -> None:
        """Takes the next equation."""
        is_sum = is_over_axes(eqn)
        reads_pending = not self._pending.isdisjoint(reads(eqn))
        if is_sum:
            if self._bucket and (reads_pending or not _alike(eqn, self._bucket[0])):
                self.flush()
            self._bucket.append(eqn)
            self._pending.update(eqn.outvars)
            self._nbytes += sum(math.prod(var.aval.shape) * var.aval.dtype.itemsize for var in eqn.invars)
            if self._nbytes >= config.bucket_bytes:
                self.flush()
        elif eqn.effects:  # another collective, or another equation that must keep its place in the order
            self.flush()
            self.eqns.append(eqn)
        elif reads_pending:
            self._readers.append(eqn)
            self._pending.update(eqn.outvars)
        else:
            self.eqns.append(eqn)

    def flush(self) -> None:
        """Ends the bucket: appends one equation for all its sums, followed by the readers."""
        if len(self._bucket) > 1:
            first = self._bucket[0]
            in_place = tuple(hint for eqn in self._bucket for hint in eqn.params["in_place"])
            dtypes = tuple(dtype for eqn in self._bucket for dtype in eqn.params["passed"].dtypes)
            passed = first.params["passed"]._replace(dtypes=dtypes)
            self.eqns.append(
                first.replace(
                    invars=[var for eqn in self._bucket for var in eqn.invars],
                    outvars=[var for eqn in self._bucket for var in eqn.outvars],
                    params={**first.params, "in_place": in_place, "passed": passed},
                )
            )
        else:
            self.eqns += self._bucket
        self.eqns += self._readers
        self._bucket, self._readers, self._pending, self._nbytes = [], [], set(), 0


def _alike(a: JaxprEqn, b: JaxprEqn) -> bool:
    return (a.params["comm"], a.params["op"]) == (b.params["comm"], b.params["op"])
