"""The standard ABI of MPI 5.0: one binary interface of several MPI libraries, in a file ``libmpi_abi.so``.

An mpi4py that was built against it loads whichever library has that file. The library is the same as by its own
interface: it has the same name, the same mpiexec and the same settings. What its own interface adds is missing, such as
the functions that say whether MPI takes pointers to the memory of GPUs.
"""

from __future__ import annotations

_FILE = "libmpi_abi"


def version(numbers: tuple[int, int]) -> str:
    """The version of the ABI, from what ``MPI_Abi_get_version`` says; "" if the library's own interface is in use.

    Example:
        >>> version((1, 0)), version((-1, -1))
        ('1.0', '')
    """
    return "" if numbers[0] < 0 else ".".join(map(str, numbers))


def describe(abi: str) -> str:
    """That a library was loaded by this version of the ABI; "" for its own interface."""
    return f"by MPI's standard ABI {abi}" if abi else ""


def remedy(error: str, otherwise: str) -> str:
    """What to do about an mpi4py that can load no MPI library.

    Args:
        error: what mpi4py says.
        otherwise: the remedy where mpi4py was built against a library's own interface.

    Example:
        >>> remedy("ImportError: libmpi_abi.so.1: cannot open shared object file", "Load a module.")
        "This mpi4py needs MPI's standard ABI, a file libmpi_abi.so: take MPICH 5 or newer, or another mpi4py."
    """
    if _FILE not in error:
        return otherwise
    return f"This mpi4py needs MPI's standard ABI, a file {_FILE}.so: take MPICH 5 or newer, or another mpi4py."
