"""``pycollective run`` without a launcher: how MPI libraries name themselves, command lines, cores, mistakes."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest

from pycollective.launch import allocation, find_mpi, started_by
from pycollective.launch.allocation import BATCH_SYSTEMS, batch_system
from pycollective.launch.find_mpi import ELASTIC, LIBRARIES, identify, mpiexec_of
from pycollective.launch.host_share import physical_cores, visible_gpus
from pycollective.launch.hosts import MOST_CHECKED, check_hosts
from pycollective.launch.job import Job
from pycollective.launch.launchers.batch_system import BatchSystem
from pycollective.launch.launchers.hydra import Hydra
from pycollective.launch.launchers.launcher import BatchLauncher
from pycollective.launch.launchers.slurm import Srun
from pycollective.launch.libraries import mpich
from pycollective.launch.libraries.intel_mpi import IntelMpi
from pycollective.launch.libraries.library import Library
from pycollective.launch.libraries.mpich import Mpich
from pycollective.launch.libraries.openmpi import OpenMpi
from pycollective.launch.started_by import LAUNCHERS
from pycollective.run import command as run
from tests.unit.fakes import launcher

MPICH = Mpich("5.0.2", "")
INTEL = IntelMpi("2021.18", "L")


# The first lines of what each says, from its own sources and installations.
SAID: list[tuple[str, Library | None]] = [
    ("MPICH Version:      5.0.2\nMPICH Release date: ...", Mpich("5.0.2", "")),
    ("MPI VERSION    : CRAY MPICH version 8.1.29.19 (ANL base 3.4a2)", Mpich("8.1.29.19", "")),
    ("MVAPICH2 Version      :\t2.3.7", Mpich("2.3.7", "")),
    ("HYDRA build details:\n    Version:                                 4.0.2", Mpich("4.0.2", "")),
    ("Open MPI v4.1.4, package: Debian OpenMPI, ident: 4.1.4", OpenMpi("4.1.4", "")),
    ("mpiexec (OpenRTE) 4.1.4\n\nReport bugs to ...", OpenMpi("4.1.4", "")),
    ("mpirun (Open MPI) 5.0.11\n", OpenMpi("5.0.11", "")),
    ("Intel(R) MPI Library 2021.18 for Linux* OS", IntelMpi("2021.18", "")),
    ("Intel(R) MPI Library for Linux* OS, Version 2021.18 Build 20260101", IntelMpi("2021.18", "")),
    ("Another MPI 1.0", None),
]


@pytest.mark.parametrize(("text", "library"), SAID)
def test_what_libraries_call_themselves(text: str, library: Library | None) -> None:
    assert identify(text) == library


DIFFERENT = (MPICH, INTEL, OpenMpi("5.0.11", ""), OpenMpi("4.1.4", ""))
"""Libraries of which each needs an mpiexec of its own."""


def test_which_mpiexec_belongs_to_which_library() -> None:
    assert [(a, b) for a in DIFFERENT for b in DIFFERENT if a.can_start(b)] == [(one, one) for one in DIFFERENT]
    assert OpenMpi("5.0.3", "").can_start(OpenMpi("5.0.11", ""))
    assert Mpich("4.0.2", "").can_start(MPICH)


JOB = Job(3, ["prog"], [("a", 1), ("b", None)], label=True, oversubscribe=True, carried=["JAX_NUM_CPU_DEVICES"])


@pytest.mark.parametrize(
    ("mpiexec", "line"),
    [
        (Mpich("5.0.2", "L"), "L -n 3 -bind-to none -hosts a:1,b:2 -prepend-rank prog"),
        (
            OpenMpi("5.0.11", "L"),
            "L -n 3 --bind-to none --host a:1,b:2 --output tag --oversubscribe -x JAX_NUM_CPU_DEVICES prog",
        ),
        (
            OpenMpi("4.1.4", "L"),
            "L -n 3 --bind-to none --host a:1,b:2 --tag-output --oversubscribe -x JAX_NUM_CPU_DEVICES prog",
        ),
    ],
)
def test_options(mpiexec: Library, line: str) -> None:
    assert shlex.join(mpiexec.command_line(JOB)) == line


def test_ranks_that_live_on() -> None:
    job = Job(2, ["prog"], elastic=True)
    line = "L -n 2 --bind-to none --with-ft ulfm prog"
    assert shlex.join(OpenMpi("5.0.11", "L").command_line(job)) == line
    assert [one.can_lose_ranks for one in (OpenMpi("4.1.4", ""), Mpich("5.0.2", ""))] == [False, False]


def test_the_device_of_a_library() -> None:
    text = "MPICH Version:      5.0.2\nMPICH Device:       ch4:ofi\nMPICH configure:    ..."
    assert Mpich.device_in(text) == "ch4:ofi"
    assert Mpich.device_in("MPICH Version: 5.0.2") == ""
    assert OpenMpi.device_in(text) == ""


def test_variables_to_start_under_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = ["mpich"]
    monkeypatch.setattr(mpich, "version", lambda name: installed.index(name) if name in installed else missing())

    def missing() -> None:
        raise PackageNotFoundError

    under_srun = {"PMI_FD": "9", "SLURM_STEP_ID": "0"}
    libfabric = {"MPIR_CVAR_CH4_NETMOD": "ofi"}
    assert Mpich.variables_to_start(under_srun) == libfabric
    assert Mpich.variables_to_start({"PMI_FD": "9"}) == {}
    assert Mpich.variables_to_start({**under_srun, "MPIR_CVAR_CH4_NETMOD": "ucx"}) == {}
    assert OpenMpi.variables_to_start(under_srun) == {}
    installed.clear()
    assert Mpich.variables_to_start(under_srun) == {}


WITH_HOSTFILE: list[tuple[Library, str]] = [
    (Mpich("5.0.2", "L"), "L -n 3 -bind-to none -f my.hosts prog"),
    (INTEL, "L -n 3 -genv I_MPI_PIN off -f my.hosts prog"),
    (OpenMpi("5.0.11", "L"), "L -n 3 --bind-to none --hostfile my.hosts prog"),
]


@pytest.mark.parametrize(("mpiexec", "line"), WITH_HOSTFILE)
def test_hostfiles(mpiexec: Library, line: str) -> None:
    assert shlex.join(mpiexec.command_line(Job(3, ["prog"], hostfile="my.hosts"))) == line


def test_every_library_is_tested() -> None:
    known = set(LIBRARIES)
    assert {type(library) for _, library in SAID} - {type(None)} == known
    assert {type(library) for library in DIFFERENT} == known
    assert {type(mpiexec) for mpiexec, _ in WITH_HOSTFILE} == known


def test_srun_takes_no_hostfile() -> None:
    with pytest.raises(ValueError, match="expected no hostfile with srun, got my.hosts"):
        Srun.command_line(Job(3, ["prog"], hostfile="my.hosts"), MPICH, {})


def test_launchers_that_know_one_number_for_all_hosts() -> None:
    even = replace(JOB, ranks=4, hosts=[("a", 2), ("b", None)])
    assert shlex.join(INTEL.command_line(even)) == "L -n 4 -genv I_MPI_PIN off -hosts a,b -ppn 2 -prepend-rank prog"
    line = (
        "srun --mpi=pmi2 -n 4 --cpu-bind=none --kill-on-bad-exit=1 --distribution=block -w a,b -N 2 --ntasks-per-node=2"
    )
    assert shlex.join(Srun.command_line(even, INTEL, {})) == f"{line} --label --oversubscribe --overcommit prog"
    for make in (lambda: Srun.command_line(JOB, INTEL, {}), lambda: INTEL.command_line(JOB)):
        with pytest.raises(
            ValueError, match="the same number of ranks on each host for this launcher, got 1 on a, 2 on b"
        ):
            make()


def test_srun_spreads_over_an_allocation() -> None:
    def line(hosts: int) -> str:
        environ = {"SLURM_JOB_NODELIST": f"a[1-{hosts}]", "SLURM_TASKS_PER_NODE": f"4(x{hosts})"}
        return shlex.join(Srun.command_line(Job(4, ["prog"]), OpenMpi("5.0.11", ""), environ))

    one = "srun --mpi=pmix -n 4 --cpu-bind=none --kill-on-bad-exit=1 --distribution=block prog"
    assert line(1) == one
    assert line(2) == one.replace("prog", "-N 2 --ntasks-per-node=2 prog")
    assert line(3) == one  # 4 ranks cannot be spread evenly over 3 hosts: Slurm decides


def test_the_mpiexec_of_the_library_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere" / "python"))
    other = launcher(tmp_path / "one" / "mpiexec", "mpirun (Open MPI) 5.0.11")
    right = launcher(tmp_path / "two" / "mpiexec.hydra", "HYDRA build details:\n    Version: 5.0.1")
    found = mpiexec_of(MPICH, {"PATH": f"{tmp_path / 'one'}:{tmp_path / 'two'}"})
    assert found == Mpich("5.0.1", str(right))
    with pytest.raises(FileNotFoundError, match=rf"expected an mpiexec of MPICH 5.0.2.*got {other} of Open MPI 5.0.11"):
        mpiexec_of(MPICH, {"PATH": str(tmp_path / "one")})
    with pytest.raises(FileNotFoundError, match="got none"):
        mpiexec_of(MPICH, {"PATH": str(tmp_path / "empty")})


def test_no_mpi_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_mpi, "_PROBE", "raise RuntimeError('cannot load MPI library')")
    with pytest.raises(ImportError, match=r"got RuntimeError: cannot load MPI library.*pip install"):
        find_mpi.loaded_library()


def test_the_standard_abi(monkeypatch: pytest.MonkeyPatch) -> None:
    says = "print('/opt/lib/libmpi_abi.so.1'); print(1, 0); print('MPICH Version:      5.0.2')"
    monkeypatch.setattr(find_mpi, "_PROBE", says)
    library = find_mpi.loaded_library()
    assert library == Mpich("5.0.2", "/opt/lib/libmpi_abi.so.1", "1.0")
    assert (library.name, library.description) == ("MPICH 5.0.2", "MPICH 5.0.2 by MPI's standard ABI 1.0")
    assert MPICH.description == "MPICH 5.0.2"
    assert MPICH.can_start(library)  # its mpiexec is that of the library
    assert not OpenMpi("6.0.0", "", "1.0").can_lose_ranks
    monkeypatch.setattr(find_mpi, "_PROBE", "raise ImportError('libmpi_abi.so.1: cannot open shared object file')")
    with pytest.raises(ImportError, match=r"This mpi4py needs MPI's standard ABI, .*: take MPICH 5"):
        find_mpi.loaded_library()


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
def in_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables inside a Slurm allocation of 3 tasks on host a and 1 task on host b, where MPICH is installed."""
    monkeypatch.setattr(run, "loaded_library", lambda: MPICH)
    monkeypatch.setattr(run, "mpiexec_of", lambda *_: replace(MPICH, path="L"))
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
        (["-n", "4"], "L -n 4 -bind-to none -hosts a:3,b:1"),  # as many as Slurm has tasks
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
def test_inside_an_allocation(arguments: list[str], line: str, in_slurm: dict[str, str], program: str) -> None:
    command, _ = planned(*arguments, program, environ=in_slurm)
    assert shlex.join(command).startswith(f"{line} ")


