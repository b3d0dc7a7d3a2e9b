"""Primitives of other libraries: JAX traces their function when it lowers them, and it may hold a sum."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import Primitive
from jax.interpreters import mlir

import pycollective as pc
from tests.libraries.programs import Way, compare

Array = Any

scaled_p = Primitive("scaled_sum")


def scaled(x: Array, *, axis: Any) -> Array:
    return jax.lax.fori_loop(0, 2, lambda _, y: pc.pmean(jnp.sin(y), axis), 2 * x)


scaled_p.def_impl(scaled)
scaled_p.def_abstract_eval(lambda x, *, axis: x)  # a rule of this kind cannot report an effect
mlir.register_lowering(scaled_p, mlir.lower_fun(scaled, multiple_results=False))


def program(x: Array, axis: Any) -> Array:
    return pc.psum(x, axis) + jax.jit(lambda x: scaled_p.bind(x, axis=axis))(x) + scaled_p.bind(-3 * x, axis=axis)


def plain(x: Array, axis: Any) -> Array:
    return pc.psum(x, axis) + scaled(x, axis=axis) + scaled(-3 * x, axis=axis)


def test_a_primitive_whose_program_sums(way: Way, world: pc.Communicator) -> None:
    compare(world, way, program, reference=plain)


def test_what_it_hides_is_compared(world: pc.Communicator) -> None:
    differing_p = Primitive("differing")

    def differing(x: Array) -> Array:
        return (jax.lax.psum if world.rank == 0 else jax.lax.pmax)(x, "i")

    differing_p.def_impl(differing)
    differing_p.def_abstract_eval(lambda x: x)
    mlir.register_lowering(differing_p, mlir.lower_fun(differing, multiple_results=False))
    f = pc.jit(differing_p.bind, axis_name="i")
    if world.size == 1:
        assert f(jnp.ones(())) == 1
    else:
        with pytest.raises(RuntimeError, match="expected the same program on every rank"):
            f(jnp.ones(()))
