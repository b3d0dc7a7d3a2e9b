"""Schedules of pipelines: which rank computes and sends what, in which order. A schedule is data.

A network is cut into stages, one after another, and a batch into m microbatches. Each of p ranks has v stages, its
chunks: rank r has the stages r, p + r, 2 p + r, ... A schedule lists the actions of each rank.

Ranks wait for each other for a share of the time, the *bubble*. If a backward pass takes twice as long as a forward
pass, a half of that for the gradients of the weights, and messages take no time, it is

    gpipe, one_f_one_b    (p - 1) / (m + p - 1)      for all times of passes that are the same on all stages
    interleaved           (p - 1) / (v m + p - 1)    if p divides m
    zero_bubble           (p - 1) / (3 m + p - 1)    if m >= p

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
    """What an action does."""

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
        kind: what it does.
        chunk: which of the rank's stages computes, or makes what is sent, or takes what is received.
        microbatch: the number of the microbatch.
        peer: the rank at the other end of a message; None for a computation.
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
        name: its name.
        stages: p, the number of ranks.
        microbatches: m, the number of microbatches.
        chunks: v, the number of stages of each rank.
        actions: for each rank its actions, in their order.
    """

    name: str
    stages: int
    microbatches: int
    chunks: int
    actions: tuple[tuple[Action, ...], ...]


def gpipe(stages: int, microbatches: int) -> Schedule:
    """Makes the schedule of GPipe: all forward passes, then all backward passes.

    A rank keeps the activations of all m microbatches.

    Args:
        stages: p, the number of ranks, from 1.
        microbatches: m, from 1.

    Returns:
        The schedule, with one stage on each rank.

    Raises:
        ValueError: a number is below 1.

    Source: arXiv:1811.06965, section 2.3.

    Example:
        >>> from pycollective.parallel import schedule_simulator
        >>> schedule_simulator.simulate(gpipe(4, 8)).peaks
        (8, 8, 8, 8)
    """
    _check_numbers("gpipe", stages=stages, microbatches=microbatches)
    passes = [Action(kind, 0, k) for kind in (Kind.FORWARD, Kind.BACKWARD) for k in range(microbatches)]
    return with_messages("gpipe", [passes] * stages)


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    """Makes the schedule of PipeDream-Flush: after the first forward passes, one forward and one backward by turns.

    Rank r keeps the activations of at most p - r microbatches. The bubble is that of :func:`gpipe`.

    Args:
        stages: p, the number of ranks, from 1.
        microbatches: m, from 1.

    Returns:
        The schedule, with one stage on each rank.

    Raises:
        ValueError: a number is below 1.

    Source: arXiv:2006.09503, section 3.2.

    Example:
        >>> from pycollective.parallel import schedule_simulator
        >>> simulation = schedule_simulator.simulate(one_f_one_b(4, 8))
        >>> simulation.peaks, simulation.bubble == 3 / (8 + 3)
        ((4, 3, 2, 1), True)
    """
    _check_numbers("one_f_one_b", stages=stages, microbatches=microbatches)
    forward = [Action(Kind.FORWARD, 0, k) for k in range(microbatches)]
    backward = [Action(Kind.BACKWARD, 0, k) for k in range(microbatches)]
    return with_messages("one_f_one_b", [_by_turns(forward, backward, stages - 1 - r) for r in range(stages)])


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """Makes the interleaved schedule of Megatron-LM: 1F1B with v stages on each rank.

    The bubble is about v times smaller than that of :func:`one_f_one_b`, and v times as many messages travel. Rank 0
    keeps the activations of p v + p - 1 of its chunks' microbatches, where 1F1B keeps p of stages that are v times as
    large.

    Args:
        stages: p, the number of ranks, from 1.
        microbatches: m, from 1. The bubble is smallest if p divides it.
        chunks: v, the number of stages on each rank, from 1.

    Returns:
        The schedule.

    Raises:
        ValueError: a number is below 1.

    Source: arXiv:2104.04473, section 2.2.

    Example:
        >>> from pycollective.parallel import schedule_simulator
        >>> schedule_simulator.simulate(interleaved(4, 8, 2)).bubble == 3 / (2 * 8 + 3)
        True
    """
    _check_numbers("interleaved", stages=stages, microbatches=microbatches, chunks=chunks)

    def passes(kind: Kind, order: Sequence[int]) -> list[Action]:
        # A group has p microbatches. The last one may lack some: what others wait for stays in their order.
        firsts = range(0, microbatches, stages)
        return [Action(kind, c, k) for first in firsts for c in order for k in range(first, first + stages)]

    def of_rank(rank: int) -> list[Action]:
        warmup = 2 * (stages - 1 - rank) + (chunks - 1) * stages
        forward = passes(Kind.FORWARD, range(chunks))
        backward = passes(Kind.BACKWARD, range(chunks)[::-1])
        return [a for a in _by_turns(forward, backward, warmup) if a.microbatch < microbatches]

    return with_messages("interleaved", [of_rank(rank) for rank in range(stages)])


