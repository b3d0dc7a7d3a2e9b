"""The comparison of arrays between ranks, outside programs: which leaf differs on which rank, and by how much.

The ranks first exchange digests of the leaves. If no digest differs, they exchange nothing else. Otherwise rank 0 sends
the first of the leaves that differ to the other ranks, in blocks. Each rank finds its own differences, and all ranks
make the same message of them.
"""

from __future__ import annotations

import collections
import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pycollective.collectives import host_leaves
from pycollective.collectives.checks import PyTree
from pycollective.collectives.host_leaves import Difference, HostLeaf
from pycollective.errors import fail, message, name_ranks
from pycollective.jax_support.jax_internals import at_top_level
from pycollective.ordering import dispatch
from pycollective.ranks.agreement import gather_from_all
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.world import given_or_world

_WHERE = "assert_equal_across"

_CALL = f"a call of {_WHERE}"
"""The first part of the first message of a rank. A rank in the first call of a function compares it with its own."""

_MOST_LINES = 5
"""The largest number of differing leaves that the message shows."""

_BLOCK_BYTES = 8 << 20
"""The largest part of a leaf that is sent at once."""


class _Entry(NamedTuple):
    """The description of a leaf that rank 0 sends to the other ranks."""

    path: str
    type: str
    shape: tuple[int, ...]
    element_bytes: int
    digest: bytes


class _Report(NamedTuple):
    """The differences of a rank's leaves from rank 0's.

    Attributes:
        bits: the numbers of rank 0's leaves that have other bits here.
        types: the types of rank 0's leaves that have another one here, by their number; None for those that are not
            here.
        only_here: the paths that rank 0 does not have.
        copies: the devices whose copy of a leaf differs from the first copy here, by path.
    """

    bits: list[int]
    types: dict[int, str | None]
    only_here: list[str]
    copies: dict[str, tuple[str, ...]]


def assert_equal_across(tree: PyTree, comm: Communicator | None = None) -> None:
    """Checks that all ranks have the same arrays, bit for bit; else each rank raises the same AssertionError.

    The message names the leaves that differ and the ranks on which they are not those of rank 0. Of the first leaves it
    tells how many elements differ, and the largest absolute difference with its index and both values. Where the values
    are equal and only their bits differ (-0.0 and 0.0, NaNs), the message says so. An array whose copies on the devices
    of one rank differ is an error too.

    Call it at top level, on all ranks of the communicator. Each rank sends one digest. If something differs, rank 0's
    first leaves that differ travel as well, in blocks. The time goes into the digest, a SHA-256 of all arrays.

    Args:
        tree: an array or a pytree of arrays: JAX arrays, on one or several devices of this rank, keys of
            :mod:`jax.random`, NumPy arrays, and Python numbers, which count as NumPy's float64, int64, complex128 and
            bool. Leaves are compared by their paths, whatever the types of the containers. A global array must be
            replicated.
        comm: a communicator, the world by default.

    Raises:
        AssertionError: on all ranks: some rank has a leaf with other bits, shape or dtype, or not at all.
        TypeError: a leaf is no array of numbers, bools or keys, or it is a global array that is cut up among ranks.
        RuntimeError: the call is inside :func:`jax.jit` or another transform. Or another rank cannot read a leaf, and
            raises that error. Or another rank does not make this call within the timeout of :func:`init`.

    Dtypes:
        All, and keys of :mod:`jax.random`.

    Differentiation:
        None: there is no result.

    Order:
        After the programs that were dispatched before, which have run when the call returns.

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> comm = pc.init()
        >>> pc.assert_equal_across({"w": jnp.ones((2, 3)), "step": 7}, comm)
    """
    if not at_top_level():
        fail(
            RuntimeError,
            _WHERE,
            None,
            "a call at top level, where arrays have values",
            "one inside jax.jit or another transform",
            "Return the arrays from the function, and compare them there.",
        )
    comm = given_or_world(_WHERE, comm)
    dispatch.wait_for_all_programs()
    leaves = _by_path(tree)
    entries, copies = _read_alike(comm, leaves)
    if entries is None:
        return
    from_first: list[_Entry] = _gather(comm, list(entries.values()) if comm.rank == 0 else None)[0]
    reports: list[_Report] = _gather(comm, _report(from_first, entries, copies))
    lines = _lines(comm, from_first, reports, leaves)
    if lines:
        more = [f"and {len(lines) - _MOST_LINES} more"] if len(lines) > _MOST_LINES else []
        found = ";\n  ".join([*lines[:_MOST_LINES], *more])
        raise AssertionError(
            message(
                _WHERE,
                f"the same bits in every leaf on all {comm.size} ranks" if comm.size > 1 else "equal copies",
                f"differences:\n  {found}",
                "Look for a seed, data or a step that is one rank's own; pycollective.broadcast(tree) gives all ranks "
                "what rank 0 has.",
            )
        )


