"""What the ranks of a job say of themselves, put together: ``pycollective doctor`` under a launcher."""

from __future__ import annotations

import itertools
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

import pycollective as pc
from pycollective.bench.roofline import PING_BYTES, STREAM_BYTES, one_way_s
from pycollective.config import config
from pycollective.doctor.findings import OK, WARNING, WRONG, Finding, show
from pycollective.doctor.installation import numbers
from pycollective.launch.launchers import LAUNCHERS
from pycollective.launch.libraries import identify
from pycollective.launch.rank_wrapper import physical_cores
from pycollective.ranks import accelerators
from pycollective.ranks.xla_threads import shared_cores
from pycollective.transport import runtime
from pycollective.transport.mpi import MPI, host_of

# Of MPI's ways between ranks: UCX, libfabric, MPICH, Open MPI (which sets others for itself), Intel MPI.
_SETTINGS = (
    *("UCX_TLS", "UCX_NET", "FI_PROVIDER", "FI_TCP_IFACE", "MPIR_CVAR_", "I_MPI_FABRICS", "I_MPI_OFI"),
    *(f"OMPI_MCA_{framework}" for framework in ("pml", "mtl", "btl", "coll")),
)
_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}


@dataclass(frozen=True)
class Facts:
    """Of one rank.

    Attributes:
        host: its name.
        versions: of Python and packages.
        library: family and version of MPI.
        cores: that it may use, each by the first of its hardware threads.
        host_cores: how many its host has.
        platform: of its devices; why there are none, where there are none.
        devices: their number.
        gpu_aware: whether its MPI takes pointers to a GPU's memory; None where it does not say.
        gpus: what tells its GPUs from all others; None for each that does not say.
    """

    host: str
    versions: tuple[str, ...]
    library: str
    cores: frozenset[int]
    host_cores: int
    platform: str
    devices: int
    gpu_aware: bool | None = None
    gpus: tuple[str | None, ...] = ()


def main(*, as_json: bool) -> int:
    """Prints on rank 0; returns 1 on all ranks if something is wrong."""
    world = MPI.COMM_WORLD
    agreed = launchers_agree(world.size, os.environ)
    if agreed.status == WRONG:
        return show([agreed], as_json=as_json) if world.rank == 0 else 1
    level = MPI.Query_thread()
    if level < MPI.THREAD_MULTIPLE:
        remedy = "Leave mpi4py.rc.thread_level at 'multiple', and use an MPI built with threads."
        finding = Finding("threads", WRONG, f"MPI's thread level is {_LEVELS[level]}", remedy)
        return show([finding], as_json=as_json) if world.rank == 0 else 1
    own = facts()
    everybody = world.allgather(own)
    found = [agreed, Finding("threads", OK, f"MPI's level is {_LEVELS[level]}"), transport(), *compare(everybody)]
    if all(finding.status != WRONG for finding in found):
        comm = pc.init()
        found += [sums(comm), *speeds(comm)]
    return int(world.bcast(show(found, as_json=as_json) if world.rank == 0 else 0))


def launchers_agree(size: int, environ: Mapping[str, str]) -> Finding:
    """Whether MPI sees as many ranks as a launcher has started; for an mpiexec in sbatch, srun has started proxies."""
    said = [(launcher, environ[launcher.size_variable]) for launcher in LAUNCHERS if launcher.size_variable in environ]
    for launcher, number in said:
        if number == str(size):
            return Finding("world", OK, f"{size} rank(s), as {launcher.name} says")
    if not said:
        return Finding("world", OK, f"{size} rank(s); no launcher's variables")
    launcher, number = said[-1]
    return Finding("world", WRONG, f"{launcher.name} started {number} rank(s), MPI sees {size}", launcher.remedy)


def transport() -> Finding:
    """What carries messages: ours, MPI's device, and the user's settings of it."""
    device = re.search(r"Device:\s*(.+)", MPI.Get_library_version())
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(_SETTINGS)]
    parts = ["native", f"MPI's device {device[1].strip()}" if device else "", ", ".join(settings)]
    return Finding("transport", OK, "; ".join(filter(None, parts)))


