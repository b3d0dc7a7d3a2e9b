"""Strategies of training, as functions over named axes. Each works where this package or JAX binds the axis."""

from pycollective.parallel.optimizer import clip_by_global_norm, shard_state, unshard_state, zero

__all__ = ["clip_by_global_norm", "shard_state", "unshard_state", "zero"]
