"""Layouts of networks written with ``pycollective.parallel``: which there are, and what formulas say of them."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pycollective.planning import command
from pycollective.planning.by_formulas.layouts import Estimator, Layout, Row, layouts
from pycollective.planning.by_formulas.network import Held, MatMul, Network, Part, transformer
from pycollective.planning.by_formulas.stage_cuts import cut_evenly
from pycollective.planning.curves import Curve
from pycollective.planning.example import profile as example
from pycollective.planning.profile import AXES, NARROW, OPERATIONS, Group

ONE_PART = Part(
    name="layer",
    cut_parameters=1000,
    whole_parameters=10,
    products=(MatMul(4, 8, 16, "n"),),
    kept=100,
    kept_whole=20,
    passed=32,
    sums=(32,),
    ring=64,
)
NETWORK = Network(parts=(ONE_PART,) * 4, examples=16, heads=4, positions=4)


def line(latency_s: float, per_s: float) -> Curve:
    sizes = tuple(2.0**power for power in range(31))
    return Curve(sizes, tuple(latency_s + size / per_s for size in sizes))


# 1 ns for each operation, byte of a stream and byte of a collective; two hosts with two devices.
_CURVE = line(1e-15, 1e9)
ROUND = replace(
    example,
    call=0.0,
    products={"float32": {1: _CURVE}},
    streams=_CURVE,
    collectives={AXES: dict.fromkeys(OPERATIONS, dict.fromkeys([Group(2, 1), Group(1, 2), Group(2, 2)], _CURVE))},
)


def ns(layout: Layout, network: Network = NETWORK) -> tuple[Any, Any, Any]:
    estimate = Estimator(network, ROUND).estimate(layout)
    # Between two measured sizes the curve is a little above the line.
    return tuple(pytest.approx(s * 1e9, rel=0.03) for s in estimate[:3])  # type: ignore[return-value]


def test_layouts_are_all_that_fit() -> None:
    want = set()
    sizes = range(1, 9)
    for data, model, context, stage in itertools.product(sizes, repeat=4):
        if data * model * context * stage == 8 and 4 % model == 4 % context == 16 % data == 0 and stage <= 4:
            want.add((data, model, context, stage))
    got = list(layouts(NETWORK, 8))
    assert {one[:4] for one in got} == want
    assert len(got) == len(set(got))
    for one in got:
        assert one.zero < 3 or one.stage == 1
        assert (one.schedule == "") == (one.stage == 1)
        assert 16 // one.data % one.microbatches == 0
        assert one.schedule != "interleaved" or (one.microbatches % one.stage == 0 and 2 * one.stage <= 4)
        assert one.wire_dtype == "" or (one.replicas > 1 and one.zero < 3)
        assert one.zero == 0 or one.replicas > 1
    pipelines = {one[5:7] for one in got if one.stage == 2 and one.data == 4}
    assert pipelines == {
        *itertools.product(("gpipe", "1f1b", "zero-bubble"), (1, 2, 4)),
        ("interleaved", 2),
        ("interleaved", 4),
    }
    for one in got:
        assert one.chunks == (2 if one.schedule == "interleaved" else 1)
        other = one._replace(remat=not one.remat)
        assert (other in got) == (one.schedule != "zero-bubble")
        assert "--remat" in one.arguments() or not one.remat


def test_a_layout_says_each_field() -> None:
    layout = Layout(2, 1, 1, 2, schedule="interleaved", microbatches=4, chunks=2)
    for name, value in layout._asdict().items():
        other = not value if isinstance(value, bool) else value + type(value)(1)
        assert str(layout._replace(**{name: other})) != str(layout), name


def test_one_device() -> None:
    # 4 layers x 16 examples x 2 x 4 x 8 x 16 operations, three times; kept numbers are written and read, three times;
    # Adam goes seven times over 4 x 1010 numbers of 4 B.
    products, streams = 4 * 16 * 2 * 4 * 8 * 16, 4 * 16 * 120 * 4 * 2
    assert (3 * (products + streams) + 7 * 4040 * 4, 0, 0) == ns(Layout(1, 1, 1, 1))
    memory = Estimator(NETWORK, ROUND).estimate(Layout(1, 1, 1, 1)).memory
    assert memory == 4 * (4040 * 4 + 4 * 16 * 120)


def test_data_and_zero() -> None:
    passes = 3 * (4 * 4 * 2 * 4 * 8 * 16 + 4 * 4 * 120 * 4 * 2)
    nbytes = 4040 * 4
    assert (passes + 7 * nbytes, nbytes, 0) == ns(Layout(4, 1, 1, 1))
    assert (passes + 7 * nbytes, nbytes / 2, 0) == ns(Layout(4, 1, 1, 1, wire_dtype="bfloat16"))
    assert (passes + 7 * nbytes / 4, 2 * nbytes, 0) == ns(Layout(4, 1, 1, 1, zero=1))
    assert (passes + 7 * nbytes / 4, 1.5 * nbytes, 0) == ns(Layout(4, 1, 1, 1, zero=2, wire_dtype="bfloat16"))
    assert (passes + 7 * nbytes / 4, 3 * nbytes, 0) == ns(Layout(4, 1, 1, 1, zero=3))
    kept = 4 * 4 * 120
    in_place = replace(NETWORK, adding=0)
    for zero, share in {0: 4.0, 1: 2 + 2 / 4, 2: 1 + 3 / 4, 3: 4 / 4}.items():
        gathered = 1010 if zero == 3 else 0
        memory = Estimator(in_place, ROUND).estimate(Layout(4, 1, 1, 1, zero=zero)).memory
        assert memory == 4 * (share * 4040 + gathered + kept), zero
    # While gradients are summed there are their sums, whole or a share of them, and those of one part under way.
    for zero, share in {0: 5.0, 1: 2 + 3 / 4, 2: 2 + 3 / 4, 3: 2 + 4 / 4}.items():
        memory = Estimator(NETWORK, ROUND).estimate(Layout(4, 1, 1, 1, zero=zero)).memory
        assert memory == 4 * (share * 4040 + 1010), zero


def test_gradients_travel_by_the_collectives_of_their_strategy() -> None:
    """Each collective takes another time for a byte here, so the sum tells which ones there were."""
    ns_per_byte = {"psum": 1, "all_gather": 10, "psum_scatter": 100, "all_to_all": 1000, "ppermute": 10**6}
    group = Group(2, 2)
    tables = {
        AXES: {name: {group: line(1e-15, 1e9 / ns)} for name, ns in ns_per_byte.items()},
        NARROW: {"psum": {group: line(1e-15, 1e9 / 7)}},
    }

    def ns_for_a_byte(measured: tuple[str, ...], **options: Any) -> float:
        profile = replace(ROUND, collectives={kind: tables[kind] for kind in measured})
        layout = Layout(4, 1, 1, 1, **options)
        return Estimator(NETWORK, profile).estimate(layout).communication_s * 1e9 / (4040 * 4)

    for options, expected in (
        ({}, 1),
        ({"zero": 1}, 1 + 10),
        ({"zero": 2}, 100 + 10),
        ({"zero": 3}, 100 + 2 * 10),
        ({"wire_dtype": "bfloat16"}, 7),
        ({"wire_dtype": "bfloat16", "zero": 1}, 1000 / 2 + 10),
        ({"wire_dtype": "bfloat16", "zero": 2}, 1000 / 2 + 10),
    ):
        assert ns_for_a_byte((AXES, NARROW), **options) == pytest.approx(expected, rel=0.03), options
    assert ns_for_a_byte((AXES,), wire_dtype="bfloat16") == pytest.approx(1 / 2, rel=0.03), "it was not measured"


def test_instructions_of_small_microbatches() -> None:
    """30 instructions of each part take 3 us each: in each pass of each microbatch, and in no pass twice."""
    network = replace(NETWORK, parts=(replace(ONE_PART, instructions=30),) * 4)
    slow = replace(ROUND, instruction=3e-6)

    def more_us(layout: Layout) -> tuple[float, ...]:
        with_them, without = (Estimator(of, slow).estimate(layout) for of in (network, NETWORK))
        return tuple(pytest.approx((a - b) * 1e6) for a, b in zip(with_them[:3], without[:3], strict=True))

    assert more_us(Layout(1, 1, 1, 1)) == (4 * 30 * 3, 0, 0)
    assert more_us(Layout(1, 1, 1, 1, remat=True)) == (4 * 30 * 3, 0, 0)
    assert more_us(Layout(4, 1, 1, 1)) == (4 * 30 * 3, 0, 0), "as many for fewer examples"
    for m in (1, 8):
        pipeline = Layout(1, 1, 1, 2, schedule="1f1b", microbatches=m)
        assert more_us(pipeline) == (m * 2 * 30 * 3, 0, 2 * 30 * 3)


def test_model_and_context() -> None:
    # Each device has half of the columns, of the cut parameters and of what is kept but for 20 numbers.
    passes = 3 * (4 * 16 * 2 * 4 * 8 * 8 + 4 * 16 * (50 + 20) * 4 * 2)
    assert (passes + 7 * 4 * 510 * 4, 2 * 4 * 16 * 32 * 4, 0) == ns(Layout(1, 2, 1, 1))
    # Half of the rows; keys and values make one hop in each pass, their gradients two. 4 x 1010 numbers are summed.
    passes = 3 * (4 * 16 * 2 * 2 * 8 * 16 + 4 * 16 * 60 * 4 * 2)
    sent = 4 * 4 * 16 * 32 * 4 + 4040 * 4
    assert (passes + 7 * 4040 * 4, sent, 0) == ns(Layout(1, 1, 2, 1))
    # Remat sends them once more.
    assert ns(Layout(1, 1, 2, 1, remat=True))[1] == sent + 4 * 16 * 32 * 4


def test_attention_is_cut_by_heads_and_positions() -> None:
    scores = replace(
        ONE_PART, products=(MatMul(4, 8, 4, "heads", 2), MatMul(4, 4, 8, "heads", 2)), kept=0, kept_whole=0
    )
    network = replace(NETWORK, parts=(scores,), heads=2)
    whole = 3 * 16 * 2 * 2 * (2 * 4 * 8 * 4)
    update = 7 * 1010 * 4
    assert ns(Layout(1, 1, 1, 1), network)[0] == whole + update
    assert ns(Layout(1, 1, 2, 1), network)[0] == whole / 2 + update
    assert ns(Layout(1, 2, 1, 1), network)[0] == whole / 2 + 7 * 510 * 4


def test_gradients_of_weights_are_products_of_transposed_matrices() -> None:
    """Here those take 3 ns for an operation with 8 columns or rows and more, else 5. Attention has none of them."""
    slow = {"float32": {4: line(1e-15, 2e8), 8: line(1e-15, 1e9 / 3)}}
    scores = replace(ONE_PART, products=(MatMul(4, 8, 4, "heads", 2),))
    for part, n, each in (
        (ONE_PART, 16, 3),
        (replace(ONE_PART, products=(MatMul(4, 16, 4, "n"),)), 4, 5),
        (scores, 0, 0),
    ):
        network = replace(NETWORK, parts=(part,))
        plain, turned = (
            Estimator(network, replace(ROUND, transposed=table)).estimate(Layout(1, 1, 1, 1)).computing_s
            for table in ({}, slow)
        )
        operations = 16 * 2 * 4 * (8 if n == 16 else 16) * n
        assert (turned - plain) * 1e9 == pytest.approx(max(each - 1, 0) * operations, rel=0.03, abs=1)


@pytest.mark.parametrize(
    ("examples", "table", "slower"),
    [
        (1, "transposed_second", 1),  # (4, 16) times (16, 8): the rows are fewest
        (16, "transposed_second", 0),  # (64, 16) times (16, 8)
        (1, "outer", 1),  # (8, 4) times (4, 16): four outer products
        (16, "outer", 0),  # (8, 64) times (64, 16)
    ],
)
def test_gradients_of_few_examples(examples: int, table: str, slower: int) -> None:
    """Products of such a kind take 5 ns for an operation here, and others 1."""
    network = replace(NETWORK, examples=examples, parts=(replace(ONE_PART, kept=0, kept_whole=0),))
    slow = {table: {"float32": {1: line(1e-15, 2e8)}}}
    plain, kind = (
        Estimator(network, replace(ROUND, **tables)).estimate(Layout(1, 1, 1, 1)).computing_s for tables in ({}, slow)
    )
    assert (kind - plain) * 1e9 == pytest.approx(slower * 4 * examples * 2 * 4 * 8 * 16, rel=0.03, abs=1)


def test_pipelines() -> None:
    b, m = 2, 8  # 8 microbatches of 2
    both = 3 * (2 * b * 2 * 4 * 8 * 16 + 2 * b * 120 * 4 * 2)
    message = 2 * b * 32 * 4
    adding = 7 * 3 * 2020 * 4  # of the gradients of all microbatches but the first
    base = (m * both + adding + 7 * 2020 * 4, m * message)
    for schedule, divided in (("gpipe", 1), ("1f1b", 1), ("zero-bubble", 3)):
        assert (*base, (both + message) / divided) == ns(Layout(1, 1, 1, 2, schedule=schedule, microbatches=m)), (
            schedule
        )
    # One microbatch has no other one whose gradients of weights could fill the bubble; their thirds stay.
    one = Layout(1, 1, 1, 2, schedule="zero-bubble", microbatches=1)
    assert ns(one)[2] == m * (both + message) * 2 / 3
    interleaved = Layout(1, 1, 1, 2, schedule="interleaved", microbatches=m, chunks=2)
    assert (base[0], 2 * base[1], (both + 2 * message) / 2) == ns(interleaved)
    kept = 2 * b * 120  # of a microbatch, by a stage
    for schedule, under_way in (("gpipe", 8.0), ("1f1b", 2.0), ("zero-bubble", 2.0), ("interleaved", 2 * 1.25)):
        chunks = 2 if schedule == "interleaved" else 1
        layout = Layout(1, 1, 1, 2, schedule=schedule, microbatches=m, chunks=chunks)
        gradients = 1 if schedule == "gpipe" else 2  # those of a microbatch are there beside their sums
        memory = Estimator(NETWORK, ROUND).estimate(layout).memory
        assert memory == 4 * ((3 + gradients) * 2020 + under_way * kept), schedule


def test_remat_computes_again_and_keeps_less() -> None:
    passes = 4 * (4 * 16 * 2 * 4 * 8 * 8 + 4 * 16 * (50 + 20) * 4 * 2)
    assert (passes + 7 * 4 * 510 * 4, 3 * 4 * 16 * 32 * 4, 0) == ns(Layout(1, 2, 1, 1, remat=True))
    # Three of the four parts keep 32 numbers for an example, and one of them 120 during its backward pass.
    memory = Estimator(NETWORK, ROUND).estimate(Layout(1, 1, 1, 1, remat=True)).memory
    assert memory == 4 * (4 * 4040 + 16 * (3 * 32 + 120))
    # On the first of two stages there are two microbatches of 2 under way; the second one's parts both have inputs.
    b, m = 2, 8
    layout = Layout(1, 1, 1, 2, schedule="1f1b", microbatches=m, remat=True)
    assert Estimator(NETWORK, ROUND).estimate(layout).memory == 4 * (5 * 2020 + b * (2 * 32 + 120))
    both = 4 * (2 * b * 2 * 4 * 8 * 16 + 2 * b * 120 * 4 * 2)
    message = 2 * b * 32 * 4
    assert (m * both + 7 * 3 * 2020 * 4 + 7 * 2020 * 4, m * message, both + message) == ns(layout)


def test_remat_makes_no_result_again_that_is_not_needed() -> None:
    """The first product has as many operations as the second; only the second's result goes on unchanged."""
    two = replace(ONE_PART, products=[MatMul(4, 8, 16, "n"), MatMul(4, 16, 8, "k", recomputed=False)])
    network = replace(NETWORK, parts=(two,) * 4)
    product, stream = 4 * 16 * 2 * 4 * 8 * 16, 4 * 16 * 120 * 4 * 2
    update = 7 * 4040 * 4
    assert ns(Layout(1, 1, 1, 1), network)[0] == 6 * product + 3 * stream + update
    assert ns(Layout(1, 1, 1, 1, remat=True), network)[0] == 7 * product + 4 * stream + update


