"""Trains a linear model by ``pc.elastic.run``, on ranks of which some kill themselves where the arguments say.

    python tests/e2e/elastic_training.py WAY KIND [RANK:MOMENT ...]

A rank is named by its place at the start. A moment is the number of a step, or one of:

    trace    while a function is traced; the rank does not die there, but sleeps
    slow     before step 7; the rank does not die there, but sleeps for 20 s
    stopped  before step 7; the rank does not die there, but is stopped
    commit   in the midst of the second commit
    again    in the midst of what follows another failure
    end      when its training has returned

Each rank prints what it is left with as a line of JSON.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pycollective as pc
from pycollective.elastic import state as states
from pycollective.ranks import world as worlds

STEPS, ROWS, RATE = 20, 12, np.float32(0.02)
SLEEPS = {"trace": 1.5, "slow": 20}
"""Seconds."""

READ_LATE_S = 2.5
"""A report tells a stopped rank of the end for 1 s, kills it, and waits up to 2 s until it is read."""

COMMITS = 5
"""After so many steps comes a commit."""


def data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype(np.float32)
    return x, x @ np.arange(1, 5, dtype=np.float32)


def trained() -> np.ndarray:
    """What the training ends with, computed without MPI."""
    (x, y), w = data(), np.zeros(4, np.float32)
    for _ in range(STEPS):
        w = w - RATE * (x.T @ (x @ w - y))
    return w


def gradient(w: Any, x: Any, y: Any) -> Any:
    return jax.grad(lambda w: 0.5 * jnp.sum((x @ w - y) ** 2))(w)


def long(w: Any, *_: Any) -> Any:
    """Zeros that take so long that JAX does not wait for the program: its error comes later, with its token."""
    large = jnp.full((300, 300), w[0])
    return jnp.sum(jnp.tanh(large @ large)) * jnp.zeros(4)


# The ways to the sum over all ranks. Each is a function of the weights and of this rank's rows.
def over_devices(w: Any, x: Any, y: Any) -> Any:
    devices = jax.local_device_count()
    parts = [part.reshape(devices, -1, *part.shape[1:]) for part in (x, y)]
    return _over_devices(w, *parts)


def by_messages(w: Any, x: Any, y: Any) -> Any:
    """A ring: no rank compares these calls with all others, nor do they meet."""
    size = pc.world().size
    ring = [(rank, (rank + 1) % size) for rank in range(size)]
    total = part = gradient(w, x, y)
    for _ in range(size - 1):
        part = pc.ppermute(part, None, ring)
        total = total + part
    return total


_over_devices = pc.pmap(lambda *a: lax.psum(gradient(*a), "i"), "i", in_axes=(None, 0, 0), out_axes=None)
WAYS: dict[str, Callable[..., Any]] = {
    "axis": pc.jit(lambda *a: lax.psum(gradient(*a), "i"), axis_name="i"),
    "communicator": pc.jit(lambda *a: pc.psum(gradient(*a))),
    "effect": jax.jit(lambda *a: pc.psum(gradient(*a)) + 0 * long(*a)),
    "eager": lambda *a: pc.psum(gradient(*a)),
    "devices": over_devices,
    "messages": pc.jit(by_messages),
    "gather": lambda *a: pc.all_gather(gradient(*a)).sum(0),
}


def before(owner: Any, name: str, do: Callable[[], Any]) -> None:
    """Lets ``do`` come before the next call of a function."""
    original = getattr(owner, name)

    def seen(*args: Any, **kwargs: Any) -> Any:
        setattr(owner, name, original)
        do()
        return original(*args, **kwargs)

    setattr(owner, name, seen)


def be_read_late() -> None:
    """Lets what this rank writes to its standard error be read late, as by a slow launcher: a report waits for it."""
    out, (reading, writing) = os.dup(2), os.pipe()
    os.dup2(writing, 2)

    def pass_on() -> None:
        while True:
            select.select([reading], [], [])
            time.sleep(READ_LATE_S)
            os.write(out, os.read(reading, 1 << 16))

    threading.Thread(target=pass_on, daemon=True).start()


class Faults:
    """What this rank does to itself, and when: before a step, or at a moment that has a name."""

    def __init__(self, start: int, arguments: list[str]) -> None:
        self.start = start
        self.moments = {moment for rank, moment in (text.split(":") for text in arguments) if int(rank) == start}

    def at(self, moment: str) -> None:
        if moment in self.moments:
            self.do(moment)

    def do(self, moment: str) -> None:
        self.moments.discard(moment)
        if moment in SLEEPS:
            time.sleep(SLEEPS[moment])
            return
        sys.stdout.write(json.dumps({"killed": time.time()}) + "\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    way, kind, *arguments = sys.argv[1:]
    start = pc.world().rank
    faults = Faults(start, arguments)
    notes: dict[str, Any] = {"start": start, "first_steps": [], "want": trained().tolist()}
    x, y = data()

    def traced(*args: Any) -> Any:
        faults.at("trace")  # each rank traces for itself
        return WAYS[way](*args)

    step = jax.jit(traced) if any("trace" in text for text in arguments) else traced

    def train(state: pc.elastic.State, world: pc.Communicator) -> int:
        assert world is pc.world()
        share = ROWS // world.size
        # The rows of other ranks are zeros, so shapes stay as they are when there are fewer ranks: a function that is
        # not traced again would run its old program.
        own = np.arange(ROWS) // share == world.rank
        notes["from"] = [*notes.get("from", []), state.step]
        part = None
        if kind == "split":
            part = world.split(color=0 if world.rank < 2 else 1)
            notes.setdefault("parts", []).append(part)
        first = True
        while state.step < STEPS:
            faults.at(str(state.step))
            if state.step == 7:
                faults.at("slow")
                if "stopped" in faults.moments:
                    os.kill(os.getpid(), signal.SIGSTOP)
            if "commit" in faults.moments and state.step:
                before(states._Leaf, "of", partial(faults.at, "commit"))
            if kind == "raise" and state.step == 7 and start == 1:
                raise ValueError("no luck")
            if kind == "split" and state.step == 7 and start == 0 and world.size == 3:
                pc.psum(jnp.ones(3), part)  # rank 1, which lives, never comes: it waits for rank 2 in the step
            state.w = state.w - RATE * step(state.w, x * own[:, None], y * own)
            state.step += 1
            if first:
                state.w.block_until_ready()
                notes["first_steps"].append(time.time())
                first = False
            if state.step % COMMITS == 0:
                state.commit()
        faults.at("end")
        return world.size

    if kind == "late":
        be_read_late()
    if "again" in faults.moments:  # in the midst of what follows a failure
        before(worlds, "lose_all", partial(before, pc.Communicator, "_make", partial(faults.at, "again")))
    state = pc.elastic.State(w=jnp.zeros(4), step=0)
    least = pc.world().size if kind == "most" else 1
    notes["returned"] = pc.elastic.run(train, state, min_ranks=least, required=kind == "required")
    for part in notes.pop("parts", [])[:-1]:
        try:
            pc.psum(jnp.ones(3), part)
        except ValueError as error:
            notes["part"] = str(error)
    notes |= {"size": pc.world().size, "w": np.asarray(state.w).tolist(), "step": state.step}
    assert float(pc.psum(jnp.float32(1))) == notes["size"]
    sys.stdout.write(json.dumps(notes) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
