"""Arguments that nobody should pass: each call gives what JAX gives, or an error of this package, on all ranks.

All ranks draw the same arguments. A call that waits for ever is ended by the guard in tests/under_mpirun.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax import lax
from mpi4py import MPI

import pycollective as pc
from tests.collective.programs import oracle_devices

agreed = settings(
    max_examples=60 if MPI.COMM_WORLD.size <= 2 else 20,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)

JUNK = [
    None,
    "text",
    b"bytes",
    1.5,
    float("nan"),
    1j,
    True,
    -1,
    0,
    1,
    99,
    2**40,
    2**70,
    -(2**70),
    (),
    [],
    {},
    {"a": 1},
    [0, 1],
    [[0, 1]],
    [[]],
    [(0, 0), (0, 0)],
    [(0, 0, 0)],
    [("a", "b")],
    object(),
    print,
    np.int64(0),
    np.uint8(255),
    np.array([0, 1]),
    np.array(0),
    np.float32(0),
    jnp.int32(0),
    MPI.COMM_WORLD,
    ...,
]

OPERANDS = [
    None,
    "text",
    object(),
    2**70,
    np.array(["a", "b"]),
    np.array([None, 1], dtype=object),
    np.array(["2020-01-01"], dtype="datetime64[D]"),
    np.zeros(2, dtype=[("a", np.int32)]),
    jax.ShapeDtypeStruct((2,), jnp.float32),
    [],
    {"a": [1.0, None]},
    True,
    3,
    1.5,
    1j,
    np.zeros(0, np.float32),
    np.zeros((0, 3), np.int32),
    np.zeros((2, 0), np.bool_),
    np.arange(4, dtype=np.float32),
    np.arange(6, dtype=np.int8).reshape(2, 3),
    np.arange(4, dtype=np.uint16).reshape(2, 2, 1),
    np.ones((2, 2), np.complex64),
    np.ones((2, 2), np.bool_),
    np.float64(2),
    jnp.ones((3, 2), jnp.bfloat16),
    jnp.ones((2,), jnp.float8_e5m2),
]

junk = st.sampled_from(JUNK)
operands = st.sampled_from(OPERANDS)
Outcome = tuple[str, Any]

COLLECTIVES: dict[Callable[..., Any], tuple[Callable[..., Any], tuple[str, ...]]] = {
    pc.psum: (lax.psum, ("axis_index_groups",)),
    pc.pmean: (lax.pmean, ("axis_index_groups",)),
    pc.pmax: (lax.pmax, ("axis_index_groups",)),
    pc.pmin: (lax.pmin, ("axis_index_groups",)),
    pc.all_gather: (lax.all_gather, ("axis_index_groups", "axis", "tiled")),
    pc.psum_scatter: (lax.psum_scatter, ("scatter_dimension", "axis_index_groups", "tiled")),
    pc.all_to_all: (lax.all_to_all, ("split_axis", "concat_axis", "axis_index_groups", "tiled")),
    pc.ppermute: (lax.ppermute, ("perm",)),
    pc.pshuffle: (lax.pshuffle, ("perm",)),
    pc.pswapaxes: (lax.pswapaxes, ("axis",)),
    pc.pbroadcast: (lambda x, axis_name, source: x, ("source",)),
}
OF_MPI: dict[Callable[..., Any], tuple[str, ...]] = {
    pc.broadcast: ("root",),
    pc.reduce: ("op", "root"),
    pc.allreduce: ("op",),
    pc.maxloc: (),
    pc.minloc: (),
    pc.gather: ("root",),
    pc.scatter: ("root",),
    pc.scan: ("op",),
    pc.exscan: ("op",),
    pc.send: ("dest", "tag"),
    pc.recv: ("source", "tag"),
    pc.sendrecv: ("source", "dest", "send_tag", "recv_tag"),
}
OURS = (TypeError, ValueError, NotImplementedError)


def outcome(call: Callable[[], Any]) -> Outcome:
    """What a call gives: its result, or one of our errors. Another error fails the test."""
    try:
        return "result", jax.block_until_ready(call())
    except OURS as error:
        if not str(error).startswith("pycollective."):
            raise
        return "error", type(error).__name__


def _plain(value: Any) -> Any:
    """A number as JAX takes it too: JAX wants numbers that can be hashed."""
    return int(value) if np.ndim(value) == 0 and isinstance(value, (np.ndarray, jax.Array)) else value


def same_on_all(world: pc.Communicator, kind: str) -> bool:
    return set(world.mpi.allgather(kind)) == {kind}


@pytest.mark.parametrize("function", COLLECTIVES, ids=lambda function: function.__name__)
@agreed
@given(data=st.data())
def test_collectives_of_jax(function: Callable[..., Any], data: st.DataObject, world: pc.Communicator) -> None:
    of_jax, names = COLLECTIVES[function]
    x, options = data.draw(operands), {name: data.draw(junk) for name in names}
    kind, got = outcome(lambda: function(x, world, **options))
    assert same_on_all(world, kind)
    if kind == "error":
        return
    leaves, tree = jax.tree.flatten(x)
    if not leaves:
        assert jax.tree.structure(got) == tree
        return

    def of_one(leaves: list[jax.Array]) -> Any:
        return of_jax(jax.tree.unflatten(tree, leaves), "ranks", **options)

    options = {name: bool(value) if name == "tiled" else _plain(value) for name, value in options.items()}
    everybody = [jnp.stack([jnp.asarray(leaf)] * world.size) for leaf in leaves]
    want = jax.pmap(of_one, axis_name="ranks", devices=oracle_devices(world.size))(everybody)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs[world.rank]))


@pytest.mark.parametrize("function", OF_MPI, ids=lambda function: function.__name__)
@agreed
@given(data=st.data())
def test_operations_of_mpi(function: Callable[..., Any], data: st.DataObject, world: pc.Communicator) -> None:
    options = {name: data.draw(junk) for name in OF_MPI[function]}
    x = data.draw(operands)
    if function in (pc.send, pc.recv, pc.sendrecv):  # a message that can be sent would need one that receives it
        options["source" if function is pc.recv else "dest"] = data.draw(st.sampled_from([-1, 99, 2**70, "text", 1.5]))
    kind, _ = outcome(lambda: function(x, world, **options))
    assert same_on_all(world, kind)


@pytest.mark.parametrize("function", [pc.psum, pc.all_gather, pc.broadcast, pc.barrier, pc.axis_index, pc.axis_size])
@agreed
@given(data=st.data())
def test_what_is_no_communicator(function: Callable[..., Any], data: st.DataObject, world: pc.Communicator) -> None:
    comm = data.draw(junk.filter(lambda value: value is not None))
    arguments = (comm,) if function in (pc.barrier, pc.axis_index, pc.axis_size) else (np.ones(2), comm)
    with pytest.raises((TypeError, ValueError, NameError), match=r"^pycollective\."):
        function(*arguments)
    assert same_on_all(world, "refused")
