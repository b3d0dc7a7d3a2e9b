"""Parameters that several stages of a pipeline share: all copies get the sum of their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pycollective.collectives import mpi_collectives as mpi
from pycollective.errors import message
from pycollective.jax_support import jax_internals
from pycollective.parallel.axes import shapes_of, vary
from pycollective.parallel.stages import describe, is_inexact
from pycollective.ranks.communicator import Communicator

Array = Any
Tree = Any


class Group(NamedTuple):
    """The copies of some parameters.

    Attributes:
        ranks: the ranks that have copies, in their order.
        copies: for each copy of this rank the numbers of its leaves among the leaves of this rank's parameters.
    """

    ranks: tuple[int, ...]
    copies: tuple[tuple[int, ...], ...]


class Tied(NamedTuple):
    """What :func:`tied_parameters` has found.

    Attributes:
        shapes: the shapes and dtypes of this rank's parameters.
        groups: the parameters that this rank shares, in an order that is the same on all ranks.
    """

    shapes: Tree
    groups: tuple[Group, ...]

    def add_up(self, params: Tree, grads: Sequence[Array], comm: Communicator) -> list[Array]:
        """Returns the gradients, with the sum over all copies in the place of each copy's own.

        Args:
            params: this rank's parameters.
            grads: the gradients of their leaves.
            comm: the communicator of the pipeline.

        Raises:
            ValueError: the parameters have other shapes than those that :func:`tied_parameters` was called with.
        """
        if (got := shapes_of(params)) != self.shapes:
            remedy = "Call tied_parameters with the parameters of the pipeline."
            expected = f"the parameters of tied_parameters, {describe(self.shapes)}"
            raise ValueError(message("parallel.pipeline", expected, describe(got), remedy))
        summed = list(grads)
        for group in self.groups:
            own = [_sum([grads[i] for i in copies]) for copies in zip(*group.copies, strict=True)]
            # Each pair of ranks exchanges its sums. All ranks add them up in one order, so they get the same bits.
            of_ranks = [
                own if rank == comm.rank else mpi.sendrecv(own, comm, source=rank, dest=rank) for rank in group.ranks
            ]
            for places, mine, parts in zip(
                zip(*group.copies, strict=True), own, zip(*of_ranks, strict=True), strict=True
            ):
                axes = jax_internals.varying_axes(mine)  # by JAX's types what arrives varies along no axis
                total = _sum([vary(part, axes) for part in parts])
                for i in places:
                    summed[i] = total
        return summed


def _sum(arrays: Sequence[Array]) -> Array:
    total = arrays[0]
    for x in arrays[1:]:
        total = total + x
    return total


def tied_parameters(
    select: Callable[[Tree], Mapping[str, Tree] | Sequence[tuple[str, Tree]]], params: Tree, comm: Communicator
) -> Tied:
    """Finds the parameters that stages of a pipeline share. All ranks must make this call, outside traces.

    A network may use one array in several stages: the embedding of tokens is often the output layer's weights, too. The
    rank of each of these stages has a copy. ``pipeline(tied=...)`` gives all copies the same gradients, the sums over
    the copies. Copies that begin equal stay equal if the optimizer updates each element by itself.

    Args:
        select: a function of this rank's parameters. It returns the subtrees that other stages share, by names that
            are the same on all ranks: a mapping from names, or a sequence of pairs, in which a name may come several
            times if several stages of this rank have copies. An empty mapping: nothing is shared. It must only look
            at the structure of the parameters: it is called with other leaves.
        params: this rank's parameters, as for :func:`pipeline`: with v chunks a sequence of v trees. Arrays or
            :class:`jax.ShapeDtypeStruct`.
        comm: the communicator of the pipeline.

    Returns:
        The argument ``tied`` of :func:`pipeline`.

    Raises:
        ValueError: on all ranks: ``select`` raises an error; the copies of a name differ in shapes or dtypes, or, with
            several leaves, in the paths of these; a name has one copy only; a leaf is selected twice.

    Order:
        Outside programs, by messages of mpi4py.

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> comm = pc.world()
        >>> params = [{"embedding": jnp.ones((7, 3))}, {"head": jnp.ones((7, 3))}]  # of two chunks
        >>> tied = tied_parameters(lambda p: [("e", p[0]["embedding"]), ("e", p[1]["head"])], params, comm)
        >>> len(tied.groups)
        1
    """
    leaves, tree = jax.tree.flatten(params)
    found: list[tuple[str, tuple[int, ...]]] = []
    described: list[tuple[str, str]] = []
    problem, cause = "", None
    try:
        selected = select(tree.unflatten(range(len(leaves))))
        pairs = selected.items() if isinstance(selected, Mapping) else selected
        for name, subtree in pairs:
            numbers = jax.tree.leaves(subtree)
            found.append((name, tuple(i for i in numbers if is_inexact(jnp.result_type(leaves[i])))))
            # The order of leaves, by which they are paired, depends on their paths.
            compared = subtree if len(numbers) > 1 else numbers
            described.append((name, describe(shapes_of(jax.tree.map(leaves.__getitem__, compared)))))
    except Exception as error:  # any error of select must reach all ranks
        problem, cause = f"{type(error).__name__}: {error}", error
    every = [i for _, copy in found for i in copy]
    if len(set(every)) < len(every):
        problem = "a leaf that is selected twice"
    of_ranks = comm.mpi.allgather((problem, described))
    for rank, (problem, _) in enumerate(of_ranks):
        if problem:
            _refuse(f"select to return subtrees of the parameters of rank {rank}", problem, cause)
    groups = []
    for name in dict.fromkeys(name for _, described in of_ranks for name, _ in described):
        copies = [(rank, text) for rank, (_, own) in enumerate(of_ranks) for other, text in own if other == name]
        if len(copies) == 1:
            _refuse(f"several copies of {name!r}", f"one, on rank {copies[0][0]}")
        for rank, text in copies:
            if text != copies[0][1]:
                _refuse(f"copies of {name!r} like {copies[0][1]} of rank {copies[0][0]}", f"{text} on rank {rank}")
        own_copies = tuple(copy for other, copy in found if other == name)
        if own_copies:
            groups.append(Group(tuple(sorted({rank for rank, _ in copies})), own_copies))
    return Tied(shapes_of(params), tuple(groups))


def _refuse(expected: str, got: str, cause: Exception | None = None) -> None:
    remedy = "Select the same parameters on each rank whose stages share them."
    raise ValueError(message("parallel.tied_parameters", expected, got, remedy)) from cause
