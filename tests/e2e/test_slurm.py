"""A real Slurm of two nodes, each a host of its own (``scripts/slurm``): job scripts, srun, ``pycollective run``."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import unoptimised
from tests.e2e.launch import AS_ROOT, is_open_mpi, losses, of_processes
from tests.e2e.test_hosts import PROGRAM

ROOT = Path(__file__).parents[2]
SLURM = str(ROOT / "scripts" / "slurm")

TOOLS = ("ip", "unshare", "nsenter", "munged", "slurmctld", "slurmd")
LACKING = [tool for tool in TOOLS if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]
if os.geteuid() != 0:
    LACKING.append("root")
pytestmark = [
    pytest.mark.whole,
    pytest.mark.skipif(bool(LACKING), reason=f"SLURM NOT TESTED: there is no {', '.join(LACKING)}"),
]

EPOCHS = 10
DIGITS = ["examples/train_digits.py", "--epochs"]
SHARDED = ["--steps", "4", "--layers", "2", "--width", "32", "--context", "32", "--batch-size", "8"]

# It starts MPI, and not JAX, which takes longer to import than everything else that these jobs do.
WHERE = """
import os
import sys
from mpi4py import MPI

comm = MPI.COMM_WORLD
gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
sys.stdout.write(f"RANK {comm.rank} of {comm.size} on {os.uname().nodename}: GPUs {gpus}\\n")
"""


UNFINISHED = {"PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED"}


def wait_for(condition: Callable[[], bool], printed: Callable[[], str]) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline, printed()
        time.sleep(0.5)


class Cluster:
    """A running Slurm, and a directory to submit from, which looks like a clone after ``scripts/setup``."""

    def __init__(self, state: Path, home: Path) -> None:
        self.home = home
        self.pmi = "pmix" if is_open_mpi() else "pmi2"
        environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "JAX_NUM_"))}
        self.environ = {**environ, **AS_ROOT, "PYCOLLECTIVE_SLURM": str(state), "JAX_PLATFORMS": "cpu"}
        self.environ |= {"PYTHONPATH": str(ROOT), "XLA_FLAGS": unoptimised.flags()}

    def call(self, *command: str) -> list[str]:
        return ["timeout", "-k", "5", "200", SLURM, "exec", *command]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.call(*command),
            capture_output=True,
            text=True,
            check=False,
            cwd=self.home,
            env=self.environ,
            stdin=subprocess.DEVNULL,
        )

    def submit(self, *arguments: str) -> str:
        """Submits a job, and returns its number."""
        done = self.run("sbatch", "--parsable", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def status(self, job: str) -> int:
        """Waits until the job has ended, and returns its exit status; of an array, that of the first that failed."""
        wait_for(lambda: UNFINISHED.isdisjoint(re.findall(r"JobState=(\w+)", self.show(job))), lambda: self.show(job))
        found = re.findall(r" ExitCode=(\d+):(\d+)", self.show(job))
        return next((int(status) or 128 + int(number) for status, number in found if (status, number) != ("0", "0")), 0)

    def show(self, job: str) -> str:
        return self.run("scontrol", "show", "job", job).stdout

    def printed(self, pattern: str) -> str:
        return "".join(path.read_text() for path in sorted(self.home.glob(pattern)))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if subprocess.run(["unshare", "--net", "--mount", "true"], capture_output=True, check=False).returncode != 0:
        pytest.skip("SLURM NOT TESTED: this root may not make namespaces")
    home = tmp_path_factory.mktemp("clone")
    (home / ".venv").symlink_to(sys.prefix)
    (home / "examples").symlink_to(ROOT / "examples")
    (home / "where.py").write_text(WHERE)
    (home / "program.py").write_text(PROGRAM)
    shutil.copy(ROOT / "tests" / "e2e" / "unmodified.py", home)
    shutil.copytree(ROOT / "slurm", home / "slurm")
    state = tmp_path_factory.mktemp("slurm") / "state"
    found = Cluster(state, home)
    for script in (home / "slurm").iterdir():  # docs/slurm.md says to change this for Open MPI
        script.write_text(script.read_text().replace("--mpi=pmi2", f"--mpi={found.pmi}"))
    subprocess.run([SLURM, "up", "--cpus", "8"], env=found.environ, check=True, timeout=60)
    pids = [int(path.read_text()) for path in (state / "munged.pid", state / "slurmctld.pid")]
    pids += [int((state / "hosts" / f"h{i}").read_text()) for i in range(2)]
    yield found
    subprocess.run([SLURM, "down"], env=found.environ, check=True, timeout=60)
    assert not state.exists()
    assert not any(Path(f"/proc/{pid}/exe").exists() for pid in pids)


JOBS = {
    "train": ["slurm/train.sbatch", *DIGITS, str(EPOCHS), "--losses", "train.json"],
    "requeue": ["slurm/requeue.sbatch", *DIGITS, str(EPOCHS), "--losses", "requeue.json"],
    "train_mpiexec": ["slurm/train_mpiexec.sbatch", "where.py"],
    "train_sharded": [
        "slurm/train_sharded.sbatch",
        "examples/train_sharded.py",
        *SHARDED,
        *("--model", "2", "--losses", "sharded.json"),
    ],
    "unmodified": ["-J", "unmodified", "--ntasks-per-node=1", "slurm/train_sharded.sbatch", "unmodified.py"],
    "multi_node_gpu": ["slurm/multi_node_gpu.sbatch", "where.py"],
    "one_per_node": ["-J", "one_per_node", "--ntasks-per-node=1", "slurm/multi_node_gpu.sbatch", "where.py"],
    "array": ["slurm/array.sbatch", "--epochs", "1"],
    # One rank: of several, srun may end one that is late, and returns 143 then.
    "fails": ["-J", "fails", "--nodes=1", "--ntasks-per-node=1", "slurm/train.sbatch", "-c", "raise SystemExit(5)"],
}


def of_job(name: str) -> Callable[[Any], Any]:
    """For a test that waits for a job: the job is submitted if the test was chosen."""

    def decorate(test: Any) -> Any:
        test.job = name
        return test

    return decorate


@pytest.fixture(scope="module", autouse=True)
def jobs(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[Callable[[str], int]]:
    """The exit status of each job. They all run at once, and while the first tests do: most of them wait for Slurm."""
    chosen = {getattr(item, "function", None) for item in request.session.items}
    names = {getattr(test, "job", None) for test in chosen}
    if "requeue" in names:
        names.add("train")  # which it is compared with
    numbers = {name: cluster.submit(*arguments) for name, arguments in JOBS.items() if name in names}
    interrupter = threading.Thread(target=interrupt, args=(cluster, numbers.get("requeue")))
    interrupter.start()
    yield lambda name: cluster.status(numbers[name])
    cluster.run("scancel", *numbers.values())
    interrupter.join()


def interrupt(cluster: Cluster, job: str | None) -> None:
    """Does what Slurm does shortly before a job's time limit, which it knows to the minute only: sends the signal."""
    if job is not None:
        wait_for(lambda: any(cluster.home.glob(f"checkpoints/{job}/[0-9]*")), lambda: cluster.printed("requeue-*"))
        cluster.run("scancel", "--batch", "--signal=USR1", job)


