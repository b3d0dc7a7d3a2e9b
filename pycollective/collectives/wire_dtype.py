"""Sums that go between ranks in fewer bits than they have in memory: over a communicator or over named axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pycollective.collectives.checks import Array, PyTree
from pycollective.errors import message
from pycollective.named_axes.names import is_name
from pycollective.ordering.jaxprs import replaced
from pycollective.primitives import reductions

_START = "Start with jax.tree.map(jnp.zeros_like, x); sum what is not float32 by itself."
_OPS = {jnp.dtype(jnp.bfloat16): "sum_bfloat16"}


def operation(where: str, wire_dtype: Any) -> str:
    """The reduction that sends ``wire_dtype``.

    Raises:
        TypeError: there is none.
    """
    try:
        return _OPS[jnp.dtype(wire_dtype)]
    except (KeyError, TypeError):
        names = " or ".join(dtype.name for dtype in _OPS)
        raise TypeError(
            message(where, f"wire_dtype={names}, or None", repr(wire_dtype), "Leave it out to send all bits.")
        ) from None


def travels_narrow(x: Any) -> bool:
    """Whether ``wire_dtype`` concerns ``x``: a float of at most 32 bits."""
    return bool(jnp.issubdtype(x.dtype, jnp.floating) and jnp.finfo(x.dtype).bits <= 32)


def with_residual(where: str, x: PyTree, residual: PyTree, wire_dtype: Any) -> tuple[PyTree, PyTree]:
    """Error feedback: what to send of ``x + residual``, and what rounding leaves for the next time.

    Raises:
        TypeError: a ``wire_dtype`` that there is not.
        ValueError: the two do not have the same structure and shapes, or are not float32.
    """
    if wire_dtype is None:
        raise TypeError(message(where, "wire_dtype with residual", "none", "Pass wire_dtype=jnp.bfloat16."))
    operation(where, wire_dtype)
    if jax.tree.structure(x) != jax.tree.structure(residual):
        got = f"{jax.tree.structure(residual)} and {jax.tree.structure(x)}"
        raise ValueError(message(where, "a residual of the structure of x", got, _START))

    def one(x: Any, left: Any) -> tuple[Array, Array]:
        x, left = jnp.asarray(x), jnp.asarray(left)
        if x.shape != left.shape or x.dtype != jnp.float32 or left.dtype != jnp.float32:
            got = f"{left.dtype}{list(left.shape)} for {x.dtype}{list(x.shape)}"
            raise ValueError(message(where, "a residual of the shape of x, both float32", got, _START))
        wanted = x + left
        # Not two conversions, which XLA may take for nothing.
        sent = jax.lax.reduce_precision(wanted, jnp.finfo(wire_dtype).nexp, jnp.finfo(wire_dtype).nmant)
        return sent, jnp.where(jnp.isfinite(sent), wanted - sent, 0)  # an overflow is not for the next time

    pairs = list(map(one, jax.tree.leaves(x), jax.tree.leaves(residual)))
    tree = jax.tree.structure(x)
    return jax.tree.unflatten(tree, [sent for sent, _ in pairs]), jax.tree.unflatten(tree, [left for _, left in pairs])


# A sum over named axes: discharge puts an allreduce in its place, as for JAX's own collectives ----------------

_wire_sum_p = Primitive("wire_sum")
_wire_sum_p.multiple_results = True


@_wire_sum_p.def_abstract_eval
def _abstract_eval(*xs: Any, axes: tuple[Any, ...], **_: Any) -> list[Any]:
    # The types of JAX's own sum.
    return list(jax.make_jaxpr(lambda *xs: jax.lax.psum(xs, axes))(*xs).out_avals)


def _not_ours(*_: Any, axes: Any, **__: Any) -> NoReturn:
    what = f"axes of pycollective.pmap, jit(axis_name=...) or shard_map for wire_dtype, got {axes}"
    raise NotImplementedError(message("psum", what, "axes that JAX bound", "Leave wire_dtype out there."))


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> Any:
    tangents = [ad.instantiate_zeros(t) for t in tangents]
    return _wire_sum_p.bind(*primals, **params), _wire_sum_p.bind(*tangents, **params)


def _transpose(cts: Sequence[Any], *xs: Any, axes: tuple[Any, ...], **params: Any) -> list[Array]:
    cts = list(map(ad.instantiate_zeros, cts))
    if any(jax.typeof(ct) != x.aval.to_tangent_aval() for ct, x in zip(cts, xs, strict=True)):
        # Typed: the sum is one value that all devices share, and so is its cotangent.
        return list(jax.lax.pcast(cts, axes, to="varying"))
    return _wire_sum_p.bind(*cts, axes=axes, **params)


_wire_sum_p.def_impl(_not_ours)
mlir.register_lowering(_wire_sum_p, _not_ours)
ad.primitive_jvps[_wire_sum_p] = _jvp
ad.primitive_transposes[_wire_sum_p] = _transpose
batching.primitive_batchers[_wire_sum_p] = lambda xs, dims, **params: (_wire_sum_p.bind(*xs, **params), dims)


def psum(where: str, x: PyTree, axis_name: Any, wire_dtype: Any, full: Callable[[PyTree], PyTree]) -> PyTree:
    """The sum of a tree: floats of at most 32 bits by way of ``wire_dtype``, what ``full`` sums the rest.

    Args:
        where: for messages.
        x: the tree.
        axis_name: a name, names, or a communicator.
        wire_dtype: what goes between ranks.
        full: the sum of a list of arrays without it.

    Raises:
        TypeError: a ``wire_dtype`` that there is not.
    """
    op = operation(where, wire_dtype)
    leaves, tree = jax.tree.flatten(x)
    leaves = [leaf if isinstance(leaf, jax.core.Tracer) else jnp.asarray(leaf) for leaf in leaves]
    narrow = [i for i, leaf in enumerate(leaves) if travels_narrow(leaf)]
    whole = [i for i in range(len(leaves)) if i not in narrow]
    if is_name(axis_name):
        axes = tuple(axis_name) if isinstance(axis_name, (tuple, list)) else (axis_name,)
        sums = _wire_sum_p.bind(*(leaves[i] for i in narrow), axes=axes, op=op) if narrow else []
    else:
        sums = reductions.allreduce_all([leaves[i] for i in narrow], comm=axis_name, op=op)
    filled = replaced(leaves, narrow, sums)
    return jax.tree.unflatten(tree, replaced(filled, whole, full([leaves[i] for i in whole])) if whole else filled)
