"""Ways to spread a step over devices: shapes of a mesh, and for each array the axes along which it is cut."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import jax

DATA, MODEL = "data", "model"

_KEYS = re.compile(r"\[[^\[\]]*\]|\.\w+")

Axes = str | tuple[str, ...] | None
Spec = tuple[Axes, ...]
"""For each dimension of an array the axes of the mesh along which it is cut, or None; what is missing is not cut."""


class Leaf(NamedTuple):
    """An array that a step takes.

    Attributes:
        path: its place in the arguments, for messages.
        shape: its shape.
        nbytes: its bytes.
        state: the number of the argument among those that the step returns as well; None for data.
    """

    path: str
    shape: tuple[int, ...]
    nbytes: int
    state: int | None

    @property
    def name(self) -> str:
        """The last key of its path.

        Example:
            >>> Leaf("[1].mu['w']", (4, 4), 64, 1).name
            "['w']"
        """
        return _KEYS.findall(self.path)[-1] if _KEYS.search(self.path) else self.path


class Candidate(NamedTuple):
    """A way to spread a step.

    Attributes:
        data: the number of devices along the axis of the examples.
        model: the number of devices along the other axis.
        rule: how it was found, in words.
        specs: how each argument leaf is cut.
    """

    data: int
    model: int
    rule: str
    specs: tuple[Spec, ...]

    @property
    def mesh(self) -> dict[str, int]:
        """From the axes of the mesh to their sizes."""
        return {DATA: self.data, MODEL: self.model}

    @property
    def key(self) -> tuple[int, tuple[Spec, ...]]:
        """The same for candidates that differ in words, or in the name of their only axis."""
        only = DATA if 1 in (self.data, self.model) else None
        specs = tuple(tuple(axes and (only or axes) for axes in spec) for spec in self.specs)
        return 1 if only else self.data, specs

    def argument_bytes(self, leaves: Sequence[Leaf]) -> int:
        """The bytes of a device's parts of the arguments."""
        return sum(
            leaf.nbytes // math.prod(_parts(axes, self.mesh) for axes in spec)
            for leaf, spec in zip(leaves, self.specs, strict=True)
        )


def candidates(leaves: Sequence[Leaf], devices: int) -> Iterator[Candidate]:
    """Yields the ways that follow rules, each once.

    The examples of the data are cut along the first axis, where they divide, or over all devices. Of the state,
    matrices are cut along the second axis: by their larger dimension, which for two layers in a row is what Megatron
    does, or all by the first or the last one. Along the first axis the state is whole (data parallelism), or cut (ZeRO
    stage 3, FSDP), or cut but for the first argument (ZeRO stage 1, where the first is the parameters and the second
    the optimizer's state).
    """
    known = set()
    for candidate in itertools.chain(*(_by_rules(leaves, devices, over_all=over_all) for over_all in (False, True))):
        if candidate.key not in known:
            known.add(candidate.key)
            yield candidate


