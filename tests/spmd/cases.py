"""Functions of one device's array with collectives over the axis "i", to compare ``pc.pmap`` with :func:`jax.pmap`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import pycollective as pc
from tests.cases import values
from tests.collective.programs import divided, once, oracle_devices

Array = Any
Function = Callable[[Any], Any]

STEP_TOLERANCE = 1e-3 if "PYCOLLECTIVE_TEST_PLATFORM" in os.environ else 1e-5
"""For the results of :func:`step`. CPUs compute what is expected, and GPUs differ from them in the last bits: near the
limits of tanh its derivative enlarges that."""
SHAPE = (8, 3)  # 8 is a multiple of every number of devices in these tests


def _ring(step: int) -> list[tuple[int, int]]:
    n = lax.axis_size("i")
    return [(k, (k + step) % n) for k in range(n)]


def _halves() -> list[list[int]]:
    """Returns two groups, each with devices of all ranks; the second has them in opposite order."""
    n = lax.axis_size("i")
    return [list(range(0, n, 2)), list(range(1, n, 2))[::-1]] if n % 2 == 0 else [list(range(n))]


def _blocks(x: Array) -> Array:
    """Returns one row for each device."""
    return x[: lax.axis_size("i")]


LINEAR: dict[str, Function] = {
    "psum": lambda x: lax.psum(x, "i"),
    "psum of a tree": lambda x: sum(jax.tree.leaves(lax.psum({"a": x, "b": [2 * x, x + x]}, "i"))),
    "pmean": lambda x: lax.pmean(x, "i"),
    "psum in groups": lambda x: lax.psum(x, "i", axis_index_groups=_halves()),
    "all_gather": lambda x: lax.all_gather(x, "i"),
    "all_gather axis": lambda x: lax.all_gather(x, "i", axis=-1),
    "all_gather tiled": lambda x: lax.all_gather(x, "i", axis=1, tiled=True),
    "all_gather in groups": lambda x: lax.all_gather(x, "i", axis_index_groups=_halves()),
    "psum_scatter": lambda x: lax.psum_scatter(_blocks(x), "i"),
    "psum_scatter tiled": lambda x: lax.psum_scatter(x, "i", tiled=True),
    "psum_scatter in groups": lambda x: lax.psum_scatter(x, "i", tiled=True, axis_index_groups=_halves()),
    "all_to_all": lambda x: lax.all_to_all(_blocks(x), "i", 0, 0),
    "all_to_all tiled": lambda x: lax.all_to_all(x, "i", 0, 1, tiled=True),
    "all_to_all in groups": lambda x: lax.all_to_all(x, "i", 0, 1, tiled=True, axis_index_groups=_halves()),
    "ppermute": lambda x: lax.ppermute(x, "i", _ring(1)),
    "ppermute backwards": lambda x: lax.ppermute(x, "i", _ring(-2)),
    "ppermute partial": lambda x: lax.ppermute(x, "i", _ring(1)[:-1]),
    "ppermute from the end": lambda x: lax.ppermute(x, "i", [(k, k - 1) for k in range(lax.axis_size("i"))]),
    "pshuffle": lambda x: lax.pshuffle(x, "i", [(k + 1) % lax.axis_size("i") for k in range(lax.axis_size("i"))]),
    "pswapaxes": lambda x: lax.pswapaxes(_blocks(x), "i", 0),
    "two after each other": lambda x: lax.psum(
        lax.ppermute(x, "i", _ring(1)) * lax.axis_index("i").astype(x.dtype), "i"
    ),
    "pc.psum": lambda x: pc.psum(x, "i"),
    "pc.pshuffle": lambda x: pc.pshuffle(x, "i", [(k + 1) % lax.axis_size("i") for k in range(lax.axis_size("i"))]),
    "pc.all_gather": lambda x: pc.all_gather(x, "i"),
}
OTHERS: dict[str, Function] = {
    "pmax": lambda x: lax.pmax(x, "i"),
    "pmin": lambda x: lax.pmin(x, "i"),
    "pmax in groups": lambda x: lax.pmax(x, "i", axis_index_groups=_halves()),
    "axis_index": lambda x: lax.axis_index("i") + x.astype(jnp.int32),
    "psum of a number": lambda x: lax.psum(1, "i") + 0 * x,
    "psum of ints": lambda x: lax.psum((10 * x).astype(jnp.int16), "i"),
    "psum of bools": lambda x: lax.psum(x > 0, "i"),
    "psum of bfloat16 ints": lambda x: lax.psum(jnp.round(4 * x).astype(jnp.bfloat16), "i"),
    "all_gather of bytes": lambda x: lax.all_gather((10 * x).astype(jnp.uint8), "i", tiled=True),
    "keys": lambda x: jax.random.normal(
        jax.random.fold_in(jax.random.key(0), lax.axis_index("i").astype(jnp.uint32)), x.shape
    ),
}
ALL = {**LINEAR, **OTHERS}

EACH = {
    name: LINEAR[name]
    for name in (
        *("psum", "pmean", "psum in groups", "all_gather", "psum_scatter tiled", "all_to_all tiled"),
        *("ppermute partial", "two after each other"),
    )
}
"""One of each primitive, for tests of what is around a call. The others differ in the call's options."""


