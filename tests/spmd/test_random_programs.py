"""Random programs. They are the same on every rank, since all ranks draw from one seed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from jax import lax

import pycollective as pc
from tests.cases import values
from tests.collective.programs import once, oracle_devices
from tests.spmd.cases import assert_close, own
from tests.spmd.conftest import LOCAL
from tests.under_mpirun import SIZE

Array = Any
Function = Callable[[Any], Any]

# There is no database and no deadline: either could make one rank draw or stop differently from the others.
agreed = settings(
    max_examples=5 if SIZE <= 2 else 4,  # for each number of local devices; each compiles a program
    deadline=None,
    database=None,
    derandomize=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
SEED = seed(20_261_121)

SOAK = int(os.environ.get("PYCOLLECTIVE_TEST_SOAK", "200"))
"""Random collectives, over all numbers of local devices; 20000 for a long run."""


# Against jax.pmap, with gradients -------------------------------------------------------------------------


def _ring(step: int) -> list[tuple[int, int]]:
    n = lax.axis_size("i")
    return [(k, (k + step) % n) for k in range(n)]


def _twice(x: Array) -> Array:
    """Sends blocks to every device and back, with a computation between."""
    blocks = jnp.stack([(k + 1) * x for k in range(lax.axis_size("i"))])
    sent = jnp.sin(lax.all_to_all(blocks, "i", 0, 0))
    return lax.all_to_all(sent, "i", 0, 0).mean(axis=0)


def _scattered(x: Array) -> Array:
    blocks = jnp.stack([jnp.cos(k + x) for k in range(lax.axis_size("i"))])
    return lax.all_gather(lax.psum_scatter(blocks, "i"), "i").mean(axis=0)


def _flat(x: Array) -> Array:
    """Sums and gathers with ``tiled=True``, where a device gets a part of the array."""
    n = lax.axis_size("i")
    padded = jnp.pad(jnp.ravel(x), (0, -x.size % n))
    mine = lax.psum_scatter(padded, "i", tiled=True)
    return x + lax.all_gather(mine, "i", tiled=True)[: x.size].reshape(x.shape) / 8


STEPS: dict[str, Function] = {
    "sum": lambda x: lax.psum(x, "i") / 4,
    "mean": lambda x: lax.pmean(x, "i"),
    "max": lambda x: lax.pmax(lax.stop_gradient(x), "i") + x,  # JAX has no derivative of pmax
    "gather": lambda x: lax.all_gather(x, "i").mean(axis=0),
    "shift": lambda x: lax.ppermute(x, "i", _ring(1)),
    "shift back": lambda x: lax.ppermute(x, "i", _ring(-1)[1:]),
    "scatter and gather": _scattered,
    "tiled": _flat,
    "all_to_all twice": _twice,
    "index": lambda x: x + lax.axis_index("i").astype(x.dtype) / 4,
    "sin": jnp.sin,
    "tanh": jnp.tanh,
    "square": lambda x: x * jnp.cos(x),
    "reverse": lambda x: x[..., ::-1] if x.ndim else x,
}


def _scan(f: Function) -> Function:
    return lambda x: lax.scan(lambda c, k: (f(c) + k, c.sum()), x, jnp.arange(2.0))[0]


def _cond(f: Function) -> Function:
    # All devices take the same branch. The other branch has a collective too.
    return lambda x: lax.cond(lax.pmax(lax.stop_gradient(x).sum(), "i") > 0, f, lambda x: lax.pmean(x, "i"), x)


def _vmap(f: Function) -> Function:
    def inner(y: Array) -> Array:
        return lax.psum(f(y), ("j", "i")) / 8 + lax.axis_index("j").astype(y.dtype)

    return lambda x: jax.vmap(inner, axis_name="j")(jnp.stack([x, 2 * x])).mean(axis=0)


def _inner_vmap(f: Function) -> Function:
    return lambda x: jax.vmap(lambda y: f(y) - lax.pmean(y, "j"), axis_name="j", out_axes=-1)(
        jnp.stack([x, jnp.cos(x), 1 + x])
    ).sum(axis=-1)


def _grad(f: Function) -> Function:
    return lambda x: jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(x)


PLACES: dict[str, Callable[[Function], Function]] = {
    "scan": _scan,
    "cond": _cond,
    "checkpoint": jax.checkpoint,
    "vmap": _vmap,
    "inner vmap": _inner_vmap,
    "grad": _grad,
    "jit": jax.jit,
}

programs = st.recursive(
    st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    lambda inner: st.lists(st.tuples(st.sampled_from(sorted(PLACES)), inner), min_size=1, max_size=2),
    max_leaves=2,
)
"""A list of steps, each a name in STEPS or a pair: a name in PLACES, and the program inside it."""


def build(program: Any) -> Function:
    def run(x: Array) -> Array:
        for step in program:
            f = STEPS[step] if isinstance(step, str) else PLACES[step[0]](build(step[1]))
            x = f(x)
        return x

    return run


@SEED
@agreed
@given(
    program=programs.filter(lambda program: any(not isinstance(step, str) for step in program)),
    plain=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=3),
    shape=st.lists(st.integers(1, 4), max_size=2).map(tuple),
)
def test_random_programs(
    program: Any, plain: list[str], shape: tuple[int, ...], world: pc.Communicator, local: int
) -> None:
    total = world.size * local
    fun = build([*plain, *program])
    xs, ws = values((total, *shape)), values((total, *shape), seed=1)

    def both(mapped: Function, ws: Array) -> Function:
        def loss(x: Array) -> tuple[Array, Array]:
            y = mapped(x)
            return jnp.vdot(ws, y), y

        def results(x: Array) -> dict[str, Array]:
            gradient, y = jax.grad(loss, has_aux=True)(x)
            return {"value": y, "gradient": gradient}

        return results

    oracle = jax.pmap(fun, "i", devices=oracle_devices(total))
    want = once(total, lambda: jax.jit(both(oracle, ws))(xs))
    got = pc.jit(both(pc.pmap(fun, "i"), own(world, local, ws)))(own(world, local, xs))
    scale = max(1.0, *(float(np.abs(y).max(initial=0)) for y in jax.tree.leaves(want)))
    assert np.isfinite(scale)
    assert_close(
        world, local, *({k: np.asarray(y) / np.float32(scale) for k, y in z.items()} for z in (got, want)), 1e-3
    )


# Against NumPy, where all bits must be equal, for long runs --------------------------------------------------

DTYPES = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "bfloat16", "float32", "complex64", "bool")


def exact(choose: random.Random, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Returns random values whose sums over 8 devices need no rounding in any dtype (integers may wrap)."""
    draw = np.random.default_rng(choose.getrandbits(32))
    if dtype == "bool":
        return draw.integers(0, 2, shape).astype(bool)
    if "float" in dtype or dtype == "complex64":
        x = draw.integers(-8, 9, shape)
        y = x + 1j * draw.integers(-8, 9, shape) if dtype == "complex64" else x
        return np.asarray(y).astype(jnp.dtype(dtype))
    info = np.iinfo(dtype)
    return draw.integers(info.min, info.max, shape, dtype, endpoint=True)


