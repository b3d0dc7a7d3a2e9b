"""How programs end: in order, by an exception on one rank, by a call that one rank never makes, by a wrong launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.launch import mpirun

whole = pytest.mark.whole
SHORT = 120  # seconds: none of these should take a tenth of it


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "program.py"
    path.write_text("import sys, time, jax, jax.numpy as jnp\nimport pycollective as pc\ncomm = pc.init()\n" + text)
    return str(path)


def run(tmp_path: Path, text: str, ranks: int = 2, **options: object) -> subprocess.CompletedProcess[str]:
    return mpirun(ranks, write(tmp_path, text), timeout=SHORT, **options)  # type: ignore[arg-type]


@pytest.mark.library
def test_an_exception_ends_all_ranks(tmp_path: Path) -> None:
    done = run(tmp_path, "if comm.rank == 1: raise ValueError('no luck')\npc.psum(1).block_until_ready()\n")
    assert done.returncode not in (0, 124, 137)
    assert done.stderr.count("pycollective: rank 1 of 2 raised; ending all ranks.") == 1
    assert done.stderr.count("Traceback (most recent call last)") == 1
    assert done.stderr.count("ValueError: no luck") == 1


@whole
@pytest.mark.library
def test_an_exception_on_all_ranks_is_told_once(tmp_path: Path) -> None:
    # The other ranks wait a moment before they print; the launcher has ended them by then.
    done = run(tmp_path, "pc.barrier()\nraise ValueError('no luck')\n")
    assert done.returncode not in (0, 124, 137)
    assert "pycollective: rank 0 of 2 raised; ending all ranks." in done.stderr
    assert 1 <= done.stderr.count("ValueError: no luck") <= 2  # a slow launcher may let the second rank print


@pytest.mark.library
def test_an_error_of_mpi_is_an_exception_with_all_names(tmp_path: Path) -> None:
    text = r"""
try:
    if comm.rank == 0:
        pc.send(jnp.zeros(5), comm, dest=1)
    else:
        pc.recv(jnp.zeros(3), comm, source=0).block_until_ready()
except Exception as error:
    sys.stdout.write("caught " + " ".join(str(error).split()) + "\n")
pc.barrier()
sys.stdout.write(f"alive {comm.rank}\n")
"""
    done = run(tmp_path, text)
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"caught .*pycollective\.recv: expected MPI_Recv .*runcat.*\(rank 1 of 2, communicator world\)", done.stdout
    )
    assert sorted(re.findall(r"alive (\d)", done.stdout)) == ["0", "1"]


def test_a_program_of_one_process_needs_no_launcher(tmp_path: Path) -> None:
    program = write(tmp_path, "print(pc.psum(3), comm)\nraise KeyError('mine')\n")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=SHORT)
    assert done.stdout.strip() == "3 Communicator(world, rank 0 of 1)"
    assert done.stderr.count("KeyError: 'mine'") == 1
    assert "ending all ranks" not in done.stderr
    assert done.returncode == 1


@pytest.mark.library
def test_work_under_way_is_finished_at_exit(tmp_path: Path) -> None:
    # The program is dispatched and never waited for: its sum must be computed before MPI is finalised.
    text = """
from jax import lax
@pc.jit
def late(m):
    m = lax.fori_loop(0, 40, lambda _, m: jnp.tanh(m @ m), m)
    y = pc.psum(m.sum() * 0 + 1)
    jax.debug.print("rank {r} sums {y}", r=comm.rank, y=y, ordered=True)
    return y
