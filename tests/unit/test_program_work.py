"""What XLA's text of a compiled program says of the work of a device, against numbers computed by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from pycollective.jax_support.program_text import Program
from pycollective.planning.by_compiling.program_work import (
    IRREGULAR,
    LOOPS,
    UNKNOWN_TURNS,
    Communication,
    Convolution,
    Product,
    Stream,
    Work,
    work_of,
)
from pycollective.planning.by_compiling.scratch import COPIES_OPERANDS, scratch_of

Array = Any
P = jax.P


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def compiled(fun: Callable[..., Any], *args: Any) -> str:
    text = jax.jit(fun).lower(*args).compile().as_text()
    assert text is not None
    return text


def work(fun: Callable[..., Any], *args: Any, devices: int = 1) -> Work:
    """What a device does in a function, as XLA compiles it here."""
    return work_of(compiled(fun, *args), devices)


def counts(kind: type, found: Work) -> dict[Any, int]:
    return {item: count for item, count in found.computing.items() if isinstance(item, kind)}


def operations(found: Work) -> list[int]:
    return sorted(item.operations for item, count in counts(Convolution, found).items() for _ in range(count))


# (m, k) times (k, n) with m = 8, k = 16, n = 32, in the orders in which XLA may be given them
@pytest.mark.parametrize(
    ("formula", "left", "right", "batch", "form"),
    [
        ("mk,kn->mn", (8, 16), (16, 32), 1, "NN"),
        ("mk,nk->mn", (8, 16), (32, 16), 1, "NT"),
        ("km,nk->mn", (16, 8), (32, 16), 1, "TT"),
        ("km,kn->mn", (16, 8), (16, 32), 1, "TN"),
        ("bmk,bkn->bmn", (3, 8, 16), (3, 16, 32), 3, "NN"),
        ("bhmk,bhnk->bhmn", (3, 2, 8, 16), (3, 2, 32, 16), 6, "NT"),
        ("amk,kn->amn", (2, 4, 16), (16, 32), 1, "NN"),
        ("akm,akn->mn", (2, 8, 8), (2, 8, 32), 1, "NN"),  # XLA makes one matrix of it first
    ],
)
def test_products(formula: str, left: tuple[int, ...], right: tuple[int, ...], batch: int, form: str) -> None:
    found = work(lambda x, y: lax.optimization_barrier(jnp.einsum(formula, x, y)), f32(*left), f32(*right))
    [(product, count)] = counts(Product, found).items()
    assert (product._replace(form=""), count) == (Product("float32", batch, 8, 16, 32, ""), 1)
    assert product.form == form


def test_a_matrix_that_lies_transposed() -> None:
    text = _FUSION.replace("f32[8,16]{1,0}", "f32[8,16]{0,1}")
    assert work_of(text, 1).computing == {Product("float32", 1, 8, 16, 32, "TN"): 1}


def test_a_product_with_a_vector() -> None:
    found = work(jnp.matmul, f32(64, 128), f32(128))
    assert counts(Product, found) == {Product("float32", 1, 64, 128, 1): 1}
    assert not counts(Stream, found), "the product reads and writes its arrays in its own time"


def test_the_same_product_several_times() -> None:
    def gradients(w: Array, x: Array) -> Array:
        return jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w)))(w)

    # forward two; backward one for the examples of the second layer, and one for the matrix in each
    found = counts(Product, work(gradients, f32(32, 32), f32(32, 32)))
    assert {product._replace(form="") for product in found} == {Product("float32", 1, 32, 32, 32, "")}
    assert sum(found.values()) == 5


_FUSION = """HloModule f

ENTRY %main (x: f32[8,16], y: f32[16,32]) -> f32[8,32] {
  %x = f32[8,16]{1,0} parameter(0)
  %y = f32[16,32]{1,0} parameter(1)
  ROOT %z = f32[8,32]{1,0} fusion(%x, %y), kind=kOutput, calls=%fused
}

