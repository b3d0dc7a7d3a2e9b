"""Named axes together with other axes, hidden names, closures, references, solvers, and primitives of other libraries.

The oracle is ``jax.vmap(axis_name=)`` on one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import pycollective as pc
from pycollective.ranks.setup import devices_of_this_rank
from tests.cases import values
from tests.collective.programs import divided
from tests.spmd.cases import assert_close, own, stacked
from tests.spmd.conftest import needs_local

Array = Any


def compare(
    world: pc.Communicator, local: int, fun: Callable[[Array], Any], xs: Array, tolerance: float = 1e-4
) -> None:
    """Compares ``fun`` of one device's array, its gradient inside and its gradient outside with :func:`jax.vmap`."""

    def inside(x: Array) -> Array:
        return jax.grad(lambda x: sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(fun(x))))(x)

    def outside(mapped: Callable[[Array], Any]) -> Callable[[Array], Array]:
        return jax.grad(lambda x: sum(jnp.sum(jnp.cos(y)) for y in jax.tree.leaves(mapped(x))))

    mine, first = own(world, local, xs), xs[: world.size]
    ours, theirs = pc.pmap(fun, "i"), jax.vmap(fun, axis_name="i")
    oracles: dict[str, Callable[[], Any]] = {
        "value": lambda: jax.jit(theirs)(xs),
        "inside": lambda: jax.jit(jax.vmap(inside, axis_name="i"))(xs),
        "outside": lambda: jax.jit(outside(theirs))(xs),
        "named": lambda: jax.jit(theirs)(first),
    }
    want = divided(world.size, oracles, lambda names: {name: oracles[name]() for name in names})
    assert_close(world, local, ours(mine), want["value"], tolerance)
    assert_close(world, local, pc.pmap(inside, "i")(mine), want["inside"], tolerance)
    assert_close(world, local, outside(ours)(mine), want["outside"], tolerance)
    named = jax.tree.map(lambda y: y[None], pc.jit(fun, axis_name="i")(first[world.rank]))
    assert_close(world, 1, named, want["named"], tolerance)


# Axes of ours and of others -------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [("i", "j"), ("j", "i")], ids=str)
def test_over_axes_of_ours_and_of_vmap(names: tuple[str, str], world: pc.Communicator, local: int) -> None:
    def fun(x: Array) -> Any:
        return {
            "psum": lax.psum(jnp.sin(x), names),
            "pmean": lax.pmean(x, names) * x,
            "pmax": lax.pmax(x, names),
            "pmin": lax.pmin(x, names),
            "number": lax.psum(1, names) * x,
            "index": lax.axis_index(names) + 10 * lax.axis_index("j"),
            "size": lax.axis_size(names) * x,
        }

    n = world.size * local
    xs = values((3, n, 2, 2))
    mine = xs[:, world.rank * local : (world.rank + 1) * local]
    want = jax.jit(jax.vmap(jax.vmap(fun, axis_name="i"), axis_name="j"))(xs)
    got = jax.vmap(pc.pmap(fun, "i"), axis_name="j")(mine)
    first = lambda tree: jax.tree.map(lambda y: jnp.moveaxis(jnp.asarray(y), 1, 0), tree)
    assert_close(world, local, first(got), first(want))

    def loss(mapped: Callable[..., Any]) -> Callable[[Array], Array]:
        return lambda x: jnp.sum(jnp.sin(jax.vmap(mapped, axis_name="j")(x)))

    total = lambda x: lax.psum(jnp.sin(x), names)
    want = jax.jit(jax.grad(loss(jax.vmap(total, axis_name="i"))))(xs)
    assert_close(world, local, first(jax.grad(loss(pc.pmap(total, "i")))(mine)), first(want))


