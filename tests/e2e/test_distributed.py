"""Global arrays as users start them: programs that know nothing of this package, and how they end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests import unoptimised
from tests.e2e.launch import AS_ROOT, check_same_numbers, limited, mpirun, of_processes

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
    return limited(command, timeout, env={**ENVIRON, **(env or {})})


def printed(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    """The lines of JSON of all processes, in the order of the processes."""
    assert done.returncode == 0, done.stderr
    return of_processes(done.stdout)


@pytest.mark.library
def test_a_program_that_knows_nothing_of_this_package() -> None:
    by_mpi = printed(run(2, str(UNMODIFIED)))
    as_module = (sys.executable, "-m", "tests.e2e.unmodified")
    gloo = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo", "PYTHONPATH": str(UNMODIFIED.parents[2])}
    by_gloo = printed(run(2, *as_module, env=gloo))
    assert [line["process"] for line in by_mpi] == [0, 1]
    assert {line["processes"] for line in by_mpi} == {2}
    check_same_numbers(by_mpi, by_gloo)
    assert by_mpi[0]["losses"][-1] < 0.1 * by_mpi[0]["losses"][0]


def test_variables_that_a_program_sets_and_a_process_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, sys\n"
        "os.environ['JAX_ENABLE_X64'] = '1'\n"
        "from jax.distributed import initialize\n"
        "import jax, jax.numpy as jnp\n"
        "from jax.experimental import multihost_utils\n"
        "initialize(None, initialization_timeout=30)\n"
        "all_ = multihost_utils.process_allgather(jnp.float64(jax.process_index()))\n"
        "said = f'{all_.dtype} {all_.tolist()} {__name__} {sys.argv[1:]} {sys.path[0]}'\n"
        "with open(f'{sys.path[0]}/said{jax.process_index()}', 'w') as file:\n"  # a launcher may lose what it printed
        "    file.write(said)\n"
        "multihost_utils.sync_global_devices('both have written')\n"
        "if jax.process_index() == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "multihost_utils.sync_global_devices('never')\n"
    )
    done = run(2, str(program), "--option", "value")
    assert done.returncode not in (0, 124, 137), done.stderr
    said = [(tmp_path / f"said{rank}").read_text() for rank in range(2)]
    assert said == [f"float64 [0.0, 1.0] __main__ ['--option', 'value'] {tmp_path}"] * 2


def test_what_a_program_does_at_its_end(tmp_path: Path) -> None:
    """Its module is still there, and its processes may meet for the first time."""
    program = tmp_path / "program.py"
    program.write_text(
        "import atexit, pickle, sys\n"
        "import jax\n"
        "from jax.experimental import multihost_utils\n"
        "class State: pass\n"
        "def last():\n"
        "    multihost_utils.sync_global_devices('end')\n"
        "    sys.stdout.write(f'{len(pickle.dumps(State())) > 0}\\n')\n"
        "    sys.stdout.flush()\n"
        "atexit.register(last)\n"
        "jax.distributed.initialize(coordinator_address=None, num_processes=None, process_id=None)\n"
        "jax.devices()\n"
    )
    done = run(2, str(program))
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line] == ["True", "True"], done.stderr


def test_what_is_no_python_program() -> None:
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


def test_a_command_that_exits_with_a_code_ends_all() -> None:
    text = """
assert sys.argv == ["-c", "word"], sys.argv
from pycollective.faults import rank_exit
rank_exit._OTHERS_EXIT_TIMEOUT_S = 1.0
if rank == 1: sys.exit(3)
total()
"""
    done = run(2, sys.executable, "-W", "error", "-c", PREFIX + text, "word")
    assert done.returncode == 3, done.stderr
    assert "rank 1 of 2 exited with code 3" in done.stderr


@pytest.mark.library
def test_programs_that_differ_and_a_call_that_one_process_leaves_out(tmp_path: Path) -> None:
    text = """
y = jax.make_array_from_callback((2 * 8 * (rank + 1),), NamedSharding(mesh, P("x")), lambda i: np.ones(8 * (rank + 1)))
try:
    jax.block_until_ready(jax.jit(lambda y: y * 2, out_shardings=NamedSharding(mesh, P()))(y))
except jax.errors.JaxRuntimeError as error:
    sys.stderr.write(" ".join(str(error).split()) + "\\n")
if rank == 0: total()
else: time.sleep(100)
"""
    done = ends(tmp_path, text, PYCOLLECTIVE_TIMEOUT="3")
    assert done.returncode not in (0, 124, 137)
    differ = [line for line in done.stderr.splitlines() if "expected the same call on every rank" in line]
    assert len(differ) == 2, done.stderr
    assert "allgather(float32[8]) here and allgather(float32[16]) on rank 1 (rank 0 of 2" in "".join(differ)
    assert "expected an answer from the other ranks within 3 s, got none for" in done.stderr
    assert re.search(r"rank 0 has waited in collective \d+ of communicator global arrays, allreduce", done.stderr)


TOLD = """
import sys

def told(call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        sys.stdout.write(" ".join(str(error).split()) + "\\n")
"""

# tests/distributed refuses a second call after the first one.
REFUSALS = {
    "before JAX has started": (
        """
import pycollective as pc
told(lambda: pc.distributed.initialize(collectives="nccl"))
told(pc.distributed.initialize)
pc.init()
told(pc.distributed.initialize)
""",
        # It exists, and XLA does not look into it until something imports jaxlib.
        {"MPITRAMPOLINE_DELAY_INIT": "1", "MPITRAMPOLINE_LIB": "/lib/libother.so"},
        [
            "expected collectives to be one of ('mpi', 'gloo'), got 'nccl'",
            "got MPITRAMPOLINE_LIB=/lib/libother.so. Unset MPITRAMPOLINE_LIB",
            "expected a process in which JAX has not started, got pycollective.init()",
        ],
    ),
    "jax first": (
        """
import jax
import pycollective as pc
told(pc.distributed.initialize)
jax.devices()
told(pc.distributed.initialize)
""",
        {},
        [
            "got jax imported before pycollective. Move 'import pycollective' before 'import jax'",
            "expected a process in which JAX has not started, got a use of JAX's devices",
        ],
    ),
    "several devices": (
        "import pycollective as pc\ntold(pc.distributed.initialize)",
        {"JAX_NUM_CPU_DEVICES": "2"},
        ["expected one CPU device for each rank"],
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MPITRAMPOLINE_LIB", raising=False)  # these tests import pycollective, which has set it
    text, env, expected = REFUSALS[case]
    program = tmp_path / "program.py"
    program.write_text(TOLD + text)
    done = mpirun(1, str(program), timeout=SHORT, env=env)
    assert done.returncode == 0, done.stderr
    for line, part in zip(done.stdout.splitlines(), expected, strict=True):
        assert part in line


def test_xla_without_our_initialize_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import pycollective, jax\n"
        "jax.config.update('jax_cpu_collectives_implementation', 'mpi')\n"
        "import socket\n"
        "with socket.create_server(('127.0.0.1', 0)) as free: port = free.getsockname()[1]\n"
        "jax.distributed.initialize(f'127.0.0.1:{port}', 1, 0)\n"
        "jax.devices()\n"
    )
    done = mpirun(1, str(program), timeout=SHORT)
    assert done.returncode not in (0, 124, 137)
    expected = "expected pycollective.distributed.initialize() before XLA's collectives by MPI, got XLA without it."
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
