"""JAX's profiler shows our calls by a name that people can read."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters.mlir import ir

import pycollective as pc
from pycollective.jax_support import jax_internals

comm = pc.init()
X = jnp.ones((4, 3))


def names_in_profile(folder: Path, run: Callable[[], jax.Array]) -> set[str]:
    """The operations of XLA in a profile, without the numbers that XLA appends."""
    run().block_until_ready()  # compiles
    with jax.profiler.trace(str(folder)):
        run().block_until_ready()
    (file,) = folder.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    return {re.sub(r"\.\d+$", "", event["args"]["hlo_op"]) for event in events if "hlo_op" in event.get("args", {})}


@pytest.mark.parametrize("jit", [jax.jit, pc.jit], ids=["jax.jit", "pc.jit"])
def test_calls_in_a_profile(jit: Callable[..., Callable[..., jax.Array]], tmp_path: Path) -> None:
    def step(x: jax.Array) -> jax.Array:
        return pc.all_gather(pc.psum(x, comm).astype(jnp.bfloat16), comm)

    program = jit(step)
    names = names_in_profile(tmp_path, lambda: program(X))
    assert {"pycollective_allreduce_float32_4x3", "pycollective_allgather_bfloat16_4x3"} <= names, names


def test_the_line_and_the_scope_of_a_call_stay(tmp_path: Path) -> None:
    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("norm"):
            return pc.psum(x, comm)

    text = step.lower(X).compile().as_text()
    assert text is not None
    (call,) = [line for line in text.splitlines() if 'custom_call_target="pycollective_allreduce"' in line]
    assert 'op_name="jit(step)/norm/pycollective_allreduce_float32_4x3"' in call, call
    assert "stack_frame_id" in call or "source_line" in call, call


@pytest.mark.parametrize(("stack", "name"), [("", "new"), ("jit(step)/norm", "jit(step)/norm/new")])
def test_a_new_name_keeps_the_scope_and_the_line(stack: str, name: str) -> None:
    """JAX hands scopes to a lowering, or names them where it inlines what was lowered before."""
    with ir.Context():
        place = ir.Location.name("step", childLoc=ir.Location.file("train.py", 9, 1))
        old = ir.Location.name("allreduce", childLoc=place)
        with ir.Location.name("allreduce:", childLoc=old):
            found = jax_internals.location_named(SimpleNamespace(name_stack=stack), "new")
    assert str(found) == f'loc("{name}"("step"("train.py":9:1)))'
