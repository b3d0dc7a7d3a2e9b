"""Settings for all tests: JAX is strict, and the report names the versions that run."""

from __future__ import annotations

import sys

# Before jax: XLA looks for the MPI of its own collectives once, when jaxlib is imported (tests/distributed).
import pycollective  # noqa: F401

# isort: split
import jax
from mpi4py import MPI

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_legacy_prng_key", "error")


def pytest_report_header() -> str:
    library = MPI.Get_library_version().splitlines()[0].strip()
    return f"jax {jax.__version__}, python {sys.version.split()[0]}, {library}, {MPI.COMM_WORLD.size} rank(s)"
