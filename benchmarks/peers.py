"""``pycollective bench`` beside the collectives of other projects that need no MPI: JAX's and PyTorch's by gloo.

It has the options of ``pycollective bench``, and more names for ``--against``: "jax-gloo" and "torch-gloo" (which needs
``pip install torch``). A launcher starts it:

    mpirun -n 2 python benchmarks/peers.py psum -e 1M --against floor,jax-gloo,torch-gloo
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial

from peer_process import InSubprocess
from pycollective.bench import main as bench
from pycollective.bench.measure import Runner
from pycollective.bench.options import add_options, check
from pycollective.launch.started_by import is_rank
from pycollective.transport.mpi import MPI

PEERS: dict[str, Callable[[MPI.Intracomm, int], Runner]] = {
    name: partial(InSubprocess, option=name) for name in ("jax-gloo", "torch-gloo")
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Measures collectives beside those of other projects.")
    add_options(parser, tuple(PEERS))
    options = parser.parse_args()
    check(parser, options)
    if options.ranks > 1 and not is_rank(os.environ):
        parser.error("expected a launcher: mpirun -n 2 python benchmarks/peers.py")
    return bench.run(options, PEERS)


if __name__ == "__main__":
    sys.exit(main())
