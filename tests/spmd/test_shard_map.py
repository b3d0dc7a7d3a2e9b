"""pc.shard_map against jax.shard_map: axes across ranks, inside ranks and both, all kinds of specs, derivatives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import pycollective as pc
from pycollective.ranks.setup import devices_of_this_rank
from tests.cases import values
from tests.collective.programs import divided, oracle_devices
from tests.spmd.cases import ALL, LINEAR, SHAPE
from tests.spmd.conftest import LOCAL
from tests.under_mpirun import SIZE

Array = Any
Grid = tuple[int, tuple[int, int]]
"""The number of local devices, and the sizes of the axes "data" and "model"."""

ON_ONE_DEVICE: tuple[Grid, ...] = ((1, (SIZE, 1)), (1, (1, SIZE)), (1, (1, SIZE)), (1, (SIZE, 1)))
WANTED: tuple[Grid, ...] = {
    1: ((4, (2, 2)), (1, (1, 1)), (4, (1, 4)), (4, (4, 1))),
    2: ((2, (2, 2)), (1, (1, 2)), (2, (1, 4)), (4, (4, 2))),
    4: ((2, (4, 2)), (1, (2, 2)), (2, (2, 4)), (2, (2, 4))),
}.get(SIZE, ON_ONE_DEVICE)
INSIDE, ACROSS, BOTH, BOTH_OUTER = (
    wanted if wanted[0] <= max(LOCAL) else instead for wanted, instead in zip(WANTED, ON_ONE_DEVICE, strict=True)
)
"""Grids where "model" lies inside each rank, across ranks, or both; on 2 ranks also one where "data" lies both ways.

Ranks with fewer devices than a grid needs, GPUs, get one on a single device of each.
"""

GRIDS = tuple(dict.fromkeys((INSIDE, ACROSS, BOTH, BOTH_OUTER)))
NAMES = ("data", "model")
ORDERS: tuple[Any, ...] = ("data", "model", NAMES, NAMES[::-1])


@pytest.fixture(params=GRIDS, ids=lambda grid: f"{grid[0]} local, {grid[1][0]}x{grid[1][1]}")
def grid(request: pytest.FixtureRequest) -> Grid:
    chosen: Grid = request.param
    return chosen


@pytest.fixture(
    params=tuple(dict.fromkeys((ACROSS, BOTH_OUTER))), ids=lambda grid: f"{grid[0]} local, {grid[1][0]}x{grid[1][1]}"
)
def hard(request: pytest.FixtureRequest) -> Grid:
    """A grid for a test that is slow to compile."""
    chosen: Grid = request.param
    return chosen


def meshes(
    world: pc.Communicator, local: int, sizes: Sequence[int], names: Sequence[str] = NAMES
) -> tuple[pc.Mesh, jax.sharding.Mesh]:
    """Returns our mesh over all ranks, and the oracle's over as many devices of this process."""
    devices = np.array(oracle_devices(world.size * local), dtype=object)
    theirs = jax.sharding.Mesh(devices.reshape(sizes), tuple(names))
    return pc.make_mesh(sizes, names, devices=devices_of_this_rank()[:local]), theirs


