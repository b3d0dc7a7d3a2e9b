"""send, recv, sendrecv and barrier."""

from __future__ import annotations

import itertools
import re
import time
import warnings
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mpi4py import MPI

import pycollective as pc
from pycollective.config import config
from pycollective.transport import native
from tests.cases import values
from tests.collective.programs import RUNTIME_ERRORS

needs_two = pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="LOUD: needs two ranks (run under mpirun -n 2)")


@needs_two
def test_ring_of_messages(world: pc.Communicator) -> None:
    # Rank 0 starts; the token visits every rank and comes back, in eager calls and in one program.
    def ring(x: jax.Array) -> jax.Array:
        left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
        if world.rank == 0:
            pc.send(x, world, dest=right)
            return pc.recv(x, world, source=left)
        y = pc.recv(x, world, source=left)
        pc.send(y + 1, world, dest=right)
        return y

    for run in (lambda f: f, jax.jit, pc.jit):
        y = run(ring)(jnp.arange(3.0))
        np.testing.assert_array_equal(y, np.arange(3.0) + (world.rank - 1 if world.rank else world.size - 1))


@needs_two
def test_a_message_that_nobody_receives(world: pc.Communicator) -> None:
    # MPI gives the next communicator the context of the one that is freed: the message would be received there.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        part = world.split(color=0)
        assert part is not None
        if world.rank == 0:
            pc.send(jnp.float32(1), part, dest=1, tag=3)
        part.free()
    got = [str(each.message) for each in caught if each.category is RuntimeWarning]
    what = r"(float32\[\] at test_messages.py:\d+ \(\w+\) )?"  # by its header, if messages have any
    words = rf"expected no messages under way, got some that nobody received: {what}from rank 0 with tag 3 \(rank 1"
    assert len(got) == (world.rank == 1)
    assert [text for text in got if not re.search(words, text)] == []
    later = world.split(color=0)
    assert later is not None
    if world.rank == 0:
        pc.send(jnp.float32(2), later, dest=1, tag=3)
    elif world.rank == 1:
        assert pc.recv(jnp.float32(0), later, source=0, tag=3) == 2
    later.free()


@needs_two
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit, pc.jit])
def test_status(jit: Any, world: pc.Communicator) -> None:
    status, other = MPI.Status(), MPI.Status()
    if world.rank == 0:
        pc.send(jnp.arange(3.0), world, dest=1, tag=5)
        pc.send(jnp.arange(4.0), world, dest=1, tag=6)
    elif world.rank == 1:
        f = jit(lambda x, y: [pc.recv(x, world, status=status), pc.recv(y, world, status=other)])
        jax.block_until_ready(f(jnp.zeros(3), jnp.zeros(4)))
        assert [(s.Get_source(), s.Get_tag(), s.Get_count(MPI.FLOAT)) for s in (status, other)] == [
            (0, 5, 3),
            (0, 6, 4),
        ]
    source, dest = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    tags = {"send_tag": 10 + world.rank, "recv_tag": 10 + source}
    ring = lambda x: pc.sendrecv(x, world, source=source, dest=dest, **tags, status=status)
    for _ in range(2):
        jax.block_until_ready(jit(ring)(jnp.ones(2)))
        assert (status.Get_source(), status.Get_tag()) == (source, 10 + source)
        status.Set_source(-5)
    # The status of a cotangent's message is nobody's.
    jax.block_until_ready(jit(lambda x: jax.linear_transpose(ring, x)(x))(jnp.ones(2)))
    assert status.Get_source() == -5
    with pytest.raises(TypeError, match=r"recv: expected status to be an mpi4py.MPI.Status, or None, got 'there'"):
        pc.recv(jnp.ones(2), world, status="there")  # type: ignore[arg-type]


