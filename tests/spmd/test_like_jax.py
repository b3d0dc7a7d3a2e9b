"""Programs that JAX runs, and its own debugging flags: each against :func:`jax.pmap` or :func:`jax.shard_map`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pycollective as pc
from tests.cases import values
from tests.collective.programs import once, oracle_devices
from tests.spmd.cases import assert_close, stacked
from tests.spmd.test_shard_map import INSIDE, NAMES, assert_blocks, blocks, compare, meshes

Array = Any
Function = Callable[[Array], Any]


# Loops that only move their carry, under types ----------------------------------------------------------------


def _delay_line(x: Array) -> Any:
    """Passes three inputs on, each two rounds late."""
    return lax.scan(lambda line, y: ((y, line[0]), line[1]), (x, -x), jnp.stack([x, 2 * x, 3 * x]))


@jax.custom_jvp
def _same(x: Array) -> Array:
    return x


_same.defjvp(lambda primals, tangents: (primals[0], 3 * tangents[0]))

MOVES: dict[str, Function] = {
    "swap": lambda x: lax.scan(lambda c, _: ((c[1], c[0]), None), (x, x + 1), None, length=3)[0],
    "kept": lambda x: lax.scan(lambda c, _: (c, c), x, None, length=2),
    "delay line": _delay_line,
    "delay line of sums": lambda x: _delay_line(lax.psum(x, "i")),
    "sum of what moves": lambda x: lax.scan(
        lambda c, y: ((c[1], y), lax.psum(c[0], "i")), (x, x), jnp.stack([x, 2 * x, 3 * x])
    ),
    "fori": lambda x: lax.fori_loop(0, 3, lambda _, c: (c[1], c[0]), (x, -x)),
    "fori to a sum": lambda x: lax.fori_loop(
        0, lax.psum(lax.axis_index("i"), "i"), lambda _, c: (c[1], c[2], c[0]), (x, 2 * x, 3 * x)
    ),
    "while": lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[2], c[1]), (0, x, -x))[1:],
    "no round": lambda x: lax.while_loop(lambda _: False, lambda c: c, (x, -x)),
    "cond": lambda x: lax.cond(lax.psum(1, "i") > 0, lambda x, y: (x, y), lambda x, y: (y, x), x, -x),
    "cond of its index": lambda x: lax.cond(
        lax.axis_index("i") > 0, lambda x, y: (x, y), lambda x, y: (y, x), x, -x
    ),
    "switch": lambda x: lax.switch(
        lax.axis_index("i") % 2, [lambda x, y: x, lambda x, y: y, lambda x, y: x], x, -x
    ),
    "jit": lambda x: jax.jit(lambda x, y: (y, x))(x, lax.psum(x, "i")),
    "checkpoint": lambda x: jax.checkpoint(lambda x, y: (y, x))(x, -x),
    "map": lambda x: lax.map(lambda y: y, x),
    "scan in a scan": lambda x: lax.scan(
        lambda c, _: lax.scan(lambda c, _: ((c[1], c[0]), c[0]), c, None, length=3), (x, x + 1), None, length=2
    ),
    "scan in a cond": lambda x: lax.cond(
        lax.axis_index("i") > 0,
        lambda x: lax.scan(lambda c, _: (c, c), x, None, length=2)[1], lambda x: jnp.stack([x, -x]), x,
    ),
    "custom derivative": lambda x: jnp.sin(_same(x)),
}  # fmt: skip
"""Programs that hold a jaxpr without equations."""


def _moves(x: Array) -> Any:
    return jax.tree.map(lambda y: y[None], {name: fun(x) for name, fun in MOVES.items()})


def test_loops_that_only_move_their_carry(world: pc.Communicator, few: int) -> None:
    total = world.size * few
    xs = values((2 * total, 3))
    around = lambda mapped: lambda x: jax.jvp(mapped, (x,), (jnp.cos(x),))
    compare(world, few, (total,), _moves, (P("i"),), P("i"), xs, names=("i",), around=around)


def test_loops_that_only_move_their_carry_over_ranks(world: pc.Communicator) -> None:
    xs = stacked(world, 1)
    theirs = jax.sharding.Mesh(np.array(oracle_devices(world.size), dtype=object), ("i",))
    mapped = jax.shard_map(lambda x: _moves(x[0]), mesh=theirs, in_specs=P("i"), out_specs=P("i"))
    want = once(world.size, lambda: jax.jit(mapped)(xs))
    got = pc.jit(_moves, axis_name="i", check_vma=True)(xs[world.rank])
    assert_close(world, 1, got, want)


# Arrays without elements --------------------------------------------------------------------------------------

EMPTY: dict[str, Function] = {
    "rolled": lambda x: jnp.roll(x, 1, -1) + 1,
    "rolled and chosen": lambda x: jnp.where(jnp.roll(x, 1, -1) > 0, x, 0),
    "rolled and summed": lambda x: lax.psum(jnp.roll(x, 1, -1), "data"),
    "in a cond": lambda x: lax.cond(lax.psum(x.sum(), "data") > 0, lambda x: jnp.roll(x, 1, -1), lambda x: 2 * x, x),
    "in a scan": lambda x: lax.scan(lambda c, y: (jnp.roll(c, 1, -1) * 2, c + y), x, jnp.stack([x, x])),
    "taken": lambda x: jnp.take(x, jnp.zeros(0, int), axis=-1) * 2,
    "sorted": lambda x: jnp.sort(jnp.roll(x, 1, -1)) - 1,
    "gathered": lambda x: jnp.sin(lax.all_gather(jnp.roll(x, 1, -1), "model", axis=-1, tiled=True)),
    "permuted": lambda x: lax.ppermute(jnp.roll(x, 1, -1), "data", [(0, 0)]) + 1,
    "derivative": lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(jnp.roll(x, 1, -1))))(x),
}


@pytest.mark.parametrize("shape", [(0,), (2, 0)], ids=str)
@pytest.mark.parametrize("spec", [P(), P("data")], ids=str)
def test_arrays_without_elements(spec: P, shape: tuple[int, ...], world: pc.Communicator) -> None:
    local, sizes = INSIDE
    mesh, theirs = meshes(world, local, sizes)
    x = np.zeros((sizes[0] * shape[0], *shape[1:]), np.float32)
    out_spec = P(NAMES) if len(shape) == 1 else P(*NAMES)

    def fun(x: Array) -> dict[str, Any]:
        return {name: f(x) for name, f in EMPTY.items()}

    options: dict[str, Any] = {"in_specs": spec, "out_specs": out_spec}
    # JAX can't read such a global array back, but knows its shape.
    want = jax.tree.map(
        lambda y: np.zeros(y.shape, y.dtype), jax.eval_shape(jax.shard_map(fun, mesh=theirs, **options), x)
    )
    got = pc.shard_map(fun, mesh=mesh, **options)(blocks(mesh, spec, x))
    assert_blocks(mesh, got, want, out_spec)
