"""Transforms of arrays that are cut among devices, over the axes of jax.vmap, against jax.numpy.fft of whole arrays."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

import pycollective as pc
from pycollective.fft.along_cut import _product_modulo
from tests.cases import values

Array = Any
P = jax.P

SIZES = {"y": 2, "x": 3}
"""The devices of the mesh, the first axis first."""


def groups(spec: Any, ndim: int) -> list[tuple[str, ...]]:
    """Returns the names along which each dimension is cut."""
    entries = [*spec] + [None] * (ndim - len(spec))
    return [() if entry is None else (entry,) if isinstance(entry, str) else tuple(entry) for entry in entries]


class Places(NamedTuple):
    """The blocks of an array.

    Attributes:
        sizes: the numbers of blocks along the dimensions.
        of_devices: for each place in the mesh the numbers of its block along the dimensions.
    """

    sizes: list[int]
    of_devices: dict[tuple[int, ...], list[int]]


def places(spec: Any, ndim: int) -> Places:
    names = groups(spec, ndim)
    counts = [[SIZES[name] for name in each] for each in names]
    of_devices = {}
    for place in np.ndindex(*SIZES.values()):
        at = dict(zip(SIZES, place, strict=True))
        numbers = [[at[name] for name in each] for each in names]
        of_devices[place] = [
            int(np.ravel_multi_index(number, count)) if count else 0
            for number, count in zip(numbers, counts, strict=True)
        ]
    return Places([int(np.prod(count)) for count in counts], of_devices)


def part(numbers: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(k * n, (k + 1) * n) for k, n in zip(numbers, lengths, strict=True))


def blocks(x: Array, spec: Any, ignored: Sequence[int] = ()) -> np.ndarray:
    """Returns the blocks of all devices, of shape (2, 3, ...). Zeros follow the end of the array.

    Args:
        x: the whole array.
        spec: how it is cut.
        ignored: the dimensions past whose end are numbers that a transform has to ignore.
    """
    sizes, of_devices = places(spec, x.ndim)
    lengths = [-(-n // size) for n, size in zip(x.shape, sizes, strict=True)]
    pads = [(0, size * length - n) for n, size, length in zip(x.shape, sizes, lengths, strict=True)]
    fills = [(0, 77) if axis in ignored else (0, 0) for axis in range(x.ndim)]
    x = np.pad(np.asarray(x), pads, constant_values=fills)
    out = np.empty((*SIZES.values(), *lengths), x.dtype)
    for place, numbers in of_devices.items():
        out[place] = x[part(numbers, lengths)]
    return out


def joined(blocks: Array, spec: Any, shape: Sequence[int], *, padding_is_zero: bool = True) -> np.ndarray:
    """Returns the array that has these blocks."""
    blocks = np.asarray(blocks)
    sizes, of_devices = places(spec, len(shape))
    lengths = blocks.shape[2:]
    assert [-(-n // size) for n, size in zip(shape, sizes, strict=True)] == list(lengths)
    whole = np.zeros([n * size for n, size in zip(lengths, sizes, strict=True)], blocks.dtype)
    for place, numbers in of_devices.items():
        whole[part(numbers, lengths)] = blocks[place]
    kept = whole[tuple(slice(n) for n in shape)]
    if padding_is_zero:
        assert np.count_nonzero(whole) == np.count_nonzero(kept)
    return kept


def over_devices(function: Callable[..., Array]) -> Callable[..., Array]:
    return jax.vmap(jax.vmap(function, axis_name="x"), axis_name="y")


class Case(NamedTuple):
    """A transform: its name, the shape of its operand, the other arguments."""

    name: str
    shape: tuple[int, ...]
    spec: Any
    out_spec: Any = None
    s: tuple[int, ...] | None = None
    axes: tuple[int, ...] | None = None
    norm: str | None = None
    pieces: int = 1


def operand(case: Case) -> np.ndarray:
    """Returns the operand. That of irfftn need not be the transform of real numbers, as in jax.numpy.fft."""
    x = np.asarray(values(case.shape, seed=1))
    return x if case.name == "rfftn" else (x + 1j * np.asarray(values(case.shape, seed=2))).astype(np.complex64)


def check(case: Case) -> None:
    x = operand(case)
    # Where the array is cut, its length is not that of the blocks: s says it.
    want = np.asarray(getattr(jnp.fft, case.name)(x, case.s, case.axes, case.norm))
    run = lambda x: getattr(pc.fft, case.name)(
        x, case.spec, case.s, case.axes, case.norm, out_spec=case.out_spec, pieces=case.pieces
    )
    lengths = {} if case.s is None else dict(zip(case.axes or range(x.ndim), case.s, strict=True))
    if case.name == "irfftn" and lengths:
        last = list(lengths)[-1]
        lengths[last] = lengths[last] // 2 + 1
    ignored = [axis for axis, n in lengths.items() if n <= x.shape[axis]]
    got = jax.jit(over_devices(run))(blocks(x, case.spec, ignored))
    out_spec = case.spec if case.out_spec is None else case.out_spec
    every = case.axes is None or len(case.axes) == x.ndim
    out = joined(got, out_spec, want.shape, padding_is_zero=every)
    assert out.dtype == want.dtype
    np.testing.assert_allclose(out, want, 1e-4, 2e-5 * max(1, np.abs(want).max(initial=0)))


@st.composite
def cases(draw: Any) -> Case:
    ndim = draw(st.integers(1, 4))
    shape = draw(st.lists(st.integers(1, 9), min_size=ndim, max_size=ndim))
    name = draw(st.sampled_from(["fftn", "ifftn", "rfftn", "irfftn"]))
    axes = tuple(draw(st.permutations(range(ndim)))[: draw(st.integers(1, ndim))])
    entries: list[Any] = draw(st.sampled_from([["y"], ["x"], ["y", "x"], [("y", "x")], [("x", "y")]]))
    specs = []
    for _ in range(2):
        places = draw(st.permutations(range(ndim)))
        if len(entries) > ndim:
            entries = entries[:ndim]
        spec: list[Any] = [None] * ndim
        for place, entry in zip(places, entries, strict=False):
            spec[place] = entry
        specs.append(P(*spec))
    # Nobody tells the transform the length of a dimension that it does not transform.
    names = groups(specs[0], ndim)
    shape = tuple(n if axis in axes or not names[axis] else 6 for axis, n in enumerate(shape))
    s = tuple(draw(st.one_of(st.just(shape[axis]), st.integers(1, 9))) for axis in axes)
    if name == "irfftn":
        s = (*s[:-1], draw(st.integers(1, 16)))
    norm = draw(st.sampled_from([None, "backward", "ortho", "forward"]))
    return Case(name, shape, *specs, s, axes, norm, draw(st.integers(1, 3)))


@seed(0)
@settings(max_examples=60, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=[*HealthCheck])
@given(cases())
def test_random(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    "case",
    [
        Case("fftn", (6, 7, 5), P("x")),
        Case("fftn", (6, 7, 5), P("x"), P(None, "x"), pieces=3),
        Case("rfftn", (7, 5, 6), P(None, "x"), s=(7, 5, 6), norm="ortho"),
        Case("rfftn", (5, 4, 9), P(None, None, "x"), P("x"), s=(5, 4, 9)),
        Case("irfftn", (7, 4, 5), P("x"), P(None, None, "x"), s=(7, 4, 9)),
        Case("irfftn", (5, 5), P(None, "x"), s=(5, 8)),
        Case("fftn", (4, 6, 3), P("y", "x"), P(None, "y", "x")),
        Case("ifftn", (3, 5, 7), P(None, "y", "x"), P("y", "x"), s=(3, 5, 7), pieces=2),
        Case("fftn", (5, 7), P("y", "x"), P("x", "y"), s=(5, 7)),
        Case("fftn", (13, 3, 2), P(("x", "y")), P(None, None, ("x", "y")), s=(13, 3, 2)),
        Case("fftn", (6, 4, 3), P("x"), s=(8, 3), axes=(1, 2)),
        Case("fftn", (6, 4), P("x"), s=(9, 2)),
        *(Case("fftn", (n,), P("x"), s=(n,), norm="ortho") for n in (1, 2, 9, 10, 97, 144, 1009)),
        *(Case("ifftn", (n,), P(("y", "x")), s=(n,)) for n in (5, 36, 72, 251)),
        Case("fftn", (2, 97, 1), P(None, ("y", "x")), s=(97,), axes=(1,)),
        Case("fftn", (100,), P("x"), s=(50,)),  # its blocks have another length than those of 50 entries
        Case("rfftn", (11,), P("x"), s=(11,)),
        Case("irfftn", (6,), P("x"), s=(11,)),
    ],
    ids=repr,
)
def test_table(case: Case) -> None:
    check(case)


def test_in_double_precision() -> None:
    with jax.enable_x64(True):
        for n in (72, 1009):
            x = np.random.default_rng(n).normal(size=n) + 0.5j
            got = jax.jit(over_devices(lambda x, n=n: pc.fft.fft(x, ("y", "x"), n)))(blocks(x, P(("y", "x"))))
            out = joined(got, P(("y", "x")), x.shape)
            assert out.dtype == np.complex128
            np.testing.assert_allclose(out, np.fft.fft(x), rtol=0, atol=1e-12 * n)


@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft", "fft2", "ifft2", "rfft2", "irfft2"])
def test_of_one_and_two_dimensions(name: str) -> None:
    x = np.asarray(values((3, 6, 4), seed=1))
    got = over_devices(lambda x: getattr(pc.fft, name)(x, P(None, "x"), norm="forward"))(blocks(x, P(None, "x")))
    want = np.asarray(getattr(jnp.fft, name)(x, norm="forward"))
    np.testing.assert_allclose(joined(got, P(None, "x"), want.shape), want, 1e-5, 1e-5)


@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "float32", "complex64"])
@pytest.mark.parametrize("shape", [(6, 4), (5,)])
def test_dtypes_are_those_of_jax(dtype: str, shape: tuple[int, ...]) -> None:
    x = np.asarray(values(shape, dtype, seed=1))
    want = np.asarray(jnp.fft.fftn(x))
    got = over_devices(lambda x: pc.fft.fftn(x, "x", shape))(blocks(x, P("x")))
    out = joined(got, P("x"), want.shape)
    assert out.dtype == want.dtype
    np.testing.assert_allclose(out, want, 1e-4, 1e-4)


@pytest.mark.parametrize(
    "case",
    [
        Case("fftn", (6, 4), P("x"), P(None, "x")),
        Case("rfftn", (4, 3, 5), P("y", "x"), s=(4, 3, 5)),
        Case("irfftn", (4, 5), P("x"), P(None, "x"), s=(4, 8)),
        Case("fftn", (18,), P("x"), s=(18,)),
        Case("ifftn", (7,), P(("y", "x")), s=(7,)),
    ],
    ids=repr,
)
def test_derivatives(case: Case) -> None:
    """Both modes and the second derivative, of a loss that is no quadratic form. The padding has no gradient."""
    x = operand(case)
    out_spec = case.spec if case.out_spec is None else case.out_spec
    one = lambda x: getattr(jnp.fft, case.name)(x, case.s)
    weight = np.asarray(values(np.asarray(one(x)).shape, seed=3))
    run = over_devices(lambda x: getattr(pc.fft, case.name)(x, case.spec, case.s, out_spec=out_spec))

    def loss(transform: Callable[[Array], Array], weight: Array, x: Array) -> Array:
        return jnp.sum(weight * jnp.abs(transform(x)) ** 3)

    # A device that no cut tells from others has the same block and the same loss, of which its block has the gradient.
    of_mesh = lambda x: loss(run, blocks(weight, out_spec), x)
    of_whole = lambda x: loss(one, weight, x)
    parts = blocks(x, case.spec)
    got, want = jax.jit(jax.grad(of_mesh))(parts), jax.jit(jax.grad(of_whole))(x)
    scale = np.abs(want).max()
    np.testing.assert_allclose(joined(got, case.spec, x.shape), want, 1e-4, 1e-5 * scale)
    hvp = lambda f, x: jax.jit(lambda x: jax.jvp(jax.grad(f), (x,), (x,)))(x)[1]
    got, want = hvp(of_mesh, parts), hvp(of_whole, x)
    scale = np.abs(want).max()
    np.testing.assert_allclose(joined(got, case.spec, x.shape), want, 1e-4, 1e-5 * scale)


@pytest.mark.parametrize("shape", [(3, 6, 4), (3, 18), (3, 7)])
def test_vmap_over_a_batch(shape: tuple[int, ...]) -> None:
    x, spec = np.asarray(values(shape, seed=1)), P(None, "x")
    want = np.fft.fftn(x, axes=range(1, x.ndim))
    got = over_devices(jax.vmap(lambda x: pc.fft.fftn(x, "x", shape[1:])))(blocks(x, spec))
    np.testing.assert_allclose(joined(got, spec, shape), want, 1e-4, 1e-4)


@pytest.mark.parametrize(
    ("case", "number"),
    [
        (Case("fftn", (6, 6, 6), P("x")), 2),
        (Case("fftn", (6, 6, 6), P("x"), P(None, "x")), 1),
        (Case("ifftn", (6, 6, 6), P(None, "x"), P("x")), 1),
        (Case("rfftn", (6, 6, 6), P("x"), P(None, "x")), 1),
        (Case("irfftn", (6, 6, 6), P(None, "x"), P("x"), s=(6, 6, 6)), 1),
        (Case("fftn", (6, 6, 6), P("x"), P(None, "x"), pieces=2), 2),
        (Case("fftn", (6, 6, 6), P("x"), axes=(1, 2)), 0),
        (Case("fftn", (6, 6, 6), P("y", "x")), 4),
        (Case("fftn", (6, 6, 6), P("y", "x"), P(None, "y", "x")), 2),
        (Case("ifftn", (6, 6, 6), P(None, "y", "x"), P("y", "x")), 2),
        (Case("irfftn", (6, 6, 6), P(None, "y", "x"), P("y", "x"), s=(6, 6, 6)), 2),
        (Case("fftn", (6, 6), P("y", "x")), 4),
        (Case("fftn", (18,), P("x")), 3),  # four steps
        (Case("fftn", (15,), P("x")), 3),  # Bluestein, with one for the chirp
        (Case("fftn", (6, 6), P("one")), 0),
    ],
    ids=repr,
)
def test_exchanges(case: Case, number: int) -> None:
    run = lambda x: getattr(pc.fft, case.name)(
        x, case.spec, case.s, case.axes, out_spec=case.out_spec, pieces=case.pieces
    )
    names = {**SIZES, "one": 1}
    sizes = [int(np.prod([names[name] for name in each])) for each in groups(case.spec, len(case.shape))]
    block = jnp.zeros([n // size for n, size in zip(case.shape, sizes, strict=True)], np.float32)
    block = block if case.name == "rfftn" else block.astype(np.complex64)
    text = str(jax.make_jaxpr(run, axis_env=list(names.items()))(block))
    assert len(re.findall(r"= all_to_all\[", text)) == number


def primitives(jaxpr: Any) -> Iterator[str]:
    """Returns the names of a program's primitives, in their order."""
    for eqn in jaxpr.eqns:
        inner = [value.jaxpr for value in eqn.params.values() if hasattr(value, "jaxpr")]
        yield from itertools.chain.from_iterable(map(primitives, inner)) if inner else [eqn.primitive.name]


