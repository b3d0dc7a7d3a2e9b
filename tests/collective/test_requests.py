"""isend, irecv, isendrecv and wait: messages that travel between two places of a program."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from mpi4py import MPI

import pycollective as pc
from tests.collective.programs import RUNTIME_ERRORS

Array = Any

pytestmark = pytest.mark.native
needs_two = pytest.mark.skipif(MPI.COMM_WORLD.size < 2, reason="LOUD: needs two ranks (run under mpirun -n 2)")

SIZES = (3, 6000, 200_000)
"""Lengths of float32 arrays: their messages have one part or two, and go with or without the thread of progress."""


def neighbours(comm: pc.Communicator) -> tuple[int, int]:
    return (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size


def numbers(rank: int, length: int, kind: int = 0) -> Array:
    return jnp.arange(length, dtype=jnp.float32) % 97 + 1000 * rank + 100_000 * kind


def test_no_order_of_calls_is_a_deadlock(comm: pc.Communicator) -> None:
    """All ranks send first, or receive first, or wait in another order than they start; also large arrays."""
    below, above = neighbours(comm)

    def exchange(xs: list[Array], *, sends_first: bool) -> list[Array]:
        if sends_first:
            sent = [pc.isend(x, comm, dest=above) for x in xs]
        received = [pc.irecv(jnp.zeros_like(x), comm, source=below) for x in xs]
        if not sends_first:
            sent = [pc.isend(x, comm, dest=above) for x in xs]
        total = pc.psum(xs[0][0], comm)  # a collective in between
        last_first = [pc.wait(request) for request in received[::-1]]
        assert pc.wait(sent) == [None] * len(xs)
        return [total, *last_first]

    xs = [numbers(comm.rank, length) for length in SIZES]
    total = sum(1000.0 * rank for rank in range(comm.size))
    for run in (pc.jit, jax.jit, lambda f: f):
        for sends_first in (True, False):
            got, *arrived = run(partial(exchange, sends_first=sends_first))(xs)
            assert got == total
            for y, length in zip(arrived[::-1], SIZES, strict=True):
                np.testing.assert_array_equal(y, numbers(below, length))


def test_messages_keep_their_order(comm: pc.Communicator) -> None:
    """Of one sender with one tag, whatever their lengths; waiting and other calls match each other."""
    below, above = neighbours(comm)
    lengths = (200_000, 3, 6000, 200_000)

    @pc.jit
    def program(xs: list[Array]) -> list[Array]:
        first = pc.isend(xs[0], comm, dest=above, tag=5)
        rest = [pc.isend(x, comm, dest=above, tag=5) for x in xs[1:]]
        early = pc.irecv(jnp.zeros_like(xs[0]), comm, source=below, tag=5)
        own = [pc.recv(jnp.zeros_like(xs[1]), comm, source=below, tag=5)] if comm.size > 1 else []
        late = [pc.irecv(jnp.zeros_like(x), comm, source=below, tag=5) for x in xs[1 + len(own) :]]
        arrived = [pc.wait(early), *own, *pc.wait(late)]
        pc.wait([first, *rest])
        last = pc.isend(xs[0], comm, dest=above)
        got = pc.recv(jnp.zeros_like(xs[0]), comm, source=below)
        pc.wait(last)
        return [*arrived, got]

    arrived = program([numbers(comm.rank, length, kind) for kind, length in enumerate(lengths)])
    for kind, (y, length) in enumerate(zip(arrived[:-1], lengths, strict=True)):
        np.testing.assert_array_equal(y, numbers(below, length, kind))
    np.testing.assert_array_equal(arrived[-1], numbers(below, lengths[0]))


def test_a_request_is_a_value(world: pc.Communicator) -> None:
    """It goes through programs, a scan and a cond; trees, other dtypes, keys, no rank, no arrays."""
    below, above = neighbours(world)
    swap = partial(pc.isendrecv, comm=world, source=below, dest=above)

    @jax.jit
    def start(x: Array) -> pc.Request:
        request = lax.cond(
            x[0] >= 0,
            lambda: swap({"x": x, "half": x.astype(jnp.bfloat16)}),
            lambda: swap({"x": x, "half": x.astype(jnp.bfloat16) + 1}),
        )

        def step(request: pc.Request, _: None) -> tuple[pc.Request, Array]:
            y = pc.wait(request)
            return swap({"x": y["x"] + 1, "half": y["half"]}), y["x"][0]

        return lax.scan(step, request, length=3)[0]

    request = start(jnp.full(3, float(world.rank)))
    assert repr(request) == f"Request(isendrecv on {world!r})"
    y = jax.jit(pc.wait)(request)
    origin = (world.rank - 4) % world.size
    assert (y["x"].tolist(), y["half"].tolist()) == ([origin + 3] * 3, [origin] * 3)
    assert y["half"].dtype == jnp.bfloat16
    text = r"wait: expected a request whose messages are under way, got one that was waited for.*Wait once for each"
    with pytest.raises(RUNTIME_ERRORS, match=text):
        jax.block_until_ready(pc.wait(request))
    nothing = jax.tree.map(jnp.zeros_like, request)
    assert pc.wait(nothing)["x"].tolist() == [0, 0, 0]

    key = pc.wait(swap(jax.random.key(world.rank)))
    assert jax.random.key_data(key).tolist() == [0, below]
    keys = jax.random.split(jax.random.key(world.rank, impl="rbg"), 2)
    like = jax.ShapeDtypeStruct(keys.shape, keys.dtype)
    sent = pc.isend(keys, world, dest=above)
    got = jax.jit(lambda: pc.wait(pc.irecv(like, world, source=below)))()  # keys of which only the dtype is known
    pc.wait(sent)
    expected = jax.random.split(jax.random.key(below, impl="rbg"), 2)
    assert got.dtype == keys.dtype
    np.testing.assert_array_equal(jax.random.key_data(got), jax.random.key_data(expected))
    swapped = pc.sendrecv(keys, world, source=below, dest=above, like=like)
    np.testing.assert_array_equal(jax.random.key_data(swapped), jax.random.key_data(expected))
    assert pc.wait(swap({})) == {}
    null = pc.PROC_NULL
    alone = pc.isend(jnp.ones(3), dest=null), pc.irecv(jnp.full(2, 7), source=null)
    sent, kept = pc.wait(alone)
    assert (sent, kept.tolist()) == (None, [7, 7])
    template = jax.ShapeDtypeStruct((2,), jnp.int32)
    assert pc.wait(pc.isendrecv(jnp.ones(2, int), source=null, dest=null, like=template)).tolist() == [0, 0]
    pc.barrier()


def test_cotangents_travel_the_other_way(world: pc.Communicator) -> None:
    """In a chain with open ends, through a scan that carries the request, by both modes, and batched."""
    n, rank = world.size, world.rank
    below = rank - 1 if rank > 0 else pc.PROC_NULL
    above = rank + 1 if rank < n - 1 else pc.PROC_NULL

    def chained(x: Array) -> Array:
        start = lambda x: pc.isendrecv(x, world, source=below, dest=above, send_tag=1, recv_tag=1)

        def step(request: pc.Request, _: None) -> tuple[pc.Request, Array]:
            y = pc.wait(request)
            return start(y * y), y

        last, ys = lax.scan(step, start(x), length=2)
        return jnp.concatenate([ys.ravel(), pc.wait(last).ravel()])

    def reference(xs: Array) -> Array:
        def shift(xs: Array) -> Array:
            return jnp.concatenate([jnp.zeros_like(xs[:1]), xs[:-1]])

        ys = [shift(xs)]
        for _ in range(2):
            ys.append(shift(ys[-1] ** 2))
        return jnp.concatenate([y.reshape(n, -1) for y in ys], axis=1)

    xs = jnp.asarray(np.random.default_rng(0).uniform(0.5, 1.5, (n, 3)), jnp.float32)

    @pc.jit
    def everything(x: Array) -> Any:
        loss = lambda x: jnp.sum(chained(x) ** 2)
        batch = jax.vmap(jax.grad(loss), in_axes=1, out_axes=1)(jnp.stack([x, 2 * x], axis=1))
        return chained(x), jax.grad(loss)(x), jax.jvp(chained, (x,), (x,))[1], batch

    y, gradient, tangent, batch = everything(xs[rank])
    loss_of_all = lambda xs: jnp.sum(reference(xs) ** 2)
    np.testing.assert_allclose(y, reference(xs)[rank], rtol=1e-6)
    np.testing.assert_allclose(gradient, jax.grad(loss_of_all)(xs)[rank], rtol=1e-5)
    np.testing.assert_allclose(tangent, jax.jvp(reference, (xs,), (xs,))[1][rank], rtol=1e-5)
    np.testing.assert_allclose(batch[:, 1], jax.grad(loss_of_all)(2 * xs)[rank], rtol=1e-5)
    with pytest.raises(NotImplementedError, match=r"isend: expected a differentiable operation.*Use isendrecv"):
        jax.grad(lambda x: (pc.isend(x, world, dest=(rank + 1) % n), jnp.sum(x))[1])(xs[rank])


def test_a_batch_is_one_message(world: pc.Communicator) -> None:
    below, above = neighbours(world)

    def exchange(x: Array) -> Array:
        requests = pc.isend(x, world, dest=above), pc.irecv(x, world, source=below)
        return pc.wait(requests)[1]

    x = numbers(world.rank, 12).reshape(3, 4)
    np.testing.assert_array_equal(jax.jit(jax.vmap(exchange, 1, 1))(x), numbers(below, 12).reshape(3, 4))


@needs_two
def test_a_wait_comes_after_what_it_is_to_come_after(world: pc.Communicator) -> None:
    """Rank 1 sends when the computation on rank 0 has told it to."""
    if world.rank == 0:

        def tell(x: Array) -> Array:
            world.mpi.send("computed", 1)
            return x

        def program(x: Array) -> Array:
            request = pc.irecv(x, world, source=1)
            computed = jax.pure_callback(tell, x, jnp.sin(x))
            return pc.wait(request, after=computed) + computed

        assert jax.jit(program)(jnp.zeros(5)).tolist() == [1] * 5
    if world.rank == 1:
        end = time.monotonic() + 10
        while not (told := world.mpi.iprobe(0)) and time.monotonic() < end:
            time.sleep(0.01)
        pc.send(jnp.full(5, 1.0 if told else 2.0), world, dest=0)  # 2: rank 0 has waited first
        assert world.mpi.recv(source=0) == "computed"


@needs_two
def test_ends_that_differ(world: pc.Communicator) -> None:
    """The receiver gets the error, with both lines, whatever parts the messages have. The sender goes on."""
    part = world.split(color=world.rank // 2)
    assert part is not None
    for sent, expected in [(3, 4), (3, 200_000), (200_000, 3), (200_000, 300_000)]:
        if part.size > 1 and part.rank == 0:
            pc.wait(pc.isend(jnp.ones(sent), part, dest=1))
        if part.rank == 1:
            text = (
                rf"wait: CollectiveMismatch: expected a message of float32\[{expected}\] at test_requests.py:\d+ .*"
                rf"got one of float32\[{sent}\] at test_requests.py:\d+ .*from rank 0"
            )
            with pytest.raises(RUNTIME_ERRORS, match=text):
                jax.block_until_ready(pc.wait(pc.irecv(jnp.ones(expected), part, source=0)))
        pc.barrier()
    part.free()


@needs_two
@pytest.mark.parametrize(("first", "second"), [(200_000, 3), (3, 3), (200_000, 300_000)])
def test_a_mismatch_leaves_other_messages_alone(first: int, second: int, world: pc.Communicator) -> None:
    """Also of the same sender with the same tag, whatever the order of the waits; so does one of both ends at once."""
    mismatch = pytest.raises(RUNTIME_ERRORS, match="wait: CollectiveMismatch")
    if world.rank == 0:
        pc.wait([pc.isend(numbers(0, first), dest=1), pc.isend(numbers(0, second, 1), dest=1)])
    if world.rank == 1:
        wrong, right = pc.irecv(jnp.ones(100_000), source=0), pc.irecv(jnp.ones(second), source=0)
        np.testing.assert_array_equal(pc.wait(right), numbers(0, second, 1))
        with mismatch:
            jax.block_until_ready(pc.wait(wrong))
        small = [pc.irecv(jnp.ones(4), source=0) for _ in range(2)]
        pc.send(jnp.zeros(()), dest=0)
        with mismatch:
            jax.block_until_ready(pc.wait(small[0]))
        assert pc.wait(small[1]).tolist() == [5] * 4
    if world.rank == 0:
        pc.recv(jnp.zeros(()), source=1)
        pc.wait([pc.isend(jnp.ones(20_000), dest=1), pc.isend(jnp.full(4, 5.0), dest=1)])
    if world.rank < 2:
        other = 1 - world.rank
        for _ in range(10):
            with mismatch:
                x = jnp.ones(100_000 * (1 + world.rank))
                jax.block_until_ready(pc.wait(pc.isendrecv(x, source=other, dest=other)))
    pc.barrier()


def test_a_batch_whose_requests_differ(world: pc.Communicator) -> None:
    """Under vmap a cond over requests chooses among numbers of one message."""
    below, above = neighbours(world)

    def choose(chosen: Array, request: pc.Request) -> pc.Request:
        return lax.cond(chosen, lambda: request, lambda: jax.tree.map(jnp.zeros_like, request))

    x = numbers(world.rank, 6).reshape(2, 3)
    request = jax.jit(jax.vmap(lambda x: pc.isendrecv(x, world, source=below, dest=above)))(x)
    wait = jax.jit(jax.vmap(lambda chosen, request: pc.wait(choose(chosen, request))))
    for chosen in ([True, False], [False, True]):
        with pytest.raises(RUNTIME_ERRORS, match="wait: expected a batch whose elements have one request"):
            jax.block_until_ready(wait(jnp.array(chosen), request))
    np.testing.assert_array_equal(wait(jnp.array([True, True]), request), numbers(below, 6).reshape(2, 3))
    for wrong in (jnp.nan, 1e30, -1.0, 0.5):
        changed = jax.tree.map(lambda number: jnp.full_like(number[0], wrong), request)
        with pytest.raises(RUNTIME_ERRORS, match="wait: expected a request whose messages are under way"):
            jax.block_until_ready(pc.wait(changed))


def test_bad_arguments(world: pc.Communicator) -> None:
    x = jnp.ones(3)
    for error, words, call in [
        (TypeError, r"irecv: expected source from 0 .*got pc\.ANY_SOURCE", lambda: pc.irecv(x, source=pc.ANY_SOURCE)),
        (TypeError, r"irecv: expected tag from 0 .*got pc\.ANY_TAG", lambda: pc.irecv(x, source=0, tag=pc.ANY_TAG)),
        (ValueError, f"isend: expected dest from 0 .*got {world.size}", lambda: pc.isend(x, dest=world.size)),
        (TypeError, "wait: expected a pycollective.Request, or a pytree of them, got 3", lambda: pc.wait(3)),
        (ValueError, "isendrecv: expected like of the structure", lambda: pc.isendrecv(x, source=0, dest=0, like=[x])),
        (TypeError, "isend: expected arrays, or pytrees", lambda: pc.isend("x", dest=0)),
    ]:
        with pytest.raises(error, match=words):
            call()
