"""Tensor parallelism: each device along an axis has a part of each weight, and computes a part of each layer.

A distributed value has one of four forms:

    same     all devices have the whole value
    own      all devices have the whole value, and each one computes something else from it
    parts    each device has a block of the value
    terms    each device has a summand; the value is the sum over the devices

An operator converts one form into another. Its transpose converts the cotangents in the opposite direction:

    operator      from     to       communication    communication of cotangents
    copy_to       same     own      none             psum
    reduce_from   terms    same     psum             none
    gather_from   parts    own      all_gather       reduce_scatter
    scatter_to    terms    parts    reduce_scatter   all_gather
    join_from     parts    same     all_gather       none: each device takes its block
    split_to      same     parts    none             all_gather

The loss is the same on all devices and counts once. So the gradient of a parameter that all devices have is the whole
gradient, the same on all devices. The gradient of a part of a parameter is the same part of the whole gradient. With
JAX's types (``check_vma=True``) this holds everywhere. Without them it holds only where the axis is bound: take
gradients inside the function that pmap or shard_map maps, not of the mapped function.

A block of two layers has one psum forward and one backward:

    y = reduce_from(f(copy_to(x) @ A_r) @ B_r)        A = [A_0 A_1 ...] cut by columns, B by rows

If x and y are cut along the sequence, gather_from replaces copy_to and scatter_to replaces reduce_from. The number of
bytes on the wire is the same, and the activations between two blocks need 1 / N of the memory.

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
"""The wrapper that error messages recommend for an optimizer whose parameters are parts."""


def gather_from(x: Array, axis_name: AxisName, axis: int) -> Array:
    """Concatenates the parts of all devices, for computations that differ: ``y_r = [x_0 x_1 ...]`` along ``axis``.

    Use :func:`join_from` if all devices make the same computation with the result.

    Args:
        x: an array, this device's part. All devices' parts have the same shape and dtype.
        axis_name: the name of the axis of devices, or a tuple of names.
        axis: the axis of the array along which the parts lie.

    Returns:
        The whole array, with ``axis`` N times as long, in the dtype of ``x``. By JAX's types it varies along the axis.

    Raises:
        NameError: the axis is not bound.

    Differentiation:
        As for :func:`copy_to`. The transpose sums the devices' cotangents and gives each device its part of the sum.

    Order:
        Program order.

    Source:
        g in Korthikanti et al., arXiv:2205.05198, section 4.2.2.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jax.vmap(lambda x: gather_from(x, "model", 0), axis_name="model")(jnp.array([[1.0], [2.0]]))
        Array([[1., 2.],
               [1., 2.]], dtype=float32)
    """
    axis_size("gather_from", axis_name)
    return lax.all_gather(x, axis_name, axis=axis, tiled=True)


def scatter_to(x: Array, axis_name: AxisName, axis: int) -> Array:
    """Sums over devices and returns this device's part of the sum: ``y_r = (sum_s x_s)[r]`` along ``axis``.

    Args:
        x: an array, this device's term of the sum. All terms have the same shape and dtype.
        axis_name: the name of the axis of devices, or a tuple of names.
        axis: the axis of the array that is cut. Its length must be a multiple of the number of devices, N.

    Returns:
        This device's part of the sum, with ``1 / N`` of the length of ``axis``, in the dtype of ``x``.

    Raises:
        ValueError: the length is no multiple of the number of devices.
        NameError: the axis is not bound.

    Differentiation:
        As for :func:`copy_to`. The transpose concatenates the devices' cotangents.

    Order:
        Program order.

    Source:
        g-bar in Korthikanti et al., arXiv:2205.05198, section 4.2.2.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> jax.vmap(lambda x: scatter_to(x, "model", 0), axis_name="model")(jnp.array([[1.0, 2.0], [3.0, 4.0]]))
        Array([[4.],
               [6.]], dtype=float32)
    """
    _part_length("scatter_to", x, axis_name, axis)
    return lax.psum_scatter(x, axis_name, scatter_dimension=axis % x.ndim, tiled=True)


def join_from(x: Array, axis_name: AxisName, axis: int) -> Array:
    """Concatenates the parts of all devices, for one computation on all devices: ``y = [x_0 x_1 ...]`` along ``axis``.

    Use :func:`gather_from` if the devices make different computations with the result.

    Args:
        x: an array, this device's part. All devices' parts have the same shape and dtype.
        axis_name: the name of the axis of devices, or a tuple of names.
        axis: the axis of the array along which the parts lie.

    Returns:
        The whole array, the same on all devices, with ``axis`` N times as long, in the dtype of ``x``.

    Raises:
        NameError: the axis is not bound.

    Differentiation:
        As for :func:`copy_to`. The transpose gives each device its part of the cotangent, which must be the same on
        all devices.

    Order:
        Program order.

    Source:
        ``gather_from_tensor_model_parallel_region`` of Megatron-LM.

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
    # The transpose of all_gather sums the devices' cotangents. These are equal, so each is divided by their number.
    x = with_transpose(lambda x: x, lambda ct: ct / devices, x)
    return lax.all_gather(x, axis_name, axis=axis, tiled=True)