def test_jax_leaves_out_the_product_that_transformer_says() -> None:
    """A layer's last product is not made again: XLA counts two thirds of the products' operations more, not all."""
    width, rows = 32, 64

    def layer(p: Any, x: Any) -> Any:
        y = x @ p["qkv"]
        x += y[:, :width] * y[:, width : 2 * width] * y[:, 2 * width :] @ p["out"]
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"]

    shapes = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def products(around: Any) -> int:
        """The operations of the products of two layers and their gradients; the loss reads the result of the last."""

        def loss(p: Any, x: Any) -> Any:
            return jnp.sum(around(layer)(p, around(layer)(p, x)) ** 2)

        x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
        text = jax.jit(jax.grad(loss, (0, 1))).lower(params, x).as_text()
        dots = re.findall(
            r"dot_general.*contracting_dims = \[(\d)\].*: \(tensor<(\d+)x(\d+)xf32>.*-> tensor<(\d+)x(\d+)x", text
        )
        return sum(2 * int((a, b)[int(at)]) * int(m) * int(n) for at, a, b, m, n in dots)

    said = transformer(layers=1, width=width, heads=1, positions=rows, vocabulary=8, examples=1).parts[1].products
    dense = [product for product in said if product.cut != "heads"]
    forward, again = (sum(2 * p.m * p.k * p.n for p in dense if p.recomputed or every) for every in (True, False))
    direct = products(lambda fun: fun)
    assert direct == 2 * 3 * forward
    assert products(jax.checkpoint) == direct + 2 * again


