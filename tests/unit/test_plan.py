"""From a step to a ranking of plans: tracing, predicting, searching, running, and what is refused."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import pycollective as pc
from pycollective.planning.by_compiling import search
from pycollective.planning.by_compiling.candidates import Candidate, Leaf
from pycollective.planning.by_compiling.compiled_candidate import (
    READY,
    Compiled,
    Request,
    as_json,
    compile_candidate,
    from_json,
)
from pycollective.planning.by_compiling.plans import Measured, Plan, Ranking
from pycollective.planning.by_compiling.prediction import Prediction, predict
from pycollective.planning.by_compiling.program_work import (
    IRREGULAR,
    LOOPS,
    Beside,
    Communication,
    Convolution,
    Product,
    Stream,
    Work,
)
from pycollective.planning.by_compiling.trace import trace
from pycollective.planning.example import profile as four
from pycollective.planning.profile import Group, group_of
from tests.cases import values

Array = Any
Tree = Any

PROFILE = replace(four, ranks=8)  # as many ranks as tests in one process have devices: 2 hosts with 4


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


# Predictions


def seconds(*items: Any) -> Prediction:
    computing = Counter(item for item in items if not isinstance(item, Communication))
    return predict(Work(computing, Counter(item for item in items if isinstance(item, Communication))), 5, four)


# The invented cluster: a latency, of which a call that does nothing takes all of that within a host, and a rate.
@pytest.mark.parametrize(
    ("item", "expected"),
    [
        (Product("float32", 1, 64, 64, 64), 2 * 64**3 / 1e11),
        (Product("float32", 4, 64, 128, 64), 4 * 2 * 64 * 128 * 64 / 1e11),
        (Product("bfloat16", 1, 64, 64, 64), 2 * 64**3 / 1e11),  # not measured: as float32
        (Convolution("float32", 64, 2**20), 2**20 / 1e11),
        (Stream(2**20, 0), 2**20 / 1e10),
        (Stream(2**20, 2**16), 2**20 / 1e10),  # the memory takes longer than the functions
        (Stream(2**20, 2**18), 2**18 / 1e9),  # the other way round
    ],
)
def test_predicted_computation(item: Any, expected: float) -> None:
    found = seconds(item)
    assert found.computing_s == pytest.approx(1e-5 + expected)
    assert (found.communication_s, found.memory) == (0, 5)
    assert seconds(item, item, item).computing_s == pytest.approx(1e-5 + 3 * expected), "the call counts once"


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ((0,), 0),
        ((0, 1), 2**16 / 4e9),
        ((0, 2), 1e-4 - 1e-5 + 2**16 / 1e8),
        ((0, 1, 2, 3), 1e-4 - 1e-5 + 2**16 / 1e8),
    ],
)
def test_predicted_communication(group: tuple[int, ...], expected: float) -> None:
    item = Communication("psum", 2**16, group)
    found = seconds(item, item)
    assert found.communication_s == pytest.approx(2 * expected)
    assert found.computing_s == 1e-5
    assert found.seconds == pytest.approx(1e-5 + 2 * expected)


def test_how_much_of_a_prediction_may_be_far_off() -> None:
    """Of loops the short instructions, of gathers all; it is said where that is a large part of a plan's time."""
    short, long = Stream(2**15, 0), Stream(2**24, 0)
    items = Counter({short: 100, long: 10})
    work = Work(items, Counter(), doubtful={LOOPS: items, IRREGULAR: Counter({long: 5})})
    found = predict(work, 5, four)
    each = {item: item.nbytes / 1e10 for item in items}
    assert dict(found.doubtful_s) == pytest.approx({LOOPS: 100 * each[short], IRREGULAR: 5 * each[long]})
    traced = trace(lambda p: p, (X,), ())
    one = Plan(Candidate(2, 1, "", ()), (), found, traced.signature)
    [note] = search._notes(traced, [one])
    share = 5 * each[long] / found.seconds
    assert note.startswith(f"gathers, scatters and sorts take up to {share:.1%} of a plan's predicted time")
    assert search._notes(traced, [replace(one, measured=Measured(1.0, None))]) == ()
    assert from_json(as_json(Compiled(work, 3, ()))) == Compiled(work, 3, ())


