"""Profiles of clusters: curves, groups that were not measured, files, and what ``pycollective profile`` refuses."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pycollective as pc
from pycollective.bench.implementations import GlobalArrays
from pycollective.bench.measure import Timing
from pycollective.bench.workloads import count_wrong, expected, make_workload, operands
from pycollective.planning import timing
from pycollective.planning.by_compiling.program_work import Product, work_of
from pycollective.planning.curves import Curve, across
from pycollective.planning.example import profile as example
from pycollective.planning.profile import ARRAYS, AXES, NARROW, OPERATIONS, Group, Noise, Profile
from pycollective.profiling import collectives, command, computing, main, turns
from pycollective.profiling.collectives import count_turns, groups_in

comm = pc.init()

# Curves

SIZES = st.lists(st.integers(1, 1 << 40), min_size=1, max_size=6, unique=True).map(sorted)
SECONDS = st.floats(1e-8, 1e3)


@st.composite
def curves(draw: st.DrawFn, *, rising: bool = False) -> Curve:
    sizes = draw(SIZES)
    seconds = draw(st.lists(SECONDS, min_size=len(sizes), max_size=len(sizes)))
    return Curve(tuple(map(float, sizes)), tuple(sorted(seconds) if rising else seconds))


@given(curves())
def test_a_curve_goes_through_its_points(curve: Curve) -> None:
    for size, seconds in zip(*curve, strict=True):
        assert curve(size) == pytest.approx(seconds, rel=1e-9)


@given(curves(), st.floats(0, 1))
def test_between_two_points_a_curve_has_times_between_theirs(curve: Curve, share: float) -> None:
    points = list(zip(*curve, strict=True))
    for (low, low_s), (high, high_s) in itertools.pairwise(points):
        between = curve(low + share * (high - low))
        assert min(low_s, high_s) * (1 - 1e-9) <= between <= max(low_s, high_s) * (1 + 1e-9)


@given(curves(rising=True), st.floats(0, 1e13), st.floats(0, 1e13))
def test_more_bytes_never_take_less(curve: Curve, one: float, other: float) -> None:
    assert curve(min(one, other)) <= curve(max(one, other)) * (1 + 1e-9)


def test_between_points_logarithms_are_linear() -> None:
    curve = Curve((100.0, 10_000.0, 20_000.0), (1.0, 16.0, 5.0))
    assert curve(1000) == pytest.approx(4)  # half way from 10^2 to 10^4, and from 4^0 to 4^2
    assert curve(math.sqrt(2) * 10_000) == pytest.approx(math.sqrt(80))


def test_latency_below_and_rate_above() -> None:
    curve = Curve((100.0, 1000.0), (3.0, 5.0))
    assert [curve(size) for size in (0, 1, 100)] == [3, 3, 3]
    assert [curve(size) for size in (1000, 2000, 5000)] == [5, 10, 25]
    one = Curve((100.0,), (3.0,))
    assert [one(size) for size in (1, 100, 200)] == [3, 3, 6]


def test_across_curves() -> None:
    three = {value: Curve((10.0,), (seconds,)) for value, seconds in [(64, 8.0), (1, 1.0), (4, 2.0)]}
    narrow = (0.5, 1, 2, 4, 16, 64, 1000)
    expected_s = (1, 1, math.sqrt(2), 2, 4, 8, 8)
    assert [across(three, value, 10) for value in narrow] == pytest.approx(expected_s)
    assert across(three, 16, 20) == pytest.approx(8), "the size counts in both curves"
    assert across({4: Curve((10.0,), (3.0,))}, 7, 10) == 3


# Collectives

US = 1e-6
WITHIN = Curve((8.0, 1024.0), (1 * US, 5 * US))
BETWEEN = Curve((8.0, 1024.0), (10 * US, 20 * US))


def sixteen(measured: dict[Group, Curve]) -> Profile:
    """A cluster of 4 hosts with 4 devices each."""
    return replace(example, hosts=4, ranks=16, collectives={AXES: dict.fromkeys(OPERATIONS, measured)})


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_group_that_was_measured(operation: str) -> None:
    profile = sixteen({Group(2, 1): WITHIN, Group(4, 1): BETWEEN})
    for nbytes in (1, 8, 64, 1024, 4096):
        assert profile.collective_s(operation, nbytes, Group(2, 1), AXES) == WITHIN(nbytes)
        assert profile.collective_s(operation, nbytes, Group(4, 1), AXES) == BETWEEN(nbytes)
        assert profile.collective_s(operation, nbytes, Group(1, 1), AXES) == 0


def test_kinds_of_programs_have_curves_of_their_own() -> None:
    tables = {kind: {"psum": {Group(2, 1): curve}} for kind, curve in [(AXES, WITHIN), (ARRAYS, BETWEEN)]}
    profile = replace(example, collectives=tables)
    assert profile.collective_s("psum", 1024, Group(2, 1), AXES) == WITHIN(1024)
    assert profile.collective_s("psum", 1024, Group(2, 1)) == BETWEEN(1024), "global arrays are the default"


# The time of 1024 B. Of 5 us within a host 1 us is latency; of 20 us between two hosts it is 10 us.
@pytest.mark.parametrize(
    ("operation", "group", "us"),
    [
        # From 2 devices of a host to 4: twice the steps. psum moves 2 * 3/4 of its array instead of 2 * 1/2, all_gather
        # and the like 3/4 instead of 1/2, and ppermute 1 as before.
        ("psum", Group(4, 1), 1 * 2 + 4 * 1.5),
        ("all_gather", Group(4, 1), 1 * 2 + 4 * 1.5),
        ("psum_scatter", Group(4, 1), 1 * 2 + 4 * 1.5),
        ("all_to_all", Group(4, 1), 1 * 2 + 4 * 1.5),
        ("ppermute", Group(4, 1), 1 * 2 + 4),
        # From 2 hosts with one device each to 4: the same fractions, for each of the four groups that share a link.
        ("psum", Group(1, 4), 10 * 2 + 10 * 1.5),
        ("all_gather", Group(1, 4), 10 * 2 + 10 * 1.5),
        ("all_to_all", Group(1, 4), 10 * 2 + 10 * 1.5),
        ("ppermute", Group(1, 4), 10 * 2 + 10),
        # To all 16 devices: 4 times the steps. Of sums and gathers one group has the link where four had it:
        # 2 * 3/4 * 1 instead of 2 * 1/2 * 4. In all_to_all each device sends 12/16 of its array to other hosts, not
        # 1/2. In ppermute each sends all of it, as before.
        ("psum", Group(4, 4), 10 * 4 + 10 * 1.5 / 4),
        ("psum_scatter", Group(4, 4), 10 * 4 + 10 * 0.75 / 2),
        ("all_to_all", Group(4, 4), 10 * 4 + 10 * 0.75 / 0.5),
        ("ppermute", Group(4, 4), 10 * 4 + 10),
        # Between hosts, so not from the group within a host, although that has as many devices on each.
        ("psum", Group(2, 2), 10 * 2 + 10 / 2),
    ],
)
def test_a_group_that_was_not_measured(operation: str, group: Group, us: float) -> None:
    profile = sixteen({Group(2, 1): WITHIN, Group(1, 2): BETWEEN})
    assert profile.collective_s(operation, 1024, group, AXES) == pytest.approx(us * US)


def test_the_nearest_group_counts() -> None:
    slow = Curve((8.0, 1024.0), (1000 * US, 1000 * US))
    profile = sixteen({Group(1, 2): slow, Group(4, 2): BETWEEN, Group(2, 1): slow})
    assert profile.collective_s("psum", 1024, Group(4, 4), AXES) == pytest.approx((10 * 4 / 3 + 10 * 1.5) * US)


def test_between_hosts_from_groups_within_a_host_if_there_are_no_others() -> None:
    profile = sixteen({Group(2, 1): WITHIN})
    assert profile.collective_s("psum", 1024, Group(1, 2), AXES) == pytest.approx((1 + 4 * 4) * US)


GROUPS = st.builds(Group, st.sampled_from([1, 2, 4]), st.integers(1, 64)).filter(lambda group: group.size > 1)


@given(curves(), GROUPS, GROUPS, st.sampled_from(OPERATIONS), st.floats(1, 1e12))
def test_a_time_is_above_zero_whatever_was_measured(
    curve: Curve, known: Group, group: Group, operation: str, nbytes: float
) -> None:
    # On a busy machine the smallest size may have taken longest.
    assert sixteen({known: curve}).collective_s(operation, nbytes, group, AXES) > 0


@pytest.mark.parametrize("collectives", [{}, {AXES: {}}, {AXES: {"psum": {}}, ARRAYS: {"psum": {Group(2, 1): WITHIN}}}])
def test_a_profile_of_other_ranks(collectives: dict[str, Any]) -> None:
    profile = replace(example, hosts=1, ranks=1, devices=2, collectives=collectives)
    with pytest.raises(
        ValueError, match=r"a profile with psum in .* named axes, got one of 1 rank.s. x 2 device.*Measure"
    ):
        profile.collective_s("psum", 8, Group(2, 1), AXES)
    assert profile.collective_s("psum", 8, Group(1, 1), AXES) == 0


@pytest.mark.parametrize(("devices", "number"), [(None, 16), (1, 1), (3, 3), (4, 4), (8, 8), (400, 400)])
def test_devices_of_whole_hosts(devices: int | None, number: int) -> None:
    assert sixteen({}).check_devices(devices) == number
    assert replace(sixteen({}), ranks=8, devices=2).check_devices(devices) == number


@pytest.mark.parametrize("devices", [-4, 0, 5, 17])
def test_devices_of_parts_of_hosts(devices: int) -> None:
    with pytest.raises(ValueError, match=rf"devices of whole hosts, which have 4 each, got {devices}\. Choose another"):
        sixteen({}).check_devices(devices)


# Computation


def test_products_and_convolutions() -> None:
    def flat(per_s: float) -> dict[int, Curve]:
        return {8: Curve((1e3,), (1e3 / per_s,)), 32: Curve((1e3,), (4e3 / per_s,))}

    profile = replace(
        example,
        products={"bfloat16": flat(1e9), "float32": flat(1e6)},
        convolutions={"bfloat16": flat(1e3), "float16": flat(1e2)},
    )
    assert profile.product_s("bfloat16", 100, 8, 200) == pytest.approx(2 * 100 * 8 * 200 / 1e9)
    assert profile.product_s("float32", 8, 100, 200) == pytest.approx(2 * 100 * 8 * 200 / 1e6)
    assert profile.product_s("float32", 200, 100, 16, batch=3) == pytest.approx(3 * 2 * 200 * 100 * 16 * 2 / 1e6)
    assert profile.product_s("int8", 8, 100, 200) == pytest.approx(2 * 100 * 8 * 200 / 1e6), "as float32"
    assert profile.convolution_s("float16", 8, 5e3) == pytest.approx(50)
    assert profile.convolution_s("float32", 1000, 5e3) == pytest.approx(4 * 5), "not measured: as the first"


@pytest.mark.parametrize(
    ("shape", "form", "table", "smallest"),
    [
        ((8, 200, 32), "NN", "products", 8),
        ((200, 8, 32), "NN", "products", 8),
        ((8, 200, 32), "NT", "transposed_second", 8),
        ((32, 200, 32), "NT", "transposed_second", 32),
        ((200, 8, 32), "NT", "products", 8),
        ((200, 32, 8), "NT", "products", 8),
        ((200, 32, 8), "TN", "transposed", 8),
        ((200, 8, 8), "TN", "transposed", 8),
        ((200, 8, 32), "TN", "outer", 8),
        ((8, 8, 32), "TN", "outer", 8),
        ((8, 200, 32), "TN", "products", 8),
        ((200, 32, 8), "TT", "transposed", 8),
        ((8, 200, 32), "TT", "transposed", 8),
        ((8, 8, 32), "TT", "transposed", 8),
        ((200, 8, 32), "TT", "outer", 8),
    ],
)
def test_products_by_how_the_matrices_lie(shape: tuple[int, int, int], form: str, table: str, smallest: int) -> None:
    """Each table has a speed of its own, and with 32 products take four times as long as with 8."""
    seconds = dict(zip(("products", "transposed_second", "outer", "transposed"), (1e-9, 3e-9, 5e-9, 7e-9), strict=True))

    def flat(each: float) -> dict[str, dict[int, Curve]]:
        return {"float32": {8: Curve((1e3,), (1e3 * each,)), 32: Curve((1e3,), (4e3 * each,))}}

    profile = replace(example, **{name: flat(each) for name, each in seconds.items()})
    operations = 2 * math.prod(shape) * (1 if smallest == 8 else 4)
    assert profile.product_s("float32", *shape, form=form) == pytest.approx(operations * seconds[table])
    without = replace(profile, **{table: {}}) if table != "products" else profile
    assert without.product_s("float32", *shape, form=form) == pytest.approx(operations * 1e-9), "not measured"


def test_passes() -> None:
    profile = replace(
        example,
        call=1e-3,
        streams=Curve((1e3,), (2e-3,)),
        tanh=Curve((1e3,), (3e-3,)),
        transposes=Curve((1e3,), (4e-3,)),
    )
    assert profile.stream_s(1e3) == 2e-3
    assert profile.stream_s(4e3, 1e3) == 8e-3
    assert profile.stream_s(1e3, 1e3) == 3e-3
    assert profile.stream_s(1e3, 1e3, (1e3, 2e3)) == pytest.approx(1e-3 + 3e-3 + 7e-3), "one start of a program"
    assert replace(profile, transposes=None).stream_s(1e3, 0, (1e3,)) == 2e-3


# Files


def test_ready_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "A100" in Profile.load("dgx-a100").source
    example.save(Path("dgx-a100"))
    assert Profile.load("dgx-a100") == example, "a file of that name comes first"


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    profile = replace(
        example,
        source="von Hand, für 8 Geräte",
        devices=2,
        collectives={
            AXES: {"psum": {Group(4, 1): WITHIN}},
            NARROW: {"psum": {Group(4, 1): BETWEEN}},
            ARRAYS: {"ppermute": {Group(1, 2): BETWEEN}},
        },
        products={"float32": {8: WITHIN, 64: BETWEEN}, "bfloat16": {8: BETWEEN}},
        convolutions={"float32": {4: BETWEEN}},
        transposed_second={"float32": {16: BETWEEN}},
        outer={"bfloat16": {8: WITHIN}},
        transposed={"float32": {4: WITHIN}},
        transposes=BETWEEN,
        instruction=3e-6,
        overlap={AXES: 0.25},
    )
    path = tmp_path / "cluster.json"
    for one in (profile, example):
        one.save(path)
        assert Profile.load(path) == one
    assert path.read_text().endswith("}\n")


def test_a_profile_knows_how_noisy_its_hour_was(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    quiet, busy = (replace(example, noise=Noise(1.05, 1.4, load)) for load in (0.1, 2.5))
    for one in (quiet, busy):
        one.save(path)
        assert Profile.load(path) == one
    assert example.notes == quiet.notes == ()
    [note] = busy.notes
    assert note.startswith(
        "the profile was measured on a busy machine (turns of a program took 1.05 times the fastest one"
    )
    assert "2.50 processes ran for each core before" in note
    for noise in (Noise(1.2, 1.0, 0.0), Noise(1.0, 70.0, 0.0)):
        assert replace(example, noise=noise).notes


def test_a_file_that_does_not_know_instructions(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    example.save(path)
    read = json.loads(path.read_text())
    del read["instruction"]
    path.write_text(json.dumps(read))
    assert Profile.load(path) == example


def test_no_file(tmp_path: Path) -> None:
    sentence = r'plan: expected a file, or the name of a profile .*, "dgx-a100", got .*nowhere\.json\. Measure one'
    with pytest.raises(FileNotFoundError, match=sentence):
        Profile.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize("text", [b"", b"{", b"no JSON", b"\xff\xfe\x00", b"[]", b"3", b"null", b"{}", b"[" * 100_000])
def test_a_file_of_something_else(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "cluster.json"
    path.write_bytes(text)
    with pytest.raises(
        ValueError, match=r"plan: expected a profile of a cluster, got .*cluster\.json: .*\. Measure one"
    ):
        Profile.load(path)


def change(*keys: str | int, to: Any) -> Callable[[Any], None]:
    def set_it(read: Any) -> None:
        for key in keys[:-1]:
            read = read[key]
        read[keys[-1]] = to

    return set_it


CURVE = "a curve needs sizes that rise from above 0, and a time for each"


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (change("format", to=7), "it has format 7, and this version reads 1"),
        (lambda read: read.pop("streams"), "KeyError: 'streams'"),
        (lambda read: read.pop("hosts"), "KeyError: 'hosts'"),
        (lambda read: read.pop("format"), "KeyError: 'format'"),
        (lambda read: read["collectives"][0].pop("operation"), "KeyError: 'operation'"),
        (change("tanh", to=[1]), "TypeError"),
        (change("tanh", "sizes", 1, to=8.0), CURVE),  # twice the same size
        (change("tanh", "sizes", 1, to=4), CURVE),
        (change("tanh", "sizes", 0, to=0), CURVE),
        (change("tanh", "sizes", 0, to="few"), "could not convert"),
        (change("tanh", "sizes", to=[]), CURVE),
        (change("streams", "seconds", 3, to=0), CURVE),
        (change("streams", "seconds", 3, to=-1), CURVE),
        (change("streams", "seconds", 3, to=math.nan), CURVE),
        (change("streams", "seconds", 3, to=math.inf), CURVE),
        (change("products", 0, "seconds", to=[1e-6]), CURVE),
        (change("collectives", 0, "seconds", to=[]), CURVE),
        (change("products", to=[]), "it has no products"),
        (change("convolutions", to=[]), "it has no convolutions"),
        (change("tanh", "sizes", 0, to=10**400), "OverflowError"),
        (change("tanh", "seconds", 0, to=1e300), CURVE),
        (
            change("products", 0, "smallest", to=8.5),
            "the smallest number of products is a whole number above 0, not 8.5",
        ),
        (change("products", 0, "smallest", to="8"), "the smallest number of products is a whole number above 0, not 8"),
        (change("products", 0, "smallest", to=0), "the smallest number of products is a whole number above 0, not 0"),
        (change("products", 0, "dtype", to=3), "dtype is a text, not 3"),
        (change("source", to=None), "source is a text, not None"),
        (change("collectives", 0, "operation", to=True), "operation is a text, not True"),
        (change("collectives", 0, "hosts", to=2.0), r"2 or more, not \(\d+, 2.0\)"),
        (change("memory", to=10**400), "it needs whole numbers above 0"),
        (change("collectives", 0, "per_host", to=0), r"2 or more, not \(0, 1\)"),
        (change("collectives", 0, "per_host", to=1), r"2 or more, not \(1, 1\)"),
        (change("hosts", to=0), "as many ranks on each host, not 0 hosts, 4 ranks"),
        (change("hosts", to=3), "as many ranks on each host, not 3 hosts, 4 ranks"),
        (change("devices", to="two"), "whole numbers above 0, .* two devices"),
        (change("memory", to=-1), "whole numbers above 0, .* devices of -1 B"),
        (change("call", to="short"), "could not convert"),
        (change("call", to=-1e-6), "call and instruction take 0 s or more, not -1e-06 and 0.0"),
        (change("noise", to={"computing": 1, "collectives": -1, "load": 0}), "noise has numbers of 0 or more, not"),
        (change("noise", to={"computing": 1}), "TypeError"),
        (change("noise", to=3), "AttributeError"),
        (change("overlap", to={"named axes": 1.5}), "overlap is a share from 0 to 1, not"),
        (change("instruction", to=math.inf), "call and instruction take 0 s or more, not 1e-05 and inf"),
    ],
)
def test_a_file_with_a_mistake(tmp_path: Path, spoil: Callable[[Any], None], sentence: str) -> None:
    path = tmp_path / "cluster.json"
    example.save(path)
    read = json.loads(path.read_text())
    spoil(read)
    path.write_text(json.dumps(read))
    with pytest.raises(ValueError, match=rf"a profile of a cluster, got .*cluster\.json: .*{sentence}.*\. Measure one"):
        Profile.load(path)


def test_the_file_in_the_documentation(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
    (text,) = re.findall(r"^```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    path = tmp_path / "cluster.json"
    path.write_text(text)
    profile = Profile.load(path)
    assert (profile.per_host, profile.check_devices(None)) == (8, 32)
    groups = (Group(8, 1), Group(8, 4), Group(8, 2))
    within, between, two = (profile.collective_s("psum", 1e9, group, AXES) for group in groups)
    assert (within, between) == pytest.approx((2 * 7 / 8 / 200, 2 * 3 / 4 / 50))
    assert two == pytest.approx(3e-5 * 4 / 5 + (between - 3e-5) * (2 * 1 / 2) / (2 * 3 / 4))  # 16 devices instead of 32
    assert profile.product_s("bfloat16", 1e4, 1e4, 1e4) == pytest.approx(2e12 / 312e12 * 2, rel=0.01)


# What is measured


@pytest.mark.parametrize(
    ("hosts", "per_host", "groups"),
    [
        (1, 1, []),
        (1, 4, [(2, 1), (4, 1)]),
        (1, 3, [(3, 1)]),
        (4, 1, [(1, 2), (1, 4)]),
        (2, 2, [(1, 2), (2, 1), (2, 2)]),
        (3, 4, [(1, 3), (2, 1), (2, 3), (4, 1), (4, 3)]),
    ],
)
def test_groups_in_a_cluster(hosts: int, per_host: int, groups: list[tuple[int, int]]) -> None:
    assert groups_in(hosts, per_host) == groups
    assert count_turns(hosts, per_host) == len(groups) * len(OPERATIONS) * len(collectives.SIZES)


@pytest.mark.parametrize("per_group", [1, 2, 4, 8])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_groups_of_global_arrays_are_apart(operation: str, per_group: int) -> None:
    workload = make_workload(operation, 192, np.float32, per_group)
    devices = np.array(jax.devices()[:8]).reshape(-1, per_group)
    arrays = GlobalArrays("arrays", devices)
    arrays.barrier()
    program = arrays.program(workload)
    assert program is not None
    # The same operands in each group: another result would show that groups are mixed.
    places = [i % per_group for i in range(8)]
    results = program.get(program.run(program.put([operands(workload, i, per_group) for i in places])))
    assert program.participants == len(results) == 8
    for i, result in zip(places, results, strict=True):
        assert count_wrong(workload, result, expected(workload, i, per_group, 1)) == 0


def test_programs_are_timed_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lasts for a while, here two turns, must not meet all times of a program. A curve ends with a long call."""
    timed: list[float] = []

    class Timed:
        def __init__(self, comm: pc.Communicator, function: Any, arguments: list[float]) -> None:
            assert (comm, arguments) == (world, [function()])
            self.call_s = function()
            self.seconds: list[float] = []
            timed.append(self.call_s)

        def turn(self, arguments: list[float]) -> None:
            assert arguments == [self.call_s]
            timed.append(self.call_s)
            self.seconds.append(self.call_s * (50 if len(timed) > 5 * 4 else 1))

    monkeypatch.setattr(turns, "_Timed", Timed)
    ticks: list[int] = []
    world = comm
    few = turns.Programs([1, 2, 4, 8], lambda size: (lambda: size * 0.02, [size * 0.02]))
    one = turns.Programs([3], lambda size: (lambda: size * 0.03, [size * 0.03]))
    found, noise = turns.measure_curves(world, {"few": few, "one": one}, ticks.append)
    assert noise == pytest.approx((4 * 1 + 50) / 5), "curves do not have it, but the profile says it"
    assert found == {"few": ((1, 2, 4), pytest.approx((0.02, 0.04, 0.08))), "one": ((3,), pytest.approx((0.09,)))}
    assert timed == pytest.approx([0.02, 0.04, 0.08, 0.09] * (1 + turns.TURNS))
    assert sum(ticks) == 2 * (1 + turns.TURNS)


