"""Programs that JAX runs, and its own debugging flags: each against :func:`jax.pmap` or :func:`jax.shard_map`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import pycollective as pc
from pycollective.jax_support import jax_internals
from pycollective.ranks.setup import devices_of_this_rank
from tests.cases import values
from tests.collective.programs import once, oracle_devices
from tests.spmd import cases
from tests.spmd.cases import assert_close, own, stacked
from tests.spmd.test_named import through_a_library
from tests.spmd.test_shard_map import INSIDE, NAMES, assert_blocks, blocks, compare, meshes
from tests.spmd.test_shard_map import own as own_block

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


# Under jax_enable_checks --------------------------------------------------------------------------------------


@pytest.fixture
def checks() -> Iterator[None]:
    with jax.enable_checks(True):
        yield


def _in_loops(x: Array) -> Any:
    forward = lax.scan(lambda c, k: (jnp.sin(k * lax.psum(c, "i")), lax.ppermute(c, "i", [(0, 0)])), x, jnp.arange(2.0))
    again = jax.checkpoint(lambda x: jnp.tanh(lax.pmean(x, "i")))(x)
    either = lax.cond(lax.axis_index("i") >= 0, lambda x: lax.psum(x, "i"), lambda x: lax.pmean(x, "i"), x)
    return forward, again, either, jax.vmap(lambda x: lax.psum(x, ("i", "j")), axis_name="j")(x)


def _of_sines(mapped: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *args: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(mapped(*args))))


def test_checks_of_pmap(checks: None, world: pc.Communicator, few: int) -> None:
    xs = stacked(world, few, shape=(2, 3))
    cases.compare(world, few, _in_loops, xs, around=_of_sines, tolerance=1e-4)
    cases.compare(world, few, _in_loops, np.stack([xs, -xs], axis=1), around=lambda f: jax.vmap(f, 1, 1))


def test_checks_of_shard_map(checks: None, world: pc.Communicator, few: int) -> None:
    total = world.size * few
    xs = values((2 * total, 3))
    fun = lambda x: lax.pmean(
        jnp.sin(lax.scan(lambda c, k: (lax.psum(k * x, "i") + 0 * c, c), x, jnp.arange(2.0))[0]), "i"
    )
    for around, specs in ((lambda f: f, P()), (_of_sines, P("i"))):
        compare(
            world, few, (total,), fun, (P("i"),), P(), xs,
            names=("i",), around=around, result_specs=specs, tolerance=1e-4,
        )  # fmt: skip


def test_checks_of_jit(checks: None, world: pc.Communicator) -> None:
    xs = stacked(world, 1)
    for check_vma in (True, False):
        got = pc.jit(lambda x: lax.psum(x, "i") + x, axis_name="i", check_vma=check_vma)(xs[world.rank])
        np.testing.assert_allclose(got, xs.sum(axis=0) + xs[world.rank], rtol=1e-5, atol=1e-5)


def test_checks_of_what_a_function_closes_over(checks: None, world: pc.Communicator, few: int) -> None:
    xs = stacked(world, few, shape=(3,))
    loss = lambda w, xs: jnp.sum(pc.pmap(lambda x: jnp.tanh(w * lax.psum(x, "i")), "i")(xs))
    got = jax.grad(loss)(np.float32(2), own(world, few, xs))
    total = xs.sum(axis=0)
    np.testing.assert_allclose(got, world.size * few * np.sum(total / np.cosh(2 * total) ** 2), rtol=1e-4)


def test_checks_of_a_program_in_another(checks: None, world: pc.Communicator) -> None:
    mine = stacked(world, 1)[world.rank : world.rank + 1]
    inner = pc.pmap(lambda x: lax.psum(x, ("i", "j")), "j")
    np.testing.assert_allclose(
        pc.pmap(lambda x: inner(x[None])[0], "i")(mine)[0], world.size * stacked(world, 1).sum(axis=0), rtol=1e-4
    )


def test_checks_of_the_primitive_of_a_library(checks: None, world: pc.Communicator) -> None:
    x = stacked(world, 1)[world.rank]
    got = pc.jit(lambda x: through_a_library(lambda y: pc.psum(y, world), x))(x)
    np.testing.assert_allclose(got, stacked(world, 1).sum(axis=0), rtol=1e-5, atol=1e-5)


def test_checks_find_a_wrong_body(checks: None, world: pc.Communicator) -> None:
    # The check of a device program is one: it refuses a body with a variable of another type.
    program = jax.make_jaxpr(pc.pmap(lambda x: lax.psum(x, "i"), "i"))(jnp.ones((1, 3)))
    (call,) = program.eqns
    (eqn,) = [eqn for eqn in call.params["jaxpr"].eqns if "body" in eqn.params]
    body = eqn.params["body"]
    first = body.eqns[0]
    wrong = first.replace(outvars=[jax.extend.core.Var(jax.core.ShapedArray((7,), jnp.float32))])
    params = {**eqn.params, "body": body.replace(eqns=[wrong, *body.eqns[1:]])}
    with pytest.raises(TypeError, match="inconsistently typed|not defined"):
        jax_internals.check(call.params["jaxpr"].jaxpr.replace(eqns=[eqn.replace(params=params)]))


# checkify -----------------------------------------------------------------------------------------------------


def _checked(x: Array) -> Array:
    checkify.check(jnp.all(x < 2.5), "{x} is too large", x=jnp.max(x))
    return lax.psum(x, "i") + lax.cond(jnp.all(x > 0), jnp.log, lambda x: x, x)


def _errors_of(
    world: pc.Communicator, few: int, errors: Any, mapped: Callable[..., Any], oracle: Callable[..., Any]
) -> None:
    """Compares the errors and results of this rank's devices with their part of JAX's."""
    xs = np.arange(world.size * few, dtype=np.float32)
    want = jax.jit(checkify.checkify(oracle, errors=errors))(xs)
    got = pc.jit(checkify.checkify(mapped, errors=errors))(own(world, few, xs))
    for mine, all_ in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        if not np.issubdtype(mine.dtype, np.integer):  # the number of an error's place counts up from call to call
            np.testing.assert_allclose(mine, own(world, few, np.asarray(all_)))
    # JAX counts all devices, and a rank its own.
    lines = [line.split(": ", 1) for line in (want[0].get() or "").splitlines()]
    numbers = [(int(where.removeprefix("at mapped index ")), what) for where, what in lines]
    mine = [(n - world.rank * few, what) for n, what in numbers if n // few == world.rank]
    assert got[0].get() == ("\n".join(f"at mapped index {n}: {what}" for n, what in mine) or None)


@pytest.mark.parametrize("errors", [checkify.user_checks, checkify.all_checks], ids=["user", "all"])
def test_errors_of_pmap(errors: Any, world: pc.Communicator, few: int) -> None:
    oracle = jax.pmap(_checked, "i", devices=oracle_devices(world.size * few))
    _errors_of(world, few, errors, pc.pmap(_checked, "i"), oracle)


@pytest.mark.parametrize("check_vma", [True, False], ids=["typed", "untyped"])
def test_errors_of_shard_map(check_vma: bool, world: pc.Communicator, few: int) -> None:
    mesh, theirs = meshes(world, few, (world.size * few,), ("i",))
    options: dict[str, Any] = {"in_specs": P("i"), "out_specs": P("i"), "check_vma": check_vma}
    fun = lambda x: jnp.log(x - 1) + _checked(x)
    errors = checkify.all_checks
    mapped, oracle = pc.shard_map(fun, mesh=mesh, **options), jax.shard_map(fun, mesh=theirs, **options)
    _errors_of(world, few, errors, mapped, oracle)


def test_errors_of_several_programs(world: pc.Communicator, few: int) -> None:
    # JAX itself can't join the errors of two programs on several devices.
    mapped = pc.pmap(lambda x: checkify.check(x < 1, "too large") or lax.pmean(x, "i") + 1, "i")
    error, _ = checkify.checkify(lambda x: mapped(mapped(x)))(jnp.zeros(few))
    assert error.get() == "\n".join(f"at mapped index {k}: too large (`check` failed)" for k in range(few))


def test_errors_on_one_device(world: pc.Communicator) -> None:
    # They have no axis of devices: JAX joins them with errors of other operations, and in loops.
    log = pc.jit(lambda x: jnp.log(x) + 0 * lax.psum(x, "i"), axis_name="i")
    programs: dict[str, Callable[[Array], Any]] = {
        "jit": lambda x: log(x - 1),
        "and then": lambda x: jnp.sqrt(log(x + 2) - 3),
        "scan": lambda x: lax.scan(lambda c, _: (log(c - 1), None), x, None, length=3)[0],
        "cond": lambda x: lax.cond(x < 5, log, lambda x: x, x - 1),
        "grad": jax.grad(lambda x: log(x - 1)),
        "pmap": lambda x: pc.pmap(lambda x: jnp.log(x - 1) + lax.psum(x, "i"), "i")(x[None]),
    }
    for name, fun in programs.items():
        error, _ = checkify.checkify(fun, errors=checkify.nan_checks)(jnp.float32(0.5))
        want = "sqrt" if name == "and then" else "log"
        assert error.get() == f"nan generated by primitive: {want}.", name


def test_errors_inside(world: pc.Communicator, few: int) -> None:
    mapped = pc.pmap(checkify.checkify(lambda x: checkify.check(x < 1, "{x}", x=x) or lax.psum(x, "i")), "i")
    error, _ = mapped(own(world, few, np.arange(world.size * few, dtype=np.float32)))
    numbers = [(k, world.rank * few + k) for k in range(few)]
    assert error.get() == "\n".join(f"at mapped index {k}: {n}.0 (`check` failed)" for k, n in numbers if n >= 1)


def test_checks_that_nobody_asks_for(world: pc.Communicator, few: int) -> None:
    debug = pc.pmap(lambda x: checkify.debug_check(x < 0, "no") or lax.psum(x, "i"), "i")
    np.testing.assert_array_equal(debug(jnp.ones(few)), world.size * few)
    with pytest.raises(ValueError, match="was not functionalized"):
        pc.pmap(lambda x: checkify.check(x < 0, "no") or lax.psum(x, "i"), "i")(jnp.ones(few))


# How functions and results look -------------------------------------------------------------------------------


def test_a_function_knows_what_it_wraps(world: pc.Communicator) -> None:
    def fun(x: Array) -> Array:
        return x

    mesh = pc.make_mesh((-1,), ("i",))
    for function in (
        pc.pmap(fun, "i"), pc.jit(fun), pc.jit(fun, axis_name="i"), pc.pmap(pc.jit(fun), "i").__wrapped__,
        pc.shard_map(fun, mesh=mesh, in_specs=P("i"), out_specs=P("i")),
    ):  # fmt: skip
        assert function.__wrapped__ is fun
        assert inspect.unwrap(function) is fun


def test_sharding_of_results(world: pc.Communicator) -> None:
    local, sizes = INSIDE
    mesh, _ = meshes(world, local, sizes)
    spec = P(*NAMES)
    step = pc.shard_map(lambda x: x + 1, mesh=mesh, in_specs=spec, out_specs=spec)
    # This rank's own block lies on its own devices, along the parts of the axes inside the rank.
    devices = np.array(devices_of_this_rank()[:local], dtype=object).reshape([axis.local for axis in mesh.axes])
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(devices, NAMES), spec)
    x = jax.device_put(own_block(mesh, values((2 * sizes[0], 2 * sizes[1])), spec), sharding)
    assert step(x).sharding == sharding
    assert step(step(x)).sharding == sharding
    # As with jax.jit(jax.shard_map(...)), XLA chooses how to write it where no argument says.
    assert step(np.asarray(x)).sharding.is_equivalent_to(sharding, 2)


def test_vmap_with_an_axis_of_the_mesh(world: pc.Communicator, few: int) -> None:
    mesh, _ = meshes(world, few, (world.size * few, 1))
    mapped = pc.shard_map(lambda x: lax.psum(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
    xs = np.ones((3, few), np.float32)
    with pytest.raises(
        NotImplementedError, match=r"vmap: expected .* without spmd_axis_name='model', .*\. Leave it out"
    ):
        jax.vmap(mapped, spmd_axis_name="model")(xs)
    # The name of an axis of another mesh says nothing about this one.
    np.testing.assert_array_equal(jax.vmap(mapped, spmd_axis_name="other")(xs), world.size * few * np.ones((3, 1)))


# What is no array ---------------------------------------------------------------------------------------------


def _with_options(x: Array, options: dict[str, Any], scale: Array, f: Callable[[Array], Array]) -> Array:
    assert options["kind"] in ("sum", "max")
    collective = lax.psum if options["kind"] == "sum" else lax.pmax
    return collective(f(x).reshape(options["shape"]) * scale, "i")


def test_arguments_that_are_no_arrays(world: pc.Communicator, few: int) -> None:
    total = world.size * few
    mesh, theirs = meshes(world, few, (total,), ("i",))
    xs = values((total * 6,))
    options: dict[str, Any] = {"in_specs": (P("i"), None, None, None), "out_specs": P()}
    traces: list[str] = []

    def fun(x: Array, options: dict[str, Any], scale: Array, f: Callable[[Array], Array]) -> Array:
        traces.append(options["kind"])
        return _with_options(x, options, scale, f)

    mapped = pc.shard_map(fun, mesh=mesh, **options)
    mine = own(world, 6 * few, xs)
    for kind, shape in (("sum", (2, 3)), ("max", (3, 2)), ("sum", (2, 3))):
        rest = ({"kind": kind, "shape": shape, "none": None}, np.float32(3), jnp.sin)
        want = once(total, lambda rest=rest: jax.shard_map(_with_options, mesh=theirs, **options)(xs, *rest))  # type: ignore[misc]
        got = (
            mapped(mine, *rest),
            jax.jit(lambda x, rest=rest: mapped(x, *rest))(mine),
            mapped.lower(mine, *rest).compile()(mine, *rest),
        )
        for y in got:
            np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-5)
        assert mapped.eval_shape(mine, *rest).shape == shape
    traced = len(traces)
    mapped(mine, {"kind": "max", "shape": (3, 2), "none": None}, np.float32(4), jnp.sin)
    assert len(traces) == traced, "a value that was seen before"
    one = pc.shard_map(lambda x, n: x.astype(type(n)), mesh=mesh, in_specs=(P("i"), None), out_specs=P("i"))
    assert [one(mine, n).dtype for n in (1.0, 1, True)] == [jnp.float32, jnp.int32, jnp.bool]
    with pytest.raises(TypeError, match=r"shard_map: expected arrays and hashable values .* got \{1\} of set .*tuple"):
        mapped(mine, {"kind": {1}}, np.float32(3), jnp.sin)
    everything = pc.shard_map(lambda a, n: n * a, mesh=mesh, in_specs=None, out_specs=P())
    np.testing.assert_array_equal(everything(np.ones(3, np.float32), 2), 2 * np.ones(3))