def test_optimizers_with_more_numbers() -> None:
    mixed = replace(NETWORK, itemsize=2, moments=6)  # bfloat16, with parameters and two moments in float32
    nbytes = 4040 * 2
    passes = 3 * (4 * 16 * 2 * 4 * 8 * 16 + 4 * 16 * 120 * 2 * 2)
    assert (passes + 15 * nbytes, 0, 0) == ns(Layout(1, 1, 1, 1), mixed)


def test_sums_of_gradients_pass_during_the_backward_pass() -> None:
    """Their share of the shorter one; not those of several microbatches, nor parameters that are gathered."""
    profile = replace(ROUND, overlap={AXES: 0.5, "global arrays": 1.0})

    def saved(layout: Layout) -> float:
        without, with_it = (Estimator(NETWORK, of).estimate(layout) for of in (ROUND, profile))
        assert without.computing_s == with_it.computing_s
        return without.communication_s - with_it.communication_s

    sums = Estimator(NETWORK, ROUND).estimate(Layout(2, 1, 1, 1)).communication_s
    assert saved(Layout(2, 1, 1, 1)) == pytest.approx(0.5 * sums)
    for zero in (1, 3):  # a sum or a reduce-scatter takes as long here
        assert saved(Layout(2, 1, 1, 1, zero=zero)) == pytest.approx(0.5 * sums)
    assert saved(Layout(2, 1, 1, 2, schedule="1f1b", microbatches=2)) == 0
    assert saved(Layout(1, 1, 1, 1)) == 0