def test_index_of_an_axis_that_maps_no_operand(world: pc.Communicator, local: int) -> None:
    mine = own(world, local, stacked(world, local, shape=(2,)))
    fun = lambda x: lax.psum(x, "i") + 10.0 * lax.axis_index("j").astype(x.dtype)
    got = jax.vmap(lambda _: pc.pmap(fun, "i")(mine), axis_name="j")(np.arange(3))
    assert got.shape == (3, local, 2)
    np.testing.assert_allclose(np.diff(got, axis=0), 10, rtol=1e-5)


@pytest.mark.parametrize("name", ["all_gather", "ppermute", "psum_scatter"])
def test_other_collectives_over_both(name: str, world: pc.Communicator, local: int) -> None:
    n = 3 * world.size * local
    arguments = {"ppermute": ([(0, 1)],), "all_gather": (), "psum_scatter": ()}[name]
    fun = lambda x: getattr(lax, name)(x, ("j", "i"), *arguments)
    with pytest.raises(
        NotImplementedError, match=r"expected axes of Mesh.* alone, got \w+ over \('j', 'i'\) at .*test_named"
    ):
        jax.vmap(pc.pmap(fun, "i"), axis_name="j")(np.ones((3, local, n), np.float32))


def test_an_inner_axis_hides_an_outer_one(world: pc.Communicator, local: int) -> None:
    n = world.size * local
    xs = values((n, 3))
    mine = own(world, local, xs)
    batch = np.stack([mine, 2 * mine])
    fun = lambda x: lax.psum(x, "i") * lax.axis_size("i")
    want = own(world, local, np.broadcast_to(n * xs.sum(axis=0), xs.shape))
    got = jax.vmap(pc.pmap(fun, "i"), axis_name="i")(batch)
    np.testing.assert_allclose(got, np.stack([want, 2 * want]), rtol=1e-4, atol=1e-5)
    ranks = xs.reshape(world.size, local, 3).sum(axis=0)
    np.testing.assert_allclose(
        jax.vmap(pc.jit(fun, axis_name="i"), axis_name="i")(batch),
        world.size * np.stack([ranks, 2 * ranks]), rtol=1e-4, atol=1e-5,
    )  # fmt: skip
    # In a program of one device of each rank, the outer axis is visible again after the inner program.
    inner = pc.pmap(lambda x: lax.psum(2 * x, "i"), "i")
    nested = pc.pmap(lambda x: inner(x[None])[0] + lax.psum(x, "i"), "i")
    total = xs.reshape(world.size, local, 3)[:, 0].sum(axis=0)
    np.testing.assert_allclose(nested(mine[:1])[0], 3 * total, rtol=1e-4, atol=1e-5)
    both = pc.pmap(lambda x: pc.pmap(lambda y: lax.psum(y, "j") + lax.psum(x, "i"), "j")(x[None])[0], "i")
    np.testing.assert_allclose(both(mine[:1])[0], 2 * total, rtol=1e-4, atol=1e-5)
    through = pc.pmap(lambda x: pc.pmap(lambda y: lax.psum(y, ("j", "i")), "j")(x[None])[0], "i")
    np.testing.assert_allclose(through(mine[:1])[0], world.size * total, rtol=1e-4, atol=1e-5)


