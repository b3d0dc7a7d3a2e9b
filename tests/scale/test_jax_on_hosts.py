"""A job of 32 ranks with JAX."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scale.jobs import MOST_HOSTS, Hosts

pytestmark = pytest.mark.whole


def test_six_collectives_on_16_hosts(hosts: Hosts) -> None:
    said = hosts.run_with_jax(MOST_HOSTS, 2, Path(__file__).with_name("six_collectives.py"))
    assert f"all results are right on {2 * MOST_HOSTS} ranks" in said
