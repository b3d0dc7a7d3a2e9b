"""Tests of mpi4jax's calls among ours, and of our functions by its names. mpi4jax is needed for all but ``-k compat``.

``PYCOLLECTIVE_TEST_IMPORT_FIRST=mpi4jax`` imports and uses mpi4jax before this package.
"""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from mpi4py import MPI

if os.environ.get("PYCOLLECTIVE_TEST_IMPORT_FIRST") == "mpi4jax":
    import mpi4jax

    early = jax.jit(lambda x: mpi4jax.allreduce(x, op=MPI.SUM))
    assert early(1.0) == MPI.COMM_WORLD.size
    assert "pycollective.ordering" not in sys.modules

import pycollective as pc
import pycollective.compat.mpi4jax
from tests.under_mpirun import *  # noqa: F403

# One device takes part, as under mpi4jax; the call comes before a test module makes an array.
with warnings.catch_warnings():
    if "PYCOLLECTIVE_TEST_IMPORT_FIRST" in os.environ:
        warnings.simplefilter("ignore", RuntimeWarning)  # JAX's devices are in use, with a thread for each core
    pc.init(devices=1)

if "PYCOLLECTIVE_TEST_IMPORT_FIRST" not in os.environ:
    assert pc.psum(jnp.ones(1)) == MPI.COMM_WORLD.size
    assert "mpi4jax" not in sys.modules, "the import of pycollective has imported mpi4jax"

# mpi4jax promotes dtypes implicitly.
jax.config.update("jax_numpy_dtype_promotion", "standard")
jax.config.update("jax_numpy_rank_promotion", "allow")


@pytest.fixture(scope="session")
def world() -> pc.Communicator:
    return pc.world()


MODULES = {"compat": "pycollective.compat.mpi4jax", "mpi4jax": "mpi4jax"}


@pytest.fixture(params=MODULES)
def mpi(request: pytest.FixtureRequest) -> Any:
    """mpi4jax, or the module that takes its place."""
    return importlib.import_module(MODULES[request.param])
