"""The passes of the pipeline, each on jaxprs, and the rewriting of programs. No program runs but those of one rank."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import PartitionSpec

import pycollective as pc
from pycollective.jax_support import jax_internals, jaxprs, rewriting
from pycollective.named_axes import discharge
from pycollective.spmd.show import stages

PASSES = ["trace", "compare", "discharge", "avoid copies", "arrange sums", "number reductions", "mark sections"]

X = jax.ShapeDtypeStruct((4, 2), jnp.float32)


@pytest.fixture(scope="module")
def world() -> pc.Communicator:
    return pc.init()


def names(jaxpr: Any) -> list[str]:
    """The primitives of a program, each before those of the programs that it holds."""
    return [eqn.primitive.name for eqn in jaxprs.all_equations(jaxpr)]


def replacing(name: str, by: Callable[..., Sequence[Any]] | ClosedJaxpr) -> rewriting.Change:
    return lambda eqn: by if eqn.primitive.name == name else None


def check(fun: Callable[..., Any], change: rewriting.Change, want: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    """Compares the rewritten program of ``fun`` with ``want``. JAX's own checks look at it too."""
    closed = jax.make_jaxpr(fun)(*args)
    new = rewriting.rewritten(closed, change)
    jax_internals.check(new.jaxpr)
    with jax.enable_checks(True):
        got = jax.jit(lambda *args: jaxprs.evaluate(new, jaxprs.rebind, *args))(*args)
    np.testing.assert_allclose(got, jax.tree.leaves(want(*args)), rtol=1e-6)
    made = [var for eqn in new.jaxpr.eqns for var in eqn.outvars]
    assert len(made) == len(set(made))
    return new


A, B = np.float32([1.0, 2.0]), np.float32([3.0, 5.0])


def test_an_equation_becomes_a_program() -> None:
    twice = lambda x: [jnp.cos(x) * 2]
    new = check(lambda x: jnp.sin(x) + x, replacing("sin", twice), lambda x: jnp.cos(x) * 2 + x, A)
    assert names(new.jaxpr) == ["cos", "mul", "add"]


def test_equations_that_stay_are_not_traced_again() -> None:
    closed = jax.make_jaxpr(lambda x: jnp.tanh(jnp.sin(x)))(A)
    new = rewriting.rewritten(closed, replacing("sin", lambda x: [jnp.cos(x)]))
    assert new.jaxpr.eqns[-1] is closed.jaxpr.eqns[-1]
    assert rewriting.rewritten(closed, lambda eqn: None) is closed


def test_results_that_no_equation_makes() -> None:
    """An operand, a number and one result twice stand for results of the equation that goes."""
    swap = jax.jit(lambda x, y: (x + 1, y, x * y, x * y))
    fun = lambda x, y: jnp.stack(swap(x, y)) + 1
    swapped = lambda x, y: [y, x, z := x - y, z]
    check(fun, replacing("jit", swapped), lambda x, y: jnp.stack([y, x, x - y, x - y]) + 1, A, B)
    check(lambda x: swap(x, x)[1], replacing("jit", lambda x, y: [x, x, x, x]), lambda x: x, A)
    check(lambda x: jnp.sin(x) * 3, replacing("sin", lambda x: [jnp.full(2, 7.0)]), lambda x: jnp.full(2, 21.0), A)


def test_one_program_in_several_places() -> None:
    ten = np.float32([10.0, 20.0])
    program = jax.make_jaxpr(lambda x: [jnp.cos(x) * ten])(A)
    fun = lambda x: jnp.sin(jnp.sin(x) * 1) * 1
    new = check(fun, replacing("sin", program), lambda x: jnp.cos(jnp.cos(x) * ten) * ten, A)
    assert len(new.jaxpr.constvars) == 1


