"""Plans: ways to spread a step over devices, with what they are predicted to take, ready to run or to save."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from pycollective.errors import fail
from pycollective.planning.by_compiling.candidates import Candidate, Spec
from pycollective.planning.by_compiling.compiled_candidate import mesh_of
from pycollective.planning.by_compiling.prediction import Prediction
from pycollective.planning.by_compiling.trace import Signature

_WHERE = "plan"


class Measured(NamedTuple):
    """What a plan took.

    Attributes:
        seconds: the median time of a step on the slowest rank.
        memory: the bytes that the rank which needs most had allocated at its peak, above what it had before the
            arguments were there. None for accelerators, which say no peak of a part of a run, and where malloc is not
            that of the GNU C library from version 2.33.
    """

    seconds: float
    memory: int | None


@dataclass(frozen=True)
class Plan:
    """A way to spread a step over devices.

    Attributes:
        candidate: the mesh, and how each argument is cut.
        out_specs: how each result is cut.
        prediction: what a step takes.
        signature: what the step takes and returns.
        measured: what a step took, where it was run.
    """

    candidate: Candidate
    out_specs: tuple[Spec, ...]
    prediction: Prediction
    signature: Signature
    measured: Measured | None = None

    def __str__(self) -> str:
        p = self.prediction
        parts = f"{p.computing_s * 1e3:.3g} computing, {p.communication_s * 1e3:.3g} sending"
        both = f", {p.beside_s * 1e3:.3g} of both at the same time" if p.beside_s else ""
        times = f"{p.seconds * 1e3:.3g} ms ({parts}{both})"
        mesh = " x ".join(f"{name} {size}" for name, size in self.candidate.mesh.items())
        said = f"{mesh}, {self.candidate.rule}: {times}, {p.memory / 2**20:.1f} MiB"
        if self.measured is None:
            return said
        memory = "" if self.measured.memory is None else f", {self.measured.memory / 2**20:.1f} MiB"
        return f"{said}; measured {self.measured.seconds * 1e3:.3g} ms{memory}"

    @property
    def needed(self) -> int:
        """The bytes that a device has to have, as measured or else as the prediction says at most."""
        known = self.measured and self.measured.memory
        return self.prediction.at_most if known is None else known

    @property
    def mesh(self) -> Mesh:
        """The mesh over the devices of this job.

        Raises:
            ValueError: the job has another number of devices.
        """
        devices = devices_of_job(self.candidate.data * self.candidate.model)
        return mesh_of(self.candidate, devices)

    @property
    def in_shardings(self) -> Any:
        """The sharding of each argument, as :func:`jax.jit` takes it and :func:`jax.device_put` as well."""
        return self._tree(self.signature.in_tree, self.candidate.specs)

    @property
    def out_shardings(self) -> Any:
        """The sharding of each result."""
        return self._tree(self.signature.out_tree, self.out_specs)

    def jit(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the compiled step. Its arguments must lie as :attr:`in_shardings` says."""
        return jax.jit(
            step,
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            donate_argnums=self.signature.donate_argnums,
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the plan as a dictionary that :func:`json.dumps` takes."""
        specs = zip(self.signature.paths, self.candidate.specs, strict=True)
        return {
            "mesh": self.candidate.mesh,
            "rule": self.candidate.rule,
            "arguments": {path: list(spec) for path, spec in specs},
            "results": [list(spec) for spec in self.out_specs],
            "computing_s": self.prediction.computing_s,
            "communication_s": self.prediction.communication_s,
            "beside_s": self.prediction.beside_s,
            "memory": self.prediction.memory,
            "measured_s": self.measured and self.measured.seconds,
            "measured_memory": self.measured and self.measured.memory,
        }

    def _tree(self, tree: Any, specs: tuple[Spec, ...]) -> Any:
        mesh = self.mesh
        return jax.tree.unflatten(tree, [NamedSharding(mesh, jax.P(*spec)) for spec in specs])


def devices_of_job(expected: int) -> list[jax.Device]:
    """Returns the devices of this job in the order of the ranks; ValueError if they are not so many."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if len(devices) != expected:
        remedy = "Call pycollective.distributed.initialize() on as many ranks as the plan is for, or plan again."
        fail(ValueError, _WHERE, None, f"{expected} devices, which the plan is for", str(len(devices)), remedy)
    return devices


@dataclass(frozen=True)
class Ranking:
    """The plans that fit into memory, the fastest first.

    Of those that were run, the ones that needed more than there is are last.

    Attributes:
        plans: the plans.
        one_device: what a step takes on one device alone, by the profile; None if XLA cannot compile that.
        notes: sentences on what the plans were made from, and on how far their predictions can be trusted.
    """

    plans: tuple[Plan, ...]
    one_device: Prediction | None = None
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Plan:
        """The fastest plan."""
        return self.plans[0]

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __len__(self) -> int:
        return len(self.plans)

    def __str__(self) -> str:
        return "\n".join([*map(str, self.plans), *(f"note: {note}" for note in self.notes)])
