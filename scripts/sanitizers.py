"""Runs tests under sanitizers: those in C++, then collective tests on two ranks and jobs whose ranks wait for ever.

For the latter it builds the compiled library with the sanitizers. XLA, MPI and Python are not compiled for them, so the
one for threads ignores what those do: it looks at the threads of this library, the monitor and its side channel among
them.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from jax.ffi import include_dir

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.native import build as native_tests  # noqa: E402
from tests.standin import compiler  # noqa: E402
from tests.unoptimised import flags as flags_for_fast_compilation  # noqa: E402

FLAGS = {
    "address": ["-fsanitize=address"],
    "undefined": ["-fsanitize=undefined", "-fno-sanitize-recover=undefined"],
    "thread": ["-fsanitize=thread"],
}
RUNTIMES = {"address": "libasan.so", "undefined": "libubsan.so", "thread": "libtsan.so"}

OPTIONS = {
    # Python and XLA keep memory until the process ends.
    "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
    "UBSAN_OPTIONS": "print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}
IN_PYTHON = {
    "PYCOLLECTIVE_MALLOC": "off",  # the sanitizer has an allocator of its own
    "TSAN_OPTIONS": f"{OPTIONS['TSAN_OPTIONS']}:ignore_noninstrumented_modules=1",
    # MPICH's UCX. The sanitizer takes addresses in another process for its own, and UCX's hooks run in threads that
    # have ended for the sanitizer.
    "UCX_TLS": "^cma",
    "UCX_MEM_EVENTS": "no",
    "UCX_MEM_MMAP_HOOK_MODE": "none",
}

COLLECTIVE = ["forward", "messages", "order", "agreement", "errors"]
"""Files of tests/collective. Which handlers run matters here, not which numbers come out."""

RACES = {"forgotten_waits"}
"""Tests in C++ that race on purpose: they show that the stand-in notices a wait that is left out."""

SPMD = ["calls", "order"]
"""Files of tests/spmd, on several local devices of each rank."""

REPORTS = ["tests/e2e/test_fault_rows.py", "tests/e2e/test_faults.py", "-k", "not_all_make or reported_once"]
"""Tests of jobs that end with a report: of a wait, or of a rank that has ended."""


def say(text: str) -> None:
    print(f"=== {text}", flush=True)


def build(kinds: list[str], tree: Path) -> None:
    """Makes a tree like this one, whose library has the sanitizers."""
    for part in ("pycollective", "tests", "native"):
        shutil.copytree(ROOT / part, tree / part, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    # Where JAX comes first XLA does not open the library: it would do so with RTLD_DEEPBIND, which the sanitizers
    # refuse.
    (tree / "sitecustomize.py").write_text("import jax\n")
    native = ROOT / "native"
    objects = tree / "objects"
    objects.mkdir(exist_ok=True)
    flags = [flag for kind in kinds for flag in FLAGS[kind]]
    common = [compiler(), "-std=c++17", "-O1", "-g1", "-fno-omit-frame-pointer", "-fPIC", "-fvisibility=hidden", *flags]

    def compiled(source: Path) -> str:
        made = str(objects / f"{source.stem}.o")  # no two files have the same name
        command = [*common, "-I", str(native), "-isystem", include_dir(), "-c", str(source), "-o", made]
        subprocess.run(command, check=True, timeout=600)
        return made

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        made = list(pool.map(compiled, sorted(native.rglob("*.cc"))))
    library = str(tree / "pycollective" / "_native.so")
    subprocess.run([*common, "-shared", *made, "-pthread", "-o", library], check=True, timeout=600)


def preloaded(kinds: list[str]) -> str:
    """The runtimes, which must be in the process before Python's own libraries.

    libstdc++ as well: the runtimes look for its functions when the process starts.
    """
    names = [RUNTIMES[kind] for kind in kinds] + ["libstdc++.so.6"]
    found = [
        subprocess.run([compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        for name in names
    ]
    return ":".join(path.strip() for path in found)


def run(name: str, command: list[str], tree: Path, env: dict[str, str]) -> bool:
    say(name)
    started = time.monotonic()
    done = subprocess.run(["timeout", "-k", "5", "900", *command], cwd=tree, env={**os.environ, **OPTIONS, **env})
    say(
        f"{name}: {'ok' if done.returncode == 0 else f'FAILED, exit {done.returncode}'} "
        f"({time.monotonic() - started:.0f} s)"
    )
    return done.returncode == 0


def at_fixed_addresses(kinds: list[str]) -> list[str]:
    """Linux may place a program where the sanitizer of threads has its own memory."""
    return ["setarch", "-R"] if kinds == ["thread"] else []


def tests_in_cpp(kinds: list[str], folder: Path) -> bool:
    flags = [flag for kind in kinds for flag in FLAGS[kind]]
    good = True
    for program, names in native_tests.NAMES.items():
        if program in native_tests.EXPLORED:
            continue  # it has fibers, which the sanitizers do not know, and looks for races itself
        binary = native_tests.build(program, folder, flags=(*flags, "-fno-omit-frame-pointer"))
        for name in [name for name in names if kinds != ["thread"] or name not in RACES]:
            good &= run(f"{program} {name}", [*at_fixed_addresses(kinds), str(binary), name], folder, {})
    return good


def tests_in_python(kinds: list[str], tree: Path) -> bool:
    env = {
        **IN_PYTHON,
        "PYTHONPATH": str(tree),
        "JAX_PLATFORMS": "cpu",
        "PYCOLLECTIVE_RECORDS": "off",
        "XLA_FLAGS": flags_for_fast_compilation(),
    }
    start = [*at_fixed_addresses(kinds), "env", f"LD_PRELOAD={preloaded(kinds)}", sys.executable]
    pytest = [*start, "-m", "pytest", "-q", "--capture=sys", "-p", "no:cacheprovider"]
    launch = [str(Path(sys.executable).parent / "mpirun"), "-n", "2"]
    good = True
    for folder, names in {"collective": COLLECTIVE, "spmd": SPMD}.items():
        files = [f"tests/{folder}/test_{name}.py" for name in names]
        devices = {"JAX_NUM_CPU_DEVICES": "8"}
        good &= run(f"tests/{folder} on 2 ranks", [*launch, *pytest, *files], tree, {**env, **devices})
    return good & run("reports", [*pytest, *REPORTS], tree, env)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/sanitize", description=__doc__)
    for kind in FLAGS:
        parser.add_argument(f"--{kind}", action="store_true", help=f"the {kind} sanitizer; default all")
    return parser.parse_args()


def main() -> int:
    options = parsed()
    chosen = [kind for kind in FLAGS if getattr(options, kind)] or list(FLAGS)
    # The first two go into one build; the third one excludes the others.
    builds = [[kind for kind in chosen if kind != "thread"], [kind for kind in chosen if kind == "thread"]]
    good = True
    for kinds in filter(None, builds):
        tree = ROOT / "build" / "sanitize" / "-".join(kinds)
        tree.mkdir(parents=True, exist_ok=True)
        good &= tests_in_cpp(kinds, tree)
        say(f"builds the library for {' and '.join(kinds)}")
        build(kinds, tree)
        good &= tests_in_python(kinds, tree)
    say("ok" if good else "FAILED")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