def facts() -> Facts:
    """Of this rank; all make this call. Starts JAX's devices."""
    text = MPI.Get_library_version().strip(" \x00\n")
    found: list[jax.Device] = []
    try:
        with host_of(MPI.COMM_WORLD) as neighbours:
            accelerators.take_own(neighbours)
            with shared_cores(neighbours):
                found = jax.local_devices()
    except Exception as error:  # whatever it is: told with the facts of the others, who wait for these
        kind = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        kind = accelerators.kind_of(found[0])
    known = runtime.KINDS.get(kind)
    return Facts(
        host=socket.gethostname(),
        versions=tuple(f"{name} {number}" for name, number in numbers().items()),
        library=" ".join(identify(text) or (text.splitlines()[0],)),
        cores=frozenset(map(min, physical_cores(os.sched_getaffinity(0)))),
        host_cores=len(physical_cores(set(range(os.cpu_count() or 1)))),
        platform=kind,
        devices=len(found),
        gpu_aware=runtime.takes_device_memory(known or runtime.KINDS["cuda"]),
        gpus=tuple(runtime.identity(known, device.local_hardware_id) for device in found) if known else (),
    )


def compare(ranks: Sequence[Facts]) -> list[Finding]:
    """What the facts of all ranks say together."""
    return [
        same("versions", ranks, lambda rank: ", ".join(rank.versions), "Use one environment on all hosts.", WARNING),
        same("MPI library", ranks, lambda rank: rank.library, "Load the same MPI module on all hosts.", WRONG),
        hosts(ranks),
        cores(ranks),
        devices(ranks),
        gpus(ranks),
        gpu_awareness(ranks),
    ]


def same(name: str, ranks: Sequence[Facts], value: Callable[[Facts], str], remedy: str, otherwise: str) -> Finding:
    """A fact that should be one for all ranks."""
    groups: dict[str, list[int]] = {}
    for rank, fact in enumerate(ranks):
        groups.setdefault(value(fact), []).append(rank)
    if len(groups) == 1:
        return Finding(name, OK, next(iter(groups)))
    text = "; ".join(f"{what} on rank {', '.join(map(str, who))}" for what, who in groups.items())
    return Finding(name, otherwise, text, remedy)


def devices(ranks: Sequence[Facts]) -> Finding:
    """Whether all ranks have as many, and any."""
    without = [rank for rank, fact in enumerate(ranks) if fact.devices == 0]
    if without:
        text = f"none on rank {', '.join(map(str, without))}: {ranks[without[0]].platform}"
        return Finding("devices", WRONG, text, "Set JAX_PLATFORMS=cpu, or install the jax that belongs to the device.")
    remedy = "Say --devices-per-rank, or set JAX_NUM_CPU_DEVICES, alike."
    return same("devices", ranks, lambda rank: f"{rank.devices} of {rank.platform} on each rank", remedy, WRONG)


def gpus(ranks: Sequence[Facts]) -> Finding:
    """Whether every GPU has one rank."""
    if (both := accelerators.shared([rank.gpus for rank in ranks])) is not None:
        name, together = both
        text = f"ranks {', '.join(map(str, together))} drive the same one, {name[:8]}"
        remedy = "Start no more ranks than there are, with pycollective run or srun --gpus-per-task=1."
        return Finding("GPUs", WARNING if config.allow_shared_gpu else WRONG, text, remedy)
    if all(rank.platform == "cpu" for rank in ranks):
        return Finding("GPUs", OK, "none in use")
    unknown = sum(name is None for rank in ranks for name in rank.gpus)
    return Finding("GPUs", OK, f"{unknown} do not say which they are" if unknown else "each has one rank")


