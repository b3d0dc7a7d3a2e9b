"""The stages of a pipeline on one rank: their programs, traced once for all microbatches, and the shapes of results.

y, residuals = forward(params, x, microbatch)
dx, dparams  = backward(residuals, dy)        or in two parts, see split_backward
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from pycollective.errors import message
from pycollective.jax_support import jax_internals
from pycollective.jax_support.jaxprs import dependents, replaced
from pycollective.parallel import late_buffers
from pycollective.parallel.axes import AxisName, has_types, name_of, names_of, vary
from pycollective.parallel.split_backward import split
from pycollective.ranks.communicator import Communicator

Array = Any
Tree = Any
Stage = Callable[[Tree, Tree, Tree], Tree]
"""A function of parameters, of the previous stage's result (None for the first stage), and of a microbatch."""


def activation_shapes(
    stage: Stage | Sequence[Stage],
    params: Tree,
    microbatch: Tree,
    comm: Communicator,
    *,
    axis_env: Sequence[tuple[Any, int]] = (),
    last: bool = False,
) -> list[Tree]:
    """Finds the shapes of the results of a pipeline's stages. All ranks must make this call, outside traces.

    Each rank traces its own stages, in the order of the stages, and sends the shapes of their results to all ranks. If
    a stage raises an error for the shapes that it gets, all ranks raise the same error.

    Args:
        stage: this rank's stage, or its v stages, as for :func:`pipeline`.
        params: this rank's parameters, or a sequence of v trees of them; arrays or :class:`jax.ShapeDtypeStruct`.
        microbatch: one microbatch, without the axis of microbatches; arrays or :class:`jax.ShapeDtypeStruct`.
        comm: the communicator whose ranks have the stages.
        axis_env: names and sizes of other axes that the stages name, such as ``[("data", 2)]``. Default: none.
        last: whether to return the shapes of the last stage's result too, as ``pipeline(has_aux=True)`` and
            :func:`forward_pipeline` need them. The last stage may then return any tree. Default False.

    Returns:
        For each stage but the last a tree of :class:`jax.ShapeDtypeStruct`, the same on all ranks: the argument
        ``between`` of :func:`pipeline`. With ``last`` for each stage.

    Raises:
        ValueError: on all ranks: a stage raises an error for the previous stage's result; the last stage returns no
            scalar, without ``last``; the ranks have different numbers of stages.

    Order:
        Outside programs, by messages of mpi4py.

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> comm = pc.world()
        >>> def stage(w, x, microbatch):
        ...     y = jnp.tanh((microbatch if x is None else x) @ w)
        ...     return y.sum() if comm.rank == comm.size - 1 else y
        >>> shapes = activation_shapes(stage, jnp.ones((3, 3)), jnp.ones((8, 3)), comm)
        >>> [x.shape for x in shapes] == [(8, 3)] * (comm.size - 1)
        True
    """
    functions, of_chunks = ((stage,), [params]) if callable(stage) else (tuple(stage), list(params))
    numbers = comm.mpi.allgather((len(functions), len(of_chunks)))
    if {n for pair in numbers for n in pair} != {len(functions)}:
        got = f"{[n for n, _ in numbers]}, and {[n for _, n in numbers]} trees of parameters"
        _refuse("activation_shapes", "the same number of stages on each rank", got)
    shapes: list[Tree] = []
    for number in range(comm.size * len(functions)):
        chunk, owner = divmod(number, comm.size)
        y, problem, cause = None, "", None
        if owner == comm.rank:
            x = shapes[-1] if shapes else None
            try:
                traced = jax.make_jaxpr(functions[chunk], axis_env=list(axis_env), return_shape=True)
                y = jax.tree.map(_struct, traced(of_chunks[chunk], x, microbatch)[1])
            except Exception as error:  # any error of a stage must reach all ranks
                what = "a microbatch alone" if x is None else f"what the stage before gives, {describe(x)}"
                problem, cause = f"{what}: {type(error).__name__}: {error}", error
        y, problem = comm.mpi.bcast((y, problem), root=owner)
        if problem:
            _refuse("activation_shapes", f"stage {number}, on rank {owner}, to take what it gets", problem, cause)
        shapes.append(y)
    if last:
        return shapes
    check_loss("activation_shapes", shapes[-1])
    return shapes[:-1]


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _refuse(where: str, expected: str, got: str, cause: Exception | None = None) -> None:
    remedy = "Let each stage take what the stage before it gives, and the last one give the loss."
    raise ValueError(message(f"parallel.{where}", expected, got, remedy)) from cause


