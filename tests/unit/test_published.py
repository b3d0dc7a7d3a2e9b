"""The simulations of published trainings: docs/simulation.md says that they are this near."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from pycollective.planning import Profile

PUBLISHED = runpy.run_path(str(Path(__file__).parents[2] / "benchmarks" / "published.py"))


def test_megatron() -> None:
    profile = Profile.load("dgx-a100")
    deviations = []
    for row in PUBLISHED["MEGATRON"]:
        tflops, memory = row.estimate(profile)
        deviations.append(tflops / row.tflops - 1)
        assert row.layout.data * row.model * row.stages == row.devices
        assert memory < 80e9, "it was trained on devices of 80 GB"
    assert max(map(abs, deviations)) < 0.1
    assert sum(deviations) / len(deviations) == pytest.approx(0, abs=0.03)


def test_horovod() -> None:
    for row in PUBLISHED["HOROVOD"]:
        for servers, published in row.published.items():
            low, high = row.efficiencies(servers)
            assert low <= published <= high
