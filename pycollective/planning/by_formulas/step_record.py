"""What the steps of a program take, in the file that ``pycollective plan --verify`` reads."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from pycollective import files
from pycollective.errors import message
from pycollective.planning import allocation

if TYPE_CHECKING:
    from pycollective.ranks.communicator import Communicator  # the command that reads such files starts no MPI

Tree = Any
WATCHED_STEPS = (1, 2)
"""The steps whose memory is measured, which makes them slower. The first one has compiled the program."""


class Steps(NamedTuple):
    """What steps took.

    Attributes:
        seconds: those of each step on rank 0.
        memory: the bytes that a step needs on the device that needs most, its arguments among them. None where nothing
            says it.
    """

    seconds: list[float]
    memory: int | None

    @classmethod
    def load(cls, file: Path) -> Steps:
        """Reads what :meth:`StepRecord.save` has written, or a list of seconds.

        Raises:
            ValueError: the file is neither.
        """
        try:
            found = json.loads(file.read_text())
        except (ValueError, RecursionError):
            found = None
        seconds, memory = (found.get("seconds"), found.get("memory")) if isinstance(found, dict) else (found, None)
        is_memory = memory is None or type(memory) is int
        if not isinstance(seconds, list) or not all(map(_is_duration, seconds)) or not is_memory:
            remedy = "Let the program write them by StepRecord.save, or as a list of seconds."
            raise ValueError(message("plan", "the times of steps", str(file), remedy))
        return cls(seconds, memory)


def _is_duration(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < 1e30


class StepRecord:
    """Records the time of each step of a program, and the memory that one needs.

    Args:
        file: where to write it. None to record nothing: then steps are not waited for.
        comm: the ranks that make the steps.

    Example:
        >>> import tempfile
        >>> import jax, jax.numpy as jnp, pycollective as pc
        >>> comm, file = pc.init(), Path(tempfile.mkdtemp()) / "steps.json"
        >>> record = StepRecord(file, comm)
        >>> step = jax.jit(lambda state, batch: (state + batch.sum(), state.sum()))
        >>> state = jnp.zeros(1000)
        >>> for i in range(5):
        ...     state, loss = record.step(step, state, jnp.ones(3))
        >>> record.save()
        >>> comm.rank > 0 or len(Steps.load(file).seconds) == 5  # rank 0 writes it
        True
    """

    def __init__(self, file: Path | None, comm: Communicator) -> None:
        self._file, self._comm = file, comm
        self._seconds: list[float] = []
        self._memory: list[float] = []

    def step(self, step: Callable[..., Tree], state: Tree, *batch: Tree) -> Tree:
        """Returns ``step(state, *batch)`` once it is there. ``step`` may take the memory of the state."""
        if self._file is None:
            return step(state, *batch)
        with self._watched(state) if len(self._seconds) in WATCHED_STEPS else nullcontext():
            started = time.perf_counter()
            outs = jax.block_until_ready(step(state, *batch))
            self._seconds.append(time.perf_counter() - started)
        return outs

    @contextmanager
    def _watched(self, state: Tree) -> Iterator[None]:
        """The peak of what a step takes beside what is there without it and its state, by the host's malloc."""
        leaves = [x for x in jax.tree.leaves(jax.block_until_ready(state)) if isinstance(x, jax.Array)]
        shards = [shard for x in leaves for shard in x.addressable_shards]
        before = allocation.settled() - sum(shard.data.nbytes for shard in shards)
        devices = len({shard.device for shard in shards}) or 1
        del leaves, shards
        with allocation.peak() as most:
            yield
        self._memory.append((most.nbytes - before) / devices)

    def save(self) -> None:
        """Writes the file. All ranks must make this call."""
        if self._file is None:
            return
        of_ranks = self._comm.mpi.gather(self._most())
        if of_ranks is not None:
            memory = None if None in of_ranks else math.ceil(max(of_ranks))
            files.write(self._file, json.dumps({"seconds": self._seconds, "memory": memory}))

    def _most(self) -> float | None:
        """What a device of this rank needs, where it is known. An accelerator says it of all that ran so far."""
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        if all("peak_bytes_in_use" in one for one in stats):
            return float(max(one["peak_bytes_in_use"] for one in stats))
        return max(self._memory) if self._memory and allocation.has_arrays() else None
