"""A run of ``pycollective bench``: measures every workload of the command line, on all implementations in turns."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

import pycollective as pc
from pycollective import files
from pycollective.bench.implementations import (
    Copies,
    Floor,
    GlobalArrays,
    Implementation,
    Mpi4jax,
    NoCommunication,
    Pycollective,
    RawMpi,
    ThroughNumPy,
)
from pycollective.bench.measure import ROUNDS, InProcess, Runner, Timing, measure
from pycollective.bench.options import JAX_MPI
from pycollective.bench.report import COLUMNS, UNITS, Row
from pycollective.bench.roofline import Roofline, measure_roofline
from pycollective.bench.workloads import Workload, keeps_shape, make_workload, tree_workload
from pycollective.errors import message
from pycollective.transport import native
from pycollective.transport.mpi import MPI

Peer = Callable[[MPI.Intracomm, int], Runner]


def run(options: argparse.Namespace, peers: Mapping[str, Peer] = MappingProxyType({})) -> int:
    """Measures; on rank 0 it prints and writes the results. All ranks must make this call.

    Args:
        options: the command line.
        peers: implementations of other projects that ``--against`` may name: functions from the ranks and the number of
            local devices of each.

    Returns:
        The exit status: 1 if a result was wrong, except for those of peers.

    Raises:
        ValueError: an operation or dtype is unknown, or it cannot do what is asked.
        ImportError: a library that was asked for is not installed.
    """
    world = MPI.COMM_WORLD
    with suppress(RuntimeError):  # devices are in use already; pc.init then checks their number
        jax.config.update("jax_num_cpu_devices", options.devices)
    start = pc.distributed.initialize if JAX_MPI in options.against else pc.init
    comm = start(devices=options.devices)  # as in a user's program, before anything else uses JAX's devices
    plot = importlib.import_module("pycollective.bench.plot") if options.plot else None
    workloads = list(_workloads(options, comm.size * options.devices))
    runners = _runners(options, comm, world)
    others = [make(world, options.devices) for name, make in peers.items() if name in options.against]
    runners += others
    other_hosts = max(comm.mpi.allgather((comm.host_index > 0, -comm.rank)))  # and the first rank there, if any
    partner = -other_hosts[1] if other_hosts[0] else comm.size - 1
    roofline = measure_roofline(world, comm.host_count, partner, options.link_gbps)
    title = _title(comm, options.devices, roofline)
    rows: list[Row] = []
    say = print if comm.rank == 0 else (lambda *_, **__: None)
    say("\n".join(f"# {line}" for line in title))
    with _progress(len(workloads) * len(runners) * ROUNDS, comm.rank) as tick:
        heading = ""
        for name, workload in workloads:
            if heading != (heading := f"\n# {name}, {_mode(workload)}"):
                say(heading, f"#{COLUMNS[1:]}", f"#{UNITS[1:]}", sep="\n", flush=True)
            timings = measure(world, workload, runners, calls=options.iters, warmup=options.warmup, tick=tick)
            least_s = roofline.least_s(workload, options.devices)
            new = list(_rows(name, workload, timings, comm.size, least_s))
            say(*(row.line() for row in new), sep="\n", flush=True)
            rows += new
    if comm.rank == 0:
        if options.json:
            about = {"title": title, "arguments": {key: str(value) for key, value in vars(options).items()}}
            files.write(options.json, json.dumps({**about, "rows": [row.as_json() for row in rows]}, indent=1) + "\n")
        if plot is not None:
            plot.plot(rows, title[0], options.plot)
    wrong: Counter[bool] = Counter()
    for row in rows:
        wrong[row.implementation in {runner.name for runner in others}] += row.wrong
    say(f"\n# wrong results: {wrong[False]}", f"; of peers: {wrong[True]}" if others else "", sep="")
    return 1 if wrong[False] else 0


def _runners(options: argparse.Namespace, comm: pc.Communicator, world: MPI.Intracomm) -> list[Runner]:
    """The implementations that take turns."""
    implementations: list[Implementation] = [Pycollective(comm, options.devices), RawMpi(world), NoCommunication()]
    if options.wire_dtype:
        implementations.append(Pycollective(comm, options.devices, options.wire_dtype))
    others: dict[str, Callable[[], Implementation]] = {
        "floor": lambda: Floor(world),
        "numpy": lambda: ThroughNumPy(world),
        "copies": Copies,
        "mpi4jax": lambda: Mpi4jax(world),
        JAX_MPI: lambda: GlobalArrays("jax MPI"),
    }
    implementations += [make() for name, make in others.items() if name in options.against]
    return [InProcess(one, world.rank, world.size, world.Barrier) for one in implementations]


def _workloads(options: argparse.Namespace, n: int) -> Iterator[tuple[str, Workload]]:
    """The workload of every line of the table, with the name of its operation."""
    donations = {"no": (False,), "yes": (True,), "both": (False, True)}[options.donate]
    for op in options.ops:
        # "both" asks for what is possible; "yes" is an error where an operand cannot be donated.
        possible = (False,) if options.donate == "both" and not keeps_shape(op) else donations
        for mode in options.modes:
            for donated in possible if mode != "eager" else (False,):
                for dtype in options.datatypes.split(","):
                    how = {"mode": mode, "donated": donated}
                    if mode == "loop":
                        how |= {"loop": options.loop, "unroll": options.unroll}
                    if op == "tree":
                        yield f"tree:{options.model}", tree_workload(options.model, _dtype(dtype), **how)
                        continue
                    nbytes = options.minbytes
                    while nbytes <= options.maxbytes:
                        yield op, make_workload(op, nbytes, _dtype(dtype), n, **how)
                        nbytes *= options.stepfactor


def _dtype(name: str) -> np.dtype[Any]:
    try:
        dtype = np.dtype(jax.numpy.dtype(name))
    except TypeError:
        dtype = np.dtype(object)
    if dtype.kind in "OSU" or jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise ValueError(message("bench", "a dtype of JAX", repr(name), "Say float32; JAX_ENABLE_X64=1 for 64 bits."))
    return dtype


def _mode(workload: Workload) -> str:
    return workload.mode + (", donated" if workload.donated else "")


def _rows(op: str, workload: Workload, timings: dict[str, Timing], ranks: int, least_s: float) -> Iterator[Row]:
    """A line of the table for each implementation."""
    raw = timings.get(RawMpi.name)
    for name, timing in timings.items():
        rate = workload.nbytes / timing.median_us * 1e-3
        yield Row(
            op=op,
            mode=_mode(workload),
            size=workload.nbytes,
            count=workload.count,
            type=workload.dtype.name,
            implementation=name,
            median_us=timing.median_us,
            min_us=timing.min_us,
            p99_us=timing.p99_us,
            algbw=rate,
            busbw=rate * workload.traffic(ranks * timing.participants) / workload.nbytes,
            wrong=timing.wrong,
            over_raw=timing.median_us / raw.median_us if raw else None,
            roofline=least_s * 1e6 / timing.median_us,
        )


def _title(comm: pc.Communicator, devices: int, roofline: Roofline) -> list[str]:
    library = MPI.Get_library_version().splitlines()[0].strip(" \x00")
    first = jax.local_devices()[0]
    kind = first.device_kind + (", whose memory MPI takes" if native.is_direct() else "")
    size = f"{comm.size} rank(s) x {devices} device(s) on {comm.host_count} host(s)"
    return [
        f"pycollective {pc.__version__}: {size}, {kind}",
        f"{library}, JAX {jax.__version__}, Python {platform.python_version()}, {platform.machine()}",
        f"roofline: {roofline.name}; raw MPI: one array of each rank; trees: as one array",
    ]


@contextmanager
def _progress(total: int, rank: int) -> Iterator[Callable[[], Any]]:
    """A progress bar on rank 0's terminal, and a function that advances it; elsewhere that function does nothing."""
    if rank > 0 or not sys.stderr.isatty() or find_spec("tqdm") is None:
        yield lambda: None
    else:
        with importlib.import_module("tqdm").tqdm(total=total, unit="turn", leave=False) as bar:
            yield bar.update
