"""QR of a tall matrix whose rows are cut: each part factors its rows, and all factor the triangles of all parts.

The stack of the triangles has ``ranks n`` rows of ``n``. One gather brings it to all ranks, which factor it alike.

Sources: Demmel, Grigori, Hoemmen, Langou, "Communication-optimal parallel and sequential QR and LU factorizations",
SIAM J. Sci. Comput. 34 (2012), with one level; Walter, Lehmann, Lamour, "On evaluating higher-order derivatives of the
QR decomposition of tall matrices", Optim. Methods Softw. 27 (2012).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pycollective import errors
from pycollective.collectives.jax_collectives import axis_index
from pycollective.collectives.replicated import gather
from pycollective.linalg.vectors import Array, Axis, total, vary


def tsqr(a: Array, axis_name: Axis = None) -> tuple[Array, Array]:
    """Computes the QR decomposition of a tall matrix whose rows are cut over ranks or devices: ``a_r = q_r r``.

    Args:
        a: this rank's rows, of shape (m_r, n), of floats or complex numbers of at least 32 bits. Ranks may have
            different numbers of rows, also fewer than ``n`` or none. All ranks together have at least ``n`` rows.
        axis_name: the ranks or devices over which the rows are cut: a communicator, the world by default; or the name
            of an axis that a JAX transform binds, or a tuple of names.

    Returns:
        ``q``, this rank's rows of the matrix with orthonormal columns, of shape (m_r, n); and ``r``, upper triangular,
        of shape (n, n), the same on all ranks. The diagonal of ``r`` is real and not negative; so both are unique if
        the columns of the matrix are linearly independent. If all ranks together have fewer than ``n`` rows, both are
        NaN.

    Raises:
        TypeError: the dtype has no QR decomposition in JAX.
        ValueError: ``a`` has not two dimensions.
        NameError: the axis is not bound.

    Differentiation:
        Both modes, where the columns are linearly independent, also if those of one rank are not. As for
        :func:`pycollective.psum`, each rank's use of ``r`` counts.

    Order:
        Program order: one gather of n (n + 1) numbers from each rank. A derivative has one sum of n^2 numbers.

    Source:
        :func:`jax.numpy.linalg.qr` with ``mode="reduced"``, where the diagonal of ``r`` has any sign.

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> q, r = pc.linalg.tsqr(jnp.array([[1.0, 1.0], [0.0, 1.0]]) / pc.world().size ** 0.5)
        >>> r.round(4) + 0  # 0 in place of -0
        Array([[1., 1.],
               [0., 1.]], dtype=float32)
    """
    a = jnp.asarray(a)
    if a.ndim != 2:
        remedy = "Pass this rank's rows of the matrix."
        errors.fail(ValueError, "linalg.tsqr", None, "a matrix", f"shape {a.shape}", remedy)
    if not jnp.issubdtype(a.dtype, jnp.inexact) or jnp.finfo(a.dtype).bits < 32:
        remedy = "Cast the matrix to float32 or more."
        errors.fail(TypeError, "linalg.tsqr", None, "floats or complex numbers of at least 32 bits", a.dtype, remedy)
    return _tsqr(axis_name, vary(axis_name, a, "linalg.tsqr"))


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _tsqr(axis_name: Axis, a: Array) -> tuple[Array, Array]:
    rows, n = a.shape
    # A triangle of n rows from each part, whatever its number of rows; and that number as one more row.
    inner_q, inner_r = jnp.linalg.qr(jnp.pad(a, ((0, max(0, n - rows)), (0, 0))))
    gathered = gather(jnp.concatenate([inner_r, jnp.full((1, n), rows, a.dtype)]), axis_name)
    q, r = jnp.linalg.qr(gathered[:, :n].reshape(-1, n))
    diagonal = jnp.diagonal(r)
    signs = jnp.where(diagonal == 0, 1, jnp.sign(diagonal))
    enough = jnp.sum(gathered[:, n, :1].real) >= n
    q, r = (jnp.where(enough, x, jnp.nan) for x in (q * signs[None], r * signs.conj()[:, None]))
    own = lax.dynamic_slice_in_dim(q, n * axis_index(axis_name), n)
    return (inner_q @ own)[:rows], r


@_tsqr.defjvp
def _tsqr_jvp(axis_name: Axis, primals: Any, tangents: Any) -> Any:
    """Differentiates ``a = q r``, with ``q^H q = 1`` and a triangle whose diagonal is real.

    With ``x = da r^-1`` and ``y = q^H x``, the matrix ``dr r^-1 = y - w`` is upper triangular with a real diagonal if
    ``w = q^H dq`` is the skew-Hermitian matrix that has the lower triangle of ``y``, and the imaginary part of its
    diagonal. Then ``dq = x - q dr r^-1``.
    """
    ((a,), (da,)) = primals, tangents
    q, r = _tsqr(axis_name, a)
    x = lax.linalg.triangular_solve(r, da)
    y = total(axis_name, [q.conj().T @ x]).reshape(r.shape)
    lower = jnp.tril(y, -1)
    diagonal = jnp.diagonal(y)
    w = lower - lower.conj().T + jnp.diag(diagonal - diagonal.real.astype(y.dtype))
    return (q, r), (x - q @ (y - w), (y - w) @ r)
