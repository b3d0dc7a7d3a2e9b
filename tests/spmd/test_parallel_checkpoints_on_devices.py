"""Checkpoints that each rank writes its parts of, against the whole state, on the same and on other layouts."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pycollective as pc
from pycollective import parallel
from pycollective.named_axes.mesh import Mesh
from pycollective.parallel import checkpoints as checkpoints_module
from pycollective.parallel.batches import Batches
from pycollective.parallel.checkpoints import Checkpoints, Slices, slices_of, specs_of_state
from pycollective.ranks.setup import devices_of_this_rank
from tests.cases import values
from tests.collective.programs import once

Tree = Any
P = jax.sharding.PartitionSpec


@pytest.fixture
def folder(world: pc.Communicator) -> Iterator[Path]:
    path = world.mpi.bcast(tempfile.mkdtemp() if world.rank == 0 else None)
    yield Path(path) / "saved"
    world.mpi.Barrier()
    if world.rank == 0:
        shutil.rmtree(path)


def mesh_of(comm: pc.Communicator, devices: int) -> Mesh:
    return pc.make_mesh((comm.size * devices,), ("data",), comm=comm, devices=devices_of_this_rank()[:devices])


SIZE = 13
SPECS = {
    "rows": P("data"),
    "columns": P(None, "data"),
    "slices": Slices("data", SIZE),
    "layers": Slices("data", 7),
    "keys": P("data"),
    "count": P(),
    "o" * 300: P(),
}


def whole_state() -> Tree:
    """Returns the whole arrays: lengths that all numbers of ranks and devices of these tests divide, but of slices."""
    rows = jnp.asarray(values((24, 2)), jnp.bfloat16).at[3].set(jnp.nan).at[5].set(-0.0)
    return {
        "rows": rows,
        "columns": values((3, 48), seed=1),
        "slices": values((SIZE,), seed=2),
        "layers": values((2, 7), seed=3).astype(np.float16),
        "keys": jax.random.split(jax.random.key(5, impl="rbg"), 24),
        "count": np.int32(9),
        "o" * 300: np.array([True, False]),
    }


def own(whole: Tree, comm: pc.Communicator, devices: int) -> Tree:
    """Returns this rank's part of each array."""

    def part(x: Any, spec: Any) -> Any:
        if isinstance(spec, Slices):
            length = -(-spec.size // (comm.size * devices))
            x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, comm.size * devices * length - spec.size)])
        axis = x.ndim - 1 if isinstance(spec, Slices) else next((i for i, name in enumerate(spec) if name), None)
        if axis is None:
            return x
        length = x.shape[axis] // comm.size
        return x[(slice(None),) * axis + (slice(comm.rank * length, (comm.rank + 1) * length),)]

    return jax.tree.map(part, whole, SPECS)


def same(got: Tree, want: Tree) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), path  # all bits: -0.0 and NaN as well


def test_a_state_is_read_on_other_layouts(world: pc.Communicator, folder: Path) -> None:
    whole = whole_state()
    checkpoints = Checkpoints(folder, world)
    state = own(whole, world, 2)
    state["columns"] = np.array(state["columns"])
    state["rows"] = jnp.array(state["rows"])
    assert checkpoints.restore(state, mesh_of(world, 2), SPECS) is None
    checkpoints.save(3, state, mesh_of(world, 2), SPECS, notes={"position": [4, 5], "of": world.rank})
    state["columns"][:] = 0  # the arrays may change while a thread writes
    state["rows"].delete()
    checkpoints.close()
    alone = world.split(world.rank)
    assert alone is not None
    half = world.split(world.rank % 2)  # one or two of four ranks
    assert half is not None
    for comm, devices in ((world, 2), (world, 1), (alone, 1), (half, 2)):
        wanted = own(whole, comm, devices)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), wanted)
        others = Checkpoints(folder, comm)
        assert others.latest_step() == 3
        restored = others.restore(like, mesh_of(comm, devices), SPECS)
        assert restored is not None
        assert restored[::2] == (3, {"position": [4, 5], "of": 0})
        same(restored.state, wanted)
        others.close()
    # A rank wrote its part alone: no chunk is larger than that.
    largest = max(path.stat().st_size for path in folder.glob("3/arrays.*/*columns*/c/**/*") if path.is_file())
    assert largest == whole["columns"].nbytes // world.size


SHAPES = {"w": jax.ShapeDtypeStruct((7, 3), jnp.float32), "b": jax.ShapeDtypeStruct((3,), jnp.float32)}
ADAM = optax.adam(1e-2)
EMA = optax.ema(0.9, debias=False)
STEPS = 5


def init(key: Any) -> Tree:
    return {name: jax.random.normal(jax.random.fold_in(key, x.size), x.shape) for name, x in SHAPES.items()}