def _gather(comm: Communicator, own: Any) -> list[Any]:
    return gather_from_all(comm, _WHERE, _WHERE, own)


def _by_path(tree: PyTree) -> dict[str, Any]:
    """The leaves by their paths; equal paths get numbers.

    Example:
        >>> _by_path({"a": [1, 2], "b": None}), _by_path(3)
        ({"['a'][0]": 1, "['a'][1]": 2}, {'the tree': 3})
    """
    met: collections.Counter[str] = collections.Counter()
    found = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path) or "the tree"
        met[name] += 1
        found[name if met[name] == 1 else f"{name} (leaf {met[name]} of this path)"] = leaf
    return found


def _read_alike(
    comm: Communicator, leaves: dict[str, Any]
) -> tuple[dict[str, _Entry] | None, dict[str, tuple[str, ...]]]:
    """This rank's entries by path, and the devices whose copies differ; no entries if all ranks have the same ones.

    Raises an error on all ranks if a rank cannot read its leaves.
    """
    entries: dict[str, _Entry] = {}
    copies: dict[str, tuple[str, ...]] = {}
    digest = hashlib.sha256()
    failure: Exception | None = None
    try:
        for path, value in leaves.items():
            leaf = _read(comm, path, value)
            element_bytes = leaf.elements.nbytes // max(1, len(leaf.elements))
            entries[path] = _Entry(path, leaf.type, leaf.shape, element_bytes, leaf.digest())
            digest.update(repr(entries[path]).encode())
            if leaf.copies:
                copies[path] = leaf.copies
    except Exception as error:
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    outcomes = _gather(comm, (_CALL, text, digest.digest(), bool(copies)))
    if failure is not None:
        raise failure
    for rank, other in enumerate(outcomes):
        # A rank that makes the first call of a function sends the lines of its program, or an error.
        if not (isinstance(other, tuple) and other[0] == _CALL):
            expected, got = f"the other ranks to call {_WHERE} too", f"the first call of a function on rank {rank}"
            fail(RuntimeError, _WHERE, comm, expected, got, "All ranks must make the same calls in the same order.")
        if other[1] is not None:
            expected, got = "leaves that every rank can read", f"an error on rank {rank}: {other[1]}"
            fail(RuntimeError, _WHERE, comm, expected, got, "Look at the error of that rank.")
    if len({other[2:] for other in outcomes}) == 1 and not copies:
        return None, copies
    return entries, copies


def _read(comm: Communicator, path: str, leaf: Any) -> HostLeaf:
    try:
        return host_leaves.read(leaf)
    except TypeError as error:
        fail(
            TypeError,
            _WHERE,
            comm,
            "arrays of numbers, bools or keys that this rank has as a whole",
            f"{error} at {path}",
            "Convert it, or leave it out. Of a global array pass x.addressable_data(0), with a comm of the ranks that "
            "hold the same part.",
        )


def _report(from_first: list[_Entry], own: dict[str, _Entry], copies: dict[str, tuple[str, ...]]) -> _Report:
    """This rank's report on rank 0's leaves."""
    bits: list[int] = []
    types: dict[int, str | None] = {}
    for number, first in enumerate(from_first):
        here = own.get(first.path)
        if here is None or here.type != first.type:
            types[number] = None if here is None else here.type
        elif here.digest != first.digest:
            bits.append(number)
    paths = {first.path for first in from_first}
    return _Report(bits, types, [path for path in own if path not in paths], copies)