def test_transforms_of_transforms(world: pc.Communicator, few: int) -> None:
    # Results that do not depend on the batch must stay without one; jacfwd and hessian need that.
    xs = stacked(world, few, shape=(3,))
    mine = own(world, few, xs)
    mesh = pc.make_mesh((-1,), ("i",), devices=devices_of_this_rank()[:few])
    fun = lambda w, x: lax.pmean(jnp.sum(jnp.tanh(w * x)), "i")
    oracle = jax.vmap(fun, in_axes=(None, 0), out_axes=None, axis_name="i")
    pmapped = pc.pmap(fun, "i", in_axes=(None, 0), out_axes=None)
    typed = pc.shard_map(fun, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    untyped = pc.shard_map(fun, mesh=mesh, in_specs=(P(), P("i")), out_specs=P(), check_vma=False)
    loop = lambda f: lambda w, x: lax.scan(lambda c, _: (f(c, x), c), w, None, length=3)[0]
    transforms: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
        "hessian": jax.hessian,
        "jacfwd": jax.jacfwd,
        "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
        "batched gradient": lambda f: lambda w, x: jax.vmap(jax.grad(f), in_axes=(0, None))(jnp.stack([w, 2 * w]), x),
        "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
        "scan": lambda f: jax.grad(loop(f)),
        "value and gradient": jax.value_and_grad,
    }
    w = np.float32(0.3)

    def every(f: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: {name: transform(f)(*args) for name, transform in transforms.items()}

    want = jax.jit(every(oracle))(w, xs)
    for got in (
        every(pmapped)(w, mine),
        jax.jit(every(pmapped))(w, mine),
        jax.jit(every(typed))(w, mine),
        every(untyped)(w, mine),
    ):
        for name in transforms:
            for y, z in zip(jax.tree.leaves(got[name]), jax.tree.leaves(want[name]), strict=True):
                np.testing.assert_allclose(y, z, rtol=1e-3, atol=1e-4, err_msg=name)


# Closures, references, casts ------------------------------------------------------------------------------


def test_gradient_of_what_a_function_closes_over(world: pc.Communicator, few: int) -> None:
    xs = stacked(world, few, shape=(3,))
    mesh = pc.make_mesh((-1,), ("i",), devices=devices_of_this_rank()[:few])
    fun = lambda w, x: jnp.tanh(w * x) + lax.pmean(w * x, "i")

    def loss(around: Callable[..., Any]) -> Callable[[Array, Array], Array]:
        return lambda w, x: jnp.sum(jnp.sin(around(lambda x: fun(w, x))(x)))

    want = jax.grad(loss(lambda f: jax.vmap(f, axis_name="i")))(np.float32(2), xs)
    got = jax.grad(loss(lambda f: pc.pmap(f, "i")))(np.float32(2), own(world, few, xs))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    for check in (True, False):
        map_ = lambda f, check=check: pc.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=check)
        got = jax.grad(loss(map_))(np.float32(2), own(world, few, xs))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def count_in_a_reference(x: Array) -> Array:
    total = jax.new_ref(jnp.zeros_like(x))

    def body(k: Array, last: Array) -> Array:
        total[...] += lax.psum(x, "i") * (1 + k).astype(x.dtype)
        return last

    lax.fori_loop(0, 3, body, 0)
    return total[...]


def test_references(world: pc.Communicator, few: int) -> None:
    xs = stacked(world, few, shape=(3,))
    mine = own(world, few, xs)
    want = own(world, few, np.broadcast_to(6 * xs.sum(axis=0), xs.shape))
    for compiler in (lambda f: f, jax.jit, pc.jit):
        np.testing.assert_allclose(compiler(pc.pmap(count_in_a_reference, "i"))(mine), want, rtol=1e-5, atol=1e-5)
    ranks = 6 * xs.reshape(world.size, few, 3).sum(axis=0)
    np.testing.assert_allclose(pc.jit(count_in_a_reference, axis_name="i")(mine), ranks, rtol=1e-5, atol=1e-5)
    mesh = pc.make_mesh((-1,), ("i",), devices=devices_of_this_rank()[:few])
    sharded = pc.shard_map(count_in_a_reference, mesh=mesh, in_specs=P("i"), out_specs=P("i"))
    np.testing.assert_allclose(sharded(mine), want, rtol=1e-5, atol=1e-5)
    squares = lambda x: jnp.sum(count_in_a_reference(x) ** 2)
    got = pc.pmap(jax.grad(squares), "i")(mine)
    assert_close(world, few, got, jax.vmap(jax.grad(squares), axis_name="i")(xs))
    for fun in (count_in_a_reference, lambda x: jax.jit(count_in_a_reference)(jnp.sin(x))):
        outside = lambda mapped: jax.grad(lambda x: jnp.sum(jnp.sin(mapped(x))))
        got = outside(pc.pmap(fun, "i"))(mine)
        assert_close(world, few, got, outside(jax.vmap(fun, axis_name="i"))(xs))


