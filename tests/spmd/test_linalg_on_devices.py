"""Solvers over named axes of ranks x local devices, with and without JAX's types, against dense solutions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pycollective as pc
from pycollective.linalg import cg, gmres, lobpcg, tsqr
from pycollective.ranks.setup import devices_of_this_rank
from tests.cases import values
from tests.cut_systems import SOLVERS, Terms, dense, every, operator, part, terms
from tests.spmd.conftest import needs_local

Array = Any
Tree = Any
P = jax.P


def compare(got: Tree, want: Tree) -> None:
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, 1e-4, 1e-4, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize(("name", "dtype", "way"), [("bicgstab", np.float32, "pmap"), ("gmres", np.complex64, "types")])
def test_solutions_and_derivatives(name: str, dtype: Any, way: str, world: pc.Communicator, few: int) -> None:
    devices, length = world.size * few, 2
    whole = tuple(values((devices * length,), dtype, seed) for seed in (6, 7))
    matrix = terms(name, devices * length, dtype)

    def solve(terms: Terms, b: Array) -> Array:
        apply = operator(name, "i", devices, terms)
        return SOLVERS[name](apply, b, jnp.ones_like(b), axis_name="i", tol=1e-5, M=lambda x: x / terms.d)[0]

    def program(weights: Array, terms: Terms, b: Array) -> Any:
        return every(solve, weights, terms, b)

    want = every(lambda t, b: jnp.linalg.solve(dense(name, [length] * devices, t), b), whole[0], matrix, whole[1])
    mine, want = part(((whole[0], matrix, whole[1]), want), [few * length] * world.size, world.rank)
    if way == "types":
        mesh = pc.make_mesh((devices,), ("i",), devices=devices_of_this_rank()[:few])
        compare(pc.shard_map(program, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(*mine), want)
    else:
        blocks = jax.tree.map(lambda x: x.reshape(few, length, *x.shape[1:]), mine)
        got = pc.pmap(program, "i")(*blocks)
        compare(jax.tree.map(lambda x: x.reshape(few * length, *x.shape[2:]), got), want)


@needs_local(2)
@pytest.mark.parametrize("types", [False, True])
def test_systems_beside_each_other_end_by_themselves(types: bool, world: pc.Communicator, few: int) -> None:
    """Each vector is cut over one axis of a mesh; along the other there are systems with more iterations or fewer."""
    mesh = pc.make_mesh((world.size, few), ("y", "x"), devices=devices_of_this_rank()[:few])
    d = np.arange(1.0, 4 * world.size + 1, dtype=np.float32)
    b = (np.arange(4 * world.size)[:, None] < 2 * np.arange(few)[None] + 1).astype(np.float32)

    def solve(d: Array, b: Array) -> tuple[Array, Array]:
        """A NaN would come up if a system went on after its end. The matrix has a type of its own."""
        results = [f(lambda x: d[:, None] * x, b, axis_name="y", tol=1e-6) for f in (cg, gmres)]
        return jnp.stack([x for x, _ in results]), jnp.stack([info.iterations for _, info in results])[:, None]

    rows = slice(4 * world.rank, 4 * (world.rank + 1))
    run = pc.shard_map(
        solve, mesh=mesh, in_specs=(P("y"), P("y", "x")), out_specs=(P(None, "y", "x"), P(None, "x")), check_vma=types
    )
    x, iterations = run(d[rows], b[rows])
    np.testing.assert_allclose(x, np.stack([b[rows] / d[rows, None]] * 2), 1e-5, 1e-5)
    assert iterations[0].tolist() == [2 * r + 1 for r in range(few)]
    assert iterations[1].tolist() == [2 * r + 2 for r in range(few)]


@pytest.mark.parametrize("types", [False, True])
def test_qr_and_eigenpairs(types: bool, world: pc.Communicator, few: int) -> None:
    """Rows are cut over both axes of a mesh, and the small results have the type of what all devices share."""
    mesh = pc.make_mesh((world.size, few), ("y", "x"), devices=devices_of_this_rank()[:few])
    axes, rows = ("y", "x"), 8 * world.size * few
    a, weights = np.asarray(values((rows, 3), seed=1)), np.asarray(values((rows, 3), seed=2))
    d = np.linspace(1, 10, rows, dtype=np.float32) ** 2

    def program(a: Array, weights: Array, d: Array) -> Tree:
        q, r = tsqr(a, axes)

        def loss(a: Array) -> Array:
            q, r = tsqr(a, axes)
            return jnp.sum(weights * q) + jnp.sum(jnp.sin(r)) / lax.axis_size(axes)

        theta, u, info = lobpcg(lambda x: d[:, None] * x, a, axis_name=axes)
        return (q, jax.grad(loss)(a), u), (r, theta, info.converged)

    def oracle(a: Array) -> tuple[Array, Array]:
        q, r = jnp.linalg.qr(a)
        sign = jnp.sign(jnp.diagonal(r))
        return q * sign[None], r * sign[:, None]

    def loss_of_the_whole(a: Array) -> Array:
        q, r = oracle(a)
        return jnp.sum(weights * q) + jnp.sum(jnp.sin(r))

    mine = slice(8 * few * world.rank, 8 * few * (world.rank + 1))
    run = pc.shard_map(program, mesh=mesh, in_specs=P(axes), out_specs=((P(axes),) * 3, P()), check_vma=types)
    (q, grad, u), (r, theta, converged) = run(a[mine], weights[mine], d[mine])
    want_q, want_r = oracle(a)
    compare((q, grad, r), (want_q[mine], jax.grad(loss_of_the_whole)(a)[mine], want_r))
    assert converged
    np.testing.assert_allclose(theta, d[::-1][:3], 1e-4)
    np.testing.assert_allclose(np.abs(u), np.eye(rows)[::-1][:, :3][::1][mine], 1e-2, 1e-2)
