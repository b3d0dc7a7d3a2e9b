"""On accelerators: sums between ranks while the device computes what does not need them.

There an allreduce may come in two calls. The first returns when the call is under way, in a thread of the device's; the
second, which has the results, waits for it. XLA sees two kernels like any others and runs one right behind the other,
unless the program says otherwise. So this pass begins each sum as soon as its operands are there, ends it where its
results are needed, and ties what lies between to both:

    a = matmul(...)                  a = matmul(...)
    b = matmul(a)                    s' = start(a)
    s = psum(a)             ->       a', s'' = optimization_barrier(a, s')    # what reads a comes behind the start
    t = psum(b)                      b = matmul(a')
    c = a / s + b / t                t' = start(b)
                                     b', s* = optimization_barrier(b, s'')    # the end comes behind b
                                     s = done(s*)
                                     t = done(t')
                                     c = a' / s + b' / t

Only sums over named axes, from each device to its like on other ranks, and only in an order that all ranks have: where
they compute in different ones, the sums keep their order. Nothing moves past another collective.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Primitive, Var
from jax.interpreters import mlir

from pycollective.errors import message
from pycollective.named_axes.mesh import DeviceGroup
from pycollective.ordering.effect import effect
from pycollective.ordering.jaxprs import all_reads, inner_jaxprs, is_reshape, map_jaxprs, reads
from pycollective.primitives import lowering
from pycollective.primitives.reductions import allreduce_attributes, allreduce_p
from pycollective.ranks import accelerators
from pycollective.ranks.agreement import gather_from_all
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.setup import devices_of_this_rank
from pycollective.transport import native

start_p = Primitive("allreduce_start")
start_p.multiple_results = True
done_p = Primitive("allreduce_done")
done_p.multiple_results = True


@start_p.def_effectful_abstract_eval
def _start_abstract_eval(*xs: Any, **_: Any) -> Any:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in xs], {effect}


@done_p.def_abstract_eval
def _done_abstract_eval(*ys: Any, **_: Any) -> Any:
    return [jax.core.ShapedArray(y.shape, y.dtype) for y in ys]


def _start(params: dict[str, Any]) -> lowering.HandlerCall:
    # Always in place, so that XLA keeps the operands as long as the results; it copies those that are read again.
    in_place = (True,) * params.pop("number")
    rule = native.ffi_lowering("device_allreduce_start", in_place)
    return lowering.HandlerCall(rule, allreduce_attributes(**params))


def _done_lowering(ctx: Any, *ys: Any, comm: DeviceGroup) -> Any:
    if (outs := lowering.lower_on_all_copies(done_p, ctx, ys, {"comm": comm})) is not None:
        return outs
    return native.done_lowering(len(ys))(ctx, *ys, comm=comm.key)


lowering.lower(start_p, None, _start)
mlir.register_lowering(done_p, _done_lowering)


Order = list[int]
"""Of the sums in one jaxpr: their old places, in the order in which they begin."""

Sums = tuple[str, ...]
"""What ranks have in common of a program, whatever they compute between: its sums."""


class Found(NamedTuple):
    """What the pass finds while one program is traced, before all ranks have made the function's first call.

    Attributes:
        free: whether sums take the order that this rank finds; else they keep their own.
        orders: of the sums.
        comms: their ranks; a set that keeps its order.
    """

    free: bool
    orders: dict[Sums, list[Order]]
    comms: dict[Communicator, None]


class Overlap:
    """The pass for the programs of one function: which orders of its sums all ranks have.

    Ranks compare what they find when all of them make the function's first call, :meth:`settle`. A program that is
    traced later, by this rank alone perhaps, takes the order that was agreed on for such sums, or leaves their own.
    """

    def __init__(self) -> None:
        self._agreed: dict[Sums, list[Order]] = {}
        self._found: Found | None = None

    @contextlib.contextmanager
    def finding(self, *, free: bool) -> Iterator[Found]:
        """What is found while the program inside is traced, for :meth:`settle` to compare.

        Args:
            free: whether that program may be traced again; then its sums take the order that this rank finds.
        """
        self._found = found = Found(free, {}, {})
        try:
            yield found
        finally:
            self._found = None

    def settle(self, found: Found) -> bool:
        """Compares what was found. All ranks must make this call. False: what was traced must be traced again."""
        # Also where it is known already: other ranks may have fewer communicators, and wait.
        own = found.orders if len(found.comms) == 1 else None
        others = [gather_from_all(comm, "jit", "this program", own) for comm in found.comms]
        same = len(others) == 1 and all(other == own for other in others[0])
        if same:
            self._agreed |= found.orders
        return same or not found.comms

    def admits(self, found: Found) -> bool:
        """Whether a program that was traced before ranks agreed has the order that they agreed on."""
        return all(self._agreed.get(sums, orders) == orders for sums, orders in found.orders.items())

    def __call__(self, jaxpr: Any) -> Any:
        """The same program, in that order; itself where sums stand alone, and on CPU devices."""
        devices = devices_of_this_rank()
        if not devices or accelerators.kind_of(devices[0]) not in lowering.ACCELERATORS:
            return jaxpr
        sums = tuple(_sums(jaxpr))
        comms = _ranks_of(jaxpr)
        alone = all(comm.size == 1 for comm in comms)
        free = alone or (self._found is not None and self._found.free)
        orders: list[Order] = []
        wanted = None if free else iter(self._agreed.get(sums, ()))
        arranged = map_jaxprs(jaxpr, functools.partial(_overlap, orders=orders, wanted=wanted))
        if self._found is not None and not alone:
            self._found.orders[sums] = orders
            self._found.comms.update(comms)
        return arranged


def _own_sums(jaxpr: Any) -> list[JaxprEqn]:
    return [eqn for eqn in jaxpr.eqns if _splits(eqn)]


def _sums(jaxpr: Any) -> Iterator[str]:
    """A line for each sum."""
    for eqn in jaxpr.eqns:
        if _splits(eqn):
            yield f"{eqn.params['comm']!r} {eqn.params['op']} {[str(var.aval) for var in eqn.invars]}"
        for inner in inner_jaxprs(eqn):
            yield from _sums(inner)


def _ranks_of(jaxpr: Any) -> dict[Communicator, None]:
    """The ranks of all sums, each once."""
    comms = dict.fromkeys(eqn.params["comm"].mesh.comm for eqn in _own_sums(jaxpr))
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            comms |= _ranks_of(inner)
    return comms


def _overlap(jaxpr: Any, orders: list[Order], wanted: Iterator[Order] | None) -> Any:
    """``jaxpr`` without those that it holds; adds the order that its sums have then.

    ``wanted``: None for any order; else the next of them is that of these sums, or where there is none, the old one.
    """
    sums = _own_sums(jaxpr)
    if not sums:
        return jaxpr
    old = list(range(len(sums)))
    places = {id(eqn): place for place, eqn in enumerate(sums)}
    agreed = None if wanted is None else next(wanted, old)
    slots = None if agreed is None else {id(sums[place]): slot for slot, place in enumerate(agreed)}
    read = all_reads(jaxpr)
    eqns: list[JaxprEqn] = []
    segment: list[JaxprEqn] = []
    renamed: dict[Var, Var] = {}
    order: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn.effects and not _splits(eqn):
            eqns += _arranged(segment, read, renamed, order, slots)
            eqns.append(_renamed(eqn, renamed))
            segment = []
        else:
            segment.append(eqn)
    eqns += _arranged(segment, read, renamed, order, slots)
    begun = [places[id(eqn)] for eqn in order]
    orders.append(begun if agreed is None else agreed)
    if orders[-1] != begun:
        return jaxpr if agreed == old else _refuse(sums[0])
    outvars = [renamed.get(var, var) if isinstance(var, Var) else var for var in jaxpr.outvars]
    return jaxpr.replace(eqns=eqns, outvars=outvars)


def _refuse(eqn: JaxprEqn) -> NoReturn:
    comm = eqn.params["comm"].mesh.comm
    raise RuntimeError(
        message(
            "jit",
            "sums that need each other as those did that the ranks agreed on at the first call",
            "others of the same shapes",
            "Make it a function of its own.",
            rank=comm.rank,
            size=comm.size,
        )
    )


def _splits(eqn: JaxprEqn) -> bool:
    comm = eqn.params.get("comm")
    return eqn.primitive is allreduce_p and isinstance(comm, DeviceGroup) and not comm.local_axes


def _renamed(eqn: JaxprEqn, renamed: dict[Var, Var]) -> JaxprEqn:
    return eqn.replace(invars=[renamed.get(var, var) if isinstance(var, Var) else var for var in eqn.invars])


def _new(like: JaxprEqn, fun: Callable[..., Any], operands: Sequence[Var]) -> JaxprEqn:
    """The one equation that ``fun`` is of ``operands``, with results of its own."""
    avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in operands]
    # A function that JAX has not seen: of one that it has, it would return the same equation with the same results.
    (eqn,) = jax.make_jaxpr(lambda *values: fun(*values))(*avals).jaxpr.eqns
    return eqn.replace(invars=list(operands), source_info=like.source_info)


def _barrier(values: Sequence[Var], like: JaxprEqn) -> JaxprEqn:
    return _new(like, lambda *values: lax.optimization_barrier(values), values)


def _arranged(
    segment: list[JaxprEqn],
    read: set[Var],
    renamed: dict[Var, Var],
    order: list[JaxprEqn],
    slots: dict[int, int] | None,
) -> list[JaxprEqn]:
    """A part of a program without other collectives, in its new order; adds to ``renamed``, its sums to ``order``.

    ``read``: what the whole program reads. ``slots``: of the sums by their ids, if not as their operands come.
    """
    eqns: list[JaxprEqn] = []

    def tie(var: Var, results: list[Var], like: JaxprEqn) -> list[Var]:
        """A barrier through which both go, and what the results are behind it."""
        eqns.append(barrier := _barrier([renamed.get(var, var), *results], like))
        renamed[var] = barrier.outvars[0]
        return list(barrier.outvars[1:])

    while segment:
        early, sums, late = _needs(segment, slots)
        order += [eqn for _, eqn in sums]
        if not sums or all(is_reshape(eqn) for eqn in early[sums[0][0] :]):  # nothing to compute meanwhile
            eqns += [_renamed(eqn, renamed) for eqn in (*early, *(eqn for _, eqn in sums))]
            segment = late
            continue
        begun: list[tuple[JaxprEqn, list[Var]]] = []  # the sum, and its results so far
        for place, eqn in enumerate((*early, None)):
            while sums and sums[0][0] <= place:
                _, one = sums.pop(0)
                eqns.append(start := _start_of(_renamed(one, renamed)))
                results = list(start.outvars)
                ahead = {var for later in early[place:] for var in later.outvars}
                following = (var for later in early[place:] for var in reads(later) if var not in ahead)
                if (var := next(following, None)) is not None:
                    results = tie(var, results, one)
                begun.append((one, results))
            if eqn is not None:
                eqns.append(_renamed(eqn, renamed))
        # No end comes before all of that: nor before the last beginning, nor before what came last.
        results = [var for _, results in begun for var in results]
        last = next((var for eqn in reversed(early) for var in eqn.outvars if var in read), None)
        if last is None or any(last in reads(one) for one, _ in begun):  # a beginning has waited for it
            eqns.append(barrier := _barrier(results, begun[0][0]))
            behind = iter(barrier.outvars)
        else:
            behind = iter(tie(last, results, begun[0][0]))
        for one, results in begun:
            done = functools.partial(done_p.bind, comm=one.params["comm"])
            eqns.append(_new(one, done, [next(behind) for _ in results]).replace(outvars=one.outvars))
        segment = late
    return eqns


def _needs(
    segment: list[JaxprEqn], slots: dict[int, int] | None
) -> tuple[list[JaxprEqn], list[tuple[int, JaxprEqn]], list[JaxprEqn]]:
    """What needs no sum; the sums in their order, each with how much of that it waits for; what needs a sum."""
    constants: list[JaxprEqn] = []
    early: list[JaxprEqn] = []
    late: list[JaxprEqn] = []
    sums: list[JaxprEqn] = []
    of_sums: set[Var] = set()
    for eqn in segment:
        if any(var in of_sums for var in reads(eqn)):
            late.append(eqn)
            of_sums.update(eqn.outvars)
        elif _splits(eqn):
            sums.append(eqn)
            of_sums.update(eqn.outvars)
        elif eqn.primitive.name in ("broadcast_in_dim", "iota") and not reads(eqn):
            constants.append(eqn)  # first: they take no time
        else:
            early.append(eqn)
    early = constants + early
    made = {var: place for place, eqn in enumerate(early, start=1) for var in eqn.outvars}
    needed = [max((made.get(var, 0) for var in reads(eqn)), default=0) for eqn in sums]
    pairs = sorted(zip(needed, sums, strict=True), key=lambda pair: pair[0] if slots is None else slots[id(pair[1])])
    waits = itertools.accumulate((needs for needs, _ in pairs), max)  # for the operands of those before it too
    return early, list(zip(waits, (eqn for _, eqn in pairs), strict=True)), late


def _start_of(eqn: JaxprEqn) -> JaxprEqn:
    params = {"comm": eqn.params["comm"], "op": eqn.params["op"], "number": len(eqn.invars)}
    return _new(eqn, functools.partial(start_p.bind, **params), eqn.invars)
