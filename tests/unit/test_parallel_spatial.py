"""Arrays that are cut along dimensions, over the axes of jax.vmap and jax.shard_map, against the whole arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, example, given, seed, settings
from hypothesis import strategies as st
from jax import lax

from pycollective.parallel.spatial import conv, halo_exchange, reduce_window
from tests.cases import values

Array = Any
P = jax.P


def cut(x: Array, devices: int, axis: int) -> Array:
    """Returns the blocks of ``x`` along a dimension, stacked."""
    return jnp.stack(jnp.split(jnp.asarray(x), devices, axis))


def joined(blocks: Array, axis: int) -> Array:
    return jnp.concatenate(list(blocks), axis)


def padded(x: Array, before: int, after: int, axis: int, periodic: bool, fill: Any = 0) -> np.ndarray:
    pads = [(0, 0)] * x.ndim
    pads[axis] = (before, after)
    return np.pad(x, pads, "wrap") if periodic else np.pad(x, pads, constant_values=fill)


@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize(
    ("devices", "width"),
    [(4, 1), (4, (2, 0)), (4, (0, 3)), (4, (4, 5)), (3, (7, 20)), (2, (9, 1)), (1, (2, 7)), (4, 0)],
)
def test_a_halo_is_a_part_of_the_padded_array(devices: int, width: Any, periodic: bool) -> None:
    """A block has three entries; widths reach into several blocks, and past the array's ends."""
    x = np.asarray(values((2, 3 * devices), seed=1))
    before, after = width if isinstance(width, tuple) else (width, width)
    fill = 0 if periodic else -5
    want = padded(x, before, after, 1, periodic, fill)
    got = jax.vmap(lambda x: halo_exchange(x, "i", width, 1, periodic=periodic, fill=fill), axis_name="i")(
        cut(x, devices, 1)
    )
    assert got.shape == (devices, 2, before + 3 + after)
    for r in range(devices):
        np.testing.assert_array_equal(got[r], want[:, 3 * r : 3 * r + before + 3 + after])


@pytest.mark.parametrize("periodic", [False, True])
def test_halos_along_two_axes_have_their_corners(periodic: bool) -> None:
    x = np.asarray(values((6, 8), seed=2))
    want = padded(padded(x, 1, 2, 0, periodic), 2, 1, 1, periodic)

    def block(x: Array) -> Array:
        x = halo_exchange(x, "y", (1, 2), 0, periodic=periodic)
        return halo_exchange(x, "x", (2, 1), -1, periodic=periodic)

    blocks = x.reshape(3, 2, 2, 4).transpose(0, 2, 1, 3)  # 3 x 2 devices have 2 x 4 entries each
    got = jax.vmap(jax.vmap(block, axis_name="x"), axis_name="y")(blocks)
    for r in range(3):
        for c in range(2):
            np.testing.assert_array_equal(got[r, c], want[2 * r : 2 * r + 5, 4 * c : 4 * c + 7])


@pytest.mark.parametrize("types", [False, True])
def test_two_axes_cut_one_dimension(types: bool) -> None:
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = P(("a", "b"))
    run = jax.shard_map(
        lambda x: halo_exchange(x, ("a", "b"), (3, 0), 0), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=types
    )
    want = [0, 0, 0, 1, 2, 0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8]
    np.testing.assert_array_equal(jax.jit(run)(jnp.arange(1, 9)), want)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "bool", "complex64"])
def test_a_halo_keeps_the_dtype(dtype: str) -> None:
    x = cut(jnp.asarray(values((6,), dtype, seed=3)), 3, 0)
    got = jax.vmap(lambda x: halo_exchange(x, "i", 1, 0, fill=1), axis_name="i")(x)
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, np.stack([padded(np.ravel(x), 1, 1, 0, False, 1)[k : k + 4] for k in (0, 2, 4)]))


@pytest.mark.parametrize(("width", "messages"), [((2, 1), 2), ((5, 0), 2), ((50, 0), 3)])
def test_a_device_sends_one_message_to_each_that_needs_it(width: Any, messages: int) -> None:
    """Of blocks with four entries each: nothing is fetched from beyond the ends of the array."""
    run = lambda x: halo_exchange(x, "i", width, 0)
    text = str(jax.make_jaxpr(run, axis_env=[("i", 4)])(jnp.ones((4, 3))))
    assert text.count("= ppermute") == messages


