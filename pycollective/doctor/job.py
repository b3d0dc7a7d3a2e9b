"""``pycollective doctor`` under a launcher: what the ranks of a job report about themselves, and what follows."""

from __future__ import annotations

import itertools
import os
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
from pycollective.doctor.installation import version_numbers
from pycollective.launch.find_mpi import LIBRARIES
from pycollective.launch.host_share import physical_cores
from pycollective.launch.libraries import standard_abi
from pycollective.launch.libraries.library import lacks_for_gpus
from pycollective.launch.started_by import launched_sizes
from pycollective.ranks import accelerators
from pycollective.ranks.xla_threads import shared_cores
from pycollective.transport import runtime
from pycollective.transport.mpi import MPI, about_itself, host_of, mpi_library

_LEVELS = {
    MPI.THREAD_SINGLE: "single",
    MPI.THREAD_FUNNELED: "funneled",
    MPI.THREAD_SERIALIZED: "serialized",
    MPI.THREAD_MULTIPLE: "multiple",
}


@dataclass(frozen=True)
class Facts:
    """What one rank reports about itself.

    Attributes:
        host: the name of its host.
        versions: the versions of Python and of the packages.
        library: the MPI library's name and version.
        cores: the cores that the rank may use, each by the number of its first hardware thread.
        host_cores: the number of cores of its host.
        platform: the platform of its devices; the reason why it has none, where it has none.
        devices: the number of its devices.
        gpu_aware: whether its MPI takes pointers to a GPU's memory; None where MPI does not say.
        gpus: an identity of each of its GPUs; None for a GPU that has none.
        network_lacks: what its settings of the network leave out that GPUs need; "" for nothing.
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
    network_lacks: str = ""


def main(*, as_json: bool) -> int:
    """Prints the findings on rank 0; returns 1 on all ranks if something is wrong."""
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
    """Whether MPI sees as many ranks as a launcher has started.

    The variables of several launchers may be set: under an mpiexec inside ``sbatch``, srun has started its proxies.
    """
    started = launched_sizes(environ)
    for launcher, number in started:
        if number == size:
            return Finding("world", OK, f"{size} rank(s), as {launcher.name} says")
    if not started:
        return Finding("world", OK, f"{size} rank(s); no launcher's variables")
    launcher, number = started[-1]
    return Finding("world", WRONG, f"{launcher.name} started {number} rank(s), MPI sees {size}", launcher.remedy)


def transport() -> Finding:
    """What carries messages: this package's library, MPI's device, and the user's settings for it."""
    own = mpi_library()
    device = own.device_in(about_itself()) if own else ""
    begins = tuple(begin for known in LIBRARIES for begin in known.setting_prefixes)
    settings = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(begins)]
    abi = standard_abi.describe(own.abi) if own else ""
    parts = [f"native {abi}".rstrip(), f"MPI's device {device}" if device else "", ", ".join(settings)]
    return Finding("transport", OK, "; ".join(filter(None, parts)))


def facts() -> Facts:
    """The facts of this rank. Starts JAX's devices. All ranks must make this call."""
    own = mpi_library()
    found: list[jax.Device] = []
    try:
        with host_of(MPI.COMM_WORLD) as neighbours:
            accelerators.take_share(neighbours)
            with shared_cores(neighbours):
                found = jax.local_devices()
    except Exception as error:  # of any kind: the other ranks wait for these facts, which then hold the reason
        kind = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        kind = accelerators.kind_of(found[0])
    known = runtime.KINDS.get(kind)
    return Facts(
        host=socket.gethostname(),
        versions=tuple(f"{name} {number}" for name, number in version_numbers().items()),
        library=own.name if own else about_itself().splitlines()[0],
        cores=frozenset(map(min, physical_cores(os.sched_getaffinity(0)))),
        host_cores=len(physical_cores(set(range(os.cpu_count() or 1)))),
        platform=kind,
        devices=len(found),
        gpu_aware=runtime.takes_device_memory(known or runtime.KINDS["cuda"]),
        gpus=tuple(runtime.identity(known, device.local_hardware_id) for device in found) if known else (),
        network_lacks=lacks_for_gpus(kind, os.environ),
    )


