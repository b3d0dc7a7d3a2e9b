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

Only sums over named axes, of one device of each rank, and only where all ranks find the same order: where they compute
in different ones, the program stays as it was. Nothing moves past another collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Primitive, Var
from jax.interpreters import mlir

from pycollective import accelerators, ordering
from pycollective.agreement import exchanged
from pycollective.communicator import devices_of_this_rank
from pycollective.mesh import Group, Mesh
from pycollective.ordering import map_jaxprs
from pycollective.primitives import allreduce_attributes, allreduce_p
from pycollective.transport import native

start_p = Primitive("allreduce_start")
start_p.multiple_results = True
done_p = Primitive("allreduce_done")  # operands: what must be kept until then, and then what the start returned
done_p.multiple_results = True


@start_p.def_effectful_abstract_eval
def _start_abstract_eval(*xs: Any, **_: Any) -> Any:
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in xs], {ordering.effect}


@done_p.def_abstract_eval
def _done_abstract_eval(*operands: Any, kept: int, **_: Any) -> Any:
    return [jax.core.ShapedArray(y.shape, y.dtype) for y in operands[kept:]]


def _start(params: dict[str, Any]) -> ordering.Call:
    in_place = params.pop("in_place")
    return native.ffi_lowering("device_allreduce_start", in_place), allreduce_attributes(**params)


def _done_lowering(ctx: Any, *operands: Any, kept: int, comm: Group) -> Any:
    return native.done_lowering(kept, len(operands) - kept)(ctx, *operands, comm=comm.number)


ordering.lower(start_p, _start, _start)
mlir.register_lowering(done_p, _done_lowering)


def overlap(jaxpr: Any) -> Any:
    """The same program, in that order; itself where sums stand alone, and on CPU devices.

    All ranks must make this call for a program with sums over named axes.
    """
    devices = devices_of_this_rank()
    if not devices or accelerators.kind_of(devices[0]) not in ordering.ACCELERATORS:
        return jaxpr
    meshes: list[Mesh] = []
    orders: list[list[int]] = []
    arranged = map_jaxprs(jaxpr, functools.partial(_overlap, meshes=meshes, orders=orders))
    if not orders or any(mesh.comm is not meshes[0].comm for mesh in meshes):
        return jaxpr
    return arranged if len(set(map(repr, exchanged(meshes[0].comm, "jit", "this program", orders)))) == 1 else jaxpr


def _overlap(jaxpr: Any, meshes: list[Mesh], orders: list[list[int]]) -> Any:
    """``jaxpr`` without those that it holds; adds the meshes of its sums, and for each sum its old place."""
    sums = [eqn for eqn in jaxpr.eqns if _splits(eqn)]
    if not sums:
        return jaxpr
    meshes += [eqn.params["comm"].mesh for eqn in sums]
    places = {id(eqn): place for place, eqn in enumerate(sums)}
    eqns: list[JaxprEqn] = []
    segment: list[JaxprEqn] = []
    renamed: dict[Var, Var] = {}
    order: list[JaxprEqn] = []
    for eqn in jaxpr.eqns:
        if eqn.effects and not _splits(eqn):
            eqns += _arranged(segment, jaxpr, renamed, order)
            eqns.append(_renamed(eqn, renamed))
            segment = []
        else:
            segment.append(eqn)
    eqns += _arranged(segment, jaxpr, renamed, order)
    orders.append([places[id(eqn)] for eqn in order])
    outvars = [renamed.get(var, var) if isinstance(var, Var) else var for var in jaxpr.outvars]
    return jaxpr.replace(eqns=eqns, outvars=outvars)


def _splits(eqn: JaxprEqn) -> bool:
    comm = eqn.params.get("comm")
    return eqn.primitive is allreduce_p and isinstance(comm, Group) and not comm.local_axes


def _reads(reader: JaxprEqn | Jaxpr) -> list[Var]:
    """The variables that an equation reads, or that a program returns."""
    atoms = reader.outvars if isinstance(reader, Jaxpr) else reader.invars
    return [atom for atom in atoms if isinstance(atom, Var)]


def _renamed(eqn: JaxprEqn, renamed: dict[Var, Var]) -> JaxprEqn:
    return eqn.replace(invars=[renamed.get(var, var) if isinstance(var, Var) else var for var in eqn.invars])


