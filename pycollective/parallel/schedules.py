"""Schedules of pipelines: for each rank a list of its computations and messages, in their order.

A network is cut into consecutive stages, and a batch into m microbatches. Each of p ranks has v stages, its chunks:
rank r has the stages r, p + r, 2 p + r, ...

The *bubble* is the share of the ranks' time in which they wait for each other. If a backward pass takes twice as long
as a forward pass, half of it for the gradients of the weights, and if messages take no time, the bubble is

    gpipe, one_f_one_b    (p - 1) / (m + p - 1)      for all times of passes that are the same on all stages
    interleaved           (p - 1) / (v m + p - 1)    if p divides m
    zero_bubble           (p - 1) / (3 m + p - 1)    if m >= p
    forward_only          (p - 1) / (v m + p - 1)    if p divides m

Sources: GPipe, arXiv:1811.06965, section 2.3. 1F1B, PipeDream-Flush: arXiv:2006.09503, section 3.2. Interleaved:
arXiv:2104.04473, section 2.2. Zero bubble, ZB-H1: arXiv:2401.10241, section 2.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, NoReturn

from pycollective.errors import message, name_ranks


class Kind(enum.StrEnum):
    """The kind of an action."""

    FORWARD = "forward"
    BACKWARD = "backward"  # of inputs and weights at once
    BACKWARD_INPUTS = "backward_inputs"
    BACKWARD_WEIGHTS = "backward_weights"
    SEND_ACTIVATION = "send_activation"
    RECEIVE_ACTIVATION = "receive_activation"
    SEND_GRADIENT = "send_gradient"
    RECEIVE_GRADIENT = "receive_gradient"


class Action(NamedTuple):
    """One step of a rank.

    Attributes:
        kind: the kind of the computation or message.
        chunk: the number of the rank's stage that computes, whose result is sent, or whose operand is received.
        microbatch: the number of the microbatch.
        peer: the rank at the other end of a message; None for a computation. Default None.
    """

    kind: Kind
    chunk: int
    microbatch: int
    peer: int | None = None

    def __str__(self) -> str:
        peer = "" if self.peer is None else f" with rank {self.peer}"
        return f"{self.kind}{peer} of microbatch {self.microbatch}, chunk {self.chunk}"


@dataclass(frozen=True)
class Schedule:
    """The actions of all ranks.

    Attributes:
        name: a name for messages and pictures.
        stages: p, the number of ranks.
        microbatches: m, the number of microbatches.
        chunks: v, the number of stages of each rank.
        actions: for each rank its actions, in program order.
        gradients: whether there are backward passes. Default True. Without them the schedule is for
            :func:`forward_pipeline`.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    actions: tuple[tuple[Action, ...], ...]
    gradients: bool = True


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Makes the schedule of GPipe: all forward passes, then all backward passes.

    The bubble is ``(p - 1) / (m + p - 1)``. A rank keeps the activations of all m microbatches.

    Args:
        stages: the number of ranks, p, from 1.
        microbatches: the number of microbatches, m, from 1.

    Returns:
        The schedule, with one stage on each rank.

    Raises:
        ValueError: a number is below 1.

    Source:
        Huang et al., "GPipe", arXiv:1811.06965, section 2.3.

    Example:
        >>> from pycollective.parallel import schedule_simulator
        >>> schedule_simulator.simulate(gpipe(4, 8)).peaks
        (8, 8, 8, 8)
    """
    _check_numbers("gpipe", stages=stages, microbatches=microbatches)
    passes = [Action(kind, 0, k) for kind in (Kind.FORWARD, Kind.BACKWARD) for k in range(microbatches)]
    return with_messages("gpipe", [passes] * stages)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Makes the 1F1B schedule of PipeDream-Flush: after a warmup, forward and backward passes alternate.

    The bubble is ``(p - 1) / (m + p - 1)``, that of :func:`gpipe`. Rank r keeps the activations of at most p - r
    microbatches.

    Args:
        stages: the number of ranks, p, from 1.
        microbatches: the number of microbatches, m, from 1.

    Returns:
        The schedule, with one stage on each rank.

    Raises:
        ValueError: a number is below 1.

    Source:
        Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", arXiv:2006.09503, section 3.2.

    Example:
        >>> from pycollective.parallel import schedule_simulator
        >>> simulation = schedule_simulator.simulate(one_f_one_b(4, 8))
        >>> simulation.peaks, simulation.bubble == 3 / (8 + 3)
        ((4, 3, 2, 1), True)
    """
    _check_numbers("one_f_one_b", stages=stages, microbatches=microbatches)
    forward = [Action(Kind.FORWARD, 0, k) for k in range(microbatches)]
    backward = [Action(Kind.BACKWARD, 0, k) for k in range(microbatches)]
    return with_messages("one_f_one_b", [_alternated(forward, backward, stages - 1 - r) for r in range(stages)])


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Makes the interleaved schedule of Megatron-LM: 1F1B with v stages on each rank.

    If p divides m, the bubble is ``(p - 1) / (v m + p - 1)``, about v times smaller than that of :func:`one_f_one_b`,
    with v times as many messages. Rank 0 keeps p v + p - 1 activations, each of one chunk and microbatch. 1F1B keeps p
    activations of stages that are v times as large.

    Args:
        stages: the number of ranks, p, from 1.
        microbatches: the number of microbatches, m, from 1. The bubble is smallest if m is a multiple of p.
        chunks: the number of stages on each rank, v, from 1.

    Returns:
        The schedule, with v stages on each rank.

    Raises:
        ValueError: a number is below 1.

    Source:
        Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM",
        arXiv:2104.04473, section 2.2.

    Example:
        >>> from pycollective.parallel import schedule_simulator
        >>> schedule_simulator.simulate(interleaved(4, 8, 2)).bubble == 3 / (2 * 8 + 3)
        True
    """
    _check_numbers("interleaved", stages=stages, microbatches=microbatches, chunks=chunks)

    def of_rank(rank: int) -> list[Action]:
        warmup = 2 * (stages - 1 - rank) + (chunks - 1) * stages
        forward = _in_groups(Kind.FORWARD, stages, microbatches, range(chunks))
        backward = _in_groups(Kind.BACKWARD, stages, microbatches, range(chunks)[::-1])
        return [a for a in _alternated(forward, backward, warmup) if a.microbatch < microbatches]

    return with_messages("interleaved", [of_rank(rank) for rank in range(stages)])


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """Makes the schedule ZB-H1: 1F1B with delayed backward passes of weights, which fill the bubble.

    A backward pass has two parts. The previous rank waits for the gradients of the inputs; no rank waits for those of
    the weights. If the forward pass and both parts take the same time, the bubble is ``(p - 1) / (3 m + p - 1)``, about
    a third of that of :func:`one_f_one_b`. A rank keeps the activations of at most p microbatches, as many as rank 0
    keeps in 1F1B.

    Args:
        stages: the number of ranks, p, from 1.
        microbatches: the number of microbatches, m, from 1.

    Returns:
        The schedule, with one stage on each rank.

    Raises:
        ValueError: a number is below 1.

    Source:
        Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241, section 2, ZB-H1.

    Example:
        >>> from pycollective.parallel import schedule_simulator
        >>> simulation = schedule_simulator.simulate(zero_bubble(4, 8))
        >>> simulation.peaks, simulation.bubble == 3 / (3 * 8 + 3)
        ((4, 4, 4, 4), True)
    """
    _check_numbers("zero_bubble", stages=stages, microbatches=microbatches)

    def of_rank(rank: int) -> list[Action]:
        forward = [Action(Kind.FORWARD, 0, k) for k in range(microbatches)]
        backward = [Action(Kind.BACKWARD_INPUTS, 0, k) for k in range(microbatches)]
        actions: list[Action] = []
        for action in _alternated(forward, backward, stages - 1 - rank):
            actions.append(action)
            # In 1F1B rank r keeps p - r microbatches. So r more may be kept for their backward pass of weights.
            if action.kind is Kind.BACKWARD_INPUTS and action.microbatch >= rank:
                actions.append(Action(Kind.BACKWARD_WEIGHTS, 0, action.microbatch - rank))
        late = range(max(0, microbatches - rank), microbatches)
        return actions + [Action(Kind.BACKWARD_WEIGHTS, 0, k) for k in late]

    return with_messages("zero_bubble", [of_rank(rank) for rank in range(stages)])


def forward_only(stages: int, microbatches: int, chunks: int = 1) -> Schedule:
    """Makes a schedule without backward passes, for an evaluation by :func:`forward_pipeline`.

    If p divides m or there is one chunk, the bubble is ``(p - 1) / (v m + p - 1)``. A rank keeps no activations.

    Args:
        stages: the number of ranks, p, from 1.
        microbatches: the number of microbatches, m, from 1.
        chunks: the number of stages on each rank, v, from 1. Default 1.

    Returns:
        The schedule, with v stages on each rank.

    Raises:
        ValueError: a number is below 1.

    Example:
        >>> from pycollective.parallel import schedule_simulator
        >>> simulation = schedule_simulator.simulate(forward_only(4, 8))
        >>> simulation.peaks, simulation.bubble == 3 / (8 + 3)
        ((0, 0, 0, 0), True)
    """
    _check_numbers("forward_only", stages=stages, microbatches=microbatches, chunks=chunks)
    passes = [a for a in _in_groups(Kind.FORWARD, stages, microbatches, range(chunks)) if a.microbatch < microbatches]
    return with_messages("forward_only", [passes] * stages)


def _in_groups(kind: Kind, stages: int, microbatches: int, chunks: Sequence[int]) -> list[Action]:
    """Returns the passes of all chunks, in groups of p microbatches.

    If p does not divide m, the last group has microbatches from m on: the caller removes them, and so keeps the order
    of the others.
    """
    firsts = range(0, microbatches, stages)
    return [Action(kind, c, k) for first in firsts for c in chunks for k in range(first, first + stages)]


def _check_numbers(where: str, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(message(f"parallel.{where}", f"{name} of at least 1", number, "Give the number of them."))


def _alternated(forward: Sequence[Action], backward: Sequence[Action], warmup: int) -> list[Action]:
    """Returns ``warmup`` forward passes, then forward and backward passes in turn, then the other backward passes."""
    ahead = min(warmup, len(forward))
    turns = [action for pair in zip(forward[ahead:], backward, strict=False) for action in pair]
    return [*forward[:ahead], *turns, *backward[len(forward) - ahead :]]


def with_messages(
    name: str,
    computations: Sequence[Sequence[Action]],
    *,
    forward: float = 1.0,
    backward_inputs: float = 1.0,
    backward_weights: float = 1.0,
) -> Schedule:
    """Makes a schedule from the ranks' computations: it adds the messages.

    A rank sends a result right after the computation. It receives between two computations, as soon as the sender
    waits. The places of the messages come from a simulation of all ranks in the order of time. So all messages have one
    global order that contains the order of each rank, and the ranks cannot deadlock, even if each send waits for its
    receive. A result for another stage of the same rank needs no message.

    Args:
        name: a name for messages and pictures.
        computations: for each rank its computations, in their order. The number of ranks is that of the lists.
        forward: the time of a forward pass of one stage and microbatch, in any unit. Default 1, as the functions that
            make schedules use it. The times decide between which computations a rank receives.
        backward_inputs: the time of a backward pass of inputs, in the same unit. A whole backward pass takes
            ``backward_inputs + backward_weights``. Default 1.
        backward_weights: the time of a backward pass of weights, in the same unit. Default 1.

    Returns:
        The schedule.

    Raises:
        ValueError: no order of the messages is possible: a computation waits for a result that is computed after it.

    Example:
        >>> passes = [Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)]
        >>> [action.kind.value for action in with_messages("mine", [passes, passes]).actions[1]]
        ['receive_activation', 'forward', 'backward', 'send_gradient']
    """
    every = [action for order in computations for action in order]
    stages, chunks = len(computations), 1 + max(action.chunk for action in every)
    costs = costs_of(forward, backward_inputs, backward_weights)
    left = [list(order)[::-1] for order in computations]  # the next one is the last
    actions: list[list[Action]] = [[] for _ in left]
    received: list[set[Action]] = [set() for _ in left]  # what each rank has received
    ready: list[Transfer | None] = [None] * stages  # the message that each rank waits to send
    free = [0.0] * stages  # the time at which each rank ends its last action

    def missing_receive(rank: int) -> Action | None:
        """Returns the receive that is missing for the next computation of the rank; None if there is none."""
        need = receive_of(left[rank][-1], rank, stages, chunks) if left[rank] else None
        return None if need in received[rank] else need

    def next_events() -> Iterator[tuple[float, int, int]]:
        """Yields the actions that can be next: the time, 1 for a computation or 0 for a message, and the rank."""
        for rank, transfer in enumerate(ready):
            if transfer is not None:
                yield max(free[rank], free[transfer.peer]), 0, rank
            elif left[rank] and missing_receive(rank) is None:
                yield free[rank], 1, rank

    while any(left) or any(ready):
        if (first := min(next_events(), default=None)) is None:
            waiting = name_ranks([rank for rank in range(stages) if left[rank]])
            refuse("with_messages", "computations that come after what they need", f"others on {waiting}")
        time, _, rank = first
        if (transfer := ready[rank]) is not None:
            actions[rank].append(transfer.send)
            actions[transfer.peer].append(transfer.receive)
            received[transfer.peer].add(transfer.receive)
            free[rank] = free[transfer.peer] = time
            ready[rank] = None
            continue
        actions[rank].append(action := left[rank].pop())
        free[rank] = time + costs[action.kind]
        transfer = transfer_of(action, rank, stages, chunks)
        if transfer is not None and transfer.peer == rank:
            received[rank].add(transfer.receive)
        else:
            ready[rank] = transfer
    microbatches = 1 + max(action.microbatch for action in every)
    gradients = any(action.kind is not Kind.FORWARD for action in every)
    return Schedule(name, stages, microbatches, chunks, tuple(map(tuple, actions)), gradients)


def costs_of(forward: float, backward_inputs: float, backward_weights: float) -> dict[Kind, float]:
    """Returns the time of each kind of computation."""
    return {
        Kind.FORWARD: forward,
        Kind.BACKWARD: backward_inputs + backward_weights,
        Kind.BACKWARD_INPUTS: backward_inputs,
        Kind.BACKWARD_WEIGHTS: backward_weights,
    }


class Transfer(NamedTuple):
    """A result for another stage.

    Attributes:
        peer: the rank of that stage.
        send: the action that sends the result.
        receive: the action of ``peer`` that receives it.
    """

    peer: int
    send: Action
    receive: Action


def _direction(kind: Kind) -> int:
    """Returns the distance from a stage to the stage that takes the result of such a computation; 0 if none does."""
    return {Kind.FORWARD: 1, Kind.BACKWARD_WEIGHTS: 0}.get(kind, -1)


def _receive(kind: Kind, chunk: int, microbatch: int, peer: int) -> Action:
    """Returns the action that receives the operand of a computation of this kind."""
    how = Kind.RECEIVE_ACTIVATION if kind is Kind.FORWARD else Kind.RECEIVE_GRADIENT
    return Action(how, chunk, microbatch, peer)


def receive_of(action: Action, rank: int, stages: int, chunks: int) -> Action | None:
    """Returns the action that receives the operand of a computation; ``peer`` may be the rank itself.

    None: the computation needs no result of another stage.
    """
    step = _direction(action.kind)
    source = action.chunk * stages + rank - step
    if step == 0 or not 0 <= source < stages * chunks:
        return None
    return _receive(action.kind, action.chunk, action.microbatch, source % stages)


def transfer_of(action: Action, rank: int, stages: int, chunks: int) -> Transfer | None:
    """Returns the message with the result of a computation; ``peer`` may be the rank itself.

    None: no other stage needs the result.
    """
    step = _direction(action.kind)
    target = action.chunk * stages + rank + step
    if step == 0 or not 0 <= target < stages * chunks:
        return None
    chunk, peer = divmod(target, stages)
    how = Kind.SEND_ACTIVATION if action.kind is Kind.FORWARD else Kind.SEND_GRADIENT
    send = Action(how, action.chunk, action.microbatch, peer)
    return Transfer(peer, send, _receive(action.kind, chunk, action.microbatch, rank))


def refuse(where: str, expected: str, got: str) -> NoReturn:
    """Raises ValueError for an impossible schedule."""
    remedy = "Take pycollective.parallel.with_messages: it brings computations into an order that is possible."
    raise ValueError(message(f"parallel.{where}", expected, got, remedy))