def test_a_status_of_another_process(world: pc.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when the program was serialized there: it holds an address of that process."""
    program = jax.jit(lambda x: pc.sendrecv(x, world, source=world.rank, dest=world.rank, status=MPI.Status()))
    monkeypatch.setattr(native, "this_process", lambda: 1)
    with pytest.raises(RUNTIME_ERRORS, match="sendrecv: expected a program of this process, since it holds addresses"):
        jax.block_until_ready(program(jnp.ones(3)))


@needs_two
def test_tags_choose_among_messages(world: pc.Communicator) -> None:
    if world.rank == 0:
        pc.send(jnp.asarray([1]), world, dest=1, tag=5)
        pc.send(jnp.asarray([2]), world, dest=1, tag=6)
    elif world.rank == 1:
        like = jax.ShapeDtypeStruct((1,), jnp.int32)
        assert pc.recv(like, world, source=0, tag=6).tolist() == [2]
        assert pc.recv(like, world, source=0, tag=5).tolist() == [1]


def test_any_source_does_not_take_a_permutation(world: pc.Communicator) -> None:
    # Rank 1 waits for any message while rank 0 is already in the permutation that follows.
    perm = [(0, 1)] if world.size > 1 else []
    if world.rank == 1:
        got = pc.recv(jnp.zeros(2, jnp.int32), world)
        assert got.tolist() == [7, 8]
    elif world.rank == world.size - 1 and world.size > 2:
        time.sleep(0.2)
        pc.send(jnp.asarray([7, 8], jnp.int32), world, dest=1)
    elif world.rank == 0 and world.size == 2:
        pc.send(jnp.asarray([7, 8], jnp.int32), world, dest=1)
    y = pc.ppermute(jnp.asarray([world.rank + 1, 0], jnp.int32), world, perm)
    assert y.tolist() == ([1, 0] if world.rank == 1 else [0, 0])


def test_sendrecv_of_other_shapes(world: pc.Communicator) -> None:
    # Rank r sends r + 1 numbers; the receiver knows their number from the rank of the source.
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    x = values((world.rank + 1,), seed=world.rank)
    y = pc.sendrecv(jnp.asarray(x), world, source=left, dest=right, like=jax.ShapeDtypeStruct((left + 1,), jnp.float32))
    np.testing.assert_array_equal(y, values((left + 1,), seed=left))


def test_sendrecv_of_other_shapes_has_a_gradient(world: pc.Communicator) -> None:
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    like = jax.ShapeDtypeStruct((left + 1,), jnp.float32)

    def loss(x: jax.Array) -> jax.Array:
        y = pc.sendrecv(x, world, source=left, dest=right, like=like, send_tag=3, recv_tag=3)
        return (world.rank + 1.0) * jnp.sum(y**2)

    x = values((world.rank + 1,), seed=world.rank)
    np.testing.assert_allclose(jax.grad(loss)(x), 2 * (right + 1.0) * x, rtol=1e-6)


def test_the_gradient_goes_back_with_the_tags_exchanged(world: pc.Communicator) -> None:
    # Each rank has a tag of its own, so no rank would receive a cotangent with the wrong tag.
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size

    def loss(x: jax.Array) -> jax.Array:
        y = pc.sendrecv(x, world, source=left, dest=right, send_tag=10 + world.rank, recv_tag=10 + left)
        return (world.rank + 1.0) * jnp.sum(y**2)

    x = values((3,), seed=world.rank)
    np.testing.assert_allclose(jax.grad(loss)(x), 2 * (right + 1.0) * x, rtol=1e-6)


def test_sendrecv_without_a_peer(world: pc.Communicator) -> None:
    # In an open chain rank 0 has no source.
    source = world.rank - 1 if world.rank > 0 else pc.PROC_NULL
    dest = world.rank + 1 if world.rank < world.size - 1 else pc.PROC_NULL
    y = pc.jit(lambda x: pc.sendrecv(x, world, source=source, dest=dest))(jnp.full(3, world.rank + 1.0))
    assert y.tolist() == [float(world.rank)] * 3


RUNS = pytest.mark.parametrize("run", [lambda f: f, jax.jit, pc.jit], ids=["eagerly", "jax.jit", "pc.jit"])


def neighbours(world: pc.Communicator) -> tuple[Any, Any]:
    """The source and the destination of this rank in an open chain."""
    return (
        world.rank - 1 if world.rank > 0 else pc.PROC_NULL,
        world.rank + 1 if world.rank < world.size - 1 else pc.PROC_NULL,
    )


@RUNS
def test_the_constants_of_mpi(run: Any, world: pc.Communicator) -> None:
    x = jnp.arange(3.0) + world.rank
    if world.rank == 1:
        any_rank = run(lambda x: pc.recv(x, world, source=pc.ANY_SOURCE, tag=pc.ANY_TAG))
        np.testing.assert_array_equal(any_rank(x), x - 1)
    elif world.rank == 0 and world.size > 1:
        run(lambda x: pc.send(x, world, dest=1, tag=8))(x)
    # Nothing is sent, and MPI leaves the buffer as it is.
    run(lambda x: pc.send(x, world, dest=pc.PROC_NULL))(x)
    for tag in (3, pc.ANY_TAG):
        np.testing.assert_array_equal(run(lambda x: pc.recv(x, world, source=pc.PROC_NULL, tag=tag))(x), x)
    like = {"a": jax.ShapeDtypeStruct((2,), jnp.int32), "b": jax.random.key(3)}
    got = pc.recv(like, world, source=pc.PROC_NULL)
    assert (got["a"].tolist(), got["a"].dtype, got["b"]) == ([0, 0], jnp.int32, like["b"])
    assert pc.recv({}, world, source=pc.PROC_NULL) == {}
    np.testing.assert_array_equal(jax.vmap(lambda x: pc.recv(x, world, source=pc.PROC_NULL))(x), x)
    assert jax.grad(lambda x: pc.recv(2 * x, world, source=pc.PROC_NULL))(1.0) == 2.0


@RUNS
def test_the_status_of_a_message_from_no_rank(run: Any, world: pc.Communicator) -> None:
    def from_no_rank(x: jax.Array, status: MPI.Status) -> jax.Array:
        return pc.recv(x, world, source=pc.PROC_NULL, status=status)

    def to_no_rank(x: jax.Array, status: MPI.Status) -> jax.Array:
        return pc.sendrecv(x, world, source=pc.PROC_NULL, dest=pc.PROC_NULL, recv_tag=pc.ANY_TAG, status=status)

    for call, factor in ((from_no_rank, 1), (to_no_rank, 0)):
        status = MPI.Status()
        y = run(lambda x: call(x, status))(jnp.ones(2))
        jax.effects_barrier()
        assert y.tolist() == [factor] * 2
        assert (status.source, status.tag, status.Get_count(MPI.FLOAT)) == (MPI.PROC_NULL, MPI.ANY_TAG, 0)


@RUNS
def test_derivatives_at_the_open_ends_of_a_chain(run: Any, world: pc.Communicator) -> None:
    """The oracle is ppermute: what rank 0 receives are zeros, and what the last rank sends has no influence."""
    source, dest = neighbours(world)
    perm = [(r, r + 1) for r in range(world.size - 1)]
    x = jnp.arange(3.0) + world.rank

    def chain(x: jax.Array) -> jax.Array:
        return pc.sendrecv(x, world, source=source, dest=dest)

    def oracle(x: jax.Array) -> jax.Array:
        return pc.ppermute(x, world, perm)

    def results(f: Any) -> list[jax.Array]:
        def loss(x: jax.Array) -> jax.Array:
            return jnp.sum((world.rank + 2) * f(x) ** 3 + x)

        (transposed,) = jax.linear_transpose(f, x)(x + 1)
        (twice,) = jax.linear_transpose(lambda y: jax.linear_transpose(f, x)(y)[0], x)(x)
        _, tangent = jax.jvp(f, (x,), (2 * x,))
        batched = jax.vmap(f, in_axes=1)(jnp.stack([x, 3 * x], axis=1))
        return [f(x), transposed, twice, tangent, batched, jax.grad(loss)(x), jax.hessian(loss)(x)]

    for got, want in zip(run(lambda: results(chain))(), results(oracle), strict=True):
        np.testing.assert_allclose(got, want)


def test_a_tag_is_not_needed_from_no_rank(world: pc.Communicator) -> None:
    """In the transpose nothing is sent back."""
    f = lambda x: pc.sendrecv(x, world, source=pc.PROC_NULL, dest=pc.PROC_NULL, recv_tag=pc.ANY_TAG)
    assert jax.grad(f)(1.0) == 0.0


def test_the_constants_are_static(world: pc.Communicator) -> None:
    @partial(jax.jit, static_argnames=("source", "dest"))
    def chain(x: jax.Array, source: Any, dest: Any) -> jax.Array:
        return pc.sendrecv(x, world, source=source, dest=dest)

    source, dest = neighbours(world)
    for _ in range(2):
        assert chain(jnp.float32(world.rank + 1), source=source, dest=dest) == world.rank
    assert chain._cache_size() == 1
    printed = str(jax.make_jaxpr(lambda x: pc.sendrecv(x, world, source=pc.PROC_NULL, dest=pc.PROC_NULL))(1.0))
    assert "source=pc.PROC_NULL" in printed


BAD_PEERS = [-1, -2, -3, -4, 99, MPI.PROC_NULL, MPI.ANY_SOURCE]
BAD_CONSTANTS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("send", "dest", {}, r"or pc\.PROC_NULL"),
    ("recv", "source", {}, r"or pc\.ANY_SOURCE or pc\.PROC_NULL"),
    ("sendrecv", "source", {"dest": 0}, r"or pc\.PROC_NULL"),
    ("sendrecv", "dest", {"source": 0}, r"or pc\.PROC_NULL"),
]


@pytest.mark.parametrize(("call", "name", "others", "allowed"), BAD_CONSTANTS)
def test_what_is_no_rank_is_refused(call: str, name: str, others: Any, allowed: str, world: pc.Communicator) -> None:
    function = getattr(pc, call)
    expected = rf"pycollective\.{call}: expected {name} from 0 to {world.size - 1} {allowed}, got "
    for rank in BAD_PEERS:
        with pytest.raises(ValueError, match=rf"{expected}{rank} \(rank \d of \d\)\. Ranks count from 0"):
            jax.jit(lambda x: function(x, world, **{name: rank}, **others))(1.0)
    for constant in (None, pc.ANY_TAG, *([] if call == "recv" else [pc.ANY_SOURCE])):
        text = rf"{expected}{constant} \(rank \d of \d\)\. .*Pass pycollective\.PROC_NULL for no rank\."
        with pytest.raises(TypeError, match=text):
            function(1.0, world, **{name: constant}, **others)


@pytest.mark.parametrize(
    ("call", "name", "others"),
    [
        ("send", "tag", {"dest": 0}),
        ("recv", "tag", {"source": 0}),
        ("sendrecv", "send_tag", {"source": 0, "dest": 0}),
        ("sendrecv", "recv_tag", {"source": 0, "dest": 0}),
    ],
)
def test_what_is_no_tag_is_refused(call: str, name: str, others: Any, world: pc.Communicator) -> None:
    function = getattr(pc, call)
    allowed = r" or pc\.ANY_TAG" if name in ("tag", "recv_tag") and call != "send" else ""
    for tag in (-1, MPI.ANY_TAG, 2**40):
        with pytest.raises(ValueError, match=rf"{call}: expected {name} from 0 to \d+{allowed}, got {tag} \(rank"):
            function(1.0, world, **{name: tag}, **others)
    for constant in (None, pc.PROC_NULL):
        remedy = r"Pass pycollective\.ANY_TAG for any tag\." if allowed else r"Pass a number\."
        with pytest.raises(TypeError, match=rf"{name} from 0 to \d+{allowed}, got {constant} \(.*\)\. {remedy}"):
            function(1.0, world, **{name: constant}, **others)


def test_sendrecv_with_any_tag(world: pc.Communicator) -> None:
    other = world.size - 1 - world.rank
    y = pc.sendrecv(jnp.asarray(world.rank), world, source=other, dest=other, send_tag=9, recv_tag=pc.ANY_TAG)
    assert y == other
    with pytest.raises(
        NotImplementedError, match=r"a number as recv_tag under reverse-mode differentiation, got pc\.ANY_TAG"
    ):
        f = lambda x: pc.sendrecv(x, world, source=other, dest=other, recv_tag=pc.ANY_TAG)
        jax.eval_shape(jax.grad(f), jax.ShapeDtypeStruct((), jnp.float32))


def test_pytrees_of_messages(world: pc.Communicator) -> None:
    other = world.size - 1 - world.rank
    tree = {"a": jnp.full(2, world.rank), "b": [jnp.asarray(True)]}
    y = pc.sendrecv(tree, world, source=other, dest=other)
    assert y["a"].tolist() == [other] * 2
    assert y["b"][0].dtype == jnp.bool_


OTHERS = {
    "shorter": np.ones(5, np.float32),
    "longer": np.ones(7, np.float32),
    "far longer": np.ones(1 << 20, np.float32),
    "of another shape": np.ones((3, 2), np.float32),
    "of another dtype": np.ones((2, 3), np.int32),
    "of bytes": np.ones((2, 3, 4), np.uint8),
    "empty": np.ones((0, 3), np.float32),
}
LIKE = np.ones((2, 3), np.float32)


@needs_two
@pytest.mark.native
@pytest.mark.skipif(config.check.when < 2, reason="LOUD: PYCOLLECTIVE_CHECK leaves messages out")
@pytest.mark.parametrize("jit", [lambda f: f, jax.jit], ids=["outside jit", "in jit"])
@pytest.mark.parametrize("call", ["recv", "recv from any", "sendrecv"])
@pytest.mark.parametrize("other", OTHERS)
def test_a_message_of_another_kind(jit: Any, call: str, other: str, world: pc.Communicator) -> None:
    """The receiver gets an error that names both ends, the sender none, and the next message is right."""
    sent = OTHERS[other]

    @jit
    def receives(x: jax.Array) -> jax.Array:
        if call == "sendrecv":
            return pc.sendrecv(x, world, source=0, dest=0)
        return pc.recv(x, world, source=0) if call == "recv" else pc.recv(x, world)

    @jit
    def sends(x: jax.Array) -> None:
        pc.send(x, world, dest=1)

    if world.rank == 0:
        got = pc.sendrecv(sent, world, source=1, dest=1, like=LIKE) if call == "sendrecv" else sends(sent)
        assert call != "sendrecv" or np.array_equal(got, LIKE)
        sends(2 * LIKE)
    elif world.rank == 1:
        line = r"test_messages.py:\d+ \(test_a_message_of_another_kind.<locals>.receives\)"
        there = re.escape(f"{sent.dtype}[{','.join(map(str, sent.shape))}]") + r" at test_messages.py:\d+ "
        message = rf"expected a message of float32\[2,3\] at {line}, got one of {there}\(.*\) from rank 0 \(rank 1 of"
        with pytest.raises(RUNTIME_ERRORS, match=message):
            receives(LIKE).block_until_ready()
        np.testing.assert_array_equal(pc.recv(LIKE, world, source=0), 2 * LIKE)


# In bytes. Messages change their form at 16, 32 and 256 KiB (native/calls/messages.cc).
LENGTHS = [0, 1, *(limit * 1024 + more for limit in (16, 32, 256) for more in (-1, 0, 1)), 1 << 20]


def message_of(nbytes: int, number: int) -> np.ndarray:
    """Bytes of which no two neighbours in memory, or in two messages, are alike."""
    return (np.arange(nbytes, dtype=np.uint32) * 7 + 31 * number).astype(np.uint8)


@needs_two
def test_messages_of_all_lengths(world: pc.Communicator) -> None:
    """Each comes whole, by each kind of call, and its status says its length."""
    if world.rank > 1:
        return
    for nbytes in LENGTHS:
        own, other = (message_of(nbytes, rank) for rank in (world.rank, 1 - world.rank))
        status = MPI.Status()
        got = pc.sendrecv(own, world, source=1 - world.rank, dest=1 - world.rank, status=status)
        np.testing.assert_array_equal(got, other, err_msg=f"{nbytes} B, sendrecv")
        assert status.Get_count(MPI.BYTE) == nbytes
        if world.rank == 0:
            pc.send(own, world, dest=1, tag=5)
        else:
            status = MPI.Status()
            got = pc.recv(other, world, tag=5, status=status)
            np.testing.assert_array_equal(got, other, err_msg=f"{nbytes} B, recv")
            assert (status.Get_source(), status.Get_tag(), status.Get_count(MPI.BYTE)) == (0, 5, nbytes)


@needs_two
@pytest.mark.native
@pytest.mark.skipif(config.check.when < 2, reason="LOUD: PYCOLLECTIVE_CHECK leaves messages out")
def test_a_message_of_another_length(world: pc.Communicator) -> None:
    """Of each length where another is expected: the receiver gets the error, and the next message is right."""
    for sent, expected in itertools.permutations([1, 30_000, 200_000, 250_000, 300_000], 2):
        if world.rank == 0:
            pc.send(message_of(sent, 1), world, dest=1)
            pc.send(message_of(expected, 2), world, dest=1)
        elif world.rank == 1:
            like = message_of(expected, 2)
            message = rf"expected a message of uint8\[{expected}\] at .*, got one of uint8\[{sent}\] at"
            with pytest.raises(RUNTIME_ERRORS, match=message):
                pc.recv(like, world, source=0).block_until_ready()
            np.testing.assert_array_equal(pc.recv(like, world, source=0), like, err_msg=f"after {sent} B")


@needs_two
@pytest.mark.native
@pytest.mark.skipif(config.check.when < 2, reason="LOUD: PYCOLLECTIVE_CHECK leaves messages out")
def test_random_keys_where_numbers_are_expected(world: pc.Communicator) -> None:
    """MPI sends them as integers, in a second message: the sender does not wait for a receiver that got an error."""
    keys = jax.random.split(jax.random.key(0), 100_000)
    if world.rank == 0:
        pc.send(keys, world, dest=1)
        pc.send(LIKE, world, dest=1)
    elif world.rank == 1:
        with pytest.raises(RUNTIME_ERRORS, match=r"expected a message of float32\[2,3\] at .*, got one of "):
            pc.recv(LIKE, world, source=0).block_until_ready()
        np.testing.assert_array_equal(pc.recv(LIKE, world, source=0), LIKE)


@needs_two
@pytest.mark.native
@pytest.mark.skipif(config.check.when < 2, reason="LOUD: PYCOLLECTIVE_CHECK leaves messages out")
def test_a_tree_without_arrays_is_a_message(world: pc.Communicator) -> None:
    if world.rank < 2:
        assert pc.sendrecv({}, world, source=1 - world.rank, dest=1 - world.rank) == {}
    if world.rank == 0:
        for sent in ([], [], LIKE):
            pc.send(sent, world, dest=1)
    elif world.rank == 1:
        assert pc.recv([], world, source=0) == []
        with pytest.raises(RUNTIME_ERRORS, match=r"a message of float32.*, got one of an empty tree at test_messages"):
            pc.recv(LIKE, world, source=0).block_until_ready()
        with pytest.raises(RUNTIME_ERRORS, match=r"a message of an empty tree at .*, got one of float32\[2,3\] at"):
            pc.recv([], world, source=0)


@needs_two
@pytest.mark.native
def test_messages_from_any_rank_come_whole(world: pc.Communicator) -> None:
    """What a message is and its data come from one sender, in the order in which the messages were sent."""
    world = world.split(0)
    if world.rank > 0:
        for number in range(20):
            pc.send(np.full(4, 100 * world.rank + number, np.int32), world, dest=0, tag=number)
        return
    last = dict.fromkeys(range(1, world.size), -1)
    for _ in range(20 * (world.size - 1)):
        status = MPI.Status()
        y = np.asarray(pc.recv(np.zeros(4, np.int32), world, status=status))
        assert set(y.tolist()) == {100 * status.Get_source() + status.Get_tag()}
        assert status.Get_tag() == last[status.Get_source()] + 1
        last[status.Get_source()] += 1


@needs_two
@pytest.mark.native
def test_a_sendrecv_meets_a_recv_and_a_send(world: pc.Communicator) -> None:
    """More than MPI buffers: the sendrecv must send all before it has received anything."""
    x = jnp.full(1 << 20, float(world.rank))
    if world.rank == 0:
        assert float(pc.sendrecv(x, world, source=1, dest=1)[-1]) == 1.0
    elif world.rank == 1:
        assert float(pc.recv(x, world, source=0)[-1]) == 0.0
        pc.send(x, world, dest=0)


@needs_two
def test_a_shorter_message_is_an_error(world: pc.Communicator) -> None:
    """Also where messages are not compared: by mpi4jax, or with PYCOLLECTIVE_CHECK=first."""
    if world.rank == 0:
        pc.send(jnp.zeros(2), world, dest=1)
    elif world.rank == 1:
        unchecked = r"MPI_Recv: expected 3 elements, got a shorter message of 2"
        with pytest.raises(
            RUNTIME_ERRORS, match=rf"recv: ({unchecked}|CollectiveMismatch: expected a message of .*) \(rank 1 of"
        ):
            pc.recv(jnp.zeros(3), world, source=0).block_until_ready()


def test_barrier_waits_for_the_last_rank(world: pc.Communicator) -> None:
    pc.barrier(world)
    if world.rank == world.size - 1:
        time.sleep(0.3)
    came = time.monotonic()
    pc.barrier(world)
    left = time.monotonic()
    # The ranks run on one host, whose processes share CLOCK_MONOTONIC.
    arrivals = world.mpi.allgather(came)
    assert left >= max(arrivals)


def test_barrier_in_a_program_without_results(world: pc.Communicator) -> None:
    assert pc.jit(lambda x: pc.barrier(world))(1.0) is None
    assert jax.jit(lambda x: pc.barrier(world))(1.0) is None
