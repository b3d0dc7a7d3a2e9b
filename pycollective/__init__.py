"""Write jax.lax, run on MPI: collectives inside jax.jit through the MPI library of the machine.

A name in ``__init__.pyi`` is imported when it is first used, so ``import pycollective`` alone starts neither MPI nor
JAX. ``pycollective run`` needs this: it is no rank, and on some machines only a launcher may start processes with MPI.
"""

import sys
from typing import Any

import lazy_loader

from pycollective.environment import offer_mpi_to_xla
from pycollective.errors import message
from pycollective.faults import before_init

__version__ = "0.1.0"

_lazy, _names, __all__ = lazy_loader.attach_stub(__name__, __file__)

offer_mpi_to_xla()
before_init.install()

# Names in MPI and in other packages, in lower case and without underscores, and what stands for them here.
_OTHER_NAMES = {
    "allgather": "all_gather",
    "allgatherv": "ragged_all_gather",
    "alltoall": "all_to_all",
    "alltoallv": "ragged_exchange or ragged_all_to_all",
    "bcast": "broadcast",
    "gatherv": "ragged_gather",
    "scatterv": "ragged_scatter",
    "cartcomm": "CartCommunicator",
    "cartcreate": "make_cart",
    "commworld": "world()",
    "createcart": "make_cart",
    "getrank": "world().rank",
    "getsize": "world().size",
    "neighboralltoall": "update_halos",
    "rank": "world().rank",
    "reducescatter": "psum_scatter",
    "reducescatterblock": "psum_scatter",
    "size": "world().size",
    "waitall": "wait",
}


def __getattr__(name: str) -> Any:
    if name in __all__:
        return _lazy(name)
    small = name.lower().replace("_", "")
    known = _OTHER_NAMES.get(small) or next((ours for ours in __all__ if ours.lower().replace("_", "") == small), None)
    remedy = "dir(pycollective) lists them." if known is None else f"Here it is pycollective.{known}."
    error = message(name, "a name that this package has", repr(name), remedy)
    raise AttributeError(error, name=name, obj=sys.modules[__name__])


def __dir__() -> list[str]:
    return [*_names(), "__version__"]
