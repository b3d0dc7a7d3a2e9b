"""JAX's tools work with our programs as they work with JAX's."""

from __future__ import annotations

import gc
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import pycollective as pc

Array = Any


def total(x: Array) -> Array:
    return lax.psum(x, "i")


def ones(local: int) -> Array:
    return jnp.ones((local, 3))


def test_disable_jit(world: pc.Communicator, local: int) -> None:
    seen: list[Any] = []

    def f(x: Array) -> Array:
        seen.append(x)
        return 2 * lax.psum(x, "i")

    with jax.disable_jit():
        np.testing.assert_allclose(pc.pmap(f, "i")(ones(local)), 2 * world.size * local)
        np.testing.assert_allclose(pc.jit(f, axis_name="i")(jnp.ones(3)), 2 * world.size)
    assert len(seen) == 2


@pytest.fixture
def few_objects() -> Iterator[None]:
    """Hides the objects of other tests: JAX's check for leaks goes through all that Python's collector knows."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("few_objects")
def test_checking_leaks(world: pc.Communicator, local: int) -> None:
    leaked: list[Any] = []
    with jax.checking_leaks():
        np.testing.assert_allclose(pc.pmap(total, "i")(ones(local)), world.size * local)
        np.testing.assert_allclose(pc.jit(total, axis_name="i")(jnp.ones(3)), world.size)
        with pytest.raises(Exception, match="[Ll]eaked"):
            pc.pmap(lambda x: (leaked.append(lax.psum(x, "i")), x)[1], "i")(ones(local))


def test_prints_and_callbacks(world: pc.Communicator, local: int, capfd: pytest.CaptureFixture[str]) -> None:
    called: list[float] = []

    def f(x: Array) -> Array:
        y = lax.psum(x, "i")
        jax.debug.print("first {y}", y=y[0])
        jax.debug.callback(lambda y: called.append(float(y)), y[0])
        doubled = jax.pure_callback(lambda y: np.asarray(2 * y), jax.ShapeDtypeStruct(y.shape, y.dtype), y)
        return lax.psum(doubled, "i")

    n = world.size * local
    np.testing.assert_allclose(pc.pmap(f, "i")(ones(local)), 2 * n * n)
    jax.effects_barrier()
    assert capfd.readouterr().out.count(f"first {float(n)}") == local
    assert called == [n] * local


def test_ordered_callbacks(world: pc.Communicator) -> None:
    seen: list[float] = []

    @pc.jit(axis_name="i")
    def f(x: Array) -> Array:
        for k in range(3):
            x = lax.psum(x, "i")
            io_callback(lambda y, k=k: seen.append(k), None, x, ordered=True)
        return x

    for _ in range(4):
        f(jnp.float32(1))
    jax.effects_barrier()
    assert seen == [0, 1, 2] * 4


def test_ordered_callbacks_of_several_devices(world: pc.Communicator, local: int) -> None:
    def calls(pmap: Any) -> int:
        seen = []

        def f(x: Array) -> Array:
            y = lax.psum(x, "i")
            io_callback(lambda y: seen.append(float(y[0])), None, y, ordered=True)
            return lax.psum(y, "i")

        pmap(f, "i")(ones(local))
        jax.effects_barrier()
        return len(seen)

    assert calls(pc.pmap) == calls(jax.pmap) == local


def test_breakpoint_on_one_rank(world: pc.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    @pc.jit(axis_name="i")
    def f(x: Array) -> Array:
        y = lax.psum(x, "i")
        if world.rank == 0:
            jax.debug.breakpoint(backend="cli", token=None)
        return lax.psum(y, "i")

    out = io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.StringIO("p y\nc\n"))
    monkeypatch.setattr(sys, "stdout", out)
    assert f(jnp.float32(1)) == world.size**2
    jax.effects_barrier()
    assert ("Entering jdb" in out.getvalue()) == (world.rank == 0)


def test_named_scopes(world: pc.Communicator, local: int) -> None:
    def f(x: Array) -> Array:
        with jax.named_scope("my_scope"):
            return lax.psum(x, "i")

    text = pc.pmap(f, "i").lower(ones(local)).as_text(debug_info=True)
    assert "my_scope" in text


def test_profiler(world: pc.Communicator, local: int, tmp_path: Path) -> None:
    f = pc.pmap(total, "i")
    with jax.profiler.trace(str(tmp_path)):
        np.testing.assert_allclose(f(ones(local)), world.size * local)
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_transfer_guard(world: pc.Communicator, local: int) -> None:
    f, g, x = pc.pmap(total, "i"), pc.jit(total, axis_name="i"), ones(local)
    one = pc.psum(x[0], world)
    x = f(x)  # now x lies on the devices of the program
    want = world.size * local * world.size * local
    with jax.transfer_guard("disallow"):
        for _ in range(2):
            y, z, eager = f(x), g(one), pc.psum(one, world)
    np.testing.assert_allclose(y, want)
    np.testing.assert_allclose(z, world.size**2)
    np.testing.assert_allclose(eager, world.size**2)


def test_x64(world: pc.Communicator, local: int) -> None:
    with jax.enable_x64(True):
        x = jnp.full((local, 3), 1 + 1e-12)
        assert x.dtype == jnp.float64
        y = pc.pmap(lambda x: (lax.psum(x, "i"), lax.axis_index("i"), lax.psum(1, "i")), "i")(x)
        np.testing.assert_allclose(y[0], (1 + 1e-12) * world.size * local, rtol=1e-15)
        assert y[0].dtype == jnp.float64
        np.testing.assert_array_equal(y[1], world.rank * local + np.arange(local))
        assert pc.psum(jnp.int64(1 << 40), world) == world.size << 40
    np.testing.assert_allclose(pc.pmap(total, "i")(ones(local)), world.size * local)