def test_a_piece_is_transformed_by_itself() -> None:
    """So it can travel while the next piece is transformed."""
    run = lambda x: pc.fft.fftn(x, "x", out_spec=P(None, "x"), pieces=3)
    program = jax.make_jaxpr(run, axis_env=[("x", 2)])(jnp.zeros((6, 4, 4), np.complex64))
    order = [name for name in primitives(program.jaxpr) if name in ("fft", "all_to_all")]
    assert order == ["fft", "all_to_all"] * 3 + ["fft"]


@pytest.mark.parametrize("length", [1, 2, 7, 8])
def test_frequencies(length: int) -> None:
    for ours, numpys in ((pc.fft.fftfreq, np.fft.fftfreq), (pc.fft.rfftfreq, np.fft.rfftfreq)):
        want = numpys(length, 0.3)
        got = over_devices(lambda _, ours=ours: ours(length, ("y", "x"), 0.3))(np.zeros((2, 3)))
        np.testing.assert_allclose(joined(got, P(("y", "x")), want.shape), want, 1e-6)


@pytest.mark.parametrize("spec", [P("y", "x"), P(None, "x"), P("y")])
def test_cut_and_join(spec: Any) -> None:
    x = np.asarray(values((5, 8), seed=1))
    parts = over_devices(lambda _: pc.fft.cut(x, spec))(np.zeros((2, 3)))
    np.testing.assert_array_equal(parts, blocks(x, spec))
    whole = over_devices(lambda block: pc.fft.join(block, spec, x.shape))(parts)
    np.testing.assert_array_equal(whole, np.broadcast_to(x, (2, 3, 5, 8)))


