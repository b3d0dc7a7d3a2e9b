"""Linear systems whose vectors are cut, with dense matrices as the oracle.

The operator couples parts in two ways, by a sum over all and by a message to the next part:

    A x = d x + U sum_r V_r^H x_r + w (c_s^H x_s)        s: the part before this one

Parts may have different numbers of entries, or none. A Hermitian operator has ``V = U``, and the transpose of the last
term as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import pycollective as pc
from pycollective.linalg import bicgstab, cg, gmres
from tests.cases import values

Array = Any
Tree = Any

SOLVERS: dict[str, Callable[..., Any]] = {"cg": cg, "bicgstab": bicgstab, "gmres": gmres}
DTYPES = (np.float32, np.float64, np.complex64, np.complex128)


class Terms(NamedTuple):
    """The numbers of an operator: of the whole, or of a part, which has a part of the rows of each array."""

    d: Array
    U: Array
    V: Array
    w: Array
    c: Array


def terms(name: str, count: int, dtype: Any) -> Terms:
    """Returns the terms of an operator for a solver, of ``count`` rows."""
    U, V = (values((count, 2), dtype, seed) / 10 for seed in (1, 2))
    w, c = (values((count,), dtype, seed) / 10 for seed in (3, 4))
    d = (6 + values((count,), np.float32, 5) / 2).astype(dtype)
    return Terms(d, U, U if name == "cg" else V, w, c)


def part(tree: Tree, lengths: Sequence[int], r: int) -> Tree:
    """Returns part r of the rows of each array."""
    start = sum(lengths[:r])
    return jax.tree.map(lambda x: x[start : start + lengths[r]], tree)


def operator(name: str, axis: Any, size: int, terms: Terms) -> Callable[[Array], Array]:
    """Returns the operator on one part."""
    d, U, V, w, c = terms
    forward = [(r, (r + 1) % size) for r in range(size)]
    backward = [(d, s) for s, d in forward]

    def apply(x: Array) -> Array:
        y = d * x + U @ pc.psum(V.conj().T @ x, axis) + w * pc.ppermute(jnp.sum(c.conj() * x), axis, forward)
        return y + c * pc.ppermute(jnp.sum(w.conj() * x), axis, backward) if name == "cg" else y

    return apply


def dense(name: str, lengths: Sequence[int], terms: Terms) -> Array:
    """Returns the matrix of the operator."""
    d, U, V, w, c = terms
    owner = np.repeat(np.arange(len(lengths)), lengths)
    follows = owner[:, None] == (owner[None] + 1) % len(lengths)
    messages = jnp.where(follows, w[:, None] * c.conj()[None], 0)
    matrix = jnp.diag(d) + U @ V.conj().T + messages
    return matrix + messages.conj().T if name == "cg" else matrix


def loss(weights: Array, x: Array) -> Array:
    """Returns this part's term of a loss, a real number."""
    return jnp.sum((weights.conj() * jnp.sin(x)).real)


def every(solve: Callable[[Terms, Array], Array], weights: Array, terms: Terms, b: Array) -> dict[str, Any]:
    """Returns a solution and its derivatives, alone and for a batch of right sides."""

    def of(terms: Terms, b: Array) -> Array:
        return loss(weights, solve(terms, b))

    tangent = jax.tree.map(lambda x: (0.5 * x).astype(x.dtype), (terms, b))
    batch = jnp.stack([b, 0 * b, 3 * b])
    return {
        "x": solve(terms, b),
        "tangent": jax.jvp(solve, (terms, b), tangent)[1],
        "grad": jax.grad(of, (0, 1))(terms, b),
        "batch": jnp.moveaxis(jax.vmap(lambda b: solve(terms, b))(batch), 0, -1),
        "grad of the batch": jnp.moveaxis(jax.vmap(jax.grad(lambda b: of(terms, b)))(batch), 0, -1),
    }


def tolerance(dtype: Any) -> float:
    return 1e-4 if jnp.finfo(dtype).bits == 32 else 1e-8
