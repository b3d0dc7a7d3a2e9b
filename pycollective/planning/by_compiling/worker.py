"""A process that compiles candidates for many virtual devices. It has no data, and speaks through its pipes.

It reads pickles from its parent alone: the number of devices with the program first, then one candidate after another.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import IO

import jax

from pycollective.planning.by_compiling.compiled_candidate import READY, Compiled, compile_candidate


def main() -> None:
    """Compiles what comes on the standard input, until it ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    requests = sys.stdin.buffer
    _answer(READY, answers)
    devices, program = pickle.load(requests)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    step = jax.export.deserialize(bytearray(program))
    while True:
        try:
            request = pickle.load(requests)
        except EOFError:
            return
        try:
            answer: Compiled | str = compile_candidate(step, request)
        except Exception as error:  # the parent decides what one candidate's failure means
            answer = f"{type(error).__name__}: {error}"
        _answer(answer, answers)


def _answer(what: object, answers: IO[bytes]) -> None:
    pickle.dump(what, answers)
    answers.flush()


if __name__ == "__main__":
    main()