def test_messages_between_stages_pass_the_network() -> None:
    slow = {Group(2, 1): _CURVE, Group(1, 2): line(1e-15, 1e8), Group(2, 2): line(1e-15, 1e8)}
    profile = replace(ROUND, collectives={AXES: dict.fromkeys(OPERATIONS, slow)})
    layout = Layout(2, 1, 1, 2, schedule="1f1b", microbatches=8)  # a stage is a host
    got = Estimator(NETWORK, profile).estimate(layout).communication_s
    assert got * 1e9 == pytest.approx(8 * 2 * 32 * 4 * 10 + 2020 * 4, rel=0.03)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.0]), min_size=1, max_size=8), st.data())
def test_cuts_have_the_least_bottleneck(seconds: list[float], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(seconds)))

    def slowest(cuts: tuple[int, ...]) -> float:
        ends = [0, *itertools.accumulate(cuts)]
        return max(sum(seconds[low:high]) for low, high in itertools.pairwise(ends))

    every = itertools.combinations(range(1, len(seconds)), stages - 1)
    best = min(slowest(tuple(b - a for a, b in itertools.pairwise((0, *cut, len(seconds))))) for cut in every)
    got = cut_evenly(seconds, stages)
    assert (len(got), sum(got), min(got) >= 1) == (stages, len(seconds), True)
    assert slowest(got) == pytest.approx(best)


