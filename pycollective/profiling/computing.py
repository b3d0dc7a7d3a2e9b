"""Measures how fast the devices compute, while all of them do: they share caches, memory and perhaps cores."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax import lax

import pycollective as pc
from pycollective.planning.curves import Curve
from pycollective.planning.prediction import predict
from pycollective.planning.profile import Profile
from pycollective.planning.program_work import work_of
from pycollective.planning.timing import settled_s, slowest_s
from pycollective.transport.mpi import MPI

Array = Any

SMALLEST = (1, 4, 16, 64, 256, 512)
"""The smallest number of m, k and n in the products that are measured."""

COLUMNS = (4, 32, 256)
"""The number of columns in the products of matrices that lie transposed."""

TRANSPOSED = ((64, 64), (256, 256), (256, 768), (256, 3072), (2048, 2048))
"""The shapes of arrays that are read along the columns: of activations of some hundred rows, and of a large matrix."""

CHANNELS = (4, 16, 32, 256)
"""The numbers of channels before and after the convolutions that are measured. XLA's library does those from 32 on."""

_IMAGE, _WINDOW = 16, 3
_SMALL, _LAYERS = 64, 32  # rows and columns, and layers, of the program of many instructions

_SERIES, _SERIES_S, _MOST_CALLS = 5, 0.006, 1000  # of the timed calls of one size
_LONGEST_S = 0.05  # a call that takes longer is the last one of its curve
_TOUCHED = 1 << 29  # bytes
_LARGE, _CACHES = 1 << 20, 128 << 20  # bytes: of arguments that are in turns others, and of these together


