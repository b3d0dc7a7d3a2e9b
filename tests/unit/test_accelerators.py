"""The GPUs that a rank takes, and those that it refuses; with stand-ins for devices."""

from __future__ import annotations

import ctypes
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import jax
import numpy as np
import pytest
from mpi4py import MPI

import pycollective as pc
from pycollective.ranks import accelerators
from pycollective.transport import native, runtime
from tests.standin import compile_cpp

STANDIN = Path(__file__).parents[1] / "standin" / "cudart.cc"


class Client(NamedTuple):
    platform_version: str


class Gpu(NamedTuple):
    local_hardware_id: int
    client: Client = Client("PJRT C API\ncuda 13000")
    platform: str = "gpu"
    id: int = 0


class Ranks:
    """An MPI communicator whose other ranks bring the values in ``told``."""

    def __init__(self, rank: int, told: list[Any]) -> None:
        self.rank, self.size, self.told = rank, len(told), told

    def allgather(self, own: Any) -> list[Any]:
        return [own if rank == self.rank else told for rank, told in enumerate(self.told)]


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(compile_cpp([STANDIN], tmp_path_factory.mktemp("driver") / "libcuda.so", "-shared"))


@pytest.fixture
def cuda(driver: str, monkeypatch: pytest.MonkeyPatch) -> runtime.Kind:
    kind = runtime.KINDS["cuda"]._replace(driver=driver)
    monkeypatch.setitem(runtime.KINDS, "cuda", kind)
    return kind


def test_kinds() -> None:
    assert accelerators.kind_of(Gpu(0)) == "cuda"  # type: ignore[arg-type]
    assert accelerators.kind_of(Gpu(0, Client("PJRT C API\nrocm 70000"))) == "rocm"  # type: ignore[arg-type]
    ids = {accelerators.lane_id(device) for device in (*jax.devices("cpu")[:1], Gpu(0), Gpu(3))}  # type: ignore[arg-type]
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("lists", "own"),
    [
        ([["0", "1", "2", "3"]] * 4, [[0], [1], [2], [3]]),
        ([["4", "5", "6", "7"]] * 2, [[0, 1], [2, 3]]),  # places in the list that CUDA shows
        ([["0", "1", "2"]] * 2, [[0], [1]]),  # each rank gets the same number
        ([["0", "1"]] * 3, [[0], [1], [0]]),  # two ranks share one: `check` refuses it
        ([["0", "1"]], [None]),  # the only rank takes all
        ([["0"]] * 2, [None, None]),
        ([[], []], [None, None]),
        ([["0", "1"], ["2", "3"]], [None, None]),  # the launcher has given the ranks different GPUs
    ],
)
def test_shares(lists: list[list[str]], own: list[list[int] | None]) -> None:
    assert [accelerators.share(lists, rank) for rank in range(len(lists))] == own


@pytest.mark.parametrize(
    ("environ", "chosen"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, "2,3"),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPUS_PER_TASK": "2"}, None),
        ({"CUDA_VISIBLE_DEVICES": "3"}, None),
    ],
)
def test_a_rank_takes_its_share(environ: dict[str, str], chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    updates: dict[str, Any] = {}
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    seen = environ["CUDA_VISIBLE_DEVICES"].split(",")
    accelerators.take_share(Ranks(1, [seen, seen]), environ)  # type: ignore[arg-type]
    assert updates == ({} if chosen is None else {"jax_cuda_visible_devices": chosen})


def test_what_the_user_has_chosen_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax.config, "read", lambda _: "1")
    updates: dict[str, Any] = {}
    monkeypatch.setattr(jax.config, "update", updates.__setitem__)
    accelerators.take_share(Ranks(1, [[], []]), {"CUDA_VISIBLE_DEVICES": "0,1"})  # type: ignore[arg-type]
    assert updates == {}


