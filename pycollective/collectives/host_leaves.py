"""The bits of a pytree's leaves on the host, and how those of two ranks differ."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

_SIGN_OF_ZERO, _NAN, _UNUSED = "the sign of zero", "the bits of a NaN", "unused bits"


class HostLeaf(NamedTuple):
    """A leaf on the host.

    Attributes:
        type: the dtype and the shape, as ``float32[2,3]``. The dtype of keys names their implementation.
        shape: the shape.
        elements: the elements in row-major order; a key is a row of integers.
        copies: the devices of this rank whose copy of the leaf differs from the first device's that has one.
    """

    type: str
    shape: tuple[int, ...]
    elements: np.ndarray[Any, Any]
    copies: tuple[str, ...]

    def digest(self) -> bytes:
        """A digest of the bits."""
        return hashlib.sha256(_rows(self.elements).data).digest()


class Difference(NamedTuple):
    """How the elements of a rank differ from rank 0's.

    Attributes:
        values: the number of elements that differ in value.
        only_bits: the number of elements that are equal in value, but whose bits differ.
        largest: the largest absolute difference of values; NaN where one of the two is NaN; None for keys and bools.
        place: the place of that difference in row-major order, or of the first if there is no largest one.
        first: rank 0's element there.
        other: this rank's element there.
        reason: what differs there if the values are equal, else "".
    """

    values: int
    only_bits: int
    largest: float | int | None
    place: int
    first: str
    other: str
    reason: str

    @property
    def weight(self) -> tuple[bool, bool, float | int]:
        """The larger the weight, the worse the difference: values are worse than bits, and NaNs worse than numbers."""
        largest = 0 if self.largest is None else self.largest
        is_nan = math.isnan(largest)
        return self.values > 0, is_nan, 0 if is_nan else largest


def read(leaf: Any) -> HostLeaf:
    """Returns a leaf on the host, when the program that computes it has run.

    Raises:
        TypeError: the leaf is no array of numbers, bools or keys, or not all of it is on this rank.
    """
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        elements, copies = _from_devices(leaf)
        shape, name = leaf.shape, str(leaf.dtype)
    else:
        elements, copies = np.asarray(leaf), ()
        if not _is_known(elements.dtype):
            raise TypeError(f"{type(leaf).__name__} of dtype {elements.dtype}")
        if not elements.dtype.isnative:
            elements = elements.astype(elements.dtype.newbyteorder("="))
        shape, name = elements.shape, "float0" if elements.dtype == jax.dtypes.float0 else elements.dtype.name
    elements = elements.reshape(math.prod(shape), *elements.shape[len(shape) :])
    return HostLeaf(f"{name}[{','.join(map(str, shape))}]", shape, elements, copies)


def _is_known(dtype: np.dtype[Any]) -> bool:
    # numpy.longdouble has padding bytes of undefined values, and JAX does not have this dtype.
    is_number = jnp.issubdtype(dtype, jnp.number) and dtype.type not in (np.longdouble, np.clongdouble)
    return is_number or dtype in (np.dtype(bool), jax.dtypes.float0)


def _from_devices(array: jax.Array) -> tuple[np.ndarray[Any, Any], tuple[str, ...]]:
    """The values of a JAX array, and the devices of this rank whose copy of a part differs from the first copy."""
    if not array.is_fully_addressable and not array.is_fully_replicated:
        raise TypeError(f"an array cut up among ranks, {array.sharding}")
    first: dict[Any, np.ndarray[Any, Any]] = {}
    others = []
    for shard in array.addressable_shards:
        part = _from_device(shard.data)
        place = tuple((cut.start, cut.stop) for cut in shard.index)
        if place not in first:
            first[place] = part
        elif not np.array_equal(_rows(part), _rows(first[place])):
            others.append(str(shard.device))
    if len(first) == 1:
        return next(iter(first.values())), tuple(others)
    some = next(iter(first.values()))
    whole = np.empty((*array.shape, *some.shape[array.ndim :]), some.dtype)
    for place, part in first.items():
        whole[tuple(slice(*cut) for cut in place)] = part
    return whole, tuple(others)


def _from_device(part: jax.Array) -> np.ndarray[Any, Any]:
    # JAX keeps a copy on the host as long as the array lives. The array of this copy is dropped at once.
    temporary = jax.make_array_from_single_device_arrays(part.shape, part.sharding, [part])
    if jnp.issubdtype(part.dtype, jax.dtypes.prng_key):
        temporary = jax.random.key_data(temporary)
    return np.asarray(jax.device_get(temporary))


def _rows(elements: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The bytes of the elements, a row for each entry of the first axis."""
    elements = np.ascontiguousarray(elements)
    length = elements.shape[0] if elements.ndim else 1
    if elements.nbytes == 0:  # NumPy cannot view an array without elements as bytes
        return np.empty((length, 0), np.uint8)
    return elements.reshape(length, -1).view(np.uint8)


