"""Write jax.lax, run on MPI: collectives inside jax.jit through the MPI library of the machine."""

from pycollective.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pbroadcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    pshuffle,
    psum,
    psum_scatter,
    pswapaxes,
)
from pycollective.communicator import Communicator, init, world
from pycollective.mesh import Mesh, make_mesh
from pycollective.mpi_collectives import (
    barrier,
    broadcast,
    exscan,
    gather,
    recv,
    reduce,
    scan,
    scatter,
    send,
    sendrecv,
)
from pycollective.spmd import jit, pmap, shard_map

__version__ = "0.1.0"

__all__ = [
    "Communicator",
    "Mesh",
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "barrier",
    "broadcast",
    "exscan",
    "gather",
    "init",
    "jit",
    "make_mesh",
    "pbroadcast",
    "pmap",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "recv",
    "reduce",
    "scan",
    "scatter",
    "send",
    "sendrecv",
    "shard_map",
    "world",
]
