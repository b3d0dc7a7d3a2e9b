"""Simulations of published trainings, beside what was published.

    python benchmarks/published.py

This needs no cluster and takes a second. docs/simulation.md says what the numbers mean.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from pycollective.planning import Estimator, Group, Layout, Profile, transformer
from pycollective.planning.curves import Curve
from pycollective.planning.profile import AXES

POSITIONS, VOCABULARY = 2048, 51200


class Training(NamedTuple):
    """A row of Megatron-LM's table.

    D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using Megatron-LM",
    arXiv:2104.04473, table 1. Sizes of microbatches and numbers of chunks: ``examples/sc21/run_table_1.sh`` in
    github.com/NVIDIA/Megatron-LM.
    """

    billions: float
    heads: int
    width: int
    layers: int
    model: int
    stages: int
    devices: int
    batch: int
    microbatch: int
    chunks: int
    tflops: float

    @property
    def layout(self) -> Layout:
        data = self.devices // (self.model * self.stages)
        schedule = "" if self.stages == 1 else "interleaved" if self.chunks > 1 else "1f1b"
        microbatches = self.batch // (data * self.microbatch)
        return Layout(data, self.model, 1, self.stages, 0, schedule, microbatches, remat=True, chunks=self.chunks)

    @property
    def operations(self) -> float:
        """Those of a step with its second forward pass: equation 3 of the paper."""
        area = self.batch * POSITIONS * self.layers * self.width**2
        return 96 * area * (1 + POSITIONS / (6 * self.width) + VOCABULARY / (16 * self.layers * self.width))

    def estimate(self, profile: Profile) -> tuple[float, float]:
        """The predicted rate of a device in Tflop/s, and the bytes that it needs."""
        network = transformer(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            positions=POSITIONS,
            vocabulary=VOCABULARY,
            examples=self.batch,
            itemsize=2,
            moments=6,  # parameters and two moments in float32, of which each counts twice
            fused=True,
        )
        # Megatron-LM makes all of the forward pass again, also what the backward pass does not need.
        parts = [replace(part, products=[p._replace(recomputed=True) for p in part.products]) for part in network.parts]
        estimate = Estimator(replace(network, parts=parts), profile, "bfloat16").estimate(self.layout)
        return self.operations / estimate.seconds / self.devices * 1e-12, estimate.memory


MEGATRON = [
    Training(1.7, 24, 2304, 24, 1, 1, 32, 512, 16, 1, 137),
    Training(3.6, 32, 3072, 30, 2, 1, 64, 512, 16, 1, 138),
    Training(7.5, 32, 4096, 36, 4, 1, 128, 512, 16, 1, 142),
    Training(18.4, 48, 6144, 40, 8, 1, 256, 1024, 8, 1, 135),
    Training(39.1, 64, 8192, 48, 8, 2, 512, 1536, 4, 1, 138),
    Training(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 2, 3, 140),
    Training(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 2, 2, 148),
    Training(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 1, 2, 155),
    Training(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 1, 3, 163),
    Training(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 1, 1, 163),
]


class Scaling(NamedTuple):
    """Data parallelism by Horovod, 64 images on each of four GPUs of a server with one link of 25 Gbit/s.

    Efficiencies: Horovod's page "Benchmarks" and, of 32 servers, an earlier version of its README. Images per second of
    one GPU: TensorFlow's page "Benchmarks" of 2017, Tesla P100; of ResNet-101 a sixteenth of what Horovod's page says
    of 16 GPUs. Parameters: those of the networks in float32.
    """

    network: str
    parameters: float
    images_per_s: float
    published: dict[int, float]

    def efficiencies(self, servers: int) -> tuple[float, float]:
        """Without any overlap of gradients with the backward pass, and with all that can be."""
        profile = _servers(servers)
        computing = 64 / self.images_per_s
        sending = profile.collective_s("psum", 4 * self.parameters, Group(4, servers), AXES)
        backward = computing * 2 / 3
        return computing / (computing + sending), computing / (computing - backward + max(backward, sending))


HOROVOD = [
    Scaling("Inception V3", 23.9e6, 142, {32: 0.90, 128: 0.90}),
    Scaling("ResNet-101", 44.7e6, 1656.82 / 16, {32: 0.90, 128: 0.90}),
    Scaling("VGG-16", 138.4e6, 154, {32: 0.79, 128: 0.68}),
]


def _servers(count: int) -> Profile:
    """Servers whose link carries a ring's sum at its nominal rate."""
    link = 25e9 / 8
    sizes = (1e3, 1e5, 1e7, 1e9)
    ring = Curve(sizes, tuple(1e-4 + 2 * (count - 1) / count * size / link for size in sizes))
    none = Curve((1.0,), (1.0,))
    return Profile(
        "25 Gbit/s", count, 4 * count, 1, 16 << 30, {AXES: {"psum": {Group(4, count): ring}}}, {}, {}, none, none
    )


def main() -> None:
    console = Console()
    profile = Profile.load("dgx-a100")
    table = Table(title="Megatron-LM, Tflop/s of each A100")
    for column in ("parameters", "GPUs", "layout", "published", "predicted", "off", "memory"):
        table.add_column(column, justify="left" if column == "layout" else "right")
    for row in MEGATRON:
        tflops, memory = row.estimate(profile)
        cells = (f"{row.billions:g} B", str(row.devices), str(row.layout), f"{row.tflops:.0f}", f"{tflops:.0f}")
        table.add_row(*cells, f"{tflops / row.tflops - 1:+.0%}", f"{memory * 1e-9:.0f} GB")
    console.print(profile.source, soft_wrap=True, highlight=False, markup=False)
    console.print(table)
    table = Table(title="Horovod, efficiency against one GPU")
    for column in ("network", "GPUs", "published", "without overlap", "with all overlap"):
        table.add_column(column, justify="right")
    for network in HOROVOD:
        for servers, published in network.published.items():
            low, high = network.efficiencies(servers)
            table.add_row(network.network, str(4 * servers), f"{published:.0%}", f"{low:.0%}", f"{high:.0%}")
    console.print(table)


if __name__ == "__main__":
    main()
