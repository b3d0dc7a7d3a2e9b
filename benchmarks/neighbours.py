"""Times psum beside other processes that want the same cores, and raw MPI's Allreduce in turns with it.

    python benchmarks/neighbours.py
    python benchmarks/neighbours.py --checkouts before=../before after=.

Two ranks call psum in a jitted loop. Each core that they may use has 0, 1, 2 or 4 busy processes; then both ranks, and
as many busy processes, share one core. With several checkouts, each with a library that was built there, a job of each
takes its turn. The figures are microseconds for a call, of the slower rank: the median, the 99th percentile and the
mean of all samples, a sample being the mean of one loop.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

_SIZES = (4, 16 << 10, 1 << 20)
_MARK = "samples: "

Samples = dict[tuple[str, int, int, str], list[float]]
"""Microseconds, by where the ranks run, the busy processes for each core, the bytes and who makes the call."""


def _busy(core: int) -> subprocess.Popen[bytes]:
    """Starts a process that computes on a core until it is killed, or the rank that has started it has ended."""
    source = (
        f"import ctypes, os; ctypes.CDLL(None).prctl(1, 9); os.sched_setaffinity(0, {{{core}}}); print(flush=True)\n"
        f"while os.getppid() == {os.getpid()}:\n for _ in range(10**6): pass"
    )
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def run_rank(options: argparse.Namespace) -> None:
    import jax
    from jax import lax
    from mpi4py import MPI

    import pycollective as pc

    if Path.cwd() not in Path(pc.__file__).parents:
        raise SystemExit(f"expected the package of {Path.cwd()}, got {pc.__file__}")
    comm = pc.init()
    mpi = comm.mpi

    def looped(size: int) -> Any:
        x = jax.numpy.ones(size // 4, np.float32)
        loop = pc.jit(
            lambda x: lax.fori_loop(0, options.loop, lambda _, x: lax.psum(x, "ranks"), x),
            axis_name="ranks",
            donate_argnums=0,
        )
        ones = np.ones(size // 4, np.float32)

        def run() -> None:
            nonlocal x
            x = loop(x).block_until_ready()

        def raw() -> None:
            for _ in range(options.loop):
                mpi.Allreduce(ones, result)

        result = np.empty_like(ones)
        return {"ours": run, "raw": raw}

    functions = {size: looped(size) for size in options.sizes}
    for pair in functions.values():
        for function in pair.values():
            for _ in range(3):
                function()
    for load in options.loads:
        neighbours = []
        if comm.rank == 0:
            neighbours = [_busy(core) for core in sorted(os.sched_getaffinity(0)) for _ in range(load)]
        mpi.Barrier()
        for size, pair in functions.items():
            seconds: dict[str, list[float]] = {name: [] for name in pair}
            end = time.perf_counter() + options.seconds
            while mpi.bcast(time.perf_counter() < end):
                for name, function in pair.items():
                    for _ in range(options.turn):
                        mpi.Barrier()
                        begin = time.perf_counter()
                        function()
                        seconds[name].append(time.perf_counter() - begin)
            for name, own in seconds.items():
                slowest = np.empty(len(own))
                mpi.Allreduce(np.array(own), slowest, MPI.MAX)
                if comm.rank == 0:
                    us = [round(1e6 * one / options.loop, 3) for one in slowest]
                    print(_MARK + json.dumps([load, size, name, us]), flush=True)
        for process in neighbours:
            process.kill()
            process.wait()
        mpi.Barrier()


def run_jobs(options: argparse.Namespace) -> Samples:
    samples: Samples = defaultdict(list)
    arguments = [f"--{name}={getattr(options, name)}" for name in ("seconds", "loop", "turn")]
    for name in ("loads", "sizes"):
        arguments += [f"--{name}", *map(str, getattr(options, name))]
    cores = sorted(os.sched_getaffinity(0))
    mpirun = shutil.which("mpirun") or "mpirun"
    for _ in range(options.rounds):
        for place in options.places:
            for checkout in options.checkouts:
                name, _, folder = checkout.partition("=")
                job = [mpirun, "-n", "2", sys.executable, str(Path(__file__).resolve()), "--rank", *arguments]
                allowed = set(cores[:1]) if place == "core" else set(cores[:2])
                out = subprocess.run(
                    job,
                    cwd=folder,
                    env=os.environ | {"PYTHONPATH": str(Path(folder).resolve())},
                    stdout=subprocess.PIPE,
                    text=True,
                    check=True,
                    timeout=600,
                    preexec_fn=lambda allowed=allowed: os.sched_setaffinity(0, allowed),
                ).stdout
                for line in out.splitlines():
                    if line.startswith(_MARK):
                        load, size, who, us = json.loads(line.removeprefix(_MARK))
                        samples[place, load, size, "raw" if who == "raw" else name] += us
    return samples


def print_table(options: argparse.Namespace, samples: Samples) -> None:
    names = [checkout.partition("=")[0] for checkout in options.checkouts]
    print("| ranks on | busy, for each core | bytes |", *(f"{name}: p50 | p99 | mean |" for name in ["raw", *names]))
    print("|" + "---|" * (3 + 3 * (1 + len(names))))
    for place in options.places:
        for load in options.loads:
            for size in options.sizes:
                figures = []
                for name in ["raw", *names]:
                    us = np.array(samples[place, load, size, name])
                    figures += [np.percentile(us, 50), np.percentile(us, 99), us.mean()]
                where = "two cores" if place == "cores" else "one core"
                cells = " | ".join(f"{us:.3g}" if us < 100 else f"{us:.0f}" for us in figures)
                print(f"| {where} | {load} | {size} | {cells} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkouts", nargs="+", default=[f"ours={Path(__file__).parents[1]}"], metavar="NAME=DIR")
    parser.add_argument("--loads", type=int, nargs="+", default=[0, 1, 2, 4], help="busy processes for each core")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(_SIZES), help="bytes")
    parser.add_argument("--places", nargs="+", choices=("cores", "core"), default=["cores", "core"])
    parser.add_argument("--seconds", type=float, default=2, help="for each size and load (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="jobs of each checkout and place (default %(default)s)")
    parser.add_argument("--loop", type=int, default=20, help="calls in a loop (default %(default)s)")
    parser.add_argument("--turn", type=int, default=2, help="loops before it is the other's turn (default %(default)s)")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        run_rank(options)
    else:
        print_table(options, run_jobs(options))


if __name__ == "__main__":
    main()