%fused (p0: f32[8,16], p1: f32[16,32]) -> f32[8,32] {
  %p0 = f32[8,16]{1,0} parameter(0)
  %p1 = f32[16,32]{1,0} parameter(1)
  %d = f32[8,32]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = f32[8,32]{1,0} tanh(%d)
}
"""


def test_a_product_inside_a_fusion() -> None:
    assert work_of(_FUSION, 1).computing == {Product("float32", 1, 8, 16, 32): 1}


def convolve(**options: Any) -> Callable[[Array, Array], Array]:
    usual = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": ("NHWC", "HWIO", "NHWC")}
    return lambda x, w: lax.conv_general_dilated(x, w, **{**usual, **options})


# XLA leaves products and convolutions to a library from JAX 0.10 on.
HAS_LIBRARY = "kind=kCustom" in compiled(convolve(), f32(8, 16, 16, 8), f32(3, 3, 8, 32))


# 4 images of 10 x 10 with 6 channels, windows of 3 x 3, 8 channels after it
@pytest.mark.parametrize(
    ("options", "kernel", "smallest", "multiplications"),
    [
        # few channels: the geometric mean of 6 and 8, or of 3 and 4
        ({}, (3, 3, 6, 8), 7, 4 * 100 * 8 * 9 * 6),
        ({"window_strides": (2, 2)}, (3, 3, 6, 8), 7, 4 * 25 * 8 * 9 * 6),
        ({"padding": "VALID"}, (3, 3, 6, 8), 7, 4 * 64 * 8 * 9 * 6),
        ({"rhs_dilation": (2, 2)}, (3, 3, 6, 8), 7, 4 * 100 * 8 * 9 * 6),
        # 20 x 19 places, of whose window entries every sixth is no zero
        ({"lhs_dilation": (2, 3), "padding": ((2, 1), (-8, 1))}, (3, 3, 6, 8), 7, 4 * 20 * 19 * 8 * 9),
        ({"feature_group_count": 2}, (3, 3, 3, 8), 3, 4 * 100 * 8 * 9 * 3),
        ({"feature_group_count": 6}, (3, 3, 1, 6), 1, 4 * 100 * 6 * 9),
        ({}, (3, 3, 6, 64), 64 if HAS_LIBRARY else 20, 4 * 100 * 64 * 9 * 6),  # XLA's library: the larger number
        ({"padding": "VALID"}, (10, 10, 6, 8), 4, 4 * 8 * 600),  # one place in each image
    ],
)
def test_convolutions(options: dict[str, Any], kernel: tuple[int, ...], smallest: int, multiplications: int) -> None:
    found = work(convolve(**options), f32(4, 10, 10, 6), f32(*kernel))
    assert counts(Convolution, found) == {Convolution("float32", smallest, 2 * multiplications): 1}


def test_a_convolution_along_one_dimension_with_the_channels_first() -> None:
    def fun(x: Array, w: Array) -> Array:
        return lax.conv_general_dilated(x, w, (2,), "VALID", dimension_numbers=("NCW", "OIW", "NCW"))

    # (21 - 3) / 2 + 1 = 10 places
    found = counts(Convolution, work(fun, f32(4, 6, 21), f32(8, 6, 3)))
    assert found == {Convolution("float32", 7, 2 * 4 * 10 * 8 * 6 * 3): 1}


@pytest.mark.parametrize("stride", [1, 2])
def test_the_gradient_with_respect_to_the_kernel(stride: int) -> None:
    fun = convolve(window_strides=(stride, stride))

    def gradient(x: Array, w: Array) -> Array:
        return jax.grad(lambda w: jnp.sum(jnp.tanh(fun(x, w))))(w)

    # Each entry of the kernel's gradient is a sum over all places in all examples: as many operations as forward.
    forward = 2 * 4 * (10 // stride) ** 2 * 8 * 9 * 6
    assert operations(work(gradient, f32(4, 10, 10, 6), f32(3, 3, 6, 8))) == [forward, forward]


@pytest.mark.parametrize(
    ("fun", "functions"),
    [
        (jnp.tanh, 1000),
        (jnp.sqrt, 1000),
        (lambda x: jnp.sin(jnp.exp(x)), 2000),
        (lambda x: 2 * x + 1, 0),
        (lambda x: jnp.tanh(x[:10]).sum() + x, 100),
    ],
)
def test_functions(fun: Callable[[Array], Array], functions: int) -> None:
    found = counts(Stream, work(fun, f32(100, 10)))
    assert sum(count * stream.functions for stream, count in found.items()) == functions


@pytest.mark.parametrize(
    ("dtype", "nbytes"),
    [("float32", 4), ("bfloat16", 2), ("int8", 1), ("bool", 1), ("complex64", 8), ("int32", 4), ("float8_e4m3fn", 1)],
)
def test_a_pass_over_memory(dtype: str, nbytes: int) -> None:
    x = jax.ShapeDtypeStruct((100, 10), dtype)
    assert work(lambda x: x.T.copy(), x).computing == {Stream(2 * 1000 * nbytes, 0, (1000 * nbytes,)): 1}


def test_a_column_times_a_row_is_not_transposed() -> None:
    text = _FUSION.replace("8,16]", "8,1]").replace("16,32]", "1,32]")
    assert work_of(text, 1).computing == {Product("float32", 1, 8, 1, 32, "NN"): 1}


def test_a_transposition_without_a_copy_is_followed() -> None:
    text = """HloModule f

