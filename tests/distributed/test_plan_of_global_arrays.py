"""Plans in a job: all ranks get the same, and run it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pycollective as pc
from pycollective.planning import allocation, measure
from pycollective.planning.by_compiling import verify
from pycollective.planning.example import profile as two_hosts
from tests.under_mpirun import SIZE

Array = Any
example = replace(two_hosts, hosts=1, ranks=SIZE)  # as these ranks are


def step(w: Array, x: Array) -> tuple[Array, Array]:
    loss, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * grad, loss


@pytest.fixture(autouse=True)
def no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def plan(*args: Any, **options: Any) -> Any:
    return pc.plan(step, *args, profile=example, devices=SIZE, compilations=4, **options)


def arrays(width: int) -> tuple[np.ndarray, np.ndarray]:
    w, x = np.random.default_rng(0).normal(size=(2, width, width)).astype("float32")
    return w / width**0.5, x[:64]


def test_plans_that_are_run(world: pc.Communicator) -> None:
    w, x = arrays(64)
    ranking = plan(w, x, verify=2)
    assert len(ranking) == 4
    told = world.mpi.allgather(str(ranking))
    assert told == [told[0]] * SIZE
    assert [one.measured is not None for one in ranking] == [True, True, False, False]
    first, second = (one.measured.seconds for one in ranking.plans[:2])
    assert 0 < first <= second
    assert f"measured {first * 1e3:.3g} ms, " in str(ranking.best)
    assert ranking.best.as_dict()["measured_s"] == first
    # The two that ran are the two that were predicted to be fastest.
    predicted = [replace(one, measured=None) for one in ranking]
    assert {str(one) for one in predicted[:2]} == {str(one) for one in plan(w, x).plans[:2]}
    for one in ranking:
        placed = jax.tree.map(jax.device_put, (w, x), one.in_shardings)
        new, loss = one.jit(step)(*placed)
        want = step(w, x)
        got = jax.experimental.multihost_utils.process_allgather(new, tiled=True)
        np.testing.assert_allclose(got, want[0], rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(loss.addressable_data(0), want[1], rtol=1e-4)


@pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="LOUD: of JAX 0.9 plans do not know what a product takes")
def test_the_memory_of_a_plan_is_what_was_predicted() -> None:
    args = jax.ShapeDtypeStruct((4096, 4096), "float32"), jax.ShapeDtypeStruct((64, 4096), "float32")
    ranking = plan(*args)
    for one, took in zip(ranking, measure(ranking.plans, step, *args, steps=1), strict=True):
        assert took.memory is not None
        assert 0.97 < took.memory / one.prediction.memory < 1.05, str(one)


def test_no_plan_that_was_run_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_peak_of", lambda run: 1 << 40)
    with pytest.raises(ValueError, match="got 1,099,511,627,776 B for the plan that needed least of"):
        plan(*arrays(64), verify=2)


def test_what_is_taken_once_is_not_of_a_step(monkeypatch: pytest.MonkeyPatch, world: pc.Communicator) -> None:
    """MPI takes a buffer during one of the peaks; another one has missed a block. The rank with the most counts."""
    peaks = iter([10.0 + world.rank, 900.0, 3.0, 12.0 + world.rank, 11.0])
    monkeypatch.setattr(verify, "_peak_of", lambda run: next(peaks))
    w, x = arrays(64)
    assert measure(plan(w, x).plans[:1], step, w, x, steps=1)[0].memory == 12 + SIZE - 1


def test_without_an_account_of_memory_there_is_none(monkeypatch: pytest.MonkeyPatch, world: pc.Communicator) -> None:
    """Here the malloc of one rank says nothing; the ranks agree on that."""
    if world.rank == SIZE - 1:
        monkeypatch.setattr(allocation, "_reader", lambda: None)
    w, x = arrays(64)
    ranking = plan(w, x)
    assert [took.memory for took in measure(ranking.plans[:1], step, w, x, steps=1)] == [None]


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")  # in some plans they lie otherwise
def test_steps_that_donate(world: pc.Communicator) -> None:
    """The caller's arrays stay, and an argument whose memory another result takes is there again in the next step."""

    def both(w: Array, x: Array, z: Array, key: Array) -> tuple[Array, ...]:
        return step(w, x)[0], jnp.tanh(x + z), jax.random.split(key)[0]

    w, x = arrays(64)
    key = jax.random.key(1)
    options: dict[str, Any] = {"profile": example, "devices": SIZE, "compilations": 2, "donate_argnums": (0, 2, 3)}
    best = pc.plan(both, w, x, x, key, **options).best
    placed = jax.tree.map(jax.device_put, (w, x, x + 1), best.in_shardings[:3])
    ranking = pc.plan(both, *placed, key, verify=2, **options)
    assert all(one.measured for one in ranking)
    assert measure(ranking.plans[:1], both, *jax.eval_shape(lambda *xs: xs, *placed, key), steps=1)[0].seconds > 0
    assert jax.random.key_data(key)[1] == 1
    for given, one in zip((w, x, x + 1), placed, strict=True):
        assert not one.is_deleted()
        np.testing.assert_array_equal(jax.experimental.multihost_utils.process_allgather(one, tiled=True), given)


def test_a_profile_of_hosts_with_other_ranks(world: pc.Communicator) -> None:
    w, x = arrays(64)
    other = replace(example, hosts=example.ranks)
    with pytest.raises(ValueError, match=f"plan: expected 1 ranks on each host, as in the profile, got {SIZE}"):
        pc.plan(step, w, x, profile=other, devices=SIZE, compilations=1)


def test_a_plan_for_another_number_of_devices_cannot_run(world: pc.Communicator) -> None:
    w, x = arrays(64)
    with pytest.raises(ValueError, match=rf"plan: expected {2 * SIZE} devices, which the plan is for, got {SIZE}"):
        pc.plan(step, w, x, profile=example, devices=2 * SIZE, compilations=1, verify=1)