def test_ranks_on_one_gpu_are_refused(cuda: runtime.Kind) -> None:
    name = runtime.identity(cuda, 1)
    assert name == "11" * 16
    ranks: Any = Ranks(0, [None, ("cuda", [runtime.identity(cuda, 0)]), ("cuda", [name])])
    gpus: Any = [Gpu(1)]
    with pytest.raises(
        RuntimeError,
        match=r"init: expected an accelerator of its own for each rank, got cuda device 11111111 on ranks 0, 2",
    ):
        accelerators.check(ranks, gpus, may_share=False)
    assert accelerators.check(ranks, gpus, may_share=True) == "cuda"
    others: Any = Ranks(0, [None, ("cuda", ["another"])])
    assert accelerators.check(others, gpus, may_share=False) == "cuda"


def test_several_gpus_of_a_rank_are_its_own(cuda: runtime.Kind) -> None:
    ranks: Any = Ranks(1, [("cuda", [runtime.identity(cuda, i) for i in (0, 1)]), None])
    both: Any = [Gpu(2), Gpu(3)]
    assert accelerators.check(ranks, both, may_share=False) == "cuda"


def test_devices_that_do_not_say_who_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(runtime.KINDS, "cuda", runtime.KINDS["cuda"]._replace(driver="libno-such-driver.so"))
    ranks: Any = Ranks(0, [None, ("cuda", [None])])
    gpus: Any = [Gpu(0)]
    assert accelerators.check(ranks, gpus, may_share=False) == "cuda"


def test_ranks_with_devices_of_two_kinds_are_refused() -> None:
    ranks: Any = Ranks(0, [None, ("cpu", []), ("cuda", ["x"])])
    with pytest.raises(RuntimeError, match="devices of one kind on all ranks, got cpu on rank 0, cuda on rank 2"):
        accelerators.check(ranks, jax.devices("cpu")[:1], may_share=False)


def test_a_number_that_no_device_has(cuda: runtime.Kind) -> None:
    assert runtime.identity(cuda, 8) is None


def test_libraries_of_this_process(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 00:00 0 \n"
        "7f01-7f02 r-xp 00000000 fe:00 42    /opt/with blank/libcudart.so.13\n"
        "7f02-7f03 r-xp 00000000 00:00 0     [stack]\n"
    )
    assert runtime.loaded("libcudart.so", maps) == "/opt/with blank/libcudart.so.13"
    assert runtime.loaded("libamdhip64.so", maps) is None


def test_no_runtime() -> None:
    kind = runtime.KINDS["cuda"]._replace(library="libno-such-runtime.so")
    with pytest.raises(ImportError, match=r"transport: expected libno-such-runtime.so in this process, or"):
        runtime.load(kind)


def test_a_runtime_that_lacks_a_function() -> None:
    pc.init()
    with pytest.raises(ImportError, match="transport: expected a runtime with cudaGetDevice, got"):
        native.bind_runtime(ctypes.CDLL("libm.so.6"), hip=False, direct=False)
    with pytest.raises(ImportError, match="transport: expected a runtime with hipGetDevice, got"):
        native.bind_runtime(ctypes.CDLL("libm.so.6"), hip=True, direct=False)


