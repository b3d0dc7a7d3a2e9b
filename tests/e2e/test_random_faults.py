"""A few faults at random moments of a training; ``python -m tests.e2e.random_faults`` runs as many as one likes."""

from __future__ import annotations

import itertools

import pytest

from tests.e2e import random_faults
from tests.e2e.train_with_fault import Fault

SEED, RANKS = 0, 2
FAULTS = list(itertools.islice(random_faults.draw(SEED, RANKS), 5))


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    wrong, _, said = random_faults.run(Fault("none", "", 0, 0, 0), RANKS, [])
    assert not wrong, said
    return random_faults.weights(said)


@pytest.mark.whole
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"seed {SEED}: {fault.kind} {fault.how}")
def test_a_fault_is_not_silent(fault: Fault, undisturbed: list[float]) -> None:
    wrong, _, said = random_faults.run(fault, RANKS, undisturbed)
    assert not wrong, f"{fault}: {wrong}\n{said}"
