"""Schedules of pipelines and their simulation, against graphs of what must come before what."""

from __future__ import annotations

import dataclasses
import graphlib
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pycollective.parallel.schedule_picture import draw, picture
from pycollective.parallel.schedule_simulator import Simulation, simulate
from pycollective.parallel.schedules import (
    Action,
    Kind,
    Schedule,
    gpipe,
    interleaved,
    one_f_one_b,
    with_messages,
    zero_bubble,
)

MAKERS: dict[str, Callable[..., Schedule]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "zero bubble": zero_bubble,
    "interleaved 1": lambda p, m: interleaved(p, m, 1),
    "interleaved 2": lambda p, m: interleaved(p, m, 2),
    "interleaved 3": lambda p, m: interleaved(p, m, 3),
}
schedules = st.builds(
    lambda name, p, m: MAKERS[name](p, m), st.sampled_from([*MAKERS]), st.integers(1, 6), st.integers(1, 9)
)
quickly = settings(max_examples=60, deadline=None, derandomize=True, database=None)

SENDS = {Kind.SEND_ACTIVATION: (Kind.RECEIVE_ACTIVATION, 1), Kind.SEND_GRADIENT: (Kind.RECEIVE_GRADIENT, -1)}
RECEIVES = {receive: (send, -step) for send, (receive, step) in SENDS.items()}
BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUTS)


def event(schedule: Schedule, rank: int, action: Action) -> Any:
    """Returns what stands for an action: both ends of a message are one, which takes place if both ranks are there."""
    stage = action.chunk * schedule.stages + rank
    if action.kind in RECEIVES:
        kind, step = RECEIVES[action.kind]
        return kind, stage + step, action.microbatch
    return action.kind, stage, action.microbatch


def graph_of(schedule: Schedule) -> dict[Any, list[Any]]:
    """Returns for each event those that come just before it on some rank."""
    graph: dict[Any, list[Any]] = {}
    for rank, actions in enumerate(schedule.actions):
        events = [event(schedule, rank, action) for action in actions]
        for before, after in zip([None, *events], events, strict=False):
            graph.setdefault(after, []).extend([before] if before else [])
    return graph


@quickly
@given(schedules)
def test_makers_give_each_rank_what_it_must_do(schedule: Schedule) -> None:
    p, m, v = schedule.stages, schedule.microbatches, schedule.chunks
    split = schedule.name == "zero_bubble"
    for rank, actions in enumerate(schedule.actions):
        want: Counter[Any] = Counter()
        for chunk in range(v):
            stage = chunk * p + rank
            for k in range(m):
                want[Kind.FORWARD, chunk, k, None] += 1
                for kind in (Kind.BACKWARD_INPUTS, Kind.BACKWARD_WEIGHTS) if split else (Kind.BACKWARD,):
                    want[kind, chunk, k, None] += 1
                if stage > 0 and p > 1:
                    want[Kind.RECEIVE_ACTIVATION, chunk, k, (rank - 1) % p] += 1
                    want[Kind.SEND_GRADIENT, chunk, k, (rank - 1) % p] += 1
                if stage < p * v - 1 and p > 1:
                    want[Kind.SEND_ACTIVATION, chunk, k, (rank + 1) % p] += 1
                    want[Kind.RECEIVE_GRADIENT, chunk, k, (rank + 1) % p] += 1
        assert Counter(map(tuple, actions)) == want


