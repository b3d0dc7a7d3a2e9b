"""Strategies of training, as functions over named axes. Each works where this package or JAX binds the axis."""

from pycollective.parallel.experts import Routing, Statistics, experts, route
from pycollective.parallel.fsdp import gathered, shard, sliced, unshard
from pycollective.parallel.join import join, mean_over_examples
from pycollective.parallel.late import DelayedState, GossipState, delayed, gossip
from pycollective.parallel.local import DiLoCoState, LocalState, diloco, local_sgd
from pycollective.parallel.optimizer import clip_by_global_norm, shard_state, unshard_state, zero
from pycollective.parallel.sequence import ring_attention, ulysses
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
    "DelayedState",
    "DiLoCoState",
    "GossipState",
    "LocalState",
    "Routing",
    "Statistics",
    "clip_by_global_norm",
    "column_parallel",
    "copy_to",
    "delayed",
    "diloco",
    "experts",
    "gather_from",
    "gathered",
    "gossip",
    "join",
    "join_from",
    "local_sgd",
    "mean_over_examples",
    "reduce_from",
    "ring_attention",
    "route",
    "row_parallel",
    "scatter_to",
    "shard",
    "shard_state",
    "sliced",
    "split_to",
    "ulysses",
    "unshard",
    "unshard_state",
    "vocabulary_cross_entropy",
    "vocabulary_embedding",
    "zero",
]
