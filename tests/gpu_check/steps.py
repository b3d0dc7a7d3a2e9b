"""The steps: each runs its commands, and returns what the table says about their output."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tests.gpu_check.running import AbsentError, Runner, Step, StepError, last_lines

FILES = (
    *("test_communicator.py", "test_messages.py", "test_forward.py", "test_order_on_ranks.py", "test_options.py"),
    *("test_derivatives.py", "test_vmap.py", "test_wire.py", "test_control_flow.py"),
)
"""The files of tests/collective that run, in this order: if time is short, the last ones are left out."""
AXES = (
    *("test_overlap_on_devices.py", "test_random_programs.py", "test_trees.py"),
    *("test_calls.py", "test_pmap_on_devices.py", "test_shard_map.py"),
)
"""The files of tests/spmd that run."""
_WORLD = ("-k", "(not self and not split) or test_communicator")
"""Options that leave out two kinds of communicators: GPUs make the same difference on all kinds."""

PYTEST = ("-q", "-rsfE", "--color=no", "--tb=short", "--capture=sys", "-W", "default")
"""Options of pytest. What C++ writes is not captured: it may be the last words of the process. A warning is no failure
here, though it is one in the project's configuration: CUDA, its driver and JAX's plugin have warnings of their own,
which say nothing about a sum. The table counts the warnings, and the log has them."""

_WAIT_S = 40
"""The longest time that a rank waits for others; then it ends all ranks, and the log gets their stacks."""
_AUTOTUNING = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
"""XLA's flags against autotuning, which takes longer than the steps that would gain from it."""
_EARLY_LAUNCH = "--xla_gpu_enable_pdl={0} --xla_gpu_enable_pdl_launch={0}"
"""XLA's flags on whether a kernel begins before the one before it has ended (programmatic dependent launch)."""
_PIECES = {"1 MiB": 1 << 20, "4 MiB": 4 << 20, "16 MiB": 16 << 20}
"""The sizes of the pieces in which arrays are staged, which the step "pieces" compares."""
_SMALL = (8, 512, 4096, 65536)
"""The bytes of the sums whose latency is shown."""
_SHARED = "ranks share a GPU by time slices, so this is no figure of ranks with a GPU each"
_MPIEXEC_S = 20
"""The limit of `mpiexec --version`."""
_TO_END_S = 30
"""The seconds that the tests get after the last one has begun, or fewer if they may take few in all."""
_SOAK_S = 10
"""The seconds of each part of the step "soak", besides those to compile."""
_AHEAD_SOAK_S = 4
"""The seconds of the soak in the step "dispatch ahead", besides those to compile."""
_TOLERANCE = 1e-3
"""The largest relative difference between losses on GPUs and on CPUs."""


