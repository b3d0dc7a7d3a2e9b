"""The dtype of an array inside MPI: for a reduction one that MPI computes with, for a move one of whole bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

BITWISE = ("and", "or", "xor")
"""The reductions of integers, bit by bit, and of bools."""
OPS = ("sum", "prod", "min", "max", *BITWISE)
"""The reductions of MPI."""
SUMS = ("sum", "sum_bfloat16")
"""The linear reductions. "sum_bfloat16" adds float32 numbers that go between ranks as bfloat16; only ``allreduce`` has
it."""


def wide(x: Array, op: str) -> Array:
    """``x`` in a dtype that MPI computes with.

    Floats of 16 and 8 bits are reduced in float32 and rounded once, integers of less than a byte in int8 or uint8, sums
    and products of bool in int32, as :func:`jax.lax.psum` does.
    """
    dtype = _wide_dtype(x.dtype, op)
    return x if dtype is None else x.astype(dtype)


def is_wide(x: Any, op: str) -> bool:
    """Whether MPI computes with the dtype of ``x``, so that :func:`wide` returns ``x``."""
    return _wide_dtype(x.dtype, op) is None


@functools.lru_cache(maxsize=256)  # JAX's questions about dtypes cost more than a small call
def _wide_dtype(dtype: Any, op: str) -> Any:
    """The dtype in which MPI reduces arrays of a dtype; None if it is the same."""
    if dtype == jnp.bool_:
        return jnp.int32 if op in (*SUMS, "prod") else None
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return jnp.float32
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return jnp.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint8
    return None


def narrow(y: Array, like: Array) -> Array:
    """The inverse of :func:`wide`, for a result of the dtype of ``like``; sums of bool stay int32."""
    # Where JAX has no 64-bit types, astype would cut the values of an array of such a type.
    return y if y.dtype == like.dtype or like.dtype == bool else y.astype(like.dtype)


def reduced(bind: Callable[..., Array], x: Array, op: str, **params: Any) -> Array:
    """Binds a reduction of ``x`` in a dtype that MPI computes with; the result has the dtype of ``x``."""
    return narrow(bind(wide(x, op), op=op, **params), x)


def to_wire(x: Array) -> Array:
    """``x`` in a dtype of whole bytes, which MPI can move: keys as their data, numbers of less than a byte widened."""
    dtype = x.dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return x.astype(jnp.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint8)
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8:
        return x.astype(jnp.float32)
    return x


def from_wire(y: Array, like: Array | jax.ShapeDtypeStruct) -> Array:
    """The inverse of :func:`to_wire`, for an array of the dtype of ``like``."""
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(y, impl=key_impl(like.dtype))
    return y if y.dtype == like.dtype else y.astype(like.dtype)


@functools.lru_cache(maxsize=16)
def key_impl(dtype: Any) -> Any:
    """The implementation of keys of a dtype, which JAX tells of arrays alone."""
    with jax.ensure_compile_time_eval():
        return jax.random.key_impl(jnp.empty(0, dtype))


def moved(bind: Callable[..., Array], x: Array, **params: Any) -> Array:
    """Binds an operation that moves ``x``, in a dtype of whole bytes; the result has the dtype of ``x``."""
    return from_wire(bind(to_wire(x), **params), x)


def bits(x: Array) -> Array:
    """The bits of ``x`` as unsigned integers. XLA adds zeros to them without change, also for -0.0 and NaN.

    A complex number becomes two integers along a new last axis.
    """
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return bits(jnp.stack([x.real, x.imag], axis=-1))
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{x.dtype.itemsize * 8}"))


def from_bits(bits: Array, like: Any) -> Array:
    """The inverse of :func:`bits`, for an array of the dtype of ``like``."""
    if jnp.issubdtype(like.dtype, jnp.complexfloating):
        parts = lax.bitcast_convert_type(bits, jnp.finfo(like.dtype).dtype)
        return lax.complex(parts[..., 0], parts[..., 1])
    if like.dtype == jnp.bool_:
        return bits.astype(jnp.bool_)
    return lax.bitcast_convert_type(bits, like.dtype)
