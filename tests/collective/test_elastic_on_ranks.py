"""The state of a training: what a commit copies, and what ranks restore."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pycollective as pc
from pycollective.spmd.compiled import forget_agreements

WORLD = pc.world()


def values(step: int) -> dict[str, Any]:
    return {
        "w": {"a": jnp.full((2, 3), step, jnp.bfloat16), "b": jnp.float32(step), "empty": jnp.zeros((0, 2))},
        "key": jax.random.key(step),
        "host": np.full(4, step),
        "step": step,
        "losses": [float(i) for i in range(step)],
        "nothing": None,
    }


def check(state: pc.elastic.State, step: int) -> None:
    want = values(step)
    got = {name: getattr(state, name) for name in want}
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert type(mine) is type(theirs)
        if isinstance(mine, jax.Array):
            assert (mine.dtype, mine.committed) == (theirs.dtype, theirs.committed)
        if isinstance(mine, jax.Array) and jnp.issubdtype(mine.dtype, jax.dtypes.prng_key):
            mine, theirs = jax.random.key_data(mine), jax.random.key_data(theirs)
        np.testing.assert_array_equal(mine, theirs)


def set_to(state: pc.elastic.State, step: int) -> None:
    for name, value in values(step).items():
        setattr(state, name, value)


def test_all_go_on_from_the_newest_commit() -> None:
    """The last rank has made one commit more than the others, of another structure."""
    state = pc.elastic.State(**values(1))
    state.commit()
    if WORLD.rank == WORLD.size - 1:
        set_to(state, 2)
        state.commit()
    set_to(state, 3)
    assert state._restore(WORLD) == 1
    check(state, 2)
    set_to(state, 4)
    assert state._restore(WORLD) == 1
    check(state, 2)


def test_a_structure_that_cannot_be_sent() -> None:
    state = pc.elastic.State(w=jax.tree_util.Partial(lambda x: x, jnp.float32(WORLD.rank)))
    state.commit()
    state._restore(WORLD)
    assert float(state.w.args[0]) == 0


def test_a_commit_is_a_copy() -> None:
    shared = np.zeros(3)
    state = pc.elastic.State(w=jnp.zeros(1 << 16), host=shared, names=["a"])
    state.commit()
    before = state.w.unsafe_buffer_pointer()
    state.w = jax.jit(lambda w: w + 1, donate_argnums=0)(state.w)
    assert state.w.unsafe_buffer_pointer() == before  # the commit does not hold the memory
    shared += 1
    state.names.append("b")
    state._restore(WORLD)
    assert not np.any(state.w)
    assert not np.any(state.host)
    assert state.names == ["a"]
    state.names.append("c")  # nor does what was restored change the commit
    state._restore(WORLD)
    assert state.names == ["a"]


def test_an_array_with_a_place_returns_to_it() -> None:
    device = jax.local_devices()[-1]
    state = pc.elastic.State(w=jax.device_put(jnp.ones(2), device))
    state.commit()
    state.w = None
    state._restore(WORLD)
    assert state.w.committed
    assert state.w.devices() == {device}


def test_a_failure_in_a_commit_leaves_the_one_before() -> None:
    def fails(_: Any) -> Any:
        raise ValueError("no luck")

    state = pc.elastic.State(first=jnp.zeros(2), second=jnp.zeros(2))
    state.commit()
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    state.first = jnp.ones(2)
    with pytest.raises(jax.errors.JaxRuntimeError, match="no luck"):
        state.second = jax.jit(lambda x: jax.pure_callback(fails, shape, x))(state.first)
        state.commit()
    assert state._restore(WORLD) == 0
    assert not np.any(state.first)


def test_names() -> None:
    state = pc.elastic.State(step=0)
    with pytest.raises(AttributeError, match=r"elastic.State: expected one of its values, step, got stpe"):
        state.stpe = 1
    with pytest.raises(AttributeError, match=r"expected one of its values, step, got loss"):
        _ = state.loss
    with pytest.raises(ValueError, match="expected names that State has not itself, got commit"):
        pc.elastic.State(commit=1)


def test_what_run_refuses() -> None:
    with pytest.raises(TypeError, match=r"elastic.run: expected a pycollective.elastic.State, got 3"):
        pc.elastic.run(lambda state, world: None, 3)
    with pytest.raises(ValueError, match=f"expected min_ranks={WORLD.size + 1} ranks or more, got {WORLD.size}"):
        pc.elastic.run(lambda state, world: None, pc.elastic.State(), min_ranks=WORLD.size + 1)


def test_functions_are_traced_again() -> None:
    """A rank may have been in a function's first call when another one was past it."""
    traces = []

    def counted(x: Any) -> Any:
        traces.append(None)
        return pc.psum(x)

    functions = [pc.jit(counted), jax.jit(counted)]
    for function in functions:
        function(jnp.ones(2))
    forget_agreements()
    assert not functions[0]._agreed
    for function in functions:
        function(jnp.ones(2))
    assert len(traces) == 4


def test_a_decorator() -> None:
    @pc.elastic.run
    def train(state: pc.elastic.State, world: pc.Communicator) -> Any:
        state.step += 1
        return state.step, world

    assert train(pc.elastic.State(step=2)) == (3, WORLD)