def test_what_passes_while_devices_compute() -> None:
    """The measured share of the shorter one, and no more than all of the computation."""
    product, sent = Product("float32", 1, 512, 512, 512), Communication("psum", 2**20, (0, 1))
    product_s, sent_s = 2 * 512**3 / 1e11, 2**20 / 4e9
    work = Work(Counter({product: 4}), Counter({sent: 3}), beside=(Beside(sent, 3, Counter({product: 1})),) * 2)
    plain = predict(work, 5, four)
    assert plain.beside_s == 0
    assert plain.seconds == plain.computing_s + plain.communication_s
    half = predict(work, 5, replace(four, overlap={"global arrays": 0.5, "named axes": 1.0}))
    assert half.beside_s == pytest.approx(2 * 0.5 * min(product_s, 3 * sent_s))
    assert half.seconds == pytest.approx(plain.seconds - half.beside_s)
    few = replace(work, beside=work.beside * 9)
    assert predict(few, 5, replace(four, overlap={"global arrays": 1.0})).beside_s == plain.computing_s
    assert from_json(as_json(Compiled(work, 3, ()))) == Compiled(work, 3, ())


def test_each_instruction_takes_a_while_by_itself() -> None:
    product, communication = Product("float32", 1, 64, 64, 64), Communication("psum", 2**16, (0, 1))
    work = Work(Counter({product: 3}), Counter({communication: 2}))
    plain, slow = (predict(work, 5, replace(four, instruction=s)) for s in (0.0, 1e-3))
    assert slow.computing_s - plain.computing_s == pytest.approx(3e-3)
    assert slow.communication_s - plain.communication_s == pytest.approx(2e-3)


@pytest.mark.parametrize(
    ("items", "scratch", "nbytes"),
    [
        ([], 7, 7),
        ([Communication("psum", 2**16, (0, 2))], 7, 2**16),  # MPI's buffer between hosts; one of both at a time
        ([Communication("psum", 2**16, (0, 2))], 2**20, 2**20),
        ([Communication("psum", 2**16, (0, 1, 2, 3))], 7, 2**15),  # a rank's share
        ([Communication("psum", 2**16, (0, 1))], 0, 0),  # within a host
        ([Communication("ppermute", 2**16, (0, 2))], 0, 0),
        ([Communication("psum", 2**16, (0, 2), largest=2**14)], 0, 2**14),  # one array after the other
    ],
)
def test_predicted_memory(items: list[Communication], scratch: int, nbytes: int) -> None:
    assert predict(Work(Counter(), Counter(items), scratch), 1000, four).memory == 1000 + nbytes


@pytest.mark.parametrize(
    ("devices", "group"),
    [
        ((0,), Group(1, 1)),
        ((0, 3), Group(2, 1)),
        ((0, 4), Group(1, 2)),
        ((0, 4, 1, 5), Group(2, 2)),
        ((0, 1, 2, 4), Group(3, 2)),  # the larger part
        (tuple(range(12)), Group(4, 3)),
    ],
)
def test_groups(devices: tuple[int, ...], group: Group) -> None:
    assert group_of(devices, 4) == group


# Traces

X = f32(4, 3)
KEY = jax.eval_shape(lambda: jax.random.key(0))


class Both(NamedTuple):
    a: Any
    b: Any


