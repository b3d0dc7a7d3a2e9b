"""Sums over an axis that do not depend on each other, joined into one call: a whole gradient tree at the price of one.

:func:`jax.lax.psum` makes one equation for each leaf of a tree, :func:`jax.lax.pmean` divides behind each, and a
program may write several in a row. The transport packs what one call carries; here such equations become one call. A
sum moves back to the last of its bucket, and what reads it with it; nothing moves past another collective.

Only named axes: a program that names them is the same on all ranks. One that names a communicator may differ from rank
to rank in what depends on what, so there only the leaves of one tree travel together.
"""

from __future__ import annotations

import math
import operator
from typing import Any

from jax.extend.core import JaxprEqn, Var

from pycollective.config import config
from pycollective.named_axes.mesh import DeviceGroup
from pycollective.ordering.jaxprs import map_jaxprs
from pycollective.primitives.reductions import allreduce_p


def join_reductions(jaxpr: Any) -> Any:
    """The same program with fewer, larger calls."""
    return map_jaxprs(jaxpr, _join)


def _join(jaxpr: Any) -> Any:
    joined = _Joined()
    for eqn in jaxpr.eqns:
        joined.add(eqn)
    joined.flush()
    same = len(joined.eqns) == len(jaxpr.eqns) and all(map(operator.is_, joined.eqns, jaxpr.eqns))
    return jaxpr if same else jaxpr.replace(eqns=joined.eqns)


class _Joined:
    """Equations in their new order, and those that wait for their bucket."""

    def __init__(self) -> None:
        self.eqns: list[JaxprEqn] = []
        self._bucket: list[JaxprEqn] = []  # alike but for their operands
        self._waiting: list[JaxprEqn] = []  # read results of the bucket
        self._late: set[Var] = set()  # results of both
        self._nbytes = 0

    def add(self, eqn: JaxprEqn) -> None:
        joins = eqn.primitive is allreduce_p and isinstance(eqn.params["comm"], DeviceGroup)
        reads_late = any(isinstance(var, Var) and var in self._late for var in eqn.invars)
        if joins:
            if self._bucket and (reads_late or not _alike(eqn, self._bucket[0])):
                self.flush()
            self._bucket.append(eqn)
            self._late.update(eqn.outvars)
            self._nbytes += sum(math.prod(var.aval.shape) * var.aval.dtype.itemsize for var in eqn.invars)
            if self._nbytes >= config.bucket_bytes:
                self.flush()
        elif eqn.effects:  # another collective, or something else whose place matters
            self.flush()
            self.eqns.append(eqn)
        elif reads_late:
            self._waiting.append(eqn)
            self._late.update(eqn.outvars)
        else:
            self.eqns.append(eqn)

    def flush(self) -> None:
        if len(self._bucket) > 1:
            first = self._bucket[0]
            in_place = tuple(hint for eqn in self._bucket for hint in eqn.params["in_place"])
            self.eqns.append(
                first.replace(
                    invars=[var for eqn in self._bucket for var in eqn.invars],
                    outvars=[var for eqn in self._bucket for var in eqn.outvars],
                    params={**first.params, "in_place": in_place},
                )
            )
        else:
            self.eqns += self._bucket
        self.eqns += self._waiting
        self._bucket, self._waiting, self._late, self._nbytes = [], [], set(), 0


def _alike(a: JaxprEqn, b: JaxprEqn) -> bool:
    return (a.params["comm"], a.params["op"]) == (b.params["comm"], b.params["op"])
