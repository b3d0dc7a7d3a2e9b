"""The public names and the files that define them, for lazy_loader at run time and for type checkers."""

from .collectives.jax_collectives import (
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
from .collectives.mpi_collectives import (
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
from .named_axes.mesh import Mesh, make_mesh
from .ranks.communicator import Communicator
from .ranks.world import init, world
from .spmd.jit import jit
from .spmd.pmap import pmap
from .spmd.shard_map import shard_map

__version__: str

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