def test_a_collective_that_was_disturbed_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The faster one of two measurements counts, and the profile says how far apart they were."""
    asked: list[tuple[int, int]] = []

    def measured(ranks: Any, workload: Any, runners: Any, *, calls: int, warmup: int) -> dict[str, Timing]:
        nth = len(asked) // 2  # two kinds of programs
        asked.append((workload.nbytes, calls))
        took_us = {0: 774.0, 1: 20.0, 2: 11.0, 3: 200e3, 4: 12.0, 5: 40.0, 6: 11.0, 7: 100e3}[nth]
        return {runners[0].name: Timing(took_us, took_us, took_us, 0, 1)}

    monkeypatch.setattr(collectives, "measure", measured)
    programs: Any = {"a": SimpleNamespace(name="a"), "b": SimpleNamespace(name="b")}
    ratios: list[float] = []
    ticks: list[int] = []
    found = dict(collectives._curves(comm, comm, "psum", programs, Group(2, 1), ticks.append, ratios))
    assert list(found) == ["a", "b"]
    for curve in found.values():
        assert curve.sizes == collectives.SIZES[:4]
        assert curve.seconds == pytest.approx((11e-6, 11e-6, 11e-6, 0.1))
    assert sorted(ratios) == pytest.approx(sorted([774 / 12, 2.0, 1.0, 2.0] * 2))
    assert sum(ticks) == len(collectives.SIZES)
    assert asked[: len(asked) // 2] == asked[len(asked) // 2 :]


@pytest.mark.parametrize("call_s", [20e-3, 2e-3, 60e-6, 1e-7])
def test_the_time_of_a_call_is_that_of_a_series(monkeypatch: pytest.MonkeyPatch, call_s: float) -> None:
    """What a program takes when it is new to the caches does not count, and the ranks' meetings for little."""
    now, slower, calls, met = 0.0, 10.0, 0, []

    def run(x: float) -> float:
        nonlocal now, slower, calls
        calls += 1
        now += call_s + slower
        slower = 0.0
        return x

    def meet(ranks: Any) -> None:
        nonlocal now
        now += 100e-6
        met.append(calls)

    monkeypatch.setattr(jax, "jit", lambda function: function)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    monkeypatch.setattr(timing, "meet", meet)
    timed = turns._Timed(comm, run, [np.zeros(4, np.float32)])
    assert timed.call_s == pytest.approx(call_s + 100e-6)
    for _ in range(2):
        slower = 3.0
        timed.turn([np.zeros(4, np.float32)])
    in_a_series, first = {20e-3: (1, []), 2e-3: (3, [3]), 60e-6: (114, [38, 114]), 1e-7: (1000, [60, 1000])}[call_s]
    assert timed.seconds == pytest.approx([call_s + 100e-6 / in_a_series] * 2)
    series = [1, 1, *first, *[in_a_series] * 4]  # the first two show that it gets no faster
    ends = list(itertools.accumulate(series, initial=1))
    assert met == [count for pair in itertools.pairwise(ends) for count in pair]