@dataclass
class Place:
    """Where the steps run.

    Attributes:
        python: the Python that has the package, an MPI library and the packages that the tests need.
        tree: the directory of tests and examples.
        work: a directory for files.
        standin: the mode of the stand-ins for GPUs (``tests.standin``), in tests of this program; empty: real GPUs.
        quick: whether there are fewer tests and smaller arrays.
        facts: what the steps have found so far.
        rows: the lines of the table of bandwidths.
    """

    python: Path
    tree: Path
    work: Path
    standin: str = ""
    quick: bool = False
    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, object]] = field(default_factory=list)

    def environ(self, **more: str) -> dict[str, str]:
        """Returns the environment variables of all ranks."""
        path = os.pathsep.join((str(self.python.parent), os.environ.get("PATH", "")))
        own = {
            "PATH": path,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(self.tree), os.environ.get("PYTHONPATH")))),
            "JAX_PLATFORMS": "cpu" if self.standin else "cuda,cpu",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "PYCOLLECTIVE_ALLOW_SHARED_GPU": "1",
            "JAX_DEFAULT_MATMUL_PRECISION": "highest",  # as precise as on the CPUs, which compute what is expected
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "PYTHONUNBUFFERED": "",
            "PYCOLLECTIVE_TIMEOUT": str(_WAIT_S if not self.standin else 10 * _WAIT_S),
        }
        if self.standin:
            own["PYCOLLECTIVE_BUCKET_BYTES"] = "4096"  # buckets as small as the arrays of the tests
        elif flags := self.facts.get("xla_flags"):
            own["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
        return {**os.environ, **own, **more}

    def ranks(self, number: int) -> list[str]:
        """Returns the launcher and its options for this number of ranks."""
        beside = self.python.parent / "mpiexec"
        mpiexec = str(beside) if beside.exists() else shutil.which("mpiexec")
        if mpiexec is None:
            raise AbsentError("there is no mpiexec")
        shown = subprocess.run(
            [mpiexec, "--version"], capture_output=True, text=True, timeout=_MPIEXEC_S, env=self.environ()
        )
        open_mpi = any(name in shown.stdout for name in ("Open MPI", "OpenRTE", "PRRTE", "prte"))
        return [mpiexec, *(["--oversubscribe"] if open_mpi else []), "-n", str(number)]

    def program(self, *words: str | Path) -> list[str]:
        """Returns the command that runs a Python program on GPUs, or on their stand-ins."""
        mode = ["-m", "tests.standin", self.standin] if self.standin else []
        return [str(self.python), *mode, *map(str, words)]


def told(name: str, output: str) -> dict[str, Any]:
    """Returns the JSON that a program has printed in a line after ``name:``."""
    lines = [line for line in output.splitlines() if line.startswith(f"{name}: {{")]
    if not lines:
        raise StepError(f"it printed no result: {last_lines(output)}")
    found: dict[str, Any] = json.loads(lines[-1].partition(": ")[2])
    return found


def counted(output: str, *, seconds: float) -> str:
    """Returns how pytest's tests went, from pytest's last lines.

    Raises:
        StepError: no test has passed.
    """
    ends = [line for line in output.splitlines() if re.search(r"\d+ \w+.* in [\d.]+s", line)]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", ends[-1] if ends else "")}
    late = sum(map(int, re.findall(r"^SKIPPED \[(\d+)\].*: LOUD: out of time", output, re.MULTILINE)))
    if not counts.get("passed"):
        raise StepError(f"no test has passed: {last_lines(output)}")
    parts = [f"{counts['passed']} passed"]
    parts += [f"{counts[word]} {word}" for word in ("failed", "error", "errors") if word in counts]
    if other := counts.get("skipped", 0) - late:
        parts.append(f"{other} skipped")
    if late:
        parts.append(f"{late} not begun within {seconds:.0f} s")
    if warned := counts.get("warning", 0) + counts.get("warnings", 0):
        parts.append(f"{warned} warning{'s' * (warned > 1)}")
    return ", ".join(parts)


def bandwidth_rows(output: str) -> list[dict[str, object]]:
    """Returns the tables that ``pycollective bench`` has printed so far, a dictionary for each line."""
    rows: list[dict[str, object]] = []
    op = ""
    for line in output.splitlines():
        if heading := re.fullmatch(r"# (\w+), jit\S*.*", line):
            op = heading[1]
        elif op and (match := re.fullmatch(r"\s*(\d+)\s+\d+\s+\w+  (.{26})((?:\s+[\d.]+){5})\s+(\d+)\s.*", line)):
            us, _, _, algbw, _ = map(float, match[3].split())
            row = {"op": op, "size": int(match[1]), "contender": match[2].strip()}
            rows.append({**row, "us": us, "algbw": algbw, "wrong": int(match[4])})
    return rows


# The steps --------------------------------------------------------------------------------------------------------


def look(place: Place, step: Step) -> str:
    """Finds out what the machine has, and keeps it in ``place.facts`` for the other steps."""
    program = place.program("-m", "tests.gpu_check.facts")
    try:
        step.run([*place.ranks(2), *program], environ=place.environ(), cwd=place.tree)
    except StepError:
        with suppress(StepError):  # it prints the facts before it computes, so they may be there
            place.facts.update(told("facts", step.log.read_text(errors="replace")))
        raise
    place.facts.update(told("facts", step.log.read_text(errors="replace")))
    facts = place.facts
    kinds = [kind for devices in facts["devices"] for kind in devices]
    if not place.standin:
        place.facts["xla_flags"] = _accepted_flags(place, step, _AUTOTUNING)
    way = "MPI takes device memory" if facts["direct"] else "arrays are staged"
    return f"2 ranks on {', '.join(kinds)}; {facts['mpi']}; {way}"


def _accepted_flags(place: Place, step: Step, flags: str) -> str:
    """Returns the flags; "" if XLA does not know one of them."""
    start = [place.python, "-c", "import jax; jax.devices()"]  # it aborts if XLA does not know a flag
    try:
        step.run(start, environ=place.environ(JAX_PLATFORMS="cpu", XLA_FLAGS=flags))
    except StepError:
        return ""
    return flags


def doctor(place: Place, step: Step) -> str:
    command = [place.python, "-m", "pycollective", "doctor"]
    output = step.run(command, environ=place.environ(), cwd=place.tree, partly=True)
    lines = [line.split(maxsplit=1) for line in output.splitlines()]
    found = {status: [line[1] for line in lines if line[:1] == [status]] for status in ("ok", "warning", "wrong")}
    if found["wrong"] or not found["ok"]:
        raise StepError("; ".join(found["wrong"]) or last_lines(output))
    return "; ".join(["nothing is wrong", *(f"warning: {text}" for text in found["warning"])])


def tests(place: Place, step: Step, folder: str, files: Sequence[str], ranks: int, direct: str, **more: str) -> str:
    """Runs the tests of a folder under mpirun. Tests that would not end within the step's limit are left out."""
    seconds = max(step.left_s() - _TO_END_S, 5) / (2 if place.quick else 1)
    if place.standin:  # one test is enough: the whole suite runs on stand-ins elsewhere
        files, seconds = files[:1], 0
    environ = place.environ(
        JAX_NUM_CPU_DEVICES="8", PYCOLLECTIVE_GPU_DIRECT=direct, PYCOLLECTIVE_TEST_SECONDS=f"{seconds:.0f}", **more
    )
    if not place.standin:
        environ |= {"PYCOLLECTIVE_TEST_PLATFORM": "cuda"}
    command = [*place.ranks(ranks), str(place.python), "-m", "pytest", *PYTEST]
    command += [*(_WORLD if folder == "collective" else ()), *(f"tests/{folder}/{name}" for name in files)]
    try:
        output = step.run(command, environ=environ, cwd=place.tree)
    except StepError as error:
        passed = "".join(re.findall(r"^[.sFE]+(?= *\[|$)", step.log.read_text(), re.MULTILINE)).count(".")
        failed = dict.fromkeys(re.findall(r"^(?:FAILED|ERROR) (\S+)", step.log.read_text(), re.MULTILINE))
        raise StepError(f"{', '.join(failed) or error}; {passed} tests had passed") from error
    return counted(output, seconds=seconds)


def direct_tests(place: Place, step: Step) -> str:
    if not place.facts["takes_device_memory"]:
        raise AbsentError(f"{place.facts['mpi']} does not say that it takes device memory (MPIX_Query_cuda_support)")
    return tests(place, step, "collective", FILES[:3], 2, "on")


def named_axes(place: Place, step: Step) -> str:
    """Runs the tests of named axes on all GPUs, or on the first four if these tests cannot use all."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1,2,3").split(",")
    useful = len(gpus_of_host(place)) // 2 in (0, 1, 2, 4)
    few = {} if useful else {"CUDA_VISIBLE_DEVICES": ",".join(visible[:4])}
    return tests(place, step, "spmd", AXES, 2, "off", **few)


def device_tests(place: Place, step: Step) -> str:
    """Runs the tests in C++ on CUDA's own runtime."""
    if place.facts.get("compiler") is None:
        raise AbsentError("there is no C++ compiler")
    library = "standin" if place.standin else place.facts.get("cudart")
    if library is None:
        raise AbsentError("JAX has loaded no libcudart.so: the runtime is linked into it")
    folder = place.work / "device_tests"
    folder.mkdir(exist_ok=True)
    command = [place.python, "-m", "tests.gpu_check.device_tests", folder, library]
    return step.run(command, environ=place.environ(), cwd=place.tree).splitlines()[-1]


def _bench(place: Place, step: Step, ranks: int, *words: str, **more: str) -> list[dict[str, object]]:
    """Returns what ``pycollective bench`` finds for staged arrays."""
    program = place.program("-m", "pycollective", "bench", *words)
    environ = place.environ(PYCOLLECTIVE_GPU_DIRECT="off", **more)
    output = step.run([*place.ranks(ranks), *program], environ=environ, cwd=place.tree)
    rows = bandwidth_rows(output)
    if not rows:
        raise StepError(f"no figures: {last_lines(output)}")
    if any(row["wrong"] for row in rows):
        raise StepError(f"wrong results: {[row for row in rows if row['wrong']]}")
    return rows


def by_size(rows: Sequence[Mapping[str, object]], figure: str) -> dict[int, dict[str, float]]:
    """Returns the figure of each contender for sums of each size in bytes."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        if row["op"] == "psum":
            found.setdefault(int(str(row["size"])), {})[str(row["contender"])] = float(str(row[figure]))
    return found


def bandwidth(place: Place, step: Step, sizes: tuple[str, str]) -> str:
    """Measures the bandwidth of staged arrays, and that of other ways to move them."""
    against = ["numpy", "copies", *([] if place.facts.get("mpi4jax", "unknown") else ["mpi4jax"])]
    smallest, largest = sizes
    bench = ["psum", "all_gather", "--against", ",".join(against), "-b", smallest, "-e", largest]
    try:
        rows = _bench(place, step, 2, *bench, "-f", "16", "-n", "3", "-w", "1")
    finally:  # also if it fails: keep what was measured before
        place.rows += bandwidth_rows(step.log.read_text(errors="replace"))
    of = by_size(rows, "algbw")
    figures = [f"{contender} {value:.2f}" for contender, value in of[max(of)].items()]
    return f"psum of {largest}iB, GB/s: {', '.join(figures)}{shared(place, 2)}"


def pieces(place: Place, step: Step, largest: str) -> str:
    """Measures the bandwidth of staging in pieces of several sizes, without other ranks beside it on the GPU."""
    found: dict[int, list[str]] = {}
    for name, nbytes in _PIECES.items():
        bench = ["psum", "--against", "copies", "-b", "16M", "-e", largest, "-f", "16", "-n", "10", "-w", "2"]
        rows = _bench(place, step, 1, *bench, PYCOLLECTIVE_STAGE_BYTES=str(nbytes))
        for size, of in by_size(rows, "algbw").items():
            copies = of.get("copies alone")
            over = "no copies alone" if copies is None else f"{of['pycollective'] / copies:.2f} of copies alone"
            found.setdefault(size, []).append(f"{of['pycollective']:.1f} in pieces of {name} ({over})")
    sizes = [f"{size >> 20} MiB: {', '.join(texts)}" for size, texts in found.items()]
    return f"psum on 1 rank, GB/s; {'; '.join(sizes)}"


def latency(place: Place, step: Step) -> str:
    """Measures the time of sums of small arrays, from the call to the result."""
    found = []
    for ranks in (1, 2):
        rows = _bench(place, step, ranks, "psum", "--against", "numpy", "-b", "8", "-e", "64K", "-f", "2", "-n", "50")
        of = by_size(rows, "us")
        times = ", ".join(f"{size} B {of[size]['pycollective']:.0f}" for size in _SMALL)
        by_numpy = min(us["through NumPy"] for us in of.values())
        note = shared(place, ranks)
        found.append(f"{ranks} rank{'s' * (ranks > 1)}: {times} (through NumPy from {by_numpy:.0f}){note}")
    return f"psum, microseconds: {'; '.join(found)}"


def shared(place: Place, ranks: int) -> str:
    """Returns what the table says beside a figure of ranks that share a GPU; "" if each rank has a GPU of its own."""
    return f" ({_SHARED})" if len(gpus_of_host(place)) < ranks else ""


def soak(place: Place, step: Step) -> str:
    """Compares many sums that run between kernels, which begin early or one behind the other."""
    ways = {} if place.standin else {"early": "true", "one behind the other": "false"}
    flags = {way: _accepted_flags(place, step, _EARLY_LAUNCH.format(value)) for way, value in ways.items()}
    flags = {way: known for way, known in flags.items() if known} or {"as XLA launches them": ""}
    of_all = place.environ().get("XLA_FLAGS", "")
    limits = ["--largest", "5000", "--seconds", "0"] if place.standin else ["--seconds", str(_SOAK_S)]
    program, found = place.program("-m", "tests.gpu_check.soak", *limits), []
    for way, known in flags.items():
        environ = place.environ(XLA_FLAGS=f"{of_all} {known}".strip())
        of = told("soak", step.run([*place.ranks(2), *program], environ=environ, cwd=place.tree))
        if of["wrong"]:
            raise StepError(f"{of['wrong']} elements of {of['calls']} programs are wrong, with kernels {way}")
        found.append(f"{of['calls']} programs with kernels {way}")
    return f"all exact: {', '.join(found)}"


def dispatch_ahead(place: Place, step: Step) -> str:
    """Tries dispatch ahead: the sums of the soak, and what a sum costs that does not overlap, with it and without."""

    def run(*words: str, **more: str) -> str:
        return step.run([*place.ranks(2), *place.program("-m", *words)], environ=place.environ(**more), cwd=place.tree)

    few = ["--seconds", str(_AHEAD_SOAK_S)]
    if place.standin:
        few = ["--largest", "5000", "--seconds", "0", "--forms", "plain"]
    soaked = told("soak", run("tests.gpu_check.soak", *few, PYCOLLECTIVE_GPU_DISPATCH="ahead"))
    if not soaked["ahead"]:
        raise AbsentError("init has refused it on this device: the log has the warning")
    if soaked["wrong"]:
        raise StepError(f"{soaked['wrong']} elements of {soaked['calls']} programs are wrong")
    small, costs = ["--width", "64", "--layers", "3", "--calls", "2"] if place.standin else [], []
    for way in ("wait", "ahead"):
        variables = {"PYCOLLECTIVE_OVERLAP": "off", "PYCOLLECTIVE_GPU_DISPATCH": way}
        found = told("overlap", run("tests.gpu_check.overlap", *small, **variables))
        ms = found["ms"]
        lost = (ms["step"] - ms["compute"]) / max(found["whole"], 1)
        cost = f"each of {found['whole']} sums costs {lost:.2f} ms of a step"
        costs.append(f"with {way} {cost}, whose dispatch takes {ms['dispatch']:.2f} ms")
    return f"all exact: {soaked['calls']} programs; not overlapped, {'; '.join(costs)}{shared(place, 2)}"


def several_gpus(place: Place, step: Step) -> str:
    """Runs NCCL beside MPI in one program."""
    gpus = len(gpus_of_host(place))
    if gpus < 2:
        raise AbsentError(f"expected two GPUs for XLA's collectives between the GPUs of one rank, got {gpus}")
    more = {"JAX_NUM_CPU_DEVICES": "2"} if place.standin else {}
    if not place.standin and gpus < 4:
        more["JAX_CUDA_VISIBLE_DEVICES"] = "0,1"  # both ranks use both GPUs
    program = place.program("-m", "tests.gpu_check.several_gpus")
    small = ["--elements", "4096", "--calls", "2"] if place.standin or place.quick else []
    output = step.run([*place.ranks(2), *program, *small], environ=place.environ(**more), cwd=place.tree)
    found = told("several", output)
    if not found["local"] or not found["mpi"]:
        raise StepError(f"expected XLA's collectives and pycollective's in one program, got {found}")
    devices = f"{found['ranks']} ranks x {found['devices']} GPUs"
    calls = f"XLA's {', '.join(found['local'])} and {found['mpi']} calls of pycollective"
    return f"{devices}: exact results; the program has {calls}"


def gpus_of_host(place: Place) -> list[str]:
    """Returns the kinds of the GPUs that JAX sees here; stand-ins count as two."""
    return ["stand-in"] * 2 if place.standin else list(place.facts.get("gpus", ()))


def overlap(place: Place, step: Step) -> str:
    """Measures the overlap with a clock, and keeps the numbers of the profile for the next step."""
    folder = place.work / "profile"
    program = place.program("-m", "tests.gpu_check.overlap", "--folder", folder)
    small = ["--width", "64", "--layers", "3", "--calls", "2"] if place.standin else []
    output = step.run([*place.ranks(2), *program, *small], environ=place.environ(), cwd=place.tree)
    found = told("overlap", output)
    place.facts["overlap"] = found
    return overlap_text(found) + shared(place, 2)


def overlap_text(found: Mapping[str, Any]) -> str:
    """Returns the figures of ``tests/gpu_check/overlap.py`` for the table.

    Raises:
        StepError: no sum runs while the GPU computes.
    """
    if found["begun"] == 0:
        raise StepError("expected sums that run while the GPU computes, got none in the program")
    ms = found["ms"]
    hidden = (ms["compute"] + ms["sums"] - ms["step"]) / min(ms["compute"], ms["sums"])
    lost = (ms["step"] - ms["compute"]) / found["begun"]
    network = f"{found['layers']} layers of {found['width']} x {found['width']}, {found['rows']} rows"
    each = f"{ms['step']:.1f} ms a step, {ms['compute']:.1f} computing alone, {ms['sums']:.1f} summing alone"
    share = f"{max(hidden, 0):.0%} of the shorter one is hidden"
    return f"{network}: {each}; {share}, and each of {found['begun']} sums costs {lost:.2f} ms of a step"


def overlap_in_profile(place: Place, _: Step) -> str:
    """Returns the overlap that the profile shows. The step before has made it."""
    found = place.facts.get("overlap")
    if found is None:
        raise AbsentError("the step that makes the profile has failed")
    if "profile" not in found:
        raise AbsentError(f"no profile of the GPU: {found.get('no_profile')}")
    seen = found["profile"]
    return (
        f"sums are under way for {seen['sums']:.1f} ms a step, kernels run for {seen['kernels']:.1f} ms; "
        f"kernels run during {seen['share']:.0%} of the sums' time{shared(place, 2)}"
    )


def training(place: Place, step: Step) -> str:
    """Trains on handwritten digits, on GPUs and on CPUs, and compares the losses."""
    if lacking := place.facts.get("training"):
        raise AbsentError(f"examples/train_digits.py needs {', '.join(lacking)}")
    losses: dict[str, list[float]] = {}
    for where in ("gpu", "cpu"):
        file = place.work / f"losses-{where}.json"
        example = (place.tree / "examples" / "train_digits.py", "--epochs", "2", "--losses", file)
        program = place.program(*example) if where == "gpu" else [str(place.python), *map(str, example)]
        environ = place.environ(**({"JAX_PLATFORMS": "cpu"} if where == "cpu" else {}))
        step.run([*place.ranks(2), *program], environ=environ, cwd=place.work)
        losses[where] = json.loads(file.read_text())
    return compared(losses["gpu"], losses["cpu"])


def compared(got: Sequence[float], want: Sequence[float]) -> str:
    """Returns how far the losses on GPUs are from those on CPUs.

    Raises:
        StepError: they are too far away.
    """
    if len(got) != len(want) or not want:
        raise StepError(f"expected as many losses on GPUs as on CPUs, got {len(got)} and {len(want)}")
    away = [abs(a - b) / abs(b) for a, b in zip(got, want, strict=True)]
    worst = max(away, key=lambda x: (x != x, x))  # NaN is the worst
    text = f"{len(got)} steps, loss {got[0]:.3f} to {got[-1]:.3f}, at most {worst:.1e} away from that on CPUs"
    if not worst <= _TOLERANCE:  # `not <=` also catches NaN
        raise StepError(text)
    return text


def about(place: Place) -> Mapping[str, str]:
    """Returns what the report says about the machine."""
    facts = place.facts
    if "jax" not in facts:
        return {}
    takes = {True: "MPI says that it takes it", False: "MPI says that it does not take it"}
    return {
        "pycollective": facts["pycollective"],
        "GPU": f"{len(gpus_of_host(place))} x {gpus_of_host(place)[0]}",
        "driver, runtime": f"CUDA {facts['driver']}, {facts['cuda']}",
        "JAX": f"{facts['jax']}, Python {facts['python']}",
        "MPI": facts["mpi"],
        "device memory": takes.get(facts["takes_device_memory"], "MPI does not say whether it takes it"),
        "XLA's flags": facts.get("xla_flags") or "none: it autotunes",
        "cores": str(facts["cores"]),
    }


class PlannedStep(NamedTuple):
    """A step that is not begun.

    Attributes:
        name: its name.
        limit_s: the seconds that it may take.
        work: does it, and returns the text for the table.
        fraction: the fraction of the time until the deadline that it may take, if that is more.
    """

    name: str
    limit_s: float
    work: Callable[[Step], str]
    fraction: float = 0.0


def steps_of(place: Place) -> list[PlannedStep]:
    """Returns the steps, most important first. Their limits add up to 480 s."""
    largest = "16M" if place.quick else "256M"

    def collective(ranks: int) -> Callable[[Step], str]:
        return lambda step: tests(place, step, "collective", FILES, ranks, "off")

    return [
        PlannedStep("what is there", 30, lambda step: look(place, step)),
        PlannedStep("pycollective doctor", 10, lambda step: doctor(place, step)),
        PlannedStep("C++ device tests", 40, lambda step: device_tests(place, step)),
        PlannedStep("collective tests, 2 ranks", 45, collective(2), 0.3),
        PlannedStep("soak", 45, lambda step: soak(place, step)),
        PlannedStep("latency", 30, lambda step: latency(place, step)),
        PlannedStep("pieces", 35, lambda step: pieces(place, step, largest)),
        PlannedStep("overlap, by the clock", 20, lambda step: overlap(place, step)),
        PlannedStep("overlap, in a profile", 1, lambda step: overlap_in_profile(place, step)),
        PlannedStep("dispatch ahead", 40, lambda step: dispatch_ahead(place, step)),
        PlannedStep("bandwidth, 2 ranks", 40, lambda step: bandwidth(place, step, ("1M", largest))),
        PlannedStep("training, 2 ranks", 25, lambda step: training(place, step)),
        PlannedStep("NCCL beside MPI", 24, lambda step: several_gpus(place, step)),
        PlannedStep("named axes, 2 ranks", 35, lambda step: named_axes(place, step), 0.5),
        PlannedStep("collective tests, 4 ranks", 20, collective(4), 0.6),
        PlannedStep("collective tests, 1 rank", 25, collective(1)),
        PlannedStep("collective tests, 2 ranks, direct", 15, lambda step: direct_tests(place, step)),
    ]


def run_all(runner: Runner, place: Place) -> None:
    """Runs all steps. If the first finds out nothing about the machine, the others are not begun."""
    first, *others = steps_of(place)
    runner.step(first.name, first.limit_s, first.work)
    for name, limit_s, work, fraction in others:
        if "jax" not in place.facts:
            runner.skip(name, f"nothing is known about this machine: {first.name!r} has failed")
            continue
        runner.step(name, limit_s, work, fraction=0.0 if place.quick else fraction)
        if name.startswith("bandwidth") and (why := place.facts["mpi4jax"]):
            runner.skip("bandwidth of mpi4jax's staging", why)