ENTRY %main (x: f32[8,4]) -> f32[4,8] {
  %x = f32[8,4]{1,0} parameter(0)
  ROOT %z = f32[4,8]{1,0} fusion(%x), kind=kLoop, calls=%fused
}

%fused (p0: f32[8,4]) -> f32[4,8] {
  %p0 = f32[8,4]{1,0} parameter(0)
  %b = f32[4,8]{0,1} bitcast(%p0)
  ROOT %c = f32[4,8]{1,0} copy(%b)
}
"""
    assert work_of(text, 1).computing == {Stream(2 * 128, 0, (128,)): 1}
    assert work_of(text.replace("%c = f32[4,8]{1,0}", "%c = f32[4,8]{0,1}"), 1).computing == {Stream(2 * 128, 0): 1}


@pytest.mark.parametrize(
    ("fun", "transposed"),
    [
        (lambda x, y: 2 * x + y.T, (8 * 16 * 4,)),
        (lambda x, y: x.T + y + 1, (16 * 8 * 4,)),
        (lambda x, y: 2 * x + y.reshape(16, 8), ()),
        (lambda x, y: (2 * x + y.T).T, (16 * 8 * 4,)),  # the result is read along y's rows: x is what is transposed
        (lambda x, y: x[:, 0] + y[0] * 2, (16 * 4,)),
    ],
    ids=["the second", "the first", "none", "the first after all", "a column"],
)
def test_arrays_that_are_read_along_the_columns(fun: Callable[..., Any], transposed: tuple[int, ...]) -> None:
    found = counts(Stream, work(fun, f32(16, 8), f32(8, 16)))
    assert tuple(size for stream in found for size in stream.transposed) == transposed


_ORDERS = """HloModule f

ENTRY %main (x: f32[4,8,16], y: f32[16,8]) -> f32[16,8,4] {
  %x = f32[4,8,16]{1,0,2} parameter(0)
  %y = f32[16,8]{1,0} parameter(1)
  ROOT %z = f32[16,8,4]{2,1,0} fusion(%x, %y), kind=kLoop, calls=%fused
}