@pytest.mark.parametrize(("nbytes", "copies"), [(1 << 10, 1), (1 << 20, 32), (16 << 20, 8), (256 << 20, 1)])
def test_large_arguments_are_other_ones_in_each_call(nbytes: int, copies: int) -> None:
    arguments = turns._in_turns([np.zeros(nbytes, np.uint8)])
    each = [next(arguments)[0] for _ in range(2 * copies)]
    assert len({x.ctypes.data for x in each}) == copies
    assert all(x is y for x, y in zip(each[:copies], each[copies:], strict=True))


def test_each_curve_is_a_field_of_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(comm: pc.Communicator, curves: dict[Any, Any], tick: Any) -> tuple[dict[Any, Curve], float]:
        for _ in curves:
            tick(1 + turns.TURNS)
        return {key: Curve((1.0,), (1e-3 * place,)) for place, key in enumerate(curves, 1)}, 1.5

    monkeypatch.setattr(computing, "measure_curves", measured)
    monkeypatch.setattr(computing, "instruction_s", lambda seconds, profile: (seconds, profile.call))
    ticks: list[int] = []
    fields, noise = computing.measure_computing(comm, ["float32", "bfloat16"], ticks.append)
    assert noise == 1.5
    assert sum(ticks) == computing.count_turns(["float32", "bfloat16"])
    tables = {
        "products": computing.SMALLEST,
        "transposed_second": computing.ROWS,
        "outer": computing.TERMS,
        "transposed": computing.COLUMNS,
        "convolutions": computing.CHANNELS,
    }
    assert [len(numbers) for numbers in tables.values()] == [6, 5, 4, 4, 4]

    def places(table: dict[int, Curve]) -> dict[int, int]:
        return {number: round(1e3 * curve.seconds[0]) for number, curve in table.items()}

    place = itertools.count(1)
    for dtype in ("float32", "bfloat16"):
        for name, numbers in tables.items():
            assert places(fields[name][dtype]) == dict(zip(numbers, place, strict=False)), name
    assert places({0: fields["streams"], 1: fields["transposes"], 2: fields["tanh"]}) == {0: 47, 1: 48, 2: 49}
    assert fields["call"] == pytest.approx(50e-3)
    assert fields["instruction"] == pytest.approx((51e-3, 50e-3))


