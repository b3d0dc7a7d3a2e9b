"""``pycollective plan``: ranks the ways to train the network of a program on a cluster.

A program with a function ``network`` is planned by formulas; its function takes the words of its command line and
returns a :class:`~pycollective.planning.Network`. It has the options of ``examples/train_gpt.py`` for a layout, and for
``--verify`` also ``--steps`` and ``--step-times``, a file for what the steps take
(:class:`~pycollective.planning.StepRecord`). Any other program runs until the first call of its step, which is planned
by compiling.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from pycollective.errors import message
from pycollective.launch.arguments import positive
from pycollective.planning.by_formulas import command as by_formulas

_WHERE = "plan"

_EXAMPLES = """examples:
  pycollective plan --profile cluster.json train.py
  pycollective plan --profile cluster.json --devices 64 --step train_step train.py --batch-size 256
  pycollective plan --profile cluster.json examples/train_gpt.py --layers 6 --width 256
  pycollective plan --profile cluster.json --verify 5 --launch "srun -n 16" examples/train_gpt.py
"""


def main(arguments: Sequence[str]) -> int:
    """Prints the ranking. Returns the exit status: 1 if there is no plan."""
    parser = argparse.ArgumentParser(
        prog="pycollective plan",
        description="Ranks the ways to train the network of a program on a cluster. A program with a function `network`"
        " is planned by formulas. Any other one runs until it first calls its step, which is compiled for each way.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--profile", type=Path, required=True, help="file that `pycollective profile` has written, or dgx-a100")
    add("--devices", type=positive, help="number of devices (default those of the profile)")
    add("--memory", type=float, metavar="GIB", help="memory of a device in GiB (default that of the profile)")
    add("--top", type=positive, default=10, help="number of plans to show (default %(default)s)")
    add("--json", type=Path, metavar="FILE", help="file for all figures")
    add("program", type=Path, help="a program")
    add("arguments", nargs=argparse.REMAINDER, help="its arguments, without those of a layout")
    add = parser.add_argument_group("a program without a function `network`").add_argument
    add("--step", metavar="NAME", help="function to plan (default the first that returns an argument again)")
    add("--compilations", type=positive, help="most candidates to compile (default 60)")
    add("--seconds", type=float, help="time after which no more candidates are compiled (default no limit)")
    add = parser.add_argument_group("a program with a function `network`").add_argument
    add(
        "--only",
        type=by_formulas.setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="layouts with this value alone, for a program that has no others: stage=1, remat=no; may be said again",
    )
    add("--dtype", help="dtype of the products (default float32)")
    add("--verify", type=positive, metavar="K", help="run the K best for some steps, and rank them by what they took")
    add("--steps", type=positive, help="steps of such a run (default 20)")
    add("--launch", help="command that starts the ranks of such a run (default pycollective run -n RANKS)")
    add("--plot", type=Path, metavar="FILE", help="file for a picture of the plans that are shown")
    options = parser.parse_args(arguments)
    try:
        if _has_network(options.program):
            _refuse(options, "step", "compilations", "seconds", has="with")
            options.dtype, options.steps = options.dtype or "float32", options.steps or 20
            return by_formulas.run(options)
        _refuse(options, "only", "dtype", "verify", "steps", "launch", "plot", has="without")
        # It needs JAX and MPI, which a plan by formulas does not start.
        return int(importlib.import_module("pycollective.planning.by_compiling.command").run(options))
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1


def _refuse(options: argparse.Namespace, *names: str, has: str) -> None:
    given = [f"--{name}" for name in names if getattr(options, name)]
    if given:
        expected = f"options of a program {has} a function `network`"
        raise ValueError(message(_WHERE, expected, ", ".join(given), "See pycollective plan --help."))


def _has_network(program: Path) -> bool:
    """Whether a program makes the name ``network`` outside of functions. It is read, and not run."""
    if not program.is_file():
        raise ValueError(message(_WHERE, "a program", f"no file {program}", "Say where it is."))
    try:
        tree = ast.parse(program.read_bytes(), str(program))
    except (SyntaxError, ValueError) as error:
        raise ValueError(message(_WHERE, f"a program in Python, {program}", str(error), "Correct it.")) from error
    return "network" in _names_in(tree)


def _names_in(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield child.name
        elif isinstance(child, ast.alias):
            yield child.asname or child.name
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            yield child.id
        elif not isinstance(child, ast.Lambda):
            yield from _names_in(child)
