"""Overlaps sums between ranks with the computation that does not need their results.

The sums over named axes begin in the order in which the program computes their operands: in the backward pass, the
gradient of the last layer first. The program may have the sums in another order, for example that of the leaves of a
tree. If the ranks find different orders, the sums keep the order of the program. No equation moves past another
collective.

On CPU devices the new order is enough. A call between hosts runs in a thread of its own, and XLA continues with
operations that do not need its results (``native/xla/async_calls.h``). The pass joins sums (``fusion.py``) after they
have their new order, so that the operands of a joined call are ready at about the same time.

On accelerators an allreduce can be two calls. The start returns while a thread of the device makes the call. The end
waits for this call and returns the results. For XLA both are ordinary kernels, so XLA would run the end right after the
start. So this pass puts each start where its operands are ready, and each end where its results are needed. Barriers
keep the computation between start and end:

    a = matmul(...)                  a = matmul(...)
    b = matmul(a)                    s' = start(a)
    s = psum(a)             ->       a', s'' = optimization_barrier(a, s')    # readers of a come after the start
    t = psum(b)                      b = matmul(a')
    c = a / s + b / t                t' = start(b)
                                     b', s* = optimization_barrier(b, s'')    # the end comes after b
                                     s = done(s*)
                                     t = done(t')
                                     c = a' / s + b' / t

On accelerators the pass moves only sums in which each device works with one device of each other rank. Each stays one
call in a program that calls functions of the host: if one failed between a start and its end, XLA would give the arrays
of the sum away while they are in use (``native/xla/started_calls.h``).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import jax
from jax import lax
from jax.extend.core import JaxprEqn, Primitive, Var
from jax.interpreters import mlir

from pycollective.config import config
from pycollective.errors import message
from pycollective.jax_support.jaxprs import all_reads, is_reshape, map_jaxprs, not_plain_equations, reads
from pycollective.named_axes import fusion
from pycollective.named_axes.mesh import DeviceGroup
from pycollective.ordering.effect import effect
from pycollective.primitives import lowering
from pycollective.primitives.reductions import allreduce_attributes
from pycollective.ranks import accelerators
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.meeting import Sameness, complete, digest_of, meet_or_fail
from pycollective.ranks.out_of_band import Steps
from pycollective.ranks.setup import devices_of_this_rank
from pycollective.transport import native
from pycollective.transport.chosen import transport
from pycollective.transport.protocol import HandlerCall, Structs

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


def _start(params: dict[str, Any], *_: Structs) -> HandlerCall:
    # In place, so that XLA keeps the operands as long as the results. XLA copies an operand that is read again.
    in_place = (True,) * params.pop("number")
    rule = native.ffi_lowering("device_allreduce_start", in_place)
    return HandlerCall(rule, allreduce_attributes(**params))


def _done_lowering(ctx: Any, *ys: Any, comm: DeviceGroup) -> Any:
    if (outs := lowering.lower_on_all_copies(done_p, ctx, ys, {"comm": comm})) is not None:
        return outs
    return lowering.apart(native.done_lowering(len(ys))(ctx, *lowering.apart(ys), comm=comm._key))


lowering.lower(start_p, None, _start)
mlir.register_lowering(done_p, _done_lowering)


Order = list[int]
"""The order in which the sums of one jaxpr begin, as indices of the sums in the original program."""

Sums = tuple[str, ...]
"""A line of text for each sum of a program. The lines are the same on all ranks; the other equations may differ."""


class FoundOrders(NamedTuple):
    """The orders that the pass finds in the trace of a program, before all ranks have made the function's first call.

    Attributes:
        may_reorder: whether sums take the order that this rank finds. If not, they keep the order of the program.
        orders: for the sums of each program the order of each of its jaxprs.
        comms: the communicators of the sums, each once; a dict, since a dict keeps the order of insertion.
    """

    may_reorder: bool
    orders: dict[Sums, list[Order]]
    comms: dict[Communicator, None]


class Overlap:
    """The pass for the programs of one function. It keeps the orders of sums that all ranks have agreed on.

    At the function's first call the ranks compare the orders that they have found, in :meth:`agree_on`. A rank may
    trace a program later, perhaps alone. Then the sums take the order that the ranks have agreed on, if there is one,
    and else the order of the program.
    """

    def __init__(self) -> None:
        self._agreed: dict[Sums, list[Order]] = {}
        self._found: FoundOrders | None = None

    def forget(self) -> None:
        """Forgets the orders that the ranks have agreed on, since the set of ranks has changed."""
        self._agreed.clear()

    @contextlib.contextmanager
    def collect_orders(self, *, may_reorder: bool) -> Iterator[FoundOrders]:
        """Collects the orders that the pass finds in a trace, for :meth:`agree_on`.

        Args:
            may_reorder: whether the sums take the order that this rank finds. If the ranks then do not agree on the
                order, the program must be traced again.
        """
        self._found = found = FoundOrders(may_reorder, {}, {})
        try:
            yield found
        finally:
            self._found = None

    def agree_on(self, found: FoundOrders) -> bool:
        """Compares the orders that the ranks have found. All ranks must make this call.

        Returns:
            Whether the ranks agree. If not, the program must be traced again.
        """
        # A program with several communicators counts as no agreement. The exchange is made nevertheless: another rank
        # may have found one communicator only, and waits for this rank's answer.
        own = sorted(found.orders.items()) if len(found.comms) == 1 else None
        key = _WHAT, digest_of(own)
        alike = [
            complete(comm, "jit", "this program", key, functools.partial(compare_orders, comm, own))
            for comm in found.comms
        ]
        same = alike == [True]
        if same:
            self._agreed |= found.orders
        return same or not found.comms

    def has_agreed_order(self, found: FoundOrders) -> bool:
        """Returns whether a program that was traced before the agreement has the orders of the agreement."""
        return all(self._agreed.get(sums, orders) == orders for sums, orders in found.orders.items())

    def __call__(self, jaxpr: Any) -> Any:
        """Returns the program with its sums joined and overlapped."""
        if config.overlap == "off":
            return fusion.join_reductions(jaxpr)
        devices = devices_of_this_rank()
        if devices and accelerators.kind_of(devices[0]) in lowering.ACCELERATORS:
            jaxpr = fusion.join_reductions(jaxpr)
            halves = [(eqn, eqn.invars) for eqn in not_plain_equations(jaxpr) if _has_two_halves(eqn)]
            kind = _WHOLE_ON_ACCELERATORS if _calls_the_host(jaxpr) else _ON_ACCELERATORS
            return map_jaxprs(jaxpr, self._arranging(halves, kind))
        sums = [(eqn, [var]) for eqn in not_plain_equations(jaxpr) if _is_async(eqn) for var in eqn.invars]
        if not sums:
            return fusion.join_reductions(jaxpr)
        arrange = self._arranging(sums, _ON_HOSTS)
        return map_jaxprs(jaxpr, lambda own: fusion.join_own_reductions(arrange(fusion.split_reductions(own))))

    def _arranging(self, calls: Sequence[tuple[JaxprEqn, Sequence[Any]]], kind: _Kind) -> Callable[[Any], Any]:
        """Returns the function for the programs in a program that gives sums the order that the ranks have agreed on.

        Before the agreement the order is the one that this rank finds, if the sums may be reordered.

        Args:
            calls: the sums that move, in the order of the program. For each the equation that has it, and its operands.
            kind: how they move.
        """
        sums = tuple([f"{eqn.params['comm']!r} {eqn.params['op']} {[str(x.aval) for x in xs]}" for eqn, xs in calls])
        comms = dict.fromkeys(eqn.params["comm"].mesh.comm for eqn, _ in calls)
        alone = all(comm.size == 1 for comm in comms)
        may_reorder = alone or (self._found is not None and self._found.may_reorder)
        orders: list[Order] = []
        given_orders = None if may_reorder else iter(self._agreed.get(sums, ()))
        if self._found is not None and not alone:
            self._found.orders[sums] = orders
            self._found.comms.update(comms)
        return functools.partial(_arrange, kind=kind, orders=orders, given_orders=given_orders)


def compare_orders(comm: Communicator, own: Any) -> Steps[bool]:
    """Whether all ranks have found the same orders, of which only a digest travels; the same on all ranks."""
    found = yield from meet_or_fail(comm, "jit", Sameness.of(comm, own), Sameness.followed_by, what=_WHAT)
    return found.other is None


_WHAT = "the first call of a function, for the order of its sums,"
"""The call, for the messages of ranks that make another one."""


def _arrange(jaxpr: Any, kind: _Kind, orders: list[Order], given_orders: Iterator[Order] | None) -> Any:
    """Returns ``jaxpr`` with its own sums overlapped. Sums of inner jaxprs do not change.

    Args:
        jaxpr: the program.
        kind: the sums that move, and how they move.
        orders: a list to which the function appends the order of the sums in the result.
        given_orders: the next item is the order that the sums must have. If there is no next item, they keep the order
            of the program. None: they may have any order.
    """
    sums = [eqn for eqn in jaxpr.eqns if kind.moves(eqn)]
    if not sums:
        return jaxpr
    written = list(range(len(sums)))
    places = {id(eqn): place for place, eqn in enumerate(sums)}
    given = None if given_orders is None else next(given_orders, written)
    slots = None if given is None else {id(sums[place]): slot for slot, place in enumerate(given)}
    part = _Part(kind.moves, all_reads(jaxpr), slots)
    eqns: list[JaxprEqn] = []
    segment: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn.effects and not kind.moves(eqn):
            eqns += kind.arrange(segment, part)
            eqns.append(part.renamed_equation(eqn))
            segment = []
        else:
            segment.append(eqn)
    eqns += kind.arrange(segment, part)
    found = [places[id(eqn)] for eqn in part.order]
    orders.append(found if given is None else given)
    if orders[-1] != found:
        return jaxpr if given == written else _refuse_order(sums[0])
    outvars = [part.renamed.get(var, var) if isinstance(var, Var) else var for var in jaxpr.outvars]
    return jaxpr.replace(eqns=eqns, outvars=outvars)


def _refuse_order(eqn: JaxprEqn) -> NoReturn:
    comm = eqn.params["comm"].mesh.comm
    raise RuntimeError(
        message(
            "jit",
            "sums that can begin in the order that the ranks agreed on at the function's first call",
            "sums of the same shapes that cannot, since one needs the result of another",
            "Make it a function of its own.",
            rank=comm.rank,
            size=comm.size,
        )
    )


@dataclass
class _Part:
    """The common data of the segments of one jaxpr.

    Attributes:
        moves: whether an equation is a sum that may move.
        read: the variables that the whole jaxpr reads.
        slots: for the id of each sum its place in the order in which sums begin. None: a sum begins when its operands
            are ready.
        renamed: the new variables of values that passed through a barrier.
        order: the sums that have begun, in their order.
    """

    moves: Callable[[JaxprEqn], bool]
    read: set[Var]
    slots: dict[int, int] | None
    renamed: dict[Var, Var] = field(default_factory=dict)
    order: list[JaxprEqn] = field(default_factory=list)

    def renamed_equation(self, eqn: JaxprEqn) -> JaxprEqn:
        """Returns the equation with the new variables of its operands."""
        return eqn.replace(invars=[self.renamed.get(var, var) if isinstance(var, Var) else var for var in eqn.invars])


def _order_segment(segment: list[JaxprEqn], part: _Part) -> list[JaxprEqn]:
    """Returns the equations of a segment, a part of a program without other collectives, with its sums in order."""
    eqns: list[JaxprEqn] = []
    feeding = _that_feed_others(segment, part)
    while segment:
        # A sum whose result another sum needs comes first: after the sum of a large array it would delay the program.
        first = feeding.intersection(map(id, segment))
        early, sums, segment = _divide(segment, part, first or None)
        part.order += [eqn for _, eqn in sums]
        for place, eqn in enumerate((*early, None)):
            while sums and sums[0][0] <= place:
                eqns.append(sums.pop(0)[1])
            if eqn is not None:
                eqns.append(eqn)
    return eqns


def _that_feed_others(segment: list[JaxprEqn], part: _Part) -> set[int]:
    """Returns the ids of the sums whose results another sum of the segment needs."""
    found: set[int] = set()
    needed: set[Var] = set()  # the variables that sums need
    for eqn in reversed(segment):
        feeds = not needed.isdisjoint(eqn.outvars)
        if part.moves(eqn) and feeds:
            found.add(id(eqn))
        if part.moves(eqn) or feeds:
            needed.update(reads(eqn))
    return found


def _new_equation(like: JaxprEqn, fun: Callable[..., Any], operands: Sequence[Var]) -> JaxprEqn:
    """Returns the equation of ``fun``, which makes one equation, for these operands, with new variables as results.

    The equation replaces ``like``, so it gets the line of the user's code of ``like``.
    """
    avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in operands]
    # The lambda is a new function in each call. For a function that JAX has traced before, JAX would return the cached
    # trace with the same variables.
    (eqn,) = jax.make_jaxpr(lambda *values: fun(*values))(*avals).jaxpr.eqns
    return eqn.replace(invars=list(operands), source_info=like.source_info)


def _barrier(values: Sequence[Var], like: JaxprEqn) -> JaxprEqn:
    return _new_equation(like, lambda *values: lax.optimization_barrier(values), values)


def _overlap_segment(segment: list[JaxprEqn], part: _Part) -> list[JaxprEqn]:
    """Returns the equations of a segment, a part of a program without other collectives, with each sum in two calls."""
    eqns: list[JaxprEqn] = []

    def through_barrier(var: Var, results: list[Var], like: JaxprEqn) -> list[Var]:
        """Passes ``var`` and the results of starts through a barrier. Returns the new variables of the results."""
        eqns.append(barrier := _barrier([part.renamed.get(var, var), *results], like))
        part.renamed[var] = barrier.outvars[0]
        return list(barrier.outvars[1:])

    while segment:
        early, sums, late = _divide(segment, part)
        part.order += [eqn for _, eqn in sums]
        if not sums or all(is_reshape(eqn) for eqn in early[sums[0][0] :]):  # no computation to overlap with
            eqns += [part.renamed_equation(eqn) for eqn in (*early, *(eqn for _, eqn in sums))]
            segment = late
            continue
        begun: list[tuple[JaxprEqn, list[Var]]] = []  # a sum, and the current variables of its start's results
        for place, eqn in enumerate((*early, None)):
            while sums and sums[0][0] <= place:
                _, one = sums.pop(0)
                eqns.append(start := _start_of(part.renamed_equation(one)))
                results = list(start.outvars)
                ahead = {var for later in early[place:] for var in later.outvars}
                following = (var for later in early[place:] for var in reads(later) if var not in ahead)
                if (var := next(following, None)) is not None:
                    results = through_barrier(var, results, one)
                begun.append((one, results))
            if eqn is not None:
                eqns.append(part.renamed_equation(eqn))
        # All ends come after the last start, and after the last equation that does not depend on a sum.
        results = [var for _, results in begun for var in results]
        last = next((var for eqn in reversed(early) for var in eqn.outvars if var in part.read), None)
        if last is None or any(last in reads(one) for one, _ in begun):  # a start reads it
            eqns.append(barrier := _barrier(results, begun[0][0]))
            behind = iter(barrier.outvars)
        else:
            behind = iter(through_barrier(last, results, begun[0][0]))
        for one, results in begun:
            done = functools.partial(done_p.bind, comm=one.params["comm"])
            eqns.append(_new_equation(one, done, [next(behind) for _ in results]).replace(outvars=one.outvars))
        segment = late
    return eqns


def _divide(
    segment: list[JaxprEqn], part: _Part, first: set[int] | None = None
) -> tuple[list[JaxprEqn], list[tuple[int, JaxprEqn]], list[JaxprEqn]]:
    """Divides a segment by the dependencies of its equations.

    Args:
        segment: the segment.
        part: the data of its jaxpr.
        first: the ids of the sums that may begin. Other sums count as equations that depend on a sum. None: all sums
            may begin.

    Returns:
        Three lists: the equations that depend on no sum; the sums that depend on no other sum, in the order in which
        they begin, each with the number of equations of the first list that come before it; and the equations that
        depend on a sum.
    """
    constants: list[JaxprEqn] = []
    early: list[JaxprEqn] = []
    late: list[JaxprEqn] = []
    sums: list[JaxprEqn] = []
    of_sums: set[Var] = set()
    for eqn in segment:
        if any(var in of_sums for var in reads(eqn)):
            late.append(eqn)
            of_sums.update(eqn.outvars)
        elif part.moves(eqn):
            (sums if first is None or id(eqn) in first else late).append(eqn)
            of_sums.update(eqn.outvars)
        elif eqn.primitive.name in ("broadcast_in_dim", "iota") and not reads(eqn):
            constants.append(eqn)  # constants take no time, so they come first
        else:
            early.append(eqn)
    early = constants + early
    made = {var: place for place, eqn in enumerate(early, start=1) for var in eqn.outvars}
    needed = [max((made.get(var, 0) for var in reads(eqn)), default=0) for eqn in sums]
    slots = part.slots
    pairs = sorted(zip(needed, sums, strict=True), key=lambda pair: pair[0] if slots is None else slots[id(pair[1])])
    ready = itertools.accumulate((place for place, _ in pairs), max)  # a sum also waits for the sums before it
    return early, list(zip(ready, (eqn for _, eqn in pairs), strict=True)), late


def _start_of(eqn: JaxprEqn) -> JaxprEqn:
    params = {name: eqn.params[name] for name in ("comm", "op", "passed")} | {"number": len(eqn.invars)}
    return _new_equation(eqn, functools.partial(start_p.bind, **params), eqn.invars)


class _Kind(NamedTuple):
    """The way in which sums are overlapped on a kind of devices.

    Attributes:
        moves: whether an equation is a sum that may move.
        arrange: a function that returns the equations of a segment with its sums overlapped.
    """

    moves: Callable[[JaxprEqn], bool]
    arrange: Callable[[list[JaxprEqn], _Part], list[JaxprEqn]]


def _has_two_halves(eqn: JaxprEqn) -> bool:
    """Returns whether an equation can be split into start and end: the devices of a rank are in different groups."""
    return fusion.is_over_axes(eqn) and not eqn.params["comm"]._local_axes


_HOST_CALLS = {"pure_callback", "io_callback", "ffi_call"}
"""The primitives that call functions of the host, from outside JAX and this package."""


def _calls_the_host(jaxpr: Any) -> bool:
    return any(eqn.primitive.name in _HOST_CALLS for eqn in not_plain_equations(jaxpr))


def _is_async(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a sum in a mesh on whose CPU devices large sums overlap with computation.

    The result is the same on all ranks of the mesh. It does not depend on the hosts of the ranks of one group.
    """
    return fusion.is_over_axes(eqn) and transport().overlaps(eqn.params["comm"].mesh.comm._key[0])


_ON_ACCELERATORS = _Kind(_has_two_halves, _overlap_segment)
_WHOLE_ON_ACCELERATORS = _Kind(_has_two_halves, _order_segment)
_ON_HOSTS = _Kind(_is_async, _order_segment)