@pytest.mark.parametrize(
    ("step", "args", "states", "outs"),
    [
        (lambda p, x: (p + x, x.sum()), (X, f32(4, 3)), [0, None], (0, None)),
        (lambda p, x: p + x, (X, X), [0, None], (0,)),
        (lambda x, p: p + x.sum(), (f32(5), X), [None, 0], (1,)),
        (lambda a, b, x: (a, b), (X, X, X), [0, 1, None], (0, 1)),
        (lambda a, b, x: [b.sum(), b, a], (X, f32(7), X), [0, 1, None], (None, 1, 0)),
        (lambda p, x: {"w": p["w"] + x, "b": p["b"]}, ({"w": X, "b": f32(3)}, X), [0, 0, None], (0, 1)),
        (lambda p, x: {"w": p["w"]}, ({"w": X, "b": f32(3)}, X), [None, None, None], (None,)),  # another tree
        (lambda p: p.astype(jnp.bfloat16), (X,), [None], (None,)),
        (lambda p, x: ({"w": p["w"], "n": None}, 0), ({"w": X, "n": None}, X), [0, None], (0, None)),
        (lambda n, p, x: (n, p), (None, X, X), [0, None], (0,)),  # a tree without leaves is no state
        (lambda p, k: (p, jax.random.split(k)[0]), (X, KEY), [0, 1], (0, 1)),
        (lambda n, x: (n + 1, x.sum()), (jax.ShapeDtypeStruct((), "int32"), X), [0, None], (0, None)),
        (lambda p, x: ((p, p), {"loss": [x.sum()]}), (X, X), [None, None], (None, None, None)),
        (lambda p: Both(p.a, p.b), (Both(X, f32(3)),), [0, 0], (0, 1)),  # a named tuple is one result
        (lambda p, rate: p * rate, (np.ones((4, 3), np.float32), 0.1), [0, None], (0,)),
        (lambda: jnp.ones(3), (), [], (None,)),
        # Inside a tree: a whole argument, or an array under the argument's name
        (lambda p, x: {"loss": x.sum(), "new": {"w": p["w"]}}, ({"w": X}, X), [0, None], (None, 0)),
        (lambda p, x: {"loss": x.sum(), "p": p + x}, (X, X), [0, None], (None, 0)),
        (lambda p, x: {"loss": x.sum(), "grads": p + x}, (X, X), [None, None], (None, None)),
        (lambda s, x: ((s, x.sum()), {"n": 0}), (Both(X, X), X), [0, 0, None], (0, 1, None, None)),
        (lambda p, o, x: {"o": Both(o.a, o.b), "p": p}, (X, Both(X, X), X), [0, 1, 1, None], (1, 2, 0)),
        (lambda s: (s[0] + 1, s[1]), ((X, f32(3)),), [0, 0], (0, 1)),
    ],
)
def test_which_arguments_are_state(
    step: Callable[..., Any], args: tuple[Any, ...], states: list[int | None], outs: tuple[int | None, ...]
) -> None:
    traced = trace(step, args, ())
    assert [leaf.state for leaf in traced.leaves] == states
    assert traced.signature.outs == outs


def test_the_leaves_of_a_trace() -> None:
    args = ({"w": f32(4, 3), "h": jax.ShapeDtypeStruct((2,), "bfloat16")}, KEY)
    assert trace(lambda p, k: p, args, ()).leaves == (
        Leaf("[0]['h']", (2,), 4, 0),
        Leaf("[0]['w']", (4, 3), 48, 0),
        Leaf("[1]", (), 8, None),
    )


@pytest.mark.parametrize(
    ("argnums", "places"), [((), ()), (0, (0, 1)), (1, (2,)), ((0, 2), (0, 1, 3)), ([1], (2,)), (-1, (3,))]
)
def test_what_is_donated(argnums: Any, places: tuple[int, ...]) -> None:
    traced = trace(lambda p, x, y: (p, x, y), ({"a": X, "b": X}, X, X), argnums)
    assert traced.donated == places
    assert all(number >= 0 for number in traced.signature.donate_argnums)


def test_a_program_computes_what_its_step_does() -> None:
    def step(p: Tree, x: Array) -> Tree:
        return {"loss": jnp.sum(p["a"] * x), "p": {"a": p["a"] + 1, "n": None}}

    p, x = {"a": values((4, 3)), "n": None}, values((4, 3), seed=1)
    traced = trace(step, (p, x), ())
    found = jax.export.deserialize(bytearray(traced.program)).call(p["a"], x)
    for one, other in zip(found, jax.tree.leaves(step(p, x)), strict=True):
        np.testing.assert_allclose(one, other, 1e-6)


def test_side_effects_of_python_are_those_of_tracing() -> None:
    seen = []

    def step(x: Array) -> Array:
        seen.append(type(x))
        return x

    trace(step, (X,), ())
    assert seen
    assert all(issubclass(kind, jax.core.Tracer) for kind in seen), "a step never runs"


def _callback(x: Array) -> Array:
    return io_callback(lambda x: x, X, x, ordered=True)


def _printing(x: Array) -> Array:
    jax.debug.print("{}", x)
    return x


def _collective(x: Array) -> Array:
    return pc.psum(x, pc.init())