late(jnp.ones((300, 300)))
"""
    done = run(tmp_path, text)
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank (\d) sums 2\.0", done.stdout)) == ["0", "1"]


@pytest.mark.library
def test_a_wait_without_end_is_reported_by_every_rank_that_waits(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import time, jax.numpy as jnp\nimport pycollective as pc\n"
        "comm = pc.init(timeout=3)\n"
        "if comm.rank == 0: time.sleep(60)\n"
        "def stuck_here(): pc.psum(jnp.ones(3)).block_until_ready()\n"
        "stuck_here()\n"
    )
    done = mpirun(3, str(program), timeout=SHORT)
    assert done.returncode not in (0, 124, 137)
    for rank in (1, 2):
        report = (
            r"pycollective\.allreduce: expected an answer from the other ranks within 3 s, got none for \d+\.\d s "
            rf"\(rank {rank} of 3, communicator world, 12 bytes\)\. Ending all ranks"
        )
        assert re.search(report, done.stderr), done.stderr
    assert done.stderr.count("in stuck_here") >= 2
    assert "rank 0 of 3" not in done.stderr


@whole
def test_a_rank_that_leaves_says_that_it_waits(tmp_path: Path) -> None:
    text = "if comm.rank == 1: sys.exit(0)\npc.psum(jnp.ones(3)).block_until_ready()\n"
    done = run(tmp_path, text, env={"PYCOLLECTIVE_TIMEOUT": "12"})  # the rank prints its notice after 10 s
    assert done.returncode not in (0, 124, 137)
    assert "pycollective: rank 1 of 2 has ended and waits for the other ranks to end." in done.stderr
    assert "pycollective.allreduce: expected an answer from the other ranks" in done.stderr


@whole
@pytest.mark.library
def test_the_timeout_bounds_the_wait_of_a_rank_that_has_ended(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import time\nimport pycollective as pc\ncomm = pc.init(timeout=2)\nif comm.rank == 0: time.sleep(60)\n"
    )
    done = mpirun(2, str(program), timeout=40)
    assert done.returncode not in (0, 124, 137)
    assert re.search(
        r"pycollective\.exit: expected the other ranks to end within 2 s, got some that have not ended after \d\.\d s "
        r"\(rank 1 of 2\)\. Ending all ranks\. Look for a collective that this rank did not reach\.",
        done.stderr,
    ), done.stderr


LATE = """
from jax import lax
@pc.jit
def late(m):
    m = lax.fori_loop(0, 40, lambda _, m: jnp.tanh(m @ m), m)
    return pc.recv(jnp.zeros(3), comm, source=0) + m[0, :3]
"""
WAIT = "pc.psum(jnp.ones(3)).block_until_ready()\n"


@pytest.mark.parametrize(
    ("leave", "code"),
    [
        pytest.param("sys.exit(3)", 3, marks=pytest.mark.library),
        pytest.param("sys.exit('no luck')", 1, marks=whole),
        pytest.param("exits(5)", 5, marks=whole),  # from sys import exit as exits, before init
        # The rank has dispatched a call that the others do not make; that must not delay its end.
        pytest.param("late(jnp.ones((300, 300))); raise SystemExit(6)", 6, marks=whole),
        # A library for tracebacks has replaced the hook.
        pytest.param("sys.excepthook = lambda *_: sys.stderr.write('pretty'); raise ValueError", 1, marks=whole),
    ],
)
def test_an_exit_code_on_one_rank_ends_all_with_it(leave: str, code: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom sys import exit as exits, exit\nimport jax.numpy as jnp\nimport pycollective as pc\n"
        f"comm = pc.init()\n{LATE}if comm.rank == 1:\n    {leave}\n{WAIT}{WAIT}"
    )
    done = mpirun(2, str(program), timeout=60)
    assert done.returncode == code, done.stderr
    assert f"pycollective: rank 1 of 2 exited with code {code}, others did not; ending all ranks." in done.stderr
    assert ("no luck" in done.stderr) == ("no luck" in leave)


@whole
def test_an_exit_code_of_a_module(tmp_path: Path) -> None:
    write(tmp_path, f"if comm.rank == 1: raise SystemExit(comm.rank + 8)\n{WAIT}")
    done = mpirun(2, "-m", "program", timeout=60, cwd=tmp_path, env={"PYTHONPATH": _with(tmp_path)})
    assert done.returncode == 9, done.stderr


def _with(folder: Path) -> str:
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


@whole
@pytest.mark.library
def test_an_exit_code_of_all_ranks_is_theirs(tmp_path: Path) -> None:
    done = run(tmp_path, "print('end')\nsys.exit(5)\n")
    assert done.returncode == 5
    assert done.stdout.split() == ["end"] * 2
    assert "ending all ranks" not in done.stderr


@whole
def test_an_exit_that_is_caught_is_none(tmp_path: Path) -> None:
    text = """
