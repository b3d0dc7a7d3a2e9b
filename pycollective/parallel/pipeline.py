"""Runs a pipeline: the value and the gradients of a network whose stages are on the ranks of a communicator.

Each rank compiles one program with the actions of its own stages, in the order of a schedule:

    value = 1/m sum_k loss_k      on all ranks
    grads = d value / d params    of this rank's stages

The messages have program order. The computations between them have not: XLA may run each computation as soon as its
operands are there, for example all forward passes first, and then it keeps the activations of all of them. So the
results of a computation and the operands of the next one pass through a loop. The loop has no iterations at run time,
but XLA does not know this when it compiles the program, so it keeps the order.
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
from pycollective.parallel.schedules import Action, Kind, Schedule, receive_of, transfer_of
from pycollective.parallel.stages import Chunk, Place, Stage, is_inexact, with_gradients
from pycollective.ranks.communicator import Communicator
from pycollective.transport.message_constants import PROC_NULL

Array = Any
Tree = Any
Record = list[tuple[Action, float]]
"""Two entries for each computation of a rank, at its beginning and at its end: the action, and seconds since 1970."""


def pipeline(
    stage: Stage | Sequence[Stage],
    schedule: Schedule,
    between: Tree,
    comm: Communicator,
    *,
    varying: AxisName = (),
    record: Record | None = None,
) -> Callable[[Tree, Tree], tuple[Array, Tree]]:
    """Makes the function that returns the value and the gradients of a pipeline, as :func:`jax.value_and_grad` does.

    ``value = 1/m sum_k loss_k`` over m microbatches, and ``grads = d value / d params`` for this rank's stages. Call
    the function on all ranks, inside :func:`pycollective.jit`, or inside :func:`pycollective.shard_map` over other
    axes.

    Args:
        stage: this rank's stage, a function ``stage(params, x, microbatch)``. ``x`` is the result of the previous
            stage, or None for the first stage. The result is an array or a tree of arrays for the next stage; the last
            stage returns the loss, a scalar. Stages may differ in shapes and code. With v chunks: a sequence of v
            stages; rank r of p has the stages r, p + r, ...
        schedule: a schedule for as many ranks as ``comm`` has, the same on all of them.
        between: the result of each stage but the last, a tree of :class:`jax.ShapeDtypeStruct`. If the stages' results
            differ: a list of such trees, one for each stage but the last, as :func:`activation_shapes` returns it.
        comm: the communicator whose ranks have the stages.
        varying: the axes along which the results of stages vary, for ``shard_map(check_vma=True)``: in general those of
            the data. Default ``()``: none.
        record: a list to which each computation appends its action and the time in seconds since 1970, when it begins
            and again when it ends. See :func:`measured`. Only for programs on one device of each rank. Default None:
            no record, and no cost.

    Returns:
        A function of this rank's parameters (with v chunks: a sequence of v trees) and of a tree of arrays with a
        leading axis of length m, the microbatches. A stage gets one microbatch, without that axis. All ranks may pass
        the same arrays, or each rank those that its stages read. The function returns

        - the mean of the losses of the microbatches, on all ranks: a scalar of JAX's default floating-point dtype. By
          JAX's types it varies along ``varying``;
        - its gradients with respect to this rank's parameters, in their shapes and dtypes. They are summed in these
          dtypes.

    Raises:
        ValueError: the schedule is for another number of ranks, or deadlocks; the numbers of stages, parameters or
            microbatches are not those of the schedule; the result of a stage is not that of ``between``; the loss is no
            scalar. Each rank checks the results of its own stages alone: take ``between`` from
            :func:`activation_shapes`, which raises on all ranks.
        NameError: an axis of ``varying`` is not bound.

    Differentiation:
        None: the function returns gradients itself. Over other axes they are those of :func:`jax.grad` inside the
        mapped function: in :func:`pycollective.pmap` those of the sum of all devices' losses, which
        ``lax.pmean(grads, "data")`` averages.

    Order:
        Program order, which is that of the schedule on each rank.

    Source:
        That of the schedule, such as :func:`one_f_one_b`.

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
    """Gathers the times of all ranks' computations, and computes the bubble.

    ``bubble = (p T - sum_r C_r) / (p T)`` with p ranks, the time T of the run and the time C_r that rank r computes.
    All ranks must make this call, outside traces. The times come from the hosts' clocks, so on several hosts the clocks
    must agree.

    Args:
        schedule: the schedule that ran.
        record: the list that :func:`pipeline` has filled on this rank. If it has several runs, the last one counts.
            Wait for the results of the run before this call.
        comm: the communicator of the pipeline.

    Returns:
        A :class:`Simulation`, the same on all ranks: the spans of the computations in seconds since the first one, and
        the bubble. The time in which a rank waits, sends or receives is not computation.

    Raises:
        ValueError: on all ranks: the record of a rank does not have the computations of its schedule.

    Order:
        Outside programs, by messages of mpi4py.

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
    """Traces the actions of this rank in their order.

    ``_zero`` is a number that is 0 at run time, which XLA does not know. Each action takes it from the previous action,
    like a token.
    """

    def __init__(
        self, schedule: Schedule, comm: Communicator, chunks: list[Chunk], microbatches: Tree, record: Record | None
    ) -> None:
        self._schedule, self._comm, self._chunks = schedule, comm, chunks
        self._microbatches, self._record = microbatches, record
        self._zero = mpi.sendrecv(jnp.zeros((), jnp.int32), comm, source=PROC_NULL, dest=PROC_NULL)
        self._value = jnp.zeros(())
        self._received: dict[Action, Tree] = {}  # the received arrays, by the action that receives them
        self._to_send: dict[Action, Tree] = {}  # the arrays to send, by the action that sends them
        self._residuals: dict[tuple[int, ...], list[Array]] = {}  # for the backward passes, by chunk and microbatch

    def run(self) -> Array:
        """Traces all actions and returns the value, the same on all ranks. Afterwards the chunks have the gradients."""
        for action in self._schedule.actions[self._comm.rank]:
            if action.peer is None:
                self._compute(action)
            elif action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
                mpi.send(self._to_send.pop(action), self._comm, dest=action.peer)
            else:
                self._received[action] = self._receive(action, action.peer)
        value = vary(self._value, self._chunks[0].place.axes)
        return mpi.broadcast(value, self._comm, root=self._comm.size - 1)

    def _receive(self, action: Action, source: int) -> Tree:
        place = self._chunks[action.chunk].place
        like = place.operand if action.kind is Kind.RECEIVE_ACTIVATION else with_gradients(place.result)
        # recv would not do: it has no operand, so XLA could run it, and wait in it, before earlier computations.
        operands = jax.tree.map(lambda _: self._zero, like)
        got = mpi.sendrecv(operands, self._comm, source=source, dest=PROC_NULL, like=like)
        return jax.tree.map(lambda x: vary(x, place.axes), got)

    def _compute(self, action: Action) -> None:
        chunk, place = self._chunks[action.chunk], action[1:3]
        of_rank = self._comm.rank, self._schedule.stages, self._schedule.chunks
        receive, transfer = receive_of(action, *of_rank), transfer_of(action, *of_rank)
        taken = None if receive is None else self._received.pop(receive)
        if chunk.place.is_last and action.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUTS):
            taken = chunk.cotangent_of_loss(1 / self._schedule.microbatches)
        kept, taken = self._tie(action, (self._residuals.pop(place, []), taken))
        made: Tree = None
        if action.kind is Kind.FORWARD:
            made, self._residuals[place] = chunk.forward(taken, self._microbatch(action.microbatch))
            if chunk.place.is_last:
                self._value += made.astype(self._value.dtype) / self._schedule.microbatches
                made = None
        elif action.kind is Kind.BACKWARD:
            made, grads = chunk.backward(kept, taken)
            chunk.add(grads)
        elif action.kind is Kind.BACKWARD_INPUTS:
            made, self._residuals[place] = chunk.backward_inputs(kept, taken)
        else:
            chunk.add(chunk.backward_weights(kept))
        made, chunk.grads, self._value = self._tie(action, (made, chunk.grads, self._value))
        if transfer is not None and transfer.peer == self._comm.rank:
            self._received[transfer.receive] = made
        elif transfer is not None:
            self._to_send[transfer.send] = made

    def _microbatch(self, number: int) -> Tree:
        return jax.tree.map(
            lambda x: lax.dynamic_index_in_dim(x, number + self._zero, keepdims=False), self._microbatches
        )

    def _tie(self, action: Action, arrays: Tree) -> Tree:
        """Returns the operands or results of a computation, after all earlier actions: see :func:`_tie`."""
        self._zero, arrays = _tie(self._zero, arrays)
        if self._record is not None:
            self._zero, arrays = _tie(_note_time(self._record, action, self._zero), arrays)
        return arrays


def _note_time(record: Record, action: Action, zero: Array) -> Array:
    """Records the time when ``zero`` is computed, and returns ``zero``. Readers of the result run afterwards."""

    def note(zero: Array) -> Array:
        record.append((action, time.time()))
        return np.asarray(zero)

    return io_callback(note, jax.ShapeDtypeStruct((), jnp.int32), zero)


def _tie(zero: Array, tree: Tree) -> tuple[Array, Tree]:
    """Returns its arguments, such that a reader of one result runs after the computation of all arguments.

    The arguments are the carry of a loop without iterations, since ``zero`` is 0 at run time. XLA does not copy them.
    """
    leaves, structure = jax.tree.flatten(tree)
    places = [i for i, x in enumerate(leaves) if not jnp.issubdtype(x.dtype, jax.dtypes.extended)]

    def body(state: tuple[Array, list[Array]]) -> tuple[Array, list[Array]]:
        return state[0] + 1, [-x if is_inexact(x.dtype) else ~x for x in state[1]]  # XLA removes a constant carry

    tied = lax.while_loop(lambda state: state[0] < zero, body, (jnp.zeros_like(zero), [leaves[i] for i in places]))
    for i, x in zip(places, tied[1], strict=True):
        leaves[i] = x
    return tied[0], structure.unflatten(leaves)