def own(mesh: pc.Mesh, x: Array, spec: P, lead: int = 0) -> Array:
    """Returns this rank's own block of a global array, which has ``lead`` axes before those that the spec counts."""
    parts = np.unravel_index(mesh.comm.rank, [axis.ranks for axis in mesh.axes])
    place = {axis.name: (axis, int(part)) for axis, part in zip(mesh.axes, parts, strict=True)}
    x = np.asarray(x)
    for i, part in enumerate(spec, lead):
        names = part if isinstance(part, tuple) else () if part is None else (part,)
        # One axis of the array is cut into (ranks, local) parts for each name, outermost first.
        cuts = [size for name in names for size in (place[name][0].ranks, place[name][0].local)]
        taken = [where for name in names for where in (place[name][1], slice(None))]
        y = x.reshape(*x.shape[:i], *cuts, x.shape[i] // math.prod(cuts), *x.shape[i + 1 :])
        y = y[(*[slice(None)] * i, *taken)]
        length = x.shape[i] // math.prod(place[name][0].ranks for name in names)
        x = y.reshape(*x.shape[:i], length, *x.shape[i + 1 :])
    return x


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


def spread(specs: Any, tree: Any) -> list[P]:
    """Returns one spec for each leaf."""
    parts = jax.tree.map(lambda spec, part: [spec] * len(jax.tree.leaves(part)), specs, tree, is_leaf=_is_spec)
    return [spec for part in jax.tree.leaves(parts, is_leaf=lambda x: isinstance(x, list)) for spec in part]


def blocks(mesh: pc.Mesh, specs: Any, tree: Any, lead: int = 0) -> Any:
    """Returns this rank's own block of each array of a tree."""
    leaves = [own(mesh, x, spec, lead) for x, spec in zip(jax.tree.leaves(tree), spread(specs, tree), strict=True)]
    return jax.tree.unflatten(jax.tree.structure(tree), leaves)


def assert_blocks(mesh: pc.Mesh, got: Any, want: Any, specs: Any, tolerance: float = 1e-5, lead: int = 0) -> None:
    """Compares ``got``, of this rank, with its part of ``want``."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    expected = jax.tree_util.tree_leaves_with_path(blocks(mesh, specs, want, lead))
    for y, (path, part) in zip(jax.tree.leaves(got), expected, strict=True):
        assert y.dtype == part.dtype, path
        assert y.shape == part.shape, path
        np.testing.assert_allclose(
            np.asarray(y, np.float64), np.asarray(part, np.float64), tolerance, tolerance, err_msg=str(path)
        )


def compare(
    world: pc.Communicator,
    local: int,
    sizes: Sequence[int],
    fun: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
    *args: Any,
    names: Sequence[str] = NAMES,
    around: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda f: f,
    result_specs: Any = None,
    tolerance: float = 1e-5,
    lead: int = 0,
    check_vma: Sequence[bool] = (True, False),
) -> None:
    """Compares ``around`` of our shard_map on this rank's own blocks with ``around`` of JAX's on the global ``args``.

    Args:
        result_specs: the specs of the results of ``around``; default ``out_specs``.
        lead: the number of axes of arguments and results before those that the specs count.
        check_vma: the values of the option to test.
    """
    mesh, theirs = meshes(world, local, sizes, names)
    options: dict[str, Any] = {"in_specs": in_specs, "out_specs": out_specs}

    def oracle(check: bool) -> Any:
        return jax.jit(around(jax.shard_map(fun, mesh=theirs, check_vma=check, **options)))(*args)

    want = divided(world.size * local, check_vma, lambda checks: {check: oracle(check) for check in checks})
    for check in check_vma:
        got = around(pc.shard_map(fun, mesh=mesh, check_vma=check, **options))(*blocks(mesh, in_specs, args, lead))
        assert_blocks(mesh, got, want[check], out_specs if result_specs is None else result_specs, tolerance, lead)


NOT_TYPED = [name for name in ALL if "groups" in name]
"""Collectives in groups, which JAX refuses with types."""


# Values ---------------------------------------------------------------------------------------------------


def test_one_axis(world: pc.Communicator, few: int) -> None:
    total = world.size * few
    xs = values((total * SHAPE[0], *SHAPE[1:]))

    def fun(x: Array) -> dict[str, Array]:
        return {name: f(x)[None] for name, f in ALL.items()}

    compare(world, few, (total,), fun, (P("i"),), P("i"), xs, names=("i",), check_vma=(False,))
    without = {name: f for name, f in ALL.items() if name not in NOT_TYPED}
    fun = lambda x: {name: f(x)[None] for name, f in without.items()}
    compare(world, few, (total,), fun, (P("i"),), P("i"), xs, names=("i",), check_vma=(True,))


def collectives(axes: Any) -> Callable[[Array], dict[str, Array]]:
    """Returns a function with all collectives over ``axes``; each result has two axes in front, to be cut."""

    def fun(x: Array) -> dict[str, Array]:
        n = lax.axis_size(axes)
        ring = [(k, (k + 1) % n) for k in range(n)]
        me = lax.axis_index(axes)
        results = {
            "psum": lax.psum(x, axes),
            "pmean": lax.pmean(x, axes),
            "pmax": lax.pmax(x, axes),
            "all_gather": lax.all_gather(x, axes),
            "all_gather tiled": lax.all_gather(x, axes, axis=1, tiled=True),
            "psum_scatter": lax.psum_scatter(x[:n], axes),
            "psum_scatter tiled": lax.psum_scatter(x, axes, tiled=True),
            "all_to_all": lax.all_to_all(x[:n], axes, 0, 1),
            "all_to_all tiled": lax.all_to_all(x, axes, 0, 1, tiled=True),
            "axis_index": me,
            "sum of indices": lax.psum(me, axes),
        }
        if axes != NAMES[::-1]:  # see test_ppermute_over_axes_in_another_order
            results["ppermute"] = lax.ppermute(x, axes, ring)
            results["ppermute partial"] = lax.ppermute(x, axes, ring[1:])
        return {name: y[None, None] for name, y in results.items()}

    return fun


def test_collectives_over_one_axis_and_over_both(world: pc.Communicator, grid: Grid) -> None:
    local, sizes = grid
    xs = values((8 * sizes[0], 3 * sizes[1]))
    fun = lambda x: {str(axes): collectives(axes)(x) for axes in ORDERS}
    compare(world, local, sizes, fun, (P("data", "model"),), P("data", "model"), xs)


# JAX is no oracle here: it sorts the devices in ppermute, but not in axis_index and all_gather.
@pytest.mark.parametrize("axes", [NAMES, NAMES[::-1]], ids=["in order", "in another order"])
def test_ppermute_moves_along_axis_index(axes: tuple[str, ...], world: pc.Communicator, grid: Grid) -> None:
    local, sizes = grid
    mesh, _ = meshes(world, local, sizes)
    n = math.prod(sizes)
    ring = [(k, (k + 1) % n) for k in range(n)]

    @pc.shard_map(mesh=mesh, in_specs=(), out_specs=P(NAMES))
    def fun() -> Array:
        me = lax.axis_index(axes)
        return jnp.stack([lax.ppermute(me, axes, ring), (me + n - 1) % n])[None]

    received, before = np.asarray(fun()).T
    np.testing.assert_array_equal(received, before)


def test_axis_index_and_size_are_numbers_of_the_program(world: pc.Communicator, grid: Grid) -> None:
    local, sizes = grid
    mesh, _ = meshes(world, local, sizes)

    @pc.shard_map(mesh=mesh, in_specs=(), out_specs=P(NAMES))
    def fun() -> Array:
        assert [lax.axis_size(axes) for axes in ORDERS] == [*sizes, math.prod(sizes), math.prod(sizes)]
        return jnp.stack([lax.axis_index(axes) for axes in ORDERS])[None]

    data, model = (i.reshape(-1) for i in np.indices(sizes))
    want = np.stack([data, model, data * sizes[1] + model, model * sizes[0] + data], axis=1)
    np.testing.assert_array_equal(fun(), own(mesh, want, P(NAMES)))


def test_specs(world: pc.Communicator, grid: Grid) -> None:
    local, sizes = grid
    n = math.prod(sizes)
    specs = [P(), P("data"), P("model"), P(None, "model"), P("model", "data"), P(NAMES), P(NAMES[::-1]), P(None, NAMES)]
    xs = [values((2 * n, n), seed=k) for k in range(len(specs))]

    def fun(*blocks: Array) -> Any:
        return tuple(2 * x for x in blocks)

    compare(world, local, sizes, fun, tuple(specs), tuple(specs), *xs)


def test_specs_of_trees(world: pc.Communicator, hard: Grid) -> None:
    local, sizes = hard
    n = math.prod(sizes)
    tree = {"a": values((n, n)), "b": (values((3, n), seed=1), values((n,), seed=2)), "c": [np.float32(3)]}
    in_specs = ({"a": P("data", "model"), "b": (P(None, "model"), P(NAMES)), "c": P()}, P())
    out_specs = {"sum": P(), "both": (P("data"), P(None, NAMES[::-1])), "tree": P("model")}

    def fun(tree: dict[str, Any], k: Array) -> dict[str, Any]:
        a, (b, v), (c,) = tree["a"], tree["b"], tree["c"]
        return {
            "sum": {"a": lax.psum(a.sum() * c, NAMES), "b": lax.psum(b.sum(axis=1) + k, "model")},
            "both": (lax.all_gather(a, "model", axis=1, tiled=True), lax.axis_index(NAMES) + jnp.ones((2, 1))),
            "tree": [lax.psum(b.T, "data"), lax.all_gather(v, "data").sum(axis=1)],
        }

    def with_float(*args: Any) -> Any:
        results = fun(*args)
        one, two = results["both"]
        return {**results, "both": (one, two)}

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        # By JAX's types a gathered array still varies along the axis.
        compare(world, local, sizes, with_float, in_specs, out_specs, tree, np.float32(5), check_vma=(False,))


def test_one_spec_for_all(world: pc.Communicator, hard: Grid) -> None:
    local, sizes = hard
    n = math.prod(sizes)
    mesh, _ = meshes(world, local, sizes)
    x, y = values((n, 2)), values((2 * n,), seed=1)
    fun = pc.shard_map(
        lambda x, y: {"x": 2 * x, "y": lax.pmax(y, "data")}, mesh=mesh, in_specs=P(NAMES), out_specs=P(NAMES)
    )
    got = fun(*blocks(mesh, P(NAMES), (x, y)))
    np.testing.assert_allclose(got["x"], 2 * own(mesh, x, P(NAMES)))
    want = np.broadcast_to(y.reshape(*sizes, 2).max(axis=0), (*sizes, 2)).reshape(-1)
    np.testing.assert_allclose(got["y"], own(mesh, want, P(NAMES)))


def test_three_axes(world: pc.Communicator, few: int) -> None:
    total = world.size * few
    sizes = (math.gcd(total, 2), 1, total // math.gcd(total, 2))
    xs = values((4 * total, 2))

    def fun(x: Array) -> Any:
        every = [lax.psum(x * (1 + lax.axis_index(a)), ("c", "a")) for a in ("a", "b", "c", ("c", "b", "a"))]
        return {"sums": every, "gathered": lax.all_gather(x, ("c", "b", "a"), tiled=True)}

    with jax.numpy_dtype_promotion("standard"):
        spec = P(("c", "a", "b"))
        compare(world, few, sizes, fun, (spec,), spec, xs, names=("a", "b", "c"))


def test_matrix_product(world: pc.Communicator, grid: Grid) -> None:
    # The layer is tensor-parallel: the contracted axis is cut along "model", the batch along "data".
    local, sizes = grid
    mesh, _ = meshes(world, local, sizes)
    x, w = values((2 * sizes[0], 3 * sizes[1])), values((3 * sizes[1], 5), seed=1)
    in_specs = (P("data", "model"), P("model"))
    fun = pc.shard_map(lambda x, w: lax.psum(x @ w, "model"), mesh=mesh, in_specs=in_specs, out_specs=P("data"))
    np.testing.assert_allclose(fun(*blocks(mesh, in_specs, (x, w))), own(mesh, x @ w, P("data")), rtol=1e-4, atol=1e-5)


# The mesh -------------------------------------------------------------------------------------------------


def test_what_is_left(world: pc.Communicator, grid: Grid) -> None:
    local, sizes = grid
    mesh, _ = meshes(world, local, sizes)
    devices = devices_of_this_rank()[:local]
    for shape in ((-1, sizes[1]), (sizes[0], -1)):
        assert pc.make_mesh(shape, NAMES, devices=devices) == mesh
    assert mesh.shape == dict(zip(NAMES, sizes, strict=True))
    whole = pc.make_mesh((-1,), ("all",))
    assert whole.shape == {"all": world.size * len(devices_of_this_rank())}


def test_ranks_and_local_devices_of_each_axis(world: pc.Communicator) -> None:
    def cut(grid: Grid) -> list[tuple[int, int]]:
        return [(axis.ranks, axis.local) for axis in meshes(world, *grid)[0].axes]

    for local, sizes in GRIDS:
        ranks, locals_ = zip(*cut((local, sizes)), strict=True)
        assert (math.prod(ranks), math.prod(locals_)) == (world.size, local)
    if world.size in (2, 4):
        assert cut(INSIDE)[1] == (1, INSIDE[1][1])
        assert cut(ACROSS)[1] == (ACROSS[1][1], 1)
        assert cut(BOTH)[1] == (BOTH[1][1] // BOTH[0], BOTH[0])
    if world.size == 2 and BOTH_OUTER[0] > 1:
        assert all(size > 1 for size in cut(BOTH_OUTER)[0])


def test_on_some_ranks(world: pc.Communicator, few: int) -> None:
    # Each half of the ranks has its own communicator.
    part = world.split(color=world.rank % 2)
    assert part is not None
    devices = devices_of_this_rank()[:few]
    mesh = pc.make_mesh((-1, 1), NAMES, comm=part, devices=devices)
    xs = values((world.size, few, 3))
    x = xs[world.rank]
    got = pc.shard_map(lambda x: lax.psum(x, NAMES), mesh=mesh, in_specs=P(NAMES), out_specs=P(NAMES))(x)
    want = xs[world.rank % 2 :: 2].sum(axis=(0, 1))
    np.testing.assert_allclose(got, np.broadcast_to(want, got.shape), rtol=1e-5, atol=1e-5)


def test_devices_in_another_order(world: pc.Communicator, local: int) -> None:
    devices = devices_of_this_rank()[:local][::-1]
    mesh = pc.make_mesh((-1,), ("i",), devices=devices)
    fun = pc.shard_map(
        lambda x: lax.all_gather(x, "i", tiled=True) * (1 + lax.axis_index("i")).astype(x.dtype),
        mesh=mesh, in_specs=P("i"), out_specs=P("i"),
    )  # fmt: skip
    n = world.size * local
    got = np.asarray(fun(np.arange(n, dtype=np.float32)[world.rank * local : (world.rank + 1) * local]))
    want = np.stack([np.arange(n) * (1 + world.rank * local + k) for k in range(local)]).reshape(-1)
    np.testing.assert_array_equal(got, want)


# Derivatives and batches, from outside --------------------------------------------------------------------

ARGUMENTS = (P(), P("data"), P(None, "model"), P("data", "model"), P(NAMES[::-1]))
"""The specs of arrays of shape (n, n)."""


def arguments(sizes: Sequence[int]) -> list[np.ndarray]:
    n = math.prod(sizes)
    return [values((n, n), seed=k) / n for k in range(len(ARGUMENTS))]


def mixed(*args: Array) -> Array:
    """Depends on each argument, and is the same on all devices."""
    total: Array = jnp.float32(0)
    for k, (x, axes) in enumerate(zip(args, (NAMES, "data", "model", NAMES[::-1], NAMES), strict=True)):
        y = lax.psum(jnp.sin(x), axes) * lax.ppermute(x, NAMES, [(0, lax.axis_size(NAMES) - 1)])
        z = lax.psum_scatter(jnp.ravel(lax.all_gather(x, axes)) ** 2, axes, tiled=True)
        total = total + (k + 1) * jnp.sum(y) + jnp.sum(jnp.cos(z))
    return lax.pmean(total, NAMES)


def test_gradient_of_a_replicated_loss(world: pc.Communicator, grid: Grid) -> None:
    local, sizes = grid
    around = lambda mapped: jax.value_and_grad(lambda *args: jnp.sin(mapped(*args)), argnums=tuple(range(5)))
    compare(
        world, local, sizes, mixed, ARGUMENTS, P(), *arguments(sizes), around=around,
        result_specs=(P(), ARGUMENTS), tolerance=1e-3, check_vma=(True, False) if grid == BOTH_OUTER else (True,),
    )  # fmt: skip


def test_gradient_of_every_collective(world: pc.Communicator, few: int) -> None:
    total = world.size * few
    xs = values((total * SHAPE[0], *SHAPE[1:]))

    for check in (True, False):
        table = [f for name, f in LINEAR.items() if not (check and name in NOT_TYPED)]

        def fun(x: Array, table: Sequence[Callable[[Array], Array]] = table) -> Array:
            return lax.psum(sum(jnp.sum(jnp.sin(f(x))) / (k + 1) for k, f in enumerate(table)), "i")

        compare(
            world, few, (total,), fun, (P("i"),), P(), xs,
            names=("i",), around=jax.grad, result_specs=P("i"), tolerance=1e-3, check_vma=(check,),
        )  # fmt: skip


def test_gradient_of_a_loss_of_sharded_results(world: pc.Communicator, hard: Grid) -> None:
    # Each rank's loss is a sum over its own blocks. The sum of these over ranks is the loss of one process.
    local, sizes = hard

    def fun(w: Array, x: Array) -> Array:
        return lax.pmean(jnp.tanh(w * x), "data") + lax.all_to_all(w * x, NAMES, 0, 0, tiled=True)

    n = math.prod(sizes)
    w, x = values((n, 3)), values((n * sizes[0], 3 * sizes[1]), seed=1)
    around = lambda mapped: jax.grad(lambda w, x: jnp.sum(jnp.sin(mapped(w, x))), argnums=(0, 1))
    specs = (P(), P("data", "model"))
    compare(
        world, local, sizes, fun, specs, P("data", "model"), w, x,
        around=around, result_specs=specs, tolerance=1e-4,
    )  # fmt: skip


def test_gradient_of_what_some_axes_share(world: pc.Communicator, grid: Grid) -> None:
    # The result is the same along "model", so the gradient counts it once, not once for each device.
    local, sizes = grid
    x = values((2 * sizes[0], sizes[1]))

    def fun(x: Array) -> Array:
        return lax.psum(jnp.sin(x), "model")

    mesh, _ = meshes(world, local, sizes)
    mapped = pc.shard_map(fun, mesh=mesh, in_specs=P("data", "model"), out_specs=P("data"))
    got = jax.grad(lambda x: jnp.sum(jnp.cos(mapped(x))))(own(mesh, x, P("data", "model")))
    sums = np.sin(x).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(got, own(mesh, -np.sin(sums) * np.cos(x), P("data", "model")), rtol=1e-4, atol=1e-5)


def test_jvp(world: pc.Communicator, hard: Grid) -> None:
    local, sizes = hard
    around = lambda mapped: lambda *args: jax.jvp(mapped, args, tuple(jnp.cos(x) for x in args))
    compare(
        world, local, sizes, mixed, ARGUMENTS, P(), *arguments(sizes), around=around, result_specs=P(), tolerance=1e-3
    )


def test_vmap(world: pc.Communicator, hard: Grid) -> None:
    local, sizes = hard
    xs = np.stack([values((4 * math.prod(sizes), 3), seed=k) for k in range(2)])
    spec = P(NAMES)

    def fun(x: Array) -> Any:
        gathered = lax.all_gather(x, NAMES[::-1], tiled=True)
        return lax.psum(x, "model"), lax.ppermute(x, NAMES, [(0, 0)]), gathered.mean(axis=0, keepdims=True)

    compare(world, local, sizes, fun, (spec,), spec, xs, around=jax.vmap, lead=1)


def test_hessian_vector_product(world: pc.Communicator) -> None:
    local, sizes = INSIDE
    n = math.prod(sizes)
    x = values((n, 2))
    fun = lambda x: lax.psum(jnp.sum(jnp.sin(lax.ppermute(x, "data", [(0, 0)]) * lax.psum(x, NAMES))), NAMES)
    around = lambda mapped: lambda x: jax.jvp(jax.grad(mapped), (x,), (jnp.cos(x),))[1]
    spec = P(NAMES)
    compare(world, local, sizes, fun, (spec,), P(), x, around=around, result_specs=spec, tolerance=1e-3)


# How it is called -----------------------------------------------------------------------------------------


def test_as_a_decorator(world: pc.Communicator, grid: Grid) -> None:
    local, sizes = grid
    mesh, _ = meshes(world, local, sizes)

    @pc.shard_map(mesh=mesh, in_specs=(P(), P(NAMES)), out_specs=P())
    def total(w: Array, x: Array) -> Array:
        """Doc."""
        return lax.psum(w * x.sum(), NAMES)

    xs = values((math.prod(sizes), 3))
    assert total.__name__ == "total"
    assert total.__doc__ == "Doc."
    np.testing.assert_allclose(total(2.0, own(mesh, xs, P(NAMES))), 2 * xs.sum(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("compiler", [jax.jit, pc.jit], ids=["jax.jit", "pc.jit"])
def test_in_a_compiled_function(compiler: Any, world: pc.Communicator, grid: Grid) -> None:
    local, sizes = grid
    mesh, _ = meshes(world, local, sizes)
    spec = P("data", "model")
    mapped = pc.shard_map(lambda x: lax.psum(x, "model"), mesh=mesh, in_specs=spec, out_specs=spec)
    xs = values((2 * sizes[0], sizes[1]))
    fun = compiler(jax.value_and_grad(lambda x: jnp.sum(mapped(jnp.sin(mapped(x))) + 1)))
    got = fun(own(mesh, xs, spec))
    sums = np.broadcast_to(xs.sum(axis=1, keepdims=True), xs.shape)
    value = own(mesh, sizes[1] * np.sin(sums) + 1, spec).sum()
    np.testing.assert_allclose(got[0], value, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got[1], own(mesh, sizes[1] ** 2 * np.cos(sums), spec), rtol=1e-4, atol=1e-4)


def test_results_lie_where_the_next_call_wants_them(world: pc.Communicator, grid: Grid) -> None:
    local, sizes = grid
    mesh, _ = meshes(world, local, sizes)
    spec = P("data", "model")
    step = pc.shard_map(lambda x: x + lax.psum(x, NAMES), mesh=mesh, in_specs=spec, out_specs=spec)
    x = step(own(mesh, np.ones(sizes, np.float32), spec))
    again = step(x)
    assert again.sharding == x.sharding
    assert len(x.sharding.device_set) == local
    n = math.prod(sizes)
    assert (np.asarray(again) == (1 + n) ** 2).all()


def test_donated_arguments(world: pc.Communicator, grid: Grid) -> None:
    local, sizes = grid
    mesh, _ = meshes(world, local, sizes)
    spec = P("data", "model")
    place = pc.shard_map(lambda x: 1 * x, mesh=mesh, in_specs=spec, out_specs=spec)
    xs = values((2 * sizes[0], 3 * sizes[1]))
    x, y = place(own(mesh, xs, spec)), place(own(mesh, xs, spec))
    step = pc.shard_map(
        lambda x, y: lax.psum(x, "model") + y, mesh=mesh, in_specs=spec, out_specs=spec, donate_argnums=(0,)
    )
    got = step(x, y)
    assert x.is_deleted()
    assert not y.is_deleted()
    parts = xs.reshape(2 * sizes[0], sizes[1], 3).sum(axis=1)
    np.testing.assert_allclose(got, own(mesh, np.tile(parts, (1, sizes[1])) + xs, spec), rtol=1e-4, atol=1e-4)


def test_compiled_once(world: pc.Communicator, hard: Grid) -> None:
    local, sizes = hard
    mesh, _ = meshes(world, local, sizes)
    traces = []

    @pc.shard_map(mesh=mesh, in_specs=P(NAMES), out_specs=P())
    def fun(x: Array) -> Array:
        traces.append(x.shape)
        return lax.psum(x, NAMES)

    for k in range(3):
        fun(np.full(local, k, np.float32))
    assert traces == [(1,)]


# Derivatives inside, and types ------------------------------------------------------------------------------


def test_gradient_inside_of_a_summed_loss(world: pc.Communicator, few: int) -> None:
    # With types JAX counts the sum once, without types once for each device.
    total = world.size * few
    mesh, _ = meshes(world, few, (total,), ("i",))
    xs = np.arange(1.0, total + 1, dtype=np.float32)

    def fun(w: Array, x: Array) -> Array:
        return jax.grad(lambda w: lax.psum(jnp.sum(w * x), "i"))(w)

    specs = (P("i"), P("i"))
    mine = blocks(mesh, specs, (np.ones(total, np.float32), xs))
    own_values = own(mesh, xs, P("i"))
    np.testing.assert_allclose(pc.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=P("i"))(*mine), own_values)
    untyped = pc.shard_map(fun, mesh=mesh, in_specs=specs, out_specs=P("i"), check_vma=False)
    np.testing.assert_allclose(untyped(*mine), total * own_values)
    shared = pc.shard_map(fun, mesh=mesh, in_specs=(P(), P("i")), out_specs=P())
    np.testing.assert_allclose(shared(np.float32(1), own_values), xs.sum())


def rule_with_a_sum(kind: str) -> Callable[[Array, Array], Array]:
    """Returns a function with its own derivative, which names the axes; its factor of 3 shows that JAX has used it."""
    if kind == "jvp":
        jvp = jax.custom_jvp(lambda w, x: lax.psum(jnp.sum(w * x), NAMES))
        jvp.defjvp(lambda p, t: (jvp(*p), 3 * lax.psum(jnp.sum(t[0] * p[1]), NAMES)))
        return jvp
    vjp = jax.custom_vjp(lambda w, x: jnp.sin(w) * x)
    vjp.defvjp(
        lambda w, x: (vjp(w, x), (w, x)),
        lambda saved, ct: (3 * jnp.cos(saved[0]) * saved[1] * ct, lax.pmean(ct, NAMES) + 0 * ct),
    )
    return vjp


INSIDE_PROGRAMS: dict[str, Callable[[Array, Array], Array]] = {
    "sum": lambda w, x: lax.psum(jnp.sum(jnp.sin(w * x)), NAMES),
    "sum of one axis": lambda w, x: lax.pmean(jnp.sum(jnp.sin(lax.psum(w * x, "model"))), "data"),
    "gathered": lambda w, x: lax.psum(jnp.sum(lax.all_gather(w * x, "data", tiled=True) ** 2), NAMES),
    "permuted": lambda w, x: lax.pmean(jnp.sum(jnp.cos(lax.ppermute(w * x, "data", [(0, 0)]))), NAMES),
    "in a scan": lambda w, x: lax.scan(
        lambda c, k: (c + lax.psum(jnp.sum(jnp.sin(k * w * x)), NAMES), None), jnp.float32(0), jnp.arange(1.0, 3.0)
    )[0],
    "checkpointed": jax.checkpoint(lambda w, x: lax.psum(jnp.sum(jnp.sin(lax.psum(w * x, "model"))), "data")),
    "custom jvp": lambda w, x: lax.pmean(rule_with_a_sum("jvp")(w, x), NAMES),
    "custom vjp": lambda w, x: lax.psum(jnp.sum(rule_with_a_sum("vjp")(w + 0 * x, x)), NAMES),
}


@pytest.mark.parametrize("check", [True, False], ids=["typed", "untyped"])
def test_gradients_inside_and_outside(check: bool, world: pc.Communicator) -> None:
    local, sizes = BOTH_OUTER
    w, x = values((1, 3), seed=4), values((math.prod(sizes), 3))
    specs = (P(), P(NAMES))

    def every(w: Array, x: Array) -> dict[str, Array]:
        return {name: fun(w, x) for name, fun in INSIDE_PROGRAMS.items()}

    def inside(w: Array, x: Array) -> dict[str, tuple[Array, Array]]:
        gradient = lambda fun: jax.grad(lambda w, x: jnp.sin(fun(w, x)), argnums=(0, 1))
        return {name: gradient(fun)(w, x) for name, fun in INSIDE_PROGRAMS.items()}

    def outside(mapped: Callable[..., Any]) -> Callable[..., Any]:
        # Another factor for each result: errors do not cancel.
        loss = lambda *args: sum((k + 1) * jnp.sum(jnp.sin(y)) for k, y in enumerate(jax.tree.leaves(mapped(*args))))
        return jax.grad(loss, argnums=(0, 1))

    options: dict[str, Any] = {"tolerance": 1e-3, "check_vma": (check,)}
    compare(world, local, sizes, every, specs, P(), w, x, **options)
    compare(world, local, sizes, every, specs, P(), w, x, around=outside, result_specs=specs, **options)
    # Without types the gradient with respect to a shared argument differs from device to device.
    out_specs = dict.fromkeys(INSIDE_PROGRAMS, specs if check else (P(NAMES), P(NAMES)))
    compare(world, local, sizes, inside, specs, out_specs, w, x, **options)
    compare(world, local, sizes, inside, specs, out_specs, w, x, around=outside, result_specs=specs, **options)
