"""Partitions by rules over paths, for trees of several libraries; the training programs with them run in tests/e2e."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from pycollective import parallel

RULES = [("up/(kernel|weight)", jax.P(None, "model")), ("down/", jax.P("model")), ("", jax.P())]
LIBRARIES = ["linen", "nnx", "equinox"]


def network(library: str) -> Any:
    """A network of two layers, ``up`` from 4 to 8 units and ``down`` from 8 to 4, as a tree of arrays."""
    if library == "linen":
        nn = pytest.importorskip("flax.linen", reason="LOUD: needs the extra flax")

        class Linen(nn.Module):
            @nn.compact
            def __call__(self, x: jax.Array) -> jax.Array:
                return nn.Dense(4, name="down")(nn.Dense(8, name="up")(x))

        return Linen().init(jax.random.key(0), jnp.ones((1, 4)))
    if library == "nnx":
        nnx = pytest.importorskip("flax.nnx", reason="LOUD: needs the extra flax")

        class Nnx(nnx.Module):
            def __init__(self) -> None:
                self.up, self.down = (nnx.Linear(*lengths, rngs=nnx.Rngs(0)) for lengths in ((4, 8), (8, 4)))

        return nnx.state(Nnx(), nnx.Param)
    equinox = pytest.importorskip("equinox", reason="LOUD: needs the extra libraries")

    class Equinox(equinox.Module):
        up: Any = equinox.nn.Linear(4, 8, key=jax.random.key(0))
        down: Any = equinox.nn.Linear(8, 4, key=jax.random.key(0))

    return equinox.filter(Equinox(), equinox.is_array)


@pytest.mark.parametrize("library", LIBRARIES)
def test_parameters_and_the_state_of_their_optimizer(library: str) -> None:
    params = network(library)
    for tree, layers in (params, 1), (optax.adamw(1e-3).init(params), 2):  # Adam has two moments
        found = jax.tree_util.tree_leaves_with_path(parallel.match_partition_rules(RULES, tree))
        cut = [("up" in jax.tree_util.keystr(path), partition) for path, partition in found if partition != jax.P()]
        wanted = [(True, jax.P(None, "model")), (False, jax.P("model")), (False, jax.P("model"))]  # down has a bias
        assert sorted(cut, key=str) == sorted(layers * wanted, key=str)
        assert len(found) == len(jax.tree.leaves(tree))


def test_values_are_those_of_one_device_and_parts_are_where_they_belong() -> None:
    mesh = jax.make_mesh((2,), ("model",), (jax.sharding.AxisType.Auto,), devices=jax.local_devices()[:2])

    def init(key: jax.Array) -> dict[str, Any]:
        first, second = jax.random.split(key)
        up, down = jax.random.normal(first, (4, 8)), jax.random.normal(second, (8, 4))
        return {"up": {"kernel": up}, "down": {"kernel": down}, "scale": jnp.ones(())}

    with jax.set_mesh(mesh):
        cut = parallel.init_by_rules(RULES, init, jax.random.key(3))
    jax.tree.map(np.testing.assert_array_equal, cut, jax.jit(init)(jax.random.key(3)))
    shapes = {name: cut[name]["kernel"].addressable_shards[1].data.shape for name in ("up", "down")}
    assert shapes == {"up": (4, 4), "down": (4, 4)}


def test_what_is_refused() -> None:
    tree = {"layer": {"bias": jnp.ones(3)}}
    with pytest.raises(ValueError, match=r"expected a rule for each array, got 'layer/bias' of shape \(3,\)"):
        parallel.match_partition_rules([("kernel", jax.P("model"))], tree)
    with pytest.raises(ValueError, match="no more dimensions than the array has, got .*'layer/bias'"):
        parallel.match_partition_rules([("bias", jax.P(None, "model"))], tree)
    with pytest.raises(RuntimeError, match="expected a mesh, got none"):
        parallel.init_by_rules(RULES, lambda: tree)


def test_arrays_of_one_element_are_whole() -> None:
    """Adafactor has arrays of shape (1,) where it does not factor, or factors."""
    params = {"k": jnp.ones((128, 256)), "b": jnp.ones(6)}
    state = jax.eval_shape(optax.adafactor(1.0, min_dim_size_to_factor=128).init, params)
    rules = [("v_(row|col)/k", jax.P("model")), ("k$", jax.P(None, "model")), ("", jax.P())]
    found = parallel.match_partition_rules(rules, state)[0]
    assert (found.v["k"], found.v_row["k"]) == (jax.P(), jax.P("model"))
