"""Sums that are sent between ranks in fewer bits than the arrays have in memory: ``psum(..., wire_dtype=...)``.

Over a communicator such a sum is an allreduce with an operation of its own. Over named axes it is first a primitive of
its own, ``wire_sum``, since JAX's psum has no such option; ``discharge`` replaces both by allreduces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pycollective.collectives.checks import Array, PyTree
from pycollective.errors import message
from pycollective.jax_support.jaxprs import replaced
from pycollective.named_axes.names import is_name
from pycollective.primitives import reductions

_START = "Start with jax.tree.map(jnp.zeros_like, x); sum what is not float32 by itself."
_OPS = {jnp.dtype(jnp.bfloat16): "sum_bfloat16"}
"""The name of the reduction for each dtype that can be sent."""


def _op(where: str, wire_dtype: Any) -> str:
    """Returns the name of the reduction that sends ``wire_dtype``.

    Raises:
        TypeError: no reduction sends this dtype.
    """
    try:
        return _OPS[jnp.dtype(wire_dtype)]
    except (KeyError, TypeError):
        names = " or ".join(dtype.name for dtype in _OPS)
        raise TypeError(
            message(where, f"wire_dtype={names}, or None", repr(wire_dtype), "Leave it out to send all bits.")
        ) from None


def _is_narrowed(x: Any) -> bool:
    """Returns whether ``wire_dtype`` applies to ``x``: to floats of at most 32 bits."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits <= 32)


def round_with_residual(where: str, x: PyTree, residual: PyTree, wire_dtype: Any) -> tuple[PyTree, PyTree]:
    """Rounds ``x + residual`` to ``wire_dtype``, for error feedback.

    Returns:
        The rounded arrays, which are to be sent, and what the rounding lost, which is the next residual.

    Raises:
        TypeError: ``wire_dtype`` is None, or no reduction sends it.
        ValueError: the two trees differ in structure or shapes, or a leaf is not float32.
    """
    if wire_dtype is None:
        raise TypeError(message(where, "wire_dtype with residual", "none", "Pass wire_dtype=jnp.bfloat16."))
    _op(where, wire_dtype)
    if jax.tree.structure(x) != jax.tree.structure(residual):
        got = f"{jax.tree.structure(residual)} and {jax.tree.structure(x)}"
        raise ValueError(message(where, "a residual of the structure of x", got, _START))

    def one(x: Any, left: Any) -> tuple[Array, Array]:
        x, left = jnp.asarray(x), jnp.asarray(left)
        if x.shape != left.shape or x.dtype != jnp.float32 or left.dtype != jnp.float32:
            got = f"{left.dtype}{list(left.shape)} for {x.dtype}{list(x.shape)}"
            raise ValueError(message(where, "a residual of the shape of x, both float32", got, _START))
        wanted = x + left
        # XLA may remove a conversion to bfloat16 and back; it keeps reduce_precision.
        sent = jax.lax.reduce_precision(wanted, jnp.finfo(wire_dtype).nexp, jnp.finfo(wire_dtype).nmant)
        return sent, jnp.where(jnp.isfinite(sent), wanted - sent, 0)  # an overflow must not be added in the next call

    pairs = list(map(one, jax.tree.leaves(x), jax.tree.leaves(residual)))
    tree = jax.tree.structure(x)
    return jax.tree.unflatten(tree, [sent for sent, _ in pairs]), jax.tree.unflatten(tree, [left for _, left in pairs])


# wire_sum, the sum over named axes. Its rules are those of JAX's psum. -----------------------------------------

_wire_sum_p = Primitive("wire_sum")
_wire_sum_p.multiple_results = True


@_wire_sum_p.def_abstract_eval
def _wire_sum_abstract_eval(*xs: Any, axes: tuple[Any, ...], **_: Any) -> list[Any]:
    # The results have the types of JAX's own sum.
    return list(jax.make_jaxpr(lambda *xs: jax.lax.psum(xs, axes))(*xs).out_avals)


def _refuse_axes_of_jax(*_: Any, axes: Any, **__: Any) -> NoReturn:
    expected = "axes of pycollective.pmap, jit(axis_name=...) or shard_map for wire_dtype"
    raise NotImplementedError(message("psum", expected, f"{axes}, axes that JAX bound", "Leave wire_dtype out there."))


def _wire_sum_jvp_rule(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> Any:
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    return _wire_sum_p.bind(*primals, **params), _wire_sum_p.bind(*tangents, **params)


def _wire_sum_transpose_rule(cts: Sequence[Any], *xs: Any, axes: tuple[Any, ...], **params: Any) -> list[Array]:
    cts = list(map(ad.instantiate_zeros, cts))
    if any(jax.typeof(ct) != x.aval.to_tangent_aval() for ct, x in zip(cts, xs, strict=True)):
        # With check_vma the types differ: the sum is one value that all devices share, and so is its cotangent.
        return list(jax.lax.pcast(cts, axes, to="varying"))
    return _wire_sum_p.bind(*cts, axes=axes, **params)


# `discharge` replaces the primitive wherever this package binds its axes, so only axes of JAX get here.
_wire_sum_p.def_impl(_refuse_axes_of_jax)
mlir.register_lowering(_wire_sum_p, _refuse_axes_of_jax)
ad.primitive_jvps[_wire_sum_p] = _wire_sum_jvp_rule
ad.primitive_transposes[_wire_sum_p] = _wire_sum_transpose_rule
batching.primitive_batchers[_wire_sum_p] = lambda xs, dims, **params: (_wire_sum_p.bind(*xs, **params), dims)


def sum_on_wire(
    where: str, x: PyTree, axis_name: Any, wire_dtype: Any, sum_all_bits: Callable[[PyTree], PyTree]
) -> PyTree:
    """Sums a tree: floats of at most 32 bits are sent as ``wire_dtype``, other leaves as they are.

    Args:
        where: the public function, for messages.
        x: the tree.
        axis_name: the name of an axis, a tuple of names, or a communicator.
        wire_dtype: the dtype of the floats that are sent.
        sum_all_bits: sums a list of arrays that are sent as they are.

    Raises:
        TypeError: no reduction sends ``wire_dtype``.
    """
    op = _op(where, wire_dtype)
    leaves, tree = jax.tree.flatten(x)
    leaves = [leaf if isinstance(leaf, jax.core.Tracer) else jnp.asarray(leaf) for leaf in leaves]
    narrow = [i for i, leaf in enumerate(leaves) if _is_narrowed(leaf)]
    others = [i for i in range(len(leaves)) if i not in narrow]
    if is_name(axis_name):
        axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
        sums = _wire_sum_p.bind(*(leaves[i] for i in narrow), axes=axes, op=op) if narrow else []
    else:
        sums = reductions.allreduce_all([leaves[i] for i in narrow], comm=axis_name, op=op)
    results = replaced(leaves, narrow, sums)
    if others:
        results = replaced(results, others, sum_all_bits([leaves[i] for i in others]))
    return jax.tree.unflatten(tree, results)