@pytest.mark.parametrize(
    ("programs", "few", "widths", "form"),
    [
        (computing._products, 16, [16, 64, 256, 1024, 2048], "NN"),
        (computing._products, 512, [512, 1024, 2048], "NN"),
        (computing._transposed_second, 16, [64, 256, 2048], "NT"),
        (computing._outer, 16, [64, 256, 2048], "TN"),
        (computing._transposed, 32, [64, 256, 1024], "TT"),
    ],
)
def test_programs_of_products(programs: Any, few: int, widths: list[int], form: str) -> None:
    """They are the products that the profile looks up, in the sizes that it has."""
    sizes, program = programs("float32", few)
    assert sizes == [2 * few * width**2 for width in widths]
    width = max(few, 64)
    function, arguments = program(2 * few * width**2)
    text = jax.jit(function).lower(*arguments).compile().as_text()
    assert text is not None
    [product] = [item for item in work_of(text, 1).computing if isinstance(item, Product)]
    shape = {"NN": (few, width, width), "NT": (few, width, width), "TN": (width, few, width), "TT": (width, width, few)}
    assert product == Product("float32", 1, *shape[form], form)


def test_what_an_instruction_takes_in_a_program_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program takes 3 s, of which the profile's own numbers explain those of its call, 1 s."""
    flat = Curve((1.0, 1e12), (1.0, 1.0))
    profile = replace(example, call=1.0, streams=flat, tanh=flat, products={"float32": {1: flat}})
    monkeypatch.setattr(computing, "_LAYERS", 2)
    function, arguments = computing.layers()
    text = jax.jit(function).lower(*arguments).compile().as_text()
    assert text is not None
    count = sum(work_of(text, 1).computing.values())
    assert count > 40
    assert computing.instruction_s(3.0, profile) == pytest.approx(2 / count)
    assert computing.instruction_s(0.5, profile) == 0, "never less than nothing"


