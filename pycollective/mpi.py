"""mpi4py's ``MPI`` module, with a useful error where no MPI library can be loaded.

Importing it starts MPI by mpi4py's own rules (``mpi4py.rc``), which ask for ``THREAD_MULTIPLE``.
"""

from __future__ import annotations

from pycollective.errors import message

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:
    raise ImportError(
        message(
            "mpi",
            "an MPI library that mpi4py can load",
            f"{type(error).__name__}: {error}",
            "Load your cluster's MPI module, or install one: pip install 'pycollective[mpich]'.",
        )
    ) from error

__all__ = ["MPI"]
