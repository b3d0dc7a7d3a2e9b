"""pc.pmap against jax.pmap: each collective in all places of a program, and its derivatives and batches."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI

import pycollective as pc
from pycollective.primitives import lowering
from pycollective.ranks.setup import devices_of_this_rank
from tests.cases import check_extrema, special_floats, values
from tests.collective.programs import oracle_devices
from tests.spmd.cases import ALL, EACH, LINEAR, Function, compare, each, own, stacked

Array = Any
Place = Callable[[Function], Function]


def with_all(transform: Place, table: dict[str, Function]) -> dict[str, Function]:
    return {name: transform(fun) for name, fun in table.items()}


def itself(f: Function) -> Function:
    return f


SINGLE = {name: fun for name, fun in LINEAR.items() if "groups" not in name}
"""JAX cannot batch groups."""


def test_value(world: pc.Communicator, local: int) -> None:
    compare(world, local, ALL, stacked(world, local))


def in_scan(f: Function) -> Function:
    return lambda x: lax.scan(lambda c, k: (c + 1, f(k * x)), 0, jnp.arange(1.0, 3.0))[1].sum(axis=0)


def in_fori_loop(f: Function) -> Function:
    return lambda x: lax.fori_loop(0, 2, lambda k, c: c + f((k + 1).astype(x.dtype) * x), jnp.zeros_like(f(x)))


def in_while_loop(f: Function) -> Function:
    # The condition has a collective too.
    def loop(x: Array) -> Array:
        start = (0, jnp.zeros_like(f(x)))
        return lax.while_loop(lambda c: lax.pmax(c[0], "i") < 2, lambda c: (c[0] + 1, c[1] + f(x)), start)[1]

    return loop


def in_cond(f: Function) -> Function:
    return lambda x: lax.cond(lax.psum(x.size, "i") > 0, f, lambda x: 0 * f(x), x)


def in_switch(f: Function) -> Function:
    return lambda x: lax.switch(lax.pmax(jnp.int32(1), "i"), [lambda x: 0 * f(x), lambda x: 3 * f(x)], x)


def in_checkpoint(f: Function) -> Function:
    return jax.checkpoint(lambda x: f(jnp.sin(x)), policy=jax.checkpoint_policies.nothing_saveable)  # type: ignore[no-any-return]


def in_jit(f: Function) -> Function:
    return jax.jit(lambda x: jax.jit(f)(2 * x))


def in_custom_jvp(f: Function) -> Function:
    @jax.custom_jvp
    def g(x: Array) -> Array:
        return f(x)

    g.defjvp(lambda primals, tangents: (f(*primals), 3 * f(*tangents)))  # the 3 shows that JAX has used this rule
    return g


def in_custom_vjp(f: Function) -> Function:
    @jax.custom_vjp
    def g(x: Array) -> Array:
        return f(x)

    g.defvjp(lambda x: (f(x), x), lambda x, ct: (5 * jax.vjp(f, x)[1](ct)[0],))
    return g


def in_vmap(f: Function) -> Function:
    return lambda x: jax.vmap(f)(jnp.stack([x, 2 * x]))


def in_named_vmap(f: Function) -> Function:
    return lambda x: jax.vmap(
        lambda y: lax.psum(f(y), ("i", "j")) * (1 + lax.axis_index("j")).astype(y.dtype), axis_name="j"
    )(jnp.stack([x, 2 * x]))


VALUES = (in_scan, in_fori_loop, in_while_loop, in_cond, in_switch, in_jit, in_custom_jvp, in_custom_vjp, in_vmap)


def table_for(place: Place) -> dict[str, Function]:
    table = LINEAR if place is itself else EACH
    return {name: f for name, f in table.items() if name in SINGLE or place not in (in_vmap, in_named_vmap)}


@pytest.mark.parametrize("place", [*VALUES, in_checkpoint, in_named_vmap], ids=lambda place: place.__name__)
def test_value_in(place: Place, world: pc.Communicator, few: int) -> None:
    compare(world, few, with_all(place, table_for(place)), stacked(world, few), tolerance=1e-4)


def ramp(y: Array) -> Array:
    return 1 + jnp.arange(y.size, dtype=y.dtype).reshape(y.shape)


def gradient(f: Function) -> Function:
    return jax.grad(lambda x: jnp.sum(jnp.sin(f(x)) * ramp(f(x))))


PLACES = (in_scan, in_cond, in_switch, in_checkpoint, in_jit, in_custom_jvp, in_custom_vjp, in_vmap)


@pytest.mark.parametrize("place", [itself, *PLACES], ids=lambda place: place.__name__)
def test_gradient_inside(place: Place, world: pc.Communicator, few: int) -> None:
    gradients = with_all(lambda f: gradient(place(f)), table_for(place))
    compare(world, few, gradients, stacked(world, few), tolerance=1e-4)


def test_jvp_linearize_and_second_order_inside(world: pc.Communicator, few: int) -> None:
    def jvp(f: Function) -> Callable[..., Any]:
        return lambda x: jax.jvp(lambda x: f(jnp.sin(x)), (x,), (jnp.cos(x),))

    def linear(f: Function) -> Callable[..., Any]:
        return lambda x: jax.linearize(lambda x: f(jnp.sin(x)), x)[1](x)

    def second(f: Function) -> Callable[..., Any]:
        return lambda x: jax.jvp(gradient(f), (x,), (x,))[1]

    def reverse_twice(f: Function) -> Callable[..., Any]:
        return lambda x: jax.grad(lambda x: jnp.vdot(gradient(f)(x), x))(x)

    for transform in (jvp, linear, second, reverse_twice):
        compare(world, few, with_all(transform, EACH), stacked(world, few), tolerance=1e-4)


# From outside ---------------------------------------------------------------------------------------------


def loss_of(mapped: Callable[..., Any]) -> Callable[..., Array]:
    """Returns the loss of this rank's results. The sum of these over ranks is the loss of one process."""
    return lambda *args: sum(jnp.sum(jnp.sin(y) * ramp(y[0])[None]) for y in jax.tree.leaves(mapped(*args)))