def over(devices: int, types: bool | None) -> Callable[[Callable[..., Any], int], Callable[..., Any]]:
    """Returns what maps ``fun(own block, kernel)`` over blocks along a dimension: by vmap, or by shard_map."""

    def wrap(fun: Callable[..., Any], axis: int) -> Callable[..., Any]:
        if types is None:
            mapped = jax.vmap(fun, (0, None), axis_name="i")
            return lambda x, kernel: mapped(cut(x, devices, axis), kernel)
        mesh = jax.make_mesh((devices,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
        return jax.shard_map(
            lambda x, kernel: jax.tree.map(lambda y: y[None], fun(x, kernel)),
            mesh=mesh,
            in_specs=(P(*[None] * axis, "i"), P()),
            out_specs=P("i"),
            check_vma=types,
        )

    return wrap


def check(
    wrap: Callable[[Callable[..., Any], int], Callable[..., Any]],
    own: Callable[[Array, Array], Array],
    whole: Callable[[Array, Array], Array],
    x: Array,
    kernel: Array,
    axis: int,
    kernel_is_summed: bool = False,
) -> None:
    """Compares outputs, and gradients of a loss that weighs each output differently, by blocks and as a whole."""

    def with_gradients(fun: Callable[[Array, Array], Array], offset: Callable[[Array], Any]) -> Any:
        def both(x: Array, kernel: Array) -> Any:
            def loss(x: Array, kernel: Array) -> tuple[Array, Array]:
                y = fun(x, kernel)
                places = offset(y) + lax.broadcasted_iota(jnp.int32, y.shape, axis)
                return jnp.sum(jnp.sin(places.astype(y.dtype) + 1) * y**2), y

            gradients, y = jax.grad(loss, (0, 1), has_aux=True)(x, kernel)
            return y, *gradients

        return both

    blocks = wrap(with_gradients(own, lambda y: lax.axis_index("i") * y.shape[axis]), axis)
    y, dx, dkernel = jax.jit(blocks)(x, kernel)
    want_y, want_dx, want_dkernel = jax.jit(with_gradients(whole, lambda y: 0))(x, kernel)
    np.testing.assert_allclose(joined(y, axis), want_y, 1e-5, 1e-5)
    np.testing.assert_allclose(joined(dx, axis), want_dx, 1e-4, 1e-4)
    summed = dkernel[0] if kernel_is_summed else dkernel.sum(0)
    np.testing.assert_allclose(summed, want_dkernel, 1e-4, 1e-4)


class Setting(NamedTuple):
    """A convolution over a dimension that is cut among so many devices, with ``length`` entries each."""

    devices: int
    length: int
    window: int
    stride: int
    dilation: int
    padding: Any
    periodic: bool
    groups: int

    @property
    def span(self) -> int:
        return (self.window - 1) * self.dilation + 1

    @property
    def pair(self) -> tuple[int, int]:
        if not isinstance(self.padding, str):
            return self.padding[0]
        whole = (self.devices * self.length,)
        return lax.padtype_to_pads(whole, (self.span,), (self.stride,), self.padding)[0]

    @property
    def outputs(self) -> int:
        return max(0, (self.devices * self.length + sum(self.pair) - self.span) // self.stride + 1)


@st.composite
def a_setting(draw: st.DrawFn) -> Setting:
    devices, window = draw(st.integers(2, 4)), draw(st.integers(1, 5))
    stride, dilation = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    padding = draw(st.sampled_from(["SAME", "SAME_LOWER", "VALID", "pair", "pair", "ring"]))
    # Most settings with "SAME" are those that can be cut.
    length = draw(st.integers(1, 7)) if padding != "SAME" else stride * draw(st.integers(1, 3))
    periodic = padding == "ring"
    pads: Any = padding
    if padding in ("pair", "ring"):
        # The pair is completed so that the outputs can be cut. A negative number cuts entries off.
        span = (window - 1) * dilation + 1
        low = draw(st.integers(0 if periodic else -2, span + 2))
        own = draw(st.integers(1, length + 1))
        high = (own * devices - 1) * stride + span - devices * length - low
        assume(devices * length + min(0, low) + min(0, high) > 0)
        pads = [(low, high)]
        periodic = periodic and high >= 0
    return Setting(devices, length, window, stride, dilation, pads, periodic, draw(st.integers(1, 2)))


@given(a_setting())
@example(Setting(2, 5, 3, 3, 1, "SAME", False, 1))  # the padding of 10 entries, not that of 5
@seed(0)
@settings(max_examples=36, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_conv_is_that_of_the_whole_array(setting: Setting) -> None:
    devices, length, window, stride, dilation, padding, periodic, groups = setting
    x = jnp.asarray(values((2, 2, devices * length), seed=5))
    kernel = jnp.asarray(values((4, 2 // groups, window), seed=6))
    options: Any = {"rhs_dilation": (dilation,), "feature_group_count": groups}

    def own(x: Array, kernel: Array) -> Array:
        return conv(x, kernel, {2: "i"}, (stride,), padding, periodic=periodic, **options)

    def whole(x: Array, kernel: Array) -> Array:
        if not periodic:
            return lax.conv_general_dilated(x, kernel, (stride,), padding, **options)
        return lax.conv_general_dilated(
            jnp.pad(x, ((0, 0), (0, 0), setting.pair), "wrap"), kernel, (stride,), "VALID", **options
        )

    if setting.outputs < 1 or setting.outputs % devices:
        with pytest.raises(ValueError, match="expected a positive multiple of . outputs along dimension 2"):
            over(devices, None)(own, 2)(x, kernel)
    else:
        check(over(devices, None), own, whole, x, kernel, 2)


NHWC = ("NHWC", "HWIO", "NHWC")


@pytest.mark.parametrize("types", [False, True])
def test_conv_of_images_in_shard_map(types: bool) -> None:
    x, kernel = jnp.asarray(values((2, 8, 5, 3), seed=7)), jnp.asarray(values((3, 4, 3, 2), seed=8))
    options: Any = {"rhs_dilation": (3, 1), "dimension_numbers": NHWC}
    check(
        over(4, types),
        lambda x, k: conv(x, k, {1: "i"}, (1, 2), "SAME", **options),
        lambda x, k: lax.conv_general_dilated(x, k, (1, 2), "SAME", **options),
        x,
        kernel,
        1,
        kernel_is_summed=types,
    )


def test_conv_along_two_axes() -> None:
    """The kernel has corners, and they are not equal."""
    x, kernel = jnp.asarray(values((1, 2, 8, 6), seed=9)), jnp.asarray(values((3, 2, 3, 4), seed=10))

    def block(x: Array) -> Array:
        return conv(x, kernel, {2: "y", -1: "x"}, (2, 1), "SAME")

    blocks = cut(x, 2, 2), 3, -1
    stacked = jnp.stack([cut(rows, *blocks[1:]) for rows in blocks[0]])  # (2, 3, 1, 2, 4, 2)
    got = jax.vmap(jax.vmap(block, axis_name="x"), axis_name="y")(stacked)
    want = lax.conv_general_dilated(x, kernel, (2, 1), "SAME")
    np.testing.assert_allclose(joined([joined(row, 3) for row in got], 2), want, 1e-5, 1e-5)


def test_outputs_that_the_message_tells_to_leave_out() -> None:
    """A convolution without padding has 5 outputs, which 4 devices cannot share. The message tells what to do."""
    x, kernel = jnp.asarray(values((1, 1, 12), seed=11)), jnp.asarray(values((1, 1, 3), seed=12))

    def run(padding: Any) -> Array:
        return over(4, None)(lambda x, k: conv(x, k, {2: "i"}, (2,), padding), 2)(x, kernel)

    remedy = r"got 5 of 4 x 3 entries with the padding \(0, 0\). Pass the padding \(0, 6\) and leave the last 3 outputs"
    with pytest.raises(ValueError, match=remedy):
        run("VALID")
    want = lax.conv_general_dilated(x, kernel, (2,), "VALID")
    np.testing.assert_allclose(joined(run([(0, 6)]), 2)[..., :5], want, 1e-5, 1e-5)


@pytest.mark.parametrize("name", ["max", "sum", "max of a ring"])
def test_pooling_is_that_of_the_whole_array(name: str) -> None:
    x = jnp.asarray(values((2, 12, 3), seed=13)) - 4.0  # all are negative: zeros beyond the border would be the largest
    computation, init = (lax.add, 0.0) if name == "sum" else (lax.max, -jnp.inf)
    dilation = (1, 2, 1) if name == "sum" else (1, 1, 1)  # JAX has no derivative of a maximum with dilation
    ring, padding = name == "max of a ring", ((0, 0), (2, 0), (0, 0))

    def own(x: Array, _: Array) -> Array:
        return reduce_window(
            x,
            init,
            computation,
            {1: "i"},
            (1, 3, 2),
            (1, 2, 1),
            padding if ring else "SAME",
            window_dilation=dilation,
            periodic=ring,
        )

    def whole(x: Array, _: Array) -> Array:
        wrapped = jnp.pad(x, padding, "wrap") if ring else x
        return lax.reduce_window(
            wrapped,
            init,
            computation,
            (1, 3, 2),
            (1, 2, 1),
            "VALID" if ring else "SAME",
            window_dilation=dilation,
        )

    check(over(3, None), own, whole, x, jnp.zeros(()), 1)


BAD: dict[str, tuple[Callable[[Array], Any], str]] = {
    "a negative width": (
        lambda x: halo_exchange(x, "i", (1, -1), 2),
        r"halo_exchange: expected a width of zero or more, or a pair of them, got \(1, -1\)",
    ),
    "three widths": (lambda x: halo_exchange(x, "i", (1, 1, 1), 2), r"or a pair of them, got \(1, 1, 1\)"),  # type: ignore[arg-type]
    "no such dimension": (
        lambda x: halo_exchange(x, "i", 1, 3),
        "halo_exchange: expected a dimension of an array that has 3, got 3",
    ),
    "an empty block": (
        lambda x: halo_exchange(x[..., :0], "i", 1, 2),
        r"expected a block with at least one entry, got shape \(1, 1, 0\) along dimension 2",
    ),
    "features are cut": (
        lambda x: conv(x, jnp.ones((1, 1, 3)), {1: "i"}, (1,), "SAME"),
        r"conv: expected axes to have some of the dimensions \(2,\), got {1: 'i'}",
    ),
    "one axis twice": (
        lambda x: reduce_window(x, 0.0, lax.add, {1: "i", 2: "i"}, (1, 1, 1), (1, 1, 1), "SAME"),
        r"reduce_window: expected axes to have some of the dimensions \(0, 1, 2\), got {1: 'i', 2: 'i'}",
    ),
    "no dictionary": (
        lambda x: conv(x, jnp.ones((1, 1, 3)), "i", (1,), "SAME"),  # type: ignore[arg-type]
        "conv: expected axes to have some of the dimensions .*, got 'i'",
    ),
    "a stride of zero": (
        lambda x: conv(x, jnp.ones((1, 1, 3)), {2: "i"}, (0,), "SAME"),
        r"conv: expected a positive stride for each of 1 dimensions, got \(0,\)",
    ),
    "too few windows": (
        lambda x: reduce_window(x, 0.0, lax.add, {2: "i"}, (2, 2), (1, 1, 1), "SAME"),
        r"reduce_window: expected a positive window for each of 3 dimensions, got \(2, 2\)",
    ),
    "padding is no pair": (
        lambda x: conv(x, jnp.ones((1, 1, 3)), {2: "i"}, (1,), [1]),  # type: ignore[list-item]
        r"conv: expected 1 pairs of padding, got \[1\]",
    ),
    "a window larger than the array": (
        lambda x: conv(x, jnp.ones((1, 1, 9)), {2: "i"}, (1,), "VALID"),
        r"a positive multiple of 2 outputs .* 'i' cuts, got 0 of 2 x 4 .* Use a smaller window, or more padding",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_calls(name: str) -> None:
    call, error = BAD[name]
    with pytest.raises(ValueError, match=error):
        jax.vmap(call, axis_name="i")(jnp.ones((2, 1, 1, 4)))


def test_other_bad_calls() -> None:
    with pytest.raises(TypeError, match="halo_exchange: expected width to be an integer, got 1.5"):
        jax.vmap(lambda x: halo_exchange(x, "i", 1.5, 0), axis_name="i")(jnp.ones((2, 3)))  # type: ignore[arg-type]
    with pytest.raises(NameError, match="parallel.halo_exchange: expected a call where the axis 'i' is bound"):
        halo_exchange(jnp.ones(3), "i", 1, 0)
    with pytest.raises(NameError, match="parallel.conv: expected a call where the axis 'i' is bound"):
        conv(jnp.ones((1, 1, 4)), jnp.ones((1, 1, 3)), {2: "i"}, (1,), "SAME")