%fused (p0: f32[4,8,16], p1: f32[16,8]) -> f32[16,8,4] {
  %p0 = f32[4,8,16]{1,0,2} parameter(0)
  %c = f32[4,8,16]{2,1,0} copy(%p0)
  %t = f32[16,8,4]{0,1,2} transpose(%c), dimensions={2,1,0}
  %d = f32[16,8,4]{2,1,0} copy(%t)
  %p1 = f32[16,8]{1,0} parameter(1)
  %b = f32[16,8,4]{2,1,0} broadcast(%p1), dimensions={0,1}
  ROOT %a = f32[16,8,4]{2,1,0} add(%d, %b)
}
"""


def test_a_fusion_reads_in_the_order_of_its_result() -> None:
    # z runs along x's first dimension, whose neighbours lie 8 apart. A row of y is read four times for each element.
    assert work_of(_ORDERS, 1).computing == {Stream((2 * 512 + 128) * 4, 0, (512 * 4,)): 1}
    # A second transposition takes the first one back: x lies as z does.
    straight = _ORDERS.replace("f32[4,8,16]{1,0,2} p", "f32[4,8,16]{0,1,2} p")
    assert work_of(straight, 1).computing == {Stream((2 * 512 + 128) * 4, 0): 1}


def test_an_operation_reads_all_its_operands() -> None:
    assert work(lambda x, y: x + y, f32(100, 10), f32(100, 10)).computing == {Stream(12000, 0): 1}


def test_an_operation_with_several_results() -> None:
    found = work(lambda x, y: lax.sort((x, y)), f32(100), jax.ShapeDtypeStruct((100,), "int8"))
    assert found.computing[Stream(2 * 100 * (4 + 1), 0)] == 1


def test_a_program_that_only_copies_a_number() -> None:
    found = work(lambda x: 3, f32(4))
    assert found == Work(Counter({Stream(8, 0): 1}), Counter())


W = f32(50, 16, 16)


def test_a_loop_counts_its_turns() -> None:
    found = work(lambda x, ws: lax.scan(lambda c, w: (jnp.tanh(c @ w), None), x, ws)[0], f32(8, 16), W)
    assert counts(Product, found) == {Product("float32", 1, 8, 16, 16): 50}
    assert sum(count * stream.functions for stream, count in counts(Stream, found).items()) == 50 * 8 * 16


def test_loops_in_loops() -> None:
    def inner(c: Array, w: Array) -> tuple[Array, None]:
        return lax.fori_loop(0, 3, lambda i, c: c @ w, c), None

    found = work(lambda x, ws: lax.scan(inner, x, ws)[0], f32(8, 16), W)
    assert counts(Product, found) == {Product("float32", 1, 8, 16, 16): 150}


def test_a_loop_of_unknown_length_counts_once() -> None:
    found = work(lambda x, w: lax.while_loop(lambda c: c.sum() < 1, lambda c: c @ w, x), f32(8, 16), f32(16, 16))
    assert counts(Product, found) == {Product("float32", 1, 8, 16, 16): 1}
    assert found.doubtful[UNKNOWN_TURNS][Product("float32", 1, 8, 16, 16)] == 1


def test_what_may_be_computed_during_a_collective() -> None:
    """Neither what brings its operands nor what waits for its result, also where another program is called."""
    mesh = jax.make_mesh((2,), ("i",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    cut, whole = (jax.sharding.NamedSharding(mesh, spec) for spec in (P("i"), P()))

    def step(x: Array, w: Array, y: Array) -> tuple[Array, Array]:
        before = x @ w  # rows 8: 4 on each device
        total = before.sum(0)
        beside = lax.fori_loop(0, 3, lambda _, y: y @ w, y)
        return jnp.outer(total, total) @ w, beside

    program = jax.jit(step, in_shardings=(cut, whole, whole), out_shardings=whole)
    text = program.lower(f32(8, 16), f32(16, 16), f32(32, 16)).compile().as_text()
    assert text is not None
    found = work_of(text, 2)
    [beside] = found.beside
    assert beside.communication == Communication("psum", 64, (0, 1))
    assert found.communication == {beside.communication: 1}
    products = {one: count for one, count in beside.computing.items() if isinstance(one, Product)}
    assert products == {Product("float32", 1, 32, 16, 16): 3}
    assert {product.m for product in counts(Product, found)} >= {4, 16, 32}


def test_what_no_measured_program_is_like() -> None:
    """Long loops with all inside, gathers and sorts; neither short loops nor what is beside them."""

    def step(x: Array, ws: Array, places: Array) -> Array:
        def of_turns(count: int) -> Array:
            return lax.scan(lambda c, w: (lax.cond(c[0, 0] > 0, lambda: c @ w, lambda: c), None), x, ws[:count])[0]

        return (of_turns(50) + of_turns(5))[places] @ ws[0]

    found = work(step, f32(8, 16), W, jax.ShapeDtypeStruct((4,), "int32"))
    square, last = (Product("float32", 1, rows, 16, 16) for rows in (8, 4))
    assert counts(Product, found) == {square: 55, last: 1}
    assert set(found.doubtful) == {LOOPS, IRREGULAR}
    assert found.doubtful[LOOPS][square] == 50
    assert last not in found.doubtful[LOOPS] + found.doubtful[IRREGULAR]
    assert sum(found.doubtful[IRREGULAR].values()) == 1
    assert IRREGULAR in work(jnp.sort, f32(100)).doubtful
    assert not work(lambda x: jnp.tanh(x @ x), f32(16, 16)).doubtful


def test_of_a_stack_a_loop_reads_one_slice_in_a_turn() -> None:
    found = work(lambda x, ws: lax.scan(lambda c, w: (c @ w, None), x, ws)[0], f32(8, 16), W)
    largest = max(stream.nbytes for stream, count in counts(Stream, found).items() if count >= 50)
    assert largest in (2 * 1024, 2 * 1024 + 4)  # the slice is read and written; maybe its place is read as well


def test_into_a_stack_a_loop_writes_one_slice_in_a_turn() -> None:
    found = work(lambda x: lax.scan(lambda c, _: (c + 1, c), x, None, length=50)[1], f32(64, 16))
    largest = max(stream.nbytes for stream, count in counts(Stream, found).items() if count >= 50)
    assert 2 * 4096 <= largest <= 2 * 4096 + 8


def test_rows_that_are_gathered_and_scattered() -> None:
    """The gradient of an embedding: the table is filled with zeros once, and 7 rows are added."""

    def gradient(table: Array, i: Array) -> Array:
        return jax.grad(lambda table: jnp.sum(table[i] ** 2))(table)

    table, rows = 1000 * 256 * 4, 7 * 256 * 4
    found = counts(Stream, work(gradient, f32(1000, 256), jax.ShapeDtypeStruct((7,), "int32")))
    # XLA fills the table in one pass, which counts as written once or twice, and the rest is rows and their places.
    assert sum(stream.nbytes >= table for stream in found) == 1
    rest = sum(count * stream.nbytes for stream, count in found.items() if stream.nbytes < table)
    assert 4 * rows <= rest < 6.5 * rows


_SCATTER = """HloModule f

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

