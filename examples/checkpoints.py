"""Checkpoints for the examples, by orbax: rank 0 writes and reads them, the others get them from it.

So only rank 0 must see the directory, and what is stored does not depend on the number of ranks.
"""

import signal
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp

import pycollective as pc

KEPT = 2


class Checkpoints:
    """The checkpoints of one training, or none where there is no directory.

    SIGUSR1 asks for one: batch systems can send it before they end a job (``slurm/requeue.sbatch``).
    """

    def __init__(self, directory, settings, comm):
        """``settings``: what the curve depends on, to be compared with those of a stored checkpoint."""
        self.settings, self.comm = settings, comm
        self.enabled = directory is not None
        self._manager = None
        self._asked = False
        if not self.enabled:
            return
        signal.signal(signal.SIGUSR1, self._ask)
        if comm.rank == 0:
            options = ocp.CheckpointManagerOptions(max_to_keep=KEPT)
            self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def _ask(self, *_):
        self._asked = True

    def asked(self):
        """Whether any rank was asked for a checkpoint; all ranks call it."""
        return self.enabled and bool(pc.pmax(np.int32(self._asked), self.comm))

    def restore(self, state):
        """The newest stored step and state, on all ranks; 0 and ``state`` itself where there is none."""
        step = self.comm.mpi.bcast(self._manager and self._manager.latest_step())
        if step is None:
            return 0, state
        stored = self.comm.mpi.bcast(self._manager and self._read(step, settings=ocp.args.JsonRestore()).settings)
        if stored != self.settings:
            error = (
                f"checkpoints: expected the settings of the checkpoint, {stored}, got {self.settings}. Choose those,"
            )
            sys.exit(f"{error} or another directory." if self.comm.rank == 0 else 1)
        if self._manager:
            # As NumPy arrays: orbax's lie on the first device, and several may be to compute with them.
            state = jax.tree.map(np.asarray, self._read(step, state=ocp.args.StandardRestore(state)).state)
        return step, pc.broadcast(state, self.comm)

    def _read(self, step, **items):
        return self._manager.restore(step, args=ocp.args.Composite(**items))

    def save(self, step, state):
        """Stores ``state``, the same on all ranks, as that before ``step``. Returns when it is on disk."""
        if self._manager and self._manager.latest_step() != step:
            items = ocp.args.Composite(state=ocp.args.StandardSave(state), settings=ocp.args.JsonSave(self.settings))
            self._manager.save(step, args=items)
            self._manager.wait_until_finished()