def difference(first: np.ndarray[Any, Any], other: np.ndarray[Any, Any], offset: int) -> Difference | None:
    """How elements differ from those of rank 0; None if they do not.

    Args:
        first: rank 0's elements, or a row for each key.
        other: this rank's, of the same dtype and number.
        offset: the place of the first of them in the leaf.

    Example:
        >>> difference(np.array([1.0, 0.0, 5.0]), np.array([1.0, -0.0, 2.0]), 10)  # doctest: +NORMALIZE_WHITESPACE
        Difference(values=1, only_bits=1, largest=3.0, place=12, first='5.0', other='2.0', reason='')
    """
    where = np.flatnonzero((_rows(first) != _rows(other)).any(axis=1))
    if not where.size:
        return None
    a, b = first[where], other[where]
    if a.ndim > 1:  # keys
        return Difference(len(where), 0, None, offset + int(where[0]), str(a[0]), str(b[0]), "")
    with np.errstate(all="ignore"):
        distances, differs, is_nan = _distances(a, b)
    values = int(differs.sum())
    if not values:
        reason = _NAN if is_nan[0] else _SIGN_OF_ZERO if _is_inexact(a) else _UNUSED
        shown = [f"{x[0]!s} (0x{_rows(x[:1])[0, ::-1].tobytes().hex()})" for x in (a, b)]
        return Difference(0, len(where), 0, offset + int(where[0]), shown[0], shown[1], reason)
    if distances is None:
        i, largest = int(np.flatnonzero(differs)[0]), None
    else:
        i = int(np.argmax(distances))  # the first NaN, if there is one
        largest = distances[i].item()
    return Difference(values, len(where) - values, largest, offset + int(where[i]), str(a[i]), str(b[i]), "")


def _is_inexact(a: np.ndarray[Any, Any]) -> bool:
    return bool(jnp.issubdtype(a.dtype, jnp.inexact))


def _distances(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> tuple[Any, Any, Any]:
    """The absolute differences, or None; which elements differ in value; which have NaNs in the same places."""
    no_nan = np.zeros(len(a), bool)
    if a.dtype == bool:
        return None, a != b, no_nan
    if not _is_inexact(a):
        kind = np.uint64 if jnp.issubdtype(a.dtype, jnp.unsignedinteger) else np.int64
        a, b = a.astype(kind), b.astype(kind)
        low, high = np.minimum(a, b).view(np.uint64), np.maximum(a, b).view(np.uint64)
        return high - low, a != b, no_nan  # right for each pair, since uint64 wraps
    if jnp.issubdtype(a.dtype, jnp.complexfloating):
        real, imaginary = _distances(a.real, b.real), _distances(a.imag, b.imag)
        return np.hypot(real[0], imaginary[0]), real[1] | imaginary[1], real[2] | imaginary[2]
    a, b = a.astype(np.float64), b.astype(np.float64)
    both_nan = np.isnan(a) & np.isnan(b)
    same = both_nan | (a == b)
    return np.where(same, 0.0, np.abs(a - b)), ~same, both_nan


def merged(parts: Sequence[Difference | None]) -> Difference | None:
    """The difference of a leaf from those of its parts, in their order."""
    found = [part for part in parts if part is not None]
    if not found:
        return None
    worst = max(found, key=lambda part: part.weight)
    return worst._replace(values=sum(part.values for part in found), only_bits=sum(part.only_bits for part in found))
