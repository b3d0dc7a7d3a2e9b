"""``scripts/gpu-check``: checks and measures on this machine's GPUs, and prints a table for docs/gpu.md."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

from tests.gpu_check import environment, steps, table
from tests.gpu_check.running import (
    FAILED,
    SKIPPED,
    AbsentError,
    Interrupted,
    Result,
    Runner,
    Step,
    adopt_orphans,
    last_lines,
)

ROOT = Path(__file__).parents[2]
SECONDS = 470.0
"""The time limit of the whole run, and of the steps for which their limits are made."""

_HELP = """\
The Python that runs it (--python) needs no packages; if it has JAX for CUDA, the steps use that JAX. Everything else is
installed in an environment of its own (--venv): MPICH, mpi4py, pytest, and the package, which is compiled.

For a GPU machine without a network, make a folder of wheels on another machine, for the same version of Python:

    scripts/gpu-carry wheels                                    # prints the command for the GPU machine
    get="python3.12 -m pip download -d wheels"
    $get optax scikit-learn matplotlib tqdm orbax-checkpoint    # optional: for the training step
    $get 'jax[cuda13]'                                          # if the GPU machine has no JAX

Exit status 0: no step has failed; 1: a step has failed, or there is no GPU; 130 or 143: it was interrupted (SIGINT,
SIGTERM), and has written what was there by then.
"""
_FIND_GPUS = """
import json, time
began = time.monotonic()
import jax
kinds = [device.device_kind for device in jax.devices("cuda")]
print("gpus:", json.dumps({"kinds": kinds, "seconds": time.monotonic() - began}))
"""
FIND_GPUS_S = 120.0
"""The limit of the first start of JAX: its plugin for CUDA is 411 MB, which a cold disk may read for a minute."""
ENVIRONMENT_S = 240.0
"""The limit of all that is installed, with the package compiled."""
_GIT_S = 10.0


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-check",
        description=__doc__.split(": ", 1)[1],
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--python", metavar="PYTHON", help="3.11 or newer (default: one that has JAX)")
    parser.add_argument("--wheels", type=_absolute, metavar="DIR", help="install from it only, without a network")
    parser.add_argument("--venv", type=_absolute, default=ROOT / ".venv-gpu", metavar="DIR", help="default .venv-gpu")
    parser.add_argument("--mpi", choices=tuple(environment.MPIS), default="mpich", help="system: what mpi4py finds")
    parser.add_argument("--jax", default="jax[cuda13]", help="to install if there is no JAX (default %(default)s)")
    parser.add_argument("--here", action="store_true", help="run in this Python's environment; install nothing")
    parser.add_argument("--quick", action="store_true", help="half of the time for tests, arrays of up to 16 MiB")
    out = "results/gpu-check.md"
    parser.add_argument("--out", type=_absolute, default=out, metavar="FILE", help="the report (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of the whole run (default %(default).0f)")
    parser.add_argument("--commit", default="", help="of this tree, for the report (default: what git says)")
    parser.add_argument("--only", default="", help="run the steps whose names contain one of these words, WORD,WORD")
    return parser.parse_args(arguments)


def find_gpus(step: Step, python: Path | str, facts: dict[str, Any]) -> str:
    """Asks JAX for its GPUs, writes their kinds to ``facts["gpus"]`` and returns the text for the table.

    Raises:
        AbsentError: JAX has no GPU.
    """
    environ = {**os.environ, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    environ.pop("JAX_PLATFORMS", None)
    output = step.run([python, "-c", _FIND_GPUS], environ=environ, partly=True)
    if "gpus: " not in output:
        raise AbsentError(f"JAX sees no GPU: {last_lines(output, 1)}")
    found = steps.told("gpus", output)
    facts["gpus"] = kinds = found["kinds"]
    return f"{len(kinds)} x {kinds[0]}; the first start of JAX took {found['seconds']:.0f} s"


def commit() -> str:
    """Returns the commit of the tree, or "" where git does not know it."""
    try:
        described = subprocess.run(
            ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=_GIT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return described.stdout.strip() if described.returncode == 0 else ""


def check(runner: Runner, options: argparse.Namespace, place: steps.Place) -> None:
    """Runs all steps that can run on this machine."""

    def gpus() -> bool:
        """Returns whether there are GPUs; if there are none, notes that all other steps are skipped."""
        if place.standin:
            return True
        sys.stderr.write("JAX starts for the first time, which may take a minute.\n")
        if runner.step("GPUs", FIND_GPUS_S, lambda step: find_gpus(step, place.python, place.facts)):
            return True
        failed = any(result.status == FAILED for result in runner.results)
        why = "it is not known whether there is a GPU: the step 'GPUs' has failed" if failed else "there is no GPU"
        for name, *_ in steps.steps_of(place):
            runner.skip(name, why)
        return False

    def make(step: Step) -> str:
        place.python, place.tree = environment.make(
            step, ROOT, options.venv, mpi=options.mpi, wheels=options.wheels, jax=options.jax
        )
        return f"{options.mpi}, from {'wheels' if options.wheels else 'the package index'}"

    ask_first = find_spec("jax") is not None
    if ask_first and not gpus():
        return
    if not options.here and not runner.step("environment", ENVIRONMENT_S, make):
        for name, *_ in steps.steps_of(place):
            runner.skip(name, "there is no environment to run it in")
        return
    if ask_first or gpus():
        steps.run_all(runner, place)


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status."""
    began = time.monotonic()
    options = parse(arguments)
    standin = os.environ.get("PYCOLLECTIVE_TEST_STANDIN", "")
    out = options.out
    logs = out.parent / f"{out.stem}-logs"
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, interrupt)
    only = [word for word in options.only.split(",") if word]
    if only:  # these steps find out what all others need
        only += ["GPUs", "environment", "what is there"]
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as work:
        # Limits are longer with stand-ins: they are compiled first, and other tests run on the machine meanwhile.
        patience = 5 if standin else options.seconds / SECONDS
        runner = Runner(logs, SECONDS, patience=patience, only=only)
        place = steps.Place(Path(sys.executable), ROOT, Path(work), standin, options.quick)
        interrupted = 0
        try:
            check(runner, options, place)
        except Interrupted as interruption:
            interrupted = interruption.number
            runner.note(Result("the rest", SKIPPED, str(interruption)))
    kinds = steps.gpus_of_host(place)
    title = f"{kinds[0] if kinds else 'no GPU'}, {time.strftime('%Y-%m-%d')}"
    facts = {
        "commit": options.commit or commit(),
        **steps.about(place),
        "duration": f"{time.monotonic() - began:.0f} s",
    }
    text = table.report(title, facts, runner.results, place.rows)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text)
    shutil.copy(out, logs / out.name)
    archive = shutil.make_archive(str(logs), "gztar", logs)
    sys.stdout.write(text)
    sys.stderr.write(f"\nThis report is in {out}; the output of each step is in {logs}. All of it is in {archive}.\n")
    return 128 + interrupted if interrupted else status(runner.results, bool(kinds))


def interrupt(number: int, _: object) -> NoReturn:
    """Ends the running step. Later signals do nothing, so that the report is written."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(number)


def status(results: Sequence[Result], on_devices: bool) -> int:
    """Returns the exit status: 0 if something was checked and nothing has failed."""
    failed = any(result.status == FAILED for result in results)
    if not on_devices and not failed:
        sys.stderr.write("gpu-check: expected a GPU that JAX can use, got none: nothing was checked.\n")
    else:
        sys.stderr.write("Please report this table, good or bad: paste it into an issue, or into docs/gpu.md.\n")
    return 1 if failed or not on_devices else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
