"""Runs an example in which one rank kills itself at its first attempt, so that ``run --restarts`` has something to do.

    python tests/e2e/fail_at.py --seed 7 --steps 30 PROGRAM [ARGUMENTS...]           before one of so many steps
    python tests/e2e/fail_at.py --saving 5 PROGRAM --checkpoints D [ARGUMENTS...]    while rank 0 writes a checkpoint

The examples count their steps with tqdm. Python tells of each file that orbax makes, opens or renames.
"""

from __future__ import annotations

import argparse
import os
import random
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

from mpi4py import MPI
from tqdm import tqdm

EVENTS_OF_A_CHECKPOINT = 20
"""How often orbax makes, opens or renames a file for a checkpoint; last it renames the whole."""


def fail_at(rank: int, step: int) -> None:
    """Lets a rank kill itself before a step, counted from 0."""
    update, steps = tqdm.update, 0

    def counted(self: Any, n: float = 1) -> Any:
        nonlocal steps
        if steps == step and rank == MPI.COMM_WORLD.rank:
            die()
        steps += 1
        return update(self, n)

    tqdm.update = counted


def fail_while_saving(directory: str, event: int) -> None:
    """Lets the rank that writes checkpoints kill itself before an event of the second one, counted from 0."""
    events = 0

    def heard(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal events
        if name not in ("open", "os.mkdir", "os.rename") or "-tmp" not in str(arguments[0]):
            return
        if str(arguments[0]).startswith(directory) and any(path.name.isdecimal() for path in Path(directory).iterdir()):
            if events == event:
                die()
            events += 1

    sys.addaudithook(heard)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--saving", type=int)
    parser.add_argument("program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if os.environ.get("PYCOLLECTIVE_RESTART", "0") == "0":
        if options.saving is not None:
            directory = options.arguments[options.arguments.index("--checkpoints") + 1]
            fail_while_saving(str(Path(directory).absolute()), options.saving)
        else:
            drawn = random.Random(options.seed)  # draws the same on all ranks
            fail_at(drawn.randrange(MPI.COMM_WORLD.size), drawn.randrange(options.steps))
    sys.argv = [options.program, *options.arguments]
    sys.path[0] = str(Path(options.program).parent)
    runpy.run_path(options.program, run_name="__main__")


if __name__ == "__main__":
    main()