def test_a_program_that_has_variables_of_the_program_around() -> None:
    """A program is put into a rewritten form of itself, with the inner equations that both share."""
    inner = jax.make_jaxpr(lambda x: [jnp.sin(jnp.cos(x))])(A)
    host = rewriting.rewritten(jax.make_jaxpr(lambda x: jnp.exp(x) * jnp.log(x))(A), replacing("exp", inner))
    new = rewriting.rewritten(host, replacing("log", inner))
    jax_internals.check(new.jaxpr)
    made = [var for eqn in new.jaxpr.eqns for var in eqn.outvars]
    assert len(made) == len(set(made))
    (got,) = jaxprs.evaluate(new, jaxprs.rebind, A)
    np.testing.assert_allclose(got, np.sin(np.cos(A)) ** 2, rtol=1e-6)


def test_a_replacement_is_traced_once_for_each_line() -> None:
    traces = []

    def replacement(x: Any) -> list[Any]:
        traces.append(x)
        return [jnp.cos(x)]

    def fun(x: Any) -> Any:
        ys = [jnp.sin(x) for _ in range(5)]
        return ys, jnp.sin(x)

    closed = jax.make_jaxpr(fun)(A)
    new = rewriting.rewritten(closed, replacing("sin", replacement))
    assert len(traces) == 2
    lines = [source_info_util.summarize(eqn.source_info) for eqn in new.jaxpr.eqns]
    assert lines == [source_info_util.summarize(eqn.source_info) for eqn in closed.jaxpr.eqns]


def test_lines_and_scopes_of_a_replacement() -> None:
    def fun(x: Any) -> Any:
        with jax.named_scope("outer"):
            return jnp.sin(x)

    def replacement(x: Any) -> list[Any]:
        with jax.named_scope("inner"):
            return [jnp.cos(x)]

    closed = jax.make_jaxpr(fun)(A)
    (eqn,) = rewriting.rewritten(closed, replacing("sin", replacement)).jaxpr.eqns
    assert str(eqn.source_info.name_stack) == "outer/inner"
    assert source_info_util.summarize(eqn.source_info) == source_info_util.summarize(closed.jaxpr.eqns[0].source_info)
    # A program that is there already keeps its own lines.
    program = jax.make_jaxpr(replacement)(A)
    (eqn,) = rewriting.rewritten(closed, replacing("sin", program)).jaxpr.eqns
    assert str(eqn.source_info.name_stack) == "outer/inner"
    assert source_info_util.summarize(eqn.source_info) == source_info_util.summarize(program.jaxpr.eqns[0].source_info)


def test_effects_follow_the_equations() -> None:
    def replacement(x: Any) -> list[Any]:
        jax.debug.print("{}", x, ordered=True)
        return [x]

    closed = jax.make_jaxpr(jnp.sin)(A)
    new = rewriting.rewritten(closed, replacing("sin", replacement))
    assert new.jaxpr.effects == {effect for eqn in new.jaxpr.eqns for effect in eqn.effects}
    assert new.jaxpr.effects
    back = rewriting.rewritten(new, lambda eqn: (lambda *_: []) if eqn.effects else None)
    assert not back.jaxpr.effects


def test_references() -> None:
    """Of the program, and of what replaces its equations."""

    def counted(x: Any) -> list[Any]:
        reference = jax.new_ref(x)
        reference[...] += jnp.ones_like(x)
        return [reference[...]]

    check(
        lambda x: counted(jnp.sin(x))[0] * 2, replacing("sin", lambda x: [jnp.cos(x)]), lambda x: 2 * jnp.cos(x) + 2, A
    )
    check(lambda x: jnp.sin(x) * 2, replacing("sin", counted), lambda x: 2 * x + 2, A)
    check(lambda x: jnp.sin(x) * 2, replacing("sin", jax.make_jaxpr(counted)(A)), lambda x: 2 * x + 2, A)