@pytest.mark.parametrize(
    ("faults", "missing", "told"),
    [
        ([None, None], False, None),
        ([], False, "an MPI library that copies on streams of its own"),
        ([None, "StreamWriteValue: a number that is not written"], False, "a number that is not written on rank 0"),
        ([None, None], True, "no cudaStreamCreateWithPriority on rank 0"),
        (["elsewhere"], False, "elsewhere on rank 1"),
    ],
)
def test_dispatch_ahead_needs_all_devices_of_all_ranks(
    faults: list[str | None], missing: bool, told: str | None, driver: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pc.init()
    standin = ctypes.CDLL("libm.so.6" if missing else driver)
    ranks: Any = Ranks(0, [None, "elsewhere" if faults == ["elsewhere"] else None])
    own = iter([None] if faults == ["elsewhere"] else faults)
    monkeypatch.setattr(native, "fault_in_ahead", lambda *_: next(own))
    devices = jax.devices("cpu")[:1] * len(faults)
    try:
        with nullcontext() if told is None else pytest.warns(RuntimeWarning, match=f"init: expected .*, got .*{told}"):
            accelerators.use_ahead(ranks, "cuda", devices, (standin, None), direct=not faults)
        assert native.is_ahead() is (told is None)
    finally:
        native.set_ahead(False)


def test_elastic_training_is_not_dispatched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    pc.init()
    monkeypatch.setattr(native, "is_ahead", lambda: True)
    with pytest.raises(RuntimeError, match="goes on when a rank fails, got PYCOLLECTIVE_GPU_DISPATCH=ahead"):
        pc.elastic.run(lambda state, world: None, pc.elastic.State(x=0), required=True)


def test_whether_mpi_takes_device_memory() -> None:
    kind = runtime.KINDS["cuda"]
    assert runtime.takes_device_memory(kind, SimpleNamespace()) is None
    # MPI_Pcontrol stands for a query: every MPI has it, and it returns 0.
    assert runtime.takes_device_memory(kind._replace(queries=("MPIX_No_such_query", "MPI_Pcontrol"))) is False

    def query(answers: dict[int, int], code: int = 0) -> Any:
        def answer(gpu_type: int, flag: Any) -> int:
            flag._obj.value = answers[gpu_type]
            return code

        return answer

    for supported in (0, 1):  # MPICH's second query counts where the first one says no
        mpi = SimpleNamespace(MPIX_Query_cuda_support=lambda: 0, MPIX_GPU_query_support=query({0: supported}))
        assert runtime.takes_device_memory(kind, mpi) is bool(supported)
    assert runtime.takes_device_memory(runtime.KINDS["rocm"], SimpleNamespace(MPIX_GPU_query_support=query({2: 1})))
    assert not runtime.takes_device_memory(kind, SimpleNamespace(MPIX_GPU_query_support=query({0: 1}, code=13)))


class Faulty:
    """A communicator of one rank whose library has a fault with arrays of some length."""

    rank, size = 0, 1

    def __init__(self, fault: str, count: int) -> None:
        self.fault, self.count = fault, count

    def allgather(self, own: Any) -> list[Any]:
        return [own]

    def allreduce(self, own: Any, **_: Any) -> Any:
        return own

    def Allreduce(self, send: Any, receive: Any, op: Any) -> None:  # noqa: N802
        if self.fault == "refuses" and send[1] == self.count:
            raise MPI.Exception(MPI.ERR_BUFFER)
        MPI.COMM_SELF.Allreduce(send, receive, op=op)
        if self.fault == "corrupts" and send[1] == self.count:
            np.asarray(receive[0]).view(np.int32)[-1] += 1


@pytest.mark.parametrize("count", accelerators._PROBES)
@pytest.mark.parametrize(("fault", "told"), [("refuses", "the error "), ("corrupts", "wrong sums of {} numbers")])
def test_a_library_that_claims_to_take_device_memory(
    fault: str, told: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, ranks = jax.devices("cpu")[0], cast(MPI.Intracomm, Faulty(fault, count))
    told = re.escape(told.format(count))
    expected = (
        f"init: expected an MPI library that sums arrays in the memory of cuda devices{{}}, got {told}.* on rank 0"
    )
    current: list[int] = []
    monkeypatch.setattr(runtime, "takes_device_memory", lambda kind: True)
    monkeypatch.setattr(runtime, "make_current", lambda kind, ordinal: current.append(ordinal))
    with pytest.warns(RuntimeWarning, match=expected.format(", as it says")):
        assert not accelerators.use_direct(ranks, "cuda", device, chosen=None)
    assert current == [0]
    with pytest.raises(RuntimeError, match=expected.format("")):
        accelerators.use_direct(ranks, "cuda", device, chosen=True)
    assert accelerators.use_direct(MPI.COMM_WORLD, "cuda", device, chosen=None)
    assert not accelerators.use_direct(ranks, "cuda", device, chosen=False)
    monkeypatch.setattr(runtime, "takes_device_memory", lambda kind: None)
    assert not accelerators.use_direct(MPI.COMM_WORLD, "cuda", device, chosen=None)
