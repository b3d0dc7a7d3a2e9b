"""Faults of one rank at random moments of a training, and what came of each: ``python -m tests.e2e.random_faults``.

Each fault must end the job within the bound, with a status other than 0 and a sentence that names the rank and the
cause; a delay must change nothing. Nothing may be left running. ``--seed`` repeats a series, ``--first`` begins later
in it, and ``--count`` says how many faults.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests import unoptimised
from tests.e2e import launch
from tests.e2e.launch import mpirun
from tests.e2e.train_with_fault import MISMATCHES, STEPS, Fault

BOUND_S = 120
PROGRAM = str(Path(__file__).with_name("train_with_fault.py"))
ENV = {
    "PYCOLLECTIVE_TIMEOUT": "8",
    "PYCOLLECTIVE_RECORDS": "off",
    "JAX_NUM_CPU_DEVICES": "1",
    "XLA_FLAGS": unoptimised.flags(),
}

SAID = {
    # Open MPI's launcher names the rank. Under MPICH's the rank's neighbour does, if it is not ended before it has; the
    # launcher names a process, which may be one that it has ended itself. Or a report says it.
    "kill": [
        r"(rank {rank} with PID|rank {rank} of \d+ died: process|PID) {pid}\b|process {pid} on host \S+ has ended"
    ],
    "stop": [r"rank {rank} does not answer: process \d+ on host \S+ is stopped"],
    "raise": [r"pycollective: rank {rank} of \d+ raised", "no luck"],
    "mismatch": [
        r"expected the same call on every rank, got .* here and .* on rank \d|rank {rank} (has|makes no call)"
    ],
}


def draw(seed: int, ranks: int) -> Iterator[Fault]:
    """The faults of a series, without end."""
    drawn = random.Random(seed)
    while True:
        kind = drawn.choice(("kill", "stop", "raise", "delay", "mismatch"))
        how = drawn.choice(MISMATCHES if kind == "mismatch" else ("loop", "callback", "thread"))
        seconds = 1.0 if kind == "delay" else 0.02
        yield Fault(kind, how, drawn.randrange(ranks), drawn.randrange(1, STEPS - 1), drawn.uniform(0, seconds))


def weights(printed: str) -> list[float]:
    """The weights at the end of a training; none if it did not come to its end."""
    found = re.search(r"^weights (.*)$", printed, re.MULTILINE)
    return json.loads(found[1]) if found else []


def run(fault: Fault, ranks: int, undisturbed: list[float]) -> tuple[str, float, str]:
    """Runs the training with a fault.

    Returns:
        What is wrong, "" if all is as it must be; the seconds that it took; what the ranks and the launcher said.
    """
    started, mark = time.monotonic(), secrets.token_hex(8)  # the mark tells these processes from others
    done = mpirun(ranks, PROGRAM, json.dumps(fault), mark, timeout=BOUND_S, env=ENV)
    seconds, said = time.monotonic() - started, done.stdout + done.stderr
    if seconds > BOUND_S:
        return "it did not end", seconds, said
    try:
        launch.wait_until_gone(mark)
    except AssertionError as error:
        return str(error), seconds, said
    if fault.kind in ("none", "delay"):
        right = done.returncode == 0 and (not undisturbed or weights(done.stdout) == undisturbed)
        return "" if right else f"status {done.returncode}, weights {weights(done.stdout)}", seconds, said
    if done.returncode == 0:
        return "status 0", seconds, said
    (pid,) = re.findall(rf"^rank {fault.rank} is process (\d+)$", done.stdout, re.MULTILINE)
    missing = [text for text in SAID[fault.kind] if not re.search(text.format(rank=fault.rank, pid=pid), said)]
    return f"not said: {missing}" if missing else "", seconds, said


def main() -> None:
    """Runs a series, prints each fault that came out wrong, and a table of kinds and outcomes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    _, _, said = run(Fault("none", "", 0, 0, 0), options.ranks, [])
    undisturbed = weights(said)
    assert undisturbed, said
    faults = draw(options.seed, options.ranks)
    right: collections.Counter[str] = collections.Counter()
    longest: dict[str, float] = {}
    count = wrong_ones = 0
    for number in range(options.first + options.count):
        fault = next(faults)
        if number < options.first:
            continue
        wrong, seconds, said = run(fault, options.ranks, undisturbed)
        count += 1
        key = f"{fault.kind}, {fault.how}"
        right[key] += not wrong
        longest[key] = max(longest.get(key, 0), seconds)
        if wrong:
            wrong_ones += 1
            sys.stdout.write(f"seed {options.seed}, number {number}: {fault}: {wrong}\n{said}\n")
        sys.stdout.write(f"{number} {key}: {seconds:.1f} s\n")
        sys.stdout.flush()
    for key in sorted(longest):
        sys.stdout.write(f"{key:20} {right[key]:4} right, at most {longest[key]:.0f} s\n")
    sys.stdout.write(f"{count} faults, {wrong_ones} wrong\n")
    sys.exit(wrong_ones > 0)


if __name__ == "__main__":
    main()
