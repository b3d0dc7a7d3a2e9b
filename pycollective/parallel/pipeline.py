"""Runs a pipeline: the value and the gradients of a network whose stages are on the ranks of a communicator.

Each rank compiles one program with the actions of its own stages, in the order of a schedule:

    value = 1/m sum_k loss_k      on all ranks
    grads = d value / d params    of this rank's stages

The messages keep their order by themselves. The computations between them would not: XLA runs what is ready, all
forward passes first, say, and keeps all their activations. So between two computations stands a loop that never runs,
which XLA does not know. It carries the results of the one and the operands of the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from pycollective.collectives import mpi_collectives as mpi
from pycollective.errors import message
from pycollective.parallel.axes import AxisName, axis_size, name_of, names_of, vary
from pycollective.parallel.schedule_simulator import Simulation, Span, simulate
from pycollective.parallel.schedules import Action, Kind, Schedule, letter_of, need_of
from pycollective.parallel.stages import Chunk, Place, Stage, is_inexact, with_gradients
from pycollective.ranks.communicator import Communicator
from pycollective.transport.message_constants import PROC_NULL

Array = Any
Tree = Any
Record = list[tuple[Action, float]]
"""When the computations of a rank begin and end, by turns: the action and the time in seconds since 1970."""


def pipeline(
    stage: Stage | Sequence[Stage],
    schedule: Schedule,
    between: Tree,
    comm: Communicator,
    *,
    varying: AxisName = (),
    record: Record | None = None,
) -> Callable[[Tree, Tree], tuple[Array, Tree]]:
    """Makes the function that gives the value and the gradients of this rank's stages, as :func:`jax.value_and_grad`.

    Args:
        stage: this rank's stage: ``stage(params, x, microbatch)``. ``x`` is what the stage before gave, or None on the
            first stage. The result goes to the next stage: an array or a tree of arrays. The last stage gives the
            loss, a number. Stages may differ in shapes and code. With v chunks: a sequence of v stages; the rank r of
            p has the stages r, p + r, ...
        schedule: a schedule for as many ranks as ``comm`` has, the same on all of them.
        between: a tree of :class:`jax.ShapeDtypeStruct`: what passes from each stage to the next. If it differs: a
            list of such trees, one for each stage but the last, as :func:`activation_shapes` gives them.
        comm: the ranks of the pipeline.
        varying: in ``shard_map(check_vma=True)`` the axes along which what passes varies, in general those of the data.
        record: a list that gets each computation and the time in seconds since 1970 when it begins, and again when it
            ends; None, the default, costs nothing. See :func:`measured`. For programs on one device of each rank.

    Returns:
        A function of this rank's parameters (with v chunks a sequence of v trees) and of a tree of arrays with a
        leading axis of length m, the microbatches. A stage gets one microbatch without that axis. All ranks may pass
        the same arrays, or each those that its stages read. It returns

        - the mean of the losses of the microbatches, on all ranks: a scalar of JAX's default floating-point dtype. By
          JAX's types it varies along ``varying``;
        - its gradients with respect to the parameters, in their shapes and dtypes. They are added up in that dtype.

        Call it on all ranks, inside :func:`pycollective.jit`, or :func:`pycollective.shard_map` over other axes.

    Raises:
        ValueError: the schedule is for another number of ranks, or would make them wait for ever; the numbers of
            stages, parameters or microbatches are not those of the schedule; a stage gives something else than
            ``between`` says; the loss is no number. What this rank's stage gives is checked on this rank alone: take
            ``between`` from :func:`activation_shapes`, which raises on all ranks.
        NameError: an axis of ``varying`` is not bound.

    Differentiation: none. Over other axes derivatives are those of :func:`jax.grad` at that place: with pmap's meaning
    of the sum of all devices' losses, which ``lax.pmean(grads, "data")`` makes a mean. Order: that of the schedule.

    Example:
        >>> import jax, jax.numpy as jnp, pycollective as pc
        >>> from pycollective.parallel.schedules import one_f_one_b
        >>> comm = pc.world()
        >>> def stage(w, x, microbatch):
        ...     y = w * (microbatch["x"] if comm.rank == 0 else x)
        ...     return jnp.mean((y - microbatch["y"]) ** 2) if comm.rank == comm.size - 1 else y
        >>> step = pipeline(stage, one_f_one_b(comm.size, 4), jax.ShapeDtypeStruct((8,), jnp.float32), comm)
        >>> value, grads = pc.jit(step)(jnp.float32(1.0), {"x": jnp.ones((4, 8)), "y": jnp.zeros((4, 8))})
        >>> float(value), float(grads)
        (1.0, 2.0)
    """
    functions = (stage,) if callable(stage) else tuple(stage)
    _check(comm.size == schedule.stages, f"a schedule for {comm.size} ranks", f"one for {schedule.stages}")
    expected = f"{schedule.chunks} stages on each rank, as {schedule.name} has"
    _check(len(functions) == schedule.chunks, expected, len(functions))
    boundaries = comm.size * schedule.chunks - 1
    shapes = list(between) if isinstance(between, list) else [between] * boundaries
    _check(len(shapes) == boundaries, f"what passes after each of {boundaries} stages", f"a list of {len(shapes)}")
    simulate(schedule)

    def value_and_grad(params: Tree, microbatches: Tree) -> tuple[Array, Tree]:
        if names_of(varying):
            axis_size("pipeline", varying)  # raises if it is not bound
        microbatches = jax.tree.map(jnp.asarray, microbatches)
        for path, x in jax.tree_util.tree_leaves_with_path(microbatches):
            _check(
                x.shape[:1] == (schedule.microbatches,),
                f"{schedule.microbatches} microbatches along the first axis of each array",
                f"the shape {x.shape} at {name_of(path)}",
            )
        of_chunks = [params] if callable(stage) else list(params)
        _check(len(of_chunks) == len(functions), f"{len(functions)} trees of parameters", len(of_chunks))
        for path, x in jax.tree_util.tree_leaves_with_path(params):
            dtype = jnp.asarray(x).dtype
            _check(is_inexact(dtype), "parameters with gradients", f"{dtype} at {name_of(path)}")
        chunks = [
            Chunk(function, own, Place(number * comm.size + comm.rank, shapes, varying))
            for number, (function, own) in enumerate(zip(functions, of_chunks, strict=True))
        ]
        value = _Run(schedule, comm, chunks, microbatches, record).run()
        grads = [x for chunk in chunks for x in chunk.grads or ()]
        return value, jax.tree.unflatten(jax.tree.structure(params), grads)

    return value_and_grad


def measured(schedule: Schedule, record: Record, comm: Communicator) -> Simulation:
    """Collects from all ranks when their computations ran. All ranks must make this call, outside traces.

    The times are those of the hosts' clocks, so the clocks of several hosts must agree.

    Args:
        schedule: the schedule that ran.
        record: what :func:`pipeline` has recorded on this rank. The last run counts, if there are more. Wait for the
            results of the run first.
        comm: the ranks of the pipeline.

    Returns:
        The spans of the computations in seconds, from the first one on, and the bubble, on all ranks. A rank that waits
        for another one, sends or receives does not compute.

    Raises:
        ValueError: on all ranks, if the record of a rank has not the computations of its schedule.

    Example:
        >>> import jax, jax.numpy as jnp, pycollective as pc
        >>> from pycollective.parallel.schedules import one_f_one_b
        >>> comm, record = pc.world(), []
        >>> def stage(w, x, microbatch):
        ...     y = w * microbatch
        ...     return y.sum() if comm.rank == comm.size - 1 else y
        >>> schedule = one_f_one_b(comm.size, 2)
        >>> step = pipeline(stage, schedule, jax.ShapeDtypeStruct((8,), jnp.float32), comm, record=record)
        >>> _ = jax.block_until_ready(pc.jit(step)(jnp.float32(1.0), jnp.ones((2, 8))))
        >>> simulation = measured(schedule, record, comm)
        >>> len(simulation.spans[0]), 0 <= simulation.bubble < 1
        (4, True)
    """
    computations = [[action for action in order if action.peer is None] for order in schedule.actions]
    records = comm.mpi.allgather(record[-2 * len(computations[comm.rank]) :])
    for rank, (own, wanted) in enumerate(zip(records, computations, strict=True)):
        if [action for action, _ in own] != [action for action in wanted for _ in range(2)]:
            expected = f"a record of the {len(wanted)} computations of rank {rank} in {schedule.name}"
            remedy = "Give pipeline the list as record=, and wait for its results before this call."
            raise ValueError(message("parallel.measured", expected, f"{len(own) / 2:g}, or others", remedy))
    begin = min(own[0][1] for own in records)
    spans = [
        [
            Span(action, start - begin, end - begin)
            for (action, start), (_, end) in zip(own[::2], own[1::2], strict=True)
        ]
        for own in records
    ]
    return Simulation.of(schedule, spans)


def _check(is_right: bool, expected: str, got: Any) -> None:
    if not is_right:
        remedy = "See the arguments of pycollective.parallel.pipeline."
        raise ValueError(message("parallel.pipeline", expected, got, remedy))


class _Run:
    """Goes through the actions of this rank, while JAX traces.

    ``_zero`` is 0, which XLA does not know. It goes from each action to the next one, as a token does.
    """

    def __init__(
        self, schedule: Schedule, comm: Communicator, chunks: list[Chunk], microbatches: Tree, record: Record | None
    ) -> None:
        self._schedule, self._comm, self._chunks = schedule, comm, chunks
        self._microbatches, self._record = microbatches, record
        self._zero = mpi.sendrecv(jnp.zeros((), jnp.int32), comm, source=PROC_NULL, dest=PROC_NULL)
        self._value = jnp.zeros(())
        self._there: dict[Action, Tree] = {}  # what has arrived, by the action that receives it
        self._made: dict[Action, Tree] = {}  # what is to be sent, by the action that sends it
        self._kept: dict[tuple[int, ...], list[Array]] = {}  # for the backward passes, by chunk and microbatch

    def run(self) -> Array:
        """Returns the value, the same on all ranks. The chunks have the gradients then."""
        for action in self._schedule.actions[self._comm.rank]:
            if action.peer is None:
                self._compute(action)
            elif action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
                mpi.send(self._made.pop(action), self._comm, dest=action.peer)
            else:
                self._there[action] = self._receive(action, action.peer)
        value = vary(self._value, self._chunks[0].place.axes)
        return mpi.broadcast(value, self._comm, root=self._comm.size - 1)

    def _receive(self, action: Action, source: int) -> Tree:
        place = self._chunks[action.chunk].place
        like = place.takes if action.kind is Kind.RECEIVE_ACTIVATION else with_gradients(place.gives)
        # Not recv: that has no operand, so XLA could let it wait in the way of the computations before it.
        operands = jax.tree.map(lambda _: self._zero, like)
        got = mpi.sendrecv(operands, self._comm, source=source, dest=PROC_NULL, like=like)
        return jax.tree.map(lambda x: vary(x, place.axes), got)

    def _compute(self, action: Action) -> None:
        chunk, place = self._chunks[action.chunk], action[1:3]
        of_rank = self._comm.rank, self._schedule.stages, self._schedule.chunks
        need, letter = need_of(action, *of_rank), letter_of(action, *of_rank)
        taken = None if need is None else self._there.pop(need)
        if chunk.place.is_last and action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUTS):
            taken = chunk.cotangent_of_loss(1 / self._schedule.microbatches)
        kept, taken = self._tie(action, (self._kept.pop(place, []), taken))
        made: Tree = None
        if action.kind is Kind.FORWARD:
            made, self._kept[place] = chunk.forward(taken, self._microbatch(action.microbatch))
            if chunk.place.is_last:
                self._value += made.astype(self._value.dtype) / self._schedule.microbatches
                made = None
        elif action.kind is Kind.BACKWARD:
            made, grads = chunk.backward(kept, taken)
            chunk.add(grads)
        elif action.kind is Kind.BACKWARD_INPUTS:
            made, self._kept[place] = chunk.backward_inputs(kept, taken)
        else:
            chunk.add(chunk.backward_weights(kept))
        made, chunk.grads, self._value = self._tie(action, (made, chunk.grads, self._value))
        if letter is not None and letter.peer == self._comm.rank:
            self._there[letter.receive] = made
        elif letter is not None:
            self._made[letter.send] = made

    def _microbatch(self, number: int) -> Tree:
        return jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, number + self._zero, keepdims=False), self._microbatches
        )

    def _tie(self, action: Action, arrays: Tree) -> Tree:
        """Returns the operands or results of a computation. What reads them comes after all that is before."""
        self._zero, arrays = _tie(self._zero, arrays)
        if self._record is not None:
            self._zero, arrays = _tie(_note_time(self._record, action, self._zero), arrays)
        return arrays


def _note_time(record: Record, action: Action, zero: Array) -> Array:
    """Records the time when ``zero`` is there; what reads the result, which is ``zero``, comes after that."""

    def note(zero: Array) -> Array:
        record.append((action, time.time()))
        return np.asarray(zero)

    return io_callback(note, jax.ShapeDtypeStruct((), jnp.int32), zero)


def _tie(zero: Array, tree: Tree) -> tuple[Array, Tree]:
    """Returns its arguments. What reads a result comes after all that computes the arguments.

    The loop never runs, since ``zero`` is 0. It leaves its arrays where they are.
    """
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if not jnp.issubdtype(x.dtype, jax.dtypes.extended)]

    def body(state: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
        return state[0] + 1, [-x if is_inexact(x.dtype) else ~x for x in state[1]]  # XLA leaves out what stays the same

    tied = lax.while_loop(lambda state: state[0] < zero, body, (jnp.zeros_like(zero), [leaves[i] for i in places]))
    for i, x in zip(places, tied[1], strict=True):
        leaves[i] = x
    return tied[0], structure.unflatten(leaves)
