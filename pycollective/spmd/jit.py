"""``jit``: :func:`jax.jit` with an axis of ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pycollective.jax_support import jaxprs
from pycollective.named_axes.mesh import Mesh, one_axis_mesh
from pycollective.named_axes.names import AxisName
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.setup import devices_of_this_rank
from pycollective.ranks.world import when_needed
from pycollective.spmd.compiled import CompiledFunction
from pycollective.spmd.tracing import (
    PlacedArguments,
    TracedFunction,
    trace_and_apply,
    trace_as_pmap,
    trace_as_shard_map,
)

P = ParamSpec("P")
R = TypeVar("R")


def _bind_axis(
    fun: Callable[..., Any], axis_name: AxisName, mesh: Callable[[], Mesh], check_vma: bool
) -> Callable[..., Any]:
    """Binds the axis of ranks, the only axis of ``mesh()``. Arguments and results are the rank's own arrays."""
    spec = PartitionSpec(axis_name)  # the global arrays have a first axis with one entry for each rank

    @functools.wraps(fun)
    def bound(*args: Any, **kwargs: Any) -> Any:
        arrays, with_arrays = jaxprs.split_arrays(args, kwargs)

        def one_device(*blocks: Any) -> Any:
            args, kwargs = with_arrays([jnp.squeeze(x, 0) for x in blocks])
            return jax.tree.map(lambda y: jnp.expand_dims(y, 0), fun(*args, **kwargs))

        def trace() -> tuple[PlacedArguments, TracedFunction]:
            stacked = [jnp.expand_dims(x, 0) for x in arrays]
            placed = PlacedArguments(mesh(), stacked, [spec] * len(arrays), with_arrays)
            if check_vma:
                return placed, trace_as_shard_map(one_device, placed, in_specs=spec, out_specs=spec, check_vma=True)
            return placed, trace_as_pmap(one_device, placed, spec)

        results = trace_and_apply("jit", fun, mesh().comm, trace)
        return jax.tree.map(lambda y: jnp.squeeze(y, 0), results)

    return bound


@overload
def jit(
    fun: Callable[P, R],
    *,
    axis_name: AxisName | None = None,
    comm: Communicator | None = None,
    check_vma: bool = False,
    **options: Any,
) -> CompiledFunction[P, R]: ...


@overload
def jit(
    fun: None = None,
    *,
    axis_name: AxisName | None = None,
    comm: Communicator | None = None,
    check_vma: bool = False,
    **options: Any,
) -> Callable[[Callable[P, R]], CompiledFunction[P, R]]: ...


def jit(
    fun: Callable[P, R] | None = None,
    *,
    axis_name: AxisName | None = None,
    comm: Communicator | None = None,
    check_vma: bool = False,
    **options: Any,
) -> Any:
    """Compiles a function whose body may call collectives: ``y_r = fun(x_r)`` on each rank r.

    It is also a decorator, with or without options. The function runs on one device of each rank, and its arrays are
    the rank's own. All ranks must call their compiled functions in the same order. A call costs about as much as a call
    of :func:`jax.jit` without collectives. Plain ``jax.jit`` works as well, but JAX dispatches a program with ordered
    effects more slowly.

    Args:
        fun: a function that :func:`jax.jit` can compile. None, the default, makes a decorator.
        axis_name: the name of the axis of ranks, for :mod:`jax.lax`'s collectives in ``fun`` and in the functions that
            it calls. Default None: no axis is bound.
        comm: the communicator whose ranks are along the axis. Default None: the world.
        check_vma: whether JAX's types say which values vary along the axis, as in :func:`jax.shard_map`. Then a sum
            over the axis is one value that all ranks share, the gradient of a summed loss counts the sum once, and the
            arguments vary along the axis. Default False, the meaning of :func:`jax.pmap`: the cotangent of a sum over
            the axis is the sum of all ranks' cotangents.
        **options: the options of :func:`jax.jit`: ``static_argnums``, ``static_argnames``, ``donate_argnums``, ... The
            buffer of a donated array can be reduced in place.

    Returns:
        The compiled function, with the arguments and results of ``fun``. It can be differentiated, batched, and called
        inside other JAX functions. It has the methods ``lower``, ``trace``, ``eval_shape`` and ``clear_cache`` of
        :func:`jax.jit`.

    Raises:
        NotImplementedError: while tracing, for a collective over ``axis_name`` that this package does not know.
        RuntimeError: at the first call, if the ranks' collectives over ``axis_name`` differ.

    Differentiation:
        Both modes. A derivative outside the function is that of the sum of all ranks' results.

    Order:
        The collectives of a program run in program order. Programs run in the order in which one Python thread calls
        them.

    Source:
        :func:`jax.jit`.

    Example:
        >>> import jax, jax.numpy as jnp, pycollective as pc
        >>> @pc.jit(axis_name="ranks")
        ... def norm(x):
        ...     return jnp.sqrt(jax.lax.psum(jnp.vdot(x, x), "ranks"))
        >>> bool(jnp.isclose(norm(jnp.ones(4)), jnp.sqrt(4.0 * pc.axis_size())))
        True
    """
    if fun is None:
        return functools.partial(jit, axis_name=axis_name, comm=comm, check_vma=check_vma, **options)
    ranks = when_needed("jit", comm)
    if axis_name is None:
        return CompiledFunction(fun, options)

    @functools.lru_cache(maxsize=1)  # the world changes when pycollective.elastic continues after a failure
    def mesh_over(comm: Communicator) -> Mesh:
        return one_axis_mesh(axis_name, comm, devices_of_this_rank()[:1])

    def mesh() -> Mesh:
        return mesh_over(ranks())  # ranks() starts MPI and the transport, which must come before JAX's devices

    def place(args: Any, kwargs: Any) -> Any:
        arrays, with_arrays = jaxprs.split_arrays(args, kwargs)
        return PlacedArguments(mesh(), arrays, [PartitionSpec()] * len(arrays), with_arrays).on_mesh_devices()

    return CompiledFunction(_bind_axis(fun, axis_name, mesh, check_vma), options, place, wrapped=fun)
