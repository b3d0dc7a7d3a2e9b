"""The description of a network by its author: what each of its parts computes, keeps and sends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class MatMul(NamedTuple):
    """Products of matrices (m, k) and (k, n) in the forward pass of one example.

    Attributes:
        m: the number of rows: positions. The rows of several examples form one matrix. They are cut along the axis of
            the context.
        k: the length of the sums.
        n: the number of columns.
        cut: the dimension that is cut along the axis of the model: "k" or "n", or "heads" for attention. In attention
            each head of each example is a product of its own, and k or n is a number of positions, like m.
        heads: the number of heads. Default 1.
        recomputed: whether the backward pass needs the result, so that remat (:func:`jax.checkpoint`) computes it
            again. It does not need a result that is only added to another array and passed to the next part. Default
            True.
    """

    m: int
    k: int
    n: int
    cut: str
    heads: int = 1
    recomputed: bool = True


class Held(NamedTuple):
    """The activations of a part that a compiled program has in memory, as measured and not as the theory needs.

    Each attribute is a pair of numbers of elements for one example: those that are cut along the axes of the model and
    of the context, and those that are cut along the context only.

    Attributes:
        plain: from the forward pass to the backward pass, in a program without a pipeline.
        pipeline: from the forward pass to the backward pass, in a pipeline, which keeps the residuals of
            :func:`jax.vjp`.
        gathered: from the forward pass to the backward pass, with ZeRO 3, which computes cheap values again
            (:func:`pycollective.parallel.gathered`).
        working: in addition, during the backward pass of this part.
        remat: with remat, during the backward pass of a microbatch: the values that XLA computes again too early.
        remat_with_grad_sum: ``remat`` without a pipeline, if gradients are summed over devices.
        remat_gathered: ``remat`` with ZeRO 3.
        remat_working: with remat, in addition, during the backward pass of this part.
    """

    plain: tuple[float, float]
    pipeline: tuple[float, float]
    gathered: tuple[float, float]
    working: tuple[float, float] = (0.0, 0.0)
    remat: tuple[float, float] = (0.0, 0.0)
    remat_with_grad_sum: tuple[float, float] = (0.0, 0.0)
    remat_gathered: tuple[float, float] = (0.0, 0.0)
    remat_working: tuple[float, float] = (0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a network: a layer, say. A pipeline can be cut between any two of them.

    Attributes:
        name: its name.
        cut_parameters: the number of parameters of which a device along the axis of the model has a part.
        whole_parameters: the number of the others.
        products: the products of its forward pass.
        kept: elements for one example that the backward pass needs, and that are cut along the axes of the model and of
            the context.
        kept_whole: elements for one example that the backward pass needs, and that are cut along the context alone.
        passed: elements for one example that go to the next part.
        sums: for each sum along the axis of the model in the forward pass its elements for one example. The backward
            pass has as many.
        ring: elements for one example of keys and values, which go round the axis of the context.
        instructions: the number of XLA's instructions in both passes of a microbatch, as its program's text shows them.
            They count where microbatches are small.
        held: what a compiled program has in memory of it. None for as little as it needs: ``kept`` and ``kept_whole``,
            and with remat those of one part at a time (arXiv:1604.06174).
    """

    name: str
    cut_parameters: int
    whole_parameters: int
    products: Sequence[MatMul]
    kept: int
    kept_whole: int
    passed: int
    sums: Sequence[int] = ()
    ring: int = 0
    instructions: int = 0
    held: Held | None = None

    @property
    def in_memory(self) -> Held:
        """What a program has in memory of it."""
        needed = (float(self.kept), float(self.kept_whole))
        return self.held or Held(plain=needed, pipeline=needed, gathered=needed, remat_working=needed)

    def __post_init__(self) -> None:
        """Makes tuples of what the author may have given as lists, so that equal parts have the same hash."""
        for name in ("products", "sums"):
            object.__setattr__(self, name, tuple(getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network and its training.

    Attributes:
        parts: its parts, in their order.
        examples: the number of examples in a batch, of all devices together.
        heads: what the number of devices along the axis of the model must divide.
        positions: what the number of devices along the axis of the context must divide.
        itemsize: bytes of a parameter, of an activation and of a gradient.
        moments: how many numbers the optimizer keeps for each parameter.
        adding: how many numbers there are for each parameter beside its gradient while gradients are added: those of
            the microbatches of a pipeline, and those of several devices. 0 where they are added in place.
    """

    parts: Sequence[Part]
    examples: int
    heads: int
    positions: int
    itemsize: int = 4
    moments: int = 2
    adding: int = 1


def transformer(
    *,
    layers: int,
    width: int,
    heads: int,
    positions: int,
    vocabulary: int,
    examples: int,
    itemsize: int = 4,
    moments: int = 2,
    fused: bool = False,
) -> Network:
    """Returns a decoder like GPT-2, with an embedding and an output of their own.

    Its layers have 12 width^2 parameters, and 24 positions width^2 + 4 positions^2 width operations for one example in
    the forward pass: D. Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM", arXiv:2104.04473, appendix. What they need to keep is counted as in V. Korthikanti et al., "Reducing
    activation recomputation in large transformer models", arXiv:2205.05198, section 4.1, without dropout.
    With ``fused`` a program has no more than that in memory, and adds gradients as it computes them, as Megatron-LM's
    kernels do. Else it has what XLA for CPUs makes of ``examples/train_gpt.py``, with JAX 0.10.2. That program's are
    also the numbers of instructions, which are those that a microbatch adds to a pipeline.

    Example:
        >>> gpt3 = transformer(layers=96, width=12288, heads=96, positions=2048, vocabulary=51200, examples=1536)
        >>> round(sum(part.cut_parameters for part in gpt3.parts) / 1e9)
        175
    """
    area = width * width
    size = positions * width
    layer = Part(
        name="layer",
        cut_parameters=12 * area,
        whole_parameters=2 * width,
        products=(
            MatMul(positions, width, 3 * width, "n"),
            MatMul(positions, width // heads, positions, "heads", heads),
            MatMul(positions, positions, width // heads, "heads", heads),
            MatMul(positions, width, width, "k"),
            MatMul(positions, width, 4 * width, "n"),
            MatMul(positions, 4 * width, width, "k", recomputed=False),
        ),
        kept=(3 + 1 + 4 + 4) * positions * width + 2 * heads * positions**2,
        kept_whole=4 * positions * width,
        passed=positions * width,
        sums=(positions * width, positions * width),
        ring=2 * positions * width,
        instructions=149,
        held=None
        if fused
        else Held(
            plain=(18.4 * size, 8 * size),
            pipeline=(28 * size, 8 * size),
            gathered=(15 * size, 7 * size),
            working=(11 * size, 2 * size),
            remat=(7.4 * size, 3.2 * size),
            remat_with_grad_sum=(18.4 * size, 8 * size),
            remat_gathered=(3 * size, 1.4 * size),
            remat_working=(22 * size, 10 * size),
        ),
    )
    first = Part(
        name="first",
        cut_parameters=vocabulary * width,
        whole_parameters=positions * width,
        products=(),
        kept=0,
        kept_whole=positions,
        passed=positions * width,
        sums=(positions * width,),
        instructions=33,
    )
    last = Part(
        name="last",
        cut_parameters=vocabulary * width,
        whole_parameters=width,
        products=(MatMul(positions, width, vocabulary, "n"),),
        kept=positions * vocabulary,
        kept_whole=2 * positions * width,
        passed=0,
        sums=(positions, positions, positions),
        instructions=82,
    )
    parts = (first, *(layer for _ in range(layers)), last)
    return Network(
        parts=parts,
        examples=examples,
        heads=heads,
        positions=positions,
        itemsize=itemsize,
        moments=moments,
        adding=0 if fused else 1,
    )
