"""mpi4jax's calls and ours keep one order: inside a program, in all that may hold calls, and between programs.

Rank 0 sends to rank 1 by turns with the two packages, on one MPI communicator and under one tag. MPI keeps the order of
such messages, so a message that was sent or received too early shows in the numbers that arrive. A message of ours must
be one of MPI's for that: ``PYCOLLECTIVE_CHECK=first``.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import mpi4jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import pycollective as pc
from pycollective.config import config
from pycollective.ordering.effect import effect

assert config.check.when < 2, "these tests need PYCOLLECTIVE_CHECK=first"

Array = Any
TAG = 7
MESSAGES = 4


def slow(x: Array) -> Array:
    """Zero, after some time."""
    return 0 * lax.fori_loop(0, 3, lambda _, m: jnp.tanh(m @ m), x)[0, 0]


def turns(start: Array, x: Array) -> Array:
    """Sends ``start``, ``start + 1``, ... from rank 0 to rank 1; returns these numbers, on rank 1 as they arrive.

    What this package sends is ready late, so mpi4jax's messages would overtake it. Rank 1 receives with the other
    package than rank 0 sends with.
    """
    world = pc.world()
    calls = world._resources.calls  # the MPI communicator on which the programs of one device send
    start = jnp.asarray(start, jnp.float32)
    numbers = []
    for i in range(MESSAGES):
        number = start + i
        if world.rank == 0 and i % 2 == 0:
            pc.send(number + slow(x), world, dest=1, tag=TAG)
        elif world.rank == 0:
            mpi4jax.send(number, dest=1, tag=TAG, comm=calls)
        elif world.rank == 1 and i % 2 == 0:
            number = mpi4jax.recv(number, source=0, tag=TAG, comm=calls)
        elif world.rank == 1:
            number = pc.recv(number + slow(x), world, source=0, tag=TAG)
        numbers.append(number)
    return jnp.stack(numbers)


Turns = Callable[[Array, Array], Array]
STEPS = 3
STARTS = MESSAGES * jnp.arange(float(STEPS))


def plain(f: Turns) -> Callable[[Array], Array]:
    return lambda x: jnp.stack([f(start, x) for start in STARTS])


def in_scan(f: Turns) -> Callable[[Array], Array]:
    return lambda x: lax.scan(lambda c, start: (c, f(start, x)), 0.0, STARTS)[1]


def in_fori_loop(f: Turns) -> Callable[[Array], Array]:
    def loop(x: Array) -> Array:
        body = lambda i, out: out.at[i].set(f(MESSAGES * i, x))
        return lax.fori_loop(0, STEPS, body, jnp.zeros((STEPS, MESSAGES)))

    return loop


def in_while_loop(f: Turns) -> Callable[[Array], Array]:
    def loop(x: Array) -> Array:
        body = lambda c: (c[0] + 1, c[1].at[c[0]].set(f(MESSAGES * c[0], x)))
        return lax.while_loop(lambda c: c[0] < STEPS, body, (0, jnp.zeros((STEPS, MESSAGES))))[1]

    return loop


def in_cond(f: Turns) -> Callable[[Array], Array]:
    other = lambda start, x: jnp.zeros(MESSAGES)
    return lambda x: jnp.stack([lax.cond(x[0, 0] < 1e6, f, other, start, x) for start in STARTS])


def in_switch(f: Turns) -> Callable[[Array], Array]:
    other = lambda start, x: jnp.zeros(MESSAGES)
    return lambda x: jnp.stack([lax.switch(jnp.int32(x[0, 0] < 1e6), [other, f, other], s, x) for s in STARTS])


def in_nested_jit(f: Turns) -> Callable[[Array], Array]:
    inner = jax.jit(jax.jit(f))
    return lambda x: jnp.stack([inner(start, x) for start in STARTS])


def in_function_of_ours(f: Turns) -> Callable[[Array], Array]:
    inner = pc.jit(f)
    return lambda x: jnp.stack([inner(start, x) for start in STARTS])


def in_checkpoint(f: Turns) -> Callable[[Array], Array]:
    inner = jax.checkpoint(f)
    return lambda x: jnp.stack([inner(start, x) for start in STARTS])


def in_custom_vjp(f: Turns) -> Callable[[Array], Array]:
    """Both directions send: the calls of the backward pass come after all of the forward pass."""
    g = jax.custom_vjp(f)
    g.defvjp(lambda start, x: (f(start, x), x), lambda x, ct: (f(ct[0], x)[0], jnp.zeros_like(x)))

    def both(x: Array) -> Array:
        ys, back = jax.vjp(lambda starts: jnp.stack([g(start, x) for start in starts]), STARTS)
        (starts,) = back(ys)  # JAX goes backward from the last call
        return jnp.where(jnp.all(starts == STARTS), ys, jnp.nan)

    return both


PLACES = (
    plain, in_scan, in_fori_loop, in_while_loop, in_cond, in_switch, in_nested_jit, in_function_of_ours, in_checkpoint,
    in_custom_vjp,
)  # fmt: skip


def on_one_device(f: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return lambda x: pc.pmap(f, "i")(x[None])[0]


COMPILERS = {"pc.jit": pc.jit, "jax.jit": jax.jit}
WANT = np.arange(STEPS * MESSAGES, dtype=np.float32).reshape(STEPS, MESSAGES)


@pytest.fixture
def x(world: pc.Communicator) -> Array:
    if world.size == 1:
        pytest.skip("LOUD: needs two ranks")
    return jnp.eye(120) / 100


@pytest.mark.parametrize("compiler", COMPILERS.values(), ids=list(COMPILERS))
@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_inside_a_program(place: Any, compiler: Any, x: Array) -> None:
    f = compiler(place(turns))
    for _ in range(3):
        np.testing.assert_array_equal(f(x), WANT)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
def test_a_program_has_one_effect(place: Any, x: Array) -> None:
    assert jax.make_jaxpr(place(turns))(x).jaxpr.effects == {effect}


@pytest.mark.parametrize("place", [plain, in_scan, in_nested_jit], ids=lambda place: place.__name__)
def test_under_pmap_with_one_device(place: Any, x: Array) -> None:
    np.testing.assert_array_equal(on_one_device(place(turns))(x), WANT)


def test_eagerly(x: Array) -> None:
    np.testing.assert_array_equal(plain(turns)(x), WANT)


def test_named_axes_in_between(world: pc.Communicator) -> None:
    @pc.jit(axis_name="i")
    def f(a: Array, b: Array) -> Array:
        first = lax.psum(a, "i")
        between = mpi4jax.allreduce(b, op=MPI.SUM)
        return first[:1] + between + lax.psum(b, "i") + mpi4jax.allreduce(a, op=MPI.SUM)[:1]

    args = jnp.ones(30_000), jnp.ones(3)
    np.testing.assert_allclose(f(*args), 4.0 * world.size)
    # The two sums of ours are not joined into one, since a call of theirs lies between.
    calls = re.findall(r"custom_call @(\w*allreduce\w*)", f.lower(*args).as_text())
    assert calls == ["pycollective_allreduce", "mpi_allreduce_ffi"] * 2


def test_derivatives_of_both(world: pc.Communicator) -> None:
    def loss(x: Array) -> Array:
        y = mpi4jax.allreduce(x**2, op=MPI.SUM)
        other = mpi4jax.sendrecv(y, y, (world.rank - 1) % world.size, (world.rank + 1) % world.size)
        return jnp.sum(pc.psum(other * x, world))

    x = jnp.arange(1.0, 4.0)
    # d/dx of n * (y x), and of y by the sum over x itself alone, whose transpose is the identity.
    n = world.size
    for compiler in (pc.jit, jax.jit, lambda f: f):
        np.testing.assert_allclose(compiler(jax.grad(loss))(x), n * (n * x**2) + 2 * n * x**2, rtol=1e-5)


def test_calls_that_a_checkpoint_repeats(world: pc.Communicator) -> None:
    def inner(x: Array) -> Array:
        return jnp.sin(pc.psum(jnp.sin(mpi4jax.allreduce(x, op=MPI.SUM)), world) / world.size)

    x = jnp.arange(3.0)
    for f in (inner, lambda x: jnp.sin(mpi4jax.allreduce(x, op=MPI.SUM))):
        loss = lambda x, f: jnp.sum(f(x) ** 2)
        want = jax.grad(loss)(x, f)
        for compiler in (pc.jit, jax.jit):
            got = compiler(jax.grad(lambda x, f=f: loss(x, jax.checkpoint(f))))(x)
            np.testing.assert_allclose(got, want, rtol=1e-5)


def test_between_programs(x: Array, world: pc.Communicator) -> None:
    """XLA does not order programs on different devices: a dispatch of one package waits for the other's programs."""
    devices = jax.devices()[:2]
    assert len(devices) == 2, "needs JAX_NUM_CPU_DEVICES=2 or more"
    here, there = (jax.device_put(jnp.eye(200) / 100, device) for device in devices)
    first = [jax.device_put(jnp.zeros((1, 1)), device) for device in devices]
    calls = world._resources.calls
    ours = pc.jit(lambda number, x: pc.send(number + slow(x), world, dest=1, tag=TAG))
    theirs = jax.jit(lambda number, x: mpi4jax.send(number + slow(x), dest=1, tag=TAG, comm=calls))
    both = pc.jit(lambda n, x: [pc.send(n + slow(x), world, dest=1, tag=TAG), mpi4jax.send(n, 1, tag=TAG, comm=calls)])
    sends = [
        lambda n: ours(n, there),  # a late message of ours, then one of theirs on another device
        lambda n: theirs(n, first[0]),
        lambda n: ours(n, first[1]),
        lambda n: theirs(n, here),  # a late message of theirs, then one of ours on another device
        lambda n: ours(n, first[1]),
        lambda n: both(n, there),
        lambda n: mpi4jax.send(n, 1, tag=TAG, comm=calls),
        lambda n: theirs(n, here),
        lambda n: pc.send(jax.device_put(n, devices[1]), world, dest=1, tag=TAG),
    ]
    count = len(sends) + 1
    for step in range(3):
        numbers = [np.float32(count * step + i) for i in range(count)]
        if world.rank == 0:
            for i, send in enumerate(sends):
                send(numbers[i])
        elif world.rank == 1:
            got = [pc.recv(number, world, source=0, tag=TAG) for number in numbers[: count // 2]]
            got += [mpi4jax.recv(number, source=0, tag=TAG, comm=calls) for number in numbers[count // 2 :]]
            want = [count * step + i - (i > 5) for i in range(count)]  # `both` sends one number twice
            np.testing.assert_array_equal(got, want)


def test_what_cannot_be_ordered_is_refused(world: pc.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "i")
    for f in (lambda x: mpi4jax.allreduce(x, op=MPI.SUM), lambda x: jax.jit(mpi4jax.bcast, static_argnums=1)(x, 0)):
        with pytest.raises(NotImplementedError, match="expected mpi4jax's calls in programs on one device of each"):
            jax.jit(jax.shard_map(f, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=False))(jnp.ones(2))
    # Another version of mpi4jax, whose effect has another class or another hash.
    known = type(mpi4jax._src.utils.ordered_effect)
    other = type("OtherEffect", (known,), {"__module__": "mpi4jax.other"})()
    module = sys.modules["mpi4jax._src.collective_ops.allreduce"]
    for target, name, value in ((module, "ordered_effect", other), (known, "__hash__", lambda self: 1)):
        with monkeypatch.context() as patch:
            patch.setattr(target, name, value)
            with pytest.raises(RuntimeError, match="expected mpi4jax 0.9, whose calls keep one order with ours, got"):
                jax.make_jaxpr(lambda x: mpi4jax.allreduce(x, op=MPI.SUM))(1.0)
