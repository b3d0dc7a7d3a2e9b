"""``run``: calls a training function, and calls it again with the remaining ranks when a rank has failed."""

from __future__ import annotations

import functools
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar, overload

import jax

from pycollective import recorder
from pycollective.config import DEFAULT_TIMEOUT_S
from pycollective.elastic.state import State
from pycollective.errors import fail, name_ranks
from pycollective.faults import rank_exit
from pycollective.launch.find_mpi import ELASTIC_LAUNCH
from pycollective.ordering import dispatch
from pycollective.ranks import setup
from pycollective.ranks import world as worlds
from pycollective.ranks.communicator import Communicator
from pycollective.spmd.compiled import forget_agreements
from pycollective.transport import failures, native
from pycollective.transport.chosen import transport
from pycollective.transport.mpi import MPI
from pycollective.transport.watch import END, waiting

R = TypeVar("R")

Train = Callable[[State, Communicator], R]

_WHERE = "elastic.run"

_SUPPORTED = f"{ELASTIC_LAUNCH} goes on."
_REMEDY = "pycollective run --restarts N starts the job again after a fault, from its last checkpoint."

_HANDLER_ERROR = "expected MPI_"
"""The words of a handler's error for an MPI function that has failed (native/calls/call.cc)."""

_DETECTION_TIMEOUT_S = 2.0
"""How long after the error of a call this rank may learn of the failure of another rank."""

_REPORT_DURATION_S = 10.0
"""The longest time from a report's kill of stopped ranks to its end of the other ranks (native/monitor/monitor.cc)."""

_WATCH_INTERVAL_S = 0.02
"""The seconds between two checks for failed ranks. A check takes about 30 us and does not communicate."""


class _State:
    """What this process knows.

    Attributes:
        is_running: whether :func:`run` is under way.
        has_warned: whether it has printed that a failure ends the job.
        losses: how often it has continued with fewer ranks.
        lost: the failed ranks of MPI_COMM_WORLD that :func:`run` has named.
    """

    is_running = False
    has_warned = False
    losses = 0
    lost: ClassVar[set[int]] = set()


def _reason_to_end_job() -> str:
    """The MPI library or setting with which a failure ends the job; empty if the remaining ranks can continue."""
    if native.is_ahead():
        return "PYCOLLECTIVE_GPU_DISPATCH=ahead"
    return (
        failures.describe_missing_support() if (name := transport().name) == "native" else f"init(transport={name!r})"
    )


@overload
def run(train: Train[R], state: State, *, min_ranks: int = 1, required: bool = False) -> R: ...
@overload
def run(train: Train[R], state: None = None, *, min_ranks: int = 1, required: bool = False) -> Callable[[State], R]: ...
def run(train: Train[Any], state: State | None = None, *, min_ranks: int = 1, required: bool = False) -> Any:
    """Runs ``train(state, world)``, and calls ``train`` again with the remaining ranks when a rank has failed.

    A rank fails when its process dies by a signal; if a host fails, the launcher ends the job. When a rank fails, each
    call of the other ranks ends in an error, which ``train`` should not catch. The remaining ranks continue as a
    smaller world: :func:`pycollective.world` is a new communicator; all older communicators, and programs that were
    lowered for them, are unusable. All values of ``state`` become those of the newest commit of any remaining rank, and
    ``train`` is called again; functions are traced again. An exception of another kind in ``train`` ends all ranks, as
    it does without ``run``.

    This needs Open MPI 5 under ``mpiexec --with-ft ulfm``. Elsewhere a failure ends the job; rank 0 prints that once.

    Args:
        train: a function of the state and of the world. It continues from the values of the state, and commits.
        state: the state, the same on all ranks. It is committed before the first call. Default None: ``run`` returns a
            function of the state, so ``run`` is a decorator.
        min_ranks: the smallest number of ranks: with fewer the job ends. Default 1.
        required: whether to raise an error if the MPI library does not let the remaining ranks continue. Default False.

    Returns:
        The result of ``train``, when it has returned on all ranks.

    Raises:
        TypeError: ``state`` is not a :class:`State`.
        ValueError: there are fewer ranks than ``min_ranks`` at the start.
        RuntimeError: fewer than ``min_ranks`` ranks remain; the remaining ranks could not continue here, and
            ``required`` is True; or another call of ``run`` is in progress.

    Order:
        Outside programs. All ranks must make this call, at the same place among their other calls.

    Source:
        User-Level Failure Mitigation (MPI standard 5.0): revoke, shrink, agree. The interface is that of
        ``horovod.elastic.run``.

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> def train(state, world):
        ...     while state.step < 3:
        ...         state.total += pc.psum(jnp.float32(1)) / world.size
        ...         state.step += 1
        ...         state.commit()
        ...     return float(state.total)
        >>> pc.elastic.run(train, pc.elastic.State(step=0, total=jnp.float32(0)))
        3.0
    """
    if state is None:
        return functools.wraps(train)(lambda state: run(train, state, min_ranks=min_ranks, required=required))
    world = worlds.world()
    if not isinstance(state, State):
        fail(
            TypeError, _WHERE, world, "a pycollective.elastic.State", repr(state), "Give it the values of the training."
        )
    if world.size < min_ranks:
        fail(ValueError, _WHERE, world, f"min_ranks={min_ranks} ranks or more", world.size, "Start more ranks.")
    if _State.is_running:
        fail(RuntimeError, _WHERE, world, "one call at a time", "a call inside another one", "Call it once, outside.")
    if why := _reason_to_end_job():
        if required:
            fail(RuntimeError, _WHERE, world, "an MPI that goes on when a rank fails", why, f"{_SUPPORTED} {_REMEDY}")
        if not _State.has_warned and world.rank == 0 and world.size > 1:
            sys.stderr.write(
                f"pycollective.{_WHERE}: with {why} a rank that fails ends the job. {_SUPPORTED} {_REMEDY}\n"
            )
            sys.stderr.flush()
        _State.has_warned = True
        return train(state, world)
    _State.is_running = True
    try:
        state.commit()
        while True:
            with _watching_for_failures(world.mpi):
                fine, result = _attempt(train, state, world)
            # A rank that has returned makes no call until all others have returned; the end of a rank means the same.
            with waiting(END if fine else _WHERE, world._identity):
                all_fine = failures.agree(world.mpi, fine)
            if all_fine:
                return result
            world = _rebuild_and_restore(state, world, min_ranks)
    finally:
        _State.is_running = False