def test_casts_of_types(world: pc.Communicator, local: int) -> None:
    xs = stacked(world, local, shape=(3,))
    mine = own(world, local, xs)
    fun = lambda x: lax.psum(lax.pcast(x, "i", to="varying") * 2, "i")
    want = 2 * xs.sum(axis=0)
    np.testing.assert_allclose(pc.pmap(fun, "i")(mine)[0], want, rtol=1e-5, atol=1e-5)
    mesh = pc.make_mesh((-1,), ("i",), devices=devices_of_this_rank()[:local])
    shared = lambda w, x: lax.psum(lax.pcast(w, "i", to="varying") * x, "i")
    got = pc.shard_map(shared, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())(np.full((1, 3), 2, np.float32), mine)
    np.testing.assert_allclose(got[0], want, rtol=1e-5, atol=1e-5)


def test_types_of_jit(world: pc.Communicator) -> None:
    # With types, the gradient of a summed loss, taken inside, counts the sum once.
    x = np.float32(world.rank + 1)
    fun = jax.grad(lambda w, x: lax.psum(w * x, "i"))
    assert float(pc.jit(fun, axis_name="i", check_vma=True)(np.float32(1), x)) == x
    assert float(pc.jit(fun, axis_name="i")(np.float32(1), x)) == world.size * x


