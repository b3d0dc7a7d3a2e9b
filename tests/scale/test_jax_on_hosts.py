"""Jobs of 32 ranks and more with JAX."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scale.jobs import MOST_HOSTS, Hosts

pytestmark = pytest.mark.whole


def test_six_collectives_on_16_hosts(hosts: Hosts) -> None:
    said = hosts.run_with_jax(MOST_HOSTS, 2, Path(__file__).with_name("six_collectives.py"))
    assert f"all results are right on {2 * MOST_HOSTS} ranks" in said


def test_many_ranks_of_one_host(hosts: Hosts) -> None:
    assert "all is right on 34 ranks" in hosts.run_with_jax(1, 34, Path(__file__).with_name("many_ranks_of_a_host.py"))