@pytest.mark.parametrize(
    ("step", "words"),
    [
        (lambda x: x @ x, "a step that JAX can trace with these arguments, got TypeError: dot_general"),
        (lambda x: 1 // 0, "a step that JAX can trace with these arguments, got ZeroDivisionError"),
        (lambda x: x if x.sum() > 0 else -x, "a step that JAX .* got TracerBoolConversionError"),
        (lambda x: jax.lax.psum(x, "i"), "a step that JAX .* unbound axis name: i"),
        (lambda: 0, "a step that JAX .* takes 0 positional arguments but 1 was given"),
        (lambda x: "result", "a step that JAX .* returned a value of type <class 'str'>"),
        (None, "a step that JAX .* the first argument must be callable"),
        (_printing, "a step without side effects, got Debug.*. Leave out callbacks, jax.debug.print and collectives"),
        (_callback, "a step without side effects, got .*IO"),
        (_collective, "a step without side effects, got .*Collective"),
        (lambda x: jax.pure_callback(lambda x: x, X, x), "a step that jax.export can hand .* Leave out what runs"),
        (lambda x: jax.ffi.ffi_call("somewhere", X)(x), "a step that jax.export can hand .* Leave out what runs"),
    ],
)
def test_steps_that_are_refused(step: Any, words: str) -> None:
    with pytest.raises(ValueError, match=rf"(?s)^pycollective\.plan: expected {words}"):
        pc.plan(step, X, profile=four)


@pytest.mark.parametrize("argument", ["text", object()])
def test_arguments_that_are_no_arrays(argument: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)^pycollective\.plan: expected a step that JAX .* Call it once yourself"):
        pc.plan(lambda x, y: x, X, argument, profile=four)


@pytest.mark.parametrize("argnums", [2, -3, (0, 5)])
def test_donated_arguments_that_there_are_not(argnums: Any) -> None:
    with pytest.raises(ValueError, match=r"plan: expected donate_argnums among the 2 arguments, got \(.*\)\. Count"):
        pc.plan(lambda x, y: x, X, X, profile=four, donate_argnums=argnums)


@pytest.mark.parametrize(("devices", "profile", "inside"), [(0, four, 2), (-2, four, 2), (3, four, 2), (6, PROFILE, 4)])
def test_devices_that_are_no_whole_hosts(devices: int, profile: Any, inside: int) -> None:
    words = rf"^pycollective\.plan: expected devices of whole hosts, which have {inside} each, got {devices}\. Choose"
    with pytest.raises(ValueError, match=words):
        pc.plan(lambda x: x, X, profile=profile, devices=devices)


def test_a_profile_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        pc.plan(lambda x: x, X, profile=tmp_path / "cluster.json")
    (tmp_path / "cluster.json").write_text("{}")
    with pytest.raises(ValueError, match=r"plan: expected a profile of a cluster, got .*cluster\.json: KeyError.*"):
        pc.plan(lambda x: x, X, profile=str(tmp_path / "cluster.json"))


# The search. Its processes take seconds to start, so tests share what they find.


def step(params: Tree, x: Array) -> tuple[Tree, Array]:
    def loss(params: Tree) -> Array:
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value


PARAMS = {"up": f32(64, 256), "down": f32(256, 64)}
BATCH = f32(512, 64)
ARRAYS = ({"up": values((64, 256)) / 8, "down": values((256, 64), seed=1) / 16}, values((512, 64), seed=2))


def plan(**options: Any) -> Ranking:
    usual: dict[str, Any] = {"profile": PROFILE, "compilations": 6, "processes": 2}
    return pc.plan(step, PARAMS, BATCH, **{**usual, **options})


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def ranking(cache: Path) -> Ranking:
    return plan()


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[subprocess.Popen[bytes]]:
    """The processes that a test starts."""
    found: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        found.append(popen(*args, **options))
        return found[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    return found


def test_a_ranking(ranking: Ranking) -> None:
    assert len(ranking) == len(ranking.plans) == 6
    times = [one.prediction.seconds for one in ranking]
    assert times == sorted(times)
    assert ranking.best is ranking.plans[0]
    assert all(one.prediction.memory < one.needed <= PROFILE.memory for one in ranking)
    assert len({one.candidate.key for one in ranking}) == 6
    assert {(one.candidate.data, one.candidate.model) for one in ranking} >= {(8, 1), (4, 2)}
    assert str(ranking).splitlines() == [str(one) for one in ranking]


@pytest.mark.usefixtures("no_processes")
def test_one_device_and_what_is_worth_saying(ranking: Ranking) -> None:
    """What one device takes says how little there is to gain: on it nothing is sent."""
    one = ranking.one_device
    assert one is not None
    assert one.communication_s == 0
    assert one.computing_s > 2 * ranking.best.prediction.computing_s
    assert ranking.notes == ()
    told = str(replace(ranking, notes=("a", "b"))).splitlines()
    assert told == [*map(str, ranking), "note: a", "note: b"]
    assert search._notes(trace(lambda x: x.sum(), (X,), ()), [])[0].startswith("the step returns none of its arguments")


@pytest.mark.usefixtures("no_processes")
def test_a_search_that_has_no_time_knows_one_plan(ranking: Ranking) -> None:
    found = plan(seconds=0)
    assert [one.candidate.rule for one in found] == ["state whole"]
    assert plan(seconds=100) == ranking


def test_what_brings_little_is_not_compiled() -> None:
    """The plans are sped up by what cutting an array brings: whole turns are left out where that is little."""
    traced = trace(step, (PARAMS, BATCH), ())
    start = Candidate(2, 1, "start", ((None, None), (None, None), ("data", None)))

    def compiled(seconds: float, share: float, other: float = 9.0) -> int:
        count = 0

        def add(more: Any) -> list[Any]:
            nonlocal count
            count += len(more)
            return []

        starts = [(start, (), Prediction(took, 0, 1)) for took in (seconds, other * seconds)]
        of_time = search._Refinement(lambda found: found[-1].seconds, traced, 1 << 30, set(), 99, add, float("inf"))
        of_time.refine(starts, four, 2, share)
        return count

    every = 2 * 3  # three arrays that are cut along one dimension, or the other, or lie whole
    assert compiled(1e-3, 0.5e-3) == every
    assert compiled(1e-3, 0.5e-3, other=1.05) == 2 * every, "the second start is as good"
    assert compiled(1e-3, 0.99e-3) == 0, "each device computes its share"
    assert compiled(1.0, 0.1) == 0, "arrays are sent in no time"
    sent = search._sending_s(512 * 64 * 4, four, 2)
    assert compiled(101 * sent, 0) == 0
    assert compiled(99 * sent, 0) == 2, "the largest alone"


def test_the_numbers_of_data_parallelism(ranking: Ranking) -> None:
    """All devices sum the gradients; each one has all parameters twice and its part of the examples."""
    [found] = [one for one in ranking if one.candidate.rule == "state whole"]
    gradients = 2 * 64 * 256 * 4
    between = PROFILE.collective_s("psum", gradients, Group(4, 2)) - PROFILE.call
    assert between < found.prediction.communication_s < 1.2 * between, "the loss is summed as well"
    arrays = 2 * gradients + 512 // 8 * 64 * 4
    activations = 3 * 512 // 8 * 256 * 4
    assert arrays < found.prediction.memory < arrays + gradients + activations
    assert found.out_specs[2] == ()


@pytest.mark.usefixtures("no_processes")
def test_a_second_call_reads_what_the_first_has_found(ranking: Ranking, tmp_path: Path) -> None:
    assert plan(processes=1) == ranking
    path = tmp_path / "cluster.json"
    PROFILE.save(path)
    assert plan(profile=path) == ranking, "a profile from a file"
    assert plan(profile=str(path), devices=8) == ranking


@pytest.mark.usefixtures("no_processes")
def test_another_profile_makes_another_order_of_the_same_plans(ranking: Ranking) -> None:
    slow = {name: dict.fromkeys(curves, four.tanh) for name, curves in PROFILE.collectives["global arrays"].items()}
    other = plan(profile=replace(PROFILE, collectives={"global arrays": slow}))
    assert {one.candidate for one in other} == {one.candidate for one in ranking}
    assert [one.prediction.communication_s for one in other] != [one.prediction.communication_s for one in ranking]


@pytest.mark.usefixtures("no_processes")
def test_a_limit_of_memory_excludes_plans(ranking: Ranking) -> None:
    most = max(one.prediction.at_most for one in ranking)
    fitting = tuple(one for one in ranking if one.prediction.at_most < most)
    assert 0 < len(fitting) < 6
    assert plan(memory=most - 1).plans == fitting
    assert plan(memory=most) == ranking
    assert plan(profile=replace(PROFILE, memory=most - 1)).plans == fitting


@pytest.mark.usefixtures("no_processes")
def test_a_limit_into_which_no_plan_fits(ranking: Ranking) -> None:
    least = min(one.prediction.at_most for one in ranking)
    words = rf"fits into {least - 1:,} B on each device, got up to {least:,} B for the plan that needs least\. Use more"
    with pytest.raises(ValueError, match=rf"^pycollective\.plan: expected a plan that {words}"):
        plan(memory=least - 1)
    # With all cut over 8 devices
    arguments = (2 * 64 * 256 + 512 * 64) * 4 // 8
    with pytest.raises(ValueError, match=rf"fits into 99 B .*, got {arguments:,} B for the arguments alone\. Use more"):
        plan(memory=99)


def test_a_plan_runs(ranking: Ranking) -> None:
    params, loss = jax.jit(step)(*ARRAYS)
    again, _ = jax.jit(step)(params, ARRAYS[1])
    cut = next(one for one in ranking if one.candidate.rule == "state cut")
    for one in (ranking.best, cut):
        compiled = one.jit(step)
        found = compiled(*jax.device_put(ARRAYS, one.in_shardings))
        for got, want in zip(jax.tree.leaves(found), jax.tree.leaves((params, loss)), strict=True):
            np.testing.assert_allclose(got, want, 1e-4, 1e-5)
        spread = jax.tree.map(
            lambda x, sharding: x.sharding.is_equivalent_to(sharding, x.ndim), found, one.out_shardings
        )
        assert all(jax.tree.leaves(spread))
        shardings = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(found[0])]
        state = jax.tree.leaves(one.in_shardings[0])
        assert shardings == [s.shard_shape(x.shape) for s, x in zip(state, jax.tree.leaves(params), strict=True)]
        second, _ = compiled(found[0], jax.device_put(ARRAYS[1], one.in_shardings[1]))
        np.testing.assert_allclose(second["up"], again["up"], 1e-4, 1e-5)


def test_the_mesh_of_a_plan(ranking: Ranking) -> None:
    for one in ranking:
        assert dict(one.mesh.shape) == one.candidate.mesh
        assert list(one.mesh.devices.flat) == jax.devices(), "neighbours along the last axis are neighbours"


@pytest.mark.parametrize("attribute", ["mesh", "in_shardings", "out_shardings", "jit"])
def test_a_plan_for_another_number_of_devices(ranking: Ranking, attribute: str) -> None:
    other = replace(ranking.best, candidate=ranking.best.candidate._replace(data=8, model=2))
    words = r"^pycollective\.plan: expected 16 devices, which the plan is for, got 8\. Call pycollective\.distributed"
    with pytest.raises(ValueError, match=words):
        getattr(other, attribute) if attribute != "jit" else other.jit(step)


def test_a_plan_as_a_dictionary(ranking: Ranking) -> None:
    [found] = [one for one in ranking if one.candidate.rule == "state whole"]
    assert json.loads(json.dumps(found.as_dict())) == {
        "mesh": {"data": 8, "model": 1},
        "rule": "state whole",
        "arguments": {"[0]['down']": [None, None], "[0]['up']": [None, None], "[1]": ["data", None]},
        "results": [[None, None], [None, None], []],
        "computing_s": found.prediction.computing_s,
        "communication_s": found.prediction.communication_s,
        "beside_s": 0.0,
        "memory": found.prediction.memory,
        "measured_s": None,
        "measured_memory": None,
    }
    ran = replace(found, measured=Measured(0.5, 3 << 20))
    assert (ran.as_dict()["measured_s"], ran.as_dict()["measured_memory"]) == (0.5, 3 << 20)
    for one in ranking:
        json.dumps(one.as_dict())


def test_a_plan_in_words() -> None:
    traced = trace(step, (PARAMS, BATCH), ())
    one = Plan(Candidate(4, 2, "by hand", ()), (), Prediction(0.00125, 0.002, 3 << 20), traced.signature)
    words = "data 4 x model 2, by hand: 3.25 ms (1.25 computing, 2 sending), 3.0 MiB"
    assert str(one) == words
    assert one.needed == 3460301
    unknown, known = (replace(one, measured=Measured(0.0041, memory)) for memory in (None, 5 << 20))
    assert (str(unknown), unknown.needed) == (f"{words}; measured 4.1 ms", 3460301)
    both = replace(one, prediction=Prediction(0.00125, 0.002, 3 << 20, beside_s=0.0005))
    assert "2.75 ms (1.25 computing, 2 sending, 0.5 of both at the same time)" in str(both)
    assert (str(known), known.needed) == (f"{words}; measured 4.1 ms, 5.0 MiB", 5 << 20)


def test_plans_that_needed_too_much_are_last() -> None:
    traced = trace(step, (PARAMS, BATCH), ())
    candidate = Candidate(4, 2, "by hand", ())
    plans = [Plan(candidate, (), Prediction(n, 0, 8), traced.signature) for n in range(6)]
    took = [Measured(3.0, 8), Measured(1.0, 11), Measured(2.0, 10), Measured(0.5, 12)]
    ranking = search._verified(plans, took, 10)
    assert [one.prediction.seconds for one in ranking] == [2, 0, 4, 5, 3, 1]
    assert [one.measured and one.measured.memory for one in ranking] == [10, 8, None, None, 12, 11]
    with pytest.raises(ValueError, match="into 7 B on each device, got 8 B for the plan that needed least of"):
        search._verified(plans, took, 7)
    unknown = search._verified(plans, [took[0], Measured(1.0, None)], 10)
    assert [one.prediction.seconds for one in unknown] == [1, 0, 2, 3, 4, 5], "then what was predicted counts"


def _broken(candidate: Candidate) -> Candidate:
    return candidate._replace(rule="broken", specs=(("nowhere",), *candidate.specs[1:]))


def test_a_candidate_that_does_not_compile(
    ranking: Ranking, monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]
) -> None:
    broken = [_broken(ranking.plans[0].candidate), _broken(ranking.plans[1].candidate)]
    every = [one.candidate for one in ranking]
    monkeypatch.setattr(Candidate, "argument_bytes", lambda *_: 0)
    monkeypatch.setattr(search, "candidates", lambda *_: iter([*broken, *every[:4]]))
    monkeypatch.setattr(search, "variations", lambda *_: iter([]))
    assert plan(processes=1).plans == ranking.plans[:4]
    assert len(started) == 1, "an error is an answer, after which the process goes on"
    assert started[0].returncode is not None
    monkeypatch.setattr(search, "candidates", lambda *_: iter(broken))
    words = r"^pycollective\.plan: expected a step that XLA can spread, got ValueError: .*nowhere"
    with pytest.raises(ValueError, match=words):
        plan(processes=1)


