"""Extreme eigenpairs of a Hermitian operator by LOBPCG, with two collectives for each iteration.

The vectors are the columns of tall matrices whose rows are cut. An iteration looks for the best combinations of the
current vectors X, their residuals W and the last steps P: one sum has all inner products of these, and of their images.
The small problem is solved on each rank, and all take the result of the first: ranks with other processors may find
eigenvectors of other signs, or other bases of one eigenspace.

Sources: Knyazev, "Toward the optimal preconditioned eigensolver", SIAM J. Sci. Comput. 23 (2001); Stathopoulos, Wu, "A
block orthogonalization procedure with constant synchronization requirements", SIAM J. Sci. Comput. 23 (2002), for the
inner products of vectors that are nearly dependent.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pycollective import errors
from pycollective.linalg.implicit import Info, Operator, floats, typed
from pycollective.linalg.vectors import Array, Axis, of_first, total, typed_like, zeros_like


def lobpcg(
    A: Operator,
    X: Array,
    *,
    axis_name: Axis = None,
    m: int = 100,
    tol: float | None = None,
    M: Operator | None = None,
    largest: bool = True,
) -> tuple[Array, Array, Info]:
    """Computes the k largest or smallest eigenpairs of a Hermitian operator, for vectors that are cut over ranks.

    Args:
        A: the operator, a function of this rank's rows of k vectors to this rank's rows of their images, of shape
            (n_r, k). It may call collectives. The operator of all ranks together is Hermitian.
        X: this rank's rows of the first vectors, of shape (n_r, k), of floats or complex numbers of at least 32 bits.
            All ranks' rows together have linearly independent columns, and are many more than k.
        axis_name: the ranks or devices over which rows are cut: a communicator, the world by default; or the name of an
            axis that a JAX transform binds, or a tuple of names.
        m: the largest number of iterations. Default 100.
        tol: the tolerance. The iteration ends when the norm of each residual ``A u - theta u`` is at most ``tol`` times
            the largest absolute value of an eigenvalue that it has seen in this iteration. Default: the machine
            precision to the power 2/3.
        M: the preconditioner, an approximation of the inverse of ``A``, or of ``A`` without the eigenvalue, for the
            smallest eigenpairs; a function as ``A``. Default: none.
        largest: whether to look for the largest eigenvalues. Default True.

    Returns:
        The eigenvalues, of shape (k,), from the extreme one on, the same on all ranks; this rank's rows of the
        eigenvectors, of shape (n_r, k), orthonormal; and an :class:`Info`.

    Raises:
        TypeError: ``A`` is no function, or an array has a wrong dtype or shape.
        ValueError: ``X`` has not two dimensions.
        NameError: the axis is not bound.
        NotImplementedError: for a derivative.

    Differentiation:
        None. Take the vectors of an operator without derivatives, ``u = lobpcg(...)``, with
        :func:`jax.lax.stop_gradient` around what ``A`` closes over. The derivative of a simple eigenvalue is that of
        ``vdot(u, A(u))`` then.

    Order:
        Program order: the collectives of ``A`` and ``M``, one sum of 18 k^2 + k numbers and one of 3 k^2 + k + 1, in
        each iteration; before the first, those of two applications of ``A`` and one of ``M``, and three sums.

    Source:
        :func:`jax.experimental.sparse.linalg.lobpcg_standard`, whose inner products are those of one part.

    Example:
        >>> import jax, jax.numpy as jnp, pycollective as pc
        >>> diagonal = jnp.arange(20.0) + 20 * pc.world().rank
        >>> X = jax.random.normal(jax.random.key(pc.world().rank), (20, 2))
        >>> theta, u, info = pc.linalg.lobpcg(lambda x: diagonal[:, None] * x, X)
        >>> bool(jnp.allclose(theta, 20.0 * pc.world().size - jnp.array([1.0, 2.0]))), bool(info.converged)
        (True, True)
    """
    where = "linalg.lobpcg"
    X = floats(where, "X", X)
    if jnp.ndim(X) != 2:
        remedy = "Pass this rank's rows of the vectors, which are the columns."
        errors.fail(ValueError, where, None, "X: a matrix", f"shape {jnp.shape(X)}", remedy)
    if jnp.finfo(X.dtype).bits < 32:
        errors.fail(TypeError, where, None, "X in at least 32 bits", X.dtype, "Cast it to float32.")
    A, M, (X, _) = typed(where, axis_name, A, M, X)
    tolerance = float(jnp.finfo(X.dtype).eps) ** (2 / 3) if tol is None else tol
    return _without_derivative(_iterate(axis_name, m, tolerance, A, M, X, largest))


def _iterate(
    axis_name: Axis, m: int, tol: float, A: Operator, M: Operator, X: Array, largest: bool
) -> tuple[Array, Array, Info]:
    """Iterates. ``inner`` has the inner products of ``[X, W, P]``, with themselves and with their images."""
    k = X.shape[1]

    def products(S: Array, AS: Array, residuals: Array) -> tuple[Array, Array]:
        """Returns the inner products, and the largest squared norm of a residual."""
        transpose = S.conj().T
        parts = [_times(transpose, S), _times(transpose, AS), jnp.sum(jnp.abs(residuals) ** 2, 0)]
        sums = total(axis_name, parts)
        return sums[:-k].reshape(2, S.shape[1], S.shape[1]), jnp.max(sums[-k:].real)

    def best(inner: Array) -> tuple[Array, Array, Array]:
        """Returns the k extreme Ritz values, their vectors, and the largest absolute value of all."""
        size = inner.shape[1]
        theta, vectors, scale = _ritz(inner, k, largest)
        flat = of_first(axis_name, [vectors, theta.astype(vectors.dtype), scale[None].astype(vectors.dtype)])
        return flat[size * k : -1].real, flat[: size * k].reshape(size, k), flat[-1].real

    def next_space(X: Array, AX: Array, theta: Array, P: Array, AP: Array) -> tuple[Array, ...]:
        residuals = AX - X * theta.astype(X.dtype)[None]
        W = M(residuals)
        S, AS = jnp.concatenate([X, W, P], 1), jnp.concatenate([AX, A(W), AP], 1)
        return S, AS, *products(S, AS, residuals)

    def goes_on(state: tuple[Any, ...]) -> Array:
        *_, squares, scale, i = state
        return (squares > (tol * scale) ** 2) & (i < m)

    def iterate(state: tuple[Any, ...]) -> tuple[Any, ...]:
        S, AS, _, inner, _, _, i = state
        theta, vectors, scale = best(inner)
        P, AP = _times(S[:, k:], vectors[k:]), _times(AS[:, k:], vectors[k:])
        X, AX = P + _times(S[:, :k], vectors[:k]), AP + _times(AS[:, :k], vectors[:k])
        S, AS, inner, squares = next_space(X, AX, theta, P, AP)
        return S, AS, theta, inner, squares, scale, i + 1

    AX, zeros = A(X), zeros_like(X)
    theta, vectors, scale = best(products(X, AX, X)[0])
    S, AS, inner, squares = next_space(_times(X, vectors), _times(AX, vectors), theta, zeros, zeros)
    start = (S, AS, theta, inner, squares, scale, typed_like(jnp.int32(0), squares))
    S, _, theta, _, squares, scale, i = lax.while_loop(goes_on, iterate, start)
    return theta, S[:, :k], Info(squares <= (tol * scale) ** 2, i, jnp.sqrt(squares))


def _times(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision=lax.Precision.HIGHEST)


def _ritz(inner: Array, k: int, largest: bool) -> tuple[Array, Array, Array]:
    """Solves ``H c = theta G c`` for k extreme pairs, in the space of vectors that are numerically independent.

    ``T`` makes these orthonormal: ``T^H G T`` is the identity, but for columns of zeros in the place of others.
    """
    G, H = inner
    length = jnp.sqrt(jnp.diagonal(G).real)
    scaling = jnp.where(length == 0, 0, 1 / length)
    e, Q = jnp.linalg.eigh(G * (scaling[:, None] * scaling[None]).astype(G.dtype))
    independent = e > 10 * len(e) * jnp.finfo(e.dtype).eps * e[-1]
    shrink = jnp.where(independent, 1 / jnp.sqrt(jnp.where(independent, e, 1)), 0)
    T = Q * (scaling[:, None] * shrink[None]).astype(Q.dtype)
    K = _times(_times(T.conj().T, H), T)
    away = 2 * jnp.linalg.norm(K)  # no eigenvalue is as far from zero
    shift = jnp.diag(jnp.where(independent, 0, -away if largest else away))
    theta, vectors = jnp.linalg.eigh(K + shift.astype(K.dtype))
    scale = jnp.max(jnp.where(jnp.abs(theta) < 0.75 * away, jnp.abs(theta), 0))
    order = jnp.arange(len(e))[::-1] if largest else jnp.arange(len(e))
    theta = jnp.where(jnp.sum(independent) >= k, theta[order][:k], jnp.nan)
    return theta, _times(T, vectors[:, order][:, :k]), scale


@jax.custom_jvp
def _without_derivative(results: Any) -> Any:
    return results


@_without_derivative.defjvp
def _refuse_derivative(*_: Any) -> Any:
    remedy = "Put jax.lax.stop_gradient around what A closes over, and differentiate vdot(u, A(u))."
    errors.fail(NotImplementedError, "linalg.lobpcg", None, "no derivative of eigenpairs", "one", remedy)
