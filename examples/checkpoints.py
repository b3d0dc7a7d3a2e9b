"""Checkpoints for the examples, made with orbax. Rank 0 writes and reads them, and sends what it reads to the others.

So only rank 0 must see the directory, and a checkpoint does not depend on the number of ranks.
"""

import signal
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp

import pycollective as pc

KEPT = 2


class Checkpoints:
    """The checkpoints of one training; without a directory it stores none.

    The signal SIGUSR1 asks for one. Batch systems can send it before they end a job (``slurm/requeue.sbatch``).
    """

    def __init__(self, directory, settings, comm):
        """``settings``: what the losses depend on. They must equal those of the checkpoint to go on from."""
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
        """Returns whether any rank was asked for a checkpoint. All ranks must make this call."""
        return self.enabled and bool(pc.pmax(np.int32(self._asked), self.comm))

    def restore(self, state):
        """Returns the newest stored step and state, on all ranks; 0 and ``state`` itself if nothing is stored."""
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
            # orbax's arrays are committed to the first device. NumPy's can go to several devices.
            state = jax.tree.map(np.asarray, self._read(step, state=ocp.args.StandardRestore(state)).state)
        return step, pc.broadcast(state, self.comm)

    def _read(self, step, **items):
        return self._manager.restore(step, args=ocp.args.Composite(**items))

    def save(self, step, state):
        """Stores ``state``, the same on all ranks, as the state before ``step``. Returns when it is on disk."""
        if self._manager and self._manager.latest_step() != step:
            items = ocp.args.Composite(state=ocp.args.StandardSave(state), settings=ocp.args.JsonSave(self.settings))
            self._manager.save(step, args=items)
            self._manager.wait_until_finished()
