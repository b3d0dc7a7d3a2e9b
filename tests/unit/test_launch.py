"""``pycollective run`` without a launcher: what libraries and launchers say, command lines, cores, mistakes."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pycollective.launch import libraries, run
from pycollective.launch.command_lines import Job, mpiexec, srun
from pycollective.launch.launchers import local_place
from pycollective.launch.libraries import Library, identify, mpiexec_of
from pycollective.launch.rank_wrapper import physical_cores, visible_gpus
from tests.unit.fakes import launcher

MPICH = Library("MPICH", "5.0.2", "")


# First lines of what each says, from its own sources and installations.
@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("MPICH Version:      5.0.2\nMPICH Release date: ...", ("MPICH", "5.0.2")),
        ("MPI VERSION    : CRAY MPICH version 8.1.29.19 (ANL base 3.4a2)", ("MPICH", "8.1.29.19")),
        ("MVAPICH2 Version      :\t2.3.7", ("MPICH", "2.3.7")),
        ("HYDRA build details:\n    Version:                                 4.0.2", ("MPICH", "4.0.2")),
        ("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4", ("Open MPI", "4.1.4")),
        ("mpiexec (OpenRTE) 4.1.4\n\nReport bugs to ...", ("Open MPI", "4.1.4")),
        ("mpirun (Open MPI) 5.0.11\n", ("Open MPI", "5.0.11")),
        ("Intel(R) MPI Library 2021.18 for Linux* OS", ("Intel MPI", "2021.18")),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260101", ("Intel MPI", "2021.18")),
        ("Another MPI 1.0", None),
    ],
)
def test_what_libraries_call_themselves(text: str, known: tuple[str, str] | None) -> None:
    assert identify(text) == known


JOB = Job(3, ["prog"], [("a", 1), ("b", None)], label=True, oversubscribe=True, carried=["JAX_NUM_CPU_DEVICES"])


@pytest.mark.parametrize(
    ("launcher", "line"),
    [
        (("MPICH", "5.0.2"), "L -n 3 -bind-to none -hosts a:1,b:2 -prepend-rank prog"),
        (
            ("Open MPI", "5.0.11"),
            "L -n 3 --bind-to none --host a:1,b:2 --output tag --oversubscribe -x JAX_NUM_CPU_DEVICES prog",
        ),
        (
            ("Open MPI", "4.1.4"),
            "L -n 3 --bind-to none --host a:1,b:2 --tag-output --oversubscribe -x JAX_NUM_CPU_DEVICES prog",
        ),
    ],
)
def test_dialects(launcher: tuple[str, str], line: str) -> None:
    assert shlex.join(mpiexec(Library(*launcher, "L"), JOB)) == line


@pytest.mark.parametrize(
    ("launcher", "line"),
    [
        (("MPICH", "5.0.2"), "L -n 3 -bind-to none -f my.hosts prog"),
        (("Intel MPI", "2021.18"), "L -n 3 -genv I_MPI_PIN off -f my.hosts prog"),
        (("Open MPI", "5.0.11"), "L -n 3 --bind-to none --hostfile my.hosts prog"),
    ],
)
def test_hostfiles(launcher: tuple[str, str], line: str) -> None:
    assert shlex.join(mpiexec(Library(*launcher, "L"), Job(3, ["prog"], hostfile="my.hosts"))) == line


def test_launchers_that_know_one_number_for_all_hosts() -> None:
    intel, even = Library("Intel MPI", "2021.18", "L"), replace(JOB, ranks=4, hosts=[("a", 2), ("b", None)])
    assert shlex.join(mpiexec(intel, even)) == "L -n 4 -genv I_MPI_PIN off -hosts a,b -ppn 2 -prepend-rank prog"
    line = (
        "srun --mpi=pmi2 -n 4 --cpu-bind=none --kill-on-bad-exit=1 --distribution=block -w a,b -N 2 --ntasks-per-node=2"
    )
    assert shlex.join(srun("pmi2", even)) == f"{line} --label --oversubscribe --overcommit prog"
    for make in (lambda: srun("pmi2", JOB), lambda: mpiexec(intel, JOB)):
        with pytest.raises(ValueError, match="as many ranks on each host for this launcher, got 1 on a, 2 on b"):
            make()


def test_srun_spreads_over_an_allocation() -> None:
    job = Job(4, ["prog"])
    assert shlex.join(srun("pmi2", job, nodes=2)) == (
        "srun --mpi=pmi2 -n 4 --cpu-bind=none --kill-on-bad-exit=1 --distribution=block -N 2 --ntasks-per-node=2 prog"
    )
    assert "-N" not in srun("pmi2", job, nodes=3)  # not evenly: as Slurm does
    assert "-N" not in srun("pmi2", job, nodes=1)


def test_the_mpiexec_of_the_library_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere" / "python"))
    other = launcher(tmp_path / "one" / "mpiexec", "mpirun (Open MPI) 5.0.11")
    right = launcher(tmp_path / "two" / "mpiexec.hydra", "HYDRA build details:\n    Version: 5.0.1")
    found = mpiexec_of(MPICH, {"PATH": f"{tmp_path / 'one'}:{tmp_path / 'two'}"})
    assert found == Library("MPICH", "5.0.1", str(right))
    with pytest.raises(FileNotFoundError, match=rf"expected an mpiexec of MPICH 5.0.2.*got {other} of Open MPI 5.0.11"):
        mpiexec_of(MPICH, {"PATH": str(tmp_path / "one")})
    with pytest.raises(FileNotFoundError, match="got none"):
        mpiexec_of(MPICH, {"PATH": str(tmp_path / "empty")})


def test_no_mpi_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_PROBE", "raise RuntimeError('cannot load MPI library')")
    with pytest.raises(ImportError, match=r"got RuntimeError: cannot load MPI library.*pip install"):
        libraries.loaded()


def test_places() -> None:
    hydra = {"MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
    proxies = {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    assert local_place({**hydra, **proxies}) == (1, 2)  # an mpiexec inside sbatch: srun's are its proxies
    assert local_place({**proxies, "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}) == (0, 3)
    assert local_place({}) is None


def test_threads_of_a_core_stay_together(tmp_path: Path) -> None:
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    assert physical_cores({1, 2, 5, 6, 7}, tmp_path) == [{1, 5}, {2, 6}, {7}]
    assert physical_cores({0, 1}, tmp_path / "no topology") == [{0}, {1}]


def test_visible_gpus(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}, tmp_path) == ["GPU-a", "GPU-b"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


def planned(*arguments: str, environ: dict[str, str] | None = None) -> tuple[list[str], dict[str, str]]:
    parser = argparse.ArgumentParser()
    run.add_options(parser)
    return run.plan(parser.parse_args(arguments), {"PATH": os.environ["PATH"]} if environ is None else environ)


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "prog.py"
    path.write_text("print(1)\n")
    return str(path)


def test_a_plan(program: str) -> None:
    command, variables = planned("-n", "1", "--devices-per-rank", "4", program, "--epochs", "3", "-n", "5")
    assert command[-5:] == [program, "--epochs", "3", "-n", "5"]
    assert command[-6] == sys.executable
    assert variables == {"JAX_NUM_CPU_DEVICES": "4"}


@pytest.fixture
def allocation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Variables inside a Slurm allocation of a with 3 and b with 1 task, where an MPICH is."""
    monkeypatch.setattr(run, "loaded", lambda: MPICH)
    monkeypatch.setattr(run, "mpiexec_of", lambda *_: MPICH._replace(path="L"))
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text("#!/bin/sh\n[ \"$*\" = 'show hostnames a,b' ] && printf 'a\\nb\\n'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "3,1"}
    return {"PATH": os.environ["PATH"], **slurm}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["-n", "4"], "L -n 4 -bind-to none -hosts a:3,b:1"),  # as Slurm says
        (["-n", "2"], "L -n 2 -bind-to none -hosts a:1,b:1"),  # evenly
        (["-n", "3"], "L -n 3 -bind-to none -hosts a:2,b:1"),
        (["-n", "9", "--oversubscribe"], "L -n 9 -bind-to none -hosts a:5,b:4"),
        (["-n", "2", "--hosts", "b"], "L -n 2 -bind-to none -hosts b:2"),
        (
            ["-n", "2", "--mpi", "srun"],
            "srun --mpi=pmi2 -n 2 --cpu-bind=none --kill-on-bad-exit=1 --distribution=block -N 2",
        ),
    ],
)
def test_inside_an_allocation(arguments: list[str], line: str, allocation: dict[str, str], program: str) -> None:
    command, _ = planned(*arguments, program, environ=allocation)
    assert shlex.join(command).startswith(f"{line} ")


