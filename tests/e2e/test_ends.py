"""How programs end: in order, by an exception on one rank, by a call that one rank never makes, by a wrong launcher."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import launch
from tests.e2e.launch import mpirun

whole = pytest.mark.whole
SHORT = 120  # seconds: none of these should take a tenth of it

# A rank that exits with a code waits for the others for less time than it does for users.
IMPATIENT = "from pycollective.faults import rank_exit\nrank_exit._OTHERS_EXIT_TIMEOUT_S = 1.0\n"
WAIT = "pc.psum(jnp.ones(3)).block_until_ready()\n"


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
def test_an_exception_on_all_ranks_is_told_once(tmp_path: Path) -> None:
    # The other ranks wait a moment before they print; the launcher has ended them by then.
    done = run(tmp_path, "pc.barrier()\nraise ValueError('no luck')\n")
    assert done.returncode not in (0, 124, 137)
    assert "pycollective: rank 0 of 2 raised; ending all ranks." in done.stderr
    assert 1 <= done.stderr.count("ValueError: no luck") <= 2  # a slow launcher may let the second rank print


AFTER_MPI = """
from mpi4py import MPI

compiled, part = jax.jit(lambda x: pc.psum(x, comm)), comm.split(0)
compiled(1.0).block_until_ready()
MPI.Finalize()
for use in (lambda: compiled(1.0), lambda: pc.psum(1.0, comm), lambda: pc.psum(1.0), lambda: part.split(0)):
    try:
        use()
    except Exception as error:
        print(error)
part.free()
print(comm)
"""


@pytest.mark.library
def test_a_use_after_the_end_of_mpi_is_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, AFTER_MPI, ranks=1)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    live = r"expected a live communicator, got {}.*\(rank 0 of 1.*\)\."
    for line, told in zip(
        lines,
        [
            live.format("one that has lost a rank, or that MPI.Finalize\\(\\) has ended"),
            live.format("world, which ended with MPI.Finalize\\(\\)") + " Use it before that",
            r"pycollective\.init: expected MPI that runs, got MPI after MPI\.Finalize\(\)\.",
            r"pycollective\.Communicator\.split: " + live.format("world/0, which ended with MPI.Finalize\\(\\)"),
            r"Communicator\(world, rank 0 of 1, finalized\)",
        ],
        strict=True,
    ):
        assert re.search(told, line), done.stdout


# What does not end a rank, and then the end of all ranks with one code. The last program is dispatched and never waited
# for: its sum must be computed before MPI is finalised.
GOES_ON = r"""
import threading

try:
    if comm.rank == 0:
        pc.send(jnp.zeros(5), comm, dest=1)
    else:
        pc.recv(jnp.zeros(3), comm, source=0).block_until_ready()
except Exception as error:
    sys.stdout.write("caught " + " ".join(str(error).split()) + "\n")
pc.barrier()

for code in (3, "text", None):
    try:
        sys.exit(code)
    except SystemExit as error:
        assert error.code == code, error.code
        error.code = 7
        assert error.code == 7 and SystemExit(8).code == 8 and SystemExit(1, 2).code == (1, 2)

leaves = threading.Thread(target=lambda: sys.exit(3))
leaves.start()
leaves.join()


def numbers():
    try:
        yield 1
    finally:
        raise ValueError("no luck")


if comm.rank == 1:
    left = numbers()
    next(left)
    del left


@pc.jit
def late(m):
    m = jax.lax.fori_loop(0, 40, lambda _, m: jnp.tanh(m @ m), m)
    y = pc.psum(m.sum() * 0 + 1)
    jax.debug.print("rank {r} sums {y}", r=comm.rank, y=y, ordered=True)
    return y


late(jnp.ones((300, 300)))
sys.exit(5)
"""


@pytest.mark.library
def test_what_does_not_end_a_rank_and_an_exit_code_of_all(tmp_path: Path) -> None:
    done = run(tmp_path, GOES_ON)
    assert done.returncode == 5, done.stderr
    assert "ending all ranks" not in done.stderr
    assert re.search(
        r"caught .*pycollective\.recv: CollectiveMismatch: expected a message of .*\(rank 1 of 2, communicator world\)",
        done.stdout,
    )
    assert sorted(re.findall(r"rank (\d) sums 2\.0", done.stdout)) == ["0", "1"]
    assert done.stderr.count("pycollective: rank 1 of 2 goes on after this exception, which Python ignores:") == 1
    assert done.stderr.count("ValueError: no luck") == 1
    assert done.stderr.count("Traceback") == 1


def test_a_program_of_one_process_needs_no_launcher(tmp_path: Path) -> None:
    program = write(tmp_path, "print(pc.psum(3), comm)\nraise KeyError('mine')\n")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=SHORT)
    assert done.stdout.strip() == "3 Communicator(world, rank 0 of 1)"
    assert done.stderr.count("KeyError: 'mine'") == 1
    assert "ending all ranks" not in done.stderr
    assert done.returncode == 1


# Each rank waits in a call that the other does not make; rank 1's is its first on a part of the ranks, so rank 1 waits
# while it makes the part's channel.
WAITS = """
import jax.numpy as jnp
import pycollective as pc