def loss(params: Tree, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ params["w"] + params["b"][None]) ** 2)


def examples(step: int, batches: Batches) -> Any:
    x = values((48, 7), seed=6)[next(batches)]
    if step == 1:
        x[5, 0] = np.nan  # on one device
    return x


def alone(key: Any) -> Tree:
    """The training in one process: parameters, their average, the optimizer's state."""
    optimizer, batches = optax.apply_if_finite(ADAM, 5), Batches(48, 24, seed=2)
    params = jax.jit(init)(key)
    state, average = optimizer.init(params), EMA.init(params)
    for step in range(STEPS):
        updates, state = optimizer.update(jax.grad(loss)(params, examples(step, batches)), state, params)
        params = optax.apply_updates(params, updates)
        average = EMA.update(params, average)[1]
    return {"params": params, "state": state, "average": average}


class Training:
    """A training of slices on some ranks and devices."""

    def __init__(self, comm: pc.Communicator, devices: int) -> None:
        self.comm, self.mesh = comm, mesh_of(comm, devices)
        optimizer = parallel.apply_if_finite(parallel.sliced(ADAM, SHAPES, "data"), 5, "data")
        slices = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((devices * -(-x.size // (comm.size * devices)),), x.dtype), SHAPES
        )
        self.like = jax.eval_shape(
            lambda p: {"params": p, "state": optax.apply_if_finite(ADAM, 5).init(p), "average": EMA.init(p)}, slices
        )
        self.specs = specs_of_state(self.like, slices, slices_of(SHAPES, "data"))
        as_spec = lambda spec: P("data") if isinstance(spec, Slices) else spec
        own = jax.tree.map(as_spec, self.specs)

        def start(key: Any) -> Tree:
            params = parallel.initialized_slices(init, "data")(key)
            return {"params": params, "state": optimizer.init(params), "average": EMA.init(params)}

        def step(state: Tree, x: Any) -> Tree:
            grads = jax.grad(parallel.gathered(loss, SHAPES, "data"))(state["params"], x)
            updates, of_optimizer = optimizer.update(grads, state["state"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            return {"params": params, "state": of_optimizer, "average": EMA.update(params, state["average"])[1]}

        on_devices: dict[str, Any] = {"mesh": self.mesh, "check_vma": False}
        self.start = pc.shard_map(start, in_specs=P(), out_specs=own, **on_devices)
        self._step = pc.shard_map(step, in_specs=(own, P("data")), out_specs=own, donate_argnums=0, **on_devices)

    def step(self, number: int, state: Tree, batches: Batches) -> Tree:
        return self._step(state, np.split(examples(number, batches), self.comm.size)[self.comm.rank])


@pytest.mark.usefixtures("promotion_of_optax")
def test_a_training_goes_on_on_another_layout(world: pc.Communicator, folder: Path) -> None:
    """Slices that are made in place, a step that all devices skip, an average of parameters, the order of examples."""
    key = jax.random.key(1)
    first, batches = Training(world, 2), Batches(48, 24, seed=2)
    state, checkpoints = first.start(key), Checkpoints(folder, world)
    for step in range(3):
        state = first.step(step, state, batches)
    checkpoints.save(3, state, first.mesh, first.specs, notes={"position": batches.position})
    state = first.step(3, state, batches)  # the state is donated while a thread writes
    checkpoints.close()
    half = world.split(world.rank % 2)
    assert half is not None
    second, others = Training(half, 1), Checkpoints(folder, half)
    restored = others.restore(second.like, second.mesh, second.specs)
    assert restored is not None
    state, batches = restored.state, Batches(48, 24, seed=2, position=restored.notes["position"])
    for step in range(restored.step, STEPS):
        state = second.step(step, state, batches)
    others.save(9, state, second.mesh, second.specs) if world.rank % 2 == 0 else None
    others.close()
    world.mpi.Barrier()
    want = once(world.size, lambda: alone(key))
    assert int(want["state"].total_notfinite) == 1
    one = world.split(world.rank)
    assert one is not None
    flat = jax.tree.map(lambda x: x.reshape(-1) if x.ndim else x, want)
    whole = Checkpoints(folder, one).restore(
        flat, mesh_of(one, 1), specs_of_state(flat, flat["params"], slices_of(SHAPES, "data"))
    )
    assert whole is not None
    assert (whole.step, restored.step, batches.position) == (9, 3, STEPS)
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(whole.state), jax.tree.leaves(flat), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6, err_msg=str(path))


def test_specs_of_a_state() -> None:
    params = {"a": {"w": jnp.ones(4)}, "w": jnp.ones((4,)), "b": jnp.ones((2, 4))}
    specs = {"a": P("x"), "w": P("y"), "b": P(None, "z")}
    masked = optax.masked(optax.trace(0.9), {"a": {"w": True}, "w": False, "b": True})
    got = specs_of_state(optax.chain(masked, optax.adam(1e-3)).init(params), params, specs)
    assert got[0].inner_state.trace["a"]["w"] == P("x")
    assert got[0].inner_state.trace["b"] == P(None, "z")
    assert got[1][0].nu == {"a": {"w": P("x")}, "w": P("y"), "b": P(None, "z")}
    assert got[1][0].count == P()
    with pytest.raises(ValueError, match=r"leaves like the parameters, or scalars, got \[3\] at \['m'\]\['w'\]"):
        specs_of_state({"m": {"w": jnp.ones(3)}}, params, specs)


def test_axes_of_a_mesh(world: pc.Communicator, folder: Path) -> None:
    """Arrays that are cut along two axes at once, along one of two, and not at all."""
    rows = 2 if world.size % 2 == 0 else 1
    shape = (rows, world.size // rows)
    mesh = pc.make_mesh(shape, ("a", "b"), comm=world, devices=devices_of_this_rank()[:1])
    x, y = values((8, 12)), values((12, 24), seed=1)
    i, j = divmod(world.rank, shape[1])
    state = {
        "both": np.split(np.split(x, rows)[i], shape[1], axis=1)[j],
        "joined": np.split(y, world.size, axis=1)[world.rank],
        "one": np.split(x, shape[1], axis=1)[j],
        "none": {"stage": y},
    }
    specs = {"both": P("a", "b"), "joined": P(None, ("a", "b")), "one": P(None, "b"), "none": P()}
    checkpoints = Checkpoints(folder, world)
    checkpoints.save(0, state, mesh, specs)
    alone = world.split(world.rank)
    assert alone is not None
    checkpoints.wait()
    wanted = {"both": x, "joined": y, "one": x, "none": {"stage": y}}
    restored = Checkpoints(folder, alone).restore(wanted, mesh_of(alone, 1), P())
    assert restored is not None
    same(restored.state, wanted)
    for spec, text in (
        (P(("b", "a")), r"axes of the mesh \['a', 'b'\] in their order at \['none'\]\['stage'\], got"),
        (P("c"), "axes of the mesh"),
        (P("a", "a"), "each axis at most once"),
        (P(None, None, "a"), "a spec of at most 2 dimensions"),
        (Slices("a", 5), r"slices of 5 elements on \d devices"),
    ):
        with pytest.raises(ValueError, match=text):
            checkpoints.save(1, state, mesh, specs | {"none": spec})
    checkpoints.close()


def test_what_is_incomplete_is_not_read(world: pc.Communicator, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, checkpoints = mesh_of(world, 1), Checkpoints(folder, world, keep=2)

    def state(step: int) -> Tree:
        return {"x": np.full(4, 10 * step + world.rank, np.int32)}

    def restored() -> tuple[int, int]:
        found = checkpoints.restore(state(0), mesh, P("data"))
        assert found is not None
        return found.step, found.state["x"][0] - world.rank

    for step in (1, 2, 10):
        checkpoints.save(step, state(step), mesh, P("data"))
    assert restored() == (10, 100)
    checkpoints.save(10, state(7), mesh, P("data"))  # it is there already
    assert sorted(path.name for path in folder.iterdir()) == ["10", "2"]
    assert restored() == (10, 100)
    world.mpi.Barrier()
    if world.rank == world.size - 1:
        next((folder / "10").glob(f"done.*.{world.rank}")).unlink()  # as if this rank had been killed meanwhile
    world.mpi.Barrier()
    assert (checkpoints.latest_step(), restored()) == (2, (2, 20))
    checkpoints.save(10, state(8), mesh, P("data"))  # the job that goes on writes it again
    assert restored() == (10, 80)
    assert json.loads((folder / "10" / "layout.json").read_text())["ranks"] == world.size
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # as if rank 0 had been killed while it removes
        Checkpoints(folder, world, keep=1).save(11, state(11), mesh, P("data"))
    assert not (folder / "2" / "layout.json").exists()
    zeros = {"x": np.zeros(4, np.int32)}
    checkpoints.save(12, zeros, mesh, P("data"))
    same(checkpoints.restore(zeros, mesh, P("data")).state, zeros)  # type: ignore[union-attr]
    world.mpi.Barrier()
    if world.rank == world.size - 1:
        next((folder / "12").glob(f"arrays.*/*x*/c/{world.rank}")).unlink()
    world.mpi.Barrier()
    with pytest.raises(ValueError, match=rf"is missing.* \(on rank {world.size - 1}\)"):
        checkpoints.restore(zeros, mesh, P("data"))
    checkpoints.close()


def test_a_thread_of_a_world_that_has_failed_changes_nothing(
    world: pc.Communicator, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh, old, new = mesh_of(world, 1), Checkpoints(folder, world), Checkpoints(folder, world)
    state, of_old = {"x": np.full(4, 2)}, {"x": np.full(4, 1)}
    write, go = checkpoints_module._write, threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints_module, "_write", lambda *args: go.wait() and write(*args))
        old.save(20, of_old, mesh, P("data"))
        patch.setattr(checkpoints_module, "_write", lambda *_: None)  # a rank of the new world is killed as well
        new.save(20, state, mesh, P("data"), notes="new")
    go.set()
    old.close()
    assert new.latest_step() is None
    new.save(20, state, mesh, P("data"), notes="new")
    restored = new.restore(state, mesh, P("data"))
    assert restored is not None
    assert restored[::2] == (20, "new")
    same(restored.state, state)
    new.close()


def fail(*_: Any) -> None:
    raise TimeoutError("the disk")


def test_errors_are_those_of_all_ranks(world: pc.Communicator, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, checkpoints, last = mesh_of(world, 1), Checkpoints(folder, world), world.size - 1
    x = np.ones(4, np.float32)
    with pytest.raises(ValueError, match="Checkpoints: expected keep of at least 1, got 0"):
        Checkpoints(folder, world, keep=0)
    with pytest.raises(TypeError, match=r"TypeError: Object of type Mesh is not JSON serializable \(on rank 0\)"):
        checkpoints.save(1, {"x": x}, mesh, P(), notes=mesh)
    with pytest.raises(ValueError, match=r"an array with a dimension to cut at \['x'\], got a scalar"):
        checkpoints.save(1, {"x": np.float32(1)}, mesh, Slices("data", 1))
    alone = world.split(world.rank)
    assert alone is not None
    if world.size > 1:
        with pytest.raises(ValueError, match=re.escape("one rank with each part of ['x'], got ranks 0 and 1 with the")):
            checkpoints.save(1, {"x": x}, mesh_of(alone, 1), P())  # as stages with equal names would
        longer = {"x": np.ones(4 + (world.rank == last), np.float32)} if world.rank in (0, last) else {}
        text = re.escape("['x'] to be one array, float32[4] as on rank 0, got float32[5]")
        with pytest.raises(ValueError, match=text):
            checkpoints.save(1, longer, mesh_of(alone, 1), P())
        own = {"x": x} if world.rank == last else {}
        with pytest.raises(ValueError, match=re.escape(f"all elements of ['x'], [{4 * world.size}], got 4 elements")):
            checkpoints.save(1, own, mesh, P("data"))
    if world.rank == 0:
        (folder / "6").mkdir(parents=True)
        (folder / "6" / "layout.json").touch()  # as a crash of the host may leave it
        (folder / "5").touch()
        (folder / "007").mkdir()
    checkpoints.save(1, {"x": x}, mesh, P("data"))
    with pytest.raises(OSError, match=r"Checkpoints: (FileExists|NotADirectory)Error: .*5.* \(on rank 0\)"):
        checkpoints.save(5, {"x": x}, mesh, P("data"))
    with monkeypatch.context() as patch:
        if world.rank == 0:
            patch.setattr(Checkpoints, "_folders", fail)
        for call in (
            lambda: checkpoints.save(2, {"x": x}, mesh, P("data")),
            lambda: checkpoints.restore({"x": x}, mesh, P("data")),
            checkpoints.latest_step,
        ):
            with pytest.raises(OSError, match=r"Checkpoints: TimeoutError: the disk \(on rank 0\)"):
                call()
    assert checkpoints.latest_step() == 1
    for like, text in (
        ({"x": np.ones(5, np.float32)}, rf"expected float32\[{5 * world.size}\] at \['x'\] in .*/1, got float32"),
        ({"x": np.ones(4, np.int32)}, rf"expected int32\[{4 * world.size}\] at .*, got float32\[{4 * world.size}\]"),
        ({"y": x}, r"at \['y'\] in .*, got no such array"),
    ):
        with pytest.raises(ValueError, match=text):
            checkpoints.restore(like, mesh, P("data"))

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    if world.rank == last:
        monkeypatch.setattr(checkpoints_module, "_write", full)
    checkpoints.save(2, {"x": x}, mesh, P("data"))
    with pytest.raises(OSError, match=rf"Checkpoints: OSError: No space left on device \(on rank {last}\)"):
        checkpoints.wait()
    assert checkpoints.latest_step() == 1
    checkpoints.close()
    assert slices_of({"w": np.ones((2, 3, 4))}, "data", stacked=True) == {"w": Slices("data", 12)}