%fused (p0: f32[1000,256], p1: s32[7,1], p2: f32[7,1,256]) -> f32[1000,256] {
  %p0 = f32[1000,256]{1,0} parameter(0)
  %p1 = s32[7,1]{1,0} parameter(1)
  %p2 = f32[7,1,256]{2,1,0} parameter(2)
  ROOT %s = f32[1000,256]{1,0} scatter(%p0, %p1, %p2), update_window_dims={1,2}, to_apply=%add
}

ENTRY %main (x: f32[1000,256], i: s32[7,1], u: f32[7,1,256]) -> f32[1000,256] {
  %x = f32[1000,256]{1,0} parameter(0)
  %i = s32[7,1]{1,0} parameter(1)
  %u = f32[7,1,256]{2,1,0} parameter(2)
  ROOT %z = f32[1000,256]{1,0} fusion(%x, %i, %u), kind=kLoop, calls=%fused
}
"""


def test_a_scatter_inside_a_fusion() -> None:
    assert work_of(_SCATTER, 1).computing == {Stream(28 + 2 * 7168, 0): 1}


BRANCHES = [lambda x, w: x @ w, lambda x, w: (x @ w) @ w, lambda x, w: x]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 1), (1, 2)])
def test_of_a_conditional_the_largest_branch_counts(order: tuple[int, ...]) -> None:
    def fun(which: Array, x: Array, w: Array) -> Array:
        return lax.switch(which, [BRANCHES[i] for i in order], x, w)

    found = work(fun, jax.ShapeDtypeStruct((), "int32"), f32(16, 16), f32(16, 16))
    assert counts(Product, found) == {Product("float32", 1, 16, 16, 16): 2}


def test_a_conditional_in_a_loop() -> None:
    def turn(c: Array, x: Array) -> tuple[Array, None]:
        return lax.cond(x.sum() > 0, lambda c: c @ x, lambda c: c, c), None

    found = work(lambda c, xs: lax.scan(turn, c, xs)[0], f32(16, 16), W)
    assert counts(Product, found) == {Product("float32", 1, 16, 16, 16): 50}


def mesh(**axes: int) -> jax.sharding.Mesh:
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


MESH = mesh(a=2, b=4)
GROUPS = {"a": (0, 4), "b": (0, 1, 2, 3), ("a", "b"): tuple(range(8)), ("b", "a"): tuple(range(8))}


def communication(fun: Callable[..., Any], x: jax.ShapeDtypeStruct) -> dict[Communication, int]:
    """The collectives of a function of a device's part of an array."""
    spec = P("a", "b")
    mapped = jax.shard_map(fun, mesh=MESH, in_specs=spec, out_specs=spec, check_vma=False)
    found = work(mapped, x, devices=8).communication
    return {item._replace(group=tuple(sorted(item.group))): count for item, count in found.items()}


