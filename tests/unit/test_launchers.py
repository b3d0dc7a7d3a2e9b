"""What each launcher's variables say about a process, and which batch system has given it hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from pycollective.doctor import job
from pycollective.launch import allocation, started_by
from pycollective.launch.allocation import BATCH_SYSTEMS, batch_system
from pycollective.launch.child_processes import Parent, parent_rank
from pycollective.launch.launchers.hydra import Hydra
from pycollective.launch.launchers.launcher import Launcher, Place
from pycollective.launch.started_by import (
    LAUNCHERS,
    check_world,
    is_rank,
    launched_size,
    launcher_gives_gpus,
    local_place,
    rank_variables,
)


class Jsrun(Launcher):
    """A launcher that the package does not know: all that a new one needs."""

    name = "jsrun"
    size_variable = "JSM_NAMESPACE_SIZE"
    rank_variable = "JSM_NAMESPACE_RANK"
    rank_variables = ("JSM_NAMESPACE_ID", "JSM_NAMESPACE_RANK")
    place_variables = ("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE")
    remedy = "Launch with jsrun's own MPI."

    @classmethod
    def gives_gpus(cls, environ: Mapping[str, str]) -> bool:
        return "JSM_GPU_ASSIGNMENTS" in environ


# The variables that each launcher sets for rank 1 of 2 on a host, and in the end its rank's place there.
RANKS = {
    "srun": (
        {
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_ID": "0",
            "SLURM_PROCID": "1",
            "SLURM_LOCALID": "1",
            "SLURM_NODEID": "0",
            "SLURM_STEP_TASKS_PER_NODE": "2",
        },
        (1, 2),
    ),
    "an Open MPI mpirun": (
        {
            "OMPI_COMM_WORLD_SIZE": "2",
            "OMPI_COMM_WORLD_RANK": "1",
            "PMIX_NAMESPACE": "prterun-alpha-1@1",
            "PMIX_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        },
        (1, 2),
    ),
    Hydra.name: (
        {"PMI_SIZE": "2", "PMI_RANK": "1", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"},
        (1, 2),
    ),
    "flux run": ({"FLUX_JOB_SIZE": "2", "FLUX_JOB_ID": "f1", "FLUX_TASK_RANK": "1"}, None),
    "jsrun": (
        {
            "JSM_NAMESPACE_SIZE": "2",
            "JSM_NAMESPACE_ID": "5",
            "JSM_NAMESPACE_RANK": "1",
            "JSM_NAMESPACE_LOCAL_RANK": "1",
            "JSM_NAMESPACE_LOCAL_SIZE": "2",
        },
        (1, 2),
    ),
}


@pytest.fixture
def with_jsrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started_by, "LAUNCHERS", (*LAUNCHERS, Jsrun))


def test_every_launcher_is_tested() -> None:
    assert {launcher.name for launcher in (*LAUNCHERS, Jsrun)} == set(RANKS)


@pytest.mark.usefixtures("with_jsrun")
@pytest.mark.parametrize("name", RANKS)
def test_a_rank_of_each_launcher(name: str) -> None:
    environ, place = RANKS[name]
    found = launched_size(environ)
    assert found is not None
    assert (found[0].name, found[1]) == (name, 2)
    assert is_rank(environ)
    assert local_place(environ) == place
    with pytest.raises(RuntimeError, match=f"expected a world of 2 ranks, as {name} started, got .*some MPI") as caught:
        check_world(environ, 1, "some MPI\nline 2")
    assert found[0].remedy in str(caught.value)
    check_world(environ, 2, "some MPI")
    assert job.launchers_agree(2, environ).text == f"2 rank(s), as {name} says"
    assert job.launchers_agree(1, environ).remedy == found[0].remedy
    assert found[0].remedy.endswith((".", "it."))


@pytest.mark.usefixtures("with_jsrun")
@pytest.mark.parametrize("name", RANKS)
def test_what_tells_ranks_apart(name: str) -> None:
    environ, _ = RANKS[name]
    own = rank_variables({**environ, "HOME": "/"})
    assert own
    assert set(own) <= set(environ)
    mark = json.dumps({"pid": 1, "name": "rank 1 of 2", "launched_as": own})
    assert parent_rank({**environ, "PYCOLLECTIVE_RANK": mark}) == Parent(1, "rank 1 of 2")
    for variable in own:
        assert parent_rank({**environ, "PYCOLLECTIVE_RANK": mark, variable: "other"}) is None


@pytest.mark.usefixtures("with_jsrun")
@pytest.mark.parametrize("name", RANKS)
def test_the_only_rank_of_each_launcher(name: str) -> None:
    environ = {launcher.size_variable: "1" for launcher in started_by.LAUNCHERS if launcher.name == name}
    assert launched_size(environ) is None
    assert is_rank(environ) == (name != "srun")  # the only task of an srun may be a shell
    check_world(environ, 1, "some MPI")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"SLURM_NTASKS": "4", "SLURM_PROCID": "0"},  # inside sbatch; srun has not started it
        {"PMI_SIZE": "not a number"},
        RANKS["jsrun"][0],  # not in the list of launchers
    ],
)
def test_no_launcher(environ: dict[str, str]) -> None:
    assert launched_size(environ) is None
    assert not is_rank(environ)
    assert local_place(environ) is None


def test_an_mpiexec_inside_sbatch() -> None:
    # Its proxies are srun's tasks, so srun's variables say nothing about the ranks.
    proxies = {
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    }
    assert not is_rank(proxies)
    for name in ("an Open MPI mpirun", Hydra.name):
        environ, place = RANKS[name]
        assert local_place({**environ, **proxies}) == place
        assert is_rank({**environ, **proxies})
    assert local_place({**proxies, "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "4(x2),3"}) == Place(0, 3)


@pytest.mark.usefixtures("with_jsrun")
def test_launchers_that_give_each_rank_its_gpus() -> None:
    assert not launcher_gives_gpus({"CUDA_VISIBLE_DEVICES": "0"})
    assert launcher_gives_gpus({"SLURM_GPUS_PER_TASK": "1"})
    assert launcher_gives_gpus({"JSM_GPU_ASSIGNMENTS": "0"})


@pytest.mark.parametrize("name", [name for name, (_, place) in RANKS.items() if place and name != "jsrun"])
def test_a_rank_takes_its_share_of_the_gpus(name: str) -> None:
    environ = {**os.environ, **RANKS[name][0], "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    program = [sys.executable, "-c", "import os; print(os.environ['CUDA_VISIBLE_DEVICES'])"]
    command = [sys.executable, "-m", "pycollective.run.rank_wrapper", "--bind", "none", "--", *program]
    for more, gpus in (({}, "2,3"), ({"SLURM_GPUS_PER_TASK": "2"}, "0,1,2,3")):
        done = subprocess.run(command, env={**environ, **more}, capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.strip() == gpus


def test_batch_systems(monkeypatch: pytest.MonkeyPatch) -> None:
    assert batch_system({}) is None
    for system in BATCH_SYSTEMS:
        assert batch_system({system.job_variable: "7"}) is system
    # One of which nothing more is known is left to the mpiexec.
    pbs, environ = allocation.Pbs, {"PBS_JOBID": "7"}
    assert (pbs.capacity(environ), pbs.tasks(environ), pbs.host_names(environ)) == ([], [], [])
    assert pbs.launcher_variables(environ) == {}
