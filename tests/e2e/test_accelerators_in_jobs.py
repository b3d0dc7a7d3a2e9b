"""Failures of an accelerator, on stand-ins for GPUs: no rank uses a wrong number, and the job ends with the cause.

And which memory MPI gets.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.launch import mpirun

_ROOT = Path(__file__).parents[2]

BEGIN = """
import ctypes, time, jax, jax.numpy as jnp, numpy as np
import pycollective as pc
from tests.standin import library
cuda = library()
cuda.standin_set_delay_us.argtypes = [ctypes.c_int64]
cuda.standin_set_fetches_fast.argtypes = [ctypes.c_bool]
cuda.standin_fail.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_bool]
comm = pc.init()
def told(y):
    print("got", np.asarray(y)[:3].tolist(), flush=True)
"""


def run(tmp_path: Path, text: str, ranks: int, mode: str = "staged", **env: str) -> subprocess.CompletedProcess[str]:
    program = tmp_path / "program.py"
    program.write_text(BEGIN + text)
    env = {"PYTHONPATH": str(_ROOT), "PYCOLLECTIVE_STAGE_BYTES": "64", "JAX_NUM_CPU_DEVICES": "1", **env}
    return mpirun(ranks, "-m", "tests.standin", mode, str(program), env=env, timeout=120)


FAILS = """
xs = jnp.arange(100.0) + 1
compiled = jax.jit(lambda x: pc.psum(x, comm))
told(compiled(xs))
if comm.rank == 1:
    cuda.standin_fail({function!r}, {nth}, {sticky})
try:
    told(compiled(2 * xs))
except Exception as error:  # a program that goes on after the error
    print("caught", error, flush=True)
told(compiled(3 * xs))
if comm.size < 2:  # another device is current than XLA's
    cuda.standin_shift_device(1)
    try:
        told(compiled(xs))
    except Exception as error:
        print("caught", error)
"""


@pytest.mark.parametrize(
    ("function", "nth", "sticky", "mode", "dispatch"),
    [
        (b"cudaEventRecord", 1, False, "staged", "wait"),  # before the call begins
        (b"cudaMemcpyAsync", 5, False, "staged", "wait"),  # in the middle of it
        (b"cudaEventSynchronize", 1, True, "direct", "wait"),  # an earlier kernel has failed
        (b"cudaMemcpyAsync", 5, False, "staged", "ahead"),  # when the handler has returned
    ],
)
def test_a_failure_of_one_rank_ends_all(
    tmp_path: Path, function: bytes, nth: int, sticky: bool, mode: str, dispatch: str
) -> None:
    text = FAILS.format(function=function, nth=nth, sticky=sticky)
    done = run(tmp_path, text, 2, mode, PYCOLLECTIVE_GPU_DISPATCH=dispatch)
    assert done.returncode not in (0, 124, 137)
    assert done.stdout.split("\n").count("got [2.0, 4.0, 6.0]") == 2  # of the first call, on both ranks
    assert done.stdout.count("got") == 2
    assert "caught" not in done.stdout
    name = function.decode().removeprefix("cuda")
    expected = f"pycollective.allreduce: expected {name} of the accelerator's runtime to succeed, got "
    assert done.stderr.count(f"pycollective: {expected}") == 1
    assert "program.py:" in done.stderr
    assert "(rank 1 of 2, communicator world)" in done.stderr
    assert "Ending all ranks: they wait for data of this rank" in done.stderr


def test_a_rank_alone_gets_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, FAILS.format(function=b"cudaMemcpyAsync", nth=1, sticky=False).replace("== 1", "== 0"), 1)
    assert done.returncode == 0, done.stderr
    failed = "caught INTERNAL: pycollective.allreduce: expected {} of the accelerator's runtime to succeed, got {}"
    expected = ["got [1.0", failed.format("MemcpyAsync", '"invalid argument"'), "got [3.0"]
    expected.append(failed.format("GetDevice", '"device 1, not XLA\'s 0"'))
    lines = done.stdout.splitlines()
    assert [line[: len(begin)] for line, begin in zip(lines, expected, strict=True)] == expected


def test_a_rank_alone_that_was_dispatched_ahead_ends(tmp_path: Path) -> None:
    text = FAILS.format(function=b"cudaMemcpyAsync", nth=1, sticky=False).replace("== 1", "== 0")
    done = run(tmp_path, text, 1, PYCOLLECTIVE_GPU_DISPATCH="ahead")
    assert done.returncode not in (0, 124, 137)
    assert done.stdout.splitlines() == ["got [1.0, 2.0, 3.0]"]
    expected = "pycollective: pycollective.allreduce: expected MemcpyAsync of the accelerator's runtime to succeed"
    assert done.stderr.count(expected) == 1
    assert "Ending all ranks: the program was dispatched ahead of the call" in done.stderr
    assert "program.py:" in done.stderr


LATE = """
from pycollective.faults import monitor
monitor.set_limit(3)
if comm.rank == 1:
    time.sleep(100)
