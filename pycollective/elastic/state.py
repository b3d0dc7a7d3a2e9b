"""The state of a training: what its ranks need to go on after one of them has failed."""

from __future__ import annotations

import copy
import pickle
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pycollective.errors import fail, message
from pycollective.ranks.communicator import Communicator
from pycollective.transport.mpi import MPI

_MAX_BROADCAST_BYTES = 1 << 30
"""The bytes of one broadcast: MPI 3 counts by int."""


class _Leaf(NamedTuple):
    """A leaf in the memory of the host.

    Attributes:
        value: a NumPy array, or any other Python value.
        key_type: the implementation, if the leaf is a key of :mod:`jax.random`.
        place: where the leaf lies: None for the host, a sharding, or "default" for a JAX array without a place of its
            own.
    """

    value: Any
    key_type: Any
    place: Any

    @staticmethod
    def of(x: Any) -> _Leaf:
        if isinstance(x, np.ndarray):
            return _Leaf(x.copy(), None, None)
        if not isinstance(x, jax.Array):
            return _Leaf(copy.deepcopy(x), None, None)
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        data = jax.random.key_data(x) if is_key else x
        # A copy: on a CPU device NumPy would share the array's memory, and then no program could donate it.
        return _Leaf(
            np.array(data, copy=True),
            jax.random.key_impl(x) if is_key else None,
            x.sharding if x.committed else "default",
        )

    def restored(self) -> Any:
        if self.place is None:
            return copy.deepcopy(self.value)
        x = jnp.array(self.value)
        if self.key_type is not None:
            x = jax.random.wrap_key_data(x, impl=self.key_type)
        return x if self.place == "default" else jax.device_put(x, self.place)


class _Commit(NamedTuple):
    """A copy of the values.

    Attributes:
        number: how many commits came before.
        paths: where each leaf stands in the tree of the values.
        tree: the structure of the values.
        leaves: the leaves.
    """

    number: int
    paths: list[str]
    tree: Any
    leaves: list[_Leaf]


class State:
    """Named values of a training, which :func:`run` restores when a rank has failed. All ranks have the same.

    Each value is an attribute: ``state.step += 1``. A value is a pytree of arrays and of Python values that can be
    copied. A value may be restored from any rank, so it must depend neither on the rank nor on the number of ranks. The
    parameters of data-parallel training are an example.

    Args:
        values: the values, as keyword arguments.

    Raises:
        ValueError: a name begins with an underscore, or is one of the class itself.
        AttributeError: at an assignment to a name that the constructor did not get.

    Example:
        >>> import pycollective as pc
        >>> state = pc.elastic.State(step=0, losses=[])
        >>> state.step += 1
        >>> state.commit()
        >>> state
        State(step=1, losses=[])
    """

    _values: dict[str, Any]
    _commit: _Commit | None

    def __init__(self, **values: Any) -> None:
        for name in values:
            if hasattr(State, name) or name.startswith("_"):
                fail(ValueError, "elastic.State", None, "names that State has not itself", name, "Choose another name.")
        object.__setattr__(self, "_values", values)
        object.__setattr__(self, "_commit", None)

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})
        if name not in values:
            raise AttributeError(self._unknown(name), name=name, obj=self)
        return values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self._values:
            raise AttributeError(self._unknown(name), name=name, obj=self)
        self._values[name] = value

    def _unknown(self, name: str) -> str:
        names = ", ".join(self.__dict__.get("_values", {})) or "none"
        return message("elastic.State", f"one of its values, {names}", name, "Give each value to State(...) first.")

    def __repr__(self) -> str:
        return f"State({', '.join(f'{name}={value!r}' for name, value in self._values.items())})"

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._values]

    def commit(self) -> None:
        """Copies the values to the memory of the host, as the state to which a failure returns.

        All ranks must commit at the same place of the program, for example after a step. A failure during a commit
        leaves the previous commit unchanged.

        Order:
            No communication. It waits for the programs that compute the values.
        """
        number = 0 if self._commit is None else self._commit.number + 1
        found, tree = jax.tree_util.tree_flatten_with_path(self._values)
        for _, x in found:  # all copies begin before the first is waited for
            if isinstance(x, jax.Array) and x.is_fully_addressable:
                x.copy_to_host_async()
        paths = [jax.tree_util.keystr(path) for path, _ in found]
        commit = _Commit(number, paths, tree, [_Leaf.of(x) for _, x in found])
        object.__setattr__(self, "_commit", commit)

    def _restore(self, comm: Communicator) -> int:
        """Restores the newest commit of any rank, on all ranks of ``comm``. All ranks must make this call.

        Returns:
            The number of that commit.
        """
        assert self._commit is not None, "run makes the first commit"
        numbers = comm.mpi.allgather(self._commit.number)
        newest = max(numbers)
        commit = _broadcast(comm, numbers.index(newest), self._commit)
        values = jax.tree.unflatten(commit.tree, [leaf.restored() for leaf in commit.leaves])
        object.__setattr__(self, "_commit", commit)
        object.__setattr__(self, "_values", values)
        return newest


