"""Global arrays as users start them: programs that know nothing of this package, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import unoptimised
from tests.e2e.launch import AS_ROOT, check_same_numbers, mpirun, of_processes

UNMODIFIED = Path(__file__).with_name("unmodified.py")
SHORT = 60

ENVIRON = {
    **{name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "JAX_NUM_", "XLA_FLAGS"))},
    **AS_ROOT,
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": unoptimised.flags(),
}


def run(
    ranks: int, *program: str, env: Mapping[str, str] | None = None, timeout: float = SHORT
) -> subprocess.CompletedProcess[str]:
    """``pycollective run --distributed`` of a program."""
    pycollective = str(Path(sys.executable).parent / "pycollective")
    command = [pycollective, "run", "--distributed", "-n", str(ranks), "--oversubscribe", *program]
    return subprocess.run(
        ["timeout", "-k", "5", str(timeout), *command],
        capture_output=True,
        text=True,
        env={**ENVIRON, **(env or {})},
        check=False,
    )


def printed(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The lines of JSON of all processes, in the order of the processes."""
    assert done.returncode == 0, done.stderr
    return of_processes(done.stdout)


@pytest.mark.library
def test_a_program_that_knows_nothing_of_this_package() -> None:
    by_mpi = printed(run(2, str(UNMODIFIED)))
    by_gloo = printed(run(2, str(UNMODIFIED), env={"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo"}))
    assert [line["process"] for line in by_mpi] == [0, 1]
    assert {line["processes"] for line in by_mpi} == {2}
    check_same_numbers(by_mpi, by_gloo)
    assert by_mpi[0]["losses"][-1] < 0.1 * by_mpi[0]["losses"][0]


def test_four_processes_with_variables_that_the_program_sets(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "os.environ['JAX_ENABLE_X64'] = '1'\n"
        "from jax.distributed import initialize\n"
        "import jax, jax.numpy as jnp\n"
        "from jax.experimental import multihost_utils\n"
        "initialize(initialization_timeout=30)\n"
        "all_ = multihost_utils.process_allgather(jnp.float64(jax.process_index()))\n"
        "assert all_.dtype == 'float64' and all_.tolist() == [0.0, 1.0, 2.0, 3.0], all_\n"
        "sys.stdout.write(f'{__name__} {sys.argv[1:]} {sys.path[0]}\\n')\n"
    )
    done = run(4, str(program), "--option", "value")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [f"__main__ ['--option', 'value'] {tmp_path}"] * 4


def test_modules_and_commands() -> None:
    command = "import jax, sys; jax.distributed.initialize(); sys.stdout.write(f'{jax.device_count()} {sys.argv}\\n')"
    done = run(2, sys.executable, "-W", "error", "-c", command, "word")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["2 ['-c', 'word']"] * 2
    done = run(2, sys.executable, "-m", "tests.e2e.unmodified", env={"PYTHONPATH": str(UNMODIFIED.parents[2])})
    assert len(printed(done)) == 2
    done = run(2, "ls")
    assert done.returncode == 2
    assert "pycollective.run: expected a Python program after --distributed, got" in done.stderr


PREFIX = """
import os, signal, sys, time
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

jax.distributed.initialize()
rank = jax.process_index()
mesh = jax.make_mesh((jax.device_count(),), ("x",))
x = jax.make_array_from_callback((jax.device_count() * 4,), NamedSharding(mesh, P("x")), lambda index: np.ones(4))
total = lambda: jax.block_until_ready(jax.jit(jnp.sum)(x))
total()
"""


