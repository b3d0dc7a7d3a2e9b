"""Errors of experts that drop no token. What they compute is in tests/spmd: JAX has no ragged exchange on CPUs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pycollective.parallel.dropless import dropless_experts


def test_bad_calls() -> None:
    def run(apply: Any, x: tuple[int, ...] = (6, 3), logits: tuple[int, ...] = (6, 4), k: int = 2) -> None:
        call = functools.partial(dropless_experts, apply, axis_name="i", k=k)
        jax.make_jaxpr(call, axis_env=[("i", 2)])(jnp.ones(x), jnp.ones(logits))

    where = "parallel.dropless_experts: expected"
    with pytest.raises(ValueError, match=rf"{where} a result of apply of shape \(24,\) \+ any, got shape \(23, 3\)"):
        run(lambda rows, sizes: rows[:-1] + jnp.sum(sizes).astype(rows.dtype))
    with pytest.raises(ValueError, match=rf"{where} x \(..., width\) and logits"):
        run(lambda rows, _: rows, x=(5, 3))
    with pytest.raises(ValueError, match=f"{where} a multiple of 2 experts"):
        run(lambda rows, _: rows, logits=(6, 3))
    with pytest.raises(ValueError, match=f"{where} floating-point logits .* and k=5"):
        run(lambda rows, _: rows, k=5)
    with pytest.raises(NameError, match=f"{where} a call where the axis 'i' is bound"):
        dropless_experts(lambda rows, _: rows, jnp.ones((6, 3)), jnp.ones((6, 4)), "i")