def test_what_a_compiled_program_has_in_memory() -> None:
    """Two of three parts have ten times the numbers of the first one."""
    held = Held(
        plain=(1, 2),
        pipeline=(3, 4),
        working=(5, 6),
        remat=(7, 8),
        remat_with_grad_sum=(9, 10),
        remat_working=(11, 12),
        gathered=(13, 14),
        remat_gathered=(15, 16),
    )
    more = Held(*((10 * cut, 10 * whole) for cut, whole in held))
    parts = (replace(ONE_PART, held=held), replace(ONE_PART, held=more), replace(ONE_PART, held=more))
    network = replace(NETWORK, parts=parts, adding=0)

    def elements(layout: Layout, of: Network = network) -> float:
        return Estimator(of, ROUND).estimate(layout).memory / 4

    assert elements(Layout(1, 1, 1, 1)) == 4 * 3030 + 16 * (21 * (1 + 2) + 10 * (5 + 6))
    assert elements(Layout(2, 1, 1, 1)) == 4 * 3030 + 8 * (21 * (1 + 2) + 10 * (5 + 6))
    assert elements(Layout(1, 2, 1, 1)) == 4 * 3 * 510 + 16 * (21 * (0.5 + 2) + 10 * (2.5 + 6))
    assert elements(Layout(1, 1, 2, 1)) == 4 * 3030 + 8 * (21 * (1 + 2) + 10 * (5 + 6))
    assert elements(Layout(1, 1, 1, 1, remat=True)) == 4 * 3030 + 16 * (2 * 32 + 21 * (7 + 8) + 10 * (11 + 12))
    for layout in (Layout(2, 1, 1, 1, remat=True), Layout(1, 1, 2, 1, remat=True)):
        assert elements(layout) == 4 * 3030 + 8 * (2 * 32 + 21 * (9 + 10) + 10 * (11 + 12))
    gathered = 2 * 3030 + 1010 + 8 * (21 * (13 + 14) + 10 * (5 + 6))
    assert elements(Layout(2, 1, 1, 1, zero=3)) == gathered
    again = 2 * 3030 + 1010 + 8 * (2 * 32 + 21 * (15 + 16) + 10 * (11 + 12))
    assert elements(Layout(2, 1, 1, 1, zero=3, remat=True)) == again
    assert elements(Layout(1, 2, 1, 1, remat=True)) == 4 * 3 * 510 + 16 * (2 * 32 + 21 * 11.5 + 10 * 17.5)
    # The first stage has two parts, and two of four microbatches of 4 are under way, or all.
    pipeline = Layout(1, 1, 1, 2, schedule="1f1b", microbatches=4)
    assert Estimator(network, ROUND).estimate(pipeline).cuts == (2, 1)
    assert elements(pipeline) == 4 * 2020 + 4 * (2 * 11 * (3 + 4) + 10 * (5 + 6))
    assert elements(pipeline, replace(network, adding=1)) == 5 * 2020 + 4 * (2 * 11 * (3 + 4) + 10 * (5 + 6))
    assert elements(pipeline._replace(remat=True)) == 4 * 2020 + 4 * (2 * 32 + 11 * (7 + 8) + 10 * (11 + 12))
    # Gradients of a pipeline are summed over devices after all passes.
    of_two = Layout(2, 1, 1, 2, schedule="1f1b", microbatches=4, remat=True)
    assert Estimator(network, ROUND).estimate(of_two).cuts == (1, 2)
    assert elements(of_two) == 4 * 2020 + 2 * (2 * 32 + 20 * (7 + 8) + 10 * (11 + 12))
    gpipe = pipeline._replace(schedule="gpipe")
    assert elements(gpipe, replace(network, adding=1)) == 4 * 2020 + 4 * (4 * 11 * (3 + 4) + 10 * (5 + 6))
    remat = gpipe._replace(remat=True)
    of_remat = 4 * (4 * 32 + 11 * (7 + 8) + 10 * (11 + 12))
    assert elements(remat, replace(network, adding=1)) == 5 * 2020 + of_remat


