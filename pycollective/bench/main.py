"""A run of ``pycollective bench``: every work of the command line, all contenders in turns."""

from __future__ import annotations

import argparse
import importlib
import json
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np

import pycollective as pc
from pycollective.bench.contenders import (
    Contender,
    Copies,
    Floor,
    Mpi4jax,
    NoCommunication,
    Pycollective,
    RawMpi,
    ThroughNumPy,
)
from pycollective.bench.measure import ROUNDS, InProcess, Runner, Timing, measure
from pycollective.bench.options import BESIDE
from pycollective.bench.report import COLUMNS, UNITS, Row
from pycollective.bench.roofline import Roofline, measure_roofline
from pycollective.bench.subprocesses import OwnProcess
from pycollective.bench.workloads import RESHAPING, Workload, make_tree, make_workload
from pycollective.errors import message
from pycollective.transport import native
from pycollective.transport.mpi import MPI


def run(options: argparse.Namespace) -> int:
    """Measures, prints and writes on rank 0. All ranks must make this call.

    Returns:
        The exit status: 1 if a result was wrong, other than of a peer in processes of its own.

    Raises:
        ValueError: an unknown operation or dtype, or one that cannot do what is asked.
        ImportError: a library that was asked for is not installed.
    """
    world = MPI.COMM_WORLD
    with suppress(RuntimeError):  # devices are in use already: then init says whether there are enough
        jax.config.update("jax_num_cpu_devices", options.devices)
    comm = pc.init(devices=options.devices)  # before anything else uses JAX's devices, as in a user's program
    plot = importlib.import_module("pycollective.bench.plot") if options.plot else None
    n = comm.size * options.devices
    works = list(_works(options, n))
    contenders: list[Contender] = [Pycollective(comm, options.devices), RawMpi(world), NoCommunication()]
    if options.wire_dtype:
        contenders.append(Pycollective(comm, options.devices, options.wire_dtype))
    others: dict[str, Callable[[], Contender]] = {
        "floor": lambda: Floor(world),
        "numpy": lambda: ThroughNumPy(world),
        "copies": Copies,
        "mpi4jax": lambda: Mpi4jax(world),
    }
    contenders += [make() for name, make in others.items() if name in options.against]
    runners: list[Runner] = [InProcess(one, world.rank, world.size, world.Barrier) for one in contenders]
    runners += [OwnProcess(world, peer, options.devices) for peer in options.against if peer in BESIDE]
    partner = max(comm.mpi.allgather((comm.host_index > 0, -comm.rank)))  # the first rank of another host, if any
    partner_rank = -partner[1] if partner[0] else comm.size - 1
    roofline = measure_roofline(world, comm.host_count, partner_rank, options.link_gbps)
    title = _title(comm, options.devices, roofline)
    rows: list[Row] = []
    say = print if comm.rank == 0 else (lambda *_, **__: None)
    say("\n".join(f"# {line}" for line in title))
    with _progress(len(works) * len(runners) * ROUNDS, comm.rank) as tick:
        heading = ""
        for name, work in works:
            if heading != (heading := f"\n# {name}, {work.mode}{', donated' if work.donated else ''}"):
                say(heading, f"#{COLUMNS[1:]}", f"#{UNITS[1:]}", sep="\n", flush=True)
            timings = measure(
                world,
                work,
                runners,
                calls=options.iters,
                warmup=options.warmup,
                tick=tick,
            )
            least = roofline.least_s(work, options.devices)
            new = list(_rows(name, work, timings, comm.size, least))
            say(*(row.line() for row in new), sep="\n", flush=True)
            rows += new
    if comm.rank == 0:
        if options.json:
            about = {"title": title, "arguments": {key: str(value) for key, value in vars(options).items()}}
            options.json.write_text(json.dumps({**about, "rows": [row.as_json() for row in rows]}, indent=1) + "\n")
        if plot is not None:
            plot.plot(rows, title[0], options.plot)
    beside = {one.name for one in runners if isinstance(one, OwnProcess)}
    wrong = sum(row.wrong for row in rows if row.contender not in beside)
    theirs = sum(row.wrong for row in rows if row.contender in beside)
    say(f"\n# wrong results: {wrong}", f"; of peers: {theirs}" if beside else "", sep="")
    return 1 if wrong else 0


def _works(options: argparse.Namespace, n: int) -> Iterator[tuple[str, Workload]]:
    """Every line of the table, with the name of its operation."""
    donations = {"no": (False,), "yes": (True,), "both": (False, True)}[options.donate]
    for op in options.ops:
        # "both" asks for what there is; "yes" of an operation that cannot is an error.
        possible = (False,) if options.donate == "both" and op in RESHAPING else donations
        for mode in options.modes:
            for donated in possible if mode != "eager" else (False,):
                for dtype in options.datatypes.split(","):
                    how = {"mode": mode, "donated": donated}
                    if mode == "loop":
                        how |= {"loop": options.loop, "unroll": options.unroll}
                    if op == "tree":
                        yield f"tree:{options.model}", make_tree(options.model, _dtype(dtype), **how)
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


def _rows(op: str, work: Workload, timings: dict[str, Timing], ranks: int, least_s: float) -> Iterator[Row]:
    raw = timings.get("raw MPI")
    for name, timing in timings.items():
        rate = work.nbytes / timing.median_us * 1e-3
        yield Row(
            op,
            work.mode + (", donated" if work.donated else ""),
            work.nbytes,
            work.count,
            work.dtype.name,
            name,
            timing.median_us,
            timing.min_us,
            timing.p99_us,
            rate,
            rate * work.traffic(ranks * timing.participants) / work.nbytes,
            timing.wrong,
            timing.median_us / raw.median_us if raw else None,
            least_s * 1e6 / timing.median_us,
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
    """A progress bar on rank 0's terminal; elsewhere its function does nothing."""
    if rank > 0 or not sys.stderr.isatty() or find_spec("tqdm") is None:
        yield lambda: None
    else:
        with importlib.import_module("tqdm").tqdm(total=total, unit="turn", leave=False) as bar:
            yield bar.update
