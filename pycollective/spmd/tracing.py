"""What ``jit``, ``pmap`` and ``shard_map`` share: how arguments lie on a mesh, and how a function is traced.

Each traces its function once with the full sizes of the named axes (``device_program``); what runs on this rank's
devices is found when the program is lowered.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from pycollective.named_axes.mesh import Mesh
from pycollective.ordering import jaxprs
from pycollective.ranks.agreement import report_errors
from pycollective.ranks.communicator import Communicator
from pycollective.spmd import pmap_semantics, shard_map_semantics
from pycollective.spmd.device_program import global_aval, local_spec


class PlacedArguments(NamedTuple):
    """The arrays among some arguments, and how they lie.

    Attributes:
        mesh: ranks x devices.
        arrays: this rank's own blocks.
        specs: one for each.
        put: makes the arguments with other arrays in their places.
    """

    mesh: Mesh
    arrays: Sequence[Any]
    specs: Sequence[PartitionSpec]
    put: Callable[[Sequence[Any]], tuple[Any, Any]]

    def wholes(self) -> list[jax.ShapeDtypeStruct]:
        """The global arrays."""
        return [global_aval(self.mesh, *pair) for pair in zip(self.arrays, self.specs, strict=True)]

    def on_devices(self) -> tuple[Any, Any]:
        """The arguments, with every array on the devices of the mesh."""
        local = self.mesh.local_mesh
        targets = [NamedSharding(local, local_spec(self.mesh, spec)) for spec in self.specs]
        return self.put([jax.device_put(*pair) for pair in zip(self.arrays, targets, strict=True)])


class Program(NamedTuple):
    """A traced function of one device's arrays.

    Attributes:
        structure: of its results.
        run: on this rank's own blocks.
    """

    structure: Any
    run: Callable[[Sequence[Any]], list[Any]]


def sharded(fun: Callable[..., Any], placed: PlacedArguments, **options: Any) -> Program:
    """``fun`` with the meaning of :func:`jax.shard_map`."""
    mesh = placed.mesh
    closed, structure = shard_map_semantics.trace(fun, mesh, placed.wholes(), **options)
    return Program(structure, lambda arrays: shard_map_semantics.apply(closed, mesh, arrays))


def pmapped(fun: Callable[..., Any], placed: PlacedArguments, out_specs: Any) -> Program:
    """``fun`` with the meaning of :func:`jax.pmap`; ``out_specs`` is a prefix of the tree of its results."""
    mesh = placed.mesh
    untyped = {"in_specs": tuple(placed.specs), "out_specs": out_specs, "check_vma": False}
    if jaxprs.manual_sizes(jax.sharding.get_abstract_mesh()):  # inside another, whose types JAX would take for ours
        return sharded(fun, placed, **untyped)
    try:
        closed, structure = pmap_semantics.trace(fun, mesh, placed.arrays, placed.specs)
    except AssertionError as error:
        # lax.pcast, which says something about types where there are none, looks for a mesh around.
        if not any(isinstance(arg, frozenset) or hasattr(arg, "varying") for arg in error.args):
            raise
        return sharded(fun, placed, **untyped)
    numbers = jax.tree.unflatten(structure, range(structure.num_leaves))
    specs = [spec for _, spec in broadcast_prefix(out_specs, numbers)]
    return Program(structure, lambda arrays: pmap_semantics.apply(closed, mesh, arrays, placed.specs, specs))


def run(where: str, fun: Any, comm: Communicator, trace: Callable[[], tuple[PlacedArguments, Program]]) -> Any:
    """Traces a program, and runs it on this rank's own blocks. ``trace`` may raise for arguments that do not fit."""
    placed, program = report_errors(comm, where, fun, trace)
    return jax.tree.unflatten(program.structure, program.run(placed.arrays))


def broadcast_prefix(prefix: Any, tree: Any) -> list[tuple[str, Any]]:
    """For each leaf of ``tree`` the entry of ``prefix`` that stands for it, and that one's place.

    Raises:
        ValueError: it is no prefix.
    """
    spread: list[tuple[str, Any]] = []

    def add(path: Any, entry: Any, part: Any) -> None:
        spread.extend([(jax.tree_util.keystr(path), entry)] * len(jax.tree.leaves(part)))

    jax.tree_util.tree_map_with_path(add, prefix, tree, is_leaf=lambda entry: entry is None)
    return spread


def indices(numbers: SupportsIndex | Iterable[SupportsIndex]) -> tuple[int, ...]:
    """One number or several, as a tuple."""
    return tuple(map(operator.index, numbers if isinstance(numbers, Iterable) else (numbers,)))


def as_arrays(leaves: Sequence[Any]) -> list[Any]:
    """The leaves, with Python numbers as arrays."""
    return [x if hasattr(x, "ndim") else jnp.asarray(x) for x in leaves]