class _CommitHeader(NamedTuple):
    """A commit without the contents of its arrays, which travel as bytes; the rest travels by pickle.

    Attributes:
        number: see :class:`_Commit`.
        paths: see there.
        structure: a pickled tree of this structure; None if it holds what pickle cannot send, as an optimizer's
            functions. Ranks whose own commit has the same paths do not need it.
        leaves: the leaves, with a shape and a dtype in the place of each array. Their places are on the host or
            "default": sharding names the devices of one rank.
        are_arrays: which leaves these are.
    """

    number: int
    paths: list[str]
    structure: bytes | None
    leaves: list[_Leaf]
    are_arrays: list[bool]

    @staticmethod
    def of(commit: _Commit) -> _CommitHeader:
        are_arrays = [isinstance(leaf.value, np.ndarray) for leaf in commit.leaves]
        leaves = [
            leaf._replace(
                value=(leaf.value.shape, leaf.value.dtype) if is_array else leaf.value,
                place=None if leaf.place is None else "default",
            )
            for leaf, is_array in zip(commit.leaves, are_arrays, strict=True)
        ]
        try:
            structure = pickle.dumps(jax.tree.unflatten(commit.tree, range(len(leaves))))
        except (pickle.PicklingError, AttributeError, TypeError):
            structure = None
        return _CommitHeader(commit.number, commit.paths, structure, leaves, are_arrays)


def _broadcast(comm: Communicator, root: int, own: _Commit) -> _Commit:
    """The root's commit on all ranks. A leaf takes the place that it has in this rank's own commit."""
    mpi, is_root = comm.mpi, comm.rank == root
    header = mpi.bcast(_CommitHeader.of(own) if is_root else None, root)
    assert header is not None
    leaves = []
    for i, (leaf, is_array) in enumerate(zip(header.leaves, header.are_arrays, strict=True)):
        value = leaf.value
        if is_array:
            value = own.leaves[i].value if is_root else np.empty(*value)
            flat = value.reshape(-1).view(np.uint8)
            for first in range(0, flat.size, _MAX_BROADCAST_BYTES):
                mpi.Bcast([flat[first : first + _MAX_BROADCAST_BYTES], MPI.BYTE], root)
        leaves.append(leaf._replace(value=value))
    if is_root:
        return own
    if own.paths == header.paths:
        pairs = zip(leaves, own.leaves, strict=True)
        leaves = [leaf._replace(place=leaf.place and (mine.place or leaf.place)) for leaf, mine in pairs]
        return _Commit(header.number, own.paths, own.tree, leaves)
    if header.structure is None:
        expected = f"the structure of this rank's commit, or one that pickle can send, in the commit of rank {root}"
        got = f"{len(header.paths)} leaves there and {len(own.paths)} here, in a structure with functions"
        fail(RuntimeError, "elastic.run", comm, expected, got, "Keep the structure of the values.")
    tree = jax.tree.structure(pickle.loads(header.structure))
    return _Commit(header.number, header.paths, tree, leaves)