def test_narrow_sums_have_types(world: pc.Communicator, local: int) -> None:
    mesh = pc.make_mesh((-1,), ("i",), devices=devices_of_this_rank()[:local])
    xs = np.arange(1.0, world.size * local + 1, dtype=np.float32)
    loss = lambda w, x: pc.psum(jnp.sum(w * x), "i", wire_dtype=jnp.bfloat16)
    fun = pc.shard_map(jax.value_and_grad(loss), mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    value, gradient = fun(np.float32(2), own(world, local, xs))
    assert (float(value), float(gradient)) == (2 * xs.sum(), xs.sum())


@needs_local(2)
def test_around_a_shard_map_of_jax(world: pc.Communicator) -> None:
    # The outer axis has one device of each rank, the inner one two of each.
    theirs = jax.sharding.Mesh(np.array(devices_of_this_rank()[:2]), ("d",))
    inner = jax.shard_map(lambda x: lax.psum(jnp.sin(x), "d"), mesh=theirs, in_specs=P("d"), out_specs=P())
    fun = lambda x: jnp.sum(lax.psum(inner(x), "i") ** 2)
    xs = stacked(world, 1, shape=(4,))
    halves = np.sin(xs).sum(axis=0).reshape(2, 2).sum(axis=0)
    gradient = 2 * world.size * np.tile(halves, 2) * np.cos(xs[world.rank])
    for program in (pc.jit(fun, axis_name="i"), lambda x: pc.pmap(fun, "i")(x[None])[0]):
        np.testing.assert_allclose(program(xs[world.rank]), np.sum(halves**2), rtol=1e-4)
        np.testing.assert_allclose(jax.grad(program)(xs[world.rank]), gradient, rtol=1e-4)


def test_sums_of_ranks_inside_have_types(world: pc.Communicator, local: int) -> None:
    # A sum over ranks varies along the local axis as its operand does, also for JAX's own shard_map.
    theirs = jax.sharding.Mesh(np.array(devices_of_this_rank()[:local]), ("d",))
    ours = pc.make_mesh((-1,), ("d",), devices=devices_of_this_rank()[:local])
    xs = stacked(world, local, shape=(3,))
    mine = own(world, local, xs)
    fun = lambda x: lax.psum(jnp.sum(pc.psum(x, world)) ** 2, "d")
    sums = xs.reshape(world.size, local, 3).sum(axis=0).sum(axis=1)
    want = np.broadcast_to(2 * sums[:, None], mine.shape)
    for mapped, count in (
        (jax.shard_map(fun, mesh=theirs, in_specs=P("d"), out_specs=P()), world.size),
        (pc.shard_map(fun, mesh=ours, in_specs=P("d"), out_specs=P()), world.size),
    ):
        gradient = jax.jit(jax.grad(lambda x, f=mapped: jnp.sum(f(x))))(mine)
        np.testing.assert_allclose(gradient, count * want, rtol=1e-4, atol=1e-4)


# Solvers --------------------------------------------------------------------------------------------------


def system(x: Array) -> tuple[Array, Array]:
    return x.reshape(3, 3) / 3, jnp.arange(1.0, 4.0)


def conjugate_gradients(x: Array) -> Array:
    a, b = system(x)
    return jax.scipy.sparse.linalg.cg(lambda v: v + lax.psum(a.T @ (a @ v), "i"), b, tol=1e-6)[0]  # type: ignore[no-any-return]


def linear_solve(x: Array) -> Array:
    a, b = system(x)
    product = lambda v: v + lax.psum(a.T @ (a @ v), "i")
    solve = lambda product, b: jax.scipy.sparse.linalg.cg(product, b, tol=1e-6)[0]
    return lax.custom_linear_solve(product, b, solve, symmetric=True)


def root(x: Array) -> Array:
    a, b = system(x)
    function = lambda y: y + 0.1 * jnp.tanh(lax.psum(a @ y, "i")) - b
    iterate = lambda f, y: lax.fori_loop(0, 40, lambda _, y: y - f(y), y)
    return lax.custom_root(function, b, iterate, lambda g, y: jnp.linalg.solve(jax.jacobian(g)(y), y))  # type: ignore[no-any-return]


def converted(x: Array) -> Array:
    a, b = system(x)
    function, constants = jax.closure_convert(lambda y: lax.psum(a @ jnp.sin(y), "i"), b)
    return function(b, *constants)  # type: ignore[no-any-return]


@pytest.mark.parametrize("solver", [conjugate_gradients, linear_solve, root, converted], ids=lambda f: f.__name__)
def test_solvers(solver: Callable[[Array], Array], world: pc.Communicator, few: int) -> None:
    compare(world, few, solver, stacked(world, few, shape=(9,)), tolerance=5e-3)


def test_linear_call(world: pc.Communicator, few: int) -> None:
    # The transpose has a factor of 2, which shows that JAX has used it.
    def fun(a: Array, x: Array) -> Array:
        forward = lambda a, x: lax.psum(a * x, "i")
        backward = lambda a, ct: 2 * a * lax.psum(ct, "i")
        return jax.custom_derivatives.linear_call(forward, backward, a, x)  # type: ignore[no-any-return]

    xs, ws = stacked(world, few, shape=(3,)), stacked(world, few, seed=1, shape=(3,))
    mine = own(world, few, ws), own(world, few, xs)
    n = world.size * few
    np.testing.assert_allclose(pc.pmap(fun, "i")(*mine)[0], (ws * xs).sum(axis=0), rtol=1e-4, atol=1e-5)
    inside = pc.pmap(jax.grad(lambda a, x: jnp.sum(fun(a, x)), argnums=1), "i")(*mine)
    np.testing.assert_allclose(inside, 2 * n * mine[0], rtol=1e-5)
    outside = jax.grad(lambda a, x: jnp.sum(pc.pmap(fun, "i")(a, x)), argnums=1)(*mine)
    np.testing.assert_allclose(outside, 2 * n * mine[0], rtol=1e-5)


# A primitive as other libraries make them: its parameters hold an open jaxpr, the constants of that jaxpr are operands,
# and it does not report the effects of that jaxpr.
library_p = Primitive("of_a_library")
library_p.multiple_results = True


@library_p.def_impl
def _library_impl(*operands: Array, static: tuple[Any, int]) -> list[Array]:
    jaxpr, constants = static
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, operands[:constants]))(*operands[constants:])  # type: ignore[no-any-return]


