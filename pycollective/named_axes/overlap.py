"""On accelerators, overlaps sums between ranks with the computation that does not need their results.

There an allreduce can be two calls. The start returns while a thread of the device makes the call; the end waits for it
and has the results. For XLA they are two kernels like any others, and it would run the end right behind the start. So
this pass starts each sum as soon as its operands are there, ends it where its results are needed, and ties the
computation between to both by barriers:

    a = matmul(...)                  a = matmul(...)
    b = matmul(a)                    s' = start(a)
    s = psum(a)             ->       a', s'' = optimization_barrier(a, s')    # what reads a comes after the start
    t = psum(b)                      b = matmul(a')
    c = a / s + b / t                t' = start(b)
                                     b', s* = optimization_barrier(b, s'')    # the end comes after b
                                     s = done(s*)
                                     t = done(t')
                                     c = a' / s + b' / t

The pass takes sums over named axes that go from each device to one device of each other rank. The sums begin in an
order that all ranks have; if the ranks find different orders, the sums keep the order of the program. Nothing moves
past another collective.
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
    # In place, so that XLA keeps the operands as long as the results. It copies an operand that is read again.
    in_place = (True,) * params.pop("number")
    rule = native.ffi_lowering("device_allreduce_start", in_place)
    return HandlerCall(rule, allreduce_attributes(**params))


def _done_lowering(ctx: Any, *ys: Any, comm: DeviceGroup) -> Any:
    if (outs := lowering.lower_on_all_copies(done_p, ctx, ys, {"comm": comm})) is not None:
        return outs
    return native.done_lowering(len(ys))(ctx, *ys, comm=comm.key)


lowering.lower(start_p, None, _start)
mlir.register_lowering(done_p, _done_lowering)


Order = list[int]
"""The order in which the sums of one jaxpr begin: their places in the program as it was written."""

Sums = tuple[str, ...]
"""A line of text for each sum of a program. They are the same on all ranks, whatever a rank computes between them."""


class FoundOrders(NamedTuple):
    """The orders that the pass finds while one program is traced, before all ranks have made the function's first call.

    Attributes:
        may_reorder: whether sums take the order that this rank finds; else they keep the order of the program.
        orders: for the sums of each program the order of each of its jaxprs.
        comms: the communicators of the sums, each once; a dict, since that keeps its order.
    """

    may_reorder: bool
    orders: dict[Sums, list[Order]]
    comms: dict[Communicator, None]


class Overlap:
    """The pass for the programs of one function. It knows the orders of sums that all ranks have agreed on.

    The ranks compare the orders that they find at the function's first call, in :meth:`agree_on`. A rank may trace a
    program later, perhaps alone: its sums take the order that the ranks have agreed on, or else that of the program.
    """

    def __init__(self) -> None:
        self._agreed: dict[Sums, list[Order]] = {}
        self._found: FoundOrders | None = None

    def forget(self) -> None:
        """Forgets what the ranks have agreed on, since they are others now."""
        self._agreed.clear()

    @contextlib.contextmanager
    def collect_orders(self, *, may_reorder: bool) -> Iterator[FoundOrders]:
        """Collects the orders that the pass finds in the trace inside, for :meth:`agree_on`.

        Args:
            may_reorder: whether the sums take the order that this rank finds. The program must be traced again if the
                ranks do not agree on it.
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
        # With several communicators they do not. But other ranks may have one, and wait for this rank's answer.
        own = found.orders if len(found.comms) == 1 else None
        others = [gather_from_all(comm, "jit", "this program", own) for comm in found.comms]
        same = len(others) == 1 and all(other == own for other in others[0])
        if same:
            self._agreed |= found.orders
        return same or not found.comms

    def has_agreed_order(self, found: FoundOrders) -> bool:
        """Returns whether a program that was traced before the ranks agreed has the order that they agreed on."""
        return all(self._agreed.get(sums, orders) == orders for sums, orders in found.orders.items())

    def __call__(self, jaxpr: Any) -> Any:
        """Returns the program with its sums overlapped; itself on CPU devices, or if there is nothing to overlap."""
        devices = devices_of_this_rank()
        if not devices or accelerators.kind_of(devices[0]) not in lowering.ACCELERATORS:
            return jaxpr
        sums = tuple(_lines_of_sums(jaxpr))
        comms = _communicators_of_sums(jaxpr)
        alone = all(comm.size == 1 for comm in comms)
        may_reorder = alone or (self._found is not None and self._found.may_reorder)
        orders: list[Order] = []
        given_orders = None if may_reorder else iter(self._agreed.get(sums, ()))
        arranged = map_jaxprs(jaxpr, functools.partial(_overlap_jaxpr, orders=orders, given_orders=given_orders))
        if self._found is not None and not alone:
            self._found.orders[sums] = orders
            self._found.comms.update(comms)
        return arranged