def split_to(x: Array, axis_name: AxisName, axis: int) -> Array:
    """Returns this device's part of ``x``: ``y_r = x[r]``, block r along ``axis``.

    Args:
        x: an array, the same on all devices along the axis.
        axis_name: the name of the axis of devices, or a tuple of names.
        axis: the axis of the array that is cut. Its length must be a multiple of the number of devices, N.

    Returns:
        This device's part, with ``1 / N`` of the length of ``axis``, in the dtype of ``x``.

    Raises:
        ValueError: the length is no multiple of the number of devices; by JAX's types, the array varies along the axis.
        NameError: the axis is not bound.

    Differentiation:
        As for :func:`copy_to`. The transpose concatenates the devices' cotangents.

    Order:
        No communication in the call itself; cotangents have program order.

    Source:
        ``scatter_to_tensor_model_parallel_region`` of Megatron-LM.

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
        w: this device's part of the weight, of shape (in, out / N). It may have more dimensions after the first, such
            as (in, heads / N, width).
        axis_name: the name of the axis of tensor parallelism, or a tuple of names.
        sequence_axis: the axis of ``x`` along which ``x`` is cut, one of its leading axes, counted from 0. Default
            None: ``x`` is not cut.

    Returns:
        This device's part of the product, of shape (..., out / N) and the dtype of the product. A bias is cut like the
        columns: add this device's part of it.

    Raises:
        ValueError: the shapes do not fit; by JAX's types, an ``x`` that is not cut varies along the axis.
        NameError: the axis is not bound.

    Differentiation:
        As for :func:`copy_to`.

    Order:
        Program order: with ``sequence_axis`` an all-gather, without it no communication. The transpose has a
        reduce-scatter or a sum.

    Source:
        Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.

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
        x: this device's part of an array, of shape (..., in / N), as :func:`column_parallel` returns it.
        w: this device's part of the weight, of shape (in / N, out). It may have more dimensions before the last, such
            as (heads / N, width, out). All dimensions but the last are contracted with the last dimensions of ``x``.
        axis_name: the name of the axis of tensor parallelism, or a tuple of names.
        sequence_axis: the axis along which the result is cut, one of its leading axes, counted from 0. Default None:
            the result is not cut.

    Returns:
        The product, of shape (..., out), the same on all devices; with ``sequence_axis`` this device's part of it. Add
        a bias to the result, not to a term of the sum: ``y + b`` without ``sequence_axis``, ``y + copy_to(b, ...)``
        with it.

    Raises:
        ValueError: the shapes do not fit, or the axis of the sequence cannot be cut into equal parts.
        NameError: the axis is not bound.

    Differentiation:
        As for :func:`copy_to`.

    Order:
        Program order: a sum, or with ``sequence_axis`` a reduce-scatter, whose transpose is an all-gather.

    Source:
        Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.

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
    """Looks tokens up in a table whose rows are cut: ``y = table[tokens]``.

    Each device looks up the tokens whose rows it has, and has zeros for the others; the result is the sum.

    Args:
        table: this device's rows of the table, of shape (V / N, width). The first device has the first rows.
        tokens: integers from 0 to V - 1, of any shape, the same on all devices. A token outside this range gets zeros.
        axis_name: the name of the axis of tensor parallelism, or a tuple of names.
        sequence_axis: the axis of the tokens along which the result is cut. Default None: the result is not cut.

    Returns:
        The rows, of shape (..., width) and the dtype of ``table``, the same on all devices; with ``sequence_axis`` this
        device's part of them.

    Raises:
        ValueError: the table does not have two dimensions, tokens are not integers, or the axis of the sequence cannot
            be cut into equal parts.
        NameError: the axis is not bound.

    Differentiation:
        With respect to the table, as for :func:`copy_to`.

    Order:
        Program order: a sum, or with ``sequence_axis`` a reduce-scatter, whose transpose is an all-gather.

    Source:
        Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.

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
    """Computes the cross entropy of logits cut along the vocabulary: ``log(sum_v exp(logits_v)) - logits_target``.

    The logits are not gathered: for each position the devices reduce one maximum and two sums.

    Args:
        logits: this device's part of the logits, of shape (..., V / N), as :func:`column_parallel` returns it. The
            first device has the first logits.
        targets: integers from 0 to V - 1, of shape (...), the same on all devices. A target outside this range has the
            loss NaN.
        axis_name: the name of the axis of tensor parallelism, or a tuple of names.

    Returns:
        The loss of each position in nats, of shape (...), in float32 or the wider dtype of ``logits``, the same on all
        devices.

    Raises:
        ValueError: the shapes do not fit, or targets are not integers.
        NameError: the axis is not bound.

    Differentiation:
        With respect to the logits, as for :func:`copy_to`.

    Order:
        Program order: a maximum, then a sum.

    Source:
        Shoeybi et al., "Megatron-LM", arXiv:1909.08053, section 3.

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
    # The loss does not depend on the maximum that is subtracted, so the derivative of the maximum is not needed.
    z = z - lax.pmax(lax.stop_gradient(z.max(axis=-1)), axis_name)[..., None]
    of_target = jnp.where(own, jnp.take_along_axis(z, place[..., None], axis=-1)[..., 0], 0)
    total, of_target = reduce_from(jnp.stack([jnp.exp(z).sum(axis=-1), of_target]), axis_name)
    known = (targets >= 0) & (targets < length * axis_size(where, axis_name))
    return jnp.where(known, jnp.log(total) - of_target, jnp.nan)


def _own_tokens(where: str, tokens: Array, length: int, axis_name: AxisName) -> tuple[Array, Array]:
    """Returns which tokens are among this device's ``length`` tokens, and their indices there.

    The index of a token of another device is not meaningful; it is in range.
    """
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
