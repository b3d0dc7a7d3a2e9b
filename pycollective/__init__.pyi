"""The public names, a line for each, and the files that define them; lazy_loader reads this, as type checkers do."""

from . import distributed as distributed
from . import elastic as elastic
from . import parallel as parallel
from . import recorder as recorder
from .collectives.equality import assert_equal_across as assert_equal_across
from .collectives.jax_collectives import all_gather as all_gather
from .collectives.jax_collectives import all_to_all as all_to_all
from .collectives.jax_collectives import axis_index as axis_index
from .collectives.jax_collectives import axis_size as axis_size
from .collectives.jax_collectives import pbroadcast as pbroadcast
from .collectives.jax_collectives import ppermute as ppermute
from .collectives.jax_collectives import pshuffle as pshuffle
from .collectives.jax_collectives import psum_scatter as psum_scatter
from .collectives.jax_collectives import pswapaxes as pswapaxes
from .collectives.jax_reductions import pmax as pmax
from .collectives.jax_reductions import pmean as pmean
from .collectives.jax_reductions import pmin as pmin
from .collectives.jax_reductions import psum as psum
from .collectives.mpi_collectives import barrier as barrier
from .collectives.mpi_collectives import broadcast as broadcast
from .collectives.mpi_collectives import exscan as exscan
from .collectives.mpi_collectives import gather as gather
from .collectives.mpi_collectives import recv as recv
from .collectives.mpi_collectives import reduce as reduce
from .collectives.mpi_collectives import scan as scan
from .collectives.mpi_collectives import scatter as scatter
from .collectives.mpi_collectives import send as send
from .collectives.mpi_collectives import sendrecv as sendrecv
from .collectives.replicated import copy_to as copy_to
from .collectives.replicated import reduce_from as reduce_from
from .errors import CollectiveMismatch as CollectiveMismatch
from .named_axes.mesh import Mesh as Mesh
from .named_axes.mesh import make_mesh as make_mesh
from .planning.by_compiling.search import plan as plan
from .ranks.begin import init as init
from .ranks.communicator import Communicator as Communicator
from .ranks.world import world as world
from .spmd.jit import jit as jit
from .spmd.pmap import pmap as pmap
from .spmd.shard_map import shard_map as shard_map
from .timeline.trace import trace as trace
from .transport.message_constants import ANY_SOURCE as ANY_SOURCE
from .transport.message_constants import ANY_TAG as ANY_TAG
from .transport.message_constants import PROC_NULL as PROC_NULL

__version__: str