def _sums_of(jaxpr: Any) -> list[JaxprEqn]:
    """Returns the sums among the equations of a jaxpr, without those in jaxprs that the equations hold."""
    return [eqn for eqn in jaxpr.eqns if _can_overlap(eqn)]


def _lines_of_sums(jaxpr: Any) -> Iterator[str]:
    """Yields a line of text for each sum of a program."""
    for eqn in jaxpr.eqns:
        if _can_overlap(eqn):
            yield f"{eqn.params['comm']!r} {eqn.params['op']} {[str(var.aval) for var in eqn.invars]}"
        for inner in inner_jaxprs(eqn):
            yield from _lines_of_sums(inner)


def _communicators_of_sums(jaxpr: Any) -> dict[Communicator, None]:
    """Returns the communicators of all sums of a program, each once."""
    comms = dict.fromkeys(eqn.params["comm"].mesh.comm for eqn in _sums_of(jaxpr))
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            comms |= _communicators_of_sums(inner)
    return comms


def _overlap_jaxpr(jaxpr: Any, orders: list[Order], given_orders: Iterator[Order] | None) -> Any:
    """Returns ``jaxpr`` with its own sums overlapped, and not those of the jaxprs that it holds.

    Args:
        jaxpr: the program.
        orders: the function appends the order that the sums have in the result.
        given_orders: the next of them is the order that the sums must have; if none is left, they keep the order of
            the program. None: they may have any order.
    """
    sums = _sums_of(jaxpr)
    if not sums:
        return jaxpr
    written = list(range(len(sums)))
    places = {id(eqn): place for place, eqn in enumerate(sums)}
    given = None if given_orders is None else next(given_orders, written)
    slots = None if given is None else {id(sums[place]): slot for slot, place in enumerate(given)}
    read = all_reads(jaxpr)
    eqns: list[JaxprEqn] = []
    segment: list[JaxprEqn] = []
    renamed: dict[Var, Var] = {}
    order: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn.effects and not _can_overlap(eqn):
            eqns += _overlap_segment(segment, read, renamed, order, slots)
            eqns.append(_renamed(eqn, renamed))
            segment = []
        else:
            segment.append(eqn)
    eqns += _overlap_segment(segment, read, renamed, order, slots)
    found = [places[id(eqn)] for eqn in order]
    orders.append(found if given is None else given)
    if orders[-1] != found:
        return jaxpr if given == written else _refuse_order(sums[0])
    outvars = [renamed.get(var, var) if isinstance(var, Var) else var for var in jaxpr.outvars]
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


