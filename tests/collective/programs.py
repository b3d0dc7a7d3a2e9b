"""Tests many operations in one compiled program. It compiles much faster than one program for each operation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

import pycollective as pc
from pycollective.ordering import dispatch
from tests.cases import Case, supported

Array = Any

_MEETING = MPI.COMM_WORLD.Dup()

RUNTIME_ERRORS = (jax.errors.JaxRuntimeError, ValueError)
"""An error of a handler; XLA chooses one of them."""


def meet() -> None:
    """A barrier that sleeps. MPI's barrier polls at full speed, and takes cores from ranks that still compile."""
    request = _MEETING.Ibarrier()
    while not request.Test():
        time.sleep(0.002)


def any_rank(condition: bool) -> bool:
    """Whether it is true on some rank."""
    return any(_MEETING.allgather(condition))


def oracle_devices(count: int) -> list[jax.Device]:
    """Devices of this process on which JAX computes what ranks must: of the host, whatever takes part."""
    return jax.devices("cpu")[:count]


def once(size: int, compute: Callable[[], Any]) -> Any:
    """``compute()``, done by one rank for all that pass this ``size``: an oracle is slow to compile."""
    return divided(size, [None], lambda _: {None: compute()})[None]


def divided(size: int, names: Iterable[Any], compute: Callable[[list[Any]], dict[Any, Any]]) -> dict[Any, Any]:
    """``compute(names)``: each of the ranks that pass this ``size`` computes a part of it for all of them.

    It runs on the host: there matrix products keep all bits, and programs are not compiled for GPUs.
    """
    sizes = _MEETING.allgather(size)
    peers = [rank for rank, other in enumerate(sizes) if other == size]
    names = list(names)
    own = names[peers.index(_MEETING.rank) :: len(peers)]
    part: Any = {}
    if own:
        try:
            with jax.default_device(oracle_devices(1)[0]) if jax.default_backend() != "cpu" else nullcontext():
                part = jax.tree.map(np.asarray, compute(own))
        except Exception as error:  # the other ranks get it as well; they would wait for ever
            part = error
    meet()
    parts = _MEETING.allgather(part)
    whole = {}
    for rank in peers:
        if isinstance(parts[rank], Exception):
            raise parts[rank]
        whole.update(parts[rank])
    return {name: whole[name] for name in names}


def run(compiler: Callable[..., Any], program: Callable[..., Any], *args: Any) -> Any:
    """``compiler(program)(*args)``, compiled on all ranks before it runs on any."""
    if compiler not in (pc.jit, jax.jit):
        return compiler(program)(*args)
    compiled = compiler(program).lower(*args).compile()
    meet()
    return dispatch.results_of(compiled(*args))


def compare(
    comm: pc.Communicator,
    cases: Iterable[Case],
    inputs: Callable[[Case], Sequence[Array]],
    on_rank: Callable[..., Any],
    on_all: Callable[..., Any],
    *,
    compiler: Callable[[Callable[..., Any]], Callable[..., Any]] = pc.jit,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    """Checks one transform of every case on one communicator.

    Args:
        comm: the communicator.
        cases: the operations; those that the transport lacks are left out.
        inputs: ``inputs(case)`` returns arrays stacked over the ranks of ``comm``.
        on_rank: ``on_rank(call, *inputs)`` returns this rank's result for this rank's inputs; ``call(x)`` is the
            operation.
        on_all: ``on_all(reference, *inputs)`` returns the stacked results of all ranks for the inputs of all ranks.
        compiler: wraps the program with all calls of ``on_rank``; the identity for eager calls.
        rtol: the relative tolerance.
        atol: the absolute tolerance.
    """
    table = {case.id: case for case in cases if supported(case)}
    stacked = {id_: [np.asarray(x) for x in inputs(case)] for id_, case in table.items()}
    own = {id_: [x[comm.rank] for x in xs] for id_, xs in stacked.items()}

    def program(own: dict[str, list[Array]]) -> dict[str, Any]:
        return {
            id_: on_rank(lambda x, case=case: case.call(x, comm), *own[id_])  # type: ignore[misc]
            for id_, case in table.items()
        }

    def oracle(ids: list[str]) -> dict[str, Any]:
        program = lambda xs: {id_: on_all(table[id_].reference, *xs[id_]) for id_ in ids}
        return jax.jit(program)({id_: stacked[id_] for id_ in ids})  # type: ignore[no-any-return]

    want = divided(comm.size, table, oracle)
    got = run(compiler, program, jax.tree.map(jax.numpy.asarray, own))
    for id_ in table:
        for y, ys in zip(jax.tree.leaves(got[id_]), jax.tree.leaves(want[id_]), strict=True):
            assert y.shape == ys.shape[1:], id_
            np.testing.assert_allclose(y, ys[comm.rank], rtol=rtol, atol=atol, err_msg=id_)
