"""Uneven inputs: weighted means over JAX's axes against all examples at once, and the batches of one rank."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pycollective.parallel.join import join, mean_over_examples
from tests.cases import values

Array = Any
Tree = Any
P = jax.sharding.PartitionSpec

ROWS = 4
COUNTS = np.array([4, 1, 0, 3], np.int32)
PARAMS = {"w": np.asarray(values((5, 3), seed=1)), "b": np.asarray(values((3,), seed=2))}
XS = np.asarray(values((len(COUNTS), ROWS, 5), seed=3))


def loss(p: Tree, x: Array) -> Array:
    return jnp.sum(jnp.tanh(x @ p["w"] + p["b"][None]) ** 2, -1)


def padded_loss(p: Tree, x: Array, count: Array) -> Array:
    """The mean over the first ``count`` rows; NaN, and so are its gradients, if there is none."""
    return jnp.sum(jnp.where(jnp.arange(ROWS) < count, loss(p, x), 0.0)) / count.astype(jnp.float32)


def means(p: Tree, x: Array, count: Array, axis: Any = "i") -> tuple[Tree, Array]:
    return mean_over_examples(jax.value_and_grad(padded_loss)(p, x, count), count, axis)


def expected(counts: Array) -> tuple[Tree, int]:
    """All examples on one device, without padding."""
    rows = jnp.concatenate([x[:n] for x, n in zip(XS, counts, strict=True)])
    return jax.value_and_grad(lambda p: jnp.mean(loss(p, rows)))(PARAMS), int(sum(counts))


def assert_close(got: Tree, want: Tree) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, 1e-5, 1e-6)


@pytest.mark.parametrize("counts", [COUNTS, np.array([0, 0, 1, 0], np.int32), np.array([4, 4, 4, 4], np.int32)])
def test_the_mean_is_that_of_all_examples(counts: Array) -> None:
    got, total = jax.vmap(means, (None, 0, 0), axis_name="i")(PARAMS, XS, counts)
    want, number = expected(counts)
    for device in range(len(counts)):
        assert_close(jax.tree.map(lambda x: x[device], got), want)
    assert total.tolist() == [number] * len(counts)


@pytest.mark.parametrize("types", [True, False])
@pytest.mark.parametrize("axes", [{"i": 4}, {"i": 2, "j": 2}], ids=["one axis", "two axes"])
def test_the_mean_in_shard_map(axes: dict[str, int], types: bool) -> None:
    """JAX knows that it is the same on all devices."""
    names = tuple(axes)
    axis = names if len(names) > 1 else "i"

    def block(p: Tree, x: Array, count: Array) -> Tree:
        return means(lax.pcast(p, axis, to="varying") if types else p, x[0], count[0], axis)

    mesh = jax.make_mesh(tuple(axes.values()), names, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    mapped = jax.shard_map(block, mesh=mesh, in_specs=(P(), P(names), P(names)), out_specs=P(), check_vma=types)
    got, total = jax.jit(mapped)(PARAMS, XS, COUNTS)
    want, number = expected(COUNTS)
    assert_close(got, want)
    assert total == number


def test_without_examples_the_mean_is_zero() -> None:
    got, total = jax.vmap(means, (None, 0, 0), axis_name="i")(PARAMS, XS, jnp.zeros(4, jnp.int32))
    for x in jax.tree.leaves(got):
        np.testing.assert_array_equal(x, np.zeros_like(x))
    assert total.tolist() == [0] * 4


def test_a_number_that_is_the_same_everywhere() -> None:
    """It need not be an array; a fraction of an example, or whether there is a batch, is a number as well."""
    xs = jnp.array([1.0, 3.0])
    for count, total in ((2, 4), (0.5, 1.0), (True, 2)):
        mean, got = jax.vmap(lambda x: mean_over_examples(x, count, "i"), axis_name="i")(xs)
        assert mean.tolist() == [2.0, 2.0]
        assert got.tolist() == [total, total]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_narrow_values_do_not_leave_their_range(dtype: str) -> None:
    xs, counts = jnp.array([1000.0, 2000.0], dtype), jnp.array([3000, 1000])
    got, _ = jax.vmap(lambda x, n: mean_over_examples(x, n, "i"), axis_name="i")(xs, counts)
    assert got.dtype == dtype
    assert got.astype(jnp.float32).tolist() == [float(jnp.asarray(1250.0, dtype))] * 2


def test_one_sum_has_the_values_and_their_number() -> None:
    jaxpr = jax.make_jaxpr(means, axis_env=[("i", 2)])(PARAMS, XS[0], jnp.int32(1)).jaxpr
    operands = [v.aval for eqn in jaxpr.eqns if eqn.primitive.name.startswith("psum") for v in eqn.invars]
    assert sorted((x.size, str(x.dtype)) for x in operands) == [
        *((1, "float32"), (1, "int32"), (3, "float32"), (15, "float32"))
    ]


def test_bad_calls_of_the_mean() -> None:
    with pytest.raises(NameError, match="parallel.mean_over_examples: expected a call where the axis 'i' is bound"):
        mean_over_examples(jnp.ones(3), 1, "i")
    with pytest.raises(ValueError, match=r"expected count to be a scalar, got an array of shape \(4,\). Pass the sum"):
        jax.vmap(lambda x: mean_over_examples(x, jnp.ones(4), "i"), axis_name="i")(jnp.ones(2))
    with pytest.raises(ValueError, match=r"expected floating-point means, got int32 at \['correct'\]. Divide sums"):
        jax.vmap(lambda x: mean_over_examples({"correct": x}, 1, "i"), axis_name="i")(jnp.ones(2, jnp.int32))
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    def summed(p: Array, x: Array) -> Array:
        return mean_over_examples(jax.grad(lambda p: jnp.sum(p * x[0]))(p), 1, "i")[0]

    with pytest.raises(
        ValueError, match="own examples, got one that JAX has summed over 'i' already, at the only leaf"
    ):
        summed(jnp.ones(3), jnp.ones((2, 3)))


class Loader:
    """Says that it has ``length`` batches, and has ``batches``."""

    def __init__(self, batches: list[Any], length: int) -> None:
        self.batches, self.length = batches, length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return self.length


def test_one_rank_has_its_own_batches() -> None:
    assert list(join(["a", "b"])) == [("a", True), ("b", True)]
    assert list(join([])) == []


def test_loaders_that_do_not_keep_their_word() -> None:
    with pytest.raises(
        ValueError, match=r"parallel.join: expected 3 batches, the length of the loader, got 2 \(rank 0"
    ):
        list(join(Loader(["a", "b"], 3)))
    with pytest.raises(ValueError, match=r"expected 1 batches, the length of the loader, got more \(rank 0 of 1\)"):
        list(join(Loader(["a", "b"], 1)))
    with pytest.raises(ValueError, match=r"expected 0 batches, the length of the loader, got more \(rank 0 of 1\)"):
        list(join(Loader(["a"], 0)))
    with pytest.raises(TypeError, match="expected loaders with a length on all ranks, got none on rank 0: object of"):
        list(join(iter(["a"])))