told(jax.jit(lambda x: pc.psum(x, comm))(jnp.arange(100.0)))
"""


def test_a_wait_after_the_dispatch_has_its_limit(tmp_path: Path) -> None:
    env = {"PYCOLLECTIVE_GPU_DISPATCH": "ahead", "PYCOLLECTIVE_CHECK": "never"}
    done = run(tmp_path, LATE, 2, **env)
    assert done.returncode not in (0, 124, 137)
    assert done.stdout == ""
    assert "allreduce(float32[100], op=sum)" in done.stderr
    assert "program.py:" in done.stderr


WITHOUT_END = """
from pycollective.transport import native
from pycollective.ordering import dispatch
from pycollective.named_axes import overlap

def without_end(number):  # the program ends, as if it had failed before the end of the sum
    return lambda ctx, *operands, comm: operands

@jax.jit
def plain(x):
    return x + 1

def overlapped(x, w):
    total = jax.lax.psum(w @ x, "i")
    return total + jnp.sum(w @ jnp.cos(w))

x = jnp.arange(16.0).reshape(1, 16)
w = jnp.ones((1, 16, 16)) * (comm.rank + 1)
healthy = pc.pmap(overlapped, axis_name="i")
right = np.asarray(healthy(x, w))
cuda.standin_set_delay_us({delay})
cuda.standin_set_fetches_fast(True)  # the copy of the sum is late: it writes other numbers than those that are there
with_end, native.done_lowering = native.done_lowering, without_end
jax.block_until_ready(pc.pmap(lambda x, w: overlapped(x, w), axis_name="i")(x, w))
native.done_lowering = with_end
"""

ALONE = """
# Nothing writes the arrays any more that XLA has given away: after Python has forgotten failed programs,
dispatch.forget_failed_programs()
assert cuda.standin_reuse() == 1
time.sleep(0.5)
print("spoilt", cuda.standin_spoilt())

# and after a handler of this package has failed, here the end of the first of two sums.
def two(x, w):
    first = jax.lax.psum(w @ x, "i")
    second = jax.lax.psum(w @ jnp.sin(w), "i")
    return first + second + jnp.sum(w @ jnp.cos(w))
both = pc.pmap(two, axis_name="i")
sums = np.asarray(both(x, w))
cuda.standin_fail(b"cudaMemcpyAsync", 1, False)
try:
    both(x, w).block_until_ready()
except Exception as error:
    print("caught", "MemcpyAsync" in str(error))
print("begun", cuda.standin_reuse())
time.sleep(0.5)
print("spoilt", cuda.standin_spoilt())
cuda.standin_set_delay_us(20)
print("right", (np.asarray(healthy(x, w)) == right).all(), (np.asarray(both(x, w)) == sums).all())
"""

GOES_ON = """
try:
    print("went on", np.asarray(healthy(x, w)))
except Exception as error:
    print("caught", error)
