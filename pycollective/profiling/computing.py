"""Measures how fast the devices compute, while all of them do: they share caches, memory and perhaps cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Set
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax import lax

import pycollective as pc
from pycollective.errors import fail
from pycollective.planning.by_compiling.prediction import predict
from pycollective.planning.by_compiling.program_work import work_of
from pycollective.planning.profile import Profile
from pycollective.profiling.turns import TURNS, Programs, measure_curves
from pycollective.transport.mpi import MPI

Array = Any

SMALLEST = (1, 4, 16, 64, 256, 512)
"""The smallest number of m, k and n in the products that are measured."""

ROWS = (1, 4, 16, 64, 256)
"""The number of rows of the first matrix in the products whose second one lies transposed."""

TERMS = (4, 16, 64, 256)
"""The number of outer products in the sums of such."""

COLUMNS = (4, 32, 256, 1024)
"""The number of columns in the products of matrices that both lie transposed."""

TRANSPOSED = ((64, 64), (256, 256), (256, 768), (256, 3072), (2048, 2048))
"""The shapes of arrays that are read along the columns: of activations of some hundred rows, and of a large matrix."""

CHANNELS = (4, 16, 32, 256)
"""The numbers of channels before and after the convolutions that are measured. XLA's library does those from 32 on."""

_IMAGE, _WINDOW = 16, 3
_SMALL, _LAYERS = 64, 32  # rows and columns, and layers, of the program of many instructions

_TOUCHED = 1 << 29  # bytes

_Curve = tuple[str, str, int]
"""A field of a profile, a dtype, and a number that has a curve of its own; "" and 0 where the field has one curve."""