def test_types_with_a_mesh_go() -> None:
    mesh = jaxprs.abstract_mesh({"i": 1})
    body = jax.make_jaxpr(jax.shard_map(jnp.sin, mesh=mesh, in_specs=jax.P("i"), out_specs=jax.P("i")))(A)
    (eqn,) = body.jaxpr.eqns
    inner = ClosedJaxpr(eqn.params["jaxpr"], ())
    assert rewriting.names_mesh(inner.jaxpr)
    assert not rewriting.names_mesh(rewriting.rewritten(inner, lambda eqn: None).jaxpr)


# The passes ---------------------------------------------------------------------------------------------------


def step(w: Any, x: Any) -> Any:
    value, grad = jax.value_and_grad(lambda w: jnp.sum((x @ w) ** 2))(w)
    return lax.pmean(value, "i"), lax.pmean(grad, "i")


W = jax.ShapeDtypeStruct((2, 3), jnp.float32)


def programs(function: Any, *args: Any) -> dict[str, list[str]]:
    return {name: names(program.closed.jaxpr) for name, program in function.programs(*args).items()}


def test_each_pass_does_its_part(world: pc.Communicator) -> None:
    found = programs(pc.jit(step, axis_name="i"), W, X)
    assert list(found) == PASSES
    assert "pycollective_pmap" in found["trace"]
    assert found["trace"].count("psum") == 2
    assert found["compare"] == found["trace"]
    assert "pycollective_pmap" not in found["discharge"]
    assert "psum" not in found["discharge"]
    assert found["discharge"].count("allreduce") == 2
    assert found["avoid copies"] == found["discharge"]
    assert found["arrange sums"].count("allreduce") == 1


def test_overwriting_is_allowed_where_nothing_is_copied(world: pc.Communicator) -> None:
    hints = lambda program: [eqn.params["in_place"] for eqn in program.closed.jaxpr.eqns if "in_place" in eqn.params]
    for donated, want in ((), (False,)), ((0,), (True,)):
        found = pc.jit(lambda x: lax.psum(x, "i"), axis_name="i", donate_argnums=donated).programs(X)
        assert hints(found["discharge"]) == [(True,)]
        assert hints(found["avoid copies"]) == [want]


def orders(function: Any, *args: Any) -> list[int]:
    """The numbers of the reductions in a program, in its order."""
    return [
        eqn.params["passed"].order
        for eqn in jaxprs.all_equations(function.programs(*args)["number reductions"].closed.jaxpr)
        if eqn.primitive.name in ("allreduce", "reduce_scatter")
    ]


def test_numbers_tell_another_order_from_other_operands(world: pc.Communicator) -> None:
    def sums(*steps: Callable[[Any, Any], Any]) -> Any:
        return pc.jit(lambda x, y: [pc.psum(step(x, y), world) for step in steps])

    one, two, three = lambda x, y: x, lambda x, y: jnp.sin(y), lambda x, y: x + y
    own, swapped, others = (orders(sums(*steps), A, B) for steps in ((one, two), (two, one), (one, three)))
    assert own == swapped[::-1]
    assert own != swapped
    assert len({*own, *others}) == 4  # one half is of all of them
    assert len({order & 0xFFFFFFFF for order in own + swapped}) == 1
    assert orders(sums(one, one), A, B) == [0, 0]  # nothing could be in another order
    constant = lambda x, y: jnp.ones(2)
    assert orders(sums(constant, one, constant), A, B) == [0, 0, 0]
    first, last = lambda x, y: x[:1], lambda x, y: x[1:]
    assert len(set(orders(sums(first, last), A, B))) == 2


