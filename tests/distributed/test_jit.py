"""jax.jit of global arrays: XLA finds the collectives. Against NumPy, or JAX on one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tests.distributed.arrays import RANK, SIZE, check, mesh_of, put, values

Array = Any

SPECS = (P(), P("i"), P("j"), P("i", "j"), P("j", "i"), P(None, "i"), P(("i", "j")), P(None, ("j", "i")))
MATRIX = (8, 4 * SIZE)


@pytest.fixture
def mesh() -> Mesh:
    """2 x 2 devices, or 1 x 2."""
    return mesh_of(SIZE // 2, 2)


@pytest.fixture(params=sorted({SIZE // 2, 2}))
def turned(request: pytest.FixtureRequest) -> Mesh:
    """On two ranks also 2 x 1 devices, for tests in which the axes have different tasks."""
    rows: Any = request.param
    return mesh_of(rows, SIZE // rows)


@pytest.fixture
def line() -> Mesh:
    return mesh_of(SIZE)


def on_one(function: Callable[..., Any], *args: Any) -> Any:
    """What JAX computes on one device of this rank."""
    return jax.tree.map(np.asarray, jax.jit(function)(*args))


def test_reductions(mesh: Mesh) -> None:
    x = values(MATRIX)
    every = lambda x: {
        "sum": x.sum(),
        "rows": x.sum(axis=0),
        "max": x.max(axis=1),
        "mean": x.mean(),
        "product": jnp.prod(x, axis=1),
        "any": (x > 2).any(axis=0),
        "argmax": jnp.argmax(x, axis=1),
        "norm": jnp.linalg.norm(x),
        "running": jnp.cumsum(x, axis=1),
        "sorted": jnp.sort(x, axis=0),
        "taken": x[:, jnp.array([0, 5, 3])],
        "turned": jnp.roll(x, 3, axis=1),
        "transposed": x.T + 1,
    }
    want = on_one(every, x)
    for spec in (P("i", "j"), P(("j", "i"))):
        check(jax.jit(every)(put(x, mesh, *spec)), want, rtol=1e-5, atol=1e-5, what=f"{spec} ")


def test_matmul_of_all_shardings(mesh: Mesh) -> None:
    specs = (P(), P("i"), P("j"), P(None, "i"), P("i", "j"), P("j", "i"), P(None, ("i", "j")))
    a, b = values((8, 4 * SIZE)), values((4 * SIZE, 16), seed=1)
    pairs = list(itertools.product(specs, specs))
    # Every third result keeps the sharding that XLA chooses.
    results = [None if number % 3 == 0 else NamedSharding(mesh, specs[number % 7]) for number in range(len(pairs))]
    program = lambda lefts, rights: [x @ y for x, y in itertools.product(lefts, rights)]
    got = jax.jit(program, out_shardings=results)([put(a, mesh, *s) for s in specs], [put(b, mesh, *s) for s in specs])
    check(got, [a @ b] * len(pairs), rtol=1e-4, atol=1e-5)
    for y, (left, right), sharding in zip(got, pairs, results, strict=True):
        assert sharding is None or y.sharding.is_equivalent_to(sharding, 2), (left, right)


def test_resharding(mesh: Mesh) -> None:
    x = values(MATRIX)
    pairs = list(itertools.product(SPECS, SPECS))
    wanted = [NamedSharding(mesh, after) for _, after in pairs]
    program = jax.jit(lambda xs: [x for x in xs for _ in SPECS], out_shardings=wanted)
    got = program([put(x, mesh, *spec) for spec in SPECS])
    check(got, [x] * len(pairs))
    for y, sharding in zip(got, wanted, strict=True):
        assert y.sharding.is_equivalent_to(sharding, 2)


def test_resharding_outside_of_programs(mesh: Mesh) -> None:
    x = values(MATRIX)
    for before, after in itertools.pairwise((*SPECS, P(), P("j", "i"), P("i"))):
        moved = jax.device_put(put(x, mesh, *before), NamedSharding(mesh, after))
        check(moved, x, what=f"{before} -> {after} ")
        assert moved.sharding.is_equivalent_to(NamedSharding(mesh, after), 2)


def test_another_order_of_the_devices(line: Mesh) -> None:
    x = values(MATRIX)
    backwards = mesh_of(SIZE, order=range(SIZE)[::-1])
    y = jax.device_put(put(x, line, None, "i"), NamedSharding(backwards, P("i")))
    check(y, x)
    check(jax.jit(lambda y: (y @ y.T, y.sum()))(y), (x @ x.T, x.sum()), rtol=1e-4, atol=1e-5)


def test_constraints(mesh: Mesh) -> None:
    x = values((8, 8))

    def program(x: Array) -> Array:
        for spec in (P("i"), P(None, "j"), P("j", "i"), P()):
            x = jnp.sin(lax.with_sharding_constraint(x, NamedSharding(mesh, spec)) @ x.T)
        return x

    check(jax.jit(program)(put(x, mesh, "i", "j")), on_one(program, x), rtol=1e-4, atol=1e-4)


def network(params: list[Array], x: Array, y: Array) -> Array:
    for weights in params[:-1]:
        x = jnp.tanh(x @ weights)
    return jnp.mean((x @ params[-1] - y) ** 2)


SHAPES = ((8, 16), (16, 12), (12, 4))


def test_training_steps(turned: Mesh) -> None:
    """Data along one axis, the model along the other, donated parameters."""
    params = [0.3 * values(shape, seed=k) for k, shape in enumerate(SHAPES)]
    specs = [(None, "j"), ("j", None), (None, "j")]
    x, y = values((4 * SIZE, 8), seed=7), values((4 * SIZE, 4), seed=8)

    def step(params: list[Array], x: Array, y: Array) -> tuple[list[Array], Array]:
        loss, slopes = jax.value_and_grad(network)(params, x, y)
        return jax.tree.map(lambda w, dw: w - 0.1 * dw, params, slopes), loss

    given = [put(w, turned, *spec) for w, spec in zip(params, specs, strict=True)]
    shardings = [w.sharding for w in given]
    train = jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))
    batch = (put(x, turned, "i"), put(y, turned, "i"))
    want = params
    for _ in range(4):
        before = given
        given, loss = train(given, *batch)
        want, expected = on_one(step, want, x, y)
        check(loss, expected, rtol=1e-4)
        assert all(w.is_deleted() for w in before)
    check(given, want, rtol=1e-4, atol=1e-5)


def test_more_derivatives(line: Mesh) -> None:
    params = [0.3 * values(shape, seed=k) for k, shape in enumerate(SHAPES)]
    x, y = values((4 * SIZE, 8), seed=7), values((4 * SIZE, 4), seed=8)

    def program(params: list[Array], x: Array, y: Array) -> Any:
        loss = lambda params: network(params, x, y)
        along = jax.jvp(jax.grad(loss), (params,), (params,))  # the Hessian's product with a vector
        each = jax.vmap(jax.grad(network), in_axes=(None, 0, 0))(params, x[:, None], y[:, None])
        return along, each

    got = jax.jit(program)([put(w, line) for w in params], put(x, line, "i"), put(y, line, "i"))
    check(got, on_one(program, params, x, y), rtol=1e-3, atol=1e-4)


def test_control_flow(mesh: Mesh) -> None:
    x = values((8, 8)) / 4

    def program(x: Array) -> dict[str, Any]:
        def body(y: Array, k: Array) -> tuple[Array, Array]:
            y = lax.cond(k % 2 == 0, lambda y: y @ y.T, lambda y: y - y.mean(axis=0, keepdims=True), y)
            return y / jnp.abs(y).max(), y.sum()

        def until(state: tuple[Array, Array]) -> tuple[Array, Array]:
            y, count = state
            return y @ x, count + 1

        return {
            "scan": lax.scan(body, x, jnp.arange(4)),
            # the number of turns comes from all shards
            "while": lax.while_loop(lambda state: jnp.linalg.norm(state[0]) > 0.1, until, (x, jnp.int32(0))),
            "map": lax.map(lambda row: row / row.sum(), x),
            "switch": lax.switch(jnp.argmax(x.sum(axis=1)) % 3, [jnp.sort, lambda x: x.T, lambda x: x @ x], x),
        }

    want = on_one(program, x)
    assert want["while"][1] > 1
    check(jax.jit(program)(put(x, mesh, "i", "j")), want, rtol=1e-3, atol=1e-4)


def test_operations_outside_of_programs(line: Mesh) -> None:
    x, y = values(MATRIX), values(MATRIX, seed=1)
    a, b = put(x, line, None, "i"), put(y, line, "i")
    check([a + b, a.T, (a * b).sum(), jnp.dot(a, b.T)], [x + y, x.T, (x * y).sum(), x @ y.T], rtol=1e-4, atol=1e-4)
    assert float((a * b).sum()) == pytest.approx((x * y).sum(), rel=1e-4)  # a number that each rank has
    with pytest.raises(RuntimeError, match="spans non-addressable"):
        np.asarray(a)


def test_lowered_before_the_call(mesh: Mesh) -> None:
    x = put(values(MATRIX), mesh, "i", "j")
    lowered = jax.jit(lambda x: jnp.sin(x).sum(axis=0)).lower(
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    )
    compiled = lowered.compile()
    check(
        [compiled(x), compiled(2 * x)], [np.sin(k * values(MATRIX)).sum(axis=0) for k in (1, 2)], rtol=1e-4, atol=1e-5
    )
    assert "all-reduce" in compiled.as_text() or mesh.shape["i"] == 1


def test_arrays_from_what_each_rank_has(line: Mesh) -> None:
    x = values((2 * SIZE, 3))
    own = x[2 * RANK : 2 * RANK + 2]
    rows = jax.make_array_from_process_local_data(NamedSharding(line, P("i")), own)
    check(rows, x)
    single = jax.make_array_from_single_device_arrays(x.shape, rows.sharding, [jnp.asarray(own)])
    check([single, jax.jit(lambda a, b: (a * b).sum(axis=0))(rows, single)], [x, (x * x).sum(axis=0)], rtol=1e-5)
    everywhere = jax.make_array_from_process_local_data(NamedSharding(line, P()), x)
    assert everywhere.is_fully_replicated
    np.testing.assert_array_equal(np.asarray(everywhere), x)


def test_random_numbers(mesh: Mesh) -> None:
    """The same numbers on any number of devices."""
    draw = lambda key: jax.random.normal(key, (8, 8))
    want = on_one(draw, jax.random.key(3))
    for spec in (P("i", "j"), P(("j", "i")), P()):
        check(jax.jit(draw, out_shardings=NamedSharding(mesh, spec))(jax.random.key(3)), want, rtol=1e-6, atol=1e-6)


def test_axis_index_beside_axes_of_xla() -> None:
    """Inside, one axis is the program's; the other one stays XLA's."""
    mesh = mesh_of(2, SIZE // 2)
    x = values((4, 8))

    def block(x: Array) -> Array:
        return lax.psum(x, "i") @ jnp.ones((8, 3)) + lax.axis_index("i").astype(x.dtype)

    f = jax.shard_map(block, mesh=mesh, in_specs=P("i"), out_specs=P("i"), axis_names={"i"})
    n = mesh.shape["i"]
    total = x.reshape(n, -1, 8).sum(axis=0) @ np.ones((8, 3), np.float32)
    want = np.concatenate([total + k for k in range(n)])
    check(jax.jit(f)(put(x, mesh, "i", "j")), want, rtol=1e-4, atol=1e-5)


def test_explicit_axes() -> None:
    """Shardings in types: JAX, not XLA, says where a sum comes from."""
    mesh = jax.make_mesh((SIZE // 2, 2), ("i", "j"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    a, b = values((8, 4)), values((4, 8), seed=1)
    with jax.set_mesh(mesh):
        x, y = jax.device_put(a, P("i", "j")), jax.device_put(b, P("j", None))
        got = jax.jit(lambda x, y: jnp.einsum("ab,bc->ac", x, y, out_sharding=P("i")))(x, y)
        assert got.sharding.spec == P("i", None)
        check([got, jax.sharding.reshard(got, P("j", "i"))], [a @ b] * 2, rtol=1e-5, atol=1e-5)