@library_p.def_abstract_eval
def _library_abstract_eval(*_: Any, static: tuple[Any, int]) -> list[Any]:
    return [jax.core.ShapedArray(var.aval.shape, var.aval.dtype) for var in static[0].outvars]


mlir.register_lowering(library_p, mlir.lower_fun(_library_impl))


def through_a_library(fun: Callable[[Array], Array], x: Array) -> Array:
    closed = jax.make_jaxpr(fun)(x)
    return library_p.bind(*closed.consts, x, static=(closed.jaxpr, len(closed.consts)))[0]


@pytest.mark.parametrize("constant", [False, True])
def test_primitive_of_a_library(constant: bool, world: pc.Communicator, local: int) -> None:
    xs = stacked(world, local, shape=(3,))
    mine = own(world, local, xs)
    table = np.arange(3, dtype=np.float32)
    factor = (lambda: jnp.vdot(table, table)) if constant else lambda: 5.0
    k = 5
    named = lambda x: through_a_library(lambda y: lax.psum(factor() * y, "i"), x)
    np.testing.assert_allclose(pc.pmap(named, "i")(mine)[0], k * xs.sum(axis=0), rtol=1e-4, atol=1e-5)
    ranks = xs.reshape(world.size, local, 3).sum(axis=0)
    np.testing.assert_allclose(pc.jit(named, axis_name="i")(mine), k * ranks, rtol=1e-4, atol=1e-5)
    # A sum over a communicator, in a loop of two rounds, is a sum of sums.
    over = lambda x: lax.fori_loop(0, 2, lambda _, c: through_a_library(lambda y: pc.psum(factor() * y, world), c), x)
    np.testing.assert_allclose(pc.jit(over)(mine), k * k * world.size * ranks, rtol=1e-4, atol=1e-5)


# Arguments ------------------------------------------------------------------------------------------------


def test_lists_and_numbers_of_numpy(world: pc.Communicator, local: int) -> None:
    xs = stacked(world, local, shape=(3,))
    mine = own(world, local, xs)
    total = xs.sum(axis=0)
    step = lambda p, x: [lax.psum(p[0] * x + p[1]["b"][0], "i"), [x]]
    n = world.size * local
    for in_axes in ([None, np.int64(0)], (None, 0), ([None, {"b": None}], 0), ([None, {"b": [None]}], np.int8(0))):
        got = pc.pmap(step, "i", in_axes=in_axes, out_axes=[None, [0]])([2.0, {"b": [1.0]}], mine)
        np.testing.assert_allclose(got[0], 2 * total + n, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(got[1][0], mine)
    got = pc.pmap(step, "i", in_axes=([None, {"b": [0]}], 0), out_axes=[None, 0])([2.0, {"b": [mine]}], mine)
    np.testing.assert_allclose(got[0], 3 * total, rtol=1e-5, atol=1e-5)
    static = pc.pmap(lambda x, k: lax.psum(x**k, "i"), "i", static_broadcasted_argnums=[np.int32(-1)], backend=None)
    np.testing.assert_allclose(static(mine, 2)[0], (xs**2).sum(axis=0), rtol=1e-5)
    back = pc.pmap(lambda x: lax.psum(x, "i"), "i", out_axes=-1)(mine)
    np.testing.assert_allclose(back, np.stack([total] * local, axis=-1), rtol=1e-5, atol=1e-5)
    mesh = pc.make_mesh((-1,), ("i",), devices=devices_of_this_rank()[:local])
    both = pc.shard_map(
        lambda a, k: [lax.psum(a[0], "i"), {"k": a[1]}],
        mesh=mesh, in_specs=([P("i"), P()], None), out_specs=[P(), {"k": P()}],
    )  # fmt: skip
    got = both([mine, total], np.float32(3))
    np.testing.assert_allclose(got[0][0], total, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(got[1]["k"], total)