def touch_memory() -> None:
    """Takes memory from the system that the process then keeps: programs find it there, as they do in a long training.

    A program that takes pages for the first time is slower, on some virtual machines 20 times.
    """
    np.ones(min(_TOUCHED, psutil.virtual_memory().available // 16), np.uint8)


def measure_curve(comm: pc.Communicator, sizes: list[int], program: Callable[[int], tuple[Any, list[Array]]]) -> Curve:
    """Measures programs of rising sizes on all ranks at once. All ranks must make this call.

    Args:
        comm: the ranks.
        sizes: the sizes.
        program: returns for a size a function, and its arguments.
    """
    points: dict[int, float] = {}
    for size in sizes:
        function, arguments = program(size)
        points[size] = _median_s(comm, jax.jit(function), arguments)
        if points[size] > _LONGEST_S:
            break
    return Curve.measured(points)


def _median_s(comm: pc.Communicator, run: Callable[..., Any], arguments: list[Array]) -> float:
    """The time of a call on the slowest rank: the median of some series of calls, one after the other as in a step.

    Where ranks share a core, a call after a meeting would have to wait for the other ranks' calls as well, and for the
    core to change hands, which takes longer than a small program.

    Large arguments are other ones in each call. In a step, parameters are not in the caches either: between two uses of
    one the others come by.
    """
    nbytes = sum(x.nbytes for x in arguments)
    copies = max(1, min(32, _CACHES // nbytes)) if nbytes >= _LARGE else 1
    turns = itertools.cycle([[x + 0 for x in arguments] for _ in range(copies)])
    jax.block_until_ready(run(*next(turns)))  # compiles it

    def seconds_of(calls: int) -> float:
        def series() -> None:
            for _ in range(calls):
                jax.block_until_ready(run(*next(turns)))

        return slowest_s(comm.mpi, series) / calls

    # The memory of large results may come from the system in each of some calls, until enough is kept.
    one = settled_s(lambda: seconds_of(1), least=2 if copies == 1 else 6)
    calls = min(math.ceil(_SERIES_S / one), _MOST_CALLS)
    if calls > 1:
        settled_s(lambda: seconds_of(calls))
    return statistics.median(seconds_of(calls) for _ in range(_SERIES))


def measure_products(comm: pc.Communicator, dtype: str) -> dict[int, Curve]:
    """Measures products of matrices whose smallest dimension is one of :data:`SMALLEST`."""
    return {smallest: _products(comm, dtype, smallest) for smallest in SMALLEST}


def _products(comm: pc.Communicator, dtype: str, smallest: int) -> Curve:
    widths = sorted({smallest, *(width for width in (64, 256, 1024, 2048) if width >= smallest)})

    def program(operations: int) -> tuple[Any, list[Array]]:
        width = math.isqrt(operations // (2 * smallest))
        return jnp.dot, [jnp.ones((smallest, width), dtype), jnp.ones((width, width), dtype)]

    return measure_curve(comm, [2 * smallest * width**2 for width in widths], program)


def measure_transposed(comm: pc.Communicator, dtype: str) -> dict[int, Curve]:
    """Measures products of matrices that both lie transposed, with one of :data:`COLUMNS` as the number of columns."""
    return {columns: _transposed(comm, dtype, columns) for columns in COLUMNS}


def _transposed(comm: pc.Communicator, dtype: str, columns: int) -> Curve:
    def multiply(x: Array, y: Array) -> Array:
        return lax.dot_general(x, y, (((0,), (1,)), ((), ())))

    def program(operations: int) -> tuple[Any, list[Array]]:
        width = math.isqrt(operations // (2 * columns))
        return multiply, [jnp.ones((width, width), dtype), jnp.ones((columns, width), dtype)]

    widths = [width for width in (64, 256, 1024) if width >= columns]
    return measure_curve(comm, [2 * columns * width**2 for width in widths], program)


def measure_convolutions(comm: pc.Communicator, dtype: str) -> dict[int, Curve]:
    """Measures convolutions with a window of 3 x 3, with as many channels before as after."""
    return {channels: _convolutions(comm, dtype, channels) for channels in CHANNELS}


def _convolutions(comm: pc.Communicator, dtype: str, channels: int) -> Curve:
    each = 2 * (_IMAGE * _WINDOW * channels) ** 2  # operations for one image

    def convolve(x: Array, kernel: Array) -> Array:
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def program(operations: int) -> tuple[Any, list[Array]]:
        images = jnp.ones((operations // each, _IMAGE, _IMAGE, channels), dtype)
        return convolve, [images, jnp.ones((_WINDOW, _WINDOW, channels, channels), dtype)]

    return measure_curve(comm, [each * images for images in (1, 8, 64)], program)


def measure_streams(comm: pc.Communicator) -> Curve:
    """Measures a pass over arrays that reads two and writes one; the size is all their bytes."""

    def program(nbytes: int) -> tuple[Any, list[Array]]:
        return lambda x, y: 2 * x + y, [jnp.ones(nbytes // 12)] * 2

    return measure_curve(comm, [12 << power for power in (10, 13, 16, 19, 22)], program)


def measure_transposes(comm: pc.Communicator) -> Curve:
    """Measures a pass over two arrays, one of them along the columns; the size is that one's bytes."""
    shapes = {4 * rows * columns: (rows, columns) for rows, columns in TRANSPOSED}

    def program(nbytes: int) -> tuple[Any, list[Array]]:
        rows, columns = shapes[nbytes]
        return lambda x, y: 2 * x + y.T, [jnp.ones((columns, rows)), jnp.ones((rows, columns))]

    return measure_curve(comm, list(shapes), program)


def measure_tanh(comm: pc.Communicator) -> Curve:
    """Measures hyperbolic tangents; the size is their number."""
    return measure_curve(comm, [1 << power for power in (10, 14, 18)], lambda size: (jnp.tanh, [jnp.ones(size)]))


def measure_call(comm: pc.Communicator) -> float:
    """Measures a program that computes nothing, in seconds."""
    return _median_s(comm, jax.jit(lambda x: x + 1), [jnp.float32(0)])


def measure_instruction(comm: pc.Communicator, profile: Profile) -> float:
    """Measures what an instruction takes in a program of many beside what the profile says of it alone, in seconds.

    XLA hands instructions that can run at the same time to other threads, and each product and each sum to a library.
    So the program is one whose instructions depend on each other as those of a training do: attention, both passes.
    """

    def loss(x: Array, weights: Array) -> Array:
        for own in weights:
            query, key, value = jnp.einsum("tw,nwv->ntv", jax.nn.standardize(x), own)
            x = x + jax.nn.softmax(query @ key.T) @ value
        return (x**2).sum()

    arguments = [jnp.ones((_SMALL, _SMALL)), jnp.full((_LAYERS, 3, _SMALL, _SMALL), 0.01)]
    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    text = step.lower(*arguments).compile().as_text()
    assert text is not None  # XLA has it for each program that it compiles from JAX
    work = work_of(text, 1)
    more = _median_s(comm, step, arguments) - predict(work, 0, profile).seconds
    return max(more, 0.0) / sum(work.computing.values())


def memory_of_a_device(comm: pc.Communicator, devices: int) -> int:
    """The bytes that arrays can take on each device: of the host's memory an equal share, of an accelerator its own."""
    stats = jax.local_devices()[0].memory_stats()
    own = int(stats["bytes_limit"]) if stats else _memory_of_the_host() // (comm.local_size * devices)
    return int(comm.mpi.allreduce(own, MPI.MIN))


def _memory_of_the_host(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """The bytes of memory; in a container or a job no more than it may use."""
    total = int(psutil.virtual_memory().total)
    text = limit.read_text().strip() if limit.exists() else "max"
    return min(total, int(text)) if text.isdigit() else total