comm = pc.init(timeout=1)
assert pc.init(timeout=1.0, transport="native") is comm  # the same options again
x = jnp.ones(3)


def stuck_here():
    pc.psum(x, axis_index_groups=None if comm.rank == 0 else [[1, 0]]).block_until_ready()


stuck_here()
"""


def test_a_wait_without_end_is_reported_once_with_all_ranks(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(WAITS)
    done = mpirun(2, str(program), timeout=SHORT)
    assert done.returncode not in (0, 124, 137)
    report = r"expected an answer from the other ranks within 1 s, got none for \d+\.\d s; ending all ranks"
    assert len(re.findall(report, done.stderr)) == 1, done.stderr
    for rank, number, communicator in ((0, 1, "world"), (1, 1, r"world\[1, 0\]")):
        call = rf"collective {number} of communicator {communicator}, allreduce\(float32\[3\], op=sum\)"
        wait = rf"rank {rank} has waited in {call}, at program.py:\d+ \(stuck_here\)"
        assert len(re.findall(wait, done.stderr)) == 1, done.stderr
    assert "The ranks wait for each other" in done.stderr


def test_a_first_call_that_a_rank_does_not_make_is_reported_with_that_rank(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import time, jax.numpy as jnp\nfrom jax import lax\nimport pycollective as pc\n"
        "comm = pc.init(timeout=4)\n"
        "if comm.rank == 1:\n    time.sleep(300)\n"
        'pc.jit(lambda x: lax.psum(x, "i"), axis_name="i")(jnp.ones(3))\n'
    )
    done = mpirun(3, str(program), timeout=SHORT)
    assert done.returncode not in (0, 124, 137)
    assert len(launch.sentences(done.stderr)) == 1, done.stderr
    wait = r"ranks 0, 2 have waited in the first call of a function on communicator world for \d\.\d s\."
    assert re.search(wait, done.stderr), done.stderr
    assert re.search(r"Python on rank 1:\n +File \".*program.py\", line 6 in <module>", done.stderr), done.stderr
    assert "Look at rank 1: the others wait for it." in done.stderr, done.stderr
    assert "Traceback" not in done.stderr


@whole
def test_a_rank_that_does_not_start_is_waited_for_as_long_as_the_timeout(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import time\nimport pycollective as pc\nfrom mpi4py import MPI\n"
        "if MPI.COMM_WORLD.rank == 1: time.sleep(60)\n"
        "pc.init(timeout=1)\n"
    )
    done = mpirun(2, str(program), timeout=40)
    assert done.returncode not in (0, 124, 137)
    expected = r"pycollective\.init: expected the other ranks to start within 1 s, got no start of rank 1 after"
    assert re.search(rf"{expected} 1\.\d s \(rank 0 of 2\)", done.stderr), done.stderr


def test_a_rank_that_has_ended_says_that_it_waits_and_the_timeout_bounds_that(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys, time\nimport jax\nimport pycollective as pc\nfrom pycollective.faults import rank_exit\n"
        "from mpi4py import MPI\nMPI.COMM_WORLD.Barrier()\n"  # the timeout is also one for the start
        "rank_exit.NOTICE_S = 0.2\n"
        "comm = pc.init(timeout=1)\nif comm.rank == 0: time.sleep(60)\nsys.exit(0)\n"
    )
    done = mpirun(2, str(program), timeout=40)
    assert done.returncode not in (0, 124, 137)
    assert done.stderr.count("pycollective: rank 1 of 2 has ended and waits for the other ranks to end.") == 1
    assert re.search(
        r"pycollective\.exit: expected the other ranks to end within 1 s, got some that have not ended after \d\.\d s "
        r"\(rank 1 of 2\)\. Ending all ranks\. Look for a collective that this rank did not reach\.",
        done.stderr,
    ), done.stderr


LATE = """
@pc.jit
def late(m):
    m = jax.lax.fori_loop(0, 40, lambda _, m: jnp.tanh(m @ m), m)
    return pc.recv(jnp.zeros(3), comm, source=0) + m[0, :3]
