"""jax.lax's collectives in jax.shard_map over all ranks, against NumPy on the blocks of all devices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pycollective.transport import native
from tests.collective.programs import RUNTIME_ERRORS
from tests.collective.test_large import GIB, needs
from tests.distributed.arrays import COLLECTIVES, SIZE, by_mpi, check, mesh_of, over_blocks, put, values

Array = Any
Axes = tuple[str, ...]

MIXED = [2, 0, 3, 1] if SIZE == 4 else [1, 0]
"""The devices in another order, which is not its own inverse."""

# A mesh, and the axes along which the collectives go. On two ranks an axis has one device.
MESHES: dict[str, tuple[Callable[[], Mesh], tuple[Axes, ...]]] = {
    "line": (lambda: mesh_of(SIZE, 1), (("i",),)),
    "reversed": (lambda: mesh_of(SIZE, 1, order=range(SIZE)[::-1]), (("i",),)),
    "grid": (lambda: mesh_of(SIZE // 2, 2), (("i",), ("j",), ("i", "j"), ("j", "i"))),
    "mixed": (lambda: mesh_of(2, SIZE // 2, order=MIXED), (("i",), ("j",), ("j", "i"))),
}

BLOCK = (4, 8, 3)


def _everywhere(reduction: Callable[..., np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda xs: np.broadcast_to(reduction(xs, axis=0), xs.shape)


def _moved(pairs: Callable[[int], list[tuple[int, int]]]) -> tuple[Callable[..., Array], Callable[..., np.ndarray]]:
    def reference(xs: np.ndarray) -> np.ndarray:
        ys = np.zeros_like(xs)
        for source, dest in pairs(len(xs)):
            ys[dest] = xs[source]
        return ys

    return (lambda x, axes: lax.ppermute(x, axes, pairs(lax.axis_size(axes)))), reference


def _to_all(xs: np.ndarray, split: int, concat: int) -> np.ndarray:
    """Tiled: member m gets part m of everybody's dimension `split`, side by side along `concat`."""
    parts = [np.split(x, len(xs), axis=split) for x in xs]
    return np.stack([np.concatenate([part[m] for part in parts], axis=concat) for m in range(len(xs))])


def _own_row(x: Array, axes: Axes) -> Array:
    """As many rows as the axis has members."""
    return x[: lax.axis_size(axes)]


# The call on one block, and the reference from the blocks of a group to its results.
CASES: dict[str, tuple[Callable[[Array, Axes], Array], Callable[[np.ndarray], np.ndarray]]] = {
    "psum": (lax.psum, _everywhere(np.sum)),
    "pmean": (lax.pmean, _everywhere(np.mean)),
    "pmax": (lax.pmax, _everywhere(np.max)),
    "pmin": (lax.pmin, _everywhere(np.min)),
    "all_gather": (lax.all_gather, lambda xs: np.stack([xs] * len(xs))),
    "all_gather, axis 1": (
        lambda x, axes: lax.all_gather(x, axes, axis=1),
        lambda xs: np.stack([np.stack(list(xs), axis=1)] * len(xs)),
    ),
    "all_gather, tiled": (
        lambda x, axes: lax.all_gather(x, axes, axis=1, tiled=True),
        lambda xs: np.stack([np.concatenate(list(xs), axis=1)] * len(xs)),
    ),
    "psum_scatter": (lambda x, axes: lax.psum_scatter(_own_row(x, axes), axes), lambda xs: xs.sum(axis=0)[: len(xs)]),
    "psum_scatter, tiled": (
        lambda x, axes: lax.psum_scatter(x, axes, scatter_dimension=1, tiled=True),
        lambda xs: np.stack(np.split(xs.sum(axis=0), len(xs), axis=1)),
    ),
    "all_to_all": (
        lambda x, axes: lax.all_to_all(_own_row(x, axes), axes, 0, 0),
        lambda xs: xs[:, : len(xs)].swapaxes(0, 1),
    ),
    "all_to_all, tiled": (
        lambda x, axes: lax.all_to_all(x, axes, 1, 0, tiled=True),
        lambda xs: _to_all(xs, split=1, concat=0),
    ),
    "ring": _moved(lambda n: [(m, (m + 1) % n) for m in range(n)]),
    "shift": _moved(lambda n: [(m, m + 1) for m in range(n - 1)]),  # the first one gets zeros
    "one": _moved(lambda n: [(0, n - 1)]),
    "swap": _moved(lambda n: [(0, n - 1), (n - 1, 0)] if n > 1 else []),
    "itself": _moved(lambda n: [(m, m) for m in range(n)]),
    "nobody": _moved(lambda n: []),
    "axis_index": (
        lambda x, axes: lax.axis_index(axes),
        lambda xs: np.arange(len(xs), dtype=np.int32),
    ),
}