def test_under_types_of_jax() -> None:
    """By JAX's types the whole array is the same on all devices, so a loss of it counts once."""
    mesh = jax.make_mesh((2, 3), ("y", "x"), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=jax.devices()[:6])
    spec, x = P("y", "x"), np.asarray(values((4, 6, 4), seed=1))

    def spectrum(x: Array) -> Array:
        return pc.fft.join(jnp.abs(pc.fft.rfftn(x, spec, out_spec=P(None, "y", "x"))), P(None, "y", "x"), (4, 6, 3))

    run = jax.shard_map(spectrum, mesh=mesh, in_specs=spec, out_specs=P())
    of_whole = lambda x: jnp.abs(jnp.fft.rfftn(x))
    np.testing.assert_allclose(jax.jit(run)(x), of_whole(x), 1e-4, 1e-4)
    got, want = (jax.jit(jax.grad(lambda x, f=f: jnp.sum(f(x) ** 3)))(x) for f in (run, of_whole))
    np.testing.assert_allclose(got, want, 1e-4, 1e-5 * np.abs(want).max())


def test_products_modulo() -> None:
    generator = np.random.default_rng(0)
    for n in (1, 2, 7, 65_537, 1 << 20, (1 << 30) - 35, (1 << 31) - 2):
        a, b = generator.integers(0, n, (2, 1000))
        a[:2] = b[0] = n - 1
        got = _product_modulo(a.astype(np.uint32), b.astype(np.uint32), n)
        np.testing.assert_array_equal(got, a * b % n)