def compare(ranks: Sequence[Facts]) -> list[Finding]:
    """The findings that need the facts of all ranks."""
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
    """Whether a fact is the same on all ranks; ``otherwise`` is the status where it is not."""
    groups: dict[str, list[int]] = {}
    for rank, facts_of_rank in enumerate(ranks):
        groups.setdefault(value(facts_of_rank), []).append(rank)
    if len(groups) == 1:
        return Finding(name, OK, next(iter(groups)))
    text = "; ".join(f"{what} on rank {', '.join(map(str, who))}" for what, who in groups.items())
    return Finding(name, otherwise, text, remedy)


def devices(ranks: Sequence[Facts]) -> Finding:
    """Whether all ranks have devices, and the same number of them."""
    without = [rank for rank, facts_of_rank in enumerate(ranks) if facts_of_rank.devices == 0]
    if without:
        text = f"none on rank {', '.join(map(str, without))}: {ranks[without[0]].platform}"
        return Finding("devices", WRONG, text, "Set JAX_PLATFORMS=cpu, or install the jax that belongs to the device.")
    remedy = "Say --devices-per-rank, or set JAX_NUM_CPU_DEVICES, alike."
    return same("devices", ranks, lambda rank: f"{rank.devices} of {rank.platform} on each rank", remedy, WRONG)


def gpus(ranks: Sequence[Facts]) -> Finding:
    """Whether every GPU belongs to one rank."""
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
    """Whether MPI can send arrays from the devices' own memory."""
    said = {
        True: "MPI takes pointers to GPU memory",
        False: "MPI takes no pointers to GPU memory",
        None: "MPI does not say",
    }
    text = "; ".join(sorted({said[rank.gpu_aware] for rank in ranks}))
    if all(rank.platform == "cpu" for rank in ranks):
        return Finding("GPU awareness", OK, f"not needed on CPU devices ({text})")
    if config.gpu_direct is not None:
        text += f"; PYCOLLECTIVE_GPU_DIRECT={'on' if config.gpu_direct else 'off'} decides"
    is_direct = all(rank.gpu_aware for rank in ranks) if config.gpu_direct is None else config.gpu_direct
    lacking = next((rank for rank, facts_of_rank in enumerate(ranks) if facts_of_rank.network_lacks), None)
    if is_direct and lacking is not None:
        text += f"; {ranks[lacking].network_lacks} on rank {lacking}"
        return Finding("GPU awareness", WARNING, text, "Add it to that variable, or unset the variable.")
    if is_direct or config.gpu_direct is not None:
        return Finding("GPU awareness", OK, text)
    text += f": arrays go through page-locked buffers, in pieces of {config.stage_bytes} B"
    return Finding("GPU awareness", WARNING, text, "Use an MPI library built for these GPUs, on all hosts.")


def by_host(ranks: Sequence[Facts]) -> dict[str, list[Facts]]:
    """The facts of the ranks, by host."""
    found: dict[str, list[Facts]] = {}
    for facts_of_rank in ranks:
        found.setdefault(facts_of_rank.host, []).append(facts_of_rank)
    return found


def hosts(ranks: Sequence[Facts]) -> Finding:
    """How many ranks each host has."""
    counts = {host: len(own) for host, own in by_host(ranks).items()}
    text = ", ".join(f"{count} rank(s) on {host}" for host, count in counts.items())
    if len(set(counts.values())) > 1:
        return Finding("hosts", WARNING, text, "Hosts with fewer ranks wait for the others: start as many on each.")
    return Finding("hosts", OK, text)


def cores(ranks: Sequence[Facts]) -> Finding:
    """Whether each rank has cores that it does not share."""
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
    """Whether one sum through the whole package is right."""
    total = pc.jit(lambda x: lax.psum(x, "ranks"), axis_name="ranks")(jnp.full(1000, comm.rank + 1.0))
    want = comm.size * (comm.size + 1) / 2
    wrong = int(comm.mpi.allreduce(int((total != want).sum())))
    if wrong:
        return Finding(
            "psum", WRONG, f"{wrong} of {1000 * comm.size} numbers are wrong", "Report that, with this page."
        )
    return Finding("psum", OK, f"right on {comm.size} rank(s)")


def speeds(comm: pc.Communicator) -> list[Finding]:
    """Latency and bandwidth from rank 0 to a rank on its host, and to a rank on another host."""
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
