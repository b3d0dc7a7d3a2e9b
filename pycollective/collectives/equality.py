"""The comparison of arrays between ranks, outside programs: which leaf differs on which rank, and by how much.

The ranks first combine one digest of all leaves. If it is the same on all ranks, they exchange nothing else. Otherwise
rank 0 sends the first of the leaves that differ to the other ranks, in blocks. Each rank finds its own differences.
These are combined as well, and all ranks make the same message of them.
"""

from __future__ import annotations

import collections
import math
from typing import Any, NamedTuple

import jax
import numpy as np

from pycollective.collectives import host_leaves
from pycollective.collectives.checks import PyTree
from pycollective.collectives.host_leaves import Difference, HostLeaf
from pycollective.errors import fail, message, name_ranks
from pycollective.jax_support.jax_internals import at_top_level
from pycollective.ordering import dispatch
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.meeting import Sameness, complete, digest_of, first_of, meet, same_call
from pycollective.ranks.out_of_band import Steps
from pycollective.ranks.ranks_by_value import RanksByValue, of_rank, ranks_in, together
from pycollective.ranks.world import given_or_world

_WHERE = "assert_equal_across"

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
    """The differences of some ranks' leaves from rank 0's.

    Attributes:
        bits: the numbers of rank 0's leaves that have other bits there.
        types: the numbers of rank 0's leaves that have another type there, and this type; None for those that are not
            there.
        only_here: the paths that rank 0 does not have.
        copies: paths, and for each the devices whose copy of the leaf differs from the first copy of the rank.
    """

    bits: tuple[int, ...]
    types: tuple[tuple[int, str | None], ...]
    only_here: tuple[str, ...]
    copies: tuple[tuple[str, tuple[str, ...]], ...]


_Reports = RanksByValue[_Report]


class _Own(NamedTuple):
    """What a rank has read.

    Attributes:
        leaves: the leaves by their paths.
        entries: their descriptions, by path.
        copies: the devices whose copies differ, by path.
        failure: why it cannot read its leaves, if it cannot.
    """

    leaves: dict[str, Any]
    entries: dict[str, _Entry]
    copies: dict[str, tuple[str, ...]]
    failure: Exception | None


class _Outcome(NamedTuple):
    """What consecutive ranks have read.

    Attributes:
        failure: the lowest rank that cannot read its leaves, and its error.
        leaves: whether their leaves are the same.
        have_copies: whether a rank has copies that differ.
    """

    failure: tuple[int, str] | None
    leaves: Sameness
    have_copies: bool

    def followed_by(self, later: _Outcome) -> _Outcome:
        """That of these ranks and of those that follow them."""
        failure, have_copies = first_of(self.failure, later.failure), self.have_copies or later.have_copies
        return _Outcome(failure, self.leaves.followed_by(later.leaves), have_copies)


class _Worst(NamedTuple):
    """The differences of the elements of a leaf on consecutive ranks.

    Attributes:
        rank: the lowest of the ranks with the worst difference.
        difference: that difference.
        values: the largest number of elements of a rank that differ in value.
        only_bits: the largest number of elements of a rank that differ in their bits alone.
        alike: whether these numbers are the same on all of the ranks that differ.
    """

    rank: int
    difference: Difference
    values: int
    only_bits: int
    alike: bool

    @staticmethod
    def of(rank: int, difference: Difference) -> _Worst:
        """That of one rank."""
        return _Worst(rank, difference, difference.values, difference.only_bits, alike=True)

    def followed_by(self, later: _Worst) -> _Worst:
        """That of these ranks and of those that follow them."""
        worst = later if later.difference.weight > self.difference.weight else self
        counts = self.values, self.only_bits
        alike = self.alike and later.alike and counts == (later.values, later.only_bits)
        values, only_bits = max(self.values, later.values), max(self.only_bits, later.only_bits)
        return _Worst(worst.rank, worst.difference, values, only_bits, alike)


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
    own = _read_all(comm, tree)
    key = _WHERE, digest_of((list(own.entries.values()), own.copies, repr(own.failure)))
    lines = complete(comm, _WHERE, _WHERE, key, lambda: _compare(comm, own))
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


def _read_all(comm: Communicator, tree: PyTree) -> _Own:
    own = _Own(_by_path(tree), {}, {}, None)
    try:
        for path, value in own.leaves.items():
            leaf = _read(comm, path, value)
            element_bytes = leaf.elements.nbytes // max(1, len(leaf.elements))
            own.entries[path] = _Entry(path, leaf.type, leaf.shape, element_bytes, leaf.digest())
            if leaf.copies:
                own.copies[path] = leaf.copies
    except Exception as error:  # all ranks raise it
        return own._replace(failure=error)
    return own


def _compare(comm: Communicator, own: _Own) -> Steps[list[str]]:
    """A sentence for each difference, the same on all ranks. Raises an error on all if one cannot read its leaves."""
    out = comm._out_of_band
    failure = None if own.failure is None else (comm.rank, f"{type(own.failure).__name__}: {own.failure}")
    outcome = _Outcome(failure, Sameness.of(comm, list(own.entries.values())), bool(own.copies))
    met = yield from meet(comm, f"a call of {_WHERE}", outcome, _Outcome.followed_by)
    if own.failure is not None:
        raise own.failure
    found = same_call(comm, _WHERE, met)
    if found.failure is not None:
        rank, text = found.failure
        expected, got = "leaves that every rank can read", f"an error on rank {rank}: {text}"
        fail(RuntimeError, _WHERE, comm, expected, got, "Look at the error of that rank.")
    if found.leaves.other is None and not found.have_copies:
        return []
    from_first: list[_Entry] = yield from out.tell(list(own.entries.values()))
    mine: _Reports = of_rank(comm.rank, _report(from_first, own))
    reports: _Reports = yield from out.tell((yield from out.reduce(mine, together)))
    return (yield from _lines(comm, from_first, reports, own.leaves))


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