@pytest.mark.parametrize(
    "place", [itself, in_scan, in_checkpoint, in_custom_jvp, in_custom_vjp], ids=lambda place: place.__name__
)
def test_gradient_outside(place: Place, world: pc.Communicator, few: int) -> None:
    around = lambda mapped: jax.jit(jax.grad(loss_of(mapped)))
    fun = each(with_all(place, table_for(place)))
    compare(world, few, fun, stacked(world, few), around=around, tolerance=1e-4)


def test_gradient_outside_step_by_step(world: pc.Communicator, few: int) -> None:
    around = lambda mapped: jax.grad(loss_of(mapped))
    compare(world, few, each(EACH), stacked(world, few), around=around, tolerance=1e-4)


def test_gradient_outside_of_shared_values(world: pc.Communicator, local: int) -> None:
    # The gradient of a value that all devices share is the sum over all of them, on every rank.
    xs, w = stacked(world, local), stacked(world, 1, seed=9)[0]

    def fun(w: Array, x: Array) -> Array:
        return lax.pmean(jnp.tanh(w * x), "i") + w * x

    def loss(mapped: Callable[..., Any]) -> Callable[..., Array]:
        return lambda w, x: jnp.sum(jnp.sin(mapped(w, x)))

    total = world.size * local
    oracle = jax.pmap(fun, "i", in_axes=(None, 0), devices=oracle_devices(total))
    want = jax.grad(loss(oracle))(w, xs)
    got = jax.grad(loss(pc.pmap(fun, "i", in_axes=(None, 0))))(w, own(world, local, xs))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_gradient_outside_of_a_shared_loss(world: pc.Communicator, local: int) -> None:
    xs, w = stacked(world, local), stacked(world, 1, seed=9)[0]

    def fun(w: Array, x: Array) -> Array:
        return lax.pmean(jnp.sum(jnp.tanh(w * x)), "i")

    total = world.size * local
    options: dict[str, Any] = {"in_axes": (None, 0), "out_axes": None}
    want = jax.value_and_grad(jax.pmap(fun, "i", devices=oracle_devices(total), **options))(w, xs)
    got = jax.value_and_grad(pc.pmap(fun, "i", **options))(w, own(world, local, xs))
    for mine, expected in zip(got, want, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)


def test_jvp_outside(world: pc.Communicator, few: int) -> None:
    around = lambda mapped: lambda x: jax.jvp(mapped, (x,), (jnp.sin(x),))
    compare(world, few, each(with_all(in_custom_jvp, LINEAR)), stacked(world, few), around=around, tolerance=1e-4)