def test_processes_that_cannot_start(monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    words = r"plan: expected a process that compiles, got status 1 before it began\. What it said"
    with pytest.raises(RuntimeError, match=words):
        pc.plan(lambda x: x + 1, f32(64), profile=PROFILE, compilations=2, processes=1)
    assert len(started) == 1, "the second candidate starts no other one"


@pytest.mark.parametrize("numbers", [1, 1 << 16], ids=["short", "longer than a pipe"])
def test_processes_that_end(
    numbers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]
) -> None:
    """A worker that says it is ready, and ends at its first candidate or before, as one that ran out of memory."""
    program = tmp_path / "python"
    ready = f"import pickle, sys; pickle.dump({READY!r}, sys.stdout.buffer); sys.exit(1)"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{ready}"\n')
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    constant = np.arange(numbers, dtype=np.float32)
    words = r"expected a step that XLA can spread, got the process that compiled it ended with status 1\. Look"
    with pytest.raises(ValueError, match=words):
        pc.plan(lambda x: x + constant, f32(numbers), profile=PROFILE, compilations=2, processes=1)
    assert {process.returncode for process in started} == {1}


@pytest.mark.parametrize("how", ["no folder", "a link", "others can write"])
def test_no_cache_that_cannot_be_trusted(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]
) -> None:
    base = tmp_path / "cache"
    if how == "no folder":
        base.write_text("a file")
    elif how == "a link":
        (tmp_path / "elsewhere").mkdir()
        (base / "pycollective").mkdir(parents=True)
        (base / "pycollective" / "plans").symlink_to(tmp_path / "elsewhere")
    else:
        (base / "pycollective" / "plans").mkdir(parents=True)
        (base / "pycollective" / "plans").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    for turn in (1, 2):
        assert len(plan(compilations=1, processes=1)) == 1
        assert len(started) == turn, "nothing is remembered"
    assert not list(tmp_path.rglob("*.json"))