def _around(x: Array, axis: Any) -> Array:
    size = lax.axis_size(axis)
    return lax.ppermute(x, axis, [(i, (i + 1) % size) for i in range(size)])


@pytest.fixture
def axes_in_any_order() -> Iterator[None]:
    """JAX 0.11 and 0.12 refuse a ppermute over axes in another order than the mesh has, unless told not to."""
    option = "jax_raise_on_ppermute_sort_diff"
    known = hasattr(jax.config, option)
    if known:
        jax.config.update(option, False)
    yield
    if known:
        jax.config.update(option, True)


@pytest.mark.usefixtures("axes_in_any_order")
@pytest.mark.parametrize("axis", GROUPS, ids=str)
@pytest.mark.parametrize(
    ("operation", "fun", "gathers"),
    [
        ("psum", lax.psum, False),
        ("psum", lax.pmax, False),
        ("all_gather", lambda x, axis: lax.all_gather(x, axis, tiled=True), True),
        ("psum_scatter", lambda x, axis: lax.psum_scatter(x, axis, tiled=True), False),
        ("all_to_all", lambda x, axis: lax.all_to_all(x, axis, 0, 1, tiled=True), False),
        ("ppermute", _around, False),
    ],
    ids=["psum", "pmax", "all_gather", "psum_scatter", "all_to_all", "ppermute"],
)
def test_collectives(operation: str, fun: Callable[[Array, Any], Array], gathers: bool, axis: Any) -> None:
    group = GROUPS[axis]
    nbytes = 8 * 8 * 4 * (len(group) if gathers else 1)  # of operand or result, the larger
    assert communication(lambda x: fun(x, axis), f32(16, 32)) == {Communication(operation, nbytes, group): 1}


def test_a_permutation_of_neighbours_is_one_group() -> None:
    def fun(x: Array) -> Array:
        return lax.ppermute(x, "b", [(0, 1), (1, 2)])

    assert communication(fun, f32(16, 32)) == {Communication("ppermute", 256, (0, 1, 2)): 1}


def test_a_permutation_of_others_counts_as_well() -> None:
    def fun(x: Array) -> Array:
        return lax.ppermute(x, "b", [(1, 2)])

    assert communication(fun, f32(16, 32)) == {Communication("ppermute", 256, (1, 2)): 1}


def test_a_collective_of_several_arrays() -> None:
    def fun(x: Array) -> Array:
        a, b = lax.psum((x, x[:4, :1]), "b")
        return a + b.sum()

    found = communication(fun, f32(16, 32))
    assert sum(count * item.nbytes for item, count in found.items()) == 256 + 16, found
    assert {(item.operation, item.group) for item in found} == {("psum", (0, 1, 2, 3))}


