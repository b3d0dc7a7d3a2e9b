"""``pycollective.trace``: the calls of all ranks on one timeline, in a file."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from pycollective import files
from pycollective.errors import fail, integer, message
from pycollective.jax_support.jax_internals import at_top_level
from pycollective.ordering import dispatch
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.meeting import complete, first_of, meet_or_fail, waiter
from pycollective.ranks.world import given_or_world
from pycollective.timeline import clocks, events, leave
from pycollective.timeline.calls import Part, part_of_this_rank
from pycollective.transport import watch
from pycollective.transport.mpi import MPI

_WHERE = "trace"

_MOST_CALLS = 1 << 18


class _State:
    """Whether this rank is inside a trace."""

    is_on = False


class _Session(NamedTuple):
    """A trace that has begun.

    Attributes:
        comm: the ranks.
        mpi: a duplicate of their communicator, for the messages of this trace alone.
        reading: the reading of this rank's clock before the trace, against its leader's clock.
        began: the time when the trace began, by this rank's clock, in nanoseconds.
    """

    comm: Communicator
    mpi: MPI.Intracomm
    reading: clocks.Reading
    began: int


@contextmanager
def trace(
    file: str | os.PathLike[str], comm: Communicator | None = None, *, most_calls: int = _MOST_CALLS
) -> Iterator[None]:
    """Writes all ranks' calls inside a ``with`` block to one file: a timeline for Perfetto or chrome://tracing.

    All ranks of the communicator must enter and leave the block, at top level. In the timeline a rank is a process, and
    each of its channels is a thread; a channel is a communicator, or one device's lane of it. Each call is an event
    with its operation, shape, dtype, line of the program, bytes, state and number among the calls of its channel. If
    the rank waited for a later rank, another event inside it shows this wait. ``pycollective report FILE`` prints a
    table of the file.

    The ranks compare their clocks by messages when the trace begins and when it ends. ``clock_error_us`` in the file's
    ``otherData`` is the largest error of a rank's times.

    A rank keeps its calls in memory until the trace ends, 184 B for each. Calls after the first ``most_calls`` are not
    in the trace, and rank 0 warns how many there were.

    If a rank leaves the block by an exception, no file is written, and no rank waits for this rank. The exception
    propagates on this rank. Rank 0 warns, unless it has raised an exception itself.

    Args:
        file: the file that rank 0 writes. A file of this name is replaced atomically.
        comm: a communicator, the world by default. The trace has the calls of its ranks on all communicators.
        most_calls: the largest number of calls that a rank keeps, from 1. Default 2 ** 18.

    Raises:
        ValueError: ``most_calls`` is not positive.
        RuntimeError: the call is inside :func:`jax.jit` or another transform; a trace of some rank is on already; or
            another rank does not enter or leave within the timeout of :func:`init`.
        OSError: rank 0 cannot write the file. The other ranks raise RuntimeError.

    Order:
        At its begin it waits for the programs that were dispatched before it, and at its end for those inside.

    Source:
        The trace-event format of the Chromium project.

    Example:
        >>> import json, pathlib, tempfile
        >>> import jax.numpy as jnp, pycollective as pc
        >>> found = []
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = pathlib.Path(folder) / "out.json"
        ...     with pc.trace(file):
        ...         y = pc.psum(jnp.ones((2, 3)), pc.world())
        ...     if pc.world().rank == 0:
        ...         found = json.loads(file.read_text())["traceEvents"]
        >>> calls = {event["args"]["description"] for event in found if event["name"] == "allreduce"}
        >>> calls == {"allreduce(float32[2,3], op=sum)"} or pc.world().rank > 0
        True
    """
    session = _begin(Path(file), comm, integer(_WHERE, None, "most_calls", most_calls))
    try:
        yield
        dispatch.wait_for_all_programs()
    except BaseException as error:
        watch.stop_trace()
        _State.is_on = False
        leave.tell_error(session.mpi, f"rank {session.comm.rank} raised {type(error).__name__}: {error}")
        raise
    span = session.began, clocks.now_ns()
    records, dropped = watch.stop_trace()
    _State.is_on = False
    with watch.waiting(_WHERE, session.comm._identity):
        _end(session, records, dropped, span, Path(file))


def _begin(file: Path, comm: Communicator | None, most_calls: int) -> _Session:
    """Waits until all ranks have entered, compares the clocks, and makes the recorder keep all calls from now on."""
    if not at_top_level():
        remedy = "Put the function's call inside the with, not the with inside the function."
        fail(RuntimeError, _WHERE, None, "a call at top level", "one inside jax.jit or another transform", remedy)
    if most_calls < 1:
        fail(ValueError, _WHERE, None, "most_calls to be positive", most_calls, "Leave it out for the default.")
    comm = given_or_world(_WHERE, comm)
    dispatch.wait_for_all_programs()
    got = "a trace that is on already" if _State.is_on else None
    if comm.rank == 0 and not file.absolute().parent.is_dir():
        got = f"{file}, whose folder does not exist"
    own = None if got is None else f"{got}, on rank {comm.rank}"
    problem = complete(comm, _WHERE, _WHERE, (_WHERE, own), lambda: meet_or_fail(comm, _WHERE, own, first_of))
    if problem is not None:
        expected, remedy = "a folder that exists, and one trace at a time", "Make the folder, or leave the other trace."
        fail(RuntimeError, _WHERE, comm, expected, problem, remedy)
    with watch.waiting(_WHERE, comm._identity):
        mpi = comm.mpi.Dup()
        wait = waiter(comm, _WHERE, "compare clocks")
        reading = clocks.compare(mpi, wait, leaders_first=True)
        wait(mpi.Ibarrier().Test)  # sleeps, so that this rank does not disturb ranks that still compare
        mpi.Barrier()
    _State.is_on = True
    watch.start_trace(most_calls)
    return _Session(comm, mpi, reading, clocks.now_ns())


def _end(session: _Session, records: bytes, dropped: int, span: tuple[int, int], file: Path) -> None:
    """Sends the parts of all ranks to rank 0, which writes the file. If a rank raised, no file is written."""
    comm, mpi = session.comm, session.mpi
    wait = waiter(comm, _WHERE, "leave trace")
    raised = leave.errors(mpi, wait)
    if raised:
        if mpi.rank == 0:
            expected, remedy = "all ranks to leave the trace", f"{file} is not written."
            warnings.warn(message(_WHERE, expected, "; ".join(raised), remedy), RuntimeWarning, stacklevel=4)
        return
    reading = clocks.compare(mpi, wait, leaders_first=False)
    begin, end = clocks.to_first(mpi, session.reading, reading, wait)
    own = part_of_this_rank(records, dropped, begin, end, span)
    parts = leave.gather(mpi, own, wait)
    error = _write_unless_it_fails(parts, file) if mpi.rank == 0 else None
    problem = leave.result(mpi, None if error is None else str(error), wait)
    mpi.Free()
    if error is not None:
        raise error
    if problem is not None:
        fail(RuntimeError, _WHERE, comm, f"rank 0 to write {file}", problem, "Look at the error of rank 0.")
    for part in parts:
        if part.dropped:
            expected, got = f"at most {len(part.kind)} calls of a rank", f"{part.dropped} more on rank {part.rank}"
            remedy = "They are not in the trace: pass a larger most_calls, or trace fewer steps."
            warnings.warn(message(_WHERE, expected, got, remedy), RuntimeWarning, stacklevel=4)


def _write_unless_it_fails(parts: Sequence[Part], file: Path) -> OSError | None:
    """Writes the file. Returns the error, or None."""
    try:
        _write(parts, file)
    except OSError as error:
        return error
    return None


def _write(parts: Sequence[Part], file: Path) -> None:
    """Writes the timeline atomically: a reader sees the whole new file, or the previous one."""
    with files.replaced(file) as out:
        out.write('{"displayTimeUnit": "ns",\n"otherData": ' + json.dumps(events.other_data(parts)))
        out.write(',\n"traceEvents": [')
        for number, event in enumerate(events.events(parts)):
            out.write((",\n" if number else "\n") + json.dumps(event))
        out.write("\n]}\n")
