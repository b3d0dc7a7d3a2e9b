"""``jax.extend.backend.clear_backends``: functions run on JAX's new devices, in order with programs on the old ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.e2e.launch import mpirun

COMMON = """
import gc, random, sys, weakref
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.extend.backend import backends, clear_backends
from jax.sharding import NamedSharding, PartitionSpec as P
import pycollective as pc

local = int(sys.argv[1])
world = pc.init(devices=local)
mesh = pc.make_mesh((world.size * local,), ("m",))
one, ones, matrix = np.ones(4, np.float32), np.ones((local, 4), np.float32), np.ones((150, 150), np.float32)


def slow(x, m):  # two calls with a computation before each, so that programs without an order would mix their calls
    return pc.psum(pc.psum(x + 0 * (m @ m @ m).sum(), world) + 0 * (m @ m).sum(), world)


def slow_by_name(x, m):
    return lax.psum(lax.psum(x, "i") + 0 * (m @ m).sum(), "i")


light, heavy, plain = pc.jit(lambda x: pc.psum(x, world)), pc.jit(slow), jax.jit(slow)
mapped = pc.pmap(slow_by_name, "i", in_axes=(0, None))
"""

# Each line: a function, whether its results are right, and whose devices they lie on.
PLACES = (
    COMMON
    + """
named = pc.jit(lambda x: lax.psum(x, "i"), axis_name="i")
sharded = pc.shard_map(lambda x: lax.psum(x, "m"), mesh=mesh, in_specs=P("m"), out_specs=P("m"))
chosen = pc.pmap(lambda x: lax.psum(x, "i"), "i", devices=jax.local_devices()[:local])
on_one = {"eager": lambda x: pc.psum(x, world), "jit": light, "jax.jit": jax.jit(lambda x: pc.psum(x, world))}
of_axes = {"pmap": pc.pmap(lambda x: lax.psum(x, "i"), "i"), "devices": chosen, "shard_map": sharded}
of_axes["grad"] = lambda x: jax.grad(lambda x: of_axes["pmap"](x).sum())(x)


def tell(name, out, want):
    here = set(jax.local_devices())
    side = "new" if out.devices() <= here else "old" if not out.devices() & here else "both"
    right = "right" if (np.asarray(out) == want).all() else f"wrong ({out})"
    sys.stdout.write(f"{world.rank}: {name} {right} {side} {len(out.devices())}\\n")


def all_of_them(of):
    for name, function in on_one.items():
        tell(f"{name} {of}", function(one), world.size)
    tell(f"axis {of}", named(one), world.size)
    for name, function in of_axes.items():
        tell(f"{name} {of}", function(ones), world.size * local)


committed, whole = jax.device_put(one, jax.local_devices()[0]), of_axes["pmap"](ones)
compiled, compiled_pmap = light.lower(one).compile(), of_axes["pmap"].lower(ones).compile()
all_of_them("before")
clear_backends()
all_of_them("after")
for name, function in on_one.items():
    tell(f"{name} of old", function(committed), world.size)
tell("pmap of old", of_axes["pmap"](whole), (world.size * local) ** 2)
tell("old program", compiled(one), world.size)
tell("old pmap", compiled_pmap(ones), world.size * local)
all_of_them("again")
"""
)

WHEN = ("before", "after", "again")


@pytest.mark.parametrize("local", [1, 4])
def test_where_results_lie(local: int, tmp_path: Path) -> None:
    (tmp_path / "places.py").write_text(PLACES)
    done = mpirun(2, str(tmp_path / "places.py"), str(local), timeout=100, env={"JAX_NUM_CPU_DEVICES": str(local)})
    assert done.returncode == 0, done.stderr
    names = [f"{name} right new 1" for name in ("eager", "jit", "jax.jit", "axis")]
    names += [f"{name} right new {local}" for name in ("pmap", "devices", "shard_map", "grad")]
    # JAX runs a program where its committed arguments lie, and a compiled program where it was compiled for.
    of_old = [f"{name} of old right old 1" for name in ("eager", "jit", "jax.jit")]
    of_old += [f"pmap of old right new {local}", "old program right old 1", f"old pmap right old {local}"]
    before, after, again = (
        [name.replace("right", f"{of} right") for name in names] for of in ("before", "after", "again")
    )
    for rank in range(2):
        said = re.findall(rf"^{rank}: (.*)$", done.stdout, re.MULTILINE)
        assert said == [*before, *after, *of_old, *again], done.stdout


ORDER = (
    COMMON
    + """
