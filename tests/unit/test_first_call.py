"""Any program as ``pycollective plan`` sees it: it runs until the first call of its step, which is one rank's."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import pycollective as pc
from pycollective.planning import command
from pycollective.planning.by_compiling.first_call import Call, first_call
from pycollective.planning.by_compiling.of_one_rank import without_collectives
from pycollective.planning.example import profile
from tests.cases import values

Array = Any

BEGIN = """
import functools, sysconfig
import jax, jax.numpy as jnp
import pycollective as pc

w, x = jnp.ones((4, 3)), jnp.ones((1, 8, 4))
"""


@pytest.fixture(autouse=True)
def as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A program gets a command line and a folder of modules."""
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    makers = jax.jit, jax.pmap, pc.jit, pc.pmap
    yield
    assert makers == (jax.jit, jax.pmap, pc.jit, pc.pmap)


def called(folder: Path, text: str, *arguments: str, name: str = "") -> tuple[Call, list[Call]]:
    program = folder / "train.py"
    program.write_text(BEGIN + text)
    return first_call(program, arguments, name)


# Programs, each with what its step is called by, how it is made, its arguments, which are state, and which are donated.
PROGRAMS: dict[str, tuple[str, str, tuple[str, ...], tuple[int, ...], tuple[int, ...], bool]] = {
    """
@functools.partial(jax.jit, static_argnums=1, donate_argnames=("w", "rate"))
def train(w, how, x, *, rate):
    return how(w) - rate * x.sum(), rate
train(w, jnp.sin, x, rate=0.1)
""": ("train", "jax.jit", ("w", "x", "rate"), (0,), (0, 2), False),
    """
@jax.jit
def init(key):
    return jax.random.normal(key, (4, 3))
def train(x, params):
    return {"loss": x.sum(), "params": params - pc.psum(x.mean())}
step = pc.jit(train, donate_argnums=(-1,))
params = init(jax.random.key(0))
exec(compile("def of_a_library(x): return 2 * x", sysconfig.get_path("purelib") + "/library.py", "exec"))
params = jax.jit(of_a_library)(params)
step(x, params)
""": ("train", "pc.jit", ("x", "params"), (1,), (1,), True),
    """
def train(w, x):
    return w - jax.lax.pmean(x.mean(), "batch") * jax.lax.axis_size("batch"), jax.lax.axis_index("batch")
pc.pmap(train, "batch", in_axes=(None, 0), out_axes=None)(w, x)
""": ("train", "pc.pmap", ("w", "x"), (0,), (), True),
    """
@functools.partial(jax.pmap, axis_name="batch", static_broadcasted_argnums=(2,), donate_argnums=0)
def train(w, x, n):
    return jax.tree.map(lambda w: w - n * jax.lax.psum(x.mean(), "batch"), w)
train({"a": w[None], "b": x[:, 0]}, x, 3)
""": ("train", "jax.pmap", ("w", "x"), (0,), (0,), True),
    """
class Trainer:
    @functools.partial(jax.jit, static_argnames="self")
    def train(self, w, *batch):
        return w + batch[0].sum()
Trainer().train.lower(w, x) if False else Trainer().train(w, x)
""": ("train", "jax.jit", ("w", "arg2"), (0,), (), False),
    """
step = pc.jit(axis_name="ranks")(lambda x, w: (w * jax.lax.psum(1.0, "ranks"), x.sum()))
step.lower(x, w)
""": ("<lambda>", "pc.jit", ("x", "w"), (1,), (), True),
}


@pytest.mark.parametrize("text", PROGRAMS)
def test_the_step_of_a_program(text: str, tmp_path: Path) -> None:
    end = "\nraise SystemExit('the program went on')"
    call, others = called(tmp_path, text + end)
    found = call.name, call.made_by, call.names, call.states, call.donate_argnums, call.is_parallel
    assert found == PROGRAMS[text]
    assert [one.name for one in others] == ["init"] * ("def init" in text)
    assert re.fullmatch(r"train\.py:\d+", call.line)
    assert not call.error


def test_a_step_is_that_of_one_rank_without_collectives(tmp_path: Path) -> None:
    """A mapped axis is left out, and the numbers are those of the step itself."""
    call, _ = called(tmp_path, list(PROGRAMS)[2])
    assert [arg.shape for arg in call.args] == [(4, 3), (8, 4)]
    w, x = values((4, 3)), values((8, 4), seed=1)
    step = without_collectives(call.step, *call.args)
    np.testing.assert_allclose(step(w, x)[0], w - x.mean(), rtol=1e-6)
    assert step(w, x)[1] == 0


