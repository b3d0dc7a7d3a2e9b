"""The contents of programs: the traced jaxpr and the lowered text. No program runs."""

from __future__ import annotations

import re

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax import lax

import pycollective as pc
from pycollective.ordering import region
from pycollective.ordering.effect import effect
from pycollective.primitives import reductions
from pycollective.ranks import participants
from pycollective.transport import native

X = jax.ShapeDtypeStruct((4, 2), jnp.float32)


@pytest.fixture(scope="module")
def world() -> pc.Communicator:
    return pc.init()


def calls(text: str) -> list[str]:
    """The custom calls of a lowered program, in order."""
    return re.findall(r"custom_call @pycollective_(\w+)", text)


def aliased(text: str) -> int:
    return text.count("output_operand_alias<")


def test_effect_is_in_the_jaxpr(world: pc.Communicator) -> None:
    jaxpr = jax.make_jaxpr(lambda x: pc.psum(x, world))(X)
    assert effect in jaxpr.effects
    assert [eqn.primitive for eqn in jaxpr.eqns] == [reductions.allreduce_p]


def test_a_region_has_no_effect(world: pc.Communicator) -> None:
    jaxpr = jax.make_jaxpr(region.Region(lambda x: pc.psum(x, world)))(X)
    assert not jaxpr.effects
    assert [eqn.primitive for eqn in jaxpr.eqns] == [region.region_p]


def test_calls_are_chained_by_tokens(world: pc.Communicator) -> None:
    text = pc.jit(lambda x: pc.pmax(x, world) + pc.psum(x, world)).lower(X).as_text()
    assert calls(text) == ["allreduce", "allreduce"]
    first, second = re.findall(r"(%\w+):2 = stablehlo.custom_call @pycollective_allreduce\((%[\w#]+), %\w+\)", text)
    assert second[1] == f"{first[0]}#0"  # the second takes the token that the first returns


def test_in_place_only_where_nothing_is_copied(world: pc.Communicator) -> None:
    def lowered(f: object, **options: object) -> str:
        return str(pc.jit(f, **options).lower(X).as_text())  # type: ignore[call-overload]

    assert aliased(lowered(lambda x: pc.psum(x, world))) == 0  # an input
    assert aliased(lowered(lambda x: pc.psum(x, world), donate_argnums=0)) == 1
    assert aliased(lowered(lambda x: pc.psum(x + 1, world))) == 1  # an intermediate
    assert aliased(lowered(lambda x: (y := x + 1, pc.psum(y, world)))) == 0  # also a result
    assert aliased(lowered(lambda x: pc.psum(y := x + 1, world) + y)) == 0  # read later


def test_small_floats_travel_as_float32_in_sums_only(world: pc.Communicator) -> None:
    x = jax.ShapeDtypeStruct((3,), jnp.bfloat16)
    assert re.search(r"pycollective_allreduce.*tensor<3xf32>", pc.jit(lambda x: pc.psum(x, world)).lower(x).as_text())
    text = pc.jit(lambda x: pc.broadcast(x, world)).lower(x).as_text()
    assert re.search(r"pycollective_bcast.*tensor<3xbf16>", text)
    assert "f32" not in text


def test_gradient_of_a_gather_is_a_scatter(world: pc.Communicator) -> None:
    text = pc.jit(jax.grad(lambda x: (pc.all_gather(x, world) ** 2).sum())).lower(X).as_text()
    assert calls(text) == ["allgather", "reduce_scatter"]


def test_other_platforms_are_refused(world: pc.Communicator) -> None:
    refusal = (
        r"allreduce: expected a program on CPU devices or GPUs, as pycollective.init's devices are, got one for tpu\."
    )
    with pytest.raises(NotImplementedError, match=refusal):
        jax.jit(lambda x: pc.psum(x, world)).trace(X).lower(lowering_platforms=("tpu",))


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_gpus_have_handlers_of_their_own(platform: str, world: pc.Communicator) -> None:
    program = jax.jit(lambda x: pc.psum(x, world)).trace(X)
    assert "@pycollective_device_allreduce(" in program.lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("by_name", [False, True])
def test_gpus_fuse_nothing_with_a_call(by_name: bool, world: pc.Communicator) -> None:
    """Of a slice as operand and a slice of the result; XLA for GPUs would end the process."""
    total = lambda x: lax.psum(x[:2], "i")[:1] if by_name else pc.psum(x[:2], world)[:1]
    program = jax.jit(pc.jit(total, axis_name="i") if by_name else total).trace(X)
    text = program.lower(lowering_platforms=("cuda",)).as_text()
    call = re.search(r"(%\w+):2 = stablehlo.custom_call @pycollective_device_allreduce\w*\(%\w+, (%\w+)\)", text)
    assert call is not None, text
    assert f"{call[2]} = stablehlo.optimization_barrier" in text
    assert f"= stablehlo.optimization_barrier {call[1]}#1 " in text


def test_unused_results_keep_their_calls(world: pc.Communicator) -> None:
    assert calls(pc.jit(lambda x: (pc.psum(x, world), x)[1]).lower(X).as_text()) == ["allreduce"]
    assert calls(pc.jit(lambda x: pc.barrier(world)).lower(X).as_text()) == ["barrier"]


def test_numbers_not_handles_are_compiled_in(world: pc.Communicator) -> None:
    # A handle may be an address, which differs in every process: then programs could not be cached on disk.
    number, fingerprint = world._key
    text = pc.jit(lambda x: pc.psum(x, world)).lower(X).as_text()
    assert re.search(rf"comm = (array<i64: |dense<\[){number}, {fingerprint}", text)
    assert number < 100


def test_a_fingerprint_tells_builds_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    # The attributes of a call may mean something else in another build. Other fingerprints are refused.
    ranks = (0, 1), 0
    ours = participants.program_fingerprint(*ranks)
    monkeypatch.setattr(native, "build_id", lambda: "of another build")
    assert participants.program_fingerprint(*ranks) != ours


def test_symbolic_lengths_are_refused(world: pc.Communicator) -> None:
    shape = jax.ShapeDtypeStruct(jax.export.symbolic_shape("rows, 3"), jnp.float32)
    export = jax.export.export(pc.jit(lambda x: pc.psum(x, world)), disabled_checks=pc.export_checks())
    with pytest.raises(NotImplementedError, match=r"allreduce: expected arrays whose lengths are numbers, got shape"):
        export(shape)
