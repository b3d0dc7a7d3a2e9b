"""Strategies of training, as functions over named axes. Each works where this package or JAX binds the axis."""

from pycollective.parallel.fsdp import gathered, shard, sliced, unshard
from pycollective.parallel.optimizer import clip_by_global_norm, shard_state, unshard_state, zero
from pycollective.parallel.tensor import (
    column_parallel,
    copy_to,
    gather_from,
    join_from,
    reduce_from,
    row_parallel,
    scatter_to,
    split_to,
    vocabulary_cross_entropy,
    vocabulary_embedding,
)

__all__ = [
    "clip_by_global_norm",
    "column_parallel",
    "copy_to",
    "gather_from",
    "gathered",
    "join_from",
    "reduce_from",
    "row_parallel",
    "scatter_to",
    "shard",
    "shard_state",
    "sliced",
    "split_to",
    "unshard",
    "unshard_state",
    "vocabulary_cross_entropy",
    "vocabulary_embedding",
    "zero",
]
