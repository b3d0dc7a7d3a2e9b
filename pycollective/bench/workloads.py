"""What is measured: operations, their operands and what they must give, and the traffic that each needs.

The names and factors are those of nccl-tests (its PERFORMANCE.md): *algorithm bandwidth* is bytes over time, *bus
bandwidth* multiplies it with the share of the bytes that each participant must move, so that it may be compared with
what the hardware gives.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pycollective.errors import message

Array = np.ndarray[Any, Any]

AXIS = "i"
"""The axis that every program names: all participants. One letter: lax.pbroadcast takes a longer name apart."""

MODES = ("jit", "eager", "loop")


Row = Callable[[int], Array]
"""From a participant to its operand."""


@dataclass(frozen=True)
class Operation:
    """A collective on one array.

    Attributes:
        jax: the function of ``jax.lax`` over :data:`AXIS`.
        expected: from all operands, a participant and their number, its result.
        factor: of the bus bandwidth, from the number of participants.
        blocks: the operand's leading axis counts the participants.
        keeps_shape: the result may be the operand of the next call.
    """

    jax: Callable[[Any], Any]
    expected: Callable[[Row, int, int], Array]
    factor: Callable[[int], float]
    blocks: bool = False
    keeps_shape: bool = True


def _total(rows: Iterable[Array]) -> Array:
    """In float32 where the dtype is narrower."""
    return functools.reduce(np.add, (row.astype(np.float32) if _narrow(row.dtype) else row for row in rows))


def _narrow(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32)


def _share(n: int) -> float:
    return (n - 1) / n


OPERATIONS = {
    "psum": Operation(
        lambda x: lax.psum(x, AXIS), lambda row, _, n: _total(map(row, range(n))), lambda n: 2 * (n - 1) / n
    ),
    "all_gather": Operation(
        lambda x: lax.all_gather(x, AXIS),
        lambda row, _, n: np.stack([row(k) for k in range(n)]),
        _share,
        keeps_shape=False,
    ),
    "psum_scatter": Operation(
        lambda x: lax.psum_scatter(x, AXIS),
        lambda row, i, n: _total(row(k)[i] for k in range(n)),
        _share,
        blocks=True,
        keeps_shape=False,
    ),
    "all_to_all": Operation(
        lambda x: lax.all_to_all(x, AXIS, 0, 0),
        lambda row, i, n: np.stack([row(k)[i] for k in range(n)]),
        _share,
        blocks=True,
    ),
    "broadcast": Operation(lambda x: lax.pbroadcast(x, AXIS, 0), lambda row, *_: row(0), lambda _: 1.0),
    "ppermute": Operation(
        lambda x: lax.ppermute(x, AXIS, [(i, (i + 1) % lax.axis_size(AXIS)) for i in range(lax.axis_size(AXIS))]),
        lambda row, i, n: row((i - 1) % n),
        lambda _: 1.0,
    ),
}

RESHAPING = {name for name, operation in OPERATIONS.items() if not operation.keeps_shape}
"""Their operand cannot be donated, nor their result be the next call's operand."""

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

LAYERS = 4
ROWS = 64
RATE = 0.01


@dataclass(frozen=True)
class Workload:
    """One line of the table.

    Attributes:
        op: a key of :data:`OPERATIONS`, "tree" or "step".
        sizes: of each array in elements; for "step" of each weight matrix. One but for trees.
        dtype: of NumPy.
        mode: one of :data:`MODES`.
        donated: the program may overwrite its operand.
        loop: calls in one program, in mode "loop".
        unroll: of them in one turn of the loop.
    """

    op: str
    sizes: tuple[int, ...]
    dtype: np.dtype[Any]
    mode: str = "jit"
    donated: bool = False
    loop: int = 1
    unroll: int = 1

    @property
    def count(self) -> int:
        return sum(self.sizes)

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    @property
    def donate_argnums(self) -> tuple[int, ...]:
        """Of :meth:`function`, as :func:`jax.jit` takes them."""
        return tuple(range(len(self.sizes))) if self.donated else ()

    def split(self, flat: Array) -> list[Array]:
        """The arrays of a tree that was one."""
        return np.split(flat, np.cumsum(self.sizes)[:-1])

    @property
    def keeps_shape(self) -> bool:
        return self.op not in RESHAPING

    def traffic(self, n: int) -> float:
        """The bytes that each of ``n`` participants moves at least: those of the bus bandwidth."""
        op = OPERATIONS["psum" if self.op in ("tree", "step") else self.op]
        return self.nbytes * op.factor(n)

    def function(self) -> Callable[..., Any]:
        """Of named axes: what users write. Takes the arrays of :func:`operands`."""
        if self.op == "tree":
            return lambda *tree: tuple(lax.psum(tree, AXIS))
        if self.op == "step":
            return lambda *params: step(params, lambda grads: lax.pmean(grads, AXIS))
        call = OPERATIONS[self.op].jax
        return lambda x: (call(x),)


