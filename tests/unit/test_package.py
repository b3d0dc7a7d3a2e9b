"""The package from outside: its public names, and the files that are installed."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import pycollective as pc

ROOT = Path(__file__).parents[2]


def test_names() -> None:
    assert "__version__" in dir(pc)
    assert set(pc.__all__) < set(dir(pc))
    assert pc.__version__
    for name in pc.__all__:
        getattr(pc, name)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("Allreduce", "allreduce"),
        ("Alltoallv", "ragged_exchange or ragged_all_to_all"),
        ("allgather", "all_gather"),
        ("alltoall", "all_to_all"),
        ("bcast", "broadcast"),
        ("reduce_scatter", "psum_scatter"),
        ("Reduce_scatter_block", "psum_scatter"),
        ("Reduce", "reduce"),
        ("Barrier", "barrier"),
        ("Sendrecv", "sendrecv"),
        ("COMM_WORLD", "world()"),
        ("Get_rank", "world().rank"),
    ],
)
def test_names_of_other_bindings(name: str, here: str) -> None:
    expected = rf"pycollective\.{name}: expected a name that this package has, got '{name}'\. Here it is pycollective\."
    with pytest.raises(AttributeError, match=expected) as caught:
        getattr(pc, name)
    assert str(caught.value).endswith(f"pycollective.{here}.")


def test_names_of_nothing() -> None:
    with pytest.raises(AttributeError, match=r"got 'broadcst'\. dir\(pycollective\) lists them\.") as caught:
        pc.broadcst  # noqa: B018
    # From these attributes Python says "Did you mean: 'broadcast'?"
    assert (caught.value.name, caught.value.obj) == ("broadcst", pc)


AT_IMPORT = """
faulthandler lazy_loader pycollective pycollective.config pycollective.environment pycollective.errors
pycollective.faults pycollective.faults.before_init pycollective.faults.exit_status
pycollective.launch pycollective.launch.child_processes pycollective.launch.find_mpi pycollective.launch.job
pycollective.launch.launchers pycollective.launch.launchers.batch_system pycollective.launch.launchers.flux
pycollective.launch.launchers.hydra pycollective.launch.launchers.launcher pycollective.launch.launchers.openmpi
pycollective.launch.launchers.slurm pycollective.launch.libraries pycollective.launch.libraries.intel_mpi
pycollective.launch.libraries.library pycollective.launch.libraries.mpich pycollective.launch.libraries.openmpi
pycollective.launch.libraries.standard_abi pycollective.launch.started_by
pycollective.transport pycollective.transport.mpi_start pycollective.transport.native_library
"""
"""What ``import pycollective`` imports beside the modules of JAX and mpi4py. Each is a file that all ranks read."""

AT_INIT = {"build_id", "faults", "jax_support", "launch", "ordering", "ranks", "transport"}
"""The rooms from which ``init`` imports more."""


def modules_after(code: str) -> set[str]:
    """The modules that a program has imported at its end, beside those of JAX and mpi4py."""
    before = "import sys, jax, mpi4py.MPI; before = {*sys.modules}; "
    code = f"{before}{code}; print(*{{*sys.modules}} - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return {*done.stdout.split()}


def test_an_import_reads_few_files() -> None:
    assert modules_after("import pycollective") == {*AT_IMPORT.split()}


def test_init_imports_what_every_rank_needs() -> None:
    """Neither the commands, nor other transports, nor what a job on several hosts needs."""
    found = modules_after("import pycollective as pc; pc.init()") - {*AT_IMPORT.split()}
    own = {name for name in found if name.startswith("pycollective.")}
    assert {name.split(".")[1] for name in own} == AT_INIT
    assert not {name for name in own if "mpi4jax" in name}
    others = {name.split(".")[0] for name in found - own}
    assert others - {"jax"} <= set(sys.stdlib_module_names)
    assert "multiprocessing" not in others


def test_the_constants_of_messages_need_neither_mpi_nor_jax() -> None:
    code = (
        "import copy, pickle, sys, pycollective as pc; constants = [pc.ANY_SOURCE, pc.ANY_TAG, pc.PROC_NULL]; "
        "print(*constants, constants); assert pickle.loads(pickle.dumps(constants)) == copy.deepcopy(constants); "
        "assert len(set(constants)) == 3; sys.exit('jax' in sys.modules or 'mpi4py.MPI' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "pc.ANY_SOURCE pc.ANY_TAG pc.PROC_NULL [pc.ANY_SOURCE, pc.ANY_TAG, pc.PROC_NULL]\n"


@pytest.mark.parametrize(
    "name",
    [
        *(
            "allreduce",
            "maxloc",
            "minloc",
            "broadcast",
            "reduce",
            "gather",
            "scatter",
            "scan",
            "exscan",
            "send",
            "recv",
            "sendrecv",
            "barrier",
            "update_halos",
            "isend",
            "irecv",
            "isendrecv",
        ),
        *("ragged_exchange", "ragged_all_gather", "ragged_gather", "ragged_scatter"),
    ],
)
def test_what_takes_no_axis_name_calls_its_communicator_comm(name: str) -> None:
    parameters = list(inspect.signature(getattr(pc, name)).parameters)
    assert parameters.index("comm") == {"barrier": 0}.get(name, 2 if name.startswith("ragged") else 1)
    assert "axis_name" not in parameters


def test_its_types_are_installed(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", str(tmp_path), "build_py", "--build-lib"]
    subprocess.run([*command, str(tmp_path)], cwd=ROOT, check=True, capture_output=True, timeout=100)
    installed = {path.name for path in (tmp_path / "pycollective").iterdir()}
    assert {"py.typed", "__init__.pyi"} <= installed