@quickly
@given(schedules, st.floats(0, 0.5))
def test_no_rank_waits_for_ever_and_the_times_are_those_of_the_longest_path(schedule: Schedule, send: float) -> None:
    costs = {"forward": 1.1, "backward_inputs": 0.9, "backward_weights": 0.7}
    of_kind = {**{Kind(k): t for k, t in costs.items()}, Kind.BACKWARD: 0.9 + 0.7}
    graph = graph_of(schedule)
    ends: dict[Any, float] = {}
    for node in graphlib.TopologicalSorter(graph).static_order():  # raises if there is a circle
        ends[node] = max((ends[b] for b in graph[node]), default=0.0) + of_kind.get(node[0], send)
    simulation = simulate(schedule, **costs, send=send)
    for rank, spans in enumerate(simulation.spans):
        assert [span.action for span in spans] == list(schedule.actions[rank])
        assert all(abs(span.end - ends[event(schedule, rank, span.action)]) < 1e-9 for span in spans)
    assert abs(simulation.total - max(ends.values())) < 1e-9
    computing = sum(of_kind.get(action.kind, 0.0) for actions in schedule.actions for action in actions)
    assert abs(simulation.bubble - (1 - computing / (schedule.stages * simulation.total))) < 1e-9


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("m", [1, 2, 4, 5, 8, 16])
def test_bubbles_and_peaks(p: int, m: int) -> None:
    for maker in (gpipe, one_f_one_b):
        for forward in (1.0, 2.0, 0.25):
            assert simulate(maker(p, m), forward=forward).bubble == (p - 1) / (m + p - 1)
    assert simulate(gpipe(p, m)).peaks == (m,) * p
    assert simulate(one_f_one_b(p, m)).peaks == tuple(min(m, p - rank) for rank in range(p))
    assert simulate(zero_bubble(p, m)).peaks == (min(m, p),) * p
    if m >= p:
        assert simulate(zero_bubble(p, m)).bubble == (p - 1) / (3 * m + p - 1)
    if m % p == 0 and p <= 4:  # from 8 ranks on it is larger if a rank that sends waits
        for v in (1, 2, 3):
            assert simulate(interleaved(p, m, v)).bubble == (p - 1) / (v * m + p - 1)
    assert simulate(interleaved(p, m, 2)).peaks[0] <= 2 * p + p - 1


@quickly
@given(schedules)
def test_peaks_are_those_of_activations_that_still_wait(schedule: Schedule) -> None:
    kept = Counter[int]()
    simulation = simulate(schedule)
    for rank, actions in enumerate(schedule.actions):
        live, most = set(), 0
        for action in actions:
            if action.kind is Kind.FORWARD:
                live.add(action[1:3])
            elif action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHTS):
                live.remove(action[1:3])
            most = max(most, len(live))
        kept[rank] = most
    assert simulation.peaks == tuple(kept[rank] for rank in range(schedule.stages))


@pytest.mark.parametrize("how", ["swap", "drop", "repeat", "other peer", "other microbatch"])
@quickly
@given(schedules, st.data())
def test_a_wrong_schedule_is_refused(how: str, schedule: Schedule, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, schedule.stages - 1))
    actions = list(schedule.actions[rank])
    i = data.draw(st.integers(0, len(actions) - 1))
    if how == "swap":
        j = data.draw(st.integers(0, len(actions) - 1))
        actions[i], actions[j] = actions[j], actions[i]
    elif how == "drop":
        del actions[i]
    elif how == "repeat":
        actions.insert(i, actions[i])
    elif how == "other peer":
        peer = actions[i].peer
        actions[i] = actions[i]._replace(peer=0 if peer is None else peer + 1)
    else:
        actions[i] = actions[i]._replace(microbatch=schedule.microbatches)
    lists = [*schedule.actions]
    lists[rank] = tuple(actions)
    changed = dataclasses.replace(schedule, actions=tuple(lists))
    if how != "swap":
        with pytest.raises(ValueError, match=rf"simulate: expected \d of \w+.* on rank {rank}, got \d"):
            simulate(changed)
        return
    # It is possible if each computation still comes after what it needs, and no ranks wait in a circle.
    in_order = True
    for own, order in enumerate(lists):
        place = {event(changed, own, action): number for number, action in enumerate(order)}
        for kind, stage, k in place:
            for needed in needs_of(changed, kind, stage, k):
                in_order &= needed not in place or place[needed] < place[kind, stage, k]
    try:
        graphlib.TopologicalSorter(graph_of(changed)).prepare()
        is_circle = False
    except graphlib.CycleError:
        is_circle = True
    if in_order and not is_circle:
        simulate(changed)
        return
    expected = "no ranks wait for each other for ever, got rank" if in_order else " before "
    with pytest.raises(ValueError, match=f"simulate: expected .*{expected}"):
        simulate(changed)


