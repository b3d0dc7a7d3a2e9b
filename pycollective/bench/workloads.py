"""What is measured: an operation or a step of training, its arrays, and the results that it must give."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pycollective.bench.operations import OPERATIONS, Array, OperandOf, Operation, is_narrow, whole
from pycollective.errors import message

AXIS = "i"
"""The axis that every program names: all participants. One letter, because lax.pbroadcast splits a longer name."""

MODES = ("jit", "eager", "loop")

GRADIENTS = ("tree", "step")
"""Workloads that sum gradients: of a model's tree of arrays at once, and within a step of training."""

GPT2_LAYER = [768, 768, 768 * 2304, 2304, 768 * 768, 768, 768, 768, 768 * 3072, 3072, 3072 * 768, 768]


def _resnet50() -> list[int]:
    sizes = [64 * 3 * 49, 64, 64]
    channels = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            sizes += [
                channels * width,
                width,
                width,
                width * width * 9,
                width,
                width,
                width * 4 * width,
                *[4 * width] * 2,
            ]
            if block == 0:
                sizes += [channels * 4 * width, 4 * width, 4 * width]
            channels = 4 * width
    return [*sizes, 2048 * 1000, 1000]


TREES = {
    "many-small": [256] * 148,
    "resnet50": _resnet50(),  # 161 leaves, 25.6 M numbers
    "gpt2-small": [50257 * 768, 1024 * 768, *GPT2_LAYER * 12, 768, 768],  # 148 leaves, 124.4 M numbers
}

# The network of a step of training.
LAYERS = 4
BATCH = 64
LEARNING_RATE = 0.01


@dataclass(frozen=True)
class Workload:
    """What one line of the table measures.

    Attributes:
        op: a key of :data:`OPERATIONS`, or one of :data:`GRADIENTS`.
        sizes: the number of elements of each array; of each weight matrix for "step". One array but for trees.
        dtype: the NumPy dtype of the elements.
        mode: one of :data:`MODES`.
        donated: whether the program may overwrite its operand.
        loop: the number of calls in one program, in mode "loop".
        unroll: the number of calls in one iteration of that loop.
    """

    op: str
    sizes: tuple[int, ...]
    dtype: np.dtype[Any]
    mode: str = "jit"
    donated: bool = False
    loop: int = 1
    unroll: int = 1

    @property
    def operation(self) -> Operation | None:
        """The operation that is all of this workload; None for :data:`GRADIENTS`."""
        return OPERATIONS.get(self.op)

    @property
    def is_chained(self) -> bool:
        """Whether in a loop each call takes the results of the one before. Otherwise XLA would copy them for it."""
        return self.operation is None or self.operation.in_place

    @property
    def count(self) -> int:
        return sum(self.sizes)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """The arguments of :meth:`function` that are donated, as :func:`jax.jit` takes them."""
        return tuple(range(len(self.sizes))) if self.donated else ()

    def split(self, flat: Array) -> list[Array]:
        """Splits one array into the arrays of the tree."""
        return np.split(flat, np.cumsum(self.sizes)[:-1])

    def traffic(self, n: int) -> float:
        """The bytes that each of ``n`` participants must move: the bytes of the bus bandwidth."""
        return self.nbytes * (self.operation or OPERATIONS["psum"]).factor(n)

    def function(self) -> Callable[..., Any]:
        """The function that users write, over named axes. Takes the arrays of :func:`operands`."""
        if self.op == "tree":
            return lambda *tree: tuple(lax.psum(tree, AXIS))
        if self.op == "step":
            return lambda *params: step(params, lambda grads: lax.pmean(grads, AXIS))
        call = OPERATIONS[self.op].call
        return lambda x: (call(lax, x, AXIS),)


def keeps_shape(op: str) -> bool:
    """Whether the results of ``op`` have the shapes of its operands."""
    return op in GRADIENTS or OPERATIONS[op].keeps_shape


def step(params: Sequence[Any], mean: Callable[[Any], Any]) -> tuple[Any, ...]:
    """One step of gradient descent of a small network, whose gradients ``mean`` averages."""

    def loss(params: Sequence[Any]) -> Any:
        x = jnp.linspace(-1, 1, BATCH * params[0].shape[0], dtype=params[0].dtype).reshape(BATCH, -1)
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    grads = mean(list(jax.grad(loss)(list(params))))
    return tuple(w - LEARNING_RATE * g for w, g in zip(params, grads, strict=True))


