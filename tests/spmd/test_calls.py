"""The number of calls that a program makes: sums that do not depend on each other are one call, in any program."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pycollective as pc
from pycollective.config import Config
from pycollective.named_axes import fusion
from pycollective.ranks.setup import devices_of_this_rank

Array = Any
X = np.ones((3,), np.float32)


def sums(x: Array) -> list[Array]:
    return [lax.psum(jnp.sin(k * x), "i") for k in range(1, 7)]


def programs(local: int) -> dict[str, tuple[Callable[..., Any], Array]]:
    """Returns programs with six sums each, and an argument for each program."""
    mesh = pc.make_mesh((-1,), ("i",), devices=devices_of_this_rank()[:local])
    return {
        "pmap": (pc.pmap(sums, "i"), np.stack([X] * local)),
        "jit": (pc.jit(sums, axis_name="i"), X),
        "jit typed": (pc.jit(sums, axis_name="i", check_vma=True), X),
        "shard_map": (pc.shard_map(sums, mesh=mesh, in_specs=P("i"), out_specs=P()), np.tile(X, local)),
        "shard_map untyped": (
            pc.shard_map(sums, mesh=mesh, in_specs=P("i"), out_specs=P(), check_vma=False),
            np.tile(X, local),
        ),
    }


def calls(fun: Callable[..., Any], *args: Any) -> int:
    text = fun.lower(*args).as_text()  # type: ignore[attr-defined]
    return len(re.findall(r"custom_call @pycollective_(?:device_)?allreduce(?!_done)\w*\(", text))  # or a start


@pytest.mark.parametrize("name", ["pmap", "jit", "jit typed", "shard_map", "shard_map untyped"])
def test_six_sums(name: str, world: pc.Communicator, few: int) -> None:
    fun, x = programs(few)[name]
    gradient = jax.grad(lambda x: sum(jnp.sum(jnp.sin(y)) for y in fun(x)))
    # With types a shared result has a shared cotangent, so the backward pass has no sum.
    backwards = 0 if name == "shard_map" else 1
    assert calls(fun, x) == 1
    for compiler in (jax.jit, pc.jit):
        assert calls(compiler(fun), x) == 1
        assert calls(compiler(lambda x: fun(2 * x)), x) == 1
        assert calls(compiler(gradient), x) == 1 + backwards
        assert calls(compiler(jax.vmap(fun)), np.stack([x, x])) == 1


@pytest.mark.parametrize(("bucket_bytes", "count"), [(0, 6), (2 * X.nbytes, 3), (1 << 20, 1)])
def test_buckets(bucket_bytes: int, count: int, local: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusion, "config", Config(bucket_bytes=bucket_bytes))
    for fun, x in programs(local).values():
        assert calls(fun, x) == count


def test_gradients_of_shared_arguments(world: pc.Communicator, local: int) -> None:
    # The gradient is taken outside, so JAX sums the gradients of all devices.
    shared = [np.full((k + 1, 3), k, np.float32) for k in range(6)]
    loss = lambda weights, x: lax.pmean(sum(jnp.sum(jnp.sin(w * x[None])) for w in weights), "i")
    fun = pc.pmap(loss, "i", in_axes=(None, 0), out_axes=None)
    x = np.stack([X] * local)
    assert calls(jax.jit(jax.grad(fun)), shared, x) == 3  # the loss, its cotangent, the gradients
    mesh = pc.make_mesh((-1,), ("i",), devices=devices_of_this_rank()[:local])
    typed = pc.shard_map(
        lambda weights, x: lax.pmean(sum(jnp.sum(jnp.sin(w * x[None])) for w in weights), "i"),
        mesh=mesh, in_specs=(P(), P("i")), out_specs=P(),
    )  # fmt: skip
    assert calls(jax.jit(jax.grad(typed)), shared, np.tile(X, local)) == 2


@pytest.mark.parametrize("donated", [False, True])
def test_nothing_is_copied(donated: bool, world: pc.Communicator) -> None:
    # A sum overwrites its operand unless the program reads it again, or it is an input that is not donated.
    options: dict[str, Any] = {"donate_argnums": 0} if donated else {}

    def aliased(fun: Callable[..., Any], *args: Array) -> int:
        return str(fun.lower(*args).as_text()).count("output_operand_alias<")  # type: ignore[attr-defined]

    x = np.ones((1, 3), np.float32)
    total = lambda x: lax.psum(x, "i")
    assert aliased(pc.jit(total, axis_name="i", **options), x) == donated
    assert aliased(pc.pmap(total, "i", **options), x) == donated
    assert aliased(pc.jit(lambda x: lax.psum(x + 1, "i"), axis_name="i", **options), x) == 1
    read_later = pc.pmap(lambda x: lax.psum((y := x + 1)[None], "i")[0] + y, "i", **options)
    for fun in (read_later, jax.jit(read_later), pc.jit(read_later)):
        assert aliased(fun, x) == 0
    none: dict[str, Any] = {"donate_argnums": []}
    assert aliased(pc.jit(total, axis_name="i", **none), x) == 0
    assert aliased(pc.jit(lambda x, y: (lax.psum(x, "i"), y), axis_name="i", **options), x, x) == donated
    assert aliased(pc.jit(lambda y, x: (lax.psum(x, "i"), y), axis_name="i", **options), x, x) == 0