eager = lambda x: pc.psum(x, world)
old = [jax.device_put(x, jax.local_devices()[0]) for x in (one, matrix)]
compiled, compiled_pmap = heavy.lower(*old).compile(), mapped.lower(ones, matrix).compile()
alike, alone = random.Random(0), random.Random(world.rank)  # the same on all ranks, and another one on each

for _ in range(3):
    results = []
    for step in range(80):
        k = step % 7 + 1
        x, m = alone.choice([old, [jnp.asarray(one), jnp.asarray(matrix)]])
        kind = alike.choice(["heavy", "plain", "light", "eager", "pmap"])
        if kind == "heavy":
            results.append((k * world.size**2, alone.choice([heavy, compiled])(k * x, m)))
        elif kind == "plain":
            results.append((k * world.size**2, plain(k * x, m)))
        elif kind == "pmap":
            results.append((k * (world.size * local) ** 2, alone.choice([mapped, compiled_pmap])(k * ones, matrix)))
        else:
            results.append((k * world.size, {"light": light, "eager": eager}[kind](k * x)))
    for want, got in results:
        np.testing.assert_allclose(got, np.full(got.shape, want), rtol=1e-6)
    clear_backends()
print("right", flush=True)
"""
)


@pytest.mark.parametrize("local", [1, 4])
def test_order_with_programs_on_old_devices(local: int, tmp_path: Path) -> None:
    # No program uses the result of another. Each rank chooses for itself whether a program runs on an old device.
    (tmp_path / "order.py").write_text(ORDER)
    env = {"JAX_NUM_CPU_DEVICES": str(local), "PYCOLLECTIVE_TIMEOUT": "20"}
    done = mpirun(2, str(tmp_path / "order.py"), str(local), timeout=100, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["right"] * 2


FIRST = (
    COMMON
    + """
@pc.jit
def long(x, m):  # it takes longer than to compile the next program
    return pc.psum(pc.psum(x, world) + 0 * lax.fori_loop(0, 6000, lambda _, y: m @ y * 1e-3, m).sum(), world)


old = [jax.device_put(x, jax.local_devices()[0]) for x in (one, matrix)]
short = jax.jit(lambda x: 3 * pc.psum(x, world))
short(one), long(*old).block_until_ready()
last = long(*old)
if world.rank == 0:
    clear_backends()
np.testing.assert_array_equal(short(one), 3 * world.size)
np.testing.assert_array_equal(last, world.size**2)
print("right", flush=True)
"""
)


def test_the_first_program_afterwards(tmp_path: Path) -> None:
    # One rank alone clears its backends, while a program runs.
    (tmp_path / "first.py").write_text(FIRST)
    env = {"JAX_NUM_CPU_DEVICES": "1", "PYCOLLECTIVE_TIMEOUT": "20"}
    done = mpirun(2, str(tmp_path / "first.py"), "1", timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["right"] * 2


ENDS = (
    COMMON
    + """
from pycollective.ordering import dispatch

clients = []
for _ in range(4):
    light(one), light(jax.device_put(one, jax.local_devices()[1])), heavy(one, matrix), plain(one, matrix)
    mapped(ones, matrix), pc.psum(one, world)
    clients.append(weakref.ref(next(iter(backends().values()))))
    clear_backends()
mapped(ones, matrix)
gc.collect()
print([client() is None for client in clients[:-1]])  # the last may live until JAX's next one ends

probe, waits = dispatch._run_probe, []
dispatch._run_probe = lambda devices: (waits.append(devices), probe(devices))
mapped(ones, matrix)
waits.clear()
mapped(ones, matrix), mapped(ones, matrix)
print(waits)  # XLA itself orders programs on the same devices
"""
)


def test_an_old_client_ends(tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text(ENDS)
    done = mpirun(1, str(tmp_path / "ends.py"), "2", timeout=60, env={"JAX_NUM_CPU_DEVICES": "2"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [str([True] * 3), "[]"]


FEWER = (
    COMMON
    + """
mapped(ones, matrix)
clear_backends()
jax.config.update("jax_num_cpu_devices", 1)
mapped(ones, matrix)
"""
)


def test_fewer_devices(tmp_path: Path) -> None:
    (tmp_path / "fewer.py").write_text(FEWER)
    done = mpirun(1, str(tmp_path / "fewer.py"), "2", timeout=60, env={"JAX_NUM_CPU_DEVICES": "2"})
    assert done.returncode != 0
    said = r"pycollective.init: expected the devices cpu:0, cpu:1, which init has chosen, got cpu:0 after "
    assert re.search(said + r"jax.extend.backend.clear_backends \(rank 0 of 1\)\. Give JAX", done.stderr), done.stderr