def make_workload(op: str, nbytes: int, dtype: Any, n: int, **options: Any) -> Workload:
    """The workload of about ``nbytes`` bytes. They are the larger of operand and result, as in nccl-tests.

    Raises:
        ValueError: ``op`` cannot run in such a mode.
    """
    dtype = np.dtype(dtype)
    elements = max(1, nbytes // dtype.itemsize)
    if op == "step":
        sizes = (max(1, math.isqrt(elements // LAYERS)) ** 2,) * LAYERS
    elif OPERATIONS[op].is_divided:
        sizes = (max(1, elements // n) * n,)
    else:
        sizes = (elements,)
    workload = Workload(op, sizes, dtype, **options)
    if workload.donated and not keeps_shape(op):
        expected = "an operation that can donate its operand"
        raise ValueError(message("bench", expected, op, "Its result has another shape: leave that out."))
    return workload


def tree_workload(model: str, dtype: Any, **options: Any) -> Workload:
    """The workload of the gradients of ``model``, a key of :data:`TREES`."""
    return Workload("tree", tuple(TREES[model]), np.dtype(dtype), **options)


def operands(workload: Workload, participant: int, n: int, *, zeros: bool = False) -> list[Array]:
    """One participant's operands: whole numbers, so small that no sum rounds; or zeros, which never overflow."""
    return [operand(workload, leaf, participant, n, zeros=zeros) for leaf in range(len(workload.sizes))]


def operand(workload: Workload, leaf: int, participant: int, n: int, *, zeros: bool = False) -> Array:
    """One array of :func:`operands`."""
    size = workload.sizes[leaf]
    if workload.op == "step":  # the same for all participants, so their mean is what one of them computes
        return np.eye(math.isqrt(size), dtype=workload.dtype) * (0.5 + 0.1 * leaf)
    shape = (workload.operation.operand if workload.operation else whole)(size, n)
    if zeros:
        return np.zeros(shape, workload.dtype)
    size = math.prod(shape)
    values = (np.arange(size) + leaf) % 5 + participant % 3
    values[participant % size] += 1  # participants whose numbers differ by 3 have different operands too
    return values.astype(workload.dtype).reshape(shape)


def expected(workload: Workload, participant: int, n: int, times: int) -> list[Array]:
    """What one participant must get after ``times`` calls in a row, computed by NumPy from the operands of all."""
    if workload.op == "step":
        params = operands(workload, participant, n)
        for _ in range(times):
            params = [np.asarray(w) for w in jax.jit(lambda *p: step(p, lambda g: g))(*params)]
        return params
    call = (workload.operation or OPERATIONS["psum"]).expected

    def result(leaf: int) -> Array:
        return _repeat(call, lambda i: operand(workload, leaf, i, n), n, times)(participant)

    return list(map(result, range(len(workload.sizes))))


def _repeat(call: Callable[[OperandOf, int, int], Array], operand_of: OperandOf, n: int, times: int) -> OperandOf:
    """From a participant to its array after ``times`` calls, each of which takes the results of the one before."""
    for _ in range(times):
        operand_of = functools.cache(functools.partial(lambda before, i: call(before, i, n), operand_of))
    return operand_of


def count_wrong(workload: Workload, got: Sequence[Any], want: Sequence[Array], tolerance: float = 0.0) -> int:
    """How many elements differ. Those of a training step and of narrow floats may differ by rounding.

    Args:
        workload: what was computed.
        got: the results.
        want: the results as they must be.
        tolerance: the relative error of numbers that were sent in fewer bits than they have.
    """
    if is_narrow(workload.dtype):
        tolerance = max(tolerance, float(jnp.finfo(workload.dtype).eps))
    if len(got) != len(want):
        return workload.count
    wrong = 0
    for mine, right in zip(got, want, strict=True):
        y = np.asarray(mine)
        if y.shape != right.shape:
            wrong += right.size
        elif workload.op == "step":
            wrong += int(np.sum(~np.isclose(y, right, rtol=1e-3, atol=1e-5)))
        else:
            wrong += int(np.sum(~np.isclose(y.astype(right.dtype), right, rtol=tolerance, atol=0)))
    return wrong