def test_cores_of_an_allocation_are_room_whatever_its_tasks(allocation: dict[str, str], program: str) -> None:
    environ = {**allocation, "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
    command, _ = planned("-n", "8", program, environ=environ)
    assert shlex.join(command).startswith("L -n 8 -bind-to none -hosts a:4,b:4 ")
    # The shell of srun --pty: its step's one task says nothing of the job.
    shell = {**environ, "SLURM_TASKS_PER_NODE": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    command, variables = planned("-n", "8", program, environ=shell)
    assert shlex.join(command).startswith("L -n 8 -bind-to none -hosts a:4,b:4 ")
    # Of the job again, for the mpiexec.
    assert variables == {"SLURM_OVERLAP": "1", "SLURM_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "4,4"}


def test_a_gpu_for_each_task_needs_srun(allocation: dict[str, str], program: str, tmp_path: Path) -> None:
    environ = {**allocation, "SLURM_GPUS_PER_TASK": "1"}
    launcher(tmp_path / "bin" / "srun", "MPI plugin types are...\n\tnone\n\tpmi2")
    assert planned("-n", "4", program, environ=environ)[0][0] == "srun"
    launcher(tmp_path / "bin" / "srun", "MPI plugin types are...\n\tnone")
    with pytest.raises(ValueError, match=r"expected --gres=gpu:N.* no srun --mpi=pmi2"):
        planned("-n", "4", program, environ=environ)


def test_a_heterogeneous_job(program: str) -> None:
    with pytest.raises(ValueError, match="expected --hosts in a heterogeneous Slurm job, got none"):
        planned("-n", "3", program, environ={"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "PATH": os.environ["PATH"]})


def test_scontrol_that_fails(allocation: dict[str, str], program: str) -> None:
    with pytest.raises(RuntimeError, match=r"scontrol to name the hosts c,d, got CalledProcessError\(1.* Say --hosts"):
        planned("-n", "4", program, environ={**allocation, "SLURM_JOB_NODELIST": "c,d"})


def test_what_an_allocation_has_no_room_for(allocation: dict[str, str], program: str) -> None:
    with pytest.raises(ValueError, match="expected at most 4 ranks in this allocation, got 5. Start fewer, ask Slurm"):
        planned("-n", "5", program, environ=allocation)
    with pytest.raises(ValueError, match="as many ranks on each host for this launcher"):
        planned("-n", "4", "--mpi", "srun", "--hosts", "a:3,b:1", program, environ=allocation)


def test_srun_where_there_is_no_mpiexec(
    allocation: dict[str, str], program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> Library:
        raise FileNotFoundError("no mpiexec")

    monkeypatch.setattr(run, "mpiexec_of", none)
    launcher(tmp_path / "bin" / "srun", "MPI plugin types are...\n\tnone\n\tpmi2")
    assert planned("-n", "4", program, environ=allocation)[0][:2] == ["srun", "--mpi=pmi2"]
    inside = {**allocation, "SLURM_STEP_ID": "0"}
    assert planned("-n", "4", program, environ=inside)[1]["SLURM_OVERLAP"] == "1"
    launcher(tmp_path / "bin" / "srun", "MPI plugin types are...\n\tnone")
    with pytest.raises(FileNotFoundError, match="no mpiexec"):
        planned("-n", "4", program, environ=allocation)


def test_other_batch_systems_are_left_to_mpiexec(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "loaded", lambda: MPICH)
    monkeypatch.setattr(run, "mpiexec_of", lambda *_: MPICH._replace(path="L"))
    command, _ = planned("-n", "1000", program, environ={"PBS_JOBID": "1", "PATH": os.environ["PATH"]})
    assert command[:5] == ["L", "-n", "1000", "-bind-to", "none"]
    assert run.allocated({"LSB_JOBID": "1"})


@pytest.mark.parametrize(
    ("arguments", "kind", "complaint"),
    [
        (["-n", "100000"], ValueError, r"expected at most \d+ ranks for \d+ cores, got 100000"),
        (["-n", "4", "--hosts", "a:1,b:2"], ValueError, "expected at most 3 ranks on 2 hosts, got 4"),
        (["-n", "1", "--mpi", "/bin/true"], ValueError, "got /bin/true, which does not say what it is"),
        (["-n", "1", "--hostfile", "/no/file"], FileNotFoundError, "expected a hostfile, got '/no/file'"),
    ],
)
def test_mistakes(arguments: list[str], kind: type[Exception], complaint: str, program: str) -> None:
    with pytest.raises(kind, match=complaint):
        planned(*arguments, program)


def test_the_number_of_ranks_as_mpiexec_has_it(program: str) -> None:
    assert planned("-np", "3", "--oversubscribe", program) == planned("-n", "3", "--oversubscribe", program)


def test_no_such_program() -> None:
    with pytest.raises(FileNotFoundError, match=r"expected a program, got '/no/prog.py', which does not exist"):
        planned("-n", "1", "/no/prog.py")


def test_inside_a_rank(program: str) -> None:
    with pytest.raises(RuntimeError, match="got one of 4 ranks of an MPICH or Intel MPI mpiexec"):
        planned("-n", "1", program, environ={"PMI_SIZE": "4"})


def test_a_host_that_does_not_answer(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\n[ "$1" = good ] || { echo no route to "$1" >&2; exit 255; }\n')
    agent.chmod(0o755)
    environ = {"HYDRA_LAUNCHER_EXEC": str(agent)}
    run.check_hosts(["good", "localhost"], environ)
    with pytest.raises(ConnectionError, match="expected host bad to answer .* got 'no route to bad'"):
        run.check_hosts(["good", "bad"], environ)


@pytest.mark.parametrize("bad", ["a,,b", "a:0", "a:x", ""])
def test_bad_hosts(bad: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        planned("-n", "1", "--hosts", bad, "prog")
    assert "expected hosts as alpha,beta:2" in capsys.readouterr().err