"""


@pytest.mark.parametrize(
    ("leave", "code"),
    [
        # `exits` is sys.exit, from before init. The rank has dispatched a call that the others do not make; that must
        # not delay its end.
        pytest.param("late(jnp.ones((300, 300))); exits(5)", 5, marks=pytest.mark.library, id="exit"),
        # A library for tracebacks has replaced the hook.
        pytest.param("sys.excepthook = lambda *_: print('pretty'); raise ValueError", 1, marks=whole, id="hook"),
    ],
)
def test_an_exit_code_on_one_rank_ends_all_with_it(leave: str, code: int, tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom sys import exit as exits\nimport jax, jax.numpy as jnp\nimport pycollective as pc\n"
        f"{IMPATIENT}comm = pc.init()\n{LATE}if comm.rank == 1:\n    {leave}\n{WAIT}{WAIT}"
    )
    done = mpirun(2, str(program), timeout=60)
    assert done.returncode == code, done.stderr
    assert f"pycollective: rank 1 of 2 exited with code {code}, others did not; ending all ranks." in done.stderr


@whole
def test_a_failing_test_of_pytest_on_one_rank_ends_all(tmp_path: Path) -> None:
    test = tmp_path / "test_on_ranks.py"
    test.write_text(
        f"import jax.numpy as jnp\nimport pycollective as pc\n{IMPATIENT}\n\ndef test_it():\n    comm = pc.init()\n"
        f"    assert comm.rank == 0, 'no luck'\n    {WAIT}"
    )
    pytest_alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", str(test))
    done = mpirun(2, *arguments, timeout=60, cwd=tmp_path, env=pytest_alone)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "AssertionError: no luck" in done.stdout
    assert "rank 1 of 2 exited with code 1, others did not; ending all ranks." in done.stderr


def test_an_exception_in_a_thread_ends_all_ranks(tmp_path: Path) -> None:
    text = f"""
import threading
def loads():
    raise ValueError("no luck")
if comm.rank == 1: threading.Thread(target=loads, name="loader").start()
{WAIT}{WAIT}if comm.rank == 1: time.sleep(30)
"""
    done = run(tmp_path, text)
    assert done.returncode not in (0, 124, 137)
    assert done.stderr.count("pycollective: rank 1 of 2 raised in a thread, 'loader'; ending all ranks.") == 1
    assert "ValueError: no luck" in done.stderr


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
    assert done.stderr.count("pycollective: rank 1 of 2 ends with an error in a program; ending all ranks.") == 1
    assert done.stderr.count("pycollective.recv: CollectiveMismatch: expected a message of float32[") == 1


@pytest.mark.parametrize("jit", ["jax.jit", "pc.jit"])
@pytest.mark.parametrize("goes_on", [False, True])
def test_an_error_on_all_ranks_that_nobody_read_is_said_once(jit: str, goes_on: bool, tmp_path: Path) -> None:
    """As in JAX, an error of jax.jit ends the job, since its program has an effect; one of pc.jit is told."""
    text = """
def late(m):
    m = jax.lax.fori_loop(0, 40, lambda _, m: jnp.tanh(m @ m), m)
    return pc.psum(m, comm)
JIT(late)(jnp.ones((300 + comm.rank, 300 + comm.rank)))
if GOES_ON:
    pc.barrier(comm)
print("end")
"""
    done = run(tmp_path, text.replace("JIT", jit).replace("GOES_ON", str(goes_on)))
    assert done.returncode not in (124, 137), done.stderr
    if jit == "pc.jit":
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["end"] * 2
        told = "pycollective: rank 0 of 2 has ended; its last call had failed. If the program has not caught"
        assert done.stderr.count(told) == done.stderr.count("CollectiveMismatch") == (not goes_on), done.stderr
    else:
        assert done.returncode != 0
        assert done.stderr.count("ending all ranks") == 1, done.stderr


@whole
def test_an_exception_in_a_script_of_ipython_ends_all_ranks(tmp_path: Path) -> None:
    program = write(tmp_path, f"{IMPATIENT}if comm.rank == 1: raise ValueError('no luck')\n{WAIT}")
    done = mpirun(2, "-m", "IPython", program, timeout=60, env={"IPYTHONDIR": str(tmp_path)})
    assert done.returncode == 1, done.stdout + done.stderr
    assert "no luck" in done.stdout + done.stderr
    assert "rank 1 of 2 exited with code 1, others did not; ending all ranks." in done.stderr


@whole
def test_an_exception_in_a_cell_names_its_rank_and_does_not_end_it(tmp_path: Path) -> None:
    # Rank 0 ends later than a rank with an exit code would wait, so rank 1 must end without one.
    program = tmp_path / "session.py"
    program.write_text(f"""
import time
from IPython.core.interactiveshell import InteractiveShell
{IMPATIENT}
shell = InteractiveShell.instance()
for cell in "import pycollective as pc", "comm = pc.init()", "assert comm.rank == 0, 'no luck'", "print(pc.psum(5))":
    shell.run_cell(cell)
