"""Names to the native library the members of each set of processes for which XLA will want an MPI communicator.

XLA calls such a set a clique. It asks for a communicator when a program first needs it, and then names neither the
members nor their number (``native/xla/xla_mpi.cc``). The compiled program names them, in the groups of its collectives.
So each program is read before it first runs. For a clique that is new here, a program of that clique alone then lets
XLA ask while the answer is known. That program sends nothing: a process may compile alone.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pycollective.distributed.program_collectives import Collective, collectives_in
from pycollective.errors import fail
from pycollective.jax_support import jax_dispatch
from pycollective.jax_support.jaxprs import NO_MESH
from pycollective.jax_support.program_text import without_metadata
from pycollective.ranks.communicator import Communicator
from pycollective.transport import native

Clique = tuple[jax.Device, ...]

_WHERE = "distributed"

_OUR_CALL = 'custom_call_target="pycollective_'

_LARGEST_COUNT = 2**32 - 1
"""XLA hands MPI the lower half of a count."""


class Cliques:
    """The cliques of this process that the native library knows.

    Args:
        world: the communicator of all processes; the number of a process is its rank.
    """

    def __init__(self, world: Communicator) -> None:
        self._world = world
        self._known: set[Clique] = set()
        self._lock = threading.Lock()
        self._asked: queue.SimpleQueue[tuple[Clique, Future[None]]] = queue.SimpleQueue()
        # A thread of its own has none of the contexts of the thread that compiles, such as jax.set_mesh. A pool of
        # concurrent.futures would not serve programs in exit handlers.
        self._teacher = threading.Thread(target=self._teach_all, name="pycollective-cliques", daemon=True)
        self._teacher.start()

    def learn_from(self, executable: Any, devices: Any) -> None:
        """Learns the cliques of a compiled program.

        Args:
            executable: what JAX got from XLA.
            devices: its devices, in their order.
        """
        order = list(devices.flat)
        if order[0].platform != "cpu" or threading.current_thread() is self._teacher:
            return
        for module in executable.hlo_modules():
            text = without_metadata(module.to_string())
            collectives = list(collectives_in(text, len(order)))
            cliques = {tuple(order[place] for place in group) for one in collectives for group in one.groups}
            if any(len(clique) > 1 for clique in cliques):
                self._check(module.name, text, collectives)
            for clique in sorted(cliques, key=lambda clique: [device.id for device in clique]):
                if any(device.process_index == self._world.rank for device in clique):
                    self._learn(clique)

    def _check(self, name: str, text: str, collectives: Sequence[Collective]) -> None:
        """Refuses a program over several processes that would give wrong numbers, or wait for ever.

        Nothing orders XLA's collectives and ours, one kind after the other. A rank may start with XLA's and another one
        with ours; if XLA has no other thread for the second call, both wait.
        """
        if _OUR_CALL in text:
            expected = "collectives of one kind in a program over several processes"
            remedy = (
                "Write jax.lax's with the mesh's axes for all of them, or put this package's into a pc.jit of their "
                "own. XLA adds its own where arrays change their sharding."
            )
            fail(RuntimeError, _WHERE, self._world, expected, f"JAX's own and this package's in {name}", remedy)
        large = max(collectives, key=lambda one: one.largest)
        if large.largest > _LARGEST_COUNT:
            expected = "fewer than 2^32 elements of a sum, or bytes of what moves, on each process"
            remedy = "XLA hands MPI no larger counts: cut the array into pieces, or start more processes."
            fail(RuntimeError, _WHERE, self._world, expected, f"{large.largest} in an {large.kind} of {name}", remedy)

    def _learn(self, clique: Clique) -> None:
        with self._lock:
            if clique not in self._known:
                taught: Future[None] = Future()
                self._asked.put((clique, taught))
                taught.result()
                self._known.add(clique)

    def _teach_all(self) -> None:
        """Teaches one clique after another."""
        while True:
            clique, taught = self._asked.get()
            try:
                self._teach(clique)
            except BaseException as error:
                taught.set_exception(error)
            else:
                taught.set_result(None)

    def _teach(self, clique: Clique) -> None:
        """Lets XLA ask for the communicator of a clique."""
        members = tuple(device.process_index for device in clique)
        number, fingerprint = self._world._key_of(members, None, 1)
        # The user may have set these for all threads.
        with jax.sharding.use_abstract_mesh(NO_MESH), jax.transfer_guard("allow"), jax.disable_jit(False):
            gather, x = _program_of(clique)
            with native.xla_learns(number, fingerprint, np.asarray(x.addressable_data(0))[0]):
                jax.block_until_ready(gather(x))


def _program_of(clique: Clique) -> tuple[Any, jax.Array]:
    """A program whose only collective is of this clique, and its operand; this process's part of it is random.

    XLA would take a sum over one device out of a program; it leaves an all_gather.
    """
    mesh = Mesh(np.array(clique), ("clique",))
    sharding = NamedSharding(mesh, PartitionSpec("clique"))
    own = np.frombuffer(np.random.default_rng().bytes(4 * native.XLA_MARK_COUNT), np.uint32)[None]
    x = jax.make_array_from_callback((len(clique), native.XLA_MARK_COUNT), sharding, lambda _: own)
    gather = functools.partial(jax.lax.all_gather, axis_name="clique")
    gathered = jax.shard_map(gather, mesh=mesh, in_specs=sharding.spec, out_specs=sharding.spec)
    return jax.jit(gathered).lower(x).compile(), x


def learn_from_each_compilation(cliques: Cliques) -> None:
    """From now on, each program that this process compiles is read before it runs."""
    jax_dispatch.see_each_compilation(after=cliques.learn_from)
