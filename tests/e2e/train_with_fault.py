"""A small training in which one rank has a fault: ``python tests/e2e/train_with_fault.py FAULT``, under mpiexec.

FAULT is the JSON of a :class:`Fault`, which ``random_faults.py`` draws. Each rank prints the number of its process, and
rank 0 the weights at the end.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

STEPS = 12

MISMATCHES = ("shape", "dtype", "operation", "root", "one more", "one less")


class Fault(NamedTuple):
    """What goes wrong.

    Attributes:
        kind: "none", "kill", "stop", "raise", "delay" or "mismatch".
        how: of a mismatch, one of :data:`MISMATCHES`; else "loop", "callback" or "thread", where it strikes.
        rank: whose fault it is.
        step: in which step, from 0.
        seconds: after the step's beginning.
    """

    kind: str
    how: str
    rank: int
    step: int
    seconds: float


def strike(fault: Fault) -> None:
    """Lets the fault happen, from any thread."""
    time.sleep(fault.seconds)
    if fault.kind in ("kill", "stop"):
        os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
    elif fault.kind == "raise":
        raise ValueError("no luck")


def main() -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.experimental import io_callback

    import pycollective as pc

    fault = Fault(*json.loads(sys.argv[1]))
    world = pc.init()
    sys.stdout.write(f"rank {world.rank} is process {os.getpid()}\n")
    sys.stdout.flush()
    strikes_here = world.rank == fault.rank
    x = jnp.asarray(np.random.default_rng(world.rank).normal(size=(8, 3)), jnp.float32)
    target = x @ jnp.arange(1.0, 4.0)

    def looks_at(step: Any) -> None:
        if strikes_here and fault.how == "callback" and step == fault.step:
            strike(fault)

    def loss(weights: jax.Array) -> jax.Array:
        return jnp.mean((x @ weights - target) ** 2)

    @pc.jit(axis_name="ranks")
    def update(weights: jax.Array, step: jax.Array) -> jax.Array:
        io_callback(looks_at, None, step, ordered=True)
        return weights - 0.1 * lax.pmean(jax.grad(loss)(weights), "ranks")

    sums = jax.jit(lambda x: pc.psum(x, world))
    calls: dict[str, Callable[[], Any]] = {
        "shape": lambda: sums(jnp.ones(4)),
        "dtype": lambda: sums(jnp.ones(3, jnp.int32)),
        "operation": lambda: pc.pmax(jnp.ones(3), world),
        "root": lambda: pc.broadcast(jnp.ones(3), world, root=1),
        "one more": lambda: (sums(jnp.ones(3)), sums(jnp.ones(3))),
        "one less": lambda: None,
    }
    weights = jnp.zeros(3)
    for step in range(STEPS):
        now = strikes_here and step == fault.step
        if now and fault.kind != "mismatch" and fault.how == "loop":
            strike(fault)
        if now and fault.how == "thread":
            threading.Thread(target=strike, args=(fault,), name="striker").start()
        weights = update(weights, jnp.int32(step))
        metric = calls[fault.how] if now and fault.kind == "mismatch" else lambda: sums(jnp.ones(3))
        jax.block_until_ready(metric())
        jax.block_until_ready(pc.broadcast(weights, world, root=0))
        time.sleep(0.01)
    if world.rank == 0:
        sys.stdout.write(f"weights {weights.tolist()}\n")


if __name__ == "__main__":
    main()