def gpu_awareness(ranks: Sequence[Facts]) -> Finding:
    """Whether MPI can send from where the arrays are."""
    said = {True: "MPI takes pointers to GPU memory", False: "MPI takes none to GPU memory", None: "MPI does not say"}
    text = "; ".join(sorted({said[rank.gpu_aware] for rank in ranks}))
    if all(rank.platform == "cpu" for rank in ranks):
        return Finding("GPU awareness", OK, f"not needed on CPU devices ({text})")
    if config.gpu_direct is not None:
        text += f"; PYCOLLECTIVE_GPU_DIRECT={'on' if config.gpu_direct else 'off'} decides"
    if all(rank.gpu_aware for rank in ranks) or config.gpu_direct is not None:
        return Finding("GPU awareness", OK, text)
    text += f": arrays go through page-locked buffers, in pieces of {config.stage_bytes} B"
    return Finding("GPU awareness", WARNING, text, "Use an MPI library built for these GPUs, on all hosts.")


def by_host(ranks: Sequence[Facts]) -> dict[str, list[Facts]]:
    """The facts of each host's ranks."""
    found: dict[str, list[Facts]] = {}
    for fact in ranks:
        found.setdefault(fact.host, []).append(fact)
    return found


def hosts(ranks: Sequence[Facts]) -> Finding:
    """How many ranks are where."""
    counts = {host: len(own) for host, own in by_host(ranks).items()}
    text = ", ".join(f"{count} rank(s) on {host}" for host, count in counts.items())
    if len(set(counts.values())) > 1:
        return Finding("hosts", WARNING, text, "Hosts with fewer ranks wait for the others: start as many on each.")
    return Finding("hosts", OK, text)


def cores(ranks: Sequence[Facts]) -> Finding:
    """Whether ranks have cores to themselves."""
    for host, own in by_host(ranks).items():
        union = frozenset().union(*(rank.cores for rank in own))
        if len(own) > len(union):
            text = f"{len(own)} ranks share {len(union)} core(s) on {host}"
            more = own[0].host_cores > len(union)
            remedy = "Bind less: pycollective run, or --bind-to none." if more else "Ranks that wait poll: start fewer."
            return Finding("cores", WARNING, text, remedy)
    neighbours = (pair for own in by_host(ranks).values() for pair in itertools.combinations(own, 2))
    bound = all(a.cores.isdisjoint(b.cores) for a, b in neighbours)
    each = sorted({len(rank.cores) for rank in ranks})
    text = f"{' or '.join(map(str, each))} for each rank"
    if not bound:
        return Finding("cores", OK, f"{text}, the same for several: not bound; XLA takes a share of them as threads")
    return Finding("cores", OK, text + (", bound" if len(ranks) > 1 else ""))


def sums(comm: pc.Communicator) -> Finding:
    """One sum through the whole path."""
    total = pc.jit(lambda x: lax.psum(x, "ranks"), axis_name="ranks")(jnp.full(1000, comm.rank + 1.0))
    want = comm.size * (comm.size + 1) / 2
    wrong = int(comm.mpi.allreduce(int((total != want).sum())))
    if wrong:
        return Finding(
            "psum", WRONG, f"{wrong} of {1000 * comm.size} numbers are wrong", "Report that, with this page."
        )
    return Finding("psum", OK, f"right on {comm.size} rank(s)")


def speeds(comm: pc.Communicator) -> list[Finding]:
    """Latency and bandwidth from rank 0 to one of its host, and to one of another."""
    places = comm.mpi.allgather(comm.host_index)
    others = range(1, comm.size)
    partners = {
        "within a host": next((rank for rank in others if places[rank] == places[0]), None),
        "between hosts": next((rank for rank in others if places[rank] != places[0]), None),
    }
    found = []
    for name, partner in partners.items():
        if partner is not None:
            ping, stream = (one_way_s(comm.mpi, partner, nbytes) for nbytes in (PING_BYTES, STREAM_BYTES))
            rate = STREAM_BYTES / stream * 1e-9
            found.append(Finding(name, OK, f"{ping * 1e6:.1f} us, {rate:.2f} GB/s (ranks 0 and {partner})"))
    return found
