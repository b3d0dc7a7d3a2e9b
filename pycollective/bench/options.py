"""The command line of ``pycollective bench``. Its letters are those of nccl-tests."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from pycollective.bench.operations import OPERATIONS
from pycollective.bench.workloads import GRADIENTS, MODES, TREES
from pycollective.launch.arguments import positive

JAX_MPI = "jax-mpi"
AGAINST = ("floor", "numpy", "copies", "mpi4jax", JAX_MPI)
OPS = (*OPERATIONS, *GRADIENTS)

_EXAMPLES = """examples:
  pycollective bench                                  psum of 8 B to 64 MiB on 2 ranks
  pycollective bench psum all_gather -e 1G --ranks 4  two operations on 4 ranks
  mpirun -n 8 pycollective bench tree --model gpt2-small --donate yes
  srun -n 64 pycollective bench --json psum.json --link-gbps 100
"""


def size(text: str) -> int:
    """A number of bytes, from ``4``, ``64K``, ``1M`` or ``2G``.

    Example:
        >>> size("64K")
        65536
    """
    match = re.fullmatch(r"(\d+)([KMG]?)(i?B)?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"expected a size as 4, 64K, 1M or 2G, got {text!r}")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2].upper()]


def op(text: str) -> str:
    """The name of an operation."""
    if text not in OPS:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(OPS)}, got {text!r}")
    return text


def factor(text: str) -> int:
    """A whole number from 2."""
    if positive(text) < 2:
        raise argparse.ArgumentTypeError(f"expected a whole number from 2, got {text!r}")
    return int(text)


def rate(text: str) -> float:
    """A positive number."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return value


def several(known: tuple[str, ...]) -> type:
    """A type for argparse: names from ``known``, between commas."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(name for name in text.split(",") if name)
        for name in names:
            if name not in known:
                raise argparse.ArgumentTypeError(f"expected some of {', '.join(known)}, got {name!r}")
        return names

    return parse  # type: ignore[return-value]


def add_options(parser: argparse.ArgumentParser, peers: tuple[str, ...] = ()) -> None:
    """Adds all options of the command.

    Args:
        parser: gets the options.
        peers: what ``--against`` knows beside the implementations of this package.
    """
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXAMPLES
    names = f"operations: {', '.join(OPS)} (default psum)"
    parser.add_argument("ops", nargs="*", metavar="OP", type=op, default=["psum"], help=names)
    parser.add_argument("-b", "--minbytes", type=size, default=8, help="smallest size (default 8)")
    parser.add_argument("-e", "--maxbytes", type=size, default=64 << 20, help="largest size (default 64M)")
    parser.add_argument("-f", "--stepfactor", type=factor, default=8, help="factor between sizes (default %(default)s)")
    parser.add_argument("-n", "--iters", type=positive, default=50, help="number of timed calls (default %(default)s)")
    parser.add_argument(
        "-w", "--warmup", type=positive, default=5, help="number of calls before them (default %(default)s)"
    )
    parser.add_argument(
        "-d", "--datatypes", default="float32", help="dtypes by NumPy's names, between commas (default float32)"
    )
    modes = f"modes between commas: {', '.join(MODES)} (default jit)"
    parser.add_argument("--modes", type=several(MODES), default=("jit",), help=modes)
    parser.add_argument(
        "--loop", type=positive, default=100, help="number of calls in a program of mode loop (default %(default)s)"
    )
    parser.add_argument(
        "--unroll", type=positive, default=1, help="lax.fori_loop's unroll for that loop (default %(default)s)"
    )
    parser.add_argument("--donate", choices=("no", "yes", "both"), default="no", help="donate operands (default no)")
    parser.add_argument(
        "--model", choices=tuple(TREES), default="gpt2-small", help="model of op tree (default %(default)s)"
    )
    parser.add_argument("--devices", type=positive, default=1, help="number of local devices of each rank (default 1)")
    parser.add_argument(
        "--ranks", type=positive, default=2, help="number of ranks to start where no launcher has (default 2)"
    )
    against = (*AGAINST, *peers)
    parser.add_argument(
        "--against",
        type=several(against),
        default=(),
        help=f"what is measured too, between commas: {', '.join(against)}. floor: a jitted function that does nothing, "
        "then raw MPI; numpy: a copy to NumPy, raw MPI, and a copy back; copies: copies from a GPU to the host and "
        "back, without MPI; jax-mpi: programs of global arrays, XLA's collectives by MPI",
    )
    parser.add_argument("--wire-dtype", choices=("bfloat16",), help="measure also sums that are sent in this dtype")
    parser.add_argument("--link-gbps", type=rate, help="rate of the network, for the roofline (default: measured)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for all figures")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="file for a picture: .png, .pdf, .svg or .html")


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Ends the program with a message where options do not fit each other."""
    if options.minbytes > options.maxbytes:
        parser.error(f"expected -b to be at most -e, got {options.minbytes} and {options.maxbytes}")
    if JAX_MPI in options.against and options.devices > 1:
        parser.error(f"expected --devices 1 with --against {JAX_MPI}, got {options.devices}: XLA's MPI has no more")