def test_a_time_ends_when_all_ranks_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that shares a core may begin when another one is done. Then its own time is not what both of them take."""
    now = 1.0

    def pass_by(seconds: float) -> None:
        nonlocal now
        now += seconds

    waits = iter([10.0, 3.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    monkeypatch.setattr(timing, "meet", lambda ranks: pass_by(next(waits)))
    of_all: list[float] = []

    def allreduce(own: float, op: Any) -> float:
        of_all.append(own)
        return (max if op == timing.MPI.MAX else min)(own, 7.0, 1.0)

    ranks: Any = SimpleNamespace(allreduce=allreduce)
    assert timing.slowest_s(ranks, lambda: pass_by(2.0)) == 7.0
    assert of_all == [5.0]


@pytest.mark.parametrize(
    ("seconds", "least", "settled"),
    [
        ([5, 5], 2, 5),
        ([5, 6], 2, 6),
        ([9, 5, 4.6], 2, 4.6),
        ([9, 9, 9, 5, 4.6], 4, 4.6),
        ([2.0**-i for i in range(8)], 2, 2.0**-7),
    ],
)
def test_a_measurement_settles(seconds: list[float], least: int, settled: float) -> None:
    left = iter(seconds)
    assert timing.settled_s(left.__next__, least) == settled
    assert next(left, None) is None


def test_a_rank_that_waits_gives_its_core_away(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [False, False, True]
    yields: list[None] = []
    monkeypatch.setattr(timing.os, "sched_yield", lambda: yields.append(None))
    ranks: Any = SimpleNamespace(Ibarrier=lambda: SimpleNamespace(Test=lambda: answers.pop(0)))
    timing.meet(ranks)
    assert (answers, len(yields)) == ([], 2)


TOTAL = psutil.virtual_memory().total
GROUPS = {  # what /proc/self/cgroup says, the files below /sys/fs/cgroup, and the bytes that this leaves
    "none": (None, {}, TOTAL),
    "no limit": ("0::/", {"memory.max": "max"}, TOTAL),
    "more than there is": ("0::/", {"memory.max": "99999999999999999"}, TOTAL),
    "container": ("0::/", {"memory.max": "4096"}, 4096),
    "job": ("0::/slurm/job_1/step_0", {"slurm/job_1/memory.max": "5000", "slurm/job_1/step_0/memory.max": "max"}, 5000),
    "the least": ("0::/a/b", {"a/memory.max": "5000", "a/b/memory.max": "4000", "memory.max": "6000"}, 4000),
    "another group": ("0::/a", {"b/memory.max": "4000"}, TOTAL),
    "version 1": ("9:cpu,cpuacct:/\n4:memory:/job\n0::/", {"memory/job/memory.limit_in_bytes": "4000"}, 4000),
    "version 1, a container": ("4:memory:/docker/77", {"memory/memory.limit_in_bytes": "4000"}, 4000),
    "of processors": ("4:cpu:/job", {"memory/job/memory.limit_in_bytes": "4000"}, TOTAL),
}


@pytest.mark.parametrize("case", GROUPS)
def test_memory_of_the_host(tmp_path: Path, case: str) -> None:
    told, limits, left = GROUPS[case]
    group = tmp_path / "cgroup"
    if told is not None:
        group.write_text(told + "\n")
    (tmp_path / "memory.max").write_text("1\n")  # beside the groups: nobody's limit
    for name, limit in limits.items():
        file = tmp_path / "groups" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(limit + "\n")
    assert computing._memory_of_the_host(group, tmp_path / "groups") == left


def test_memory_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the process holds is gone, and the ranks of a host share the rest."""
    monkeypatch.setattr(computing, "_memory_of_the_host", lambda: 4 << 30)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=1 << 29)))
    agreed: list[int] = []
    ranks: Any = SimpleNamespace(rank=0, size=4, local_size=2, mpi=SimpleNamespace())
    ranks.mpi.allreduce = lambda own, op: agreed.append(own) or min(own, 7 << 26)
    assert computing.memory_of_a_device(ranks, 3) == 7 << 26, "that of the rank that has least"
    assert agreed == [((2 << 30) - (1 << 29)) // 3]
    ranks.local_size = 8
    with pytest.raises(RuntimeError, match="profile: expected memory for arrays on each host, got 8 ranks that hold"):
        computing.memory_of_a_device(ranks, 1)


def test_each_dtype_is_one_with_a_fraction_by_its_own_name() -> None:
    for name in ("float32", "bfloat16", "float16"):
        main._check_dtype(name)
    for name in ("int32", "nonsense", "f4", "float64", "bool", "complex64"):  # JAX would compute float64 in float32
        with pytest.raises(
            ValueError, match=f"profile: expected a dtype of numbers with a fraction, got '{name}'. Say"
        ):
            main._check_dtype(name)


# The command line


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command has called: a run, or the words of the command that starts ranks."""
    calls: list[Any] = []
    monkeypatch.setattr(command.command, "main", lambda words: calls.append(words) or 3)
    monkeypatch.setattr(main, "run", lambda options: calls.append(options) or 0)
    monkeypatch.setattr(command, "os", SimpleNamespace(environ={}))
    return calls


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["-o", "nowhere/cluster.json"], "expected -o in a folder that is there, got nowhere/cluster.json"),
        ([], "the following arguments are required: -o/--output"),
        (["-o", "cluster.json", "--devices", "0"], "argument --devices: "),
        (["-o", "cluster.json", "--ranks", "few"], "argument --ranks: "),
        (["-o", "cluster.json", "--dtypes", ","], "expected a dtype after --dtypes, got none"),
        (["-o", "cluster.json", "more"], "unrecognized arguments: more"),
    ],
)
def test_mistakes_in_the_command_line(
    called: list[Any],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: Any,
    words: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        command.main(words)
    assert f"pycollective profile: error: {sentence}" in capsys.readouterr().err
    assert called == []


def test_it_starts_ranks_where_no_launcher_has(called: list[Any], tmp_path: Path) -> None:
    file = str(tmp_path / "cluster.json")
    assert command.main(["-o", file, "--ranks", "4", "--devices", "2"]) == 3
    (words,) = called
    assert words[:2] == ["-n", "4"]
    assert words[words.index("profile") :] == ["profile", "-o", file, "--ranks", "4", "--devices", "2", "--ranks", "1"]


@pytest.mark.parametrize("environ", [{}, {"PMI_SIZE": "2"}])
def test_it_measures_as_one_rank(
    called: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environ: dict[str, str]
) -> None:
    monkeypatch.setattr(command.os, "environ", environ)
    words = ["-o", str(tmp_path / "cluster.json"), "--dtypes", "float32,,float16"]
    assert command.main([*words, "--ranks", "2" if environ else "1"]) == 0
    (options,) = called
    assert (options.dtypes, options.devices) == (("float32", "float16"), 1)
    assert options.output == tmp_path / "cluster.json"


def test_it_measures_both_dtypes_by_default(called: list[Any], tmp_path: Path) -> None:
    assert command.main(["-o", str(tmp_path / "cluster.json"), "--ranks", "1"]) == 0
    (options,) = called
    assert options.dtypes == ("float32", "bfloat16")


def test_the_wider_of_two_curves_has_its_rate_where_it_begins_later() -> None:
    narrow, wide = Curve((10, 1000), (1e-5, 1e-4)), Curve((1000, 10000), (1e-4, 1e-3))
    curves = {8: narrow, 32: wide}
    assert across(curves, 8, 1) == across(curves, 2, 1) == 1e-5, "latency is left"
    assert across(curves, 32, 100) == across(curves, 64, 100) == 1e-4
    # Halfway in logarithms between the latency of the narrow one and a tenth of the time of the wide one.
    assert across(curves, 16, 100) == pytest.approx((narrow(100) * 1e-5) ** 0.5)
