"""``jit``: :func:`jax.jit` with an axis of ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, overload

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from pycollective.named_axes.mesh import Mesh, line
from pycollective.named_axes.names import AxisName
from pycollective.ordering import jaxprs
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.setup import devices_of_this_rank
from pycollective.ranks.world import when_needed
from pycollective.spmd.compiled import CompiledFunction
from pycollective.spmd.tracing import PlacedArguments, Program, pmapped, run, sharded

P = ParamSpec("P")
R = TypeVar("R")


def _named(
    fun: Callable[..., Any], axis_name: AxisName, mesh: Callable[[], Mesh], check_vma: bool
) -> Callable[..., Any]:
    """``fun`` with the axis of ``mesh()``, which has one device of this rank, bound: rank-local arrays in and out."""
    spec = PartitionSpec(axis_name)  # of an axis in front, along which the global arrays have one for each rank

    @functools.wraps(fun)
    def bound(*args: Any, **kwargs: Any) -> Any:
        arrays, with_arrays = jaxprs.split_arrays(args, kwargs)

        def one_device(*blocks: Any) -> Any:
            args, kwargs = with_arrays([jnp.squeeze(x, 0) for x in blocks])
            return jax.tree.map(lambda y: jnp.expand_dims(y, 0), fun(*args, **kwargs))

        def trace() -> tuple[PlacedArguments, Program]:
            stacked = [jnp.expand_dims(x, 0) for x in arrays]
            placed = PlacedArguments(mesh(), stacked, [spec] * len(arrays), with_arrays)
            if check_vma:
                return placed, sharded(one_device, placed, in_specs=spec, out_specs=spec, check_vma=True)
            return placed, pmapped(one_device, placed, spec)

        results = run("jit", fun, mesh().comm, trace)
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
    """Compiles a function whose body may call collectives; also a decorator, with or without options.

    The function runs on one device of each rank and its arrays are the rank's own. All ranks must call it in the
    same order. A call costs about as much as one of :func:`jax.jit` without collectives; plain ``jax.jit`` works too,
    but its programs with ordered effects take JAX's slow dispatch.

    Args:
        fun: a function that :func:`jax.jit` can compile.
        axis_name: name of the axis of ranks, for :mod:`jax.lax`'s collectives in ``fun`` and whatever it calls.
        comm: the ranks along that axis; default the world.
        check_vma: False for the meaning of :func:`jax.pmap`, where the cotangent of a sum over the axis is the sum of
            all ranks' cotangents; True for that of :func:`jax.shard_map`, whose types tell what varies along the axis:
            the sum is one value that all ranks share, and the gradient of a summed loss counts it once. The arguments
            vary along the axis.
        **options: those of :func:`jax.jit`: ``static_argnums``, ``static_argnames``, ``donate_argnums``, ... A donated
            array's buffer is reduced in place.

    Returns:
        The compiled function. It can be differentiated, batched and called inside other JAX functions.

    Raises:
        NotImplementedError: at trace time, for a collective over ``axis_name`` that this package does not know.

    Order: calls happen in the order of the program, and programs in the order in which one Python thread calls them.
    Source: :func:`jax.jit`.

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

    @functools.cache
    def mesh() -> Mesh:
        comm = ranks()  # before devices are asked for: MPI and the transport start with it
        return line(axis_name, comm, devices_of_this_rank()[:1])

    def place(args: Any, kwargs: Any) -> Any:
        arrays, with_arrays = jaxprs.split_arrays(args, kwargs)
        return PlacedArguments(mesh(), arrays, [PartitionSpec()] * len(arrays), with_arrays).on_devices()

    return CompiledFunction(_named(fun, axis_name, mesh, check_vma), options, place)
