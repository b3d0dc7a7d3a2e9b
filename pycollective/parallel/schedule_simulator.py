"""Simulates schedules of pipelines: deadlocks, the bubble, and the activations that ranks keep.

Rank r computes for the time C_r, and all p ranks end at the time T. The bubble is the share of the ranks' time in which
they do not compute:

    (p T - (C_0 + C_1 + ...)) / (p T)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import NamedTuple

from pycollective.parallel.schedules import Action, Kind, Schedule, costs_of, receive_of, refuse, transfer_of


class Span(NamedTuple):
    """The times of an action.

    Attributes:
        action: the action.
        start: the time of its start, in the unit of the simulation, or in seconds for :func:`measured`.
        end: the time of its end.
    """

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The run of a schedule, simulated or measured.

    Attributes:
        schedule: the schedule.
        spans: for each rank the times of its actions, in program order.
        total: the time from the start of the first action to the end of the last one.
        bubble: the share of the ranks' time in which they do not compute.
        peaks: for each rank the largest number of activations that it keeps at one time: one for each chunk and
            microbatch, from its forward pass to the end of its backward passes. Without backward passes it keeps none.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    total: float
    bubble: float
    peaks: tuple[int, ...]

    @classmethod
    def of(cls, schedule: Schedule, spans: Sequence[Sequence[Span]]) -> Simulation:
        """Makes a simulation from the times of actions."""
        every = [span for own in spans for span in own]
        total = max(span.end for span in every) - min(span.start for span in every)
        computing = sum(span.end - span.start for span in every if span.action.peer is None)
        of_all = schedule.stages * total
        bubble = (of_all - computing) / of_all if total else 0.0
        peaks = tuple(_peak_activations(actions) if schedule.gradients else 0 for actions in schedule.actions)
        return cls(schedule, tuple(map(tuple, spans)), total, bubble, peaks)


def _peak_activations(actions: Sequence[Action]) -> int:
    steps = [(a.kind is Kind.FORWARD) - (a.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHTS)) for a in actions]
    return max(accumulate(steps))


def simulate(
    schedule: Schedule,
    *,
    forward: float = 1.0,
    backward_inputs: float = 1.0,
    backward_weights: float = 1.0,
    send: float = 0.0,
) -> Simulation:
    """Simulates a schedule: the time of each action, if each send waits for its receive.

    Synchronous sends are the worst case, since MPI may buffer small messages. A schedule that ends in the simulation
    cannot deadlock.

    Args:
        schedule: the schedule.
        forward: the time of a forward pass of one stage and microbatch, in any unit. Default 1.
        backward_inputs: the time of a backward pass of inputs, in the same unit. A whole backward pass takes
            ``backward_inputs + backward_weights``. Default 1.
        backward_weights: the time of a backward pass of weights, in the same unit. Default 1.
        send: the time of a message, on both ranks, in the same unit. Default 0.

    Returns:
        The times, the bubble, and the numbers of activations that the ranks keep.

    Raises:
        ValueError: the ranks deadlock; an action is missing, or comes twice, or comes before an action that it needs.

    Example:
        >>> from pycollective.parallel.schedules import one_f_one_b
        >>> simulation = simulate(one_f_one_b(2, 3), forward=2, backward_inputs=2, backward_weights=2)
        >>> simulation.total, simulation.bubble
        (24.0, 0.25)
    """
    _check_actions(schedule)
    costs = costs_of(forward, backward_inputs, backward_weights)
    left = [list(order)[::-1] for order in schedule.actions]
    spans: list[list[Span]] = [[] for _ in left]
    free = [0.0] * schedule.stages

    def run(rank: int, start: float, duration: float) -> None:
        free[rank] = start + duration
        spans[rank].append(Span(left[rank].pop(), start, free[rank]))

    running = list(range(schedule.stages))
    while running:
        rank = running.pop()
        while left[rank] and (action := left[rank][-1]).peer is None:
            run(rank, free[rank], costs[action.kind])
        peer = left[rank][-1].peer if left[rank] else None
        if peer is not None and left[peer] and left[peer][-1] == _action_of_peer(left[rank][-1], rank, schedule):
            start = max(free[rank], free[peer])
            run(rank, start, send)
            run(peer, start, send)
            running += [rank, peer]
    if any(left):
        next_of = {rank: order[-1] for rank, order in enumerate(left) if order}
        refuse("simulate", "an order in which no ranks wait for each other for ever", _describe_cycle(next_of))
    return Simulation.of(schedule, spans)


def _action_of_peer(action: Action, rank: int, schedule: Schedule) -> Action:
    """Returns the peer's action at the other end of this rank's message."""
    is_activation = action.kind in (Kind.SEND_ACTIVATION, Kind.RECEIVE_ACTIVATION)
    is_send = action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
    stage = action.chunk * schedule.stages + rank + (1 if is_activation is is_send else -1)
    what = "activation" if is_activation else "gradient"
    kind = Kind(f"receive_{what}" if is_send else f"send_{what}")
    return Action(kind, stage // schedule.stages, action.microbatch, rank)


def _describe_cycle(next_of: Mapping[int, Action]) -> str:
    """Describes a cycle of ranks that wait for each other, with the action of each."""
    cycle = [min(next_of)]
    while (peer := next_of[cycle[-1]].peer) not in cycle:
        cycle.append(peer)  # type: ignore[arg-type]  # only messages wait
    cycle = cycle[cycle.index(peer) :]
    return "; ".join(f"rank {rank} waits for rank {next_of[rank].peer} in its {next_of[rank]}" for rank in cycle)


def _check_actions(schedule: Schedule) -> None:
    """Raises ValueError if an action of a rank is missing, comes twice, or comes before an action that it needs."""
    stages, chunks = schedule.stages, schedule.chunks
    if len(schedule.actions) != stages:
        refuse("simulate", f"the actions of {stages} ranks", f"those of {len(schedule.actions)}")
    for rank, actions in enumerate(schedule.actions):
        split = {action[1:3] for action in actions if action.kind is Kind.BACKWARD_INPUTS}
        earlier: dict[Action, list[Action]] = {}  # for each action the actions that must come before it
        for place in product(range(chunks), range(schedule.microbatches)):
            forward = Action(Kind.FORWARD, *place)
            passes = [forward]
            earlier[forward] = []
            if schedule.gradients:
                backward = Action(Kind.BACKWARD_INPUTS if place in split else Kind.BACKWARD, *place)
                passes.append(backward)
                earlier[backward] = [forward]
                if place in split:
                    earlier[Action(Kind.BACKWARD_WEIGHTS, *place)] = [backward]
            for action in passes:
                if (need := receive_of(action, rank, stages, chunks)) is not None:
                    earlier[action].append(need)
                    earlier |= {need: []} if need.peer != rank else {}
                if (transfer := transfer_of(action, rank, stages, chunks)) is not None and transfer.peer != rank:
                    earlier[transfer.send] = [action]
        wrong = Counter(actions)
        wrong.subtract(list(earlier))
        if others := [action for action, times in wrong.items() if times != 0]:
            times = wrong[others[0]] + (others[0] in earlier)
            expected = f"{int(others[0] in earlier)} of {others[0]} on rank {rank}"
            refuse("simulate", expected, f"{times}")
        done: set[Action] = set()
        for action in actions:
            if late := [other for other in earlier[action] if other not in done]:
                refuse("simulate", f"{late[0]} before {action} on rank {rank}", "it after that, or never")
            done.add(action)
            transfer = transfer_of(action, rank, stages, chunks) if action.peer is None else None
            if transfer is not None and transfer.peer == rank:
                done.add(transfer.receive)