def test_numbers_of_calls_in_programs_that_equations_hold(world: pc.Communicator) -> None:
    """Ranks may make one call in two branches. A call in a loop or a function is alike to those around it."""
    total = lambda x: pc.psum(x, world)
    branches = pc.jit(lambda x, y: jax.lax.cond(x[0] > 1, lambda x: total(jnp.sin(x)), lambda x: total(jnp.sin(x)), y))
    assert orders(branches, A, B) == [0, 0]
    around = pc.jit(lambda x, y: (total(y), jax.lax.cond(x[0] > 1, total, lambda y: y, y)))
    assert orders(around, A, B) == [0, 0]
    unlike = pc.jit(lambda x, y: jax.lax.cond(x[0] > 1, lambda x, _: total(x), lambda _, y: total(y), x, y))
    assert len(set(orders(unlike, A, B))) == 2
    loop = pc.jit(lambda x, y: (total(x), jax.lax.fori_loop(0, 3, lambda _, y: total(jnp.cos(y)), y)))
    assert len(set(orders(loop, A, B))) == 2


def test_the_handler_gets_the_number_of_its_reduction(world: pc.Communicator) -> None:
    function = pc.jit(lambda x, y: (pc.psum(x, world), pc.psum(jnp.sin(y), world)))
    text = function.lower(A, B).as_text()
    found = [int(number) for number in re.findall(r"order = (-?\d+) : i64", text)]
    assert found == orders(function, A, B)
    assert 0 not in found


def test_lines_of_a_program_are_the_users(world: pc.Communicator) -> None:
    found = pc.jit(lambda w, x: step(w, x), axis_name="i").programs(W, X)
    (total,) = [eqn for eqn in found["arrange sums"].closed.jaxpr.eqns if eqn.primitive.name == "allreduce"]
    assert Path(__file__).name in source_info_util.summarize(total.source_info)
    assert "(step)" in source_info_util.summarize(total.source_info)