def ends(tmp_path: Path, text: str, **env: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(PREFIX + text)
    return run(2, str(program), env=env)


@pytest.mark.library
def test_a_process_that_raises_ends_all(tmp_path: Path) -> None:
    done = ends(tmp_path, "if rank == 1: raise ValueError('mine')\ntotal()")
    assert done.returncode not in (0, 124, 137)
    assert done.stderr.count("ValueError: mine") == 1
    assert "pycollective: rank 1 of 2 raised; ending all ranks." in done.stderr


def test_a_process_that_raises_before_it_starts_jax_ends_all(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os\nif os.environ['PMI_RANK'] == '1': raise ValueError('mine')\n" + PREFIX)
    done = run(2, str(program))
    assert done.returncode not in (0, 124, 137)
    assert done.stderr.count("ValueError: mine") == 1


def test_a_process_that_exits_with_a_code_ends_all(tmp_path: Path) -> None:
    done = ends(tmp_path, "if rank == 1: sys.exit(3)\ntotal()")
    assert done.returncode == 3, done.stderr
    assert "rank 1 of 2 exited with code 3" in done.stderr


def test_a_process_that_is_killed_ends_all(tmp_path: Path) -> None:
    done = ends(tmp_path, "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ntotal()")
    assert done.returncode not in (0, 124, 137)


@pytest.mark.library
def test_a_call_that_one_process_leaves_out_ends_in_a_report(tmp_path: Path) -> None:
    text = "if rank == 0: total()\nelse: time.sleep(100)"
    done = ends(tmp_path, text, PYCOLLECTIVE_TIMEOUT="3")
    assert done.returncode not in (0, 124, 137)
    expected = r"pycollective.allreduce: expected an answer from the other ranks within 3 s, got none for"
    assert expected in done.stderr
    assert "communicator global arrays" in done.stderr


def test_programs_that_differ_are_an_error_on_both(tmp_path: Path) -> None:
    text = """
y = jax.make_array_from_callback((2 * 8 * (rank + 1),), NamedSharding(mesh, P("x")), lambda i: np.ones(8 * (rank + 1)))
try:
    jax.block_until_ready(jax.jit(lambda y: y * 2, out_shardings=NamedSharding(mesh, P()))(y))
except jax.errors.JaxRuntimeError as error:
    sys.stdout.write(f"{error}\\n")
"""
    done = ends(tmp_path, text)
    said = [line for line in done.stdout.splitlines() if "expected the same call on every rank" in line]
    assert len(said) == 2, done.stderr
    assert "allgather(8 x float32) here and allgather(16 x float32) on rank 1 (rank 0 of 2" in "".join(said)


REFUSALS = {
    "jax first": (
        "import jax\nimport pycollective as pc\npc.distributed.initialize()",
        {},
        "got jax imported before pycollective. Move 'import pycollective' before 'import jax'",
    ),
    "another library": (
        "import pycollective as pc\npc.distributed.initialize()",
        # It exists, and XLA does not look into it until something imports jaxlib.
        {"MPITRAMPOLINE_DELAY_INIT": "1", "MPITRAMPOLINE_LIB": "/lib/libother.so"},
        "got MPITRAMPOLINE_LIB=/lib/libother.so. Unset MPITRAMPOLINE_LIB",
    ),
    "several devices": (
        "import pycollective as pc\npc.distributed.initialize()",
        {"JAX_NUM_CPU_DEVICES": "2"},
        "expected one CPU device for each rank",
    ),
    "after init": (
        "import pycollective as pc\npc.init()\npc.distributed.initialize()",
        {},
        "expected a process in which JAX has not started, got pycollective.init()",
    ),
    "twice": (
        "import pycollective as pc\npc.distributed.initialize()\npc.distributed.initialize()",
        {},
        "expected a process in which JAX has not started, got jax.distributed.initialize()",
    ),
    "unknown collectives": (
        "import pycollective as pc\npc.distributed.initialize(collectives='nccl')",
        {},
        r"expected collectives to be one of ('mpi', 'gloo'), got 'nccl'",
    ),
    "JAX's own initialize": (
        """
import pycollective, jax
jax.config.update('jax_cpu_collectives_implementation', 'mpi')
jax.distributed.initialize('127.0.0.1:47631', 1, 0)
jax.devices()
""",
        {},
        "expected pycollective.distributed.initialize() before XLA's collectives by MPI, got XLA without it.",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPITRAMPOLINE_LIB", raising=False)  # these tests import pycollective, which has set it
    text, env, expected = REFUSALS[case]
    program = tmp_path / "program.py"
    program.write_text(text + "\n")
    done = mpirun(1, str(program), timeout=SHORT, env=env)
    assert done.returncode not in (0, 124, 137)
    assert expected in done.stderr


def test_several_devices_by_gloo_and_a_proxy_that_nobody_reaches(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, sys\n"
        "import pycollective as pc, jax, jax.numpy as jnp\n"
        "comm = pc.distributed.initialize(collectives='gloo', timeout=30)\n"
        "total = pc.pmap(lambda x: jax.lax.psum(x, 'i'), 'i')(jnp.arange(2.0) + 2 * comm.rank)\n"
        "sys.stdout.write(f\"{jax.device_count()} {total.tolist()} {os.environ['http_proxy']}\\n\")\n"
    )
    proxy = "http://127.0.0.1:9"
    env = {"JAX_NUM_CPU_DEVICES": "2", "http_proxy": proxy, "https_proxy": proxy}
    done = mpirun(2, str(program), timeout=SHORT, env=env)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if "Gloo" not in line] == [f"4 [6.0, 6.0] {proxy}"] * 2