def test_what_collectives_give_on_one_rank() -> None:
    """Inside loops, derivatives and functions that compute again, and where blocks have an axis."""
    comm = pc.init()

    @pc.jit
    def inner(w: Array, x: Array) -> Array:
        blocks = pc.all_gather(x * w, comm)
        itself, nobody = pc.ppermute(x * w, comm, [(0, 0)]), pc.ppermute(w, comm, [])
        before = pc.exscan(w, comm=comm) + pc.scan(x * w, comm=comm)
        pc.barrier(comm)
        return (pc.psum(w, comm) + blocks[0] + itself + 5 * nobody + 7 * before).sum()

    def step(w: Array, x: Array) -> Any:
        def total(w: Array) -> Array:
            def body(total: Array, each: Array) -> tuple[Array, None]:
                return total + jax.checkpoint(inner)(w, each), None

            return jax.lax.scan(body, 0.0, x)[0] + (w**2).sum()

        value, grad = jax.value_and_grad(total)(w)
        return grad, value, jax.lax.cond(value > 0, lambda: pc.psum(value, comm), lambda: value), pc.all_gather(w, comm)

    w, x = values((5,)), values((3, 5), seed=1)
    alone = without_collectives(step, w, x)
    assert not jax.make_jaxpr(alone)(w, x).effects
    # By hand; step itself has MPI's answers.
    value = (3 * w + 9 * x.sum(0) * w).sum() + (w**2).sum()
    for found in (alone(w, x), step(w, x)):
        np.testing.assert_allclose(found[0], 3 + 9 * x.sum(0) + 2 * w, rtol=1e-5)
        np.testing.assert_allclose(found[1:3], [value, value], rtol=1e-5)
        np.testing.assert_array_equal(found[3], w[None], strict=True)


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        (
            "print(1)",
            "",
            "a call of a function that returns its state, made by jax.jit, .*, got none before it ended. Nam",
        ),
        ("raise SystemExit(3)", "", "got none before it ended with status 3. Name"),
        ("import nowhere", "", "before it raised ModuleNotFoundError: No module named 'nowhere', so install what it"),
        ("jax.jit(jnp.sin)(x); 1 / 0", "", "got none before it raised ZeroDivisionError: division by zero"),
        (
            "f = jax.jit(lambda x: x.sum())\nf(x)\nraise ValueError(2)",
            "",
            r"got <lambda> \(train.py:7, jax.jit\) before it raised ValueError: 2",
        ),
        (
            "def f(x): return x.sum()\njax.jit(f)(x)",
            "g",
            r"of the name g, .*, got f \(train.py:7, jax.jit\) before it ended",
        ),
        (
            "def f(x): return x\npc.pmap(f)(jnp.ones((3, 4)))",
            "f",
            r"pc.pmap\): ValueError: pycollective.plan: expected a mapped axis of one entry, .*, got length 3. Cut",
        ),
    ],
)
def test_programs_without_a_step(text: str, name: str, expected: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"(?s)^pycollective.plan: expected .*{expected}"):
        called(tmp_path, text, name=name)


def test_a_step_by_its_name_and_without_state(tmp_path: Path) -> None:
    text = """
def first(w): return w
def small(x): return x.sum()
def large(w, x): return x.sum() + w.sum()
jax.jit(small)(x), jax.jit(large)(w, x), jax.jit(small)(x)
"""
    largest, others = called(tmp_path, text)
    assert (largest.name, largest.states) == ("large", ())
    assert [one.name for one in others] == ["small", "small"]
    named, before = called(tmp_path, text + "jax.jit(first)(w)", name="small")
    assert (named.name, before) == ("small", [])


SCRIPT = """
import jax, jax.numpy as jnp, sys
import pycollective as pc

@pc.jit
def train(params, x):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p["w"]) ** 2))(params)
    return {"loss": pc.pmean(loss), "params": jax.tree.map(lambda p, g: p - pc.pmean(g), params, grads)}

params = {"w": jnp.ones((64, 32))}
print(sys.argv[1:], "first")
train(params, jnp.ones((int(sys.argv[1]), 64)))
print("after")
"""


def test_the_command_plans_any_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    Path("train.py").write_text(SCRIPT)
    profile.save(Path("c.json"))
    begin = ["--profile", "c.json", "--devices", "2", "--compilations", "2"]
    assert command.main([*begin, "--top", "1", "--json", "p.json", "train.py", "4096"]) == 0
    told = capsys.readouterr().out
    assert "['4096'] first" in told
    assert "after" not in told
    assert "step: train (train.py:5, pc.jit); state: params; data: x\n" in told
    saved = json.loads(Path("p.json").read_text())
    assert len(saved["rows"]) == 2
    best, *_ = saved["rows"]
    seconds = best["computing_s"] + best["communication_s"]
    gain = saved["one_device_s"] / seconds
    assert 1.5 < gain < 2
    assert f"the best plan is {gain:.2f} times as fast\n" in told
    assert re.search(r"as it is written, .*: [\d.]+ ms; the best plan is 1\.00 times as fast", told)
    assert "  x: P('data', None)\n  the other 1 arrays whole on each device\n" in told
    refused: dict[str, list[str]] = {
        "options of a program without a function `network`, got --only, --verify": [
            "--verify",
            "2",
            "--only",
            "zero=0",
        ],
        "a file, or the name of a profile": ["--profile", "nowhere"],
    }
    for sentence, words in refused.items():
        assert command.main([*begin, *words, "train.py", "8"]) == 1
        assert sentence in capsys.readouterr().err
    monkeypatch.setenv("PMI_SIZE", "2")
    assert command.main([*begin, "train.py", "8"]) == 1
    assert "expected a process without ranks, got one that a launcher has started" in capsys.readouterr().err
