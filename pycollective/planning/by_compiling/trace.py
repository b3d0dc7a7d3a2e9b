"""A step as a program without data: its arguments, which of them are state, and its text for other processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from pycollective.errors import fail, message
from pycollective.planning.by_compiling.candidates import Leaf

_WHERE = "plan"


@dataclass(frozen=True)
class Signature:
    """What a step takes and returns.

    Attributes:
        in_tree: the tree of its arguments, a tuple.
        out_tree: the tree of its results.
        paths: the place of each argument leaf, in words.
        shapes: the shape and dtype of each argument leaf.
        outs: for each leaf of its results the place of the argument leaf that it replaces in the next step, or None.
        donate_argnums: the arguments whose memory the results may take.
        states: the arguments that the step returns again.
    """

    in_tree: Any
    out_tree: Any
    paths: tuple[str, ...]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    outs: tuple[int | None, ...]
    donate_argnums: tuple[int, ...]
    states: tuple[int, ...] = ()


@dataclass(frozen=True)
class Step:
    """A step as a program.

    Attributes:
        program: the program of its leaves, as :mod:`jax.export` writes it.
        leaves: the leaves of its arguments.
        donated: the places of the argument leaves whose memory the results may take.
        signature: its trees.
    """

    program: bytes
    leaves: tuple[Leaf, ...]
    donated: tuple[int, ...]
    signature: Signature


def trace(step: Callable[..., Any], args: tuple[Any, ...], donate_argnums: int | Sequence[int]) -> Step:
    """Traces a step for arguments of these shapes.

    Raises:
        ValueError: JAX cannot trace it, or it has side effects.
    """
    donated = _donated(donate_argnums, len(args))
    try:
        shapes = jax.eval_shape(lambda *xs: xs, *args)
        jaxpr, out = jax.make_jaxpr(step, return_shape=True)(*shapes)
    except Exception as error:
        got = f"{type(error).__name__}: {_first_line(error)}"
        fail(ValueError, _WHERE, None, "a step that JAX can trace with these arguments", got, "Call it once yourself.")
    if jaxpr.effects:
        got = ", ".join(sorted(str(effect) for effect in jaxpr.effects))
        remedy = "Leave out callbacks, jax.debug.print and collectives of this package for planning."
        fail(ValueError, _WHERE, None, "a step without side effects", got, remedy)
    with_paths, in_tree = jax.tree_util.tree_flatten_with_path(shapes)
    out_tree = jax.tree.structure(out)
    found = _states(shapes, out, positional_names(step, len(shapes)))

    def flat(*leaves: Any) -> list[Any]:
        return jax.tree.leaves(step(*jax.tree.unflatten(in_tree, leaves)))

    try:
        program = jax.export.export(jax.jit(flat), platforms=["cpu"])(*(leaf for _, leaf in with_paths)).serialize()
    except (NotImplementedError, ValueError) as error:
        got = f"{type(error).__name__}: {_first_line(error)}"
        remedy = "Leave out what runs outside of XLA, such as jax.pure_callback and jax.ffi.ffi_call, for planning."
        fail(ValueError, _WHERE, None, "a step that jax.export can hand to other processes", got, remedy)
    except ImportError as error:
        remedy = "Install it: pip install 'pycollective[plan]', or flatbuffers."
        raise ImportError(
            message(_WHERE, "the package flatbuffers, with which JAX writes programs", error, remedy)
        ) from None
    starts = [0]
    for arg in shapes:
        starts.append(starts[-1] + len(jax.tree.leaves(arg)))
    argument_of = [number for number, arg in enumerate(shapes) for _ in jax.tree.leaves(arg)]
    states = tuple(sorted({number for number, _ in found if number is not None}))
    leaves = tuple(
        Leaf(
            jax.tree_util.keystr(path),
            leaf.shape,
            leaf.size * leaf.dtype.itemsize,
            states.index(argument_of[i]) if argument_of[i] in states else None,
        )
        for i, (path, leaf) in enumerate(with_paths)
    )
    outs: list[int | None] = []
    for number, element in found:
        count = len(jax.tree.leaves(element))
        outs += [None if number is None else starts[number] + i for i in range(count)]
    signature = Signature(
        in_tree,
        out_tree,
        tuple(leaf.path for leaf in leaves),
        tuple(leaf for _, leaf in with_paths),
        tuple(outs),
        donated,
        states,
    )
    places = tuple(i for i, number in enumerate(argument_of) if number in donated)
    return Step(bytes(program), leaves, places, signature)


def _donated(numbers: int | Sequence[int], count: int) -> tuple[int, ...]:
    """The numbers of arguments, counted from 0."""
    numbers = (numbers,) if isinstance(numbers, int) else tuple(numbers)
    if any(not -count <= number < count for number in numbers):
        remedy = "Count them from 0."
        fail(ValueError, _WHERE, None, f"donate_argnums among the {count} arguments", str(numbers), remedy)
    return tuple(number % count for number in numbers)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


def positional_names(step: Callable[..., Any], count: int | None = None) -> list[str]:
    """The names of the positional arguments of a function, or of so many; "" for one that has no name.

    Example:
        >>> positional_names(lambda params, *batch: 0, 3)
        ['params', '', '']
    """
    try:
        parameters = list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):  # a function that is not written in Python
        parameters = []
    names = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return names if count is None else [*names, *[""] * (count - len(names))][:count]


def states_of(step: Callable[..., Any], args: tuple[Any, ...]) -> tuple[int, ...]:
    """The numbers of the arguments that a step returns again; the arguments are shapes."""
    found = _states(args, jax.eval_shape(step, *args), positional_names(step, len(args)))
    return tuple(sorted({number for number, _ in found if number is not None}))


def _states(args: tuple[Any, ...], out: Any, names: Sequence[str]) -> list[tuple[int | None, Any]]:
    """The parts of a result, each with the number of the argument that it replaces, or None.

    The result itself, or an element of the tuple that it is, replaces the first argument with the same tree and shapes.
    So do parts further inside, in dictionaries and other trees. There an array by itself replaces an argument only if
    it stands under the argument's name: many arrays have the shape of another one.
    """
    free = {number for number, arg in enumerate(args) if jax.tree.leaves(arg)}

    def parts(element: Any, key: Any, *, inside: bool) -> list[tuple[int | None, Any]]:
        alone = jax.tree_util.treedef_is_leaf(jax.tree.structure(element))
        for number in sorted(free):
            if _alike(args[number], element) and not (inside and alone and key != names[number]):
                free.remove(number)
                return [(number, element)]
        if alone or not jax.tree.leaves(element):
            return [(None, element)]
        children, _ = jax.tree_util.tree_flatten_with_path(element, is_leaf=lambda part: part is not element)
        deeper = element is not out or type(out) not in (tuple, list)
        return [one for path, child in children for one in parts(child, _key_of(path), inside=deeper)]

    return parts(out, None, inside=False)


def _key_of(path: Any) -> Any:
    """The key of a part in the tree around it; None for a place in a sequence."""
    return getattr(path[0], "key", getattr(path[0], "name", None))


def _alike(a: Any, b: Any) -> bool:
    if jax.tree.structure(a) != jax.tree.structure(b):
        return False
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all((x.shape, x.dtype) == (y.shape, y.dtype) for x, y in pairs)