@pytest.mark.skipif(jax.local_device_count() < 2, reason="LOUD: needs two local devices")
def test_a_rank_with_several_devices_runs_one_shard_map(world: pc.Communicator) -> None:
    found = programs(pc.pmap(step, "i"), *(jax.ShapeDtypeStruct((2, *x.shape), x.dtype) for x in (W, X)))
    assert found["discharge"].count("shard_map") == 1
    assert found["arrange sums"].count("allreduce") == 1


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16", "bool"])
def test_a_reduction_becomes_what_its_rule_makes(
    dtype: str, world: pc.Communicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reduction that is one call is not traced; JAX would make the same equation of its rule."""

    def reductions(x: Any) -> Any:
        total, transpose = jax.vjp(lambda y: lax.psum(jnp.sin(y), "i"), x.astype("float32"))
        return transpose(total), lax.pmax(x, "i"), lax.pmin(x, "i"), lax.psum({"a": x, "b": x[0]}, "i")

    def found() -> tuple[str, list[Any]]:
        jaxpr = pc.jit(reductions, axis_name="i").programs(X.update(dtype=dtype))["discharge"].closed.jaxpr
        return str(jaxpr), [(eqn.effects, eqn.source_info.name_stack) for eqn in jaxpr.eqns]

    own = found()
    assert "derivative='transpose'" in own[0]
    monkeypatch.setattr(discharge, "as_one_equation", lambda *_: None)
    assert found() == own


@pytest.mark.skipif(jax.local_device_count() < 2, reason="LOUD: needs two local devices")
def test_a_program_on_devices_is_the_shard_map_that_jax_traces() -> None:
    mesh = jax.sharding.Mesh(jax.devices()[:2], "d")
    spec, whole = PartitionSpec("d"), PartitionSpec()
    fun = lambda x, y: [x * np.float32([2, 3]) + y, lax.psum(y, "d")]
    program = jax.make_jaxpr(fun, axis_env=[("d", 2)])(A, B)
    assert program.consts
    types = [jax.core.ShapedArray((size,), np.float32) for size in (4, 2)]
    new = jaxprs.on_devices(program, mesh, types, types, [spec, whole], [spec, whole])
    with jax.enable_checks(True):
        traced = jaxprs.on_devices(program, mesh, types, types, [spec, whole], [spec, whole])
    texts = [re.sub(r"Mesh\(.*?\)\)", "", str(closed.jaxpr)) for closed in (new, traced)]
    assert texts[0] == texts[1]
    assert new.jaxpr.effects == traced.jaxpr.effects
    x = np.arange(4, dtype=np.float32)
    got = jax.jit(lambda *args: jaxprs.evaluate(new, jaxprs.rebind, *args))(x, B)
    np.testing.assert_array_equal(got[0], x * np.float32([2, 3, 2, 3]) + np.tile(B, 2))
    np.testing.assert_array_equal(got[1], 2 * B)


def test_a_pass_does_not_trace_what_stays(world: pc.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer more costs a pass no more traces, nor does a sum of another shape."""
    traced: list[int] = []
    make_jaxpr = jax.make_jaxpr

    def counting(*args: Any, **kwargs: Any) -> Any:
        traced.append(1)
        return make_jaxpr(*args, **kwargs)

    def layers(number: int) -> Any:
        def fun(x: Any) -> Any:
            for _ in range(number):
                x = jnp.tanh(x) * 2
            return [lax.psum(jnp.resize(x, i), "i") for i in range(number)]

        return pc.jit(fun, axis_name="i")

    monkeypatch.setattr(jax, "make_jaxpr", counting)
    counts = []
    for number in (1, 30):
        traced.clear()
        layers(number).programs(X)
        counts.append(len(traced))
    assert counts[0] == counts[1]


def test_show_prints_each_pass(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "import pycollective as pc\nfrom jax import lax\nf = pc.jit(lambda x: lax.psum(x, 'i'), axis_name='i')\n"
    )
    command = [sys.executable, "-m", "pycollective.spmd.show"]
    done = subprocess.run([*command, f"{file}:f", "bf16[3]"], capture_output=True, text=True, timeout=60, check=True)
    titles = [
        line.removeprefix("# after the pass: ") for line in done.stdout.splitlines() if line.startswith("# after")
    ]
    assert titles == [*PASSES, "lower"]
    assert "bf16[3]" in done.stdout
    for wrong, said in (["f32[3"], "expected a dtype and a shape"), ([f"{file}:g"], "expected FILE.py:FUNCTION"):
        bad = subprocess.run(
            [*command, f"{file}:f", *wrong] if wrong[0][0] == "f" else [*command, *wrong],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert bad.returncode == 2
        assert said in bad.stderr


@pytest.mark.skipif(jax.__version_info__[:2] != (0, 10), reason="LOUD: docs/pictures/pipeline.txt is JAX 0.10's text")
def test_the_page_shows_what_the_command_prints() -> None:
    docs = Path(__file__).parents[2] / "docs" / "pictures"
    command = [sys.executable, "-m", "pycollective.spmd.show", str(docs / "pipeline.py:step"), "f32[]", "f32[3]"]
    environ = {**os.environ, "JAX_NUM_CPU_DEVICES": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=environ)
    before_lowering = [
        text.partition("# after the pass: lower")[0] for text in (done.stdout, (docs / "pipeline.txt").read_text())
    ]
    assert before_lowering[0] == before_lowering[1]


def test_stages_end_with_the_lowered_text(world: pc.Communicator) -> None:
    *_, (name, text) = stages(pc.jit(lambda x: pc.psum(x, world)), X)
    assert name == "lower"
    assert "pycollective_allreduce" in text


def test_equations_have_programs_of_their_own(world: pc.Communicator) -> None:
    """What an equation holds is discharged too, and once for a program that two equations share."""
    inner = jax.jit(lambda x: lax.psum(jnp.sin(x), "i"))

    def fun(x: Any) -> Any:
        return lax.scan(lambda carry, _: (inner(carry), None), inner(x) + inner(x), None, length=2)[0]

    program = pc.jit(fun, axis_name="i").programs(X)["discharge"].closed.jaxpr
    called: list[JaxprEqn] = [eqn for eqn in program.eqns if eqn.primitive.name == "jit"]
    assert names(program).count("allreduce") == 3
    assert len({id(eqn.params["jaxpr"].jaxpr) for eqn in called}) == 1