IN_ORDER = ("ring", "shift", "one", "swap", "itself")
"""JAX's ppermute counts the devices in the mesh's order, whichever order of the axes it is given."""


def cases_over(kinds: tuple[Axes, ...]) -> Iterator[tuple[str, Axes]]:
    for axes in kinds:
        yield from ((case, axes) for case in CASES if case not in IN_ORDER or axes == tuple(sorted(axes)))


def mapped(function: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    """The function of each device's block, jitted; the first dimensions of global arrays are those of the mesh."""
    spec = P("i", "j")
    on_block = lambda *xs: jax.tree.map(lambda y: y[None, None], function(*jax.tree.map(lambda x: x[0, 0], xs)))
    return jax.jit(jax.shard_map(on_block, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))


@pytest.mark.parametrize("name", MESHES)
def test_every_collective(name: str) -> None:
    make, kinds = MESHES[name]
    mesh = make()
    xs = values((*mesh.devices.shape, *BLOCK))

    def program(x: Array) -> dict[str, Array]:
        return {f"{case} {axes}": CASES[case][0](x, axes) for case, axes in cases_over(kinds)}

    got = mapped(program, mesh)(put(xs, mesh, "i", "j"))
    for case, axes in cases_over(kinds):
        want = over_blocks(CASES[case][1], xs, [mesh.axis_names.index(axis) for axis in axes])
        check(got[f"{case} {axes}"], want, rtol=1e-5, atol=1e-6, what=f"{case} {axes}")


DTYPES = {
    np.dtype(dtype).name: dtype
    for dtype in (
        *(np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.float32, np.float64),
        *(np.complex64, np.complex128, np.bool_, ml_dtypes.bfloat16),
    )
}
REDUCTIONS = {
    "psum": (lambda x: lax.psum(x, "i"), _everywhere(np.sum)),
    "psum_scatter": (lambda x: lax.psum_scatter(x, "i"), lambda xs: xs.sum(axis=0)),
    "pmax": (lambda x: lax.pmax(x, "i"), _everywhere(np.max)),
    "pmin": (lambda x: lax.pmin(x, "i"), _everywhere(np.min)),
}
MOVES = {
    "all_gather": (lambda x: lax.all_gather(x, "i"), lambda xs: np.stack([xs] * len(xs))),
    "all_to_all": (lambda x: lax.all_to_all(x, "i", 0, 0), lambda xs: xs.swapaxes(0, 1)),
    "ring": (
        lambda x: lax.ppermute(x, "i", [(m, (m + 1) % SIZE) for m in range(SIZE)]),
        lambda xs: np.roll(xs, 1, axis=0),
    ),
}


def operations_on(dtype: str) -> dict[str, Any]:
    without = {"bool": ("psum", "psum_scatter"), "complex64": ("pmax", "pmin"), "complex128": ("pmax", "pmin")}
    return {name: case for name, case in {**REDUCTIONS, **MOVES}.items() if name not in without.get(dtype, ())}


def test_every_dtype() -> None:
    mesh = mesh_of(SIZE, 1)
    xs = {name: values((SIZE, 1, SIZE, 5), dtype) for name, dtype in DTYPES.items()}

    def program(x: dict[str, Array]) -> dict[str, Array]:
        return {name: {id_: call(x[name]) for id_, (call, _) in operations_on(name).items()} for name in x}

    with jax.enable_x64(True):
        got = mapped(program, mesh)({name: put(x, mesh, "i") for name, x in xs.items()})
        for name, x in xs.items():
            for id_, (_, reference) in operations_on(name).items():
                # NumPy would add small integers in larger ones, and bfloat16 step by step.
                exact = x.astype(np.float32) if name == "bfloat16" else x
                want = over_blocks(lambda xs: reference(xs).astype(x.dtype), exact, [0])
                tolerance = {"float32": 1e-5, "complex64": 1e-5, "float64": 1e-13, "complex128": 1e-13}.get(name, 0)
                if name == "bfloat16" and id_.startswith("psum"):
                    tolerance = 0.02
                check(got[name][id_], want, rtol=tolerance, atol=tolerance / 10, what=f"{id_} of {name}")


@pytest.mark.skipif(COLLECTIVES != "mpi", reason="LOUD: gloo loses a NaN on some ranks")
def test_nan_and_infinities() -> None:
    mesh = mesh_of(SIZE, 1)
    nan, inf = np.nan, np.inf
    rows = [[1, nan, inf, -inf, nan, nan, inf, 3], [nan, 2, -inf, inf, inf, nan, inf, 3]] * (SIZE // 2)
    xs = np.array(rows, np.float32)[:, None]
    for dtype in (np.float32, ml_dtypes.bfloat16):
        x = put(xs.astype(dtype), mesh, "i")
        got = mapped(lambda x: (lax.pmax(x, "i"), lax.pmin(x, "i"), lax.psum(x, "i")), mesh)(x)
        with np.errstate(invalid="ignore"):
            want = [np.broadcast_to(np.add.reduce(xs, axis=0), xs.shape).astype(dtype)]
        want = [np.broadcast_to(f(xs, axis=0), xs.shape).astype(dtype) for f in (np.max, np.min)] + want
        check(got, tuple(want))


@by_mpi
def test_float16() -> None:
    """XLA carries it in messages alone; it refuses the rest before it calls MPI."""
    mesh = mesh_of(SIZE, 1)
    xs = values((SIZE, 1, SIZE, 5), np.float16)
    x = put(xs, mesh, "i")
    for refused in ("psum", "all_gather"):
        with pytest.raises(RUNTIME_ERRORS, match="Unsupported primitive type for reduction: f16"):
            jax.block_until_ready(mapped({**REDUCTIONS, **MOVES}[refused][0], mesh)(x))
    for call, reference in (MOVES["all_to_all"], MOVES["ring"]):
        check(mapped(call, mesh)(x), over_blocks(reference, xs, [0]))


LENGTHS = (0, 1, 7, 10007, 20000)
"""Of the rows of float32; one is longer than 64 KiB."""


def rows_of_every_length(lengths: tuple[int, ...]) -> None:
    mesh = mesh_of(SIZE, 1)
    operations = {**REDUCTIONS, **MOVES}
    xs = [values((SIZE, 1, SIZE, length)) for length in lengths]
    program = lambda xs: [{id_: call(x) for id_, (call, _) in operations.items()} for x in xs]
    got = mapped(program, mesh)([put(x, mesh, "i") for x in xs])
    want = [{id_: over_blocks(reference, x, [0]) for id_, (_, reference) in operations.items()} for x in xs]
    check(got, want, rtol=1e-5, atol=1e-6)


def test_every_length() -> None:
    rows_of_every_length(LENGTHS)


@pytest.fixture(params=[1, 7])
def small_limit(request: pytest.FixtureRequest) -> Iterator[None]:
    library = native.library()
    library.pycollective_set_max_count(ctypes.c_int64(request.param))
    yield
    library.pycollective_set_max_count(ctypes.c_int64(2**31 - 1))


@by_mpi
@pytest.mark.usefixtures("small_limit")
def test_in_pieces() -> None:
    rows_of_every_length((1, 7, 40))


@pytest.mark.whole
@needs(14 * GIB)
def test_a_message_of_more_than_2_31_bytes() -> None:
    """XLA counts the bytes of a message, and cuts the count down to MPI's int."""
    mesh = mesh_of(SIZE, 1)
    count = 2**31 + 4_321
    own = np.full((1, 1, count), jax.process_index() + 1, np.int8)
    own[..., -1] += 4
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("i")), own)
    del own
    got = np.asarray(mapped(MOVES["ring"][0], mesh)(x).addressable_data(0))
    other = SIZE - jax.process_index()
    assert (got[0, 0, 0], got[0, 0, count // 2], got[0, 0, -1]) == (other, other, other + 4)


@pytest.mark.whole
@needs(14 * GIB)
def test_a_sum_of_more_than_2_31_elements() -> None:
    mesh = mesh_of(SIZE, 1)
    count = 2**31 + 12_345
    own = np.full((1, 1, count), jax.process_index() + 1, np.int8)
    x = jax.make_array_from_process_local_data(NamedSharding(mesh, P("i")), own)
    del own
    got = np.asarray(mapped(REDUCTIONS["psum"][0], mesh)(x).addressable_data(0))
    assert got.min() == got.max() == 3


@by_mpi
def test_a_count_of_2_32_is_refused() -> None:
    """XLA would hand MPI its lower 32 bits; the rest of the array would be lost."""
    mesh, count = mesh_of(SIZE), 2**32 + 8
    for kind, collective in ("all-gather", lax.all_gather), ("all-reduce", lax.psum):
        block = lambda k, collective=collective: collective(jnp.full(count, k), "i").reshape(-1)[:1]
        f = jax.jit(jax.shard_map(block, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
        with (
            jax.enable_x64(True),
            pytest.raises(
                RuntimeError, match=rf"expected fewer than 2\^32 elements of a sum, .* got {count} in an {kind} of"
            ),
        ):
            f.lower(np.int8(3)).compile()


def test_derivatives() -> None:
    """Against jax.vmap on the global value."""
    mesh = mesh_of(SIZE, 1)
    xs, weights = values((SIZE, 1, SIZE, 5)), values((SIZE, 1, SIZE, 5), seed=1)
    ring = [(m, (m + 1) % SIZE) for m in range(SIZE)]

    def block(x: Array, w: Array) -> Array:
        y = jnp.sin(lax.psum(x * w, "i")) + lax.ppermute(x, "i", ring) * lax.pmean(w, "i")
        y = y + lax.all_to_all(x * x, "i", 0, 0) + lax.psum_scatter(x * w, "i")[None]
        return (y + lax.all_gather((w * x)[1], "i")).sum() * lax.axis_index("i").astype(x.dtype)

    def total(x: Array, w: Array) -> Array:
        spec = P("i", "j")
        on_block = lambda x, w: block(x[0, 0], w[0, 0])[None, None]
        return jax.shard_map(on_block, mesh=mesh, in_specs=spec, out_specs=spec)(x, w).sum()

    want = jax.jit(jax.value_and_grad(lambda x, w: jax.vmap(block, axis_name="i")(x, w).sum(), argnums=(0, 1)))(
        xs[:, 0], weights[:, 0]
    )
    value, slopes = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))(put(xs, mesh, "i"), put(weights, mesh, "i"))
    check(value, np.asarray(want[0]), rtol=1e-4)
    check(slopes, jax.tree.map(lambda y: np.asarray(y)[:, None], want[1]), rtol=1e-4, atol=1e-5)


def test_in_loops_and_branches() -> None:
    mesh = mesh_of(SIZE // 2, 2)
    xs = values((*mesh.devices.shape, 3))
    ring = [(0, 1), (1, 0)]

    def block(x: Array) -> tuple[Array, Array]:
        def step(y: Array, k: Array) -> tuple[Array, Array]:
            moved = lax.ppermute(y, "j", ring)
            y = lax.cond(k % 2 == 0, lambda: lax.psum(moved, "i"), lambda: moved - lax.pmax(y, ("i", "j")))
            return y, y[0]

        y, firsts = lax.scan(step, x, jnp.arange(5))
        limit = lambda y: lax.psum(jnp.abs(y).sum(), ("i", "j")) < 100
        return lax.while_loop(limit, lambda y: 2 * lax.ppermute(y, "j", ring), y), firsts

    y, firsts = xs, []
    for k in range(5):
        moved = y[:, ::-1]
        everywhere = lambda z: np.broadcast_to(z, xs.shape)
        y = everywhere(moved.sum(axis=0)) if k % 2 == 0 else moved - everywhere(y.max(axis=(0, 1)))
        firsts.append(y[..., 0])
    while np.abs(y).sum() < 100:
        y = 2 * y[:, ::-1]
    check(mapped(block, mesh)(put(xs, mesh, "i", "j")), (y, np.stack(firsts, axis=-1)), rtol=1e-5, atol=1e-5)