def test_a_collective_in_a_loop() -> None:
    def fun(x: Array) -> Array:
        return lax.scan(lambda c, _: (lax.psum(jnp.tanh(c), "a"), None), x, None, length=6)[0]

    assert communication(fun, f32(16, 32)) == {Communication("psum", 256, (0, 4)): 6}


_ADD = """HloModule f, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %c = f32[] add(%a, %b)
}

"""
_BEGUN_AND_ENDED = (
    _ADD
    + """ENTRY %main (x: bf16[8,4], y: f32[6]) -> (bf16[16,4], f32[6]) {
  %x = bf16[8,4]{1,0} parameter(0)
  %y = f32[6]{0} parameter(1)
  %g = (bf16[8,4]{1,0}, bf16[16,4]{1,0}) all-gather-start(%x), replica_groups={{0,2},{1,3}}, dimensions={0}
  %r = f32[6]{0} all-reduce-start(%y), replica_groups={}, to_apply=%add
  %p = (f32[6]{0}, f32[6]{0}) collective-permute-start(%y), source_target_pairs={{0,3},{3,0},{1,2}}
  %gd = bf16[16,4]{1,0} all-gather-done(%g)
  %rd = f32[6]{0} all-reduce-done(%r)
  %pd = f32[6]{0} collective-permute-done(%p)
  ROOT %t = (bf16[16,4]{1,0}, f32[6]{0}) tuple(%gd, %rd)
}
"""
)


def test_collectives_that_begin_and_end_apart() -> None:
    """As XLA writes them for accelerators."""
    found = work_of(_BEGUN_AND_ENDED, 4)
    assert not found.computing
    assert found.communication == {
        Communication("all_gather", 16 * 4 * 2, (0, 2)): 1,
        Communication("psum", 24, (0, 1, 2, 3)): 1,
        Communication("ppermute", 24, (0, 3)): 1,
    }


def spread(fun: Callable[..., Any], specs: Any, out: Any) -> Callable[..., Any]:
    devices = mesh(data=8)
    shardings = jax.tree.map(lambda spec: jax.sharding.NamedSharding(devices, spec), (specs, out))
    return jax.jit(fun, in_shardings=shardings[0], out_shardings=shardings[1])


def test_collectives_of_global_arrays() -> None:
    """What the partitioner adds: the sum of gradients, and the gathering of a matrix that is cut."""

    def gradients(ws: list[Array], x: Array) -> list[Array]:
        return jax.grad(lambda ws: sum(jnp.sum(x @ w) for w in ws))(ws)

    found = work(spread(gradients, ([P(), P()], P("data")), P()), [f32(8, 4), f32(8, 6)], f32(32, 8), devices=8)
    assert {(item.operation, item.group) for item in found.communication} == {("psum", tuple(range(8)))}
    assert sum(count * item.nbytes for item, count in found.communication.items()) == (8 * 4 + 8 * 6) * 4

    found = work(spread(jnp.matmul, (P("data"), P("data")), P("data")), f32(64, 8), f32(8, 4), devices=8)
    assert found.communication == {Communication("all_gather", 8 * 4 * 4, tuple(range(8))): 1}
    assert counts(Product, found) == {Product("float32", 1, 8, 8, 4): 1}, "what one device makes"


@pytest.mark.parametrize(
    "words",
    [
        "replica_groups={}",
        "source_target_pairs={{0,1}}",
        "while(",
        "body=%nothing",
        "}, backend_config calls=%x ",
        ', metadata={}, backend_config={"known_trip_count":{"n":"1000"}}',
        '"',
        '\\"}',
        "{",
        "}",
        "\n  %y = f32[] dot(%z)",
        "%main (x: f32[]) -> f32[] {",
    ],
)
def test_words_of_users_change_nothing(words: str) -> None:
    def turn(c: Array, _: None) -> tuple[Array, None]:
        with jax.named_scope(words):
            return lax.psum(jnp.tanh(c @ c), "a"), None

    def fun(x: Array) -> Array:
        with jax.named_scope(words):
            return lax.scan(turn, x, None, length=4)[0]

    mapped = jax.shard_map(fun, mesh=MESH, in_specs=P(), out_specs=P(), check_vma=False)
    found = work(mapped, f32(16, 16), devices=8)
    assert counts(Product, found) == {Product("float32", 1, 16, 16, 16): 4}
    assert found.communication == {Communication("psum", 1024, (0, 4)): 4}