def test_uneven_parts_are_cut_unevenly() -> None:
    large = replace(ONE_PART, products=(MatMul(4, 8, 64, "n"),))
    network = replace(NETWORK, parts=(ONE_PART, ONE_PART, ONE_PART, large))
    layout = Layout(1, 1, 1, 2, schedule="1f1b", microbatches=16)
    assert Estimator(network, ROUND).estimate(layout).cuts == (3, 1)


def test_chunks_are_cut_unevenly() -> None:
    """A large part takes a little longer than two others, so no chunk has more parts than that."""
    products = (*ONE_PART.products * 2, MatMul(4, 8, 2, "n"))
    large = replace(ONE_PART, products=products, kept=200, kept_whole=40)
    network = replace(NETWORK, parts=(ONE_PART, ONE_PART, large, ONE_PART, ONE_PART, large))
    layout = Layout(1, 1, 1, 2, schedule="interleaved", microbatches=2, chunks=2)
    estimate = Estimator(network, ROUND).estimate(layout)
    assert estimate.cuts == (2, 1, 2, 1)
    assert Row(layout, estimate).arguments()[-2:] == ["--cuts", "2,1,2,1"]
    # The second stage has both large parts. The first one has more parameters, of four parts.
    b, m = 8, 2
    both = 3 * 2 * (2 * b * 4 * 8 * (16 + 16 + 2) + 2 * b * 240 * 4)
    message = 2 * b * 32 * 4
    assert ns(layout, network) == (m * both + (3 + 7) * 2020 * 4, 2 * m * message, (both + 2 * message) / 2)
    assert estimate.memory == 4 * (5 * 4040 + m * b * 480), "no more microbatches are under way than there are"


def test_transformer_counts_as_published() -> None:
    # arXiv:2104.04473, table 1: parameters of GPT with 1.7, 18.4 and 1008 billion; vocabulary of 51200, one matrix.
    for layers, width, heads, billions in ((24, 2304, 24, 1.7), (40, 6144, 48, 18.4), (128, 25600, 160, 1008.0)):
        network = transformer(layers=layers, width=width, heads=heads, positions=2048, vocabulary=51200, examples=512)
        parameters = sum(part.cut_parameters + part.whole_parameters for part in network.parts) - 51200 * width
        assert parameters / 1e9 == pytest.approx(billions, rel=0.03)
        # The same paper, equation 2: 24 s h^2 (1 + s / 6h) for a layer's forward pass of one example.
        [*_, layer, last] = network.parts
        operations = sum(2 * p.heads * p.m * p.k * p.n for p in layer.products)
        assert operations == pytest.approx(24 * 2048 * width**2 * (1 + 2048 / (6 * width)))
        assert sum(2 * p.m * p.k * p.n for p in last.products) == 2 * 2048 * width * 51200