print("again", (np.asarray(healthy(x, w)) == right).all())
"""


def test_a_failed_program_leaves_no_call_behind(tmp_path: Path) -> None:
    text = WITHOUT_END.format(delay=100_000) + ALONE
    done = run(tmp_path, text, 1, PYCOLLECTIVE_BUCKET_BYTES="16", PYCOLLECTIVE_STAGE_BYTES="4096")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["spoilt 0", "caught True", "begun 2", "spoilt 0", "right True True"]


def test_nor_does_one_that_was_dispatched_ahead(tmp_path: Path) -> None:
    text = WITHOUT_END.format(delay=100_000) + ALONE.partition("\n# and after")[0]
    env = {"PYCOLLECTIVE_BUCKET_BYTES": "16", "PYCOLLECTIVE_STAGE_BYTES": "4096", "PYCOLLECTIVE_GPU_DISPATCH": "ahead"}
    done = run(tmp_path, text, 1, **env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["spoilt 0"]


@pytest.mark.parametrize(("ranks", "dispatch"), [(1, "wait"), (2, "wait"), (2, "ahead")])
def test_a_start_without_its_end_is_an_error(tmp_path: Path, ranks: int, dispatch: str) -> None:
    done = run(tmp_path, WITHOUT_END.format(delay=20) + GOES_ON, ranks, PYCOLLECTIVE_GPU_DISPATCH=dispatch)
    expected = (
        "pycollective.allreduce: expected the end of each allreduce that a program starts, got a program that failed"
    )
    if ranks == 1:
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith(f"caught INTERNAL: {expected}")
        assert done.stdout.endswith("\nagain True\n")
    else:
        assert done.returncode not in (0, 124, 137)
        assert done.stdout == ""
        assert 1 <= done.stderr.count(f"pycollective: {expected}") <= 2


MEMORY = """
from pycollective.transport import native
if {handlers!r} != {mode!r}:
    native.bind_runtime(cuda, hip=False, direct={handlers!r} == "direct")
x = jnp.arange(12000.0) + comm.rank
blocks = x.reshape(comm.size, -1)
for dtype in (jnp.float32, jnp.int32):
    collectives = jax.jit(lambda x, blocks: (
        pc.all_gather(x, comm), pc.all_to_all(blocks, comm, 0, 0), pc.broadcast(x, comm, root=1),
        pc.gather(x, comm, root=1), pc.scatter(blocks, comm, root=1), pc.ppermute(x, comm, [(0, 1), (1, 0)]),
        pc.psum([x, x[:3]], comm), pc.psum_scatter(blocks, comm), pc.scan(x, comm),
        pc.pmax(x, comm), pc.psum(x.astype(jnp.int8), comm),  # MPI has no operation for these
    ))
    jax.block_until_ready(collectives(x.astype(dtype), blocks.astype(dtype)))
if comm.rank == 0:
    pc.send(x, comm, dest=1)
else:
    pc.recv(jnp.zeros_like(x), comm, source=0)
told(pc.psum(x, comm))
"""


@pytest.mark.parametrize(
    ("mode", "handlers", "sentence"),
    [
        ("direct", "direct", ""),
        ("direct", "staged", "standin: expected memory of the device for MPI_Allgather, got memory of the host"),
        ("staged", "direct", "standin: expected memory of the host for MPI_Allgather, got memory of the device"),
    ],
)
def test_mpi_gets_memory_of_the_right_kind(mode: str, handlers: str, sentence: str, tmp_path: Path) -> None:
    env = {"PYCOLLECTIVE_STAGE_BYTES": "4096", "PYCOLLECTIVE_BUCKET_BYTES": "0", "PYCOLLECTIVE_SHARED_MEMORY": "off"}
    done = run(tmp_path, MEMORY.format(mode=mode, handlers=handlers), 2, mode, **env)
    assert sentence in done.stderr
    if sentence:
        assert done.returncode not in (0, 124, 137)
        assert "got [" not in done.stdout
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == ["got [1.0, 3.0, 5.0]"] * 2