def test_a_cache_that_is_broken(
    ranking: Ranking, cache: Path, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    files = sorted(cache.rglob("*.json"))
    assert len(files) >= 6
    files[0].write_bytes(b"")
    files[1].write_bytes(files[1].read_bytes()[:-9])
    files[2].write_text('[[["of another version", [], 1]], [], 0, {}, [], 0, []]')
    files[3].write_bytes(b"\xff")
    assert plan(processes=1) == ranking
    assert len(started) == 1
    assert plan(processes=1) == ranking
    assert len(started) == 1, "what was broken is written again"


def test_a_cache_runs_nothing_that_it_holds(
    ranking: Ranking, cache: Path, monkeypatch: pytest.MonkeyPatch, no_processes: None
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a pickle was loaded")

    monkeypatch.setattr(pickle, "load", refuse)
    monkeypatch.setattr(pickle, "loads", refuse)
    assert plan(processes=1) == ranking


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[1, 2]",
        "[[1], [], 0, {}, [], 0, []]",
        "[[], [[[1], 2, 3]], 0, {}, [], 0, []]",
        "[[], [], 0, [], [], 0, []]",
        "null",
    ],
)
def test_no_text_of_a_worker(text: str) -> None:
    with pytest.raises(ValueError, match="no Compiled|Expecting value|unpack"):
        from_json(text)