@contextmanager
def _watching_for_failures(comm: MPI.Intracomm) -> Iterator[None]:
    """Inside, the failure of any rank of ``comm`` ends all calls of this rank with an error, on whichever communicator.

    If another rank has revoked ``comm``, that ends all calls, too. A rank may wait for a rank that is alive but has met
    the failure elsewhere, on a communicator that does not exist there because its creation has failed. So each rank
    must end its own calls.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(_WATCH_INTERVAL_S):
            if failures.has_failed(comm):
                comm.Revoke()
                failures.revoke_all()  # repeated, since the program may have made another communicator

    thread = threading.Thread(target=watch, name="pycollective-elastic", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _attempt(train: Train[R], state: State, world: Communicator) -> tuple[bool, R | None]:
    """Whether ``train`` has returned and all its programs have run, and what it has returned; None after a failure."""
    try:
        result = train(state, world)
        dispatch.flush()
        arrays = [
            x for x in jax.tree.leaves((result, state._values)) if isinstance(x, jax.Array) and not x.is_deleted()
        ]
        jax.block_until_ready(arrays)
    except Exception as error:
        if not _follows_from_failure(error, world.mpi):
            raise
        world.mpi.Revoke()  # the watch may not have done so yet
        failures.revoke_all()
        return False, None
    return True, result


def _follows_from_failure(error: BaseException, mpi: MPI.Intracomm) -> bool:
    """Whether an error is that of a call, and a rank has failed: the error may come before this rank knows of that."""
    if not any(map(_is_error_of_call, _exception_chain(error))):
        return False
    deadline = time.monotonic() + _DETECTION_TIMEOUT_S
    while not failures.has_failed(mpi):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def _is_error_of_call(error: BaseException) -> bool:
    # JAX raises the error of a program as a JaxRuntimeError, but as a ValueError where it dispatches from C++.
    of_program = isinstance(error, ValueError) and _HANDLER_ERROR in str(error)
    return of_program or isinstance(error, (MPI.Exception, jax.errors.JaxRuntimeError))


def _exception_chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _rebuild_and_restore(state: State, world: Communicator, min_ranks: int) -> Communicator:
    """Makes the world of the remaining ranks, and restores the state. All remaining ranks must make this call.

    The ranks agree whether this has succeeded on all of them. If a rank fails meanwhile, all ranks try again.
    """
    mpi, before = world.mpi, world._world_ranks
    while True:
        mpi.Revoke()
        failures.revoke_all()
        dispatch.forget_failed_programs()
        forget_agreements()
        with waiting(_WHERE):
            shrunk = mpi.Shrink()
        assert isinstance(shrunk, MPI.Intracomm)
        _wait_for_report()  # the next calls need all ranks, so no rank prints before this wait that ranks continue
        mpi = shrunk
        _State.losses += 1
        commit = None
        with _watching_for_failures(mpi):
            try:
                left = MPI.Group.Translate_ranks(mpi.Get_group(), None, MPI.COMM_WORLD.Get_group())
                rank_exit.exclude_failed_ranks(set(before) - set(left))
                new = worlds.rebuild_world_after_failure(mpi, _State.losses)
                commit = state._restore(new)
            except (MPI.Exception, RuntimeError) as error:
                if not _follows_from_failure(error, mpi):
                    raise
        if failures.agree(mpi, commit is not None):
            break
    lost = set(before) - set(left)
    failed = f"{name_ranks(lost)} of {MPI.COMM_WORLD.size} failed"
    if _State.lost:
        failed += f", after {name_ranks(_State.lost)}"
    _State.lost |= lost
    if new.size < min_ranks:
        got = f"{new.size}, since {failed}"
        fail(RuntimeError, _WHERE, new, f"min_ranks={min_ranks} ranks or more", got, _REMEDY)
    if new.rank == 0:
        left_ = f"{new.size} rank{'s' * (new.size > 1)} go{'es' * (new.size == 1)} on"
        sys.stderr.write(f"pycollective.{_WHERE}: {failed}; {left_} from commit {commit}.\n")
        sys.stderr.flush()
    return new


def _wait_for_report() -> None:
    """Waits while the report of a long wait may be about to end the job, and with it this process.

    A report first kills the ranks that are stopped, and then ends the ranks that wait. MPI sees a killed rank as
    failed. A report is made only after a call has waited for longer than the limit, and the kill makes that call fail.
    So the failed call is among the last records of this rank, or of another one.
    """
    limit = setup.timeout()
    limit_ns = (DEFAULT_TIMEOUT_S if limit is None else limit) * 1e9
    ended_ns = 0
    for entry in recorder.dump()["entries"]:
        end_ns = entry["time_discovered_completed_ns"] or 0
        if entry["description"] != END and end_ns - entry["time_created_ns"] > limit_ns:
            ended_ns = max(ended_ns, end_ns)
    time.sleep(max(0.0, ended_ns / 1e9 + _REPORT_DURATION_S - time.time()))