def test_the_text_of_a_program() -> None:
    program = Program.read(_SCATTER)
    assert program.entry == "main"
    assert {name: len(found) for name, found in program.computations.items()} == {"add": 3, "fused": 4, "main": 4}
    last = program.computations["fused"][-1]
    assert (last.opcode, last.operands, last.called, last.is_root) == ("scatter", ("p0", "p1", "p2"), ("add",), True)


# What XLA's library takes beside operands and results, in elements
@pytest.mark.parametrize(
    ("options", "elements"),
    [
        ({}, 8 * 18 * 18 * 8 + 9 * 8 * 32),  # with a border of one place
        ({"window_strides": (2, 2)}, 8 * 17 * 17 * 8 + 9 * 8 * 32),
        ({"padding": "VALID"}, 8 * 14 * 14 * 9 * 8 + 9 * 8 * 32),  # the window of each place
        ({"rhs_dilation": (2, 2)}, 8 * 16 * 16 * 9 * 8 + 9 * 8 * 32),
    ],
)
def test_a_convolution_copies_its_operands(options: dict[str, Any], elements: int) -> None:
    found = work(convolve(**options), f32(8, 16, 16, 8), f32(3, 3, 8, 32))
    assert found.scratch == (4 * elements if COPIES_OPERANDS else 0)


def test_what_is_reduced_inside_a_fusion_is_there_whole() -> None:
    def logits(x: Array, w: Array) -> Array:
        y = x @ w
        return y - y.max(axis=1, keepdims=True)

    assert work(logits, f32(256, 64), f32(64, 512)).scratch == (4 * 256 * 512 if HAS_LIBRARY else 0)
    assert work(jnp.dot, f32(256, 64), f32(64, 512)).scratch == 0


_SUM_OF_TWO = (
    _ADD
    + """ENTRY %main (x: f32[16,4], y: f32[6]) -> (f32[16,4], f32[6]) {
  %x = f32[16,4]{1,0} parameter(0)
  %y = f32[6]{0} parameter(1)
  ROOT %r = (f32[16,4]{1,0}, f32[6]{0}) all-reduce(%x, %y), replica_groups={{0,1},{2,3}}, to_apply=%add
}
"""
)


def test_the_largest_of_several_arrays_that_are_added_up() -> None:
    found = work_of(_SUM_OF_TWO, 4).communication
    assert found == {Communication("psum", 4 * (64 + 6), (0, 1), largest=4 * 64): 1}


_DOT = """HloModule f

ENTRY %main (x: f32[8,16], w: f32[16,32]) -> f32[8,32] {
  %x = f32[8,16]{1,0} parameter(0)
  %w = f32[16,32]{1,0} parameter(1)
  BEFORE
  ROOT %last = AFTER
}
"""
_PRODUCT = "f32[8,32]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


@pytest.mark.parametrize(
    ("before", "after", "nbytes"),
    [
        (f"%y = {_PRODUCT}", "f32[8]{0} reduce(%y, %zero), dimensions={1}", 4 * 8 * 32),
        (f"%y = {_PRODUCT}", "f32[8,32]{1,0} negate(%y)", 0),  # made part by part
        ("%most = f32[8]{0} reduce(%x, %zero), dimensions={1}", _PRODUCT, 0),  # it lies in the result's memory
    ],
)
def test_products_in_a_fusion_with_a_reduction(before: str, after: str, nbytes: int) -> None:
    program = Program.read(_DOT.replace("BEFORE", before).replace("AFTER", after))
    assert scratch_of(program.computations[program.entry]) == nbytes
