"""What ``pycollective doctor`` concludes from what the ranks say. What they say is tested end to end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pycollective.config import Config
from pycollective.doctor import installation, job
from pycollective.doctor.findings import Finding, show
from pycollective.doctor.job import Facts
from pycollective.launch.launchers.hydra import Hydra
from pycollective.launch.libraries.library import lacks_for_gpus
from pycollective.launch.libraries.mpich import Mpich
from tests.unit.fakes import launcher

RANK = Facts("alpha", ("Python 3.12.1", "jax 0.11.0"), "MPICH 5.0.2", frozenset({0, 1}), 4, "cpu", 2)
BOUND = [replace(RANK, cores=frozenset({i})) for i in range(4)]


def test_a_good_job() -> None:
    ranks = BOUND + [replace(rank, host="beta") for rank in BOUND]
    assert {finding.status for finding in job.compare(ranks)} == {"ok"}
    assert "1 for each rank, bound" in job.cores(ranks).text
    assert job.hosts(ranks).text == "4 rank(s) on alpha, 4 rank(s) on beta"


def test_unbound_ranks_are_no_fault() -> None:
    finding = job.cores([RANK, RANK])
    assert (finding.status, "not bound" in finding.text) == ("ok", True)


@pytest.mark.parametrize(
    ("change", "name", "status", "text"),
    [
        ({"versions": ("Python 3.12.1", "jax 0.10.2")}, "versions", "warning", "jax 0.10.2 on rank 3"),
        ({"library": "Open MPI 5"}, "MPI library", "wrong", "MPICH 5.0.2 on rank 0, 1, 2; Open MPI 5 on rank 3"),
        ({"devices": 1}, "devices", "wrong", "1 of cpu on each rank on rank 3"),
        ({"devices": 0, "platform": "no CUDA"}, "devices", "wrong", "none on rank 3: no CUDA"),
        ({"host": "beta"}, "hosts", "warning", "3 rank(s) on alpha, 1 rank(s) on beta"),
    ],
)
def test_one_rank_that_differs(change: dict[str, object], name: str, status: str, text: str) -> None:
    other = replace(BOUND[3], **change)  # type: ignore[arg-type]
    found = {finding.name: finding for finding in job.compare([*BOUND[:3], other])}
    assert found[name].status == status
    assert text in found[name].text
    assert found[name].remedy


def test_settings_of_all_libraries_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MPIR_CVAR_X", "I_MPI_OFI_X", "OMPI_MCA_btl", "OMPI_MCA_ess", "UCX_TLS", "FI_PROVIDER"):
        monkeypatch.setenv(name, "1")
    text = job.transport().text
    shown = "FI_PROVIDER=1, I_MPI_OFI_X=1, MPIR_CVAR_X=1, OMPI_MCA_btl=1, UCX_TLS=1"
    assert text.endswith(shown)


@pytest.mark.parametrize(
    ("size", "environ", "status", "text"),
    [
        (4, {"SLURM_STEP_NUM_TASKS": "4"}, "ok", "4 rank(s), as srun says"),
        (4, {"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "4"}, "ok", f"as {Hydra.name} says"),
        (1, {"SLURM_STEP_NUM_TASKS": "4"}, "wrong", "srun started 4 rank(s), MPI sees 1"),
        (2, {"OMPI_COMM_WORLD_SIZE": "4"}, "wrong", "an Open MPI mpirun started 4 rank(s), MPI sees 2"),
        (1, {}, "ok", "1 rank(s); no launcher's variables"),
    ],
)
def test_launcher_and_mpi(size: int, environ: dict[str, str], status: str, text: str) -> None:
    finding = job.launchers_agree(size, environ)
    assert finding.status == status
    assert text in finding.text
    assert bool(finding.remedy) == (status == "wrong")


def test_gpu_awareness() -> None:
    cpu = job.gpu_awareness([replace(RANK, gpu_aware=False)] * 2)
    assert (cpu.status, cpu.text) == ("ok", "not needed on CPU devices (MPI takes no pointers to GPU memory)")
    gpu = replace(RANK, platform="gpu")
    assert job.gpu_awareness([replace(gpu, gpu_aware=True)]).status == "ok"
    for aware in (False, None):
        finding = job.gpu_awareness([replace(gpu, gpu_aware=True), replace(gpu, gpu_aware=aware)])
        assert finding.status == "warning"
        assert "built for these GPUs" in finding.remedy


def test_transports_of_ucx_for_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = replace(RANK, platform="cuda", gpu_aware=True)
    lacking = [gpu, replace(gpu, network_lacks=lacks_for_gpus("cuda", {"UCX_TLS": "rc,sm"}))]
    finding = job.gpu_awareness(lacking)
    assert finding.status == "warning"
    assert finding.text.endswith("; UCX_TLS lacks cuda_copy, cuda_ipc on rank 1")
    assert finding.remedy
    monkeypatch.setattr(job, "config", Config(gpu_direct=False))  # MPI gets no such memory
    assert job.gpu_awareness(lacking).status == "ok"


def test_the_users_word_on_gpu_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = replace(RANK, platform="cuda", gpu_aware=False)
    assert "pieces of 4194304 B" in job.gpu_awareness([gpu]).text
    monkeypatch.setattr(job, "config", Config(gpu_direct=True))
    finding = job.gpu_awareness([gpu])
    assert finding.status == "ok"
    assert finding.text.endswith("PYCOLLECTIVE_GPU_DIRECT=on decides")


def test_one_gpu_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert job.gpus([RANK] * 2).text == "none in use"
    first, second = (replace(RANK, platform="cuda", gpus=(name,)) for name in ("aaaaaaaaaa", "bbbbbbbbbb"))
    assert (job.gpus([first, second]).status, job.gpus([first, second]).text) == ("ok", "each has one rank")
    finding = job.gpus([first, second, first])
    assert (finding.status, finding.text) == ("wrong", "ranks 0, 2 drive the same one, aaaaaaaa")
    assert "--gpus-per-task=1" in finding.remedy
    monkeypatch.setattr(job, "config", Config(allow_shared_gpu=True))
    assert job.gpus([first, second, first]).status == "warning"
    silent = replace(first, gpus=(None,))
    assert job.gpus([silent, silent]).text == "2 do not say which they are"


def test_settings_of_the_transport_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    assert job.transport().text.startswith("native")
    assert "UCX_TLS=tcp,self" in job.transport().text


def test_ranks_bound_to_one_core() -> None:
    finding = job.cores([BOUND[0], BOUND[0]])
    assert (finding.status, finding.text) == ("warning", "2 ranks share 1 core(s) on alpha")
    assert "Bind less" in finding.remedy
    everything = replace(RANK, cores=frozenset(range(4)))
    assert "start fewer" in job.cores([everything] * 5).remedy


def test_another_mpirun_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mpich = Mpich("5.0.2", "libmpi.so.12")
    monkeypatch.setattr("sys.executable", str(tmp_path / "nowhere" / "python"))
    other = launcher(tmp_path / "one" / "mpirun", "mpirun (Open MPI) 5.0.11")
    right = launcher(tmp_path / "two" / "mpirun", "HYDRA build details: Version: 5.0.2")
    monkeypatch.setenv("PATH", f"{other.parent}:{right.parent}")
    finding = installation.mpiexec(mpich)
    assert finding.status == "warning"
    assert finding.text == f"{other} comes first on PATH and is of Open MPI 5.0.11"
    assert finding.remedy == f"Start with pycollective run, or {right}."
    monkeypatch.setenv("PATH", str(right.parent))
    assert installation.mpiexec(mpich).status == "ok"
    monkeypatch.setenv("PATH", str(other.parent))
    assert installation.mpiexec(mpich).status == "wrong"


def test_what_the_two_ranks_answer() -> None:
    log = "[1795379277.839801] [alpha:27459:0]  address.c:985  UCX  ERROR failed to unpack address\n"
    found = installation.answer(f'{log}[{{"name": "cores", "status": "ok", "text": "all"}}]\n', "", 0)
    assert found == [Finding("2 ranks: cores", "ok", "all")]
    (finding,) = installation.answer(log, "Abort(942818575) on node 1: Fatal error\n", 143)
    assert (finding.name, finding.status, finding.text) == (
        "two ranks",
        "wrong",
        "Abort(942818575) on node 1: Fatal error",
    )


def test_the_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    good, odd, bad = Finding("a", "ok", "1"), Finding("bb", "warning", "2", "Do."), Finding("c", "wrong", "3", "Mend.")
    assert show([good, odd], as_json=False) == 0
    assert capsys.readouterr().out == "ok      a   1\nwarning bb  2 Do.\n"
    assert show([good, bad], as_json=True) == 1
    assert capsys.readouterr().out.startswith('[{"name": "a", "status": "ok"')