def test_vmap_outside(world: pc.Communicator, few: int) -> None:
    def around(mapped: Callable[..., Any]) -> Callable[..., Any]:
        batched = lambda x: jax.vmap(mapped)(jnp.stack([x, 2 * x]))
        return lambda x: jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1), batched(x))

    compare(world, few, SINGLE, stacked(world, few), around=around, tolerance=1e-4)


@pytest.mark.parametrize("compiler", [jax.jit, pc.jit], ids=["jax.jit", "pc.jit"])
def test_in_a_compiled_function(compiler: Any, world: pc.Communicator, local: int) -> None:
    mapped = pc.pmap(lambda x: lax.psum(x, "i"), "i")
    xs = stacked(world, local)
    got = compiler(lambda x: mapped(jnp.sin(mapped(x))) + 1)(own(world, local, xs))
    want = world.size * local * np.sin(xs.sum(axis=0)) + 1
    np.testing.assert_allclose(got, np.broadcast_to(want, got.shape), rtol=1e-4, atol=1e-4)


# The signature --------------------------------------------------------------------------------------------


def test_axes_of_trees(world: pc.Communicator, local: int) -> None:
    n = world.size * local
    tree = {"a": stacked(world, local), "b": (np.moveaxis(stacked(world, local, seed=1), 0, 2), np.float32(3))}

    def fun(tree: dict[str, Any], c: Array) -> Any:
        a, (b, k) = tree["a"], tree["b"]
        return {"sum": lax.psum(a * k, "i"), "both": (a + b, lax.psum(b.sum(), "i") + c)}

    axes = ({"a": 0, "b": (2, None)}, None)
    out = {"sum": 1, "both": (2, None)}
    want = jax.pmap(fun, "i", in_axes=axes, out_axes=out, devices=oracle_devices(n))(tree, 5.0)
    part = slice(world.rank * local, (world.rank + 1) * local)
    mine = {"a": tree["a"][part], "b": (tree["b"][0][..., part], tree["b"][1])}
    got = pc.pmap(fun, "i", in_axes=axes, out_axes=out)(mine, 5.0)
    np.testing.assert_allclose(got["sum"], want["sum"][:, part], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["both"][0], want["both"][0][..., part], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(got["both"][1], want["both"][1], rtol=1e-5, atol=1e-5)


def test_static_keyword_and_donated_arguments(world: pc.Communicator, local: int) -> None:
    def fun(x: Array, power: int, *, scale: Array) -> Array:
        assert isinstance(power, int)
        return lax.psum(x**power, "i") * scale

    xs = stacked(world, local)
    mapped = pc.pmap(fun, "i", static_broadcasted_argnums=1, donate_argnums=0)
    x = jax.device_put(own(world, local, xs), pc.pmap(lambda x: x)(own(world, local, xs)).sharding)
    got = mapped(x, 2, scale=jnp.arange(1.0, local + 1))
    scale = np.arange(1.0, local + 1).reshape(-1, 1, 1)
    np.testing.assert_allclose(got, (xs**2).sum(axis=0) * scale, rtol=1e-5)
    assert x.is_deleted()


def test_as_decorators(world: pc.Communicator, local: int) -> None:
    @pc.pmap(axis_name="i", in_axes=(None, 0), out_axes=None)
    def total(w: Array, x: Array) -> Array:
        """Doc."""
        return lax.psum(w * x, "i")

    xs = stacked(world, local)
    assert total.__name__ == "total"
    assert total.__doc__ == "Doc."
    np.testing.assert_allclose(total(2.0, own(world, local, xs)), 2 * xs.sum(axis=0), rtol=1e-5, atol=1e-5)
    assert re.search("pycollective_(device_|async_)?allreduce", total.lower(2.0, own(world, local, xs)).as_text())
    total.clear_cache()


def test_without_a_name(world: pc.Communicator, local: int) -> None:
    xs = own(world, local, stacked(world, local))
    np.testing.assert_array_equal(pc.pmap(lambda x: 2 * x)(xs), 2 * xs)


def test_devices_and_axis_size(world: pc.Communicator, local: int) -> None:
    devices = devices_of_this_rank()[::-1][:local]
    mapped = pc.pmap(lambda x: lax.psum(x, "i") + lax.axis_index("i").astype(x.dtype), "i", devices=devices)
    total = world.size * local
    got = mapped(jnp.ones(local))
    assert list(got) == [total + world.rank * local + k for k in range(local)]
    assert set(got.sharding.device_set) == set(devices)
    shared = pc.pmap(lambda x: lax.psum(x, "i"), "i", in_axes=None, axis_size=total)(1.0)
    assert shared.shape == (local,)
    assert (shared == total).all()


def test_compiled_once(world: pc.Communicator, local: int) -> None:
    traces = []

    @pc.pmap(axis_name="i")
    def f(x: Array) -> Array:
        traces.append(x.shape)
        return lax.psum(x, "i")

    x = own(world, local, stacked(world, local))
    for _ in range(3):
        f(x)
    assert len(traces) == 1


def test_a_communicator_inside(world: pc.Communicator, local: int) -> None:
    # A communicator is an axis of ranks: each local device takes part on its own lane.
    xs = stacked(world, local)
    got = pc.pmap(lambda x: pc.psum(x, world) * lax.axis_size("i"), "i")(own(world, local, xs))
    want = world.size * local * xs.reshape(world.size, local, *xs.shape[1:]).sum(axis=0)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_sums_are_the_same_bit_by_bit(world: pc.Communicator, local: int) -> None:
    for length in (1, 7, 1000, 70_000, 1_200_001):  # both ways of the transport, with lengths that cannot be cut evenly
        xs = stacked(world, local, shape=(length,))
        sums = np.asarray(pc.pmap(lambda x: lax.psum(x, "i"), "i")(own(world, local, xs)))
        everywhere = np.asarray(pc.all_gather(sums, world))
        assert len({part.tobytes() for rank in everywhere for part in rank}) == 1
        np.testing.assert_allclose(sums[0], xs.sum(axis=0), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [0, 1, 5, 8191, 65_536, 65_537])  # 256 KiB is the largest of the small
def test_lengths(length: int, world: pc.Communicator, local: int) -> None:
    n = world.size * local
    table: dict[str, Function] = {
        "psum": lambda x: lax.psum(x, "i"),
        "psum after": lambda x: lax.psum(2 * x, "i"),  # in place
        "pmax": lambda x: lax.pmax(x, "i"),
        "all_gather": lambda x: lax.all_gather(x, "i"),
        "psum_scatter": lambda x: lax.psum_scatter(jnp.stack([x] * n), "i"),
        "all_to_all": lambda x: lax.all_to_all(jnp.stack([x + k for k in range(n)]), "i", 0, 0),
        "ppermute": lambda x: lax.ppermute(x, "i", [(k, (k + 1) % n) for k in range(n)]),
    }
    compare(world, local, table, stacked(world, local, shape=(length,)), tolerance=1e-4)


def test_linear_solvers(world: pc.Communicator, few: int) -> None:
    # The parameters of these equations have jaxprs in a named tuple.
    n = world.size * few
    rows = np.random.default_rng(0).normal(size=(n, 2, 2 * n)).astype(np.float32)

    def fun(a: Array) -> Any:
        def apply(v: Array) -> Array:  # sum over devices of a^T a, positive definite, plus the identity
            return v + lax.psum(a.T @ (a @ v), "i")

        b = jnp.arange(2.0 * n, dtype=jnp.float32)
        x = jax.scipy.sparse.linalg.cg(apply, b, tol=1e-6)[0]
        return x, jax.grad(lambda s: jax.scipy.sparse.linalg.cg(apply, s * b, tol=1e-6)[0].sum())(1.0)

    compare(world, few, fun, rows, tolerance=2e-3)


def test_several_pieces(world: pc.Communicator, local: int) -> None:
    # Above 4 MiB one piece is sent while another is combined and a third is copied. The last piece is shorter.
    def fun(x: Array) -> Any:
        return lax.psum(x, "i"), lax.pmax(x + 1, "i")

    xs = stacked(world, local, shape=(1_200_001,))
    compare(world, local, fun, xs, tolerance=1e-4)
    # JAX has no pbroadcast on CPUs.
    last = pc.pmap(lambda x: lax.pbroadcast(x, "i", lax.axis_size("i") - 1), "i")(own(world, local, xs))
    for y in np.asarray(last):
        np.testing.assert_array_equal(y, xs[-1])


@pytest.mark.parametrize("length", [5, 70_001, 1_200_001])
def test_sums_as_bfloat16(length: int, world: pc.Communicator, local: int) -> None:
    # The local devices' operands are added in float32. The sum that a rank sends, and the total, are rounded.
    def rounded(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return x.astype(jnp.bfloat16).astype(np.float32)

    xs = stacked(world, local, shape=(length,))
    ranks = [reduce(np.add, rows) for rows in xs.reshape(world.size, local, length)]
    want = ranks[0] if world.size == 1 else rounded(reduce(np.add, map(rounded, ranks)))
    got = pc.pmap(lambda x: pc.psum(x, "i", wire_dtype=jnp.bfloat16), "i")(own(world, local, xs))
    for y in np.asarray(got):
        assert y.tobytes() == want.tobytes()


DTYPES = ("bool", "int8", "uint16", "int64", "float16", "bfloat16", "float64", "complex64", "float8_e5m2")


def test_dtypes(world: pc.Communicator, local: int) -> None:
    def fun(xs: dict[str, Array]) -> dict[str, tuple[Array, Array]]:
        return {dtype: (lax.psum(x, "i"), lax.all_gather(x, "i", tiled=True)) for dtype, x in xs.items()}

    with jax.enable_x64(True):
        every = {dtype: values((world.size * local, 6), dtype) for dtype in DTYPES}
        got = pc.pmap(fun, "i")({dtype: jnp.asarray(own(world, local, xs)) for dtype, xs in every.items()})
        for dtype, xs in every.items():
            total, gathered = got[dtype]
            wide = np.complex128 if dtype == "complex64" else np.float64 if "float" in dtype else np.int64
            want = xs.astype(wide).sum(axis=0)
            want = want if dtype == "bool" else want.astype(xs.dtype).astype(wide)
            np.testing.assert_allclose(np.asarray(total).astype(wide)[0], want, rtol=1e-6, err_msg=dtype)
            assert np.asarray(gathered)[0].tobytes() == xs.tobytes(), dtype


def test_pbroadcast_and_ragged_all_to_all(world: pc.Communicator, local: int) -> None:
    # JAX has neither of them on CPUs, so the reference is their definition.
    total = world.size * local
    xs = stacked(world, local, shape=(3,))
    for source in {0, total - 1, total // 2}:
        got = pc.pmap(lambda x, source=source: lax.pbroadcast(x, "i", source), "i")(own(world, local, xs))
        np.testing.assert_array_equal(got, np.broadcast_to(xs[source], got.shape))

    # Device s sends the s + 1 rows that start at row d to device d, which puts them at row s * (s + 1) // 2.
    rows = total * (total + 1) // 2
    data = stacked(world, local, shape=(2 * total, 2))
    sizes = np.array([[s + 1] * total for s in range(total)])
    offsets = np.array([[s * (s + 1) // 2] * total for s in range(total)])

    def fun(x: Array, sizes: Array, offsets: Array) -> Array:
        n = lax.axis_size("i")
        received = jnp.arange(1, n + 1)
        return pc.ragged_all_to_all(x, jnp.zeros((rows, 2)), jnp.arange(n), sizes, offsets, received, axis_name="i")

    got = pc.pmap(fun, "i")(*(own(world, local, a) for a in (data, sizes, offsets)))
    for k in range(local):
        d = world.rank * local + k
        want = np.concatenate([data[s, d : d + s + 1] for s in range(total)])
        np.testing.assert_array_equal(got[k], want)


@pytest.mark.parametrize("size", [1, 7, 70_000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_extrema_have_the_same_bits_on_all_devices(dtype: str, size: int, world: pc.Communicator, local: int) -> None:
    if local > 1 and not lowering.HOSTS:
        pytest.skip("LOUD: between the accelerators of a rank the maximum is XLA's, which may lose a NaN")
    total = world.size * local
    special = special_floats(dtype)
    for number in (1, 3, 7):
        xs = [np.resize(np.roll(special, device * number), size) for device in range(total)]
        with jax.enable_x64(True):
            both = pc.pmap(lambda x: (lax.pmax(x, "i"), lax.pmin(x, "i")), "i")(own(world, local, np.stack(xs)))
        blocks = [[np.asarray(y)[device] for y in both] for device in range(local)]
        check_extrema(xs, blocks[0])
        mine = [tuple(y.tobytes() for y in block) for block in blocks]
        assert len({block for rank in MPI.COMM_WORLD.allgather(mine) for block in rank}) == 1