def test_cores_of_an_allocation_are_room_whatever_its_tasks(in_slurm: dict[str, str], program: str) -> None:
    environ = {**in_slurm, "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_JOB_CPUS_PER_NODE": "4(x2)"}
    command, _ = planned("-n", "8", program, environ=environ)
    assert shlex.join(command).startswith("L -n 8 -bind-to none -hosts a:4,b:4 ")
    # In the shell of srun --pty SLURM_TASKS_PER_NODE is the step's one task, not the job's tasks.
    shell = {**environ, "SLURM_TASKS_PER_NODE": "1", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1"}
    command, variables = planned("-n", "8", program, environ=shell)
    assert shlex.join(command).startswith("L -n 8 -bind-to none -hosts a:4,b:4 ")
    # The mpiexec gets the job's variables again.
    assert variables == {"SLURM_OVERLAP": "1", "SLURM_NODELIST": "a,b", "SLURM_TASKS_PER_NODE": "4,4"}


def test_a_gpu_for_each_task_needs_srun(in_slurm: dict[str, str], program: str, tmp_path: Path) -> None:
    environ = {**in_slurm, "SLURM_GPUS_PER_TASK": "1"}
    launcher(tmp_path / "bin" / "srun", "MPI plugin types are...\n\tnone\n\tpmi2")
    assert planned("-n", "4", program, environ=environ)[0][0] == "srun"
    launcher(tmp_path / "bin" / "srun", "MPI plugin types are...\n\tnone")
    with pytest.raises(ValueError, match=r"expected srun --mpi=pmi2 for --gpus-per-task.*--gres=gpu:N"):
        planned("-n", "4", program, environ=environ)


def test_a_heterogeneous_job(program: str) -> None:
    with pytest.raises(ValueError, match="expected --hosts in a heterogeneous Slurm job, got none"):
        planned("-n", "3", program, environ={"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "PATH": os.environ["PATH"]})


def test_scontrol_that_fails(in_slurm: dict[str, str], program: str) -> None:
    with pytest.raises(RuntimeError, match=r"scontrol to name the hosts c,d, got CalledProcessError\(1.* Say --hosts"):
        planned("-n", "4", program, environ={**in_slurm, "SLURM_JOB_NODELIST": "c,d"})


def test_what_an_allocation_has_no_room_for(in_slurm: dict[str, str], program: str) -> None:
    with pytest.raises(ValueError, match="expected at most 4 ranks in this allocation, got 5. Start fewer, ask Slurm"):
        planned("-n", "5", program, environ=in_slurm)
    with pytest.raises(ValueError, match="the same number of ranks on each host for this launcher"):
        planned("-n", "4", "--mpi", "srun", "--hosts", "a:3,b:1", program, environ=in_slurm)


def test_srun_where_there_is_no_mpiexec(
    in_slurm: dict[str, str], program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> Library:
        raise FileNotFoundError("no mpiexec")

    monkeypatch.setattr(run, "mpiexec_of", none)
    launcher(tmp_path / "bin" / "srun", "MPI plugin types are...\n\tnone\n\tpmi2")
    assert planned("-n", "4", program, environ=in_slurm)[0][:2] == ["srun", "--mpi=pmi2"]
    inside = {**in_slurm, "SLURM_STEP_ID": "0"}
    assert planned("-n", "4", program, environ=inside)[1]["SLURM_OVERLAP"] == "1"
    launcher(tmp_path / "bin" / "srun", "MPI plugin types are...\n\tnone")
    with pytest.raises(FileNotFoundError, match="no mpiexec"):
        planned("-n", "4", program, environ=in_slurm)


def test_other_batch_systems_are_left_to_mpiexec(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "loaded_library", lambda: MPICH)
    monkeypatch.setattr(run, "mpiexec_of", lambda *_: replace(MPICH, path="L"))
    command, _ = planned("-n", "1000", program, environ={"PBS_JOBID": "1", "PATH": os.environ["PATH"]})
    assert command[:5] == ["L", "-n", "1000", "-bind-to", "none"]
    assert batch_system({"LSB_JOBID": "1"}) is not None


@pytest.mark.parametrize(
    ("arguments", "kind", "complaint"),
    [
        (["-n", "100000"], ValueError, r"expected at most \d+ ranks for \d+ cores, got 100000"),
        (["-n", "4", "--hosts", "a:1,b:2"], ValueError, "expected at most 3 ranks on 2 hosts, got 4"),
        (["-n", "1", "--mpi", "/bin/true"], ValueError, "got /bin/true, which does not say what it is"),
        (["-n", "1", "--elastic", "--mpi", "srun"], ValueError, f"the mpiexec of {ELASTIC} for --elastic, got srun"),
        (["-n", "1", "--hostfile", "/no/file"], FileNotFoundError, "expected a hostfile, got '/no/file'"),
    ],
)
def test_mistakes(arguments: list[str], kind: type[Exception], complaint: str, program: str) -> None:
    with pytest.raises(kind, match=complaint):
        planned(*arguments, program)


def test_the_number_of_ranks_as_mpiexec_has_it(program: str) -> None:
    assert planned("-np", "3", "--oversubscribe", program) == planned("-n", "3", "--oversubscribe", program)


@pytest.mark.parametrize("arguments", [("-c", "print(1)", "-n", "7", "--dry-run"), ("-m", "pytest", "-c", "a.ini")])
def test_a_command_or_a_module_as_python_has_it(arguments: tuple[str, ...], program: str) -> None:
    assert planned("-n", "1", *arguments)[0][-1 - len(arguments) :] == [sys.executable, *arguments]
    command, _ = planned("-n", "1", "--distributed", *arguments)
    assert command[-3 - len(arguments) :] == [sys.executable, "-m", "pycollective.distributed", *arguments]
    assert planned("-n", "1", program, *arguments)[0][-2 - len(arguments) :] == [sys.executable, program, *arguments]


def test_no_program() -> None:
    with pytest.raises(ValueError, match=r"run: expected a program, -c COMMAND or -m MODULE, got none\. Name it after"):
        planned("-n", "1")


def test_a_command_without_its_text(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        planned("-n", "1", "-c")
    assert "argument -c: expected an argument" in capsys.readouterr().err


def test_no_such_program() -> None:
    with pytest.raises(FileNotFoundError, match=r"expected a program, got '/no/prog.py', which does not exist"):
        planned("-n", "1", "/no/prog.py")


def test_inside_a_rank(program: str) -> None:
    with pytest.raises(RuntimeError, match=f"got one of 4 ranks of {Hydra.name}"):
        planned("-n", "1", program, environ={"PMI_SIZE": "4"})


def test_a_host_that_does_not_answer(tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text('#!/bin/sh\n[ "$1" = good ] || { echo no route to "$1" >&2; exit 255; }\n')
    agent.chmod(0o755)
    environ = {"HYDRA_LAUNCHER_EXEC": str(agent)}
    check_hosts(["good", "localhost"], environ)
    with pytest.raises(ConnectionError, match="expected host bad to answer .* got 'no route to bad'"):
        check_hosts(["good", "bad"], environ)


def test_more_hosts_than_this_process_connects_to(tmp_path: Path) -> None:
    """The launcher alone reaches them; each host of at most so many is asked once."""
    agent, asked = tmp_path / "agent", tmp_path / "asked"
    agent.write_text(f'#!/bin/sh\nprintf "%s\\n" "$1" >>{asked}\n')
    agent.chmod(0o755)
    environ = {"HYDRA_LAUNCHER_EXEC": str(agent)}
    many = [f"host{i}" for i in range(MOST_CHECKED + 1)]
    check_hosts(many, environ)
    assert not asked.exists()
    check_hosts([*many[1:], "localhost", many[1]], environ)
    assert sorted(asked.read_text().split()) == sorted(many[1:])


def test_a_host_whose_name_is_an_option_of_ssh(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hostfile = tmp_path / "hosts"
    hostfile.write_text("alpha\n-oProxyCommand=date slots=2\n")
    complaint = "run: expected names of hosts in the hostfile, got '-oProxyCommand=date'. Correct the hostfile."
    with pytest.raises(ValueError, match=complaint):
        planned("-n", "1", "--hostfile", str(hostfile), program)
    ssh = tmp_path / "ssh"
    ssh.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >{tmp_path}/words\n')
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    check_hosts(["-oProxyCommand=date"], {})  # wherever the name comes from
    assert (tmp_path / "words").read_text().splitlines()[-3:] == ["--", "-oProxyCommand=date", "true"]


@pytest.mark.parametrize(
    ("given", "becomes"),
    [
        (["/bin/python3", "train.py", "-m"], "/bin/python3 RUNNER train.py -m"),
        (["/bin/python3", "-m", "train", "-x"], "/bin/python3 RUNNER -m train -x"),
        (
            ["/bin/python3", "-Xfrozen_modules=off", "-Wmodule", "train.py"],
            "/bin/python3 -Xfrozen_modules=off -Wmodule RUNNER train.py",
        ),
        (["/bin/python3", "-X", "dev", "-W", "error", "-u", "-c", "x"], "/bin/python3 -X dev -W error -u RUNNER -c x"),
        (["SCRIPT", "-x"], f"{sys.executable} RUNNER SCRIPT -x"),
    ],
)
def test_programs_of_global_arrays(given: list[str], becomes: str, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/usr/bin/env python3\n")
    command = run.with_global_arrays([word.replace("SCRIPT", str(script)) for word in given])
    assert (
        shlex.join(command).replace("-m pycollective.distributed", "RUNNER").replace(str(script), "SCRIPT") == becomes
    )
    for joined in ("-mtrain", "-um", "-Ic", "-cx = 1"):
        with pytest.raises(ValueError, match=r"expected -m MODULE or -c COMMAND as words of their own .*, got -"):
            run.with_global_arrays(["/bin/python3", joined, "train"])
    script.write_text("#!/bin/sh\n")
    with pytest.raises(ValueError, match=r"expected a Python program after --distributed, got .*/script\."):
        run.with_global_arrays([str(script)])


class Aprun(BatchLauncher):
    """A batch system's launcher that the package does not know: all that a new one needs."""

    name = "aprun"
    option = "aprun"
    size_variable = "ALPS_SIZE"
    rank_variables = ("ALPS_APP_PE",)
    remedy = "Launch with aprun."

    @classmethod
    def command_line(cls, job: Job, library: Library, environ: Mapping[str, str]) -> list[str]:
        return ["aprun", "-n", str(job.ranks), f"--{library.pmi}", *job.command]

    @classmethod
    def can_start(cls, library: Library, environ: Mapping[str, str]) -> bool:
        return "ALPS_CAN" in environ

    @classmethod
    def must_start(cls, library: Library, environ: Mapping[str, str]) -> bool:
        return "ALPS_MUST" in environ


class Alps(BatchSystem):
    """A batch system that the package does not know."""

    job_variable = "ALPS_JOB"
    how_to_get_more = "ask for a larger -n"

    @classmethod
    def capacity(cls, environ: Mapping[str, str]) -> list[int]:
        return [2, 4]

    @classmethod
    def host_names(cls, environ: Mapping[str, str]) -> list[str]:
        return ["x", "y"]

    @classmethod
    def launcher_variables(cls, environ: Mapping[str, str]) -> dict[str, str]:
        return {"ALPS_SHARED": "1"}


def test_a_new_batch_system_and_its_launcher(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started_by, "LAUNCHERS", (*LAUNCHERS, Aprun))
    monkeypatch.setattr(allocation, "BATCH_SYSTEMS", (*BATCH_SYSTEMS, Alps))
    monkeypatch.setattr(run, "loaded_library", lambda: MPICH)
    monkeypatch.setattr(run, "mpiexec_of", lambda *_: replace(MPICH, path="L"))
    environ = {"ALPS_JOB": "1", "PATH": os.environ["PATH"]}
    command, variables = planned("-n", "5", program, environ=environ)
    assert shlex.join(command).startswith("L -n 5 -bind-to none -hosts x:2,y:3 ")
    assert variables == {"ALPS_SHARED": "1"}
    for arguments, more in ((["--mpi", "aprun"], {}), ([], {"ALPS_MUST": "1"})):
        command, _ = planned("-n", "5", *arguments, program, environ={**environ, **more})
        assert shlex.join(command).startswith("aprun -n 5 --pmi2 ")
    with pytest.raises(ValueError, match="at most 6 ranks in this allocation, got 7. Start fewer, ask for a larger -n"):
        planned("-n", "7", program, environ=environ)
    with pytest.raises(RuntimeError, match="got one of 3 ranks of aprun"):
        planned("-n", "5", program, environ={"ALPS_SIZE": "3"})

    def none(*_: object) -> Library:
        raise FileNotFoundError("no mpiexec")

    monkeypatch.setattr(run, "mpiexec_of", none)
    with pytest.raises(FileNotFoundError, match="no mpiexec"):
        planned("-n", "5", program, environ=environ)
    assert planned("-n", "5", program, environ={**environ, "ALPS_CAN": "1"})[0][0] == "aprun"


class ExampleMpi(Library):
    """An MPI library that the package does not know: all that a new one needs."""

    family = "Example MPI"
    patterns = (r"Example MPI (\d[\w.]*)",)
    mpiexec_names = ("mpiexec_example",)
    pmi = "pmi2"
    remote_shell_variables = ("EXAMPLE_AGENT",)

    def options(self, job: Job) -> list[str]:
        return ["--label"] if job.label else []


def test_a_new_mpi_library(program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_mpi, "LIBRARIES", (*LIBRARIES, ExampleMpi))
    monkeypatch.setattr(find_mpi, "_PROBE", "print('/opt/libmpi.so'); print(-1, -1); print('Example MPI 2.23')")
    library = find_mpi.loaded_library()
    assert library == ExampleMpi("2.23", "/opt/libmpi.so")
    monkeypatch.setattr(run, "loaded_library", lambda: library)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere" / "python"))
    launcher(tmp_path / "bin" / "mpiexec", "mpirun (Open MPI) 5.0.11")
    right = launcher(tmp_path / "bin" / "mpiexec_example", "Example MPI 2.23")
    environ = {"PATH": str(tmp_path / "bin")}
    assert shlex.join(planned("-n", "1", "--label", program, environ=environ)[0]).startswith(f"{right} -n 1 --label ")
    assert planned("-n", "1", "--mpi", "srun", program, environ=environ)[0][:2] == ["srun", "--mpi=pmi2"]


@pytest.mark.parametrize("bad", ["a,,b", "a:0", "a:x", "", "-oProxyCommand=date", "a,-oProxyCommand=date:2"])
def test_bad_hosts(bad: str, capsys: Any) -> None:
    with pytest.raises(SystemExit):
        planned("-n", "1", f"--hosts={bad}", "prog")
    assert "expected hosts as alpha,beta:2" in capsys.readouterr().err
