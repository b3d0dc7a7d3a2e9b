"""Prints a program after each pass of the pipeline (``pipeline.py``).

    python -m pycollective.spmd.show                                  an example
    python -m pycollective.spmd.show train.py:step f32[8,4] f32[4]    a function of a file, and shapes of its arguments

The function is a result of :func:`pycollective.jit`, ``pmap`` or ``shard_map``. Nothing runs, and the ranks exchange
no messages. One process shows the program of a job with one rank; under ``mpirun`` rank 0 prints its own program.
"""

from __future__ import annotations

import argparse
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pycollective.errors import message
from pycollective.ranks.world import init
from pycollective.spmd.compiled import CompiledFunction
from pycollective.spmd.jit import jit

_TYPES = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint", "c": "complex"}


def stages(function: CompiledFunction[..., Any], *args: Any, **kwargs: Any) -> Iterator[tuple[str, str]]:
    """Yields the text of a call's program after each pass.

    Args:
        function: a result of :func:`pycollective.jit`, ``pmap`` or ``shard_map``.
        *args: the arguments of the call. An array may be a :class:`jax.ShapeDtypeStruct`.
        **kwargs: the arguments by keyword.

    Yields:
        The name of a pass, and the program as JAX prints jaxprs; last "lower" and the StableHLO text.

    Example:
        >>> import jax, pycollective as pc
        >>> from pycollective.spmd.show import stages
        >>> total = pc.jit(lambda x: jax.lax.psum(x, "i"), axis_name="i")
        >>> texts = dict(stages(total, jax.ShapeDtypeStruct((2,), "float32")))
        >>> for name in texts:
        ...     print(name)
        trace
        compare
        discharge
        avoid copies
        arrange sums
        number reductions
        mark sections
        lower
        >>> "psum" in texts["trace"], "allreduce" in texts["discharge"]
        (True, True)
    """
    for name, program in function.programs(*args, **kwargs).items():
        yield name, str(program.closed)
    yield "lower", function.lower(*args, **kwargs).as_text()


def _example(params: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.sum((x @ params["w"] + params["b"]) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return lax.pmean(value, "i"), lax.pmean(grads, "i")


def _argument(text: str) -> jax.ShapeDtypeStruct:
    """A shape and dtype, such as ``f32[8,4]``.

    Example:
        >>> _argument("bf16[2,3]")
        ShapeDtypeStruct(shape=(2, 3), dtype=bfloat16)
    """
    match = re.fullmatch(r"(bool|(f|bf|i|u|c)(\d+))\[([\d,]*)\]", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected a dtype and a shape such as f32[8,4], got {text!r}.")
    dtype = match[1] if match[2] is None else f"{_TYPES[match[2]]}{match[3]}"
    return jax.ShapeDtypeStruct([int(size) for size in match[4].split(",") if size], jnp.dtype(dtype))


def _function(text: str) -> CompiledFunction[..., Any]:
    path, _, name = text.rpartition(":")
    found = runpy.run_path(path).get(name) if path else None
    if not isinstance(found, CompiledFunction):
        remedy = "Name a function that pycollective.jit, pmap or shard_map has made, at the top of the file."
        raise ValueError(message("show", "FILE.py:FUNCTION", text, remedy))
    return found


def main(arguments: Sequence[str]) -> None:
    """Prints the stages of a function."""
    parser = argparse.ArgumentParser(
        prog="python -m pycollective.spmd.show", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("function", nargs="?", metavar="FILE.py:FUNCTION")
    parser.add_argument("shapes", nargs="*", type=_argument, metavar="SHAPE", help="of each argument, such as f32[8,4]")
    options = parser.parse_args(arguments)
    comm = init()
    if options.function is None:
        function: CompiledFunction[..., Any] = jit(_example, axis_name="i")
        args: Any = ({"b": _argument("f32[2]"), "w": _argument("f32[4,2]")}, _argument("f32[8,4]"))
    else:
        try:
            function, args = _function(options.function), options.shapes
        except (OSError, ValueError) as error:
            parser.error(str(error))
    if comm.rank == 0:
        before = ""
        for name, text in stages(function, *args):
            sys.stdout.write(f"# after the pass: {name}\n{text if text != before else '(the same program)'}\n\n")
            before = text


if __name__ == "__main__":
    main(sys.argv[1:])