def places(text: str) -> list[tuple[str, ...]]:
    return sorted(re.findall(r"RANK (\d) of (\d) on (\w+): GPUs (\S+)", text))


# Tests that need no job script; they come first, while the jobs run ---------------------------------------


@pytest.mark.library
def test_srun_over_two_hosts(cluster: Cluster) -> None:
    python = str(cluster.home / ".venv" / "bin" / "python")
    done = cluster.run("srun", f"--mpi={cluster.pmi}", "-N2", "--ntasks-per-node=2", python, "program.py", "2")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"rank \d on \d agrees", done.stdout)) == 4


@pytest.mark.library
def test_srun_without_mpi_is_refused(cluster: Cluster) -> None:
    done = cluster.run("srun", "-K1", "-N2", "--ntasks-per-node=2", sys.executable, "program.py", "2")
    assert done.returncode != 0
    assert "agrees" not in done.stdout
    assert "expected a world of 4 ranks, as srun started, got one rank that sees no other" in done.stderr
    assert f"'srun --mpi={cluster.pmi}'" in done.stderr


ALLOCATION = ("salloc", "-Q", "-N2", "--ntasks-per-node=2")
COMMAND = (sys.executable, "-m", "pycollective")


def allocated(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    return cluster.run(*ALLOCATION, *COMMAND, *arguments)


@pytest.mark.library
@pytest.mark.parametrize("how", [[], ["--mpi", "srun"]], ids=["mpiexec", "srun"])
def test_run_inside_an_allocation(how: list[str], cluster: Cluster) -> None:
    for ranks, hosts in (("4", ["h0", "h0", "h1", "h1"]), ("2", ["h0", "h1"])):
        done = allocated(cluster, "run", "-n", ranks, *how, "where.py")
        assert done.returncode == 0, done.stderr
        assert places(done.stdout) == [(str(i), ranks, host, "None") for i, host in enumerate(hosts)]
    done = allocated(cluster, "run", "-n", "2", *how, "--hosts", "h1", "where.py")
    assert [place[2] for place in places(done.stdout)] == ["h1", "h1"], done.stderr


@pytest.mark.parametrize("gpus", ["--gres=gpu:2", "--gpus-per-task=1"])
def test_run_gives_each_rank_its_gpu(gpus: str, cluster: Cluster) -> None:
    done = cluster.run(*ALLOCATION, gpus, *COMMAND, "run", "-n", "4", "where.py")
    assert done.returncode == 0, done.stderr
    assert [place[3] for place in places(done.stdout)] == ["0", "1", "0", "1"]


def test_run_from_a_shell_of_srun(cluster: Cluster) -> None:
    # The shell is a step with one task, which holds cores. The ranks must get these cores nevertheless.
    done = cluster.run(*ALLOCATION, "srun", "-N1", "-n1", *COMMAND, "run", "-n", "4", "where.py")
    assert done.returncode == 0, done.stderr
    assert [place[2] for place in places(done.stdout)] == ["h0", "h0", "h1", "h1"]


def test_more_ranks_than_an_allocation_has(cluster: Cluster) -> None:
    done = allocated(cluster, "run", "-n", "5", "where.py")
    assert done.returncode == 2
    assert "expected at most 4 ranks in this allocation, got 5. Start fewer, ask Slurm for more --ntasks" in done.stderr


def test_the_doctor_in_an_allocation(cluster: Cluster) -> None:
    done = allocated(cluster, "doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 rank(s) on h0, 1 rank(s) on h1" in done.stdout
    assert re.search(r"ok +2 ranks: between hosts +\d+\.\d us", done.stdout)


# The job scripts ------------------------------------------------------------------------------------------


@of_job("train")
def test_train(cluster: Cluster, jobs: Callable[[str], int]) -> None:
    assert jobs("train") == 0, cluster.printed("train-*")
    losses = json.loads((cluster.home / "train.json").read_text())
    assert len(losses) == EPOCHS * 11
    assert losses[-1] < losses[0] / 5


@pytest.mark.library
@of_job("train_mpiexec")
def test_train_mpiexec(cluster: Cluster, jobs: Callable[[str], int]) -> None:
    assert jobs("train_mpiexec") == 0, cluster.printed("train_mpiexec-*")
    assert [place[:3] for place in places(cluster.printed("train_mpiexec-*"))] == [
        ("0", "4", "h0"),
        ("1", "4", "h0"),
        ("2", "4", "h1"),
        ("3", "4", "h1"),
    ]


@pytest.mark.library
@of_job("train_sharded")
def test_train_sharded(cluster: Cluster, jobs: Callable[[str], int]) -> None:
    assert jobs("train_sharded") == 0, cluster.printed("train_sharded-*")
    assert "2 x 2 devices: loss" in cluster.printed("train_sharded-*")
    one = losses(cluster.home, 1, "train_sharded.py", *SHARDED)
    np.testing.assert_allclose(json.loads((cluster.home / "sharded.json").read_text()), one, rtol=1e-5)


@of_job("unmodified")
def test_a_program_for_jax_distributed(cluster: Cluster, jobs: Callable[[str], int]) -> None:
    assert jobs("unmodified") == 0, cluster.printed("unmodified-*")
    found = of_processes(cluster.printed("unmodified-*"))
    assert [(each["process"], each["processes"]) for each in found] == [(0, 2), (1, 2)]
    assert all(each["sum"] == [15] and each["of each"] == [0, 0, 1, 1] for each in found)
    assert [each["cumsum"] for each in found] == [[0, 1, 3], [6, 10, 15]]


@of_job("multi_node_gpu")
def test_a_rank_for_each_gpu(cluster: Cluster, jobs: Callable[[str], int]) -> None:
    assert jobs("multi_node_gpu") == 0, cluster.printed("multi_node_gpu-*")
    assert places(cluster.printed("multi_node_gpu-*")) == [
        ("0", "4", "h0", "0"),
        ("1", "4", "h0", "1"),
        ("2", "4", "h1", "0"),
        ("3", "4", "h1", "1"),
    ]


@of_job("one_per_node")
def test_a_rank_for_each_node_with_all_its_gpus(cluster: Cluster, jobs: Callable[[str], int]) -> None:
    assert jobs("one_per_node") == 0, cluster.printed("one_per_node-*")
    assert places(cluster.printed("one_per_node-*")) == [("0", "2", "h0", "0,1"), ("1", "2", "h1", "0,1")]


@of_job("array")
def test_an_array_of_trainings(cluster: Cluster, jobs: Callable[[str], int]) -> None:
    assert jobs("array") == 0, cluster.printed("array-*")
    losses = [json.loads(path.read_text()) for path in sorted(cluster.home.glob("results/*/[0-2].json"))]
    assert [len(curve) for curve in losses] == [11] * 3
    assert losses[0][0] == losses[1][0] == losses[2][0]  # the trainings begin alike
    assert len({curve[-1] for curve in losses}) == 3


@of_job("fails")
def test_the_exit_status_of_a_job_is_the_programs(cluster: Cluster, jobs: Callable[[str], int]) -> None:
    assert jobs("fails") == 5, cluster.printed("fails-*")


@of_job("requeue")
def test_requeue_goes_on_where_it_was(cluster: Cluster, jobs: Callable[[str], int]) -> None:
    wait_for(lambda: "start 1 of job" in cluster.printed("requeue-*"), lambda: cluster.printed("requeue-*"))
    assert jobs("requeue") == 0, cluster.printed("requeue-*")
    assert jobs("train") == 0, cluster.printed("train-*")
    printed = cluster.printed("requeue-*")
    stopped = re.search(r"asked to stop after step (\d+)", printed)
    assert stopped is not None, printed
    assert 0 < int(stopped[1]) < EPOCHS * 11
    np.testing.assert_allclose(
        json.loads((cluster.home / "requeue.json").read_text()),
        json.loads((cluster.home / "train.json").read_text()),  # the same training without a break
        rtol=1e-3,
    )


# This test comes last, since it takes one of the two nodes away -----------------------------------------------


LOSES_A_NODE = """
import os
import sys
import time
from mpi4py import MPI

comm = MPI.COMM_WORLD
sys.stdout.write(f"RANK {comm.rank} of {comm.size} on {os.uname().nodename}: GPUs None\\n")
sys.stdout.flush()
comm.barrier()
if os.environ["PYCOLLECTIVE_RESTART"] == "0":
    open(f"started{comm.rank}", "w").close()
    time.sleep(100)
"""


def test_run_starts_again_without_a_node_that_is_gone(cluster: Cluster) -> None:
    (cluster.home / "loses.py").write_text(LOSES_A_NODE)
    arguments = ["run", "-n", "2", "--restarts", "1", "--min-ranks", "1", "loses.py"]
    job = subprocess.Popen(
        cluster.call(*ALLOCATION, "--no-kill", *COMMAND, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cluster.home,
        env=cluster.environ,
        stdin=subprocess.DEVNULL,
    )
    wait_for(lambda: len([*cluster.home.glob("started*")]) == 2, lambda: "the ranks have not started")
    os.kill(int((Path(cluster.environ["PYCOLLECTIVE_SLURM"]) / "hosts" / "h1").read_text()), signal.SIGKILL)
    printed, said = job.communicate(timeout=180)
    assert job.returncode == 0, said
    assert "and h1 no longer answers. Starting again with 1 rank on h0." in said
    assert ("0", "1", "h0", "None") in places(printed)
