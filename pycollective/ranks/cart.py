"""The function that makes Cartesian communicators."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import cast

from pycollective.errors import fail, integer, name_ranks, sequence
from pycollective.ranks.communicator import CartCommunicator, Communicator
from pycollective.ranks.ranks_by_value import of_rank, ranks_in, together
from pycollective.ranks.world import given_or_world
from pycollective.transport.mpi import MPI
from pycollective.transport.watch import waiting

_REMEDY = "Pass (0, 0), say: MPI chooses the numbers of two axes."


def make_cart(
    dims: Sequence[int],
    periods: bool | Sequence[bool] = False,
    comm: Communicator | None = None,
    *,
    reorder: bool = False,
) -> CartCommunicator | None:
    """Arranges the ranks of a communicator as a Cartesian grid. All its ranks must make this call.

    Args:
        dims: the number of ranks along each axis. MPI chooses the numbers where it is 0, as equal as possible; their
            product is then the number of ranks.
        periods: whether the axes are rings: one truth value for all, or one for each. Default False: open edges.
        comm: the communicator, the world by default.
        reorder: whether MPI may give the ranks other numbers in the grid than they have in ``comm``, so that neighbours
            are near each other in the machine. Default False.

    Returns:
        The communicator of the grid; None on ranks that are beyond the product of ``dims``. It is freed as a
        :meth:`Communicator.split` is.

    Raises:
        TypeError: an argument has another type.
        ValueError: the ranks are too few for ``dims``, or cannot be divided among its zeros; ranks pass different
            arguments; another number of ``periods``; ``comm`` was freed.

    Order:
        Outside programs, in the order of the calls.

    Source:
        MPI_Cart_create, MPI_Dims_create (MPI standard, 8.5.1, 8.5.2).

    Example:
        >>> import pycollective as pc
        >>> ring = pc.make_cart((0,), periods=True)
        >>> ring.shift(0) == ((ring.rank - 1) % ring.size, (ring.rank + 1) % ring.size)
        True
    """
    where = "make_cart"
    comm = given_or_world(where, comm)
    given = [integer(where, comm, "a number of dims", number) for number in sequence(where, comm, "dims", dims)]
    rings = (periods,) * len(given) if isinstance(periods, bool) else sequence(where, comm, "periods", periods)
    if len(rings) != len(given) or not all(isinstance(ring, bool) for ring in rings):
        expected = f"periods to be True or False, or a tuple of these for {len(given)} axes"
        fail(ValueError, where, comm, expected, repr(periods), "Pass True where the axis is a ring.")
    known = math.prod(number for number in given if number)
    if not given or min(given) < 0 or known > comm.size or (0 in given and comm.size % known):
        fail(ValueError, where, comm, f"dims for {comm.size} ranks", tuple(given), _REMEDY)
    chosen = tuple(MPI.Compute_dims(comm.size, given)) if 0 in given else tuple(given)
    arguments = (chosen, rings, bool(reorder))
    with waiting("split", comm._identity):
        by_rank = comm.mpi.allreduce(of_rank(comm.rank, arguments), op=together)
    if len(by_rank) > 1:
        shown = "; ".join(f"{each} on {name_ranks(ranks_in(by_rank[each]))}" for each in by_rank)
        remedy = "Pass the same dims, periods and reorder on all ranks."
        fail(ValueError, where, comm, "the same arguments on all ranks", shown, remedy)
    make = partial(comm.mpi.Create_cart, *arguments)
    return cast("CartCommunicator | None", comm._derive(make, f"{comm.name}/{'x'.join(map(str, chosen))}"))
