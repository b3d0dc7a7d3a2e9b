"""Local SGD and DiLoCo over JAX's axes, against the algorithms in NumPy with an explicit array for each device."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from pycollective.parallel.periodic_averaging import diloco, local_sgd
from tests.cases import values

pytestmark = pytest.mark.usefixtures("promotion_of_optax")

Array = Any
Tree = Any
P = jax.sharding.PartitionSpec

DEVICES = 4
SHAPES = {"a": (5, 3), "b": (4,), "c": (), "d": (3, 2)}
PARAMS = {name: np.asarray(values(shape, seed=i)) for i, (name, shape) in enumerate(SHAPES.items())}
TARGETS = {name: np.asarray(values((DEVICES, *shape), seed=10 + i)) for i, (name, shape) in enumerate(SHAPES.items())}
SLOPES = np.linspace(0.2, 1.4, DEVICES, dtype=np.float32)
"""The loss of device r is half of SLOPES[r] times the squared distance to TARGETS[r]: the devices do not agree."""


def path_of(optimizer: Any, params: Tree, targets: Tree, slope: Array, steps: int, types: bool = False) -> Tree:
    """Returns the parameters of a device after each step, and the state in the end."""
    if types:
        params = lax.pcast(params, "i", to="varying")

    def step(carry: Any, _: None) -> Any:
        params, state = carry
        grads = jax.tree.map(lambda x, t: slope * (x - t), params, targets)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    (_, state), path = lax.scan(step, (jax.tree.map(jnp.asarray, params), optimizer.init(params)), length=steps)
    return path, state


def on_devices(optimizer: Any, steps: int, how: str = "vmap", params: Tree = PARAMS) -> tuple[Tree, Any]:
    """Returns what :func:`path_of` returns, stacked over the devices."""
    run = functools.partial(path_of, optimizer, steps=steps, types=how == "types")
    if how == "vmap":
        return jax.jit(jax.vmap(run, (None, 0, 0), axis_name="i"))(params, TARGETS, SLOPES)

    def block(params: Tree, targets: Tree, slope: Array) -> Tree:
        targets, slope = jax.tree.map(lambda x: x[0], (targets, slope))
        return jax.tree.map(lambda x: x[None], run(params, targets, slope))

    mesh = jax.make_mesh((DEVICES,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": (P(), P("i"), P("i")), "out_specs": P("i"), "check_vma": how == "types"}
    return jax.jit(jax.shard_map(block, **specs))(params, TARGETS, SLOPES)


INNER = optax.sgd(0.1, momentum=0.9)


def reference(
    steps: int, synchronise: Callable[[int, list[Tree]], None], momentum: float = 0.9, devices: int = DEVICES
) -> Tree:
    """The devices' own steps in NumPy; ``synchronise`` changes all devices' parameters after each step."""
    devices_params = [{name: x.astype(np.float64) for name, x in PARAMS.items()} for _ in range(devices)]
    traces = [{name: np.zeros(shape) for name, shape in SHAPES.items()} for _ in range(devices)]
    path = []
    for step in range(1, steps + 1):
        for r, params in enumerate(devices_params):
            for name in SHAPES:
                gradient = SLOPES[r] * (params[name] - TARGETS[name][r])
                traces[r][name] = gradient + momentum * traces[r][name]
                params[name] = params[name] - 0.1 * traces[r][name]
        synchronise(step, devices_params)
        path.append([dict(params) for params in devices_params])
    return {name: np.array([[row[r][name] for row in path] for r in range(devices)]) for name in SHAPES}


def means(every: int) -> Callable[[int, list[Tree]], None]:
    def synchronise(step: int, devices: list[Tree]) -> None:
        if step % every == 0:
            for name in SHAPES:
                mean = np.mean([params[name] for params in devices], axis=0)
                for params in devices:
                    params[name] = mean

    return synchronise


class OuterSteps:
    """DiLoCo's outer steps by Nesterov's momentum. ``offsets`` says in which step of a round each leaf has its own."""

    def __init__(self, every: int, offsets: dict[str, int]) -> None:
        self.every, self.offsets = every, offsets
        self.anchor = {name: x.astype(np.float64) for name, x in PARAMS.items()}
        self.trace = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        self.met: list[list[str]] = []

    def __call__(self, step: int, devices: list[Tree]) -> None:
        names = [name for name in SHAPES if step % self.every == self.offsets[name]]
        self.met.append(names)
        for name in names:
            gradient = np.mean([self.anchor[name] - params[name] for params in devices], axis=0)
            self.trace[name] = gradient + 0.9 * self.trace[name]
            self.anchor[name] = self.anchor[name] - 0.7 * (gradient + 0.9 * self.trace[name])
            for params in devices:
                params[name] = self.anchor[name]


def assert_close(got: Tree, want: Tree, tolerance: float = 1e-5) -> None:
    for name in SHAPES:
        assert got[name].dtype == np.float32
        np.testing.assert_allclose(got[name], want[name], tolerance, tolerance, err_msg=name)


@pytest.mark.parametrize("how", ["vmap", "types", "no types"])
def test_local_sgd(how: str) -> None:
    got, state = on_devices(local_sgd(INNER, 3, "i"), 7, how)
    assert_close(got, reference(7, means(3)))
    assert (state.phase == 7 % 3).all()
    trace = state.inner[0].trace["a"]
    assert not np.allclose(trace[0], trace[1])  # it stays each device's own


def test_local_sgd_every_step_is_data_parallelism() -> None:
    sgd = optax.sgd(0.1)
    averaged = optax.GradientTransformation(sgd.init, lambda g, s, p: sgd.update(lax.pmean(g, "i"), s, p))
    got, _ = on_devices(local_sgd(sgd, 1, "i"), 4)
    want, _ = on_devices(averaged, 4)
    assert_close(got, want)
    assert_close(got, reference(4, means(1), momentum=0.0))


@pytest.mark.parametrize("how", ["vmap", "types", "no types"])
def test_diloco(how: str) -> None:
    got, state = on_devices(diloco(INNER, None, 3, "i"), 10, how)
    outer = OuterSteps(3, dict.fromkeys(SHAPES, 0))
    assert_close(got, reference(10, outer))
    assert_close(jax.tree.map(lambda x: x[1], state.anchor), outer.anchor)
    assert (state.phase == 10 % 3).all()


@pytest.mark.parametrize("how", ["vmap", "types"])
def test_streaming_diloco(how: str) -> None:
    """By bytes the leaves of 15, 6, 4 and 1 elements make the groups a, d and b with c."""
    outer = OuterSteps(7, {"a": 0, "d": 2, "b": 4, "c": 4})
    want = reference(17, outer)
    assert [names for names in outer.met if names] == [["d"], ["b", "c"], ["a"]] * 2 + [["d"]]
    got, _ = on_devices(diloco(INNER, None, 7, "i", fragments=3), 17, how)
    assert_close(got, want)


def test_an_outer_optimizer_of_ones_own() -> None:
    """With one fragment it sees the whole tree; to go to the mean is local SGD."""
    everything = optax.masked(optax.sgd(1.0), dict.fromkeys(SHAPES, True))
    got, _ = on_devices(diloco(INNER, everything, 2, "i"), 5)
    assert_close(got, reference(5, means(2)))


def test_outer_gradients_in_the_wire_dtype() -> None:
    got, state = on_devices(diloco(INNER, None, 3, "i", wire_dtype="bfloat16"), 6)
    exact = reference(6, OuterSteps(3, dict.fromkeys(SHAPES, 0)))
    change = exact["a"][:, -1] - exact["a"][:, 2]
    error = np.abs(got["a"][:, -1] - exact["a"][:, -1])
    assert error.max() < 2**-6 * np.abs(change).max()
    assert error.max() > 2**-14 * np.abs(change).max()  # they were rounded
    for anchor in jax.tree.leaves(state.anchor):
        np.testing.assert_array_equal(anchor, np.broadcast_to(anchor[:1], anchor.shape))


COLLECTIVES = ("psum", "psum_invariant", "all_to_all", "all_gather", "all_gather_invariant", "ppermute")


def sent(jaxpr: Any) -> list[list[list[tuple[str, int]]]]:
    """Returns for each conditional, and each of its branches, the collectives and the bytes of their operands."""
    assert not {eqn.primitive.name for eqn in jaxpr.eqns} & set(COLLECTIVES)  # none is outside of a conditional
    return [
        [
            [
                (eqn.primitive.name, sum(v.aval.size * v.aval.dtype.itemsize for v in eqn.invars))
                for eqn in branch.jaxpr.eqns
                if eqn.primitive.name in COLLECTIVES
            ]
            for branch in conditional.params["branches"]
        ]
        for conditional in jaxpr.eqns
        if conditional.primitive.name == "cond"
    ]


P_BYTES = 4 * (15 + 4 + 1 + 6)


@pytest.mark.parametrize(
    ("optimizer", "want"),
    [
        (local_sgd(INNER, 5, "i"), [[("psum", P_BYTES)]]),
        (diloco(INNER, None, 5, "i"), [[("psum", P_BYTES)]]),
        # On two devices the slices of 15 and 1 elements have another one, and each device sends a half of all.
        (
            diloco(INNER, None, 5, "i", wire_dtype=jnp.bfloat16),
            [[("all_to_all", P_BYTES // 2 + 4), ("all_gather", P_BYTES // 4 + 2)]],
        ),
        (
            diloco(INNER, None, 5, "i", fragments=3),
            [[("psum", 4 * 15)], [("psum", 4 * 6)], [("psum", 4 * (4 + 1))]],
        ),
    ],
    ids=["local_sgd", "diloco", "bfloat16", "fragments"],
)
def test_bytes_of_a_round(optimizer: Any, want: list[list[tuple[str, int]]]) -> None:
    """All bytes travel in one of the branches, in few calls; in a step without them nothing does."""

    def program(params: Tree) -> Tree:
        return optimizer.update(params, optimizer.init(params), params)

    closed = jax.make_jaxpr(program, axis_env=[("i", 2)])(PARAMS)
    got = sent(closed.jaxpr)
    assert [[(name, size) for name, size in merged(on)] for _, on in got] == want
    assert all(off == [] for off, _ in got)


def merged(calls: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Adds up the bytes of neighbours of one name: the psums of a tree, which travel together."""
    return [(name, sum(size for _, size in group)) for name, group in itertools.groupby(calls, lambda call: call[0])]


