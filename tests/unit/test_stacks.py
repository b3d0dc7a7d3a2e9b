"""The frames of Python's threads that reports show: how they are read while Python runs, and while it cannot."""

from __future__ import annotations

import subprocess
import sys

START = """
import ctypes, faulthandler, sys, threading, time
import jax, jax.numpy as jnp
import pycollective as pc
from pycollective.faults import stacks
from pycollective.transport import watch

TIMES = 2000
pc.init()
stacks.start()


def take(times):
    taken = []
    thread = threading.Thread(target=lambda: taken.append(watch.take_stacks(times)))
    thread.start()
    return thread, taken


library = ctypes.PyDLL(None)


def keeps_the_lock():
    library.usleep(2_500_000)  # no other Python thread runs meanwhile, and a take lasts a second


def with_the_lock_kept():
    thread, taken = take(TIMES)  # it needs the lock so many times, and will not have had it before it is kept
    keeps_the_lock()
    thread.join()
    return taken[0]
"""

# Python recurses, traces, lowers and compiles while another thread asks for the frames.
RUNS = """
sys.setswitchinterval(1e-5)  # a thread that wants the interpreter's lock waits so long


def recurses(depth):
    return 0 if depth == 0 else 1 + recurses(depth - 1)


thread, taken = take(10_000)
turn = 0
while thread.is_alive():
    turn += 1
    recurses(turn % 200)
    loop = lambda x: jax.lax.scan(lambda c, _: (c + x, jnp.sin(c) * turn), x, None, length=2)
    traced = jax.jit(loop).trace(1.0)
    if turn % 10 == 0:
        traced.lower().compile()
print(*taken[0][:2])
print(taken[0][2])
"""

LOCK = """
thread, taken = take(1)
thread.join()
print("before", taken[0][1])
came, by_signal, text = with_the_lock_kept()
print(came == TIMES, by_signal in (1, 2, 3) or by_signal)
"""

# faulthandler shows at most a hundred threads, the last ones that were made: the main one is not among them.
THREADS = """
for _ in range(120):
    threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
thread, taken = take(1)
thread.join()
print(*taken[0][:2])
print(taken[0][2])
came, by_signal, _ = with_the_lock_kept()
print(TIMES - came in (1, 2, 3) or came, by_signal)
"""

ENDS = """
for number in range(34, 65):
    faulthandler.unregister(number)  # as Python does when it ends
came, by_signal, _ = with_the_lock_kept()
print(TIMES - came in (1, 2, 3) or came, by_signal)
began = time.monotonic()
stacks.stop()
print(watch.take_stacks(1)[0], stacks._State.thread.is_alive(), time.monotonic() - began < 1)
"""


def run(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", START + program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout.splitlines()


def test_ten_thousand_takes_do_not_disturb_a_rank_that_traces_and_compiles() -> None:
    counts, *frames = run(RUNS)
    assert counts == "10000 0"
    assert any("in <module>" in frame for frame in frames), frames


def test_a_rank_whose_lock_is_kept_in_c_is_read_by_the_signal() -> None:
    assert run(LOCK) == ["before 0", "True True"]


def test_no_other_thread_is_taken_for_the_main_one() -> None:
    counts, frames, _, without_lock = run(THREADS)
    assert counts == "1 0"
    assert frames == "  no frames: this process has more than a hundred Python threads"
    assert without_lock == "True 0"  # not known either, rather than another thread


def test_a_late_take_meets_no_default_action() -> None:
    assert run(ENDS) == ["True 0", "0 False True"]


def test_the_file_of_the_frames_is_no_object_that_nobody_closes() -> None:
    program = START + "taken = take(1)\ntaken[0].join()\nassert taken[1], taken\n"
    command = [sys.executable, "-X", "dev", "-W", "ignore", "-W", "always::ResourceWarning", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "ResourceWarning" not in done.stderr