def zero_bubble(stages: int, microbatches: int) -> Schedule:
    """Makes ZB-H1: 1F1B whose backward passes of weights wait until a rank has nothing else to do.

    A backward pass has two parts. The rank before waits for the gradients of the inputs. Nobody waits for those of the
    weights. The bubble is a third of that of :func:`one_f_one_b` if all three passes take the same time. A rank keeps
    at most p microbatches, as many as rank 0 does in 1F1B.

    Args:
        stages: p, the number of ranks, from 1.
        microbatches: m, from 1.

    Returns:
        The schedule, with one stage on each rank.

    Raises:
        ValueError: a number is below 1.

    Source: arXiv:2401.10241, section 2, ZB-H1.

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
        for action in _by_turns(forward, backward, stages - 1 - rank):
            actions.append(action)
            # Rank r of 1F1B keeps p - r microbatches. So r more may wait for their backward pass of weights.
            if action.kind is Kind.BACKWARD_INPUTS and action.microbatch >= rank:
                actions.append(Action(Kind.BACKWARD_WEIGHTS, 0, action.microbatch - rank))
        late = range(max(0, microbatches - rank), microbatches)
        return actions + [Action(Kind.BACKWARD_WEIGHTS, 0, k) for k in late]

    return with_messages("zero_bubble", [of_rank(rank) for rank in range(stages)])


def _check_numbers(where: str, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(message(f"parallel.{where}", f"{name} of at least 1", number, "Give the number of them."))


def _by_turns(forward: Sequence[Action], backward: Sequence[Action], warmup: int) -> list[Action]:
    """Returns ``warmup`` forward passes, then a forward and a backward one by turns, then the other backward ones."""
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
    """Makes a schedule of what each rank computes: it adds what they send and receive.

    A rank sends what it has made at once. It receives between two computations, as soon as another rank waits to send.
    That is found by going through all ranks in the order of time. So all messages have one order, and each rank's
    actions are a part of it: no ranks can wait for each other in a circle, even if a rank that sends waits for the one
    that receives. A stage takes what another stage of the same rank has made without a message.

    Args:
        name: a name for messages and pictures.
        computations: for each rank its computations, in their order. There are as many ranks as lists.
        forward: the time of a forward pass of one stage and microbatch, in any unit. The times decide when a rank
            receives. The makers of schedules take 1 for each.
        backward_inputs: the time of a backward pass of inputs. A whole backward pass takes both times.
        backward_weights: the time of a backward pass of weights.

    Returns:
        The schedule.

    Raises:
        ValueError: no order of the messages is possible.

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
    there: list[set[Action]] = [set() for _ in left]  # what each rank has received
    ready: list[Letter | None] = [None] * stages  # what each rank sends now
    free = [0.0] * stages  # when each rank has done what it began

    def needs(rank: int) -> Action | None:
        """Returns what the rank must receive for its next computation."""
        need = need_of(left[rank][-1], rank, stages, chunks) if left[rank] else None
        return None if need in there[rank] else need

    def possible() -> Iterator[tuple[float, int, int]]:
        """Yields what can happen next: when, whether it is a computation, and to which rank."""
        for rank, letter in enumerate(ready):
            if letter is not None:
                yield max(free[rank], free[letter.peer]), 0, rank
            elif left[rank] and needs(rank) is None:
                yield free[rank], 1, rank

    while any(left) or any(ready):
        if (first := min(possible(), default=None)) is None:
            waiting = name_ranks([rank for rank in range(stages) if left[rank]])
            refuse("with_messages", "computations that come after what they need", f"others on {waiting}")
        time, _, rank = first
        if (letter := ready[rank]) is not None:
            actions[rank].append(letter.send)
            actions[letter.peer].append(letter.receive)
            there[letter.peer].add(letter.receive)
            free[rank] = free[letter.peer] = time
            ready[rank] = None
            continue
        actions[rank].append(action := left[rank].pop())
        free[rank] = time + costs[action.kind]
        letter = letter_of(action, rank, stages, chunks)
        if letter is not None and letter.peer == rank:
            there[rank].add(letter.receive)
        else:
            ready[rank] = letter
    microbatches = 1 + max(action.microbatch for action in every)
    return Schedule(name, stages, microbatches, chunks, tuple(map(tuple, actions)))


