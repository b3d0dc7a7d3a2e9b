"""Settings for all tests: JAX is strict, and the report names the versions that run."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator

# Before jax: XLA looks for the MPI of its own collectives once, when jaxlib is imported (tests/distributed).
import pycollective  # noqa: F401

# isort: split
import jax
import pytest
from mpi4py import MPI

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_legacy_prng_key", "error")


@pytest.fixture
def promotion_of_optax() -> Iterator[None]:
    """In optax a float is raised to the power of an integer."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def pytest_report_header() -> str:
    library = MPI.Get_library_version().splitlines()[0].strip()
    return f"jax {jax.__version__}, python {sys.version.split()[0]}, {library}, {MPI.COMM_WORLD.size} rank(s)"


def pytest_configure(config: pytest.Config) -> None:
    """Gives this process a root of its own for ``tmp_path``, where workers of pytest-xdist have that of their parent.

    pytest clears the root at the end of a session, and raises if another rank clears the same one at that moment.
    """
    if hasattr(config, "workerinput") or config.option.basetemp is not None:
        return
    root = tempfile.mkdtemp(prefix="pytest-")
    os.environ["PYTEST_DEBUG_TEMPROOT"] = root
    config.add_cleanup(lambda: shutil.rmtree(root, ignore_errors=True))
