"""Parameters that each device makes its elements of, against the whole parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pycollective.parallel.fsdp import shard
from pycollective.parallel.initialization import initialized_parts, initialized_slices

Array = Any
Tree = Any
P = jax.sharding.PartitionSpec
initializers = jax.nn.initializers


def init(key: Array) -> Tree:
    """Returns parameters by all operations that are read backward, and by others."""
    keys = iter(jax.random.split(key, 12))
    stacked = [initializers.he_uniform()(key, (3, 2)) for key in jax.random.split(next(keys), 4)]
    bounds = jnp.arange(7, dtype=jnp.float32)
    return {
        "normal": initializers.lecun_normal()(next(keys), (9, 4)),
        "of 16 bits": jax.vmap(lambda k: jax.random.normal(k, (3, 4), jnp.bfloat16))(jax.random.split(next(keys), 5)),
        "orthogonal": initializers.orthogonal()(next(keys), (4, 4)),
        "other generator": jax.random.normal(jax.random.key(3, impl="rbg"), (4, 3)),
        "stacked": jnp.stack(stacked),
        "along": jnp.concatenate([jnp.zeros((2, 0)), jnp.ones((2, 1)), jax.random.normal(next(keys), (2, 5))], axis=1),
        "turned": jax.random.normal(next(keys), (4, 6)).T[1:5, ::2] * jnp.arange(2, dtype=jnp.float32)[None],
        "uniform": jax.random.uniform(next(keys), (7,), minval=-1, maxval=bounds),
        "row": jax.random.normal(next(keys), (1, 6)) * jnp.ones((4, 1)),
        "scalar": jnp.float32(3),
        "eye": jnp.eye(4),
        "given": jnp.asarray(np.arange(6.0, dtype=np.float32)),
        "integers": jax.random.randint(next(keys), (5,), 0, 10),
        "bools": jax.random.bernoulli(next(keys), 0.3, (6,)),
        "empty": jnp.zeros((0, 3)),
    }


LAYERS = ("of 16 bits", "stacked")


def same(got: Tree, want: Tree) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        np.testing.assert_array_equal(a, b, err_msg=str(path))


def test_slices_are_those_of_the_whole_parameters() -> None:
    key = jax.random.key(3)
    whole = jax.jit(init)(key)
    stacked = {name: name in LAYERS for name in whole}

    def sharded(params: Tree) -> Tree:
        cut = partial(shard, axis_name="d")
        return {name: (jax.vmap(cut) if stacked[name] else cut)(x) for name, x in params.items()}

    mapped: dict[str, Any] = {"in_axes": None, "axis_name": "d", "axis_size": 3}
    same(
        jax.jit(jax.vmap(initialized_slices(init, "d", stacked=stacked), **mapped))(key),
        jax.vmap(sharded, **mapped)(whole),
    )


def test_parts_are_those_of_the_whole_parameters() -> None:
    names = ("normal", "of 16 bits", "orthogonal", "turned", "scalar", "row")
    some = lambda key: {name: init(key)[name] for name in names}
    specs = {
        "normal": P(None, ("a", "b")),
        "of 16 bits": P(None, None, "a"),
        "orthogonal": P("a", "b"),
        "turned": P("b"),
        "scalar": P(),
        "row": P(("b", "a")),
    }
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:4])
    key = jax.random.key(5)
    for check in (True, False):
        made = jax.shard_map(initialized_parts(some, specs), mesh=mesh, in_specs=P(), out_specs=specs, check_vma=check)
        same(jax.jit(made)(key), jax.jit(some)(key))


def test_no_device_has_a_whole_array() -> None:
    shape, layers = (256, 512), 4
    make = lambda key: [initializers.lecun_normal()(k, shape) for k in jax.random.split(key, layers)]
    mesh = jax.make_mesh((8,), ("d",))

    def mebibytes(function: Any) -> float:
        mapped = jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P("d"))
        memory = jax.jit(mapped).lower(jax.random.key(0)).compile().memory_analysis()
        return (memory.temp_size_in_bytes + memory.output_size_in_bytes) / 2**20

    # Slices are an eighth. Random bits, their counters and results live at once in both.
    assert mebibytes(lambda key: shard(make(key), "d")) > 4 * mebibytes(initialized_slices(make, "d"))


def test_what_no_result_needs_is_not_computed() -> None:
    def module(key: Array) -> Array:
        w = jax.random.normal(key, (4, 4))
        jax.debug.callback(lambda x: pytest.fail("computed"), w.sum())  # stands for a forward pass
        return w

    jax.block_until_ready(
        jax.vmap(initialized_slices(module, "d"), None, axis_name="d", axis_size=2)(jax.random.key(0))
    )
    jax.effects_barrier()


def test_what_cannot_be_cut() -> None:
    key = jax.random.key(0)

    def parts(spec: Any, size: int = 2) -> Any:
        function = initialized_parts(lambda key: jax.random.normal(key, (4, 3)), spec)
        return jax.eval_shape(jax.vmap(function, None, axis_name="d", axis_size=size), key)

    with pytest.raises(
        ValueError, match=r"sizes of axes that divide \(4, 3\), got .*'d'.* with 2 devices along \['d'\]"
    ):
        parts(P(None, "d"))
    with pytest.raises(ValueError, match="a spec of at most 2 dimensions"):
        parts(P(None, None, "d"))
    with pytest.raises(NameError, match="initialized_slices: expected a call where the axis 'd' is bound"):
        initialized_slices(lambda key: jnp.ones(3), "d")(key)
    large = lambda key: {"w": jnp.zeros((2**16, 2**15))}
    with pytest.raises(ValueError, match=r"arrays of less than 2 \*\* 31 elements, got 2147483648 at \['w'\]\. Split"):
        jax.eval_shape(jax.vmap(initialized_slices(large, "d"), None, axis_name="d", axis_size=2), key)
    with pytest.raises(TypeError, match="key"):
        jax.eval_shape(jax.vmap(initialized_slices(lambda key: key, "d"), None, axis_name="d", axis_size=2), key)