def test_a_program_may_donate_parameters_and_state() -> None:
    optimizer = diloco(INNER, None, 2, "i")
    params = jax.tree.map(lambda x: jnp.stack([x] * 2), PARAMS)
    state = jax.vmap(optimizer.init, axis_name="i")(params)
    buffers = [{x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)} for tree in (params, state)]
    assert not buffers[0] & buffers[1]


@pytest.mark.parametrize("make", [local_sgd, lambda inner, every, axis: diloco(inner, None, every, axis)])
def test_bad_steps(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="expected every to be at least 1, got every=0. Choose a positive number."):
        make(INNER, 0, "i")
    with pytest.raises(TypeError, match="expected every to be an integer, got 2.5."):
        make(INNER, 2.5, "i")
    optimizer = make(INNER, 2, "i")
    with pytest.raises(NameError, match="expected a call where the axis 'i' is bound, got one where it is not"):
        optimizer.init(PARAMS)
    without = jax.vmap(lambda x: optimizer.update(x, optimizer.init(x))[0], axis_name="i")
    with pytest.raises(ValueError, match="expected the parameters as well, got gradients and state only. Call update"):
        without(jnp.ones((2, 3)))


def test_bad_fragments_and_wires() -> None:
    with pytest.raises(ValueError, match="parallel.diloco: expected fragments to be at least 1, got fragments=-1"):
        diloco(INNER, None, 4, "i", fragments=-1)
    with pytest.raises(ValueError, match="parallel.diloco: expected at most every=4 fragments, got fragments=5"):
        diloco(INNER, None, 4, "i", fragments=5)
    with pytest.raises(ValueError, match="at least a leaf for each of fragments=5, got parameters with 4 leaves"):
        on_devices(diloco(INNER, None, 10, "i", fragments=5), 1)
    for wrong in ("int8", "half a byte"):
        with pytest.raises(TypeError, match=f"expected wire_dtype to be a floating-point dtype, got '{wrong}'"):
            diloco(INNER, None, 4, "i", wire_dtype=wrong)


@pytest.mark.parametrize("make", [local_sgd, lambda inner, every, axis: diloco(inner, optax.sgd(1.0), every, axis)])
@pytest.mark.parametrize("every", [1, 2])
def test_parameters_that_all_devices_share(make: Callable[..., Any], every: int) -> None:
    """By JAX's types they are the same, and the updates are not, whether the devices meet or not."""
    mesh = jax.make_mesh((2,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    optimizer = make(optax.sgd(0.1), every, "i")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("i")), out_specs=P("i"))
    def step(w: Array, x: Array) -> Array:
        return optimizer.update(x[0], optimizer.init(w), w)[0][None]

    grads = jnp.array([[1.0, 2.0], [3.0, 6.0]])
    want = grads if every == 2 else np.broadcast_to(grads.mean(0), (2, 2))
    np.testing.assert_allclose(step(jnp.zeros(2), grads), -0.1 * want, rtol=1e-6)
