"""``jax.checkpoint`` around compiled functions over named axes: its policies look inside, as with JAX's own.

The oracle are ``jax.shard_map`` and ``jax.pmap`` on as many devices as a rank has: a rank keeps its own blocks alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name, print_saved_residuals
from jax.sharding import PartitionSpec as P

import pycollective as pc
from pycollective.ranks.setup import devices_of_this_rank
from tests.cases import values
from tests.spmd.cases import own

Array = Any
Function = Callable[..., Any]
WIDTH = 6


def layer(w: Array, x: Array) -> Array:
    """A layer on one device's blocks, with a gather that a backward pass should repeat, a name, and a scalar."""
    whole = lax.all_gather(w, "i", tiled=True)
    y = checkpoint_name(jnp.cos(x @ whole[:WIDTH]), "hidden")
    mean = lax.pmean(jnp.sum(y), "i") / WIDTH
    return jnp.tanh(lax.psum(y * mean, "i")) * jnp.sin(mean) + x


POLICIES = {
    "nothing_saveable": jax.checkpoint_policies.nothing_saveable,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
    "save_only_these_names": jax.checkpoint_policies.save_only_these_names("hidden"),
    "everything_saveable": jax.checkpoint_policies.everything_saveable,
}


def kinds(world: pc.Communicator, local: int, fun: Function) -> dict[str, tuple[Function, Function]]:
    """Compiled functions over ranks x local devices, each with JAX's own over ``local`` devices."""
    devices = devices_of_this_rank()[:local]
    mesh = pc.make_mesh((world.size * local,), ("i",), devices=devices)
    theirs = jax.sharding.Mesh(np.array(devices), ("i",))

    def shard_map(check: bool) -> tuple[Function, Function]:
        options: dict[str, Any] = {"in_specs": P("i"), "out_specs": P("i"), "check_vma": check}
        return pc.shard_map(fun, mesh=mesh, **options), jax.shard_map(fun, mesh=theirs, **options)

    def blocks(mapped: Function) -> Function:  # the same arguments for pmap as for shard_map
        return lambda *args: mapped(*(x.reshape(local, -1, WIDTH) for x in args)).reshape(-1, WIDTH)

    found = {"typed": shard_map(True), "untyped": shard_map(False)}
    found["pmap"] = blocks(pc.pmap(fun, "i")), blocks(jax.pmap(fun, "i", devices=devices))
    if local == 1:
        found["jit"] = pc.jit(fun, axis_name="i"), found["untyped"][1]
        found["typed jit"] = pc.jit(fun, axis_name="i", check_vma=True), found["typed"][1]
    return found


def saved(fun: Function, capsys: pytest.CaptureFixture[str], *args: Array) -> Counter[str]:
    """The types of what a backward pass keeps, and how often."""
    capsys.readouterr()
    print_saved_residuals(fun, *args)
    return Counter(re.findall(r"^\S+\[[\d,]*\]", capsys.readouterr().out, re.MULTILINE))


def blocks(world: pc.Communicator, local: int) -> Sequence[Array]:
    ws, xs = values((world.size * local * WIDTH, WIDTH)), values((world.size * local * 2, WIDTH), seed=1)
    return own(world, local * WIDTH, ws), own(world, local * 2, xs)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_backward_pass_keeps_as_much_as_with_jax(
    policy: str, world: pc.Communicator, few: int, capsys: pytest.CaptureFixture[str]
) -> None:
    args = blocks(world, few)
    for name, (ours, theirs) in kinds(world, few, layer).items():
        kept, want = (saved(jax.checkpoint(f, policy=POLICIES[policy]), capsys, *args) for f in (ours, theirs))
        assert kept == want, name


def test_gradients(world: pc.Communicator, few: int) -> None:
    args = blocks(world, few)
    batches = [jnp.stack([x, 2 * x]) for x in args]

    def gradients(fun: Function) -> Function:
        def loss(w: Array, x: Array) -> Array:
            step = lambda x, k: (fun(w * k, x), None)
            return jnp.sum(jnp.sin(lax.scan(step, x, jnp.arange(1.0, 3.0))[0]))

        grad = jax.grad(loss, (0, 1))
        return jax.jit(
            lambda: {"grad": grad(*args), "jvp": jax.jvp(grad, args, args)[1], "batch": jax.vmap(grad)(*batches)}
        )

    mapped = {name: ours for name, (ours, _) in kinds(world, few, layer).items()}
    for name, policy in (("typed", "nothing_saveable"), ("pmap", "save_only_these_names")):
        want = gradients(mapped[name])()
        got = gradients(jax.checkpoint(mapped[name], policy=POLICIES[policy]))()
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(x, y, 1e-3, 1e-3 * (1 + np.abs(y).max()), err_msg=f"{name}, {policy}")


def test_a_backward_pass_repeats_no_collective_that_it_does_not_need(world: pc.Communicator) -> None:
    def loss(x: Array) -> Array:  # the gradient needs the first sum; the second one is linear
        return lax.psum(jnp.sin(lax.psum(x, "i")), "i")

    def collectives(fun: Function) -> int:
        text: str = jax.jit(jax.grad(lambda x: fun(x).sum())).lower(jnp.ones(3)).as_text()
        return text.count("@pycollective_allreduce")

    for fun in (pc.jit(loss, axis_name="i"), pc.jit(loss, axis_name="i", check_vma=True)):
        assert collectives(jax.checkpoint(fun)) == collectives(fun) + 1