def needs_of(schedule: Schedule, kind: Kind, stage: int, k: int) -> list[Any]:
    """Returns what must come before an event, if it is on this rank."""
    back = [(backward, stage, k) for backward in BACKWARD]
    if kind is Kind.FORWARD:
        return [(Kind.SEND_ACTIVATION, stage - 1, k), (Kind.FORWARD, stage - 1, k)]
    if kind in BACKWARD:
        after = [(backward, stage + 1, k) for backward in BACKWARD]
        return [(Kind.FORWARD, stage, k), (Kind.SEND_GRADIENT, stage + 1, k), *(after if schedule.stages == 1 else [])]
    return {Kind.BACKWARD_WEIGHTS: back, Kind.SEND_ACTIVATION: [(Kind.FORWARD, stage, k)]}.get(kind, back)


def test_a_circle_is_told() -> None:
    # Rank 0 sends the activation 1 before it receives the gradient 0, and rank 1 the other way round.
    good = one_f_one_b(2, 2)
    one = list(good.actions[1])
    receive = Action(Kind.RECEIVE_ACTIVATION, 0, 1, 0)
    one.remove(receive)
    one.insert(one.index(Action(Kind.SEND_GRADIENT, 0, 0, 0)) + 1, receive)
    schedule = dataclasses.replace(good, actions=(good.actions[0], tuple(one)))
    text = (
        "rank 0 waits for rank 1 in its send_activation with rank 1 of microbatch 1, chunk 0; "
        "rank 1 waits for rank 0 in its send_gradient with rank 0 of microbatch 0, chunk 0. Take pycollective.par"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        simulate(schedule)


def test_computations_in_an_impossible_order_are_refused() -> None:
    passes = [Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)]
    with pytest.raises(ValueError, match=r"with_messages: expected computations that come after what .* ranks 0, 1\."):
        with_messages("mine", [passes[::-1], passes])
    with pytest.raises(ValueError, match="simulate: expected the actions of 2 ranks, got those of 1"):
        simulate(dataclasses.replace(gpipe(2, 1), actions=gpipe(2, 1).actions[:1]))


@pytest.mark.parametrize(
    ("maker", "numbers", "name"),
    [
        (gpipe, (0, 1), "stages"),
        (one_f_one_b, (1, 0), "microbatches"),
        (zero_bubble, (1, -1), "microbatches"),
        (interleaved, (2, 2, 0), "chunks"),
    ],
)
def test_numbers_from_1_on(maker: Any, numbers: tuple[int, ...], name: str) -> None:
    text = f"parallel.{maker.__name__}: expected {name} of at least 1, got {min(numbers)}"
    with pytest.raises(ValueError, match=re.escape(text)):
        maker(*numbers)


def test_times_decide_when_a_rank_receives() -> None:
    slow = {"forward": 1.2, "backward_inputs": 1.0, "backward_weights": 0.7}
    computations = [[a for a in order if a.peer is None] for order in interleaved(4, 8, 2).actions]
    planned = simulate(with_messages("planned", computations, **slow), **slow)
    assert planned.bubble < simulate(interleaved(4, 8, 2), **slow).bubble


def test_a_picture_has_a_bar_for_each_computation(tmp_path: Path) -> None:
    simulation: Simulation = simulate(zero_bubble(3, 4))
    (axes,) = draw(simulation).axes
    patches: list[Any] = list(axes.patches)
    bars = sorted((bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()) for bar in patches)
    computations = [(r, s) for r, spans in enumerate(simulation.spans) for s in spans if s.action.peer is None]
    assert bars == sorted((r, s.start, s.end - s.start) for r, s in computations)
    assert [text.get_text() for text in axes.texts] == [str(s.action.microbatch) for _, s in computations]
    assert axes.get_title() == "zero_bubble: p = 3, m = 4, v = 1; bubble 14.3 %"
    picture(simulation, tmp_path / "planned.svg")
    assert "<svg" in (tmp_path / "planned.svg").read_text()
