"""Tensor parallelism: each device along an axis has a part of each weight, and computes a part of each layer.

A value is the *same* on all devices, or each device has a *part* of it, or a *term*: then the value is the sum of all
devices' terms. A layer goes from one form to another by an operator. Its transpose goes back:

    operator      from     to       of values        of cotangents
    copy_to       same     own      nothing          psum
    reduce_from   terms    same     psum             nothing
    gather_from   parts    own      all_gather       reduce_scatter
    scatter_to    terms    parts    reduce_scatter   all_gather
    join_from     parts    same     all_gather       the own part
    split_to      same     parts    the own part     joined

*Own* means: each device has the whole value, and computes something of its own from it. The loss is the same on all
devices and counts once. So the gradient of a parameter that all devices have is whole, and the same on all devices;
the gradient of a part of a parameter is a part of the whole gradient. Without JAX's types (``check_vma=True``) that is
so where the axis is bound: take gradients inside the function that pmap or shard_map maps, not of the mapped function.

A block of two layers has one psum forward and one backward:

    y = reduce_from(f(copy_to(x) @ A_r) @ B_r)        A = [A_0 A_1 ...] cut by columns, B by rows

If x and y are cut along the sequence, then gather_from and scatter_to take the places of copy_to and reduce_from. As
many bytes travel, and what is between two blocks needs 1 / N of the memory.

Sources: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism",
arXiv:1909.08053, section 3; Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models",
arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
from jax import lax

from pycollective.collectives.replicated import copy_to, reduce_from, with_transpose
from pycollective.errors import message
from pycollective.jax_support.jax_internals import all_gather_invarying
from pycollective.parallel.axes import AxisName, axis_size, has_types, varies
from pycollective.parallel.marked import mark

Array = Any

_WRAPPER = "for_parts(optimizer, specs)"
"""How an optimizer is told of parts of weights."""


def gather_from(x: Array, axis_name: AxisName, axis: int) -> Array:
    """Joins the parts of all devices along ``axis``, for computations that differ. Cotangents are summed, and cut.

    :func:`join_from` is for a value with which all devices go on alike.

    Args:
        x: an array, this device's part.
        axis_name: the axis of devices, or a tuple of axes.
        axis: the axis of the array.

    Returns:
        The whole array. By JAX's types it varies along the axis.

    Raises:
        NameError: the axis is not bound.

    Differentiation: as for :func:`copy_to`. Source: g in arXiv:2205.05198, section 4.2.2.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jax.vmap(lambda x: gather_from(x, "model", 0), axis_name="model")(jnp.array([[1.0], [2.0]]))
        Array([[1., 2.],
               [1., 2.]], dtype=float32)
    """
    axis_size("gather_from", axis_name)
    return lax.all_gather(x, axis_name, axis=axis, tiled=True)


def scatter_to(x: Array, axis_name: AxisName, axis: int) -> Array:
    """Returns this device's part of the sum of all devices' ``x``, cut along ``axis``. Cotangents are joined.

    Args:
        x: an array, a term of the sum.
        axis_name: the axis of devices, or a tuple of axes.
        axis: the axis of the array. Its length must be a multiple of the number of devices.

    Returns:
        The part of the sum.

    Raises:
        ValueError: the length is no multiple of the number of devices.
        NameError: the axis is not bound.

    Differentiation: as for :func:`copy_to`. Source: g-bar in arXiv:2205.05198, section 4.2.2.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jax.vmap(lambda x: scatter_to(x, "model", 0), axis_name="model")(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
        Array([[4.],
               [6.]], dtype=float32)
    """
    _part_length("scatter_to", x, axis_name, axis)
    return lax.psum_scatter(x, axis_name, scatter_dimension=axis % x.ndim, tiled=True)


def join_from(x: Array, axis_name: AxisName, axis: int) -> Array:
    """Joins the parts of all devices along ``axis``. All devices go on with the whole alike. Cotangents are cut.

    Args:
        x: an array, this device's part.
        axis_name: the axis of devices, or a tuple of axes.
        axis: the axis of the array.

    Returns:
        The whole array, the same on all devices.

    Raises:
        NameError: the axis is not bound.

    Differentiation: as for :func:`copy_to`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> def loss(x):
        ...     return jnp.sum(join_from(x, "model", 0) ** 2)
        >>> jax.vmap(jax.grad(loss), axis_name="model")(jnp.array([[1.0], [2.0]]))
        Array([[2.],
               [4.]], dtype=float32)
    """
    devices = axis_size("join_from", axis_name)
    if has_types(axis_name):
        x = x if varies(x, axis_name) else lax.pcast(x, axis_name, to="varying")
        return all_gather_invarying(x, axis_name, axis=axis, tiled=True)
    # In front of the sum of all devices' equal cotangents, which all_gather has as its transpose.
    x = with_transpose(lambda x: x, lambda ct: ct / devices, x)
    return lax.all_gather(x, axis_name, axis=axis, tiled=True)


def split_to(x: Array, axis_name: AxisName, axis: int) -> Array:
    """Returns this device's part of ``x``, cut along ``axis``. Cotangents are joined.

    Args:
        x: an array, the same on all devices along the axis.
        axis_name: the axis of devices, or a tuple of axes.
        axis: the axis of the array. Its length must be a multiple of the number of devices.

    Returns:
        The part.

    Raises:
        ValueError: the length is no multiple of the number of devices; by JAX's types, the array varies along the axis.
        NameError: the axis is not bound.

    Differentiation: as for :func:`copy_to`.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jax.vmap(lambda x: split_to(x, "model", 0), None, axis_name="model", axis_size=2)(jnp.arange(4))
        Array([[0, 1],
               [2, 3]], dtype=int32)
    """
    length = _part_length("split_to", x, axis_name, axis)
    x = copy_to(x, axis_name)
    return lax.dynamic_slice_in_dim(x, lax.axis_index(axis_name) * length, length, axis)


def column_parallel(x: Array, w: Array, axis_name: AxisName, *, sequence_axis: int | None = None) -> Array:
    """Multiplies by a matrix whose columns are cut: ``y_r = x @ w_r``, the first layer of a block.

    Args:
        x: an array of shape (..., in), the same on all devices; with ``sequence_axis`` this device's part of it.
        w: this device's part of the weight, (in, out / N). It may have more dimensions behind the first, such as
            (in, heads / N, width).
        axis_name: the axis, or a tuple of axes, of tensor parallelism.
        sequence_axis: the axis of ``x`` along which it is cut. It is one of the leading ones, from 0. None: it is not.

    Returns:
        This device's part of the product, (..., out / N). A bias is cut as the columns are: add the own part.

    Raises:
        ValueError: the shapes do not fit; by JAX's types, an ``x`` that is not cut varies along the axis.
        NameError: the axis is not bound.

    Differentiation: as for :func:`copy_to`. Source: arXiv:1909.08053, section 3.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> w = jnp.arange(8.0).reshape(2, 4)
        >>> parts = w.reshape(2, 2, 2).swapaxes(0, 1)  # the columns of each of two devices
        >>> y = jax.vmap(lambda w: column_parallel(jnp.ones((3, 2)), w, "model"), axis_name="model")(parts)
        >>> bool((jnp.concatenate(y, axis=1) == jnp.ones((3, 2)) @ w).all())
        True
    """
    _check_product("column_parallel", x, w, 1, "x of shape (..., in) and w of shape (in, ...)")
    w = mark(w, axis_name, range(1, w.ndim), _WRAPPER)
    if sequence_axis is None:
        x = copy_to(x, axis_name)
    else:
        _check_sequence("column_parallel", sequence_axis, x.ndim - 1)
        x = gather_from(x, axis_name, sequence_axis)
    return jnp.tensordot(x, w, axes=1)


def row_parallel(x: Array, w: Array, axis_name: AxisName, *, sequence_axis: int | None = None) -> Array:
    """Multiplies by a matrix whose rows are cut: ``y = sum_r x_r @ w_r``, the second layer of a block.

    Args:
        x: this device's part of an array, (..., in / N), as :func:`column_parallel` gives it.
        w: this device's part of the weight, (in / N, out). It may have more dimensions before the last, such as
            (heads / N, width, out). All of them are contracted with the last ones of ``x``.
        axis_name: the axis, or a tuple of axes, of tensor parallelism.
        sequence_axis: the axis along which the result is cut. It is one of the leading ones, from 0. None: the result
            is whole.

    Returns:
        The product, (..., out), the same on all devices; with ``sequence_axis`` this device's part. A bias is added to
        the result, once: as it is to a whole result, by :func:`copy_to` to a part.

    Raises:
        ValueError: the shapes do not fit, or the axis of the sequence cannot be cut into equal parts.
        NameError: the axis is not bound.

    Differentiation: as for :func:`copy_to`. Source: arXiv:1909.08053, section 3.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> x, w = jnp.ones((2, 3, 2)), jnp.arange(8.0).reshape(2, 2, 2)  # parts of (3, 4) and (4, 2)
        >>> y = jax.vmap(lambda x, w: row_parallel(x, w, "model"), axis_name="model")(x, w)
        >>> bool((y[0] == jnp.ones((3, 4)) @ w.reshape(4, 2)).all())
        True
    """
    contracted = w.ndim - 1
    _check_product("row_parallel", x, w, contracted, "x of shape (..., in / N) and w of shape (in / N, out)")
    w = mark(w, axis_name, range(contracted), _WRAPPER)
    y = jnp.tensordot(x, w, axes=contracted)
    if sequence_axis is None:
        return reduce_from(y, axis_name)
    _check_sequence("row_parallel", sequence_axis, y.ndim - 1)
    return scatter_to(y, axis_name, sequence_axis)


def vocabulary_embedding(
    table: Array, tokens: Array, axis_name: AxisName, *, sequence_axis: int | None = None
) -> Array:
    """Looks tokens up in a table whose rows are cut. Each device masks the tokens that are not its own.

    Args:
        table: this device's rows, (V / N, width). The first device has the first rows.
        tokens: integers from 0 to V - 1, of any shape, the same on all devices. Another token gets zeros.
        axis_name: the axis, or a tuple of axes, of tensor parallelism.
        sequence_axis: the axis of the tokens along which the result is cut; None: it is whole.

    Returns:
        The rows, (..., width), the same on all devices; with ``sequence_axis`` this device's part.

    Raises:
        ValueError: the table has not two dimensions, tokens are not integers, or the axis of the sequence cannot be
            cut into equal parts.
        NameError: the axis is not bound.

    Differentiation: as for :func:`copy_to`, with respect to the table. Source: arXiv:1909.08053, section 3.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> table = jnp.arange(8.0).reshape(2, 2, 2)  # two rows on each of two devices
        >>> jax.vmap(lambda t: vocabulary_embedding(t, jnp.array([3, 0]), "model"), axis_name="model")(table)[0]
        Array([[6., 7.],
               [0., 1.]], dtype=float32)
    """
    where = "vocabulary_embedding"
    if table.ndim != 2:
        _fail(where, "a table of shape (V / N, width)", f"shape {table.shape}", "Pass this device's rows.")
    own, place = _own_tokens(where, tokens, table.shape[0], axis_name)
    rows = jnp.where(own[..., None], mark(table, axis_name, [0], _WRAPPER)[place], 0)
    if sequence_axis is None:
        return reduce_from(rows, axis_name)
    _check_sequence(where, sequence_axis, tokens.ndim)
    return scatter_to(rows, axis_name, sequence_axis)


def vocabulary_cross_entropy(logits: Array, targets: Array, axis_name: AxisName) -> Array:
    """Returns ``log(sum_v exp(logits_v)) - logits_target``, where the logits are cut along the vocabulary.

    Logits are not gathered: for each position, a maximum and two sums travel. It computes in float32 at least.

    Args:
        logits: this device's part, (..., V / N), as :func:`column_parallel` gives it. The first device has the first
            ones.
        targets: integers from 0 to V - 1, of shape (...), the same on all devices. Another target has the loss NaN.
        axis_name: the axis, or a tuple of axes, of tensor parallelism.

    Returns:
        The loss of each position, of shape (...), in nats, the same on all devices.

    Raises:
        ValueError: the shapes do not fit, or targets are not integers.
        NameError: the axis is not bound.

    Differentiation: as for :func:`copy_to`, with respect to the logits. Source: arXiv:1909.08053, section 3.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> logits = jnp.zeros((2, 1, 2))  # of one position, two on each of two devices
        >>> loss = jax.vmap(lambda x: vocabulary_cross_entropy(x, jnp.array([3]), "model"), axis_name="model")(logits)
        >>> bool(jnp.allclose(loss, jnp.log(4.0)))
        True
    """
    where = "vocabulary_cross_entropy"
    if logits.shape[:-1] != targets.shape or logits.ndim == 0:
        expected = "logits of shape (..., V / N) and targets of shape (...)"
        _fail(where, expected, f"shapes {logits.shape} and {targets.shape}", "Pass a target for each position.")
    length = logits.shape[-1]
    own, place = _own_tokens(where, targets, length, axis_name)
    z = logits.astype(np.promote_types(logits.dtype, np.float32))
    # The loss does not depend on the shift, so its derivative is left out.
    z = z - lax.pmax(lax.stop_gradient(z.max(axis=-1)), axis_name)[..., None]
    of_target = jnp.where(own, jnp.take_along_axis(z, place[..., None], axis=-1)[..., 0], 0)
    total, of_target = reduce_from(jnp.stack([jnp.exp(z).sum(axis=-1), of_target]), axis_name)
    known = (targets >= 0) & (targets < length * axis_size(where, axis_name))
    return jnp.where(known, jnp.log(total) - of_target, jnp.nan)


def _own_tokens(where: str, tokens: Array, length: int, axis_name: AxisName) -> tuple[Array, Array]:
    """Returns which tokens are among this device's ``length`` ones, and their places there; any place for others."""
    axis_size(where, axis_name)
    if not jnp.issubdtype(tokens.dtype, jnp.integer):
        _fail(where, "integers, one for each position", f"{tokens.dtype}", "Pass the numbers of tokens.")
    place = tokens.astype(jnp.int32) - lax.axis_index(axis_name) * length
    return (place >= 0) & (place < length), jnp.clip(place, 0, length - 1)


def _check_product(where: str, x: Array, w: Array, contracted: int, expected: str) -> None:
    if w.ndim < 2 or x.ndim < contracted or x.shape[x.ndim - contracted :] != w.shape[:contracted]:
        remedy = "Pass this device's part of the weight, which is cut along the axis."
        _fail(where, expected, f"shapes {x.shape} and {w.shape}", remedy)


def _check_sequence(where: str, sequence_axis: int, leading: int) -> None:
    if not 0 <= sequence_axis < leading:
        expected = f"sequence_axis to be one of the {leading} leading axes, from 0"
        _fail(where, expected, f"{sequence_axis}", "Pass None where the sequence is not cut.")


def _part_length(where: str, x: Array, axis_name: AxisName, axis: int) -> int:
    """Returns the length of a part along an axis of ``x``."""
    devices = axis_size(where, axis_name)
    if x.shape[axis] % devices:
        expected = f"a multiple of {devices}, the number of devices along {axis_name!r}, as the length of axis {axis}"
        _fail(where, expected, f"shape {x.shape}", "Fill the array up.")
    return x.shape[axis] // devices


def _fail(where: str, expected: str, got: str, remedy: str) -> NoReturn:
    raise ValueError(message(f"parallel.{where}", expected, got, remedy))
