"""A loop of sums in which one rank does what the argument names: ``python tests/e2e/faulty.py FAULT``, under mpiexec.

The table is in ``test_fault_rows.py``. All ranks make two sums, then comes the fault, then two more sums.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

AT_FAULT = 1  # the rank
FAULT = sys.argv[1]
NO_LUCK = "no luck"


def signals_itself(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(1)


def raises(error: BaseException) -> NoReturn:
    raise error


def ends_before_init(how: str) -> None:
    from mpi4py import MPI

    ends: dict[str, Callable[[], object]] = {
        "raise": lambda: raises(ValueError(NO_LUCK)),
        "exit": lambda: sys.exit(3),
        "text": lambda: sys.exit(NO_LUCK),
        "leave": sys.exit,
        "interrupt": lambda: signals_itself(signal.SIGINT),
    }
    if MPI.COMM_WORLD.rank == AT_FAULT:
        ends[how]()


if FAULT.startswith("before the import: "):
    ends_before_init(FAULT.partition(": ")[2])

import pycollective as pc  # noqa: E402

if FAULT.startswith("before init: "):
    ends_before_init(FAULT.partition(": ")[2])

import jax  # noqa: E402
import jax.experimental  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from mpi4py import MPI  # noqa: E402

if FAULT == "in init":
    from pycollective.ranks import setup

    if MPI.COMM_WORLD.rank == AT_FAULT:
        setup.local_devices = lambda _: raises(AssertionError(NO_LUCK))
if FAULT == "another option of init":
    pc.init(timeout=-1 if MPI.COMM_WORLD.rank == AT_FAULT else None)

world = pc.init()
at_fault = world.rank == AT_FAULT
part = world.split(0)
X = jnp.arange(6, dtype=jnp.float32).reshape(2, 3)
step = pc.jit(lambda x: lax.psum(x, "i"), axis_name="i")
total = jax.jit(lambda x: pc.psum(x, world))
largest = jax.jit(lambda x: pc.pmax(x, world))

FAULTS: dict[str, Callable[[], object]] = {}
Fault = Callable[[], object]


def fault(function: Fault) -> Fault:
    """What all ranks do, by the function's name."""
    FAULTS[function.__name__.replace("_", " ")] = function
    return function


def of_one(function: Fault) -> Fault:
    """What one rank does alone."""
    return fault(function) if at_fault else fault(_named(lambda: None, function.__name__))


def _named(function: Fault, name: str) -> Fault:
    function.__name__ = name
    return function


# The end of one rank ----------------------------------------------------------------------------------------


@of_one
def segfault() -> None:
    signals_itself(signal.SIGSEGV)


@of_one
def kill() -> None:
    signals_itself(signal.SIGKILL)


@of_one
def interrupt() -> None:
    signals_itself(signal.SIGINT)


@of_one
def exit_text() -> None:
    sys.exit(NO_LUCK)


@of_one
def broken_stdout() -> None:
    class Broken:
        def write(self, text: str) -> int:
            return len(text)

        def flush(self) -> None:
            raise OSError("no reader")

    sys.stdout = Broken()  # type: ignore[assignment]
    raise ValueError(NO_LUCK)


@of_one
def out_of_memory() -> None:
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 28),) * 2)
    np.ones(1 << 30)


@fault
def feeding_thread() -> None:
    """A thread feeds the loop of each rank, and dies on one."""
    fed: queue.Queue[int] = queue.Queue()

    def feed() -> None:
        for number in range(4):
            if at_fault and number == 2:
                raise ValueError(NO_LUCK)
            fed.put(number)

    threading.Thread(target=feed, name="feeder").start()
    for _ in range(4):
        fed.get()
        step(X).block_until_ready()


def in_callback(name: str, call: Callable[[Callable[[Any], Any], jax.Array], jax.Array]) -> None:
    def act(x: Any) -> Any:
        if at_fault:
            raise ValueError(NO_LUCK)
        return np.asarray(x)

    def program() -> None:
        jax.jit(lambda x: pc.psum(call(act, x), world))(X).block_until_ready()

    fault(_named(program, name))


def debug_callback(act: Callable[[Any], Any], x: jax.Array) -> jax.Array:
    jax.debug.callback(act, x)
    return x


OF_X = jax.ShapeDtypeStruct(X.shape, X.dtype)
in_callback("pure_callback", lambda act, x: jax.pure_callback(act, OF_X, x))
in_callback("io_callback", lambda act, x: jax.experimental.io_callback(act, OF_X, x))
in_callback("ordered_callback", lambda act, x: jax.experimental.io_callback(act, OF_X, x, ordered=True))
in_callback("debug_callback", debug_callback)


@fault
def interrupt_in_wait() -> None:
    if at_fault:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT)).start()
    if world.rank != 0:
        step(X).block_until_ready()
    time.sleep(300)


@fault
def all_wait() -> None:
    sys.stdout.write("waits\n")
    sys.stdout.flush()
    if world.rank == 0:
        time.sleep(300)


# Calls that differ ------------------------------------------------------------------------------------------


@fault
def shape() -> None:
    for operand in (X, X.T):  # every rank knows both
        total(operand).block_until_ready()
    total(X.T if at_fault else X).block_until_ready()


@fault
def rank_0_logs() -> None:
    if world.rank == 0:
        largest(X).block_until_ready()


@fault
def trips() -> None:
    @jax.jit
    def program(x: jax.Array) -> jax.Array:
        count = 3 if at_fault else 2
        return lax.while_loop(lambda s: s[0] < count, lambda s: (s[0] + 1, pc.psum(s[1], world)), (0, x))[1]

    program(X).block_until_ready()


@fault
def branch() -> None:
    program = jax.jit(lambda x, skip: lax.cond(skip, lambda x: x, lambda x: pc.psum(x, world), x))
    program(X, at_fault).block_until_ready()


# Calls that not all make ------------------------------------------------------------------------------------


@of_one
def one_more() -> None:
    step(X).block_until_ready()


@fault
def one_less() -> None:
    """An exception that the program has caught is not the cause of what follows."""
    with contextlib.suppress(ValueError):
        raises(ValueError(NO_LUCK))
    if not at_fault:
        step(X).block_until_ready()


@fault
def communicator() -> None:
    pc.psum(X, part if at_fault else world).block_until_ready()


@of_one
def free() -> None:
    assert part is not None
    part.free()


@of_one
def large_send() -> None:
    pc.send(jnp.ones(1 << 20), world, dest=0)


@of_one
def compiles_alone() -> None:
    jax.clear_caches()


for _ in range(2):
    step(X).block_until_ready()
mapped = set(re.findall(r"/dev/shm/\S+", Path("/proc/self/maps").read_text()))
sys.stdout.write(f"SHARED {' '.join(mapped)}\n")
sys.stdout.flush()
if FAULT in FAULTS:
    FAULTS[FAULT]()
for _ in range(2):
    step(X).block_until_ready()
sys.stdout.write("end\n")