def _report(from_first: list[_Entry], own: _Own) -> _Report:
    """This rank's report on rank 0's leaves."""
    bits: list[int] = []
    types: dict[int, str | None] = {}
    for number, first in enumerate(from_first):
        here = own.entries.get(first.path)
        if here is None or here.type != first.type:
            types[number] = None if here is None else here.type
        elif here.digest != first.digest:
            bits.append(number)
    paths = {first.path for first in from_first}
    only_here = tuple(path for path in own.entries if path not in paths)
    return _Report(tuple(bits), tuple(types.items()), only_here, tuple(own.copies.items()))


def _lines(comm: Communicator, from_first: list[_Entry], reports: _Reports, leaves: dict[str, Any]) -> Steps[list[str]]:
    """A sentence for each difference, the same on all ranks; only the first ones are complete.

    Differences of structure come first: they may explain the others.
    """
    lines = []
    everywhere = range(comm.size)

    def ranks_with(field: str, item: Any) -> list[int]:
        return sorted(
            rank for report, runs in reports.items() if item in getattr(report, field) for rank in ranks_in(runs)
        )

    for path in dict.fromkeys(path for report in reports for path in report.only_here):
        there = ranks_with("only_here", path)
        lines.append(f"{path}: on {name_ranks(there)}, not on {name_ranks(set(everywhere) - set(there))}")
    kinds = dict.fromkeys(item for report in reports for item in report.types)
    for number, kind in sorted(kinds, key=lambda item: item[0]):  # stable: of a leaf that of the lowest rank first
        there = ranks_with("types", (number, kind))
        what = f"not on {name_ranks(there)}" if kind is None else f"{kind} on {name_ranks(there)}"
        lines.append(f"{from_first[number].path}: {from_first[number].type} on rank 0, {what}")
    copies = dict.fromkeys(item for report in reports for item in report.copies)
    devices_of = {(path, rank): devices for path, devices in copies for rank in ranks_with("copies", (path, devices))}
    for path in dict.fromkeys(path for path, _ in copies):
        for rank in sorted(rank for other, rank in devices_of if other == path):
            devices = ", ".join(devices_of[path, rank])
            lines.append(f"{path}: on rank {rank} the copies on {devices} differ from that on its first device")
    for number in sorted({number for report in reports for number in report.bits}):
        first = from_first[number]
        if len(lines) < _MOST_LINES:
            ranks = ranks_with("bits", number)
            lines.append(f"{first.path}: {(yield from _numbers(comm, first, ranks, leaves))}")
        else:
            lines.append(first.path)
    return lines


def _numbers(comm: Communicator, entry: _Entry, ranks: list[int], leaves: dict[str, Any]) -> Steps[str]:
    """How much a leaf differs on some ranks, the same sentence on all ranks. Rank 0 sends its elements, in blocks."""
    out, is_first = comm._out_of_band, comm.rank == 0
    elements = _read(comm, entry.path, leaves[entry.path]).elements if is_first or comm.rank in ranks else None
    length = max(1, _BLOCK_BYTES // entry.element_bytes)
    parts: list[Difference | None] = []
    for start in range(0, math.prod(entry.shape), length):
        own = None if elements is None else elements[start : start + length]
        first = yield from out.tell(own)
        if own is not None and not is_first:
            parts.append(host_leaves.difference(first, own, start))
    mine = host_leaves.merged(parts)
    worst = yield from out.reduce(None if mine is None else _Worst.of(comm.rank, mine), _worst_of)
    return _sentence(ranks, (yield from out.tell(worst)), entry.shape)


def _worst_of(lower: _Worst | None, higher: _Worst | None) -> _Worst | None:
    return first_of(lower, higher) if lower is None or higher is None else lower.followed_by(higher)


def _sentence(ranks: list[int], found: _Worst, shape: tuple[int, ...]) -> str:
    """A sentence on the differences of some ranks from rank 0.

    Example:
        >>> two = _Worst.of(1, Difference(2, 0, 0.1, 4, "1.0", "1.1", ""))
        >>> one = _Worst.of(2, Difference(1, 0, 0.5, 4, "1.0", "1.5", ""))
        >>> _sentence([1], two, (2, 3))
        'rank 1 differs from rank 0 in 2 of 6 elements, by at most 0.1, at [1, 1]: 1.0 on rank 0, 1.1 on rank 1'
        >>> _sentence([1, 2], two.followed_by(one), (6,))[:59]
        'ranks 1, 2 differ from rank 0 in up to 2 of 6 elements, by '
    """
    worst, count = found.difference, math.prod(shape)
    up_to = "" if found.alike else "up to "
    verb = "differs" if len(ranks) == 1 else "differ"
    of_all = f"of {count} element{'s' * (count != 1)}"
    bits = f"the bits alone of {up_to}{found.only_bits} {of_all}"
    how = f"{up_to}{found.values} {of_all}" if found.values else f"{bits}, whose values are equal"
    if found.values and found.only_bits:
        how += f", and in {bits}"
    if worst.largest is not None and found.values:
        amount = f"{worst.largest:.6g}" if isinstance(worst.largest, float) else str(worst.largest)
        how += ", by a NaN" if amount == "nan" else f", by at most {amount}"
    if worst.reason:
        how += f" ({worst.reason})"
    index = [int(i) for i in np.unravel_index(worst.place, shape)]
    place = f", at {index}" if index else ""
    values_there = f"{worst.first} on rank 0, {worst.other} on rank {found.rank}"
    return f"{name_ranks(ranks)} {verb} from rank 0 in {how}{place}: {values_there}"
