"""The common parts of ``jit``, ``pmap`` and ``shard_map``: the places of arguments on a mesh, and the trace.

Each of them traces its function once with the full sizes of the named axes, as a device program (``device_program``).
The lowering makes the program of this rank's devices from it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pycollective.jax_support import jaxprs
from pycollective.named_axes.mesh import Mesh
from pycollective.ranks.agreement import report_errors
from pycollective.ranks.communicator import Communicator
from pycollective.spmd import pmap_semantics, shard_map_semantics
from pycollective.spmd.device_program import global_aval, local_spec


class PlacedArguments(NamedTuple):
    """The arrays among the arguments of a call, and their places on a mesh.

    Attributes:
        mesh: the mesh over ranks x devices.
        arrays: this rank's own blocks.
        specs: the spec of each array.
        with_arrays: a function that returns the arguments, positional and by keyword, with other arrays instead.
    """

    mesh: Mesh
    arrays: Sequence[Any]
    specs: Sequence[PartitionSpec]
    with_arrays: Callable[[Sequence[Any]], tuple[Any, Any]]

    def global_avals(self) -> list[jax.ShapeDtypeStruct]:
        """Returns the shape and dtype of each global array."""
        return [global_aval(self.mesh, *pair) for pair in zip(self.arrays, self.specs, strict=True)]

    def on_mesh_devices(self) -> tuple[Any, Any]:
        """Returns the arguments, with each array moved to this rank's devices of the mesh."""
        local = self.mesh.local_mesh
        targets = [NamedSharding(local, local_spec(self.mesh, spec)) for spec in self.specs]
        return self.with_arrays([jax.device_put(*pair) for pair in zip(self.arrays, targets, strict=True)])


class TracedFunction(NamedTuple):
    """A traced function of one device's arrays.

    Attributes:
        out_tree: the tree structure of its results.
        apply: a function from this rank's own blocks of the arguments to those of the results.
    """

    out_tree: Any
    apply: Callable[[Sequence[Any]], list[Any]]


Trace = Callable[[], tuple[PlacedArguments, TracedFunction]]


def trace_as_shard_map(fun: Callable[..., Any], placed: PlacedArguments, **options: Any) -> TracedFunction:
    """Traces ``fun`` with the meaning of :func:`jax.shard_map`, whose options it takes."""
    mesh = placed.mesh
    closed, out_tree = shard_map_semantics.trace(fun, mesh, placed.global_avals(), **options)
    return TracedFunction(out_tree, lambda arrays: shard_map_semantics.apply(closed, mesh, arrays))


def trace_as_pmap(fun: Callable[..., Any], placed: PlacedArguments, out_specs: Any) -> TracedFunction:
    """Traces ``fun`` with the meaning of :func:`jax.pmap`. ``out_specs`` is a prefix of the tree of its results."""
    mesh = placed.mesh
    # jax.shard_map without types has the same meaning. It is used in the two cases in which a trace without a mesh
    # fails: inside another shard_map, whose types JAX would apply here; and if `fun` calls lax.pcast, which needs a
    # mesh.
    untyped = {"in_specs": tuple(placed.specs), "out_specs": out_specs, "check_vma": False}
    if jaxprs.manual_sizes(jax.sharding.get_abstract_mesh()):
        return trace_as_shard_map(fun, placed, **untyped)
    try:
        closed, out_tree = pmap_semantics.trace(fun, mesh, placed.arrays, placed.specs)
    except AssertionError as error:
        if not any(isinstance(arg, frozenset) or hasattr(arg, "varying") for arg in error.args):
            raise
        return trace_as_shard_map(fun, placed, **untyped)
    leaf_numbers = jax.tree.unflatten(out_tree, range(out_tree.num_leaves))
    specs = [spec for _, spec in broadcast_prefix(out_specs, leaf_numbers)]
    return TracedFunction(out_tree, lambda arrays: pmap_semantics.apply(closed, mesh, arrays, placed.specs, specs))


def trace_and_apply(where: str, fun: Any, comm: Communicator, trace: Trace) -> Any:
    """Traces a function and applies it to this rank's own blocks. ``trace`` may raise an error for bad arguments."""
    placed, traced = report_errors(comm, where, fun, trace)
    return jax.tree.unflatten(traced.out_tree, traced.apply(placed.arrays))


def broadcast_prefix(prefix: Any, tree: Any) -> list[tuple[str, Any]]:
    """Returns for each leaf of ``tree`` the path and the value of its entry in ``prefix``.

    Raises:
        ValueError: ``prefix`` is no prefix of ``tree``.
    """
    spread: list[tuple[str, Any]] = []

    def add(path: Any, entry: Any, part: Any) -> None:
        spread.extend([(jax.tree_util.keystr(path), entry)] * len(jax.tree.leaves(part)))

    jax.tree_util.tree_map_with_path(add, prefix, tree, is_leaf=lambda entry: entry is None)
    return spread


def as_indices(numbers: SupportsIndex | Iterable[SupportsIndex]) -> tuple[int, ...]:
    """Returns one number or several numbers as a tuple of Python ints."""
    return tuple(map(operator.index, numbers if isinstance(numbers, Iterable) else (numbers,)))


def as_arrays(leaves: Sequence[Any]) -> list[Any]:
    """Converts Python numbers among the leaves to arrays."""
    return [x if hasattr(x, "ndim") else jnp.asarray(x) for x in leaves]
