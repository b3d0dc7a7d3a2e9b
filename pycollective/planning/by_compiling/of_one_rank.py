"""A step that communicates, as the same step of one rank: what global arrays mean, in which nothing is sent.

A program that runs on any number of ranks runs on one as well, with the whole batch and the whole state. There each
collective returns its operand. XLA then spreads what is left over devices, and adds the collectives that this takes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn

from pycollective.errors import fail
from pycollective.jax_support import jaxprs, rewriting
from pycollective.ordering.effect import effect
from pycollective.primitives import define, messages, reductions
from pycollective.spmd.device_program import replace_device_programs

_WHERE = "plan"


def with_axis(fun: Callable[..., Any], axis_name: Any) -> Callable[..., Any]:
    """Returns a function in which an axis has a name and one entry.

    Example:
        >>> with_axis(lambda x: jax.lax.psum(x, "ranks"), "ranks")(jnp.arange(2)).tolist()
        [0, 1]
    """

    def bound(*args: Any, **kwargs: Any) -> Any:
        mapped = jax.vmap(partial(fun, **kwargs), in_axes=None, out_axes=0, axis_name=axis_name, axis_size=1)
        return jax.tree.map(lambda y: y[0], mapped(*args))

    return bound


def without_mapped_axis(args: Sequence[Any], in_axes: Any) -> list[Any]:
    """Returns the arguments of a ``pmap`` over one device without the axis over which they are mapped.

    Raises:
        ValueError: that axis has another length than 1.

    Example:
        >>> [x.shape for x in without_mapped_axis([jnp.ones((1, 3)), jnp.ones(2)], (0, None))]
        [(3,), (2,)]
    """

    def squeezed(x: Any, axis: int | None) -> Any:
        if axis is None:
            return x
        if jnp.shape(x)[axis] != 1:
            got = f"length {jnp.shape(x)[axis]}"
            remedy = "Cut the arguments by jax.local_device_count() and the number of ranks."
            fail(ValueError, _WHERE, None, "a mapped axis of one entry, for the one device of one rank", got, remedy)
        return jnp.squeeze(x, axis)

    axes = tuple(in_axes) if isinstance(in_axes, (tuple, list)) else (in_axes,) * len(args)
    found = []
    for arg, axis in zip(args, axes, strict=True):
        leaves, tree = jax.tree.flatten(arg)
        of_leaves = jax.tree.leaves(
            jax.tree.broadcast(axis, arg, is_leaf=lambda axis: axis is None), is_leaf=lambda axis: axis is None
        )
        found.append(jax.tree.unflatten(tree, map(squeezed, leaves, of_leaves)))
    return found


def without_collectives(step: Callable[..., Any], *args: Any) -> Callable[..., Any]:
    """Returns a step for arguments of these shapes that computes the same on one rank, without collectives.

    Messages between ranks stay. So does what else has side effects.

    Args:
        step: a function of trees of arrays, traced here.
        args: its arguments, arrays or :class:`jax.ShapeDtypeStruct`.
    """
    closed, out = jax.make_jaxpr(step, return_shape=True)(*args)
    closed = replace_device_programs(closed)
    tree = jax.tree.structure(out)

    def alone(*args: Any) -> Any:
        return jax.tree.unflatten(tree, rewriting.evaluate(closed, _change, *jax.tree.leaves(args)))

    alone.__signature__ = inspect.signature(step)  # type: ignore[attr-defined]
    return alone


def _change(eqn: JaxprEqn) -> rewriting.Replacement | None:
    if eqn.primitive in jaxprs.PLAIN:
        return None
    if "comm" in eqn.params:
        return _on_one_rank(eqn) if eqn.params["comm"].size == 1 else None
    if not any(effect in one.effects for one in jaxprs.inner_jaxprs(eqn)):
        return None
    inner = jaxprs.called_jaxpr(eqn)
    if inner is not None:
        return partial(rewriting.evaluate, inner, _change)
    return lambda *operands: jaxprs.bind_with_jaxprs(eqn, operands, _changed)


def _changed(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The program without its collectives, and without their effect: JAX gives it to all branches of a conditional."""
    new = _rewriter(closed)
    if any(effect in eqn.effects for eqn in new.jaxpr.eqns):
        return new
    return ClosedJaxpr(new.jaxpr.replace(effects=new.jaxpr.effects - {effect}), new.consts)


_rewriter = rewriting.Rewriter(_change)


def _on_one_rank(eqn: JaxprEqn) -> rewriting.Replacement | None:
    if eqn.primitive in (reductions.allreduce_p, messages.barrier_p):
        return lambda *operands: operands
    collective = define.COLLECTIVES.get(eqn.primitive)
    return collective and (lambda x: [collective.on_one_rank(x, **eqn.params)])
