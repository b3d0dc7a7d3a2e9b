"""Derivatives of solvers whose operator is a sum over ranks of vectors that all ranks have. The oracle is dense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pycollective as pc
from tests.cases import values

Array = Any
Operator = Callable[[Array], Array]
WIDTH = 3


def bicgstab(operator: Operator, b: Array) -> Array:
    return jax.scipy.sparse.linalg.bicgstab(operator, b, tol=1e-7)[0]


def gmres(operator: Operator, b: Array) -> Array:
    return jax.scipy.sparse.linalg.gmres(operator, b, tol=1e-7, restart=WIDTH)[0]


def newton(operator: Operator, b: Array) -> Array:
    """The root y of A y + tanh(A y) / 4 = b, by Newton's method with a dense matrix of its derivative."""

    def function(y: Array) -> Array:
        z = operator(y)
        return z + jnp.tanh(z) / 4 - b

    def solve(f: Operator, y: Array) -> Array:
        return lax.fori_loop(0, 8, lambda _, y: y - jnp.linalg.solve(jax.jacfwd(f)(y), f(y)), y)

    return lax.custom_root(function, b, solve, lambda g, y: jnp.linalg.solve(jax.jacfwd(g)(y), y))


def terms(size: int) -> tuple[Array, Array]:
    """One term of a matrix for each rank, and a right-hand side."""
    return (4 * jnp.eye(WIDTH)[None] + values((size, WIDTH, WIDTH)) / 3) / size, jnp.asarray(values((WIDTH,), seed=1))


def loss(y: Array) -> Array:
    return jnp.vdot(jnp.arange(1.0, WIDTH + 1), jnp.sin(y))


@pytest.mark.parametrize(
    ("way", "solver"),
    [("communicator", bicgstab), ("communicator", gmres), ("communicator", newton), ("name", newton)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_derivatives_of_solvers(way: str, solver: Callable[[Operator, Array], Array], world: pc.Communicator) -> None:
    hs, b = terms(world.size)
    axis: Any = world if way == "communicator" else "i"

    def ours(h: Array, b: Array) -> Array:
        return loss(solver(lambda v: pc.reduce_from(h @ pc.copy_to(v, axis), axis), b))

    def dense(hs: Array, b: Array) -> Array:
        return loss(solver(lambda v: hs.sum(axis=0) @ v, b))

    def every(f: Callable[..., Array], h: Array, b: Array) -> dict[str, Any]:
        grads = jax.grad(f, (0, 1))
        if solver is gmres:  # slow to compile
            return {"grad": grads(h, b)}
        batch = jnp.stack([b, b[::-1]])
        return {
            "grad": grads(h, b),
            "jvp": jax.jvp(lambda b: f(h, b), (b,), (jnp.ones_like(b),)),
            "batch": jax.vmap(grads, (None, 0))(h, batch),
        }

    options = {} if way == "communicator" else {"axis_name": "i"}
    got = pc.jit(lambda h, b: every(ours, h, b), **options)(hs[world.rank], b)
    want = jax.jit(lambda hs, b: every(dense, hs, b))(hs, b)
    r = world.rank
    parts = {"grad": lambda g: (g[0][r], g[1]), "jvp": lambda pair: pair, "batch": lambda g: (g[0][:, r], g[1])}
    of_rank = {key: parts[key](value) for key, value in want.items()}
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(of_rank), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-4)


def test_trees_and_numbers_without_derivatives(world: pc.Communicator) -> None:
    tree = {"float": jnp.ones(2), "half": jnp.ones(2, jnp.bfloat16), "int": jnp.arange(3), "bool": jnp.ones(2, bool)}
    same, total = pc.copy_to(tree), pc.reduce_from(tree, world)
    want = jax.tree.map(lambda x: world.size * x, {**tree, "bool": jnp.ones(2, jnp.int32)})
    for got, wanted in ((same, tree), (total, want)):
        assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, wanted)
        jax.tree.map(np.testing.assert_array_equal, got, wanted)


def test_wrong_arguments(world: pc.Communicator) -> None:
    for function in (pc.copy_to, pc.reduce_from):
        name = function.__name__
        with pytest.raises(NameError, match=f"{name}: expected an axis name that a transform around this call binds"):
            function(jnp.ones(2), "unbound")
        with pytest.raises(TypeError, match=f"{name}: expected a Communicator, got 3"):
            function(jnp.ones(2), 3)  # type: ignore[arg-type]
    del world