if shell.user_ns["comm"].rank == 0: time.sleep(2)
""")
    done = mpirun(2, str(program), timeout=60, env={"IPYTHONDIR": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.split().count("10") == 2
    assert done.stderr.count("a cell has raised") == 1
    assert "rank 1 of 2: a cell has raised; ranks that wait for this one wait on." in done.stderr


@whole
def test_ranks_that_see_no_other_are_refused(tmp_path: Path) -> None:
    # Plain srun, or the mpiexec of another MPI, starts several processes that are a world of their own each.
    program = tmp_path / "program.py"
    program.write_text("""
import os
import pycollective as pc
from pycollective.config import config

for name, number in ("SLURM_STEP_NUM_TASKS", "4"), ("OMPI_COMM_WORLD_SIZE", "2"):
    os.environ[name] = number
    try:
        pc.init()
    except RuntimeError as error:
        print("refused", error)
    del os.environ[name]
os.environ["SLURM_STEP_NUM_TASKS"] = "4"
object.__setattr__(config, "allow_singleton", True)
print("allowed", pc.init())
""")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "OMPI_COMM"))}
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=SHORT, env=environ)
    by_srun, by_mpiexec, allowed = done.stdout.splitlines()
    for refused, size, advice in (by_srun, 4, "srun --mpi=pmi2"), (by_mpiexec, 2, "use that library's mpiexec"):
        assert refused.startswith(f"refused pycollective.init: expected a world of {size} ranks")
        assert "got one rank that sees no other" in refused
        assert advice in refused
    assert allowed == "allowed Communicator(world, rank 0 of 1)"


@whole
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
    text = r"init: expected the same number of local devices on every rank, got 1 on rank 0, 2 on rank 1"
    assert re.search(text, done.stderr), done.stderr


@whole
def test_a_hang_in_a_test_is_a_failure_with_all_stacks(tmp_path: Path) -> None:
    """Checks the guard of the tests themselves, ``no_hang`` in tests/under_mpirun.py."""
    test = Path(__file__).parents[1] / "collective" / "test_hang_for_the_guard_alone.py"
    test.write_text(
        "import jax.numpy as jnp\nimport pycollective as pc\nfrom tests import under_mpirun\n\n"
        "under_mpirun._EXIT_AFTER_S = 2.0\n\n\n"
        "def test_hang(world):\n    if world.rank == 0:\n        never_comes()\n"
        "    pc.psum(jnp.ones(3), world).block_until_ready()\n\n\n"
        "def never_comes():\n    import time\n\n    time.sleep(100)\n"
    )
    try:
        done = mpirun(
            2, "-m", "pytest", "-o", "faulthandler_timeout=2", str(test), timeout=SHORT, cwd=Path(__file__).parents[2]
        )
    finally:
        test.unlink()
    assert done.returncode not in (0, 124, 137)
    assert "in never_comes" in done.stderr  # rank 0's stack
    assert "in test_hang" in done.stderr
    assert done.stderr.count("Timeout (0:00:02)!") == 2


@whole
def test_a_command_that_takes_too_long_is_told_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the guard of these tests, ``launch.limited``: a program may leave a signal to end unheard."""
    monkeypatch.setattr(launch, "_KILL_AFTER_S", 1)
    assert launch.limited(["sleep", "60"], 0.5).returncode == 124
    assert launch.limited(["sh", "-c", "trap '' TERM; sleep 60"], 0.5).returncode == 137


# Rank 0 sends 1 and 3; rank 1 receives once, and so takes 1 for 3. A header is small, a message of its own data is not.
UNRECEIVED = """
x = jnp.ones(int(sys.argv[1]))
if comm.rank == 0:
    pc.send(x, comm, dest=1, tag=5)
    pc.send(3 * x, comm, dest=1, tag=5)
else:
    pc.recv(x, comm, source=0, tag=5).block_until_ready()
if sys.argv[2:] == ["fails"] and comm.rank == 1:
    sys.exit(7)
"""
UNRECEIVED_TEXT = (
    "pycollective.exit: expected a rank that has received its messages, "
    "got some of communicator world that it has not: "
    "float32[{elements}] at program.py:8 (<module>) from rank 0 with tag 5 (rank 1 of 2). "
    "A send lacks its recv; a later recv with that tag has taken an older array."
)


@pytest.mark.parametrize(
    ("elements", "how"),
    [(3, []), pytest.param(1000, [], marks=whole), pytest.param(3, ["fails"], marks=whole)],
    ids=str,
)
def test_messages_that_nobody_received_are_told_at_the_end(tmp_path: Path, elements: int, how: list[str]) -> None:
    done = mpirun(2, write(tmp_path, UNRECEIVED), str(elements), *how, timeout=SHORT)
    assert (done.returncode == 0) == (not how), done.stderr
    assert done.stderr.count(UNRECEIVED_TEXT.format(elements=elements)) == (not how), done.stderr
