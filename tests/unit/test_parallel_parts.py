"""Optimizers of which each device has parts of the parameters, against one device that has all of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from pycollective.parallel import clip_by_global_norm, for_parts, shard, sliced, unshard, zero
from tests.cases import values

pytestmark = pytest.mark.usefixtures("promotion_of_optax")

Array = Any
Tree = Any
P = jax.P

PARAMS = {"rows": values((4, 3), seed=1), "columns": values((5, 2), seed=2), "bias": values((3,), seed=3)}
SPECS = {"rows": P("m"), "columns": P(None, "m"), "bias": P()}
XS = jnp.asarray([1.0, 3.0])  # for each device along "d"
LIMIT = 0.1


def gradients(p: Tree, x: Array) -> Tree:
    return jax.tree.map(lambda w: jnp.sin(w) * x.astype(w.dtype), p)


def train(optimizer: Any, params: Tree, grads: Any) -> Tree:
    state = optimizer.init(params)
    for _ in range(3):
        updates, state = optimizer.update(grads(params), state, params)
        params = optax.apply_updates(params, updates)
    return params


def plain() -> Tree:
    optimizer = optax.chain(optax.clip_by_global_norm(LIMIT), optax.sgd(0.5, momentum=0.9))
    return train(optimizer, PARAMS, lambda p: gradients(p, XS.mean()))


def inner(axis: Any, specs: Tree) -> Any:
    return optax.chain(clip_by_global_norm(LIMIT, axis, specs=specs), optax.sgd(0.5, momentum=0.9))


def by_zero(p: Tree, x: Array, specs: Tree, *, types: bool) -> Tree:
    def grads(p: Tree) -> Tree:
        return gradients(lax.pcast(p, "d", to="varying") if types else p, x)

    return train(zero(inner("d", specs), "d"), p, grads)


def by_slices(p: Tree, x: Array, specs: Tree, *, types: bool) -> Tree:
    del types

    def grads(slices: Tree) -> Tree:
        return shard(jax.tree.map(lambda g: lax.pmean(g, "d"), gradients(unshard(slices, p, "d"), x)), "d")

    return unshard(train(sliced(inner("d", specs), p, "d"), shard(p, "d"), grads), p, "d")


def by_parts(p: Tree, x: Array, specs: Tree, *, types: bool) -> Tree:
    del types
    x = lax.pmean(x, "d")
    return train(for_parts(inner((), specs), specs), p, lambda p: gradients(p, x))


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((2, 2), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@pytest.mark.parametrize("types", [False, True], ids=["specs", "types"])
@pytest.mark.parametrize("way", [by_zero, by_slices, by_parts])
def test_the_norm_on_a_mesh_is_that_of_all_parts(way: Any, types: bool) -> None:
    """What all devices have counts once."""
    specs = None if types else SPECS

    def step(p: Tree, x: Array) -> Tree:
        return way(p, x[0], specs, types=types)

    mapped = jax.shard_map(step, mesh=mesh(), in_specs=(SPECS, P("d")), out_specs=SPECS, check_vma=types)
    got = jax.jit(mapped)(PARAMS, XS)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(plain()), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=str(path))


@pytest.mark.parametrize("types", [False, True], ids=["specs", "types"])
def test_one_norm_over_data_model_and_stages(types: bool) -> None:
    """What is cut along several axes, along one of them, and along none counts once; and a trust ratio of the last."""
    specs = {"layers": P("s", None, "m"), "columns": P(None, "m"), "of stages": P("s"), "bias": P()}
    params = {
        "layers": values((2, 3, 4), seed=1),
        "columns": values((5, 2), seed=2),
        "of stages": values((4,), seed=3),
        "bias": values((3,), seed=4),
    }
    clip = clip_by_global_norm(LIMIT, specs=None if types else specs)
    ratio = {name: name == "bias" for name in params}

    def of(clip: Any) -> Any:
        return optax.chain(clip, optax.masked(optax.scale_by_trust_ratio(), ratio), optax.sgd(0.5, momentum=0.9))

    optimizer = zero(for_parts(of(clip), None if types else specs), "d")

    def step(p: Tree, x: Array) -> Tree:
        return train(optimizer, p, lambda p: gradients(lax.pcast(p, "d", to="varying") if types else p, x[0]))

    on = jax.make_mesh((2, 2, 2), ("d", "m", "s"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    mapped = jax.shard_map(step, mesh=on, in_specs=(specs, P("d")), out_specs=specs, check_vma=types)
    want = train(of(optax.clip_by_global_norm(LIMIT)), params, lambda p: gradients(p, XS.mean()))
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(jax.jit(mapped)(params, XS)), jax.tree.leaves(want), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=str(path))

    bare = zero(of(optax.clip_by_global_norm(LIMIT)), "d")
    along = "'m', 's'"
    with pytest.raises(
        ValueError, match=f"zero: expected an optimizer that knows which parameters are cut along {along}"
    ):
        optimizer = bare
        jax.jit(jax.shard_map(step, mesh=on, in_specs=(specs, P("d")), out_specs=specs, check_vma=types))(params, XS)


def traced(optimizer: Any, params: Tree = PARAMS, **axes: int) -> None:
    jax.make_jaxpr(lambda p: optimizer.update(p, optimizer.init(p), p), axis_env=list(axes.items()))(params)


@pytest.mark.parametrize("axis", ["d", ("d", "m")])
def test_what_is_cut_along_other_axes_has_to_be_known(axis: Any) -> None:
    """Of an axis of the model nobody can say without types or specifications what counts once."""
    traced(zero(inner("d", SPECS), "d"), d=2, m=2)
    traced(zero(inner("d", P()), "d"), d=2, m=2)  # nothing is cut along "m"
    traced(zero(inner("d", None), "d"), d=2)
    traced(zero(inner(("d", "m"), None), ("d", "m")), d=2, m=2)
    with pytest.raises(ValueError, match=r"zero: .* adds up along 'm' too, where devices may have the same elements"):
        traced(zero(inner(("d", "m"), None), "d"), d=2, m=2)  # "m" is not an axis of zero
    with pytest.raises(ValueError, match=r"clip_by_global_norm: expected specs, .*, got none, where \['n'\] are bound"):
        traced(zero(inner(axis, None), axis), d=2, **({"m": 2} if isinstance(axis, tuple) else {}), n=2)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
        optax.lamb(1e-2),
        optax.adafactor(1e-2),
        optax.contrib.muon(1e-2),
        optax.conditionally_transform(optax.clip_by_global_norm(0.1), lambda step: step >= 3),
        inner((), {"rows": P("m"), "columns": P(), "bias": P()}),  # the columns would not be added up
    ],
    ids=["norm", "lamb", "adafactor", "muon", "norm from the third step on", "other specs"],
)
def test_an_update_by_the_norm_of_a_part_is_refused(optimizer: Any) -> None:
    """Each device would clip by a norm of its own, and the bias that all have would drift apart."""
    with pytest.raises(ValueError, match=r"for_parts: expected an optimizer that updates each element by itself, got"):
        traced(for_parts(optimizer, SPECS), m=2)


def test_an_update_by_the_norm_of_a_part_is_refused_by_types() -> None:
    optimizer = for_parts(optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)))
    mapped = jax.shard_map(lambda p: train(optimizer, p, lambda p: p), mesh=mesh(), in_specs=(SPECS,), out_specs=SPECS)
    with pytest.raises(ValueError, match=r"for_parts: .*of a sum over the elements of one device alone"):
        jax.make_jaxpr(mapped)(PARAMS)


def test_what_all_devices_have_may_be_treated_as_a_whole() -> None:
    """Muon for a matrix that is not cut, Adam for the others, and a mask by dimensions, which parts have as well."""
    params = PARAMS | {"same": values((3, 3), seed=4)}
    specs = SPECS | {"same": P()}
    labels = jax.tree.map(lambda _: "adam", params) | {"same": "muon"}
    optimizer = optax.multi_transform(
        {
            "muon": optax.contrib.muon(1e-2),
            "adam": optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        },
        labels,
    )
    traced(for_parts(optimizer, specs), params, m=2)


def test_bad_specs() -> None:
    sgd = optax.sgd(0.1)
    with pytest.raises(ValueError, match=r"for_parts: expected specs, since axes other than \(\) are bound, got none"):
        traced(for_parts(sgd), m=2)
    with pytest.raises(ValueError, match=r"for_parts: expected specs as a tree like the parameters"):
        traced(for_parts(sgd, {"rows": P("m")}), m=2)
    with pytest.raises(ValueError, match=r"for_parts: expected a jax.P at \['bias'\], got 'm'"):
        traced(for_parts(sgd, SPECS | {"bias": "m"}), m=2)
    with pytest.raises(ValueError, match=r"for_parts: expected a jax.P of at most 1 dimensions at \['bias'\]"):
        traced(for_parts(sgd, SPECS | {"bias": P(None, "m")}), m=2)
    with pytest.raises(NameError, match=r"for_parts: expected a call where the axis 'm' is bound"):
        traced(for_parts(sgd, SPECS), d=2)
    with pytest.raises(TypeError, match=r"for_parts: expected arrays of numbers, got key<fry> at the only leaf"):
        traced(for_parts(sgd, P()), jax.random.key(0), m=2)


def test_keys_are_not_cut() -> None:
    with pytest.raises(TypeError, match=r"shard: expected arrays of numbers, got key<fry> at \['key'\]"):
        jax.make_jaxpr(lambda p: shard(p, "d"), axis_env=[("d", 2)])({"key": jax.random.key(0)})


def test_slices_of_other_parameters() -> None:
    optimizer = sliced(optax.sgd(0.1), {"w": jnp.ones(3)}, "d")
    with pytest.raises(ValueError, match=r"sliced: expected slices in a tree like the shapes"):
        jax.make_jaxpr(lambda p: optimizer.init(shard(p, "d")), axis_env=[("d", 2)])(PARAMS)
