"""On accelerators sums begin early and end late. The programs are lowered for CUDA here, but not compiled."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pycollective as pc
from pycollective.ranks import accelerators

CALLS = {
    "@pycollective_device_allreduce(": "A",
    "@pycollective_device_allreduce_start(": "S",
    "@pycollective_device_allreduce_done(": "D",
    "@pycollective_device_allgather(": "G",
    "dot_general": "m",
}


@pytest.fixture(autouse=True)
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    pc.init()
    monkeypatch.setattr(accelerators, "kind_of", lambda device: "cuda")


def lowered(fun: Callable[..., Any], *args: Any, **options: Any) -> str:
    """The text of the whole program of ``pc.jit(fun, axis_name="i")`` for a GPU."""
    program = pc.jit(fun, axis_name="i", **options)._program
    donated = options.get("donate_argnums", ())
    return jax.jit(program, donate_argnums=donated).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def order(text: str) -> str:
    """The products and calls of a program, a letter for each."""
    return "".join(CALLS[found] for found in re.findall("|".join(map(re.escape, CALLS)), text))


def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean(x**2)


def train(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    value, grads = jax.value_and_grad(loss)(params, x)
    value, grads = lax.pmean((value, grads), "i")
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value


@pytest.mark.parametrize("options", [{}, {"donate_argnums": 0}])
def test_gradients_travel_while_others_are_computed(options: dict[str, Any]) -> None:
    w = jax.ShapeDtypeStruct((512, 512), jnp.float32)  # 1 MiB, so each is a bucket
    text = lowered(train, [w] * 3, w, **options)
    # The forward pass has three products. In the backward pass the sum of a layer's gradient starts before the two
    # products of the next layer. No sum is waited for before the last one has started.
    assert order(text) == "mmm" + "mS" + "mmS" + "mmS" + "DDD"
    # XLA must not move an array while MPI uses it: the results of a start go only through barriers, to its end.
    for results in re.findall(r"%(\d+):\d+ = stablehlo.custom_call @pycollective_device_allreduce_start", text):
        readers = re.findall(rf"stablehlo\.(\w+) [^\n]*%{results}#[1-9]", text)
        assert readers == ["optimization_barrier"]


def test_the_order_of_other_collectives_stays() -> None:
    def f(x: jax.Array) -> jax.Array:
        a = x @ x
        s = lax.psum(a, "i")
        g = lax.all_gather(a @ a, "i")  # the sum ends before it
        return s + g.sum(axis=0) + a @ x @ x

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    text = order(lowered(f, x))
    assert re.sub("m", "", text) == "SDG"
    assert text.index("S") < text.rindex("m", 0, text.index("D"))


@pytest.mark.parametrize("is_inner", [False, True])
def test_no_function_of_the_host_runs_between_start_and_end(is_inner: bool) -> None:
    """If it raised, XLA would give the arrays of the sum away while they are in use."""

    def on_host(x: jax.Array) -> jax.Array:
        return jax.ffi.ffi_call("of_another_library", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    def f(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        a = x @ x
        s = lax.psum(a, "i")
        return s, (jax.jit(on_host) if is_inner else on_host)(a @ x)

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    assert sorted(order(lowered(f, x))) == ["A", "m", "m"]


def test_a_sum_of_the_forward_pass_hides_no_other() -> None:
    def normalised(params: list[jax.Array], x: jax.Array, weight: jax.Array) -> list[jax.Array]:
        grads = jax.grad(lambda params: loss(params, x) / lax.psum(weight.sum(), "i"))(params)
        return list(lax.psum(grads, "i"))

    w = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    text = order(lowered(normalised, [w] * 3, w, jax.ShapeDtypeStruct((64,), jnp.float32)))
    assert text == "mmm" + "A" + "mS" + "mmS" + "mmS" + "DDD"


def test_what_follows_a_sum_may_need_nothing() -> None:
    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        a = x @ x
        s = lax.psum(a, "i")
        half = lax.div(1.0, 2.0)  # it reads no variable; the equation that reads its result comes after it
        return s, half * a @ a

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    assert order(lowered(f, x)) == "mSmD"


def test_an_operand_that_is_read_again_stays() -> None:
    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        a = x @ x
        return lax.psum(a, "i"), a, a @ a

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    text = lowered(f, x)
    assert order(text) == "mSmD"
    # The operand lies in the result's buffer, which XLA keeps until the end. If it is read again, XLA copies it first.
    (start,) = re.findall(r"custom_call @pycollective_device_allreduce_start[^\n]*", text)
    assert "output_operand_alias<output_tuple_indices = [1], operand_index = 1" in start


def test_a_sum_that_all_wait_for_is_one_call() -> None:
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    assert order(lowered(lambda x: lax.psum(x @ x, "i") @ x, x)) == "mAm"


def test_in_a_loop() -> None:
    def f(x: jax.Array) -> jax.Array:
        def body(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            a = x @ x
            return lax.psum(a, "i") + a @ a, None

        return lax.scan(body, x, None, length=3)[0]

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    assert order(lowered(f, x)) == "mSmD"


def test_not_on_cpu_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerators, "kind_of", lambda device: "cpu")
    w = jnp.ones((512, 512))
    text = pc.jit(train, axis_name="i").lower([w] * 3, w).as_text()
    assert "start" not in text
    assert "optimization_barrier" not in text
