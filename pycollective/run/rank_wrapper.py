"""What ``pycollective run`` starts as each rank: it binds itself to its cores, then becomes the program.

Each launcher has its own way to bind ranks, and its own idea of a core; so ranks bind themselves. They know their place
on their host from the launcher's variables, since MPI has not started yet.
"""

from __future__ import annotations

import argparse
import os
import sys

from pycollective.config import config
from pycollective.launch.host_share import physical_cores, share_of, visible_gpus
from pycollective.launch.started_by import launcher_gives_gpus, local_place

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

ARENAS_VARIABLE = "MALLOC_ARENA_MAX"
"""glibc's variable for what transport/mpi.py sets, too late where a program imports mpi4py first."""

HASH_SEED_VARIABLE = "PYTHONHASHSEED"
"""Python's variable for the order of sets of strings, in which a program may add up its arrays."""


def main() -> None:
    """Takes this rank's share of its host, then becomes the program."""
    parser = argparse.ArgumentParser(prog="python -m pycollective.run.rank_wrapper", description=__doc__)
    parser.add_argument("--bind", choices=("core", "none"), default="core")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    place = local_place(os.environ)
    if place is not None:
        if options.bind == "core":
            cores = share_of(physical_cores(os.sched_getaffinity(0)), place)
            os.sched_setaffinity(0, set().union(*cores))
            for name in THREAD_VARIABLES:
                os.environ.setdefault(name, str(len(cores)))
        if not launcher_gives_gpus(os.environ) and (gpus := visible_gpus(os.environ)):
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(share_of(gpus, place))
    if config.malloc:
        os.environ.setdefault(ARENAS_VARIABLE, "1")
    os.environ.setdefault(HASH_SEED_VARIABLE, "0")
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.stderr.write(
            f"pycollective.run: expected a program, got {command[0]}: {error.strerror}. Is it on this host too?\n"
        )
        sys.exit(127 if isinstance(error, FileNotFoundError) else 126)  # as shells have it


if __name__ == "__main__":
    main()
