"""Parameters in a narrow floating-point dtype, trained by a wider copy: the master weights.

An update that is small beside its parameter is lost in bfloat16, whose numbers differ by 1 / 256 of their size. So the
optimizer updates a copy in float32, and the parameters are that copy, rounded:

    m        = m + inner.update(g, state, m)
    updates  = round(m) - params
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from pycollective.errors import message
from pycollective.parallel.per_device import check_params_given

Array = Any
Tree = Any


class MasterState(NamedTuple):
    """The state of :func:`master_weights`.

    Attributes:
        params: the wide copy of the parameters.
        inner: the state of the inner optimizer, for the wide copy.
    """

    params: Tree
    inner: Any


def master_weights(
    inner: optax.GradientTransformation, dtype: Any = jnp.float32
) -> optax.GradientTransformationExtraArgs:
    """Trains parameters in a narrow floating-point dtype by a copy in a wider one.

    Inside of :func:`zero`, ``zero(master_weights(inner), "data")``, each device keeps its slice of the copy.

    Args:
        inner: the optimizer. It gets gradients and parameters in ``dtype``.
        dtype: the dtype of the copy, a floating-point dtype. Default float32. Parameters that are wider, or that are
            not floating-point numbers, keep their own.

    Returns:
        The optimizer. Its updates are in the dtype of the copy: :func:`optax.apply_updates` adds them in this dtype
        and rounds the sums, which gives the rounded copy. So inside of :func:`zero` the updates are sent in ``dtype``.
        Its state is a :class:`MasterState`.

    Raises:
        TypeError: ``dtype`` is no floating-point dtype.
        ValueError: when ``update`` is called: it gets no parameters.

    Source:
        Micikevicius et al., "Mixed Precision Training", arXiv:1710.03740, section 3.1.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> optimizer = master_weights(optax.sgd(1.0))
        >>> params = jnp.ones(1, jnp.bfloat16)
        >>> state = optimizer.init(params)
        >>> for _ in range(8):  # 8 times 1 / 1024, of which bfloat16 would lose each
        ...     updates, state = optimizer.update(jnp.full(1, -1 / 1024, jnp.bfloat16), state, params)
        ...     params = (params.astype(jnp.float32) + updates).astype(params.dtype)  # optax.apply_updates
        >>> print(params, state.params)
        [1.00781] [1.0078125]
    """
    if not jnp.issubdtype(dtype, jnp.floating):
        got, remedy = repr(dtype), "Pass jnp.float32, say."
        raise TypeError(message("parallel.master_weights", "a floating-point dtype", got, remedy))
    inner = optax.with_extra_args_support(inner)

    def widened(x: Array) -> Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        with jax.numpy_dtype_promotion("standard"):
            return x.astype(jnp.promote_types(x.dtype, dtype))

    def init(params: Tree) -> MasterState:
        wide = jax.tree.map(widened, params)
        return MasterState(wide, inner.init(wide))

    def update(
        grads: Tree, state: MasterState, params: Tree | None = None, **extra_args: Any
    ) -> tuple[Tree, MasterState]:
        check_params_given("master_weights", params)
        updates, inner_state = inner.update(jax.tree.map(widened, grads), state.inner, state.params, **extra_args)
        wide = optax.apply_updates(state.params, updates)
        rounded = jax.tree.map(lambda m, p: widened(m.astype(p.dtype)) - widened(p), wide, params)
        return rounded, MasterState(wide, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
