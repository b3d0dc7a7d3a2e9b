"""Many operations in one compiled program: as thorough as one program each, and much faster to compile."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

import pycollective as pc
from pycollective import turns
from tests.cases import Case

Array = Any

_MEETING = MPI.COMM_WORLD.Dup()


def meet() -> None:
    """A barrier that sleeps: MPI's own waits at full speed, and takes the cores from ranks that still compile."""
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
    """``compute()`` of the first rank that passes this ``size``: oracles are slow to compile, and often the same.

    It runs on the host: its matrix products have all bits, and its programs are not compiled for GPUs.
    """
    sizes = _MEETING.allgather(size)
    value: Any = None
    if sizes.index(size) == _MEETING.rank:
        try:
            with jax.default_device(oracle_devices(1)[0]) if jax.default_backend() != "cpu" else nullcontext():
                value = jax.tree.map(np.asarray, compute())
        except Exception as error:  # for the others too, which would wait
            value = error
    meet()
    value = _MEETING.allgather(value)[sizes.index(size)]
    if isinstance(value, Exception):
        raise value
    return value


def run(compiler: Callable[..., Any], program: Callable[..., Any], *args: Any) -> Any:
    """``compiler(program)(*args)``, compiled on all ranks before it runs on any."""
    if compiler not in (pc.jit, jax.jit):
        return compiler(program)(*args)
    compiled = compiler(program).lower(*args).compile()
    meet()
    result = compiled(*args)
    return result.outs if isinstance(result, turns.Witnessed) else result


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
        inputs: ``inputs(case)``: arrays stacked over the ranks of ``comm``.
        on_rank: ``on_rank(call, *inputs)``: this rank's result, from this rank's inputs; ``call(x)`` is the operation.
        on_all: ``on_all(reference, *inputs)``: all ranks' results, stacked, from all ranks' inputs.
        compiler: wraps the program that holds all of ``on_rank``; the identity for eager calls.
    """
    table = {case.id: case for case in cases}
    stacked = {id_: [np.asarray(x) for x in inputs(case)] for id_, case in table.items()}
    own = {id_: [x[comm.rank] for x in xs] for id_, xs in stacked.items()}

    def program(own: dict[str, list[Array]]) -> dict[str, Any]:
        return {
            id_: on_rank(lambda x, case=case: case.call(x, comm), *own[id_])  # type: ignore[misc]
            for id_, case in table.items()
        }

    def oracle(stacked: dict[str, list[Array]]) -> dict[str, Any]:
        return {id_: on_all(case.reference, *stacked[id_]) for id_, case in table.items()}

    want = once(comm.size, lambda: jax.jit(oracle)(stacked))
    got = run(compiler, program, jax.tree.map(jax.numpy.asarray, own))
    for id_ in table:
        for y, ys in zip(jax.tree.leaves(got[id_]), jax.tree.leaves(want[id_]), strict=True):
            assert y.shape == ys.shape[1:], id_
            np.testing.assert_allclose(y, ys[comm.rank], rtol=rtol, atol=atol, err_msg=id_)