PROGRAM = """
from pycollective.planning import transformer

def network(words):
    assert words == ["--layers", "2"], words
    return transformer(layers=2, width=64, heads=4, positions=64, vocabulary=128, examples=16)

if __name__ == "__main__":
    raise SystemExit("a plan imports the program and does not run it")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    example.save(tmp_path / "cluster.json")
    return file


def test_command(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = program.parent
    files = ["--json", str(folder / "plans.json"), "--plot", str(folder / "plans.svg")]
    options = ["--profile", str(folder / "cluster.json"), "--devices", "4", "--top", "3", *files]
    assert command.main([*options, str(program), "--layers", "2"]) == 0
    told = capsys.readouterr().out
    saved = json.loads((folder / "plans.json").read_text())
    assert saved["devices"] == 4
    assert len(saved["rows"]) == 3
    seconds = [row["seconds"] for row in saved["rows"]]
    assert seconds == sorted(seconds)
    best = saved["rows"][0]
    assert f"best: program.py --layers 2 --data {best['data']} --model {best['model']}" in told
    assert "<svg" in (folder / "plans.svg").read_text()
    network = transformer(layers=2, width=64, heads=4, positions=64, vocabulary=128, examples=16)
    estimator = Estimator(network, example)
    assert min(estimator.estimate(one).seconds for one in layouts(network, 4)) == pytest.approx(seconds[0])


def test_only_layouts_that_a_program_has(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = program.parent
    network = transformer(layers=2, width=64, heads=4, positions=64, vocabulary=128, examples=16)
    every = list(layouts(network, 4))

    def run(*only: str) -> list[dict[str, Any]]:
        words = [word for setting in only for word in ("--only", setting)]
        options = ["--profile", str(folder / "cluster.json"), "--devices", "4", "--top", "10000", *words]
        assert command.main([*options, "--json", str(folder / "plans.json"), str(program), "--layers", "2"]) == 0
        rows: list[dict[str, Any]] = json.loads((folder / "plans.json").read_text())["rows"]
        return rows

    assert len(run()) == len(every)
    assert len(run("stage=1", "remat=no")) == sum(one.stage == 1 and not one.remat for one in every)
    assert {row["remat"] for row in run("remat=yes", "data=4")} == {True}
    assert {(row["schedule"], row["wire_dtype"]) for row in run("schedule=1f1b", "wire_dtype=none")} == {("1f1b", "")}
    capsys.readouterr()
    for setting, sentence in {
        "stages=1": "expected NAME=VALUE with a name of data, model, context, stage, zero, schedule, .*, got stages=1",
        "stage": "expected NAME=VALUE with a name of .*, got stage",
        "stage=x": "expected a whole number from 0, got 'x'",
        "remat=1": "expected remat=yes or remat=no, got remat=1",
    }.items():
        with pytest.raises(SystemExit):
            run(setting)
        assert re.search(sentence, capsys.readouterr().err), setting


def test_no_layout_has_what_only_says(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    only = [word for text in ("stage=3", "schedule=none", "zero=0", "remat=no") for word in ("--only", text)]
    options = ["--profile", str(program.parent / "cluster.json"), "--devices", "4", *only]
    assert command.main([*options, str(program), "--layers", "2"]) == 1
    told = "expected a layout on 4 devices, with stage=3, with schedule=none, with zero=0, with remat=no, got none"
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"--memory": "0.0001"}, "expected a layout on 4 devices of 107,374 B, got up to 1,377,363 B for the smallest"),
        ({"--devices": "3"}, "expected devices of whole hosts, which have 2 each, got 3"),
        ({"--profile": "nowhere.json"}, 'comes with the package, "dgx-a100", got nowhere.json. Measure one with'),
        ({"--profile": "program.py"}, "expected a profile of a cluster, got program.py"),
    ],
)
def test_command_refuses(
    change: dict[str, str], sentence: str, program: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(program.parent)
    options = {"--profile": "cluster.json", "--devices": "4"} | change
    words = [word for option in options.items() for word in option]
    assert command.main([*words, "program.py", "--layers", "2"]) == 1
    told = capsys.readouterr().err
    assert sentence in told
    assert told.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "expected a program, got no file program.py. Say where it is."),
        ("def network(", "expected a program in Python, program.py, got '(' was never closed"),
        ("def network(words): return 3", "expected a Network from the program's `network`, got int"),
        (
            "import nowhere_to_be_found as network",
            "whose imports are there, program.py, got No module named 'nowhere_to_be_found'",
        ),
    ],
)
def test_programs_that_say_nothing(
    text: str | None, sentence: str, program: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(program.parent)
    program.unlink()
    if text is not None:
        program.write_text(text)
    assert command.main(["--profile", "cluster.json", "program.py"]) == 1
    assert sentence in capsys.readouterr().err


def test_a_picture_without_what_draws_it(program: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """It is said before anything is estimated or run."""
    monkeypatch.chdir(program.parent)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "pycollective.planning.by_formulas.picture", raising=False)
    assert command.main(["--profile", "cluster.json", "--plot", "plans.svg", "program.py", "--layers", "2"]) == 1
    told = capsys.readouterr()
    assert "expected matplotlib, which draws --plot, got " in told.err
    assert "pip install matplotlib" in told.err
    assert not told.out


VERIFIED = """
import argparse, json
from pathlib import Path
from pycollective.planning import transformer

def network(words):
    return transformer(layers=2, width=64, heads=4, positions=64, vocabulary=128, examples=16)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--step-times", type=Path)
    parser.add_argument("--data", type=int)
    parser.add_argument("--wire-dtype")
    options, _ = parser.parse_known_args()
    if options.steps == 13 or options.steps == 14 and options.data == 4:
        raise SystemExit("it failed")
    seconds = [9.0] * 3 + [0.1 / options.data] * (options.steps - 3)
    memory = 3 << 30 if options.steps == 16 or options.steps == 15 and options.data == 4 else 5 << 20
    found = {"seconds": seconds, "memory": memory} if options.wire_dtype or options.steps > 13 else seconds
    options.step_times.write_text(json.dumps(found))
