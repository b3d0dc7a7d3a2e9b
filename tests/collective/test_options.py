"""The options of jax.lax on several ranks, against jax.pmap on the same number of local devices."""

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
from tests.collective.programs import once, oracle_devices

Groups = list[list[int]] | None


def check_against_pmap(world: pc.Communicator, shape: tuple[int, ...], call: Callable[[Any, Any, Any], Any]) -> None:
    """Compares ``call(library, x, axis)`` of this package with that of JAX, forward and reverse."""
    xs = values((world.size, *shape))

    def of(library: Any, axis: Any) -> Callable[[Any], Any]:
        def f(x: Any) -> Any:
            y, back = jax.vjp(lambda x: call(library, x, axis), x)
            return y, back(jnp.cos(y))[0]

        return f

    oracle = jax.pmap(of(lax, "ranks"), axis_name="ranks", devices=oracle_devices(world.size))
    want = once(world.size, lambda: oracle(xs))
    got = pc.jit(of(pc, world))(xs[world.rank])
    for y, ys in zip(got, want, strict=True):
        np.testing.assert_allclose(y, ys[world.rank], rtol=1e-5, atol=1e-5)


def equal_groups(size: int) -> Groups:
    """Two groups, the second in opposite order; one group if the number of ranks is odd."""
    if size % 2:
        return [list(range(size))[::-1]]
    return [list(range(size // 2)), list(range(size // 2, size))[::-1]]


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_all_gather_axis(axis: int, world: pc.Communicator) -> None:
    check_against_pmap(world, (2, 3), lambda library, x, name: library.all_gather(x, name, axis=axis))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_all_gather_tiled(axis: int, world: pc.Communicator) -> None:
    check_against_pmap(world, (2, 3), lambda library, x, name: library.all_gather(x, name, axis=axis, tiled=True))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_psum_scatter_tiled(axis: int, world: pc.Communicator) -> None:
    shape = (2 * world.size, 3 * world.size, world.size)
    check_against_pmap(
        world, shape, lambda library, x, name: library.psum_scatter(x, name, scatter_dimension=axis, tiled=True)
    )


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_psum_scatter(axis: int, world: pc.Communicator) -> None:
    shape = (world.size, world.size, world.size)
    check_against_pmap(world, shape, lambda library, x, name: library.psum_scatter(x, name, scatter_dimension=axis))


@pytest.mark.parametrize("split", [0, 1, 2])
@pytest.mark.parametrize("concat", [0, 1, 2])
def test_all_to_all_tiled(split: int, concat: int, world: pc.Communicator) -> None:
    shape = (2 * world.size, world.size, 3 * world.size)
    check_against_pmap(world, shape, lambda library, x, name: library.all_to_all(x, name, split, concat, tiled=True))


@pytest.mark.parametrize("split", [0, 1, 2])
@pytest.mark.parametrize("concat", [0, 1, 2])
def test_all_to_all(split: int, concat: int, world: pc.Communicator) -> None:
    # JAX 0.10 cannot differentiate all of these, so the definition is the oracle: y_r stacks x_s[r] over s at concat.
    xs = values((world.size, *(world.size,) * 3))
    got = pc.all_to_all(jnp.asarray(xs[world.rank]), world, split, concat)
    want = np.stack([np.take(x, world.rank, axis=split) for x in xs], axis=concat)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("name", ["psum", "pmean"])
def test_groups_of_reductions(name: str, world: pc.Communicator) -> None:
    groups = equal_groups(world.size)
    check_against_pmap(world, (3,), lambda library, x, axis: getattr(library, name)(x, axis, axis_index_groups=groups))


@pytest.mark.parametrize("name", ["pmax", "pmin"])
def test_groups_of_extremes(name: str, world: pc.Communicator) -> None:
    groups = equal_groups(world.size)
    assert groups is not None
    xs = values((world.size, 3))
    (group,) = (group for group in groups if world.rank in group)
    want = {"pmax": np.max, "pmin": np.min}[name](xs[group], axis=0)
    np.testing.assert_array_equal(getattr(pc, name)(jnp.asarray(xs[world.rank]), world, axis_index_groups=groups), want)


def test_groups_of_blocks(world: pc.Communicator) -> None:
    groups = equal_groups(world.size)
    assert groups is not None
    length = len(groups[0])
    for shape, call in (
        ((2, 3), lambda library, x, axis: library.all_gather(x, axis, axis_index_groups=groups)),
        ((2, 3), lambda library, x, axis: library.all_gather(x, axis, axis=1, tiled=True, axis_index_groups=groups)),
        ((length, 3), lambda library, x, axis: library.psum_scatter(x, axis, axis_index_groups=groups)),
        (
            (2 * length, length),
            lambda library, x, axis: library.all_to_all(x, axis, 0, 1, tiled=True, axis_index_groups=groups),
        ),
        ((length, 3), lambda library, x, axis: library.pswapaxes(x, axis, 0, axis_index_groups=groups)),
    ):
        check_against_pmap(world, shape, call)


def test_unequal_groups_sum(world: pc.Communicator) -> None:
    groups = [[0], list(range(1, world.size))] if world.size > 1 else [[0]]
    y = pc.psum(world.rank, world, axis_index_groups=groups)
    assert y == (0 if world.rank == 0 else sum(range(1, world.size)))
    mean = pc.pmean(float(world.rank), world, axis_index_groups=groups)
    assert mean == (0 if world.rank == 0 else np.mean(range(1, world.size)))


@pytest.mark.parametrize("root", range(4))
def test_every_root(root: int, world: pc.Communicator) -> None:
    root %= world.size
    r, xs = world.rank, values((world.size, world.size, 2))
    x = jnp.asarray(xs[r])
    zeros = np.zeros_like(xs)
    np.testing.assert_array_equal(pc.broadcast(x, world, root=root), xs[root])
    np.testing.assert_array_equal(pc.scatter(x, world, root=root), xs[root][r])
    np.testing.assert_array_equal(pc.gather(x, world, root=root), xs if r == root else zeros)
    want = xs.sum(axis=0) if r == root else zeros[0]
    np.testing.assert_allclose(pc.reduce(x, world, root=root), want, rtol=1e-5, atol=1e-6)


REDUCTIONS: dict[str, Any] = {
    "sum": np.sum,
    "prod": np.prod,
    "min": np.min,
    "max": np.max,
    "and": np.bitwise_and.reduce,
    "or": np.bitwise_or.reduce,
    "xor": np.bitwise_xor.reduce,
}


@pytest.mark.parametrize("op", REDUCTIONS)
def test_every_op(op: str, comm: pc.Communicator) -> None:
    xs = values((comm.size, 5), np.int32)
    function = REDUCTIONS[op]
    x, r = jnp.asarray(xs[comm.rank]), comm.rank
    np.testing.assert_array_equal(pc.allreduce(x, comm, op=op), function(xs, axis=0))
    np.testing.assert_array_equal(pc.scan(x, comm, op=op), function(xs[: r + 1], axis=0))
    np.testing.assert_array_equal(pc.exscan(x, comm, op=op), function(xs[:r], axis=0) if r else np.zeros(5))
    np.testing.assert_array_equal(pc.reduce(x, comm, op=op), function(xs, axis=0) if r == 0 else np.zeros(5))


@pytest.mark.parametrize("op", ["and", "or", "xor"])
def test_bitwise_operations_of_every_dtype(op: str, world: pc.Communicator) -> None:
    dtypes = ["bool", "int4", "uint4", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))]
    with jax.enable_x64(True):
        xs = {}
        for dtype in dtypes:
            bits = np.random.default_rng(3).integers(
                0, 256, (world.size, 40, np.dtype(jnp.dtype(dtype)).itemsize), "u1"
            )
            whole = bits.view({1: "i1", 2: "i2", 4: "i4", 8: "i8"}[bits.shape[-1]])[..., 0]
            xs[dtype] = (whole % 2 if dtype == "bool" else whole).astype(jnp.dtype(dtype))
        got = jax.jit(lambda x: pc.allreduce(x, world, op=op))(
            {name: jnp.asarray(x[world.rank]) for name, x in xs.items()}
        )
        for dtype, x in xs.items():
            small = dtype.endswith("int4")
            want = REDUCTIONS[op](x.astype(np.int8) if small else x, axis=0).astype(x.dtype)
            assert got[dtype].dtype == jnp.dtype(dtype)
            np.testing.assert_array_equal(np.asarray(got[dtype]), want)
    for call in (pc.allreduce, pc.reduce, pc.scan, pc.exscan):
        with pytest.raises(TypeError, match=f"expected a dtype that {op} is defined for, got float32"):
            call(jnp.ones(3), world, op=op)


def test_large_bitwise_sums(world: pc.Communicator) -> None:
    """Beyond what is read from a board: by all algorithms of a host, and on hosts by levels."""
    xs = np.random.default_rng(0).integers(-(2**31), 2**31, (world.size, 600_000), np.int32)
    for op in ("and", "or", "xor"):
        got = pc.allreduce(jnp.asarray(xs[world.rank]), world, op=op)
        np.testing.assert_array_equal(got, REDUCTIONS[op](xs, axis=0))


def test_a_function_of_the_user(comm: pc.Communicator) -> None:
    """Not commutative, on a tree, with derivatives and under vmap."""
    xs, ys = values((comm.size, 3, 2, 2)), values((comm.size, 3, 4), seed=1)

    def op(left: Any, right: Any) -> Any:
        return left[0] @ right[0], left[1] * right[1]

    def of_all(xs: Any, ys: Any) -> Any:
        result = (xs[0], ys[0])
        for x, y in zip(xs[1:], ys[1:], strict=True):
            result = op(result, (x, y))
        return result

    def loss(x: Any, y: Any) -> Any:
        return sum(jnp.sum(jnp.sin(each)) for each in pc.allreduce((x, y), comm, op=op))

    own = jnp.asarray(xs[comm.rank]), jnp.asarray(ys[comm.rank])
    want = of_all(jnp.asarray(xs), jnp.asarray(ys))
    for got in (pc.allreduce(own, comm, op=op), jax.vmap(lambda *own: pc.allreduce(own, comm, op=op))(*own)):
        for mine, whole in zip(got, want, strict=True):
            np.testing.assert_allclose(mine, whole, rtol=1e-5, atol=1e-5)
    gradients = jax.jit(jax.grad(loss, (0, 1)))(*own)
    losses = lambda xs, ys: comm.size * sum(jnp.sum(jnp.sin(each)) for each in of_all(xs, ys))
    for mine, whole in zip(gradients, jax.grad(losses, (0, 1))(jnp.asarray(xs), jnp.asarray(ys)), strict=True):
        np.testing.assert_allclose(mine, whole[comm.rank], rtol=1e-3, atol=1e-3)
    with pytest.raises(TypeError, match="op to return what it gets"):
        pc.allreduce(own[0], comm, op=lambda left, right: (left + right).sum(axis=0))


def test_places_of_extrema(comm: pc.Communicator) -> None:
    xs = values((comm.size, 60)).round(0)  # with equal numbers
    xs[comm.size - 1, :4] = np.nan
    for call, of_numpy in ((pc.maxloc, np.argmax), (pc.minloc, np.argmin)):
        value, rank = jax.jit(lambda x, call=call: call({"x": x}, comm))(jnp.asarray(xs[comm.rank]))
        np.testing.assert_array_equal(rank["x"], of_numpy(xs, axis=0))
        np.testing.assert_array_equal(value["x"], np.take_along_axis(xs, of_numpy(xs, axis=0)[None], 0)[0])


def test_partial_permutations(world: pc.Communicator) -> None:
    for perm in ([], [(0, world.size - 1)], [(r, r) for r in range(world.size)]):
        check_against_pmap(world, (3,), lambda library, x, name, perm=perm: library.ppermute(x, name, perm))