def step(params: Sequence[Any], mean: Callable[[Any], Any]) -> tuple[Any, ...]:
    """One step of gradient descent of a small network, the gradients averaged by ``mean``."""

    def loss(params: Sequence[Any]) -> Any:
        x = jnp.linspace(-1, 1, ROWS * params[0].shape[0], dtype=params[0].dtype).reshape(ROWS, -1)
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    grads = mean(list(jax.grad(loss)(list(params))))
    return tuple(w - RATE * g for w, g in zip(params, grads, strict=True))


def make_workload(op: str, nbytes: int, dtype: Any, n: int, **options: Any) -> Workload:
    """The work of about ``nbytes`` bytes; as in nccl-tests, of the larger of operand and result.

    Raises:
        ValueError: ``op`` has no such mode.
    """
    dtype = np.dtype(dtype)
    elements = max(1, nbytes // dtype.itemsize)
    if op == "step":
        sizes = (max(1, math.isqrt(elements // LAYERS)) ** 2,) * LAYERS
    elif op in ("all_gather", "psum_scatter", "all_to_all"):
        sizes = (max(1, elements // n) * n,)
    else:
        sizes = (elements,)
    work = Workload(op, sizes, dtype, **options)
    for wish, what in ((work.mode == "loop", "run in a loop"), (work.donated, "donate its operand")):
        if wish and not work.keeps_shape:
            raise ValueError(
                message("bench", f"an operation that can {what}", op, "Its result has another shape: leave that out.")
            )
    return work


def make_tree(name: str, dtype: Any, **options: Any) -> Workload:
    """The work of a model's gradients, a key of :data:`TREES`."""
    return Workload("tree", tuple(TREES[name]), np.dtype(dtype), **options)


def operands(work: Workload, participant: int, n: int, *, zeros: bool = False) -> list[Array]:
    """What one participant passes: whole numbers, small enough that no sum rounds; or zeros, which never overflow."""
    return [operand(work, leaf, participant, n, zeros=zeros) for leaf in range(len(work.sizes))]


def operand(work: Workload, leaf: int, participant: int, n: int, *, zeros: bool = False) -> Array:
    """One array of :func:`operands`."""
    size = work.sizes[leaf]
    if work.op == "step":  # the same for all participants: their mean is what one computes alone
        return np.eye(math.isqrt(size), dtype=work.dtype) * (0.5 + 0.1 * leaf)
    if work.op == "all_gather":
        size //= n
    shape = (n, size // n) if work.op in OPERATIONS and OPERATIONS[work.op].blocks else (size,)
    if zeros:
        return np.zeros(shape, work.dtype)
    values = (np.arange(size) + leaf) % 5 + participant % 3
    values[participant % size] += 1  # tells those apart whose numbers differ by 3
    return values.astype(work.dtype).reshape(shape)


def expected(work: Workload, participant: int, n: int, times: int) -> list[Array]:
    """What one participant must get from what all pass, after ``times`` calls in a row, by NumPy."""
    if work.op == "step":
        params = operands(work, participant, n)
        for _ in range(times):
            params = [np.asarray(w) for w in jax.jit(lambda *p: step(p, lambda g: g))(*params)]
        return params
    call = OPERATIONS["psum" if work.op == "tree" else work.op].expected

    def result(leaf: int) -> Array:
        return _chain(call, lambda i: operand(work, leaf, i, n), n, times)(participant)

    return list(map(result, range(len(work.sizes))))


def _chain(call: Callable[[Row, int, int], Array], row: Row, n: int, times: int) -> Row:
    for _ in range(times):
        row = functools.cache(functools.partial(lambda row, i: call(row, i, n), row))
    return row


def count_wrong(work: Workload, got: Sequence[Any], want: Sequence[Array], tolerance: float = 0.0) -> int:
    """How many elements differ; those of a training step, and of narrow floats, by more than rounding.

    ``tolerance`` is relative: of what is sent in fewer bits than it has.
    """
    if _narrow(work.dtype):
        tolerance = max(tolerance, float(jnp.finfo(work.dtype).eps))
    if len(got) != len(want):
        return work.count
    wrong = 0
    for mine, right in zip(got, want, strict=True):
        y = np.asarray(mine)
        if y.shape != right.shape:
            wrong += right.size
        elif work.op == "step":
            wrong += int(np.sum(~np.isclose(y, right, rtol=1e-3, atol=1e-5)))
        else:
            wrong += int(np.sum(~np.isclose(y.astype(right.dtype), right, rtol=tolerance, atol=0)))
    return wrong