def check_loss(where: str, y: Tree) -> None:
    """Raises ValueError if the result of the last stage is no floating-point number."""
    if not (hasattr(y, "dtype") and y.shape == () and jnp.issubdtype(y.dtype, jnp.floating)):
        _refuse(where, "a loss, one floating-point number, from the last stage", describe(y))


def is_pair(y: Any) -> bool:
    """Returns whether ``y`` may be a loss and auxiliary results."""
    return isinstance(y, tuple) and len(y) == 2


def describe(tree: Tree) -> str:
    """Describes the shapes and dtypes of a tree in a message.

    Example:
        >>> describe({"x": jnp.ones((2, 3)), "n": jnp.int32(1)})
        "int32[] at ['n'], float32[2,3] at ['x']"
    """
    texts = []
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        is_array = hasattr(x, "shape") and hasattr(x, "dtype")
        text = f"{x.dtype}[{','.join(map(str, x.shape))}]" if is_array else type(x).__name__
        texts.append(f"{text} at {name_of(path)}" if path else text)
    return ", ".join(texts) or "nothing"


def is_inexact(dtype: Any) -> bool:
    """Returns whether arrays of this dtype have gradients."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def with_gradients(tree: Tree) -> list[Any]:
    """Returns the leaves that have gradients."""
    return [x for x in jax.tree.leaves(tree) if is_inexact(x.dtype)]


class Place(NamedTuple):
    """The place of a stage in the pipeline.

    Attributes:
        number: the number of the stage.
        shapes: the results of all stages but the last.
        varying: the axes along which these results vary.
        outputs: the results of the pipeline for each microbatch that the last stage gives, beside the loss if there are
            gradients; None if it gives the loss alone.
        gradients: whether backward passes follow.
    """

    number: int
    shapes: Sequence[Tree]
    varying: AxisName
    outputs: Tree
    gradients: bool

    @property
    def operand(self) -> Tree:
        """The result of the previous stage; None for the first stage."""
        return self.shapes[self.number - 1] if self.number > 0 else None

    @property
    def result(self) -> Tree:
        """The result of this stage for the next one; None for the last stage."""
        return None if self.is_last else self.shapes[self.number]

    @property
    def is_last(self) -> bool:
        """Whether the stage returns the loss."""
        return self.number == len(self.shapes)

    @property
    def axes(self) -> tuple[Any, ...]:
        """The axes along which results vary by JAX's types; empty if JAX has no types for them."""
        names = names_of(self.varying)
        return names if names and has_types(names) else ()

    def split(self, y: Tree) -> tuple[Tree, Tree]:
        """Splits what the stage returns in two: for the next stage, or the loss; and the outputs of the pipeline.

        Raises:
            ValueError: the first is not as :attr:`result`, or no loss; the second is not as :attr:`outputs`; one varies
                along other axes than :attr:`axes`.
        """
        y = jax.tree.map(jnp.asarray, y)  # it may have Python's numbers
        if not self.is_last:
            return self._cast(y, self.result), None
        if not self.gradients:
            return None, self._cast(y, self.outputs)
        loss, outputs = y if self.outputs is not None and is_pair(y) else (y, None)
        check_loss("pipeline", loss)
        self._check_axes(loss)
        # The loss is not cast: the gradient of a loss that is the same along an axis counts the loss once.
        return loss, self._cast(outputs, self.outputs)

    def _cast(self, y: Tree, like: Tree) -> Tree:
        """Returns ``y``, cast to a type that varies along :attr:`axes`, if its shapes and dtypes are those expected."""
        for say in (describe, jax.tree.structure):
            if say(y) != say(like):
                remedy = "Take what passes from activation_shapes, which all ranks call."
                expected = f"stage {self.number} to give {say(like)}, as between says"
                raise ValueError(message("parallel.pipeline", expected, say(y), remedy))
        self._check_axes(y)
        return jax.tree.map(lambda x: vary(x, self.axes), y)

    def _check_axes(self, y: Tree) -> None:
        for x in jax.tree.leaves(y):
            if others := jax_internals.varying_axes(x).difference(self.axes):
                remedy = "Name these axes in varying, on all ranks."
                expected = f"what stage {self.number} gives to vary along {list(self.axes)} at most"
                raise ValueError(message("parallel.pipeline", expected, f"along {sorted(map(str, others))}", remedy))