def _lines(comm: Communicator, from_first: list[_Entry], reports: list[_Report], leaves: dict[str, Any]) -> list[str]:
    """A sentence for each difference, the same on all ranks; only the first ones are complete.

    Differences of structure come first: they may explain the others.
    """
    lines = []
    everywhere = range(comm.size)
    for path in dict.fromkeys(path for report in reports for path in report.only_here):
        there = [rank for rank in everywhere if path in reports[rank].only_here]
        lines.append(f"{path}: on {name_ranks(there)}, not on {name_ranks(set(everywhere) - set(there))}")
    for number, first in enumerate(from_first):
        types = {rank: report.types[number] for rank, report in enumerate(reports) if number in report.types}
        for kind in dict.fromkeys(types.values()):
            there = [rank for rank in types if types[rank] == kind]
            what = f"not on {name_ranks(there)}" if kind is None else f"{kind} on {name_ranks(there)}"
            lines.append(f"{first.path}: {first.type} on rank 0, {what}")
    for path in dict.fromkeys(path for report in reports for path in report.copies):
        for rank, report in enumerate(reports):
            if path in report.copies:
                devices = ", ".join(report.copies[path])
                lines.append(f"{path}: on rank {rank} the copies on {devices} differ from that on its first device")
    for number, first in enumerate(from_first):
        ranks = [rank for rank, report in enumerate(reports) if number in report.bits]
        if ranks:
            is_shown = len(lines) < _MOST_LINES
            lines.append(f"{first.path}: {_numbers(comm, first, ranks, leaves)}" if is_shown else first.path)
    return lines


def _numbers(comm: Communicator, entry: _Entry, ranks: list[int], leaves: dict[str, Any]) -> str:
    """How much a leaf differs on some ranks, the same sentence on all ranks. Rank 0 sends its elements, in blocks."""
    is_first = comm.rank == 0
    elements = _read(comm, entry.path, leaves[entry.path]).elements if is_first or comm.rank in ranks else None
    length = max(1, _BLOCK_BYTES // entry.element_bytes)
    parts: list[Difference | None] = []
    for start in range(0, math.prod(entry.shape), length):
        own = None if elements is None else elements[start : start + length]
        first = _gather(comm, own if is_first else None)[0]
        if own is not None and not is_first:
            parts.append(host_leaves.difference(first, own, start))
    found: list[Difference | None] = _gather(comm, host_leaves.merged(parts))
    return _sentence(ranks, found, entry.shape)


def _sentence(ranks: list[int], found: Sequence[Difference | None], shape: tuple[int, ...]) -> str:
    """A sentence on the differences of some ranks from rank 0.

    Example:
        >>> two, one = Difference(2, 0, 0.1, 4, "1.0", "1.1", ""), Difference(1, 0, 0.5, 4, "1.0", "1.5", "")
        >>> _sentence([1], [None, two], (2, 3))
        'rank 1 differs from rank 0 in 2 of 6 elements, by at most 0.1, at [1, 1]: 1.0 on rank 0, 1.1 on rank 1'
        >>> _sentence([1, 2], [None, two, one], (6,))[:59]
        'ranks 1, 2 differ from rank 0 in up to 2 of 6 elements, by '
    """
    present = {rank: part for rank in ranks if (part := found[rank]) is not None}
    worst_rank = max(present, key=lambda rank: present[rank].weight)
    worst = present[worst_rank]
    count = math.prod(shape)
    up_to = "up to " if len({(part.values, part.only_bits) for part in present.values()}) > 1 else ""
    values = max(part.values for part in present.values())
    only_bits = max(part.only_bits for part in present.values())
    verb = "differs" if len(ranks) == 1 else "differ"
    of_all = f"of {count} element{'s' * (count != 1)}"
    bits = f"the bits alone of {up_to}{only_bits} {of_all}"
    how = f"{up_to}{values} {of_all}" if values else f"{bits}, whose values are equal"
    if values and only_bits:
        how += f", and in {bits}"
    if worst.largest is not None and values:
        amount = f"{worst.largest:.6g}" if isinstance(worst.largest, float) else str(worst.largest)
        how += ", by a NaN" if amount == "nan" else f", by at most {amount}"
    if worst.reason:
        how += f" ({worst.reason})"
    index = [int(i) for i in np.unravel_index(worst.place, shape)]
    place = f", at {index}" if index else ""
    values_there = f"{worst.first} on rank 0, {worst.other} on rank {worst_rank}"
    return f"{name_ranks(ranks)} {verb} from rank 0 in {how}{place}: {values_there}"