def _can_overlap(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is a sum that can be a start and an end: each device works for itself."""
    comm = eqn.params.get("comm")
    return eqn.primitive is allreduce_p and isinstance(comm, DeviceGroup) and not comm.local_axes


def _renamed(eqn: JaxprEqn, renamed: dict[Var, Var]) -> JaxprEqn:
    return eqn.replace(invars=[renamed.get(var, var) if isinstance(var, Var) else var for var in eqn.invars])


def _new_equation(like: JaxprEqn, fun: Callable[..., Any], operands: Sequence[Var]) -> JaxprEqn:
    """Returns the one equation that ``fun`` makes of ``operands``, with new variables as results.

    It takes the place of ``like``, so it has that one's line of the user's code.
    """
    avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in operands]
    # The lambda is new to JAX. For a function that it has traced before, it would return the same variables again.
    (eqn,) = jax.make_jaxpr(lambda *values: fun(*values))(*avals).jaxpr.eqns
    return eqn.replace(invars=list(operands), source_info=like.source_info)


def _barrier(values: Sequence[Var], like: JaxprEqn) -> JaxprEqn:
    return _new_equation(like, lambda *values: lax.optimization_barrier(values), values)


def _overlap_segment(
    segment: list[JaxprEqn],
    read: set[Var],
    renamed: dict[Var, Var],
    order: list[JaxprEqn],
    slots: dict[int, int] | None,
) -> list[JaxprEqn]:
    """Returns the equations of a part of a program, which has no other collectives, with its sums overlapped.

    Args:
        segment: the part.
        read: the variables that the whole program reads.
        renamed: the new names of variables that went through a barrier; the function adds to them.
        order: the sums that have begun, in order; the function adds to them.
        slots: for the id of each sum its place in the order of beginning; None: a sum begins when its operands are
            there.
    """
    eqns: list[JaxprEqn] = []

    def through_barrier(var: Var, results: list[Var], like: JaxprEqn) -> list[Var]:
        """Sends ``var`` and the results of starts through a barrier. Returns the names of the results behind it."""
        eqns.append(barrier := _barrier([renamed.get(var, var), *results], like))
        renamed[var] = barrier.outvars[0]
        return list(barrier.outvars[1:])

    while segment:
        early, sums, late = _divide(segment, slots)
        order += [eqn for _, eqn in sums]
        if not sums or all(is_reshape(eqn) for eqn in early[sums[0][0] :]):  # there is nothing to compute meanwhile
            eqns += [_renamed(eqn, renamed) for eqn in (*early, *(eqn for _, eqn in sums))]
            segment = late
            continue
        begun: list[tuple[JaxprEqn, list[Var]]] = []  # a sum, and the names of its start's results so far
        for place, eqn in enumerate((*early, None)):
            while sums and sums[0][0] <= place:
                _, one = sums.pop(0)
                eqns.append(start := _start_of(_renamed(one, renamed)))
                results = list(start.outvars)
                ahead = {var for later in early[place:] for var in later.outvars}
                following = (var for later in early[place:] for var in reads(later) if var not in ahead)
                if (var := next(following, None)) is not None:
                    results = through_barrier(var, results, one)
                begun.append((one, results))
            if eqn is not None:
                eqns.append(_renamed(eqn, renamed))
        # All ends come after the last start, and after the last equation that needs no sum.
        results = [var for _, results in begun for var in results]
        last = next((var for eqn in reversed(early) for var in eqn.outvars if var in read), None)
        if last is None or any(last in reads(one) for one, _ in begun):  # a start needs it
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
    segment: list[JaxprEqn], slots: dict[int, int] | None
) -> tuple[list[JaxprEqn], list[tuple[int, JaxprEqn]], list[JaxprEqn]]:
    """Divides a segment by what its equations need.

    Returns:
        The equations that need no sum; the sums that need no other sum, in the order in which they begin, each with
        the number of those equations that come before it; and the equations that need a sum.
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
        elif _can_overlap(eqn):
            sums.append(eqn)
            of_sums.update(eqn.outvars)
        elif eqn.primitive.name in ("broadcast_in_dim", "iota") and not reads(eqn):
            constants.append(eqn)  # they take no time, so they come first
        else:
            early.append(eqn)
    early = constants + early
    made = {var: place for place, eqn in enumerate(early, start=1) for var in eqn.outvars}
    needed = [max((made.get(var, 0) for var in reads(eqn)), default=0) for eqn in sums]
    pairs = sorted(zip(needed, sums, strict=True), key=lambda pair: pair[0] if slots is None else slots[id(pair[1])])
    ready = itertools.accumulate((place for place, _ in pairs), max)  # a sum waits for the sums before it, too
    return early, list(zip(ready, (eqn for _, eqn in pairs), strict=True)), late


def _start_of(eqn: JaxprEqn) -> JaxprEqn:
    params = {"comm": eqn.params["comm"], "op": eqn.params["op"], "number": len(eqn.invars)}
    return _new_equation(eqn, functools.partial(start_p.bind, **params), eqn.invars)