def _by_rules(leaves: Sequence[Leaf], devices: int, *, over_all: bool) -> Iterator[Candidate]:
    """Those with the examples cut over all devices, where matrices are cut, or the others."""
    for model in (n for n in range(1 + over_all, devices + 1) if devices % n == 0):
        mesh = {DATA: devices // model, MODEL: model}
        by_data: dict[str, Callable[[Leaf], bool]] = {"state whole": lambda _: False}
        if mesh[DATA] > 1 and not over_all:
            by_data["state cut"] = lambda _: True
            by_data["state cut but for its first argument"] = lambda leaf: leaf.state != 0
        examples = [(DATA, MODEL), (DATA,)] if over_all else [(DATA,)]
        by_model = ("larger", "first", "last") if model > 1 else ("",)
        for which, (how, cuts) in itertools.product(by_model, by_data.items()):
            dims = _model_dims(leaves, model, which)
            specs = tuple(
                _state_spec(leaf, mesh, dim, cut=cuts(leaf))
                if leaf.state is not None
                else _data_spec(leaf, mesh, examples)
                for leaf, dim in zip(leaves, dims, strict=True)
            )
            rule = how if model == 1 else f"{how}, matrices cut by their {which} dimension"
            rule = f"{rule}, examples over all devices" if over_all else rule
            yield Candidate(mesh[DATA], model, rule, specs)


def variations(candidate: Candidate, leaves: Sequence[Leaf], number: int) -> Iterator[Candidate]:
    """Yields the candidates that cut one leaf, and those of its shape, in another way.

    Args:
        candidate: a way to spread the step.
        leaves: the arguments.
        number: the place of the leaf.
    """
    shape, now = leaves[number].shape, candidate.specs[number]
    alike = [i for i, leaf in enumerate(leaves) if (leaf.shape, candidate.specs[i]) == (shape, now)]
    for spec in _all_specs(shape, candidate.mesh):
        if spec != now:
            specs = tuple(spec if i in alike else old for i, old in enumerate(candidate.specs))
            rule = f"{candidate.rule}; {leaves[number].path} {jax.P(*spec)}"
            yield candidate._replace(specs=specs, rule=rule)


def _all_specs(shape: tuple[int, ...], mesh: dict[str, int]) -> Iterator[Spec]:
    """All ways to cut an array along one dimension for each axis, where that divides."""
    axes = [axis for axis, size in mesh.items() if size > 1]
    for dims in itertools.product([None, *range(len(shape))], repeat=len(axes)):
        spec = [
            _axes((axis for axis, at in zip(axes, dims, strict=True) if at == dim), mesh) for dim in range(len(shape))
        ]
        if all(_divide(cut, mesh, n) for n, cut in zip(shape, spec, strict=True) if cut):
            yield tuple(spec)


def _axes(names: Iterable[str], mesh: dict[str, int]) -> Axes:
    """Those of some axes that cut anything, as JAX has them in a sharding."""
    several = tuple(name for name in names if mesh[name] > 1)
    return several if len(several) > 1 else next(iter(several), None)


def _parts(axes: Axes, mesh: dict[str, int]) -> int:
    """The number of parts into which axes cut."""
    return math.prod(mesh[axis] for axis in ((axes,) if isinstance(axes, str) else axes or ()))


def _divide(axes: Axes, mesh: dict[str, int], n: int) -> bool:
    """Whether axes cut so many elements into equal parts that are not empty."""
    return n > 0 and n % _parts(axes, mesh) == 0


def _model_dims(leaves: Sequence[Leaf], model: int, which: str) -> list[int | None]:
    """For each leaf the dimension that is cut along the second axis."""
    dims: list[int | None] = []
    last = 0  # of the last two dimensions of the matrix before, the one that was cut
    # By shape and name: an optimizer's moments are cut as their parameter is.
    square: dict[tuple[tuple[int, ...], str], int] = {}
    for leaf in leaves:
        choice = None
        if which and leaf.state is not None and len(leaf.shape) >= 2:
            rows, columns = leaf.shape[-2:]
            if which != "larger":
                side = int(which == "last")
            elif rows != columns:
                side = int(columns > rows)
            else:
                side = square.setdefault((leaf.shape, leaf.name), 1 - last)
            dim = len(leaf.shape) - 2 + side
            if leaf.shape[dim] % model == 0 and leaf.shape[dim] > 0:
                choice, last = dim, side
        dims.append(choice)
    return dims


def _state_spec(leaf: Leaf, mesh: dict[str, int], model_dim: int | None, *, cut: bool) -> Spec:
    spec: list[Axes] = [None] * len(leaf.shape)
    if model_dim is not None:
        spec[model_dim] = MODEL
    if cut and mesh[DATA] > 1:
        free = [dim for dim, n in enumerate(leaf.shape) if spec[dim] is None and _divide(DATA, mesh, n)]
        if free:
            spec[max(free, key=lambda dim: leaf.shape[dim])] = DATA
    return tuple(spec)


def _data_spec(leaf: Leaf, mesh: dict[str, int], examples: Sequence[tuple[str, ...]]) -> Spec:
    """The first dimension is cut by the first of some axes that divide it."""
    if not leaf.shape:
        return ()
    choices = (_axes(names, mesh) for names in examples)
    first = next((axes for axes in choices if _divide(axes, mesh, leaf.shape[0])), None)
    return (first, *[None] * (len(leaf.shape) - 1))