def calls() -> Iterator[tuple[Callable[[Array], Array], type[Exception], str]]:
    """Wrong calls with a block of shape (2, 4), and what they say."""
    fftn = pc.fft.fftn
    yield lambda x: fftn(x, P("x", "y", "z")), ValueError, r"fftn: expected a spec with at most 2 entries.*got P\('x'"
    yield lambda x: fftn(x, "z"), NameError, r"fft\.fftn: expected an axis name that a transform.*got 'z'"
    yield lambda x: fftn(x, P(None, 3)), TypeError, r"fft\.fftn: expected a Communicator, got 3"
    yield lambda x: fftn(x, P("x", ("y", "x"))), ValueError, "a spec with each axis or communicator once"
    yield lambda x: fftn(x, "x", out_spec="y"), ValueError, r"an out_spec with the devices of spec, x, got y"
    yield lambda x: fftn(x, "x", axes=(0, -2)), ValueError, r"different axes from -2 to 1, got \[0, -2\]"
    yield lambda x: fftn(x, "x", axes=(2,)), ValueError, r"different axes from -2 to 1, got \[2\]"
    yield lambda x: fftn(x, "x", s=(4, 0)), ValueError, r"a positive length for each of the 2 axes, got \(4, 0\)"
    yield lambda x: fftn(x, "x", s=(4,), axes=(0, 1)), ValueError, r"each of the 2 axes, got \(4,\)"
    yield lambda x: fftn(x, "x", s=(4, 2.5)), TypeError, "a length of the transform to be an integer, got 2.5"
    yield lambda x: fftn(x, "x", norm="unitary"), ValueError, "norm to be .* got 'unitary'"
    yield lambda x: fftn(x, "x", pieces=0), ValueError, "pieces of at least 1, got 0"
    yield (
        lambda x: pc.fft.rfftn(x.astype(np.complex64), "x"),
        TypeError,
        "fft.rfftn: expected real numbers, got complex64. Call fft.fftn",
    )
    yield lambda x: pc.fft.rfftn(x, "x", axes=()), ValueError, "at least one axis, got none"
    yield (
        lambda x: pc.fft.irfft(x, P(None, "x")),
        ValueError,
        "irfft: expected the length of the result along dimension 1",
    )
    yield lambda x: pc.fft.join(x, "x", (7, 4)), ValueError, r"a shape whose blocks have shape \(2, 4\) on \[3, 1\]"
    yield lambda x: pc.fft.join(x, "x", (6,)), ValueError, r"a shape whose blocks have shape \(2, 4\)"
    yield lambda x: pc.fft.fftfreq(8, "z"), NameError, r"fft\.fftfreq: expected an axis name"


@pytest.mark.parametrize(("call", "error", "sentence"), [*calls()], ids=itertools.count())
def test_wrong_arguments(call: Callable[[Array], Array], error: type[Exception], sentence: str) -> None:
    with pytest.raises(error, match=sentence):
        over_devices(call)(np.zeros((2, 3, 2, 4), np.float32))
