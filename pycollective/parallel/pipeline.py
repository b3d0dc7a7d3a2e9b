"""Runs a pipeline: the value and the gradients of a network whose stages are on the ranks of a communicator.

Each rank compiles one program with the actions of its own stages, in the order of a schedule:

    value = 1/m sum_k loss_k      on all ranks
    aux   = [aux_0 aux_1 ...]     on all ranks: other results of the last stage for each microbatch
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
from pycollective.parallel.stages import Chunk, Place, Stage, check_loss, describe, is_inexact, is_pair, with_gradients
from pycollective.parallel.tied_parameters import Tied
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
    has_aux: bool = False,
    allow_int: bool = False,
    accumulator_dtype: Any = None,
    tied: Tied | None = None,
) -> Callable[[Tree, Tree], tuple[Any, Tree]]:
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
        has_aux: whether the last stage returns a pair ``(loss, aux)``, with a tree of arrays ``aux`` of any dtypes:
            metrics, predictions. ``between`` is then a list with an entry for each stage, also for the last one, as
            ``activation_shapes(last=True)`` returns it. Default False.
        allow_int: whether parameters may have leaves without gradients: integers, bools, keys of :mod:`jax.random`.
            Default False.
        accumulator_dtype: the dtype in which gradients are added up over microbatches and returned, where it is wider
            than that of the parameter: ``jnp.float32`` for parameters in bfloat16 whose optimizer keeps master weights
            in float32. Default None: the dtypes of the parameters.
        tied: the parameters that several stages share, from :func:`tied_parameters`. Default None: none.

    Returns:
        A function of this rank's parameters (with v chunks: a sequence of v trees) and of a tree of arrays with a
        leading axis of length m, the microbatches. A stage gets one microbatch, without that axis. All ranks may pass
        the same arrays, or each rank those that its stages read. The function returns

        - the mean of the losses of the microbatches, on all ranks: a scalar of JAX's default floating-point dtype. By
          JAX's types it varies along ``varying``;
          With ``has_aux`` a pair ``(value, aux)``: the leaves of ``aux`` have a leading axis of length m, the
          microbatches, on all ranks;
        - its gradients with respect to this rank's parameters, in their shapes and dtypes, or in
          ``accumulator_dtype``. They are summed in these dtypes. With ``allow_int`` the gradients of leaves that have
          none are zeros of ``float0``, as :func:`jax.grad` has them.

    Raises:
        ValueError: the schedule is for another number of ranks, or deadlocks, or has no backward passes; the numbers of
            stages, parameters or microbatches are not those of the schedule; the result of a stage is not that of
            ``between``; the loss is no scalar; a parameter is an integer or a key, without ``allow_int``; parameters
            are not those of ``tied``. Each rank checks the results of its own stages alone: take ``between`` from
            :func:`activation_shapes`, which raises on all ranks.
        NameError: an axis of ``varying`` is not bound.

    Differentiation:
        None: the function returns gradients itself. Over other axes they are those of :func:`jax.grad` inside the
        mapped function: in :func:`pycollective.pmap` those of the sum of all devices' losses, which
        ``lax.pmean(grads, "data")`` averages.

    Order:
        Program order, which is that of the schedule on each rank. Then the broadcast of the value and of ``aux`` from
        the last rank, and the exchange of the gradients of ``tied`` parameters.

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
    _check("pipeline", schedule.gradients, "a schedule with backward passes", f"{schedule.name}, which has none")
    if accumulator_dtype is not None:
        is_float = jnp.issubdtype(accumulator_dtype, jnp.floating)
        _check("pipeline", is_float, "a floating-point accumulator_dtype", jnp.dtype(accumulator_dtype))
    chunks_of = _chunks("pipeline", stage, schedule, between, comm, varying, last=has_aux)
    outputs = None
    if has_aux:
        is_loss_and_aux = is_pair(between[-1])
        _check("pipeline", is_loss_and_aux, "a pair of the loss and aux from the last stage", describe(between[-1]))
        loss, outputs = between[-1]
        check_loss("pipeline", loss)

    def value_and_grad(params: Tree, microbatches: Tree) -> tuple[Any, Tree]:
        for path, x in jax.tree_util.tree_leaves_with_path(params):
            dtype = jnp.result_type(x)
            expected = "parameters with gradients, or allow_int=True"
            _check("pipeline", allow_int or is_inexact(dtype), expected, f"{dtype} at {name_of(path)}")
        chunks = chunks_of(params, outputs, accumulator_dtype)
        value, stacked = _Run(schedule, comm, chunks, _batch("pipeline", schedule, microbatches), record).run()
        with_gradients = iter([x for chunk in chunks for x in chunk.grads or ()])
        leaves, tree = jax.tree.flatten(params)
        grads = [
            next(with_gradients) if is_inexact(jnp.result_type(x)) else np.zeros(jnp.shape(x), jax.dtypes.float0)
            for x in leaves
        ]
        if tied is not None:
            grads = tied.add_up(params, grads, comm)
        return (value, stacked) if has_aux else value, tree.unflatten(grads)

    return value_and_grad


def forward_pipeline(
    stage: Stage | Sequence[Stage],
    schedule: Schedule,
    shapes: list[Tree],
    comm: Communicator,
    *,
    varying: AxisName = (),
    record: Record | None = None,
) -> Callable[[Tree, Tree], Tree]:
    """Makes the function that computes a pipeline's results without gradients: an evaluation, or predictions.

    ``y_k = stage_n(... stage_1(microbatch_k))`` for m microbatches. No activations are kept. Call the function as that
    of :func:`pipeline`.

    Args:
        stage: as for :func:`pipeline`. The last stage may return any tree of arrays, such as ``(loss, aux)``.
        schedule: a schedule without backward passes, as :func:`forward_only` makes it.
        shapes: the result of each stage, a list of trees of :class:`jax.ShapeDtypeStruct`, as
            ``activation_shapes(last=True)`` returns it.
        comm: the communicator whose ranks have the stages.
        varying: as for :func:`pipeline`; also for the results of the last stage.
        record: as for :func:`pipeline`.

    Returns:
        A function of this rank's parameters, of any dtypes, and of the microbatches. It returns the results of the last
        stage on all ranks: a tree whose leaves have a leading axis of length m. By JAX's types they vary along
        ``varying``.

    Raises:
        ValueError: the schedule is for another number of ranks, or deadlocks, or has backward passes; the numbers of
            stages, parameters or microbatches are not those of the schedule; the result of a stage is not that of
            ``shapes``.
        NameError: an axis of ``varying`` is not bound.

    Differentiation:
        Forward mode. Reverse mode raises JAX's error of loops: take :func:`pipeline` for gradients.

    Order:
        Program order, which is that of the schedule on each rank. Then the broadcast of the results from the last rank.

    Example:
        >>> import jax, jax.numpy as jnp, pycollective as pc
        >>> from pycollective.parallel import activation_shapes, forward_only
        >>> comm = pc.world()
        >>> def stage(w, x, microbatch):
        ...     y = w * (microbatch if comm.rank == 0 else x)
        ...     return {"sum": y.sum(), "top": y.argmax()} if comm.rank == comm.size - 1 else y
        >>> shapes = activation_shapes(stage, jnp.float32(1), jnp.ones(8), comm, last=True)
        >>> evaluate = forward_pipeline(stage, forward_only(comm.size, 2), shapes, comm)
        >>> results = pc.jit(evaluate)(jnp.float32(1), jnp.ones((2, 8)))
        >>> results["sum"].tolist(), results["top"].tolist()
        ([8.0, 8.0], [0, 0])
    """
    where = "forward_pipeline"
    _check(where, not schedule.gradients, "a schedule without backward passes, of forward_only", schedule.name)
    chunks_of = _chunks(where, stage, schedule, shapes, comm, varying, last=True)

    def evaluate(params: Tree, microbatches: Tree) -> Tree:
        return _Run(
            schedule, comm, chunks_of(params, shapes[-1], None), _batch(where, schedule, microbatches), record
        ).run()[1]

    return evaluate


def _chunks(
    where: str,
    stage: Stage | Sequence[Stage],
    schedule: Schedule,
    between: Tree,
    comm: Communicator,
    varying: AxisName,
    *,
    last: bool,
) -> Callable[[Tree, Tree, Any], list[Chunk]]:
    """Checks the arguments of a pipeline, and returns a function that makes the chunks of this rank."""
    functions = (stage,) if callable(stage) else tuple(stage)
    _check(where, comm.size == schedule.stages, f"a schedule for {comm.size} ranks", f"one for {schedule.stages}")
    expected = f"{schedule.chunks} stages on each rank, as {schedule.name} has"
    _check(where, len(functions) == schedule.chunks, expected, len(functions))
    stages = comm.size * schedule.chunks
    if last:
        got = f"a list of {len(between)}" if isinstance(between, list) else type(between).__name__
        has_all = isinstance(between, list) and len(between) == stages
        _check(where, has_all, f"a list of the results of all {stages} stages, of activation_shapes(last=True)", got)
        between = between[:-1]
    shapes = list(between) if isinstance(between, list) else [between] * (stages - 1)
    expected = f"what passes after each of {stages - 1} stages"
    _check(where, len(shapes) == stages - 1, expected, f"a list of {len(shapes)}")
    simulate(schedule)

    def chunks_of(params: Tree, outputs: Tree, accumulator_dtype: Any) -> list[Chunk]:
        if names_of(varying):
            axis_size(where, varying)  # raises if it is not bound
        of_chunks = [params] if callable(stage) else list(params)
        _check(where, len(of_chunks) == len(functions), f"{len(functions)} trees of parameters", len(of_chunks))
        return [
            Chunk(
                function,
                own,
                Place(number * comm.size + comm.rank, shapes, varying, outputs, schedule.gradients),
                accumulator_dtype,
            )
            for number, (function, own) in enumerate(zip(functions, of_chunks, strict=True))
        ]

    return chunks_of


def _batch(where: str, schedule: Schedule, microbatches: Tree) -> Tree:
    """Returns the microbatches as arrays, if they are as many as the schedule has."""
    microbatches = jax.tree.map(jnp.asarray, microbatches)
    for path, x in jax.tree_util.tree_leaves_with_path(microbatches):
        expected = f"{schedule.microbatches} microbatches along the first axis of each array"
        is_right = x.shape[:1] == (schedule.microbatches,)
        _check(where, is_right, expected, f"the shape {x.shape} at {name_of(path)}")
    return microbatches


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


def _check(where: str, is_right: bool, expected: str, got: Any) -> None:
    if not is_right:
        remedy = f"See the arguments of pycollective.parallel.{where}."
        raise ValueError(message(f"parallel.{where}", expected, got, remedy))


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
        self._outputs: list[Tree] = [None] * schedule.microbatches  # on the last rank, for each microbatch
        self._received: dict[Action, Tree] = {}  # the received arrays, by the action that receives them
        self._to_send: dict[Action, Tree] = {}  # the arrays to send, by the action that sends them
        self._residuals: dict[tuple[int, ...], list[Array]] = {}  # for the backward passes, by chunk and microbatch

    def run(self) -> tuple[Array, Tree]:
        """Traces all actions and returns the value and the outputs, the same on all ranks.

        Afterwards the chunks have the gradients.
        """
        for action in self._schedule.actions[self._comm.rank]:
            if action.peer is None:
                self._compute(action)
            elif action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
                mpi.send(self._to_send.pop(action), self._comm, dest=action.peer)
            else:
                self._received[action] = self._receive(action, action.peer)
        place = self._chunks[-1].place
        if place.is_last:
            outputs = jax.tree.map(lambda *xs: jnp.stack(xs), *self._outputs)
        else:
            count = self._schedule.microbatches
            outputs = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), place.outputs)
        results = jax.tree.map(lambda x: vary(x, place.axes), (self._value, outputs))
        return mpi.broadcast(results, self._comm, root=self._comm.size - 1)

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
        outputs: Tree = None
        if action.kind is Kind.FORWARD:
            (made, outputs), self._residuals[place] = chunk.forward(
                self._zero, taken, self._microbatch(action.microbatch)
            )
            if chunk.place.is_last and chunk.place.gradients:
                self._value += made.astype(self._value.dtype) / self._schedule.microbatches
                made = None
        elif action.kind is Kind.BACKWARD:
            made, grads = chunk.backward(self._zero, kept, taken)
            chunk.add(grads)
        elif action.kind is Kind.BACKWARD_INPUTS:
            made, self._residuals[place] = chunk.backward_inputs(self._zero, kept, taken)
        else:
            chunk.add(chunk.backward_weights(self._zero, kept))
        made, outputs, chunk.grads, self._value = self._tie(action, (made, outputs, chunk.grads, self._value))
        if action.kind is Kind.FORWARD and chunk.place.is_last:
            self._outputs[action.microbatch] = outputs
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