def in_dtype(total: Any, dtype: Any) -> np.ndarray:
    """Returns a sum of a wide dtype as ``dtype`` holds it."""
    return np.asarray(total).astype(dtype)


def wide_sum(xs: np.ndarray) -> np.ndarray:
    """Returns the sum along the first axis. Integers wrap; of bools it is "or"."""
    if xs.dtype == bool:
        return xs.any(axis=0)
    kind = np.complex128 if xs.dtype.kind == "c" else np.int64 if xs.dtype.kind in "iu" else np.float64
    return xs.astype(kind).sum(axis=0).astype(xs.dtype)


def everywhere(x: np.ndarray, n: int) -> np.ndarray:
    return np.broadcast_to(x, (n, *x.shape))


class Call:
    """One random collective.

    Attributes:
        xs: the operands of all devices, stacked.
        apply: the call of one device.
        want: the results of all devices, stacked.
    """

    def __init__(self, choose: random.Random, n: int) -> None:
        # Most calls are small, as in programs. The larger limits reach all ways in which the transport sends.
        limit = choose.choice([0, 1, 7, 100, 1000, 5000, 40_000, 150_000])
        length = choose.randint(0, limit)
        dtype = choose.choice(DTYPES)
        self.kind = kind = choose.choice(sorted(KINDS))
        if dtype == "complex64" and kind in ("pmax", "pmin"):
            dtype = "float32"
        if dtype == "bool" and kind in ("psum", "psum groups", "psum_scatter", "psum_scatter tiled"):
            dtype = "int32"  # psum of bools counts them, in int32
        length -= length % n if kind in TILED else 0
        shape = (n, length // n) if kind in BLOCKS else (length,)
        self.name = f"{kind} of {dtype}{list(shape)}"
        self.xs = exact(choose, (n, *shape), dtype)
        self.apply, self.want = KINDS[kind](choose, n, self.xs)


def _groups(choose: random.Random, n: int) -> list[list[int]]:
    """Returns a random partition into groups of equal sizes."""
    size = choose.choice([k for k in range(1, n + 1) if n % k == 0])
    order = choose.sample(range(n), n)
    return [order[k : k + size] for k in range(0, n, size)]


def _in_groups(groups: list[list[int]], xs: np.ndarray, of: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Applies ``of``, from a group's operands to its results, to each group. Returns the results of all devices."""
    results: list[Any] = [None] * len(xs)
    for members in groups:
        for place, y in zip(members, of(xs[members]), strict=True):
            results[place] = y
    return np.stack(results)


def _psum(choose: random.Random, n: int, xs: np.ndarray) -> Any:
    return lambda x: lax.psum(x, "i"), everywhere(wide_sum(xs), n)


def _psum_groups(choose: random.Random, n: int, xs: np.ndarray) -> Any:
    groups = _groups(choose, n)
    want = _in_groups(groups, xs, lambda part: everywhere(wide_sum(part), len(part)))
    return lambda x: lax.psum(x, "i", axis_index_groups=groups), want


def _pmax(choose: random.Random, n: int, xs: np.ndarray) -> Any:
    return lambda x: lax.pmax(x, "i"), everywhere(xs.max(axis=0), n)


def _pmin(choose: random.Random, n: int, xs: np.ndarray) -> Any:
    return lambda x: lax.pmin(x, "i"), everywhere(xs.min(axis=0), n)


def _gather(choose: random.Random, n: int, xs: np.ndarray) -> Any:
    if choose.random() < 0.5:
        return lambda x: lax.all_gather(x, "i", axis=1), everywhere(np.moveaxis(xs, 0, 1), n)
    return lambda x: lax.all_gather(x, "i", tiled=True), everywhere(xs.reshape(-1), n)


def _gather_groups(choose: random.Random, n: int, xs: np.ndarray) -> Any:
    groups = _groups(choose, n)
    want = _in_groups(groups, xs, lambda part: everywhere(part, len(part)))
    return lambda x: lax.all_gather(x, "i", axis_index_groups=groups), want


def _scatter(choose: random.Random, n: int, xs: np.ndarray) -> Any:
    return lambda x: lax.psum_scatter(x, "i"), wide_sum(xs)


def _scatter_tiled(choose: random.Random, n: int, xs: np.ndarray) -> Any:
    return lambda x: lax.psum_scatter(x, "i", tiled=True), wide_sum(xs).reshape(n, -1)


def _exchange(choose: random.Random, n: int, xs: np.ndarray) -> Any:
    return lambda x: lax.all_to_all(x, "i", 0, 0), xs.swapaxes(0, 1)


def _exchange_tiled(choose: random.Random, n: int, xs: np.ndarray) -> Any:
    want = xs.reshape(n, n, xs.shape[1] // n).swapaxes(0, 1).reshape(xs.shape)
    return lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True), want


def _permute(choose: random.Random, n: int, xs: np.ndarray) -> Any:
    count = choose.randint(0, n)
    perm = list(zip(choose.sample(range(n), count), choose.sample(range(n), count), strict=True))
    want = np.zeros_like(xs)
    for source, dest in perm:
        want[dest] = xs[source]
    return lambda x: lax.ppermute(x, "i", perm), want


def _broadcast(choose: random.Random, n: int, xs: np.ndarray) -> Any:
    source = choose.randrange(n)
    return lambda x: lax.pbroadcast(x, "i", source), everywhere(xs[source], n)


KINDS: dict[str, Callable[[random.Random, int, np.ndarray], Any]] = {
    "psum": _psum,
    "psum groups": _psum_groups,
    "pmax": _pmax,
    "pmin": _pmin,
    "all_gather": _gather,
    "all_gather groups": _gather_groups,
    "psum_scatter": _scatter,
    "psum_scatter tiled": _scatter_tiled,
    "all_to_all": _exchange,
    "all_to_all tiled": _exchange_tiled,
    "ppermute": _permute,
    "pbroadcast": _broadcast,
}
BLOCKS = {"psum_scatter", "all_to_all"}
"""The calls whose operands have one row for each device."""
TILED = {"psum_scatter tiled", "all_to_all tiled"}
"""The calls whose operands have a length that is a multiple of the number of devices."""


@pytest.fixture
def patient(request: pytest.FixtureRequest) -> None:
    if SOAK > 2000 and float(request.config.getini("faulthandler_timeout")) < SOAK / 20:
        pytest.fail(f"LOUD: add -o faulthandler_timeout={SOAK // 20} for PYCOLLECTIVE_TEST_SOAK={SOAK}")


def test_soak(world: pc.Communicator, local: int, patient: None) -> None:
    """Runs programs of 1 to 20 independent calls, each twice at once."""
    n = world.size * local
    left = -(-SOAK // len(LOCAL))
    choose = random.Random(1000 * n + local)  # the same on all ranks
    while left > 0:
        calls = [Call(choose, n) for _ in range(min(left, choose.randint(1, 20)))]
        left -= len(calls)
        loop = choose.random() < 0.2

        def program(xs: list[Array], calls: list[Call] = calls, loop: bool = loop) -> list[Array]:
            def body(xs: list[Array]) -> list[Array]:
                return [call.apply(x) for call, x in zip(calls, xs, strict=True)]

            return lax.scan(lambda _, __: (None, body(xs)), None, None, length=2)[1] if loop else body(xs)

        mapped = pc.pmap(program, "i")
        # These are NumPy's arrays; JAX would compile a program to cut its own.
        operands = [own(world, local, call.xs) for call in calls]
        rounds = [mapped(operands) for _ in range(2)]
        for results in rounds:
            for call, ys in zip(calls, results, strict=True):
                for got in np.moveaxis(np.asarray(ys), 1, 0) if loop else [np.asarray(ys)]:
                    want = own(world, local, call.want)
                    assert got.dtype == want.dtype, call.name
                    assert got.shape == want.shape, call.name
                    assert got.tobytes() == want.tobytes(), call.name
