"""Which calls run beside computation between hosts, and in which order sums begin. The programs do not run here."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pycollective as pc
from pycollective.config import Config
from pycollective.named_axes import fusion, overlap
from pycollective.transport import handlers, native

CALL = r"custom_call @pycollective_(async_)?allreduce\([^\n]*: \(([^)]*)\) ->"


@pytest.fixture(autouse=True)
def several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    pc.init()
    monkeypatch.setattr(native, "spans_hosts", lambda number: True)


def configure(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> None:
    for module in (fusion, overlap, handlers):
        monkeypatch.setattr(module, "config", Config(**settings))


def text_of(fun: Callable[..., Any], *shapes: tuple[int, ...]) -> str:
    xs = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return pc.jit(fun, axis_name="i").lower(*xs).as_text()


def sums(text: str) -> list[list[str]]:
    """The shapes of the operands of each sum, in the order of the calls."""
    return [re.findall(r"tensor<([0-9x]+)xf32>", operands) for _, operands in re.findall(CALL, text)]


def gradients(*params_and_batch: jax.Array) -> tuple[jax.Array, ...]:
    *params, x = params_and_batch

    def loss(params: list[jax.Array]) -> jax.Array:
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return jnp.mean(y**2)

    return tuple(lax.psum(jax.grad(loss)(params), "i"))


LAYERS = (16, 32), (32, 8), (8, 4), (5, 16)


def test_the_gradient_of_the_last_layer_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, bucket_bytes=0)
    assert sums(text_of(gradients, *LAYERS)) == [["8x4"], ["32x8"], ["16x32"]]


def test_sums_are_joined_in_their_new_order(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, bucket_bytes=4 * (8 * 4 + 1))
    assert sums(text_of(gradients, *LAYERS)) == [["8x4", "32x8"], ["16x32"]]


@pytest.mark.parametrize("why", ["off", "one host"])
def test_else_sums_keep_the_order_of_the_program(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, bucket_bytes=0, overlap="off" if why == "off" else "auto")
    monkeypatch.setattr(native, "spans_hosts", lambda number: why != "one host")
    assert sums(text_of(gradients, *LAYERS)) == [["16x32"], ["32x8"], ["8x4"]]


def test_a_sum_that_another_one_waits_for_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, bucket_bytes=0)

    def f(large: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        s = lax.psum(large, "i")
        t = lax.psum(x @ x, "i")
        return s, lax.psum(t @ x, "i")

    # The first could begin at once, but the program would stand still while it travels.
    assert sums(text_of(f, (64, 64), (4, 4))) == [["4x4"], ["64x64"], ["4x4"]]


def test_nothing_moves_past_another_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    configure(monkeypatch, bucket_bytes=0)

    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        s = lax.psum(x @ x, "i")
        everything = lax.all_gather(x, "i")
        return s, everything, lax.psum(x[0], "i")

    calls = re.findall(r"custom_call @pycollective_(?:async_)?(allreduce|allgather)", text_of(f, (8, 8)))
    assert calls == ["allreduce", "allgather", "allreduce"]


@pytest.mark.parametrize(
    ("settings", "small", "large"),
    [({}, False, True), ({"overlap": "on"}, True, True), ({"overlap": "off"}, False, False)],
)
def test_which_calls_run_beside_computation(
    settings: dict[str, Any], small: bool, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(monkeypatch, **settings)
    for shape, is_async in (((1 << 17) - 1,), small), ((1 << 17,), large):
        for call in (lax.psum, lax.all_gather):
            text = text_of(lambda x, call=call: call(x, "i"), shape)
            assert ("@pycollective_async_all" in text) == is_async
            # The results go through a handler of their own to those that read them.
            assert text.count("@pycollective_async_results(") == int(is_async)