for code in (3, "text", None):
    try:
        sys.exit(code)
    except SystemExit as error:
        assert error.code == code, error.code
        error.code = 7
        assert error.code == 7 and SystemExit(8).code == 8 and SystemExit(1, 2).code == (1, 2)
sys.exit(0 if comm.rank else None)
"""
    done = run(tmp_path, text)
    assert (done.returncode, done.stderr) == (0, "")


@whole
def test_a_failing_test_of_pytest_on_one_rank_ends_all(tmp_path: Path) -> None:
    test = tmp_path / "test_on_ranks.py"
    test.write_text(
        "import jax.numpy as jnp\nimport pycollective as pc\n\n\ndef test_it():\n    comm = pc.init()\n"
        "    assert comm.rank == 0, 'no luck'\n    pc.psum(jnp.ones(3)).block_until_ready()\n"
    )
    done = mpirun(2, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(test), timeout=60, cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "AssertionError: no luck" in done.stdout
    assert "rank 1 of 2 exited with code 1, others did not; ending all ranks." in done.stderr


@pytest.mark.library
def test_an_exception_in_a_thread_ends_all_ranks(tmp_path: Path) -> None:
    text = f"""
import threading
def loads():
    raise ValueError("no luck")
def leaves():
    sys.exit(3)
threading.Thread(target=leaves).start()  # it ends only that thread
pc.barrier()
if comm.rank == 1: threading.Thread(target=loads, name="loader").start()
{WAIT}{WAIT}if comm.rank == 1: time.sleep(30)
"""
    done = run(tmp_path, text)
    assert done.returncode not in (0, 124, 137)
    assert done.stderr.count("pycollective: rank 1 of 2 raised in a thread, 'loader'; ending all ranks.") == 1
    assert "ValueError: no luck" in done.stderr


@whole
def test_an_exception_that_python_ignores_is_told_with_its_rank(tmp_path: Path) -> None:
    text = """
def numbers():
    try:
        yield 1
    finally:
        raise ValueError("no luck")
if comm.rank == 1:
    left = numbers()
    next(left)
    del left
print(pc.psum(1))
"""
    done = run(tmp_path, text)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "2"]
    assert done.stderr.count("pycollective: rank 1 of 2 goes on after this exception, which Python ignores:") == 1
    assert done.stderr.count("ValueError: no luck") == 1


@pytest.mark.library
def test_an_error_that_nobody_read_ends_all_ranks(tmp_path: Path) -> None:
    text = """
@jax.jit
def late(m):
    m = jax.lax.fori_loop(0, 40, lambda _, m: jnp.tanh(m @ m), m)
    pc.send(jnp.zeros(5 if comm.rank == 0 else 3) + m[0, 0], comm, dest=1 - comm.rank)
    return pc.recv(jnp.zeros(3), comm, source=1 - comm.rank)  # rank 0 sends more to rank 1 than this
late(jnp.ones((300, 300)))
print("end")
"""
    done = run(tmp_path, text)
    assert done.returncode not in (0, 124, 137), done.stderr
    assert done.stdout.split() == ["end"] * 2
    assert "pycollective: rank 1 of 2 ends with an error in a program; ending all ranks." in done.stderr
    assert "pycollective.recv: expected MPI_Recv to succeed" in done.stderr


@whole
@pytest.mark.parametrize("how", ["script", "command"])
def test_an_exception_under_ipython_ends_all_ranks(how: str, tmp_path: Path) -> None:
    program = write(tmp_path, f"if comm.rank == 1: raise ValueError('no luck')\n{WAIT}")
    arguments = [program] if how == "script" else ["-c", Path(program).read_text()]
    done = mpirun(2, "-m", "IPython", *arguments, timeout=60, env={"IPYTHONDIR": str(tmp_path)})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no luck" in done.stdout + done.stderr
    assert "rank 1 of 2 exited with code 1, others did not; ending all ranks." in done.stderr


@whole
def test_an_exception_in_a_session_of_ipython_does_not_end_it(tmp_path: Path) -> None:
    cells = "import pycollective as pc\ncomm = pc.init()\n1 / 0\nprint('sum', pc.psum(5))\nexit\n"
    done = subprocess.run(
        [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner"],
        input=cells,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "IPYTHONDIR": str(tmp_path)},
    )
    assert "ZeroDivisionError" in done.stdout
    assert "sum 5" in done.stdout
    assert done.returncode == 0


@whole
def test_an_exception_in_a_cell_names_its_rank(tmp_path: Path) -> None:
    program = tmp_path / "session.py"
    program.write_text("""
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
for cell in "import pycollective as pc", "comm = pc.init()", "assert comm.rank == 0, 'no luck'", "print(pc.psum(5))":
    shell.run_cell(cell)