def costs_of(forward: float, backward_inputs: float, backward_weights: float) -> dict[Kind, float]:
    """Returns the time of each kind of computation."""
    return {
        Kind.FORWARD: forward,
        Kind.BACKWARD: backward_inputs + backward_weights,
        Kind.BACKWARD_INPUTS: backward_inputs,
        Kind.BACKWARD_WEIGHTS: backward_weights,
    }


class Letter(NamedTuple):
    """A result that another stage needs: the rank of that stage, and the actions of both ranks."""

    peer: int
    send: Action
    receive: Action


def _direction(kind: Kind) -> int:
    """Returns how far from a stage the one is that takes the results of such a computation; 0 if none does."""
    return {Kind.FORWARD: 1, Kind.BACKWARD_WEIGHTS: 0}.get(kind, -1)


def _receive(kind: Kind, chunk: int, microbatch: int, peer: int) -> Action:
    """Returns how a computation of this kind gets what it needs."""
    how = Kind.RECEIVE_ACTIVATION if kind is Kind.FORWARD else Kind.RECEIVE_GRADIENT
    return Action(how, chunk, microbatch, peer)


def need_of(action: Action, rank: int, stages: int, chunks: int) -> Action | None:
    """Returns what must be received before a computation, perhaps from another stage of the same rank."""
    step = _direction(action.kind)
    source = action.chunk * stages + rank - step
    if step == 0 or not 0 <= source < stages * chunks:
        return None
    return _receive(action.kind, action.chunk, action.microbatch, source % stages)


def letter_of(action: Action, rank: int, stages: int, chunks: int) -> Letter | None:
    """Returns what a computation makes for another stage, perhaps of the same rank."""
    step = _direction(action.kind)
    target = action.chunk * stages + rank + step
    if step == 0 or not 0 <= target < stages * chunks:
        return None
    chunk, peer = divmod(target, stages)
    how = Kind.SEND_ACTIVATION if action.kind is Kind.FORWARD else Kind.SEND_GRADIENT
    send = Action(how, action.chunk, action.microbatch, peer)
    return Letter(peer, send, _receive(action.kind, chunk, action.microbatch, rank))


def refuse(where: str, expected: str, got: str) -> NoReturn:
    """Raises ValueError for a schedule that is not possible."""
    remedy = "Take pycollective.parallel.with_messages: it brings computations into an order that is possible."
    raise ValueError(message(f"parallel.{where}", expected, got, remedy))
