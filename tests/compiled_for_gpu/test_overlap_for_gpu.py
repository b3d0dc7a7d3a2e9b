"""Sums under way during the backward pass of a step of training, in the order that XLA has scheduled for GPUs."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import pycollective as pc
from pycollective.config import config
from pycollective.named_axes import overlap
from tests.compiled_for_gpu.checks import check, letters
from tests.compiled_for_gpu.compiler import Compiled, compiled, on_one_gpu
from tests.unit.test_overlap import train

Array = Any

N = 512
W = jax.ShapeDtypeStruct((N, N), jnp.float32)  # 1 MiB, so each is a bucket
LAYERS = 3


def step(**options: Any) -> Compiled:
    function = pc.jit(train, axis_name="i", **on_one_gpu(), **options)
    return compiled(function, [W] * LAYERS, W)


CALLS = " ".join(["allreduce_start"] * LAYERS + ["allreduce_done"] * LAYERS)


@pytest.mark.parametrize(("options", "donated"), [({}, 0), ({"donate_argnums": 0}, LAYERS)])
def test_gradients_travel_while_others_are_computed(options: dict[str, Any], donated: int) -> None:
    program = step(**options)
    check(program, CALLS)
    # The forward pass has three products. The two of a layer's backward pass lie between the sum of the layer above and
    # that of its own.
    assert letters(program.program, N * N) == "mmm" + "mS" + "mmS" + "mmS" + "DDD"
    assert program.donated == donated * 4 * N * N


def test_layers_of_a_bucket_travel_together() -> None:
    w = jax.ShapeDtypeStruct((N, N // 4), jnp.float32), jax.ShapeDtypeStruct((N // 4, N), jnp.float32)
    program = compiled(pc.jit(train, axis_name="i", **on_one_gpu()), [*w, *w, *w, *w], W)
    check(program, "allreduce_start allreduce_start allreduce_done allreduce_done")
    # The forward pass has eight products. The backward pass has two for each layer, but one for the last.
    assert letters(program.program, N * N) == 8 * "m" + 7 * "m" + "S" + 8 * "m" + "S" + "DD"


def test_in_a_loop() -> None:
    def f(x: Array) -> Array:
        def body(x: Array, _: None) -> tuple[Array, None]:
            a = x @ x
            return lax.psum(a, "i") + a @ a, None

        return lax.scan(body, x, None, length=3)[0]

    program = compiled(pc.jit(f, axis_name="i", donate_argnums=0, **on_one_gpu()), W)
    check(program, "(allreduce_start allreduce_done)")
    assert letters(program.program, N * N) == "(mCSmD)"  # the start overwrites a copy, since `a` is read again


def test_without_the_pass_a_sum_has_no_end_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlap, "config", dataclasses.replace(config, overlap="off"))
    assert re.fullmatch("[mA]+A", letters(step().program, N * N))


def test_without_the_barriers_an_end_follows_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def identity(values: Any, like: Any) -> Any:
        return overlap._new_equation(like, lambda *xs: jax.jit(lambda *xs: xs)(*xs), values)

    monkeypatch.setattr(overlap, "_barrier", identity)
    assert letters(step().program, N * N).count("SD") == LAYERS