def touch_memory() -> None:
    """Takes memory from the system that the process then keeps: programs find it there, as they do in a long training.

    A program that takes pages for the first time is slower, on some virtual machines 20 times.
    """
    np.ones(min(_TOUCHED, psutil.virtual_memory().available // 16), np.uint8)


def measure_computing(
    comm: pc.Communicator, dtypes: Sequence[str], tick: Callable[[int], None]
) -> tuple[dict[str, Any], float]:
    """Measures how fast the devices compute. All ranks must make this call.

    Args:
        comm: the ranks.
        dtypes: the dtypes of products and convolutions.
        tick: a function to call with the number of turns that are done, of :func:`count_turns`.

    Returns:
        The fields of a profile that say it, and how much the machine was disturbed.
    """
    fields: dict[str, Any] = {}
    curves, noise = measure_curves(comm, _programs(dtypes), tick)
    for (name, dtype, number), curve in curves.items():
        if dtype:
            fields.setdefault(name, {}).setdefault(dtype, {})[number] = curve
        else:
            fields[name] = curve
    layers_s, fields["call"] = fields.pop("layers").seconds[0], fields["call"].seconds[0]
    known = Profile(source="", hosts=1, ranks=1, devices=1, memory=1, collectives={}, **fields)
    return fields | {"instruction": instruction_s(layers_s, known)}, noise


def count_turns(dtypes: Sequence[str]) -> int:
    """The number of calls of ``tick`` in :func:`measure_computing`."""
    return (1 + TURNS) * len(_programs(dtypes))


def _programs(dtypes: Sequence[str]) -> dict[_Curve, Programs]:
    """The programs of each curve."""
    of_dtypes: dict[_Curve, Programs] = {}
    for dtype in dtypes:
        of_dtypes |= {("products", dtype, smallest): _products(dtype, smallest) for smallest in SMALLEST}
        of_dtypes |= {("transposed_second", dtype, rows): _transposed_second(dtype, rows) for rows in ROWS}
        of_dtypes |= {("outer", dtype, terms): _outer(dtype, terms) for terms in TERMS}
        of_dtypes |= {("transposed", dtype, columns): _transposed(dtype, columns) for columns in COLUMNS}
        of_dtypes |= {("convolutions", dtype, channels): _convolutions(dtype, channels) for channels in CHANNELS}
    return of_dtypes | {
        ("streams", "", 0): _streams(),
        ("transposes", "", 0): _transposes(),
        ("tanh", "", 0): Programs([1 << power for power in (10, 14, 18)], lambda size: (jnp.tanh, [jnp.ones(size)])),
        ("call", "", 0): Programs([1], lambda _: (lambda x: x + 1, [jnp.float32(0)])),
        ("layers", "", 0): Programs([1], lambda _: layers()),
    }


def _products(dtype: str, smallest: int) -> Programs:
    """Products of matrices whose smallest dimension is one of :data:`SMALLEST`: the rows of the first one."""
    return _with_square(dtype, smallest, {smallest, 64, 256, 1024, 2048}, lambda few, square: few @ square)


def _transposed_second(dtype: str, rows: int) -> Programs:
    """Products whose first matrix has one of :data:`ROWS` as the number of rows, and whose second one lies transposed.

    So is a gradient by what goes into a layer.
    """
    return _with_square(dtype, rows, {64, 256, 2048}, lambda few, square: few @ square.T)


def _outer(dtype: str, terms: int) -> Programs:
    """Sums of outer products, whose number is one of :data:`TERMS`. So is a gradient by the weights of a layer."""

    def program(operations: int) -> tuple[Any, list[Array]]:
        few = jnp.ones((terms, math.isqrt(operations // (2 * terms))), dtype)
        return lambda x, y: x.T @ y, [few, few]

    return Programs(_operations(terms, {64, 256, 2048}), program)


def _transposed(dtype: str, columns: int) -> Programs:
    """Products of matrices that both lie transposed, with one of :data:`COLUMNS` as the number of columns."""
    return _with_square(dtype, columns, {64, 256, 1024}, lambda few, square: square.T @ few.T)


def _with_square(dtype: str, few: int, widths: Set[int], multiply: Callable[[Array, Array], Array]) -> Programs:
    """Products of a matrix of few rows and of a square one, which is not smaller."""

    def program(operations: int) -> tuple[Any, list[Array]]:
        width = math.isqrt(operations // (2 * few))
        return multiply, [jnp.ones((few, width), dtype), jnp.ones((width, width), dtype)]

    return Programs(_operations(few, widths), program)


def _operations(few: int, widths: Set[int]) -> list[int]:
    return [2 * few * width**2 for width in sorted(widths) if width >= few]


def _convolutions(dtype: str, channels: int) -> Programs:
    """Convolutions with a window of 3 x 3, with as many channels before as after."""
    each = 2 * (_IMAGE * _WINDOW * channels) ** 2  # operations for one image

    def convolve(x: Array, kernel: Array) -> Array:
        return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def program(operations: int) -> tuple[Any, list[Array]]:
        images = jnp.ones((operations // each, _IMAGE, _IMAGE, channels), dtype)
        return convolve, [images, jnp.ones((_WINDOW, _WINDOW, channels, channels), dtype)]

    return Programs([each * images for images in (1, 8, 64)], program)


def _streams() -> Programs:
    """Passes over arrays that read two and write one; the size is all their bytes."""

    def program(nbytes: int) -> tuple[Any, list[Array]]:
        return lambda x, y: 2 * x + y, [jnp.ones(nbytes // 12)] * 2

    return Programs([12 << power for power in (10, 13, 16, 19, 22)], program)


def _transposes() -> Programs:
    """Passes over two arrays, one along the rows and one along the columns; the size is the bytes of one."""
    shapes = {4 * rows * columns: (rows, columns) for rows, columns in TRANSPOSED}

    def program(nbytes: int) -> tuple[Any, list[Array]]:
        rows, columns = shapes[nbytes]
        return lambda x, y: 2 * x + y.T, [jnp.ones((columns, rows)), jnp.ones((rows, columns))]

    return Programs(list(shapes), program)


def layers() -> tuple[Callable[..., Any], list[Array]]:
    """A program of many instructions, and its arguments: attention of small layers, both passes.

    XLA hands instructions that can run at the same time to other threads, and each product and each sum to a library.
    The instructions of this program depend on each other as those of a training do.
    """

    def loss(x: Array, weights: Array) -> Array:
        for own in weights:
            query, key, value = jnp.einsum("tw,nwv->ntv", jax.nn.standardize(x), own)
            x = x + jax.nn.softmax(query @ key.T) @ value
        return (x**2).sum()

    arguments = [jnp.ones((_SMALL, _SMALL)), jnp.full((_LAYERS, 3, _SMALL, _SMALL), 0.01)]
    return jax.grad(loss, argnums=(0, 1)), arguments


def instruction_s(seconds: float, profile: Profile) -> float:
    """What an instruction takes in a program of many beside what the profile says of it alone, in seconds.

    Args:
        seconds: the time of :func:`layers`.
        profile: how fast the devices compute; an ``instruction`` of 0.
    """
    function, arguments = layers()
    text = jax.jit(function).lower(*arguments).compile().as_text()
    assert text is not None  # XLA has it for each program that it compiles from JAX
    work = work_of(text, 1)
    return max(seconds - predict(work, 0, profile).seconds, 0.0) / sum(work.computing.values())


def memory_of_a_device(comm: pc.Communicator, devices: int) -> int:
    """The bytes that arrays can take on each device: that of an accelerator, or of the host's memory an equal share.

    A rank's share is less what its process holds so far: Python, JAX and MPI. So call this before measurements.
    """
    stats = jax.local_devices()[0].memory_stats()
    if stats:
        own = int(stats["bytes_limit"])
    else:
        own = (_memory_of_the_host() // comm.local_size - int(psutil.Process().memory_info().rss)) // devices
    least = int(comm.mpi.allreduce(own, MPI.MIN))
    if least <= 0:
        got = f"{comm.local_size} ranks that hold as much"
        fail(RuntimeError, "profile", comm, "memory for arrays on each host", got, "Start fewer ranks on a host.")
    return least


def _memory_of_the_host(group: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """The bytes of memory; in a container or a job no more than Linux's control groups let it use.

    Each group limits those in it, so all count from the process's own one upwards. See cgroups(7): a line of ``group``
    is "0::/path" in version 2, and "number:controllers:/path" in version 1.
    """
    limits = [int(psutil.virtual_memory().total)]
    for line in group.read_text().splitlines() if group.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            name, root = "memory.max", groups
        elif "memory" in controllers.split(","):
            name, root = "memory.limit_in_bytes", groups / "memory"
        else:
            continue
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            file = folder / name
            text = file.read_text().strip() if folder.is_relative_to(root) and file.exists() else "max"
            if text.isdigit():  # "max" is no limit
                limits.append(int(text))
    return min(limits)
