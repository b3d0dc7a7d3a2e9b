"""A run of ``pycollective profile``."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import date

import jax
from rich.console import Console
from rich.table import Table

import pycollective as pc
from pycollective.errors import message
from pycollective.planning.profile import ARRAYS, OPERATIONS, Group, Noise, Profile
from pycollective.planning.progress import progress
from pycollective.profiling import collectives, computing, overlap
from pycollective.transport.mpi import MPI

_SMALL, _LARGE = 4 << 10, 2 << 20  # bytes, in the table


def run(options: argparse.Namespace) -> int:
    """Measures; rank 0 writes the profile and prints what it says. All ranks must make this call.

    Raises:
        ValueError: a dtype is unknown, or hosts have different numbers of ranks.
    """
    with suppress(RuntimeError):  # devices are in use already; the start then checks their number
        jax.config.update("jax_num_cpu_devices", options.devices)
    # A step is handed to another thread once. Programs of one instruction would be handed over each time.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    start = pc.distributed.initialize if options.devices == 1 else pc.init
    comm = start(devices=options.devices)
    for dtype in options.dtypes:
        _check_dtype(dtype)
    sizes = sorted(set(comm.mpi.allgather(comm.local_size)))
    if len(sizes) > 1:
        remedy = "Start as many on each host, with `pycollective run --ranks-per-host` say."
        raise ValueError(message("profile", "as many ranks on each host", f"{sizes[0]} to {sizes[-1]}", remedy))
    turns = collectives.count_turns(comm.host_count, comm.local_size) + computing.count_turns(options.dtypes)
    with progress("measuring", show=comm.rank == 0 and sys.stderr.isatty()) as (grow, advance):
        grow(turns)
        profile = _measured(options, comm, advance)
    if comm.rank == 0:
        profile.save(options.output)
        console = Console()
        console.print(profile.source, markup=False, highlight=False, soft_wrap=True)
        console.print(_table_of_collectives(profile))
        console.print(_table_of_computing(profile))
        for kind, share in profile.overlap.items():
            console.print(f"{kind}: {share:.0%} of a sum passes while devices compute as long", highlight=False)
        for note in profile.notes or (f"noise: {profile.noise}",):
            console.print(note, markup=False, highlight=False, soft_wrap=True)
        console.print(
            f"{options.output}: {len(options.output.read_bytes())} B", markup=False, highlight=False, soft_wrap=True
        )
    return 0


def _measured(options: argparse.Namespace, comm: pc.Communicator, tick: Callable[[int], None]) -> Profile:
    load = float(comm.mpi.allreduce(_load(), MPI.MAX))
    memory = computing.memory_of_a_device(comm, options.devices)
    computing.touch_memory()
    curves, of_collectives = collectives.measure_collectives(comm, options.devices, tick)
    fields, of_computing = computing.measure_computing(comm, options.dtypes, tick)
    return Profile(
        source=_source(comm),
        hosts=comm.host_count,
        ranks=comm.size,
        devices=options.devices,
        memory=memory,
        collectives=curves,
        overlap=overlap.measure_overlap(comm, options.devices),
        noise=Noise(of_computing, of_collectives, load),
        **fields,
    )


def _load() -> float:
    """The processes for each core that have run or waited for one in the last minute."""
    return os.getloadavg()[0] / (os.cpu_count() or 1)


def _source(comm: pc.Communicator) -> str:
    library = " ".join(MPI.Get_library_version().splitlines()[0].strip("\x00").split())
    where = f"{comm.size} rank(s) on {comm.host_count} host(s), {jax.local_devices()[0].device_kind}"
    versions = f"{library}, JAX {jax.__version__}, Python {platform.python_version()}, {platform.machine()}"
    return f"pycollective {pc.__version__} profile, {date.today().isoformat()}: {where}; {versions}"


def _check_dtype(name: str) -> None:
    """Takes a dtype by its own name only: plans look for that, and JAX may compute in another one without a word."""
    try:
        dtype = jax.dtypes.canonicalize_dtype(name)
        known = dtype.name == name and jax.numpy.issubdtype(dtype, jax.numpy.floating)
    except TypeError:
        known = False
    if not known:
        remedy = "Say float32 or bfloat16; float64 needs JAX_ENABLE_X64=1."
        raise ValueError(message("profile", "a dtype of numbers with a fraction", repr(name), remedy))


def _table_of_collectives(profile: Profile) -> Table:
    """Times and rates of a small and a large collective for each group; of global arrays where they were measured."""
    programs = ARRAYS if ARRAYS in profile.collectives else next(iter(profile.collectives))
    table = Table(title=f"Collectives in programs of {programs}: us for 4 KiB, GB/s for 2 MiB")
    table.add_column("devices x hosts")
    for operation in OPERATIONS:
        table.add_column(operation, justify="right")
    for ranks in collectives.groups_in(profile.hosts, profile.ranks // profile.hosts):
        group = Group(ranks.per_host * profile.devices, ranks.hosts)
        times = [
            [profile.collective_s(operation, n, group, programs) for n in (_SMALL, _LARGE)] for operation in OPERATIONS
        ]
        cells = [f"{small * 1e6:.0f}, {_LARGE / large * 1e-9:.2f}" for small, large in times]
        table.add_row(f"{group.per_host} x {group.hosts}", *cells)
    return table


def _table_of_computing(profile: Profile) -> Table:
    """Rates of products of matrices by dtype and smallest dimension."""
    table = Table(title="Products of matrices: Gflop/s of each device, by the smallest dimension")
    table.add_column("dtype")
    for smallest in computing.SMALLEST:
        table.add_column(str(smallest), justify="right")
    for dtype, curves in profile.products.items():
        rates = [curve.sizes[-1] / curve.seconds[-1] * 1e-9 for curve in curves.values()]
        table.add_row(dtype, *(f"{rate:.1f}" for rate in rates))
    return table
