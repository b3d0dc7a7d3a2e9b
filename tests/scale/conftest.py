"""The hosts of these tests."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.scale.jobs import HOSTS, MOST_HOSTS, Hosts
from tests.standin import compile_cpp

CAN = os.geteuid() == 0 and all(shutil.which(tool) for tool in ("ip", "unshare", "nsenter"))


@pytest.fixture(scope="session")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library by which ranks without JAX call handlers."""
    folder = tmp_path_factory.mktemp("calls")
    return compile_cpp([Path(__file__).with_name("calls.cc")], folder / "calls.so", "-shared")


@pytest.fixture(scope="module")
def hosts(calls: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Sixteen hosts, each with a network, processes and memory of its own."""
    if not CAN or subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False).returncode:
        pytest.skip("SCALE NOT TESTED: that needs root that may make namespaces, iproute2 and util-linux")
    state = tmp_path_factory.mktemp("hosts")
    environ = {**os.environ, "PYCOLLECTIVE_HOSTS": str(state)}
    subprocess.run([HOSTS, "up", "--hosts", str(MOST_HOSTS)], env=environ, check=True, timeout=120)
    yield Hosts(state, calls)
    subprocess.run([HOSTS, "down"], env=environ, check=True, timeout=120)