def _new(like: JaxprEqn, fun: Callable[..., Any], operands: Sequence[Var]) -> JaxprEqn:
    """The one equation that ``fun`` is of ``operands``, with results of its own."""
    avals = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in operands]
    # A function that JAX has not seen: of one that it has, it would return the same equation with the same results.
    (eqn,) = jax.make_jaxpr(lambda *values: fun(*values))(*avals).jaxpr.eqns
    return eqn.replace(invars=list(operands), source_info=like.source_info)


def _barrier(*values: Any) -> Any:
    return lax.optimization_barrier(values)


def _arranged(segment: list[JaxprEqn], jaxpr: Jaxpr, renamed: dict[Var, Var], order: list[JaxprEqn]) -> list[JaxprEqn]:
    """A part of a program without other collectives, in its new order; adds to ``renamed``, its sums to ``order``."""
    given: list[JaxprEqn] = []  # constants, which take no time
    early: list[JaxprEqn] = []  # needs no sum
    late: list[JaxprEqn] = []
    sums: list[tuple[int, JaxprEqn]] = []  # how much of `early` each needs
    of_sums: set[Var] = set()
    made: dict[Var, int] = {}
    for eqn in segment:
        if any(var in of_sums for var in _reads(eqn)):
            late.append(eqn)
            of_sums.update(eqn.outvars)
        elif _splits(eqn):
            sums.append((max((made.get(var, 0) for var in _reads(eqn)), default=0), eqn))
            of_sums.update(eqn.outvars)
        elif not _reads(eqn):
            given.append(eqn)
        else:
            early.append(eqn)
            made.update((var, len(early)) for var in eqn.outvars)
    waiting = sorted(sums, key=lambda pair: pair[0])
    order += [*(eqn for _, eqn in waiting), *filter(_splits, late)]
    if all(needed == len(early) for needed, _ in sums):  # nothing to compute meanwhile
        return [_renamed(eqn, renamed) for eqn in segment]

    read = {var for reader in (*segment, jaxpr) for var in _reads(reader)}
    eqns: list[JaxprEqn] = given
    begun: list[tuple[JaxprEqn, list[Var], list[Any]]] = []  # the sum, what keeps its operands, its results so far

    def tie(var: Var, results: list[Any], like: JaxprEqn) -> list[Any]:
        """A barrier through which both go, and what they are behind it."""
        barrier = _new(like, _barrier, [renamed.get(var, var), *results])
        eqns.append(barrier)
        renamed[var] = barrier.outvars[0]
        return list(barrier.outvars[1:])

    def begin(eqn: JaxprEqn, before: JaxprEqn | None) -> None:
        eqns.append(start := _start_of(_renamed(eqn, renamed)))
        results = list(start.outvars)
        hints = zip(eqn.invars, eqn.params["in_place"], strict=True)
        kept = [var for var, takes in hints if isinstance(var, Var) and not takes]
        begun.append((eqn, kept, results if before is None else tie(_reads(before)[0], results, eqn)))

    for place, eqn in enumerate(early):
        while waiting and waiting[0][0] <= place:
            begin(waiting.pop(0)[1], eqn)
        eqns.append(_renamed(eqn, renamed))
    for _, eqn in waiting:
        begin(eqn, None)
    # No end comes before all of that: before the last beginning, where that has waited for all, or what came last.
    last = next((var for eqn in reversed(early) for var in eqn.outvars if var in read), None)
    results = [var for _, _, results in begun for var in results]
    if waiting or last is None:
        eqns.append(barrier := _new(begun[0][0], _barrier, results))
        behind = iter(barrier.outvars)
    else:
        behind = iter(tie(last, results, begun[0][0]))
    begun = [(one, kept, [next(behind) for _ in results]) for one, kept, results in begun]
    for one, kept, results in begun:
        done = functools.partial(_done, kept=len(kept), comm=one.params["comm"])
        operands = [*(renamed.get(var, var) for var in kept), *results]
        eqns.append(_new(one, done, operands).replace(outvars=one.outvars))
    return eqns + [_renamed(eqn, renamed) for eqn in late]


def _start_of(eqn: JaxprEqn) -> JaxprEqn:
    return _new(eqn, lambda *xs: start_p.bind(*xs, **eqn.params), eqn.invars)


def _done(*operands: Any, **params: Any) -> Any:
    return done_p.bind(*operands, **params)