""")
    done = mpirun(2, str(program), timeout=60, env={"IPYTHONDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split().count("10") == 2
    assert done.stderr.count("a cell has raised") == 1
    assert "rank 1 of 2: a cell has raised; ranks that wait for this one wait on." in done.stderr


@whole
@pytest.mark.library
def test_ranks_that_see_no_other_are_refused(tmp_path: Path) -> None:
    # Plain srun, or the mpiexec of another MPI, starts several processes that are a world of their own each.
    program = write(tmp_path, "print('never')\n")
    for variables, advice in (
        ({"SLURM_STEP_NUM_TASKS": "4"}, "srun --mpi=pmi2"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "use that library's mpiexec"),
    ):
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "OMPI_COMM"))}
        done = subprocess.run(
            [sys.executable, program], capture_output=True, text=True, timeout=SHORT, env={**environ, **variables}
        )
        assert done.returncode == 1
        assert "never" not in done.stdout
        assert "init: expected a world of" in done.stderr
        assert "got one rank that sees no other" in done.stderr
        assert advice in done.stderr
        environ["PYCOLLECTIVE_ALLOW_SINGLETON"] = "1"
        allowed = subprocess.run(
            [sys.executable, program], capture_output=True, text=True, timeout=SHORT, env={**environ, **variables}
        )
        assert allowed.stdout.strip() == "never"


@whole
@pytest.mark.library
def test_mpi_without_threads_is_refused(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import mpi4py\nmpi4py.rc.thread_level = 'single'\nimport pycollective as pc\npc.init()\n")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=SHORT)
    assert done.returncode == 1
    assert "init: expected MPI at THREAD_MULTIPLE" in done.stderr
    assert "Leave mpi4py.rc.thread_level at 'multiple'" in done.stderr


@whole
def test_unequal_devices_are_refused(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from mpi4py import MPI\nimport jax\njax.config.update('jax_num_cpu_devices', 1 + MPI.COMM_WORLD.rank)\n"
        "import pycollective as pc\npc.init()\n"
    )
    done = mpirun(2, str(program), timeout=SHORT)
    assert done.returncode not in (0, 124, 137)
    text = r"init: expected the same number of local devices on every rank, got 1 on ranks \[0\], 2 on ranks \[1\]"
    assert re.search(text, done.stderr), done.stderr


@whole
def test_a_hang_in_a_test_is_a_failure_with_all_stacks(tmp_path: Path) -> None:
    """Checks the guard of the tests themselves, ``no_hang`` in tests/under_mpirun.py."""
    test = Path(__file__).parents[1] / "collective" / "test_hang_for_the_guard_alone.py"
    test.write_text(
        "import jax.numpy as jnp\nimport pycollective as pc\n\n\n"
        "def test_hang(world):\n    if world.rank == 0:\n        never_comes()\n"
        "    pc.psum(jnp.ones(3), world).block_until_ready()\n\n\n"
        "def never_comes():\n    import time\n\n    time.sleep(100)\n"
    )
    try:
        done = mpirun(
            2, "-m", "pytest", "-o", "faulthandler_timeout=5", str(test), timeout=SHORT, cwd=Path(__file__).parents[2]
        )
    finally:
        test.unlink()
    assert done.returncode not in (0, 124, 137)
    assert "in never_comes" in done.stderr  # rank 0's stack
    assert "in test_hang" in done.stderr
    assert done.stderr.count("Timeout (0:00:05)!") == 2