class Chunk:
    """A stage of this rank, and the sum of its gradients.

    The argument ``zero`` of its methods is a number that is 0 at run time, after which they may allocate memory.

    Attributes:
        place: the place of the stage in the pipeline.
        grads: the sum of the gradients so far, for the leaves that have gradients; None before the first backward pass.
    """

    def __init__(self, function: Stage, params: Tree, place: Place, accumulator_dtype: Any) -> None:
        self.place = place
        self.grads: list[Array] | None = None
        self._accumulator_dtype = accumulator_dtype
        self._function, self._params = function, params
        self._forward: Callable[..., list[Array]] | None = None
        self._backward: Callable[..., list[Array]] | None = None
        self._backward_parts: tuple[Callable[..., list[Array]], ...] = ()
        self._shared: dict[int, Array] = {}

    def forward(self, zero: Array, x: Tree, microbatch: Tree) -> tuple[tuple[Tree, Tree], list[Array]]:
        """Returns the stage's result and the pipeline's outputs, see :meth:`Place.split`, and the residuals.

        A residual that depends on parameters alone, such as weights in another dtype, is kept once for all of them.
        """
        if self._forward is None:
            self._forward = self._trace_forward(x, microbatch)
        outs = self._forward(zero, *jax.tree.leaves((self._params, x, microbatch)))
        results = self._results.num_leaves
        for i, residual in enumerate(outs[results:]):
            if not self._per_microbatch[i]:
                self._shared.setdefault(i, residual)
        return self._results.unflatten(outs[:results]), [
            outs[results + i] for i, own in enumerate(self._per_microbatch) if own
        ]

    def _trace_forward(self, x: Tree, microbatch: Tree) -> Callable[..., list[Array]]:
        leaves, tree = jax.tree.flatten(self._params)
        places = [i for i, leaf in enumerate(leaves) if is_inexact(jnp.result_type(leaf))]

        def forward(params: Tree, x: Tree, microbatch: Tree) -> tuple[Tree, list[Array]]:
            leaves = jax.tree.leaves(params)

            def of_inexact(inexact: list[Array], x: Tree) -> tuple[Tree, Tree]:
                params = tree.unflatten(replaced(leaves, places, inexact))
                return self.place.split(self._function(params, x, microbatch))

            inexact = [leaves[i] for i in places]
            if not self.place.gradients:
                return of_inexact(inexact, x), []
            y, pullback, outputs = jax.vjp(of_inexact, inexact, x, has_aux=True)
            residuals, self._pullback = jax.tree.flatten(pullback)
            self._loss_axes = tuple(jax_internals.varying_axes(y)) if self.place.is_last else ()
            return (y, outputs), residuals

        closed, (results, _) = jax.make_jaxpr(forward, return_shape=True)(self._params, x, microbatch)
        self._results = jax.tree.structure(results)
        self._result_tree = jax.tree.structure(results[0])
        self._result_structs = [_struct(leaf) for leaf in jax.tree.leaves(results[0])]
        changing = dependents(closed.jaxpr, closed.jaxpr.invars[len(leaves) :])
        residuals = closed.jaxpr.outvars[self._results.num_leaves :]
        self._per_microbatch = [isinstance(var, Var) and var in changing for var in residuals]
        return _compiled(closed)

    def cotangent_of_loss(self, weight: float) -> list[Array]:
        """Returns the cotangent of the loss: the weight of a microbatch's loss in the value."""
        return [vary(jnp.asarray(weight, self._result_structs[0].dtype), self._loss_axes)]

    def backward(self, zero: Array, residuals: list[Array], dy: list[Array]) -> tuple[list[Array], list[Array]]:
        """Returns the gradients of the inputs and of the parameters."""
        args = self._with_shared(residuals) + dy
        if self._backward is None:
            self._backward = _compiled(jax.make_jaxpr(self._pull_back)(*args))
        outs = self._backward(zero, *args)
        inputs = len(with_gradients(self.place.operand))
        return outs[:inputs], outs[inputs:]

    def backward_inputs(self, zero: Array, residuals: list[Array], dy: list[Array]) -> tuple[list[Array], list[Array]]:
        """Returns the gradients of the inputs, and this microbatch's argument of :meth:`backward_weights`."""
        args = self._with_shared(residuals) + dy
        inputs = len(with_gradients(self.place.operand))
        if not self._backward_parts:
            parts = split(jax.make_jaxpr(self._pull_back)(*args), inputs, *args)
            self._backward_parts = _compiled(parts.first), _compiled(parts.second)
            self._reused_args = parts.reused_args
        outs = self._backward_parts[0](zero, *args)
        return outs[:inputs], [args[i] for i in self._reused_args if i not in self._shared] + outs[inputs:]

    def backward_weights(self, zero: Array, taken: list[Array]) -> list[Array]:
        """Returns the gradients of the parameters from the second result of :meth:`backward_inputs`."""
        rest = iter(taken)
        reused_args = [self._shared[i] if i in self._shared else next(rest) for i in self._reused_args]
        return self._backward_parts[1](zero, *reused_args, *rest)

    def add(self, grads: list[Array]) -> None:
        """Adds a microbatch's gradients of the parameters to the sum."""
        if self._accumulator_dtype is not None:
            with jax.numpy_dtype_promotion("standard"):  # the wider one of two dtypes, not a promotion of values
                grads = [g.astype(jnp.promote_types(g.dtype, self._accumulator_dtype)) for g in grads]
        self.grads = grads if self.grads is None else [a + b for a, b in zip(self.grads, grads, strict=True)]

    def _with_shared(self, residuals: list[Array]) -> list[Array]:
        rest = iter(residuals)
        return [next(rest) if own else self._shared[i] for i, own in enumerate(self._per_microbatch)]

    def _pull_back(self, *args: Array) -> list[Array]:
        """Applies the pullback to residuals and to the cotangents of the leaves that have gradients."""
        residuals, rest = list(args[: len(self._per_microbatch)]), iter(args[len(self._per_microbatch) :])
        cotangents = [
            next(rest) if is_inexact(y.dtype) else np.zeros(y.shape, jax.dtypes.float0) for y in self._result_structs
        ]
        dparams, dx = jax.tree.unflatten(self._pullback, residuals)(self._result_tree.unflatten(cotangents))
        return with_gradients(dx) + dparams


def _compiled(closed: Any) -> Callable[..., list[Array]]:
    """Returns a program as a jitted function of ``zero`` and its arguments: JAX lowers it once for all calls."""
    return jax.jit(lambda zero, *args: late_buffers.run(closed, zero, *args))