def _loss(params: list[Array], x: Array) -> Array:
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


def step(params: list[Array], x: Array) -> tuple[Array, list[Array]]:
    """Makes a step of gradient descent. Returns the loss and the new weights."""
    loss, grads = jax.value_and_grad(_loss)(params, x)
    return lax.pmean(loss, "i"), jax.tree.map(lambda p, g: p - 0.1 * g, params, lax.pmean(grads, "i"))


def stacked(world: pc.Communicator, local: int, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    """Returns one array for each device of all ranks, stacked."""
    return np.asarray(values((world.size * local, *shape), seed=seed))


def own(world: pc.Communicator, local: int, xs: Array) -> Array:
    """Returns the part of this rank's devices."""
    return xs[world.rank * local : (world.rank + 1) * local]


def assert_close(world: pc.Communicator, local: int, got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Compares ``got``, of this rank's devices, with their part of ``want``, of all devices."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, all_), mine in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        expected = own(world, local, all_)
        assert mine.dtype == expected.dtype, path
        assert mine.shape == expected.shape, path
        wide = np.asarray(expected, np.float64)
        # The terms of a sum may cancel, and its rounding error goes with their size: so does the tolerance.
        size = max(1.0, np.abs(wide).max(initial=0))
        np.testing.assert_allclose(np.asarray(mine, np.float64), wide, tolerance, tolerance * size, err_msg=str(path))


def each(table: dict[str, Callable[..., Any]]) -> Callable[..., dict[str, Any]]:
    """All of a table in one program."""
    return lambda *args: {name: fun(*args) for name, fun in table.items()}


def compare(
    world: pc.Communicator,
    local: int,
    fun: Callable[..., Any] | dict[str, Callable[..., Any]],
    *args: Any,
    in_axes: Any = 0,
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda f: f,
    tolerance: float = 1e-5,
    **options: Any,
) -> None:
    """``pc.pmap(fun)`` on this rank's part of ``args`` against ``jax.pmap(fun)`` on all, inside ``around``.

    Of a table of functions the ranks compute the oracle together, each a part; ``around`` cannot be told apart so.
    """
    total = world.size * local

    def oracle(fun: Callable[..., Any]) -> Any:
        mapped = jax.pmap(fun, "i", in_axes=in_axes, devices=oracle_devices(total), **options)
        return jax.jit(around(mapped))(*args)

    if isinstance(fun, dict):
        table, fun = fun, each(fun)
        want = divided(total, table, lambda names: oracle(each({name: table[name] for name in names})))
    else:
        want = once(total, lambda: oracle(fun))
    axes = in_axes if isinstance(in_axes, tuple) else (in_axes,) * len(args)
    mine = [
        x if axis is None else jax.tree.map(lambda x: own(world, local, x), x)
        for x, axis in zip(args, axes, strict=True)
    ]
    got = around(pc.pmap(fun, "i", in_axes=in_axes, **options))(*mine)
    assert_close(world, local, got, want, tolerance)
