"""Strategies of training, as functions over named axes. Each works where this package or JAX binds the axis."""

from pycollective.collectives.replicated import copy_to, reduce_from
from pycollective.parallel.batches import Batches
from pycollective.parallel.dropless import dropless_experts
from pycollective.parallel.experts import Routing, Statistics, experts, route
from pycollective.parallel.finite import LossScaleState, apply_if_finite, scaled_loss
from pycollective.parallel.fsdp import gathered, shard, sliced, unshard
from pycollective.parallel.initialization import initialized_parts, initialized_slices
from pycollective.parallel.join import join, mean_over_examples
from pycollective.parallel.master_weights import MasterState, master_weights
from pycollective.parallel.optimizer import shard_state, unshard_state, zero
from pycollective.parallel.overlapped_averaging import DelayedState, GossipState, delayed, gossip
from pycollective.parallel.partition_rules import init_by_rules, match_partition_rules
from pycollective.parallel.parts import clip_by_global_norm, for_parts
from pycollective.parallel.periodic_averaging import DiLoCoState, LocalState, diloco, local_sgd
from pycollective.parallel.pipeline import forward_pipeline, measured, pipeline
from pycollective.parallel.random_streams import RandomStreams, random_streams
from pycollective.parallel.schedule_simulator import Simulation, Span, simulate
from pycollective.parallel.schedules import (
    Action,
    Kind,
    Schedule,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    with_messages,
    zero_bubble,
)
from pycollective.parallel.sequence import blockwise_attention, ring_attention
from pycollective.parallel.spatial import conv, halo_exchange, reduce_window
from pycollective.parallel.stages import activation_shapes
from pycollective.parallel.subnets import draw_subnets, join_subnets, take_subnet
from pycollective.parallel.tensor import (
    column_parallel,
    gather_from,
    join_from,
    row_parallel,
    scatter_to,
    split_to,
    vocabulary_cross_entropy,
    vocabulary_embedding,
)
from pycollective.parallel.tied_parameters import Tied, tied_parameters
from pycollective.parallel.ulysses import ulysses
from pycollective.parallel.zigzag import unzigzag, zigzag, zigzag_positions

__all__ = [
    "Action",
    "Batches",
    "DelayedState",
    "DiLoCoState",
    "GossipState",
    "Kind",
    "LocalState",
    "LossScaleState",
    "RandomStreams",
    "MasterState",
    "Routing",
    "Schedule",
    "Simulation",
    "Span",
    "Statistics",
    "Tied",
    "activation_shapes",
    "apply_if_finite",
    "blockwise_attention",
    "clip_by_global_norm",
    "column_parallel",
    "conv",
    "copy_to",
    "delayed",
    "diloco",
    "draw_subnets",
    "dropless_experts",
    "experts",
    "for_parts",
    "forward_only",
    "forward_pipeline",
    "gather_from",
    "gathered",
    "gossip",
    "gpipe",
    "halo_exchange",
    "initialized_parts",
    "initialized_slices",
    "interleaved",
    "join",
    "join_from",
    "join_subnets",
    "local_sgd",
    "master_weights",
    "mean_over_examples",
    "init_by_rules",
    "match_partition_rules",
    "measured",
    "one_f_one_b",
    "pipeline",
    "random_streams",
    "reduce_from",
    "reduce_window",
    "ring_attention",
    "route",
    "row_parallel",
    "scaled_loss",
    "scatter_to",
    "shard",
    "shard_state",
    "simulate",
    "sliced",
    "split_to",
    "take_subnet",
    "tied_parameters",
    "ulysses",
    "unshard",
    "unshard_state",
    "unzigzag",
    "vocabulary_cross_entropy",
    "vocabulary_embedding",
    "with_messages",
    "zero",
    "zero_bubble",
    "zigzag",
    "zigzag_positions",
]
