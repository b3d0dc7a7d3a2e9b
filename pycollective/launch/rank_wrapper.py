"""What ``pycollective run`` starts as each rank: binds itself to its cores, then becomes the program.

Ranks do so themselves because each launcher has its own way to bind, and its own idea of a core. The launcher's
variables tell them apart; MPI has not started yet.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from pycollective.launch.launchers import local_place, own_part, visible_gpus

THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def physical_cores(cpus: set[int], sys_cpu: Path = Path("/sys/devices/system/cpu")) -> list[set[int]]:
    """``cpus`` by the core that they share; in order of their numbers."""
    cores: dict[str, set[int]] = {}
    for cpu in sorted(cpus):
        file = sys_cpu / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        cores.setdefault(file.read_text() if file.exists() else str(cpu), set()).add(cpu)
    return list(cores.values())


def main() -> None:
    """Takes this rank's place and becomes the command."""
    parser = argparse.ArgumentParser(prog="python -m pycollective.launch.rank_wrapper", description=__doc__)
    parser.add_argument("--bind", choices=("core", "none"), default="core")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    place = local_place(os.environ)
    if place is not None:
        if options.bind == "core":
            cores = own_part(physical_cores(os.sched_getaffinity(0)), place)
            os.sched_setaffinity(0, set().union(*cores))
            for name in THREAD_VARIABLES:
                os.environ.setdefault(name, str(len(cores)))
        # Under --gpus-per-task those that are visible are the rank's own already.
        if "SLURM_GPUS_PER_TASK" not in os.environ and (gpus := visible_gpus(os.environ)):
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(own_part(gpus, place))
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"pycollective.run: expected a program, got {command[0]}: {error.strerror}. Is it on this host too?")


if __name__ == "__main__":
    main()