def test_no_process_outlives_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: list[subprocess.Popen[bytes]]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def fails(*_: Any) -> Prediction:
        raise RuntimeError("of the parent")

    monkeypatch.setattr(search, "predict", fails)
    before = threading.enumerate()
    with pytest.raises(RuntimeError, match="of the parent"):
        plan()
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(20)
            assert not thread.is_alive()
    assert 1 <= len(started) <= 2
    assert all(process.returncode is not None for process in started)


def test_arrays_are_cut_in_other_ways_one_after_the_other(started: list[subprocess.Popen[bytes]]) -> None:
    """On two devices there are fewer rules than compilations, and what is left refines the best plans."""
    ranking = plan(profile=four, devices=2, compilations=9, processes=1)
    rules = [one.candidate.rule for one in ranking]
    assert 5 < len(ranking) <= 9
    refined = [rule for rule in rules if ";" in rule]
    assert refined
    assert all("[0]['down']" in rule or "[0]['up']" in rule or "[1]" in rule for rule in refined)
    assert len({one.candidate.key for one in ranking}) == len(ranking)
    assert {one.candidate.data * one.candidate.model for one in ranking} == {2}
    assert [process.returncode for process in started] == [-9], "one process compiled them all, and is gone"


# What a process compiles, here in this one


def compiled(step: Callable[..., Any], candidate: Candidate, *args: Any, donate: tuple[int, ...] = ()) -> Compiled:
    traced = trace(step, args, donate)
    request = Request(candidate, traced.signature.outs, traced.donated)
    return compile_candidate(jax.export.deserialize(bytearray(traced.program)), request)


def test_memory_of_what_is_donated() -> None:
    candidate = Candidate(8, 1, "by hand", (("data", None), ()))
    shift = (lambda x, y: x + y, candidate, f32(64, 16), f32())
    assert compiled(*shift).memory == 2 * 64 * 16 * 4 // 8 + 4
    assert compiled(*shift, donate=(0,)).memory == 64 * 16 * 4 // 8 + 4


def test_results_that_are_state_are_spread_as_their_arguments() -> None:
    specs = (("model", "data"), (None, "model"), ("data", None))
    found = compiled(step, Candidate(4, 2, "by hand", specs), PARAMS, BATCH)
    assert found.out_specs[:2] == specs[:2]
    assert {tuple(sorted(item.group)) for item in found.work.communication} <= {
        (0, 1),
        (0, 2, 4, 6),
        tuple(range(8)),
    }
