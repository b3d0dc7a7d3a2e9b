"""``jit``: :func:`jax.jit` for programs that speak with other ranks, at its own speed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any, Generic, ParamSpec, TypeVar, overload

import jax

from pycollective import ordering
from pycollective.communicator import world

P = ParamSpec("P")
R = TypeVar("R")


class Jitted(Generic[P, R]):
    """A compiled function; what :func:`jit` returns."""

    def __init__(self, fun: Callable[P, R], options: dict[str, Any]) -> None:
        functools.update_wrapper(self, fun)
        # At top level: one region, dispatched by JAX's fast path. Inside a trace the calls must keep their order
        # with those around them: there it is plain jax.jit, whose effect JAX orders, differentiates and batches.
        donates = any(options.get(name) not in (None, ()) for name in ("donate_argnums", "donate_argnames"))
        self._region = jax.jit(ordering.as_region(fun, donates=donates), **options)
        self._nested = jax.jit(fun, **options)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if ordering.may_be_region():
            return self._region(*args, **kwargs)[0]
        return self._nested(*args, **kwargs)

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)  # a method, as jax.jit's

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Lowered:
        """The program of a top-level call, as :meth:`jax.stages.Wrapped.lower`. Its result has an extra last part."""
        return self._region.lower(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets the compiled programs."""
        self._region.clear_cache()
        self._nested.clear_cache()


@overload
def jit(fun: Callable[P, R], **options: Any) -> Jitted[P, R]: ...


@overload
def jit(fun: None = None, **options: Any) -> Callable[[Callable[P, R]], Jitted[P, R]]: ...


def jit(fun: Callable[P, R] | None = None, **options: Any) -> Any:
    """Compiles a function whose body may call collectives; also a decorator, with or without options.

    The function runs on one device of each rank and its arrays are the rank's own. All ranks must call it in the
    same order. A call costs about as much as one of :func:`jax.jit` without collectives; plain ``jax.jit`` works too,
    but its programs with ordered effects take JAX's slow dispatch.

    Args:
        fun: a function that :func:`jax.jit` can compile.
        **options: those of :func:`jax.jit`: ``static_argnums``, ``static_argnames``, ``donate_argnums``, ... A donated
            array's buffer is reduced in place.

    Returns:
        The compiled function. It can be differentiated, batched and called inside other JAX functions.

    Order: calls happen in the order of the program, and programs in the order in which one Python thread calls them.
    Source: :func:`jax.jit`.

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> @pc.jit
        ... def norm(x):
        ...     return jnp.sqrt(pc.psum(jnp.vdot(x, x)))
        >>> bool(jnp.isclose(norm(jnp.ones(4)), jnp.sqrt(4.0 * pc.axis_size())))
        True
    """
    if fun is None:
        return functools.partial(jit, **options)
    world()  # MPI and the transport start before anything is compiled
    return Jitted(fun, options)