"""


def verified(
    program: Path, monkeypatch: pytest.MonkeyPatch, steps: str, text: str = VERIFIED
) -> tuple[int, list[dict[str, Any]]]:
    """Verifies four layouts of a program. Returns the status of the command, and the rows of its file."""
    monkeypatch.chdir(program.parent)
    program.write_text(text)
    words = ["--profile", "cluster.json", "--verify", "4", "--steps", steps, "--launch", "env", "--json", "rows.json"]
    status = command.main([*words, "program.py"])
    return status, json.loads(Path("rows.json").read_text())["rows"]


def test_verify_ranks_by_what_runs_took(program: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    status, rows = verified(program, monkeypatch, "8")
    assert status == 0
    ran = [row for row in rows if row["measured_s"] is not None]
    assert rows[:4] == ran
    assert [row["measured_s"] for row in ran] == [0.1 / row["data"] for row in ran]
    assert len({row["measured_s"] for row in ran}) > 1
    assert ran == sorted(ran, key=lambda row: row["measured_s"])
    assert [row["measured_memory"] for row in ran] == [5 << 20 if row["wire_dtype"] else None for row in ran]
    cells = set(re.findall(r" ([\d.]+|-)  +([\d.]+|-) *$", capsys.readouterr().out, re.MULTILINE))
    assert {("25.00", "5.0"), ("50.00", "5.0"), ("50.00", "-"), ("-", "-")} <= cells, "some say it, some do not"


@pytest.mark.parametrize(
    ("steps", "failure", "memory", "cells"),
    [("14", "status 1 of .*it failed", None, "failed +-"), ("15", "", 3 << 30, r"25.00 +3072.0")],
    ids=["fail", "need more memory"],
)
def test_layouts_that_do_not_run_are_last(
    program: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, steps: str, failure: str, memory: Any, cells: str
) -> None:
    """Here those over four examples, which would be fastest."""
    status, rows = verified(program, monkeypatch, steps)
    assert status == 0
    assert len(rows) == 10
    ran = [row for row in rows if row["measured_s"] is not None or row["failure"]]
    bad = [row for row in ran if row["data"] == 4]
    good = [row for row in ran if row["data"] != 4]
    assert len(ran) == 4
    assert bad
    assert good
    assert (rows[: len(good)], rows[-len(bad) :]) == (good, bad)
    for row in bad:
        assert re.fullmatch(failure, row["failure"], re.DOTALL)
        assert row["measured_memory"] == memory
    assert not any(row["failure"] for row in good)
    told = capsys.readouterr()
    assert f"--data {good[0]['data']} " in told.out.split("best: ")[1]
    assert len(re.findall(cells, told.out)) == len(bad)
    assert told.err.count("plan: expected a run that ends well, got status 1") == bool(failure) * len(bad)


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ("13", "expected a run that ends well, got status 1 of .*it failed. Start it yourself"),
        (
            "16",
            "expected a run that needs no more than 1,073,741,824 B, got 3,221,225,472 B for the smallest. Verify more",
        ),
    ],
)
def test_no_layout_runs(program: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, steps: str, said: str) -> None:
    status, rows = verified(program, monkeypatch, steps)
    assert status == 1
    told = capsys.readouterr()
    assert re.search(said, told.err, re.DOTALL)
    assert "best: " not in told.out
    assert len(rows) == 10


def test_a_program_that_records_no_steps(program: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    text = VERIFIED.replace("json.dumps(found)", "'[]'")
    status, _ = verified(program, monkeypatch, "8", text)
    assert status == 1
    assert "expected a run that ends well, got no steps of env " in capsys.readouterr().err


def test_what_has_run_is_kept(program: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The second run interrupts the command."""
    text = f"""{VERIFIED}
    if Path("one has run").exists():
        import os, signal, time
        for _ in range(4):  # Python drops an interrupt that comes while it frees an object
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(5)
    Path("one has run").touch()
"""
    status, rows = verified(program, monkeypatch, "8", text)
    assert status == 130
    told = capsys.readouterr()
    assert len(rows) == 10, "the ranking of the others is kept too"
    assert [row["measured_s"] is not None for row in rows] == [True] + 9 * [False]
    assert "interrupted: 1 of 4 layouts have run" in told.err
    assert "measured" in told.out
    assert "best: " in told.out


def test_the_command_starts_no_mpi(program: Path) -> None:
    words = ["--profile", str(program.parent / "cluster.json"), str(program), "--layers", "2"]
    code = f"import sys; from pycollective.planning.command import main; status = main({words}); "
    code += "sys.exit(status or 'mpi4py.MPI' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
