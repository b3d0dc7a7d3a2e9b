"""What steps take: the file that ``pycollective plan --verify`` reads."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pycollective as pc
from pycollective.planning import allocation
from pycollective.planning.by_formulas import step_record
from pycollective.planning.by_formulas.step_record import StepRecord, Steps

comm = pc.init()
MIB = 1 << 20


def test_steps_are_timed_and_two_are_watched(tmp_path: Path) -> None:
    """A step has 8 MiB of state and of its result, and 32 MiB for a while. Another 64 MiB are there all the time."""
    others = np.ones(64 * MIB, np.uint8)

    def step(state: jax.Array, seconds: float) -> tuple[jax.Array, float]:
        block = np.ones(32 * MIB, np.uint8)
        after = jax.block_until_ready(state + 1)
        time.sleep(seconds)
        del block
        return after, seconds

    state = jnp.zeros(2 * MIB, jnp.float32)
    record = StepRecord(tmp_path / "steps.json", comm)
    for i in range(4):
        state, _ = record.step(step, state, 0.05 if i < 3 else 0.2)
    record.save()
    seconds, memory = Steps.load(tmp_path / "steps.json")
    assert [0.05 <= s < 60 for s in seconds[:3]] == [True] * 3
    assert 0.2 <= seconds[3] < 60
    assert memory is not None
    assert 46 < memory / MIB < 52
    assert others.nbytes == 64 * MIB


@pytest.mark.parametrize("devices", [1, 2])
def test_which_steps_are_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    """What was there before does not count, but for the state. The step that takes most counts."""
    mesh = jax.make_mesh((devices,), ("all",), devices=jax.local_devices()[:devices])
    state = jax.device_put(jnp.zeros(10, jnp.float32), jax.sharding.NamedSharding(mesh, jax.P("all")))
    now = 100.0
    monkeypatch.setattr(allocation, "settled", lambda: now)
    watched: list[int] = []
    steps = 0

    class Peak:
        def __enter__(self) -> Any:
            watched.append(steps)
            return SimpleNamespace(nbytes=now + 50 * steps)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(allocation, "peak", Peak)
    record = StepRecord(tmp_path / "steps.json", comm)
    for i in range(6):
        steps = i
        record.step(lambda x: x, state)
    record.save()
    assert watched == list(step_record.WATCHED_STEPS) == [1, 2]
    assert Steps.load(tmp_path / "steps.json").memory == (2 * 50 + 40) // devices


def test_without_a_file_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "block_until_ready", lambda x: pytest.fail("it waits"))
    record = StepRecord(None, comm)
    assert [record.step(lambda state, x: (state, x), 1, i) for i in range(4)] == [(1, i) for i in range(4)]
    record.save()


@pytest.mark.parametrize(
    ("platform", "stats", "allocated", "of_others", "memory"),
    [
        ("cpu", [None], 1.0, [3.5, 2.0], 4),
        ("cpu", [None], 1.0, [3.5, None], None),
        ("cpu", [None], math.inf, [3.5], None),
        ("tpu", [None], 1.0, [3.5], None),
        ("gpu", [{"peak_bytes_in_use": 7}, {"peak_bytes_in_use": 9}], 1.0, [8.0], 9),
        ("gpu", [{"bytes_in_use": 7}], 1.0, [8.0], None),
    ],
)
def test_what_a_device_needs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    platform: str,
    stats: list[Any],
    allocated: float,
    of_others: list[float | None],
    memory: int | None,
) -> None:
    devices = [SimpleNamespace(platform=platform, memory_stats=lambda one=one: one) for one in stats]
    ranks = SimpleNamespace(gather=lambda own: [own, *of_others])
    record = StepRecord(tmp_path / "steps.json", SimpleNamespace(mpi=ranks))  # type: ignore[arg-type]
    record._memory = [1.0, 4.0, 2.0]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    monkeypatch.setattr(allocation, "allocated", lambda: allocated)
    record.save()
    assert Steps.load(tmp_path / "steps.json").memory == memory


def test_too_few_steps_have_no_memory(tmp_path: Path) -> None:
    record = StepRecord(tmp_path / "steps.json", comm)
    record.step(lambda state: state, jnp.zeros(3))
    record.save()
    assert Steps.load(tmp_path / "steps.json").memory is None


def test_one_rank_writes(tmp_path: Path) -> None:
    ranks = SimpleNamespace(gather=lambda own: None)
    record = StepRecord(tmp_path / "steps.json", SimpleNamespace(mpi=ranks))  # type: ignore[arg-type]
    record.save()
    assert not (tmp_path / "steps.json").exists()


def test_a_list_of_seconds(tmp_path: Path) -> None:
    """What a program writes that knows nothing of memory."""
    file = tmp_path / "steps.json"
    file.write_text(json.dumps([0.5, 0.25]))
    assert Steps.load(file) == ([0.5, 0.25], None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{}",
        "3",
        '["a"]',
        "[NaN]",
        "[-1]",
        '{"seconds": 3}',
        '{"seconds": [1], "memory": "2"}',
        "[" * 100_000,
    ],
)
def test_a_file_without_times(text: str, tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    file.write_text(text)
    with pytest.raises(
        ValueError, match=r"plan: expected the times of steps, got .*times\.json\. Let the program write"
    ):
        Steps.load(file)
