"""The peer from PyTorch: ``torch.distributed`` with gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pycollective.bench.contenders import Program
from pycollective.bench.workloads import Workload

FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # of DistributedDataParallel, in bytes


def join(address: str, rank: int, size: int, _devices: int) -> TorchGloo:
    """Makes this process one of a process group. A torch process has one CPU device."""
    dist.init_process_group("gloo", init_method=f"tcp://{address}", world_size=size, rank=rank)
    return TorchGloo(rank, size)


class TorchGloo:
    """torch.distributed on tensors that exist already; trees as DistributedDataParallel's buckets of gradients."""

    name = "torch gloo"

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def barrier(self) -> None:
        """Waits for the other processes."""
        dist.barrier()

    def program(self, work: Workload) -> Program | None:
        if work.mode == "eager" or work.op == "step" or work.dtype.kind not in "iuf":
            return None
        if work.op == "tree":
            return self._tree(work)
        right, left = (self._rank + 1) % self._size, (self._rank - 1) % self._size

        def ring(x: Any, y: Any) -> None:
            request = dist.isend(x, right)
            dist.recv(y, left)
            request.wait()

        # gloo works in place on one tensor for sums and broadcasts.
        calls: dict[str, Callable[[Any, Any], Any]] = {
            "psum": lambda _, y: dist.all_reduce(y),
            "broadcast": lambda _, y: dist.broadcast(y, 0),
            "all_gather": lambda x, y: dist.all_gather(list(y), x),
            "all_to_all": lambda x, y: dist.all_to_all_single(y, x),
            "ppermute": ring,
        }
        if work.op not in calls:
            return None
        call, in_place = calls[work.op], work.op in ("psum", "broadcast")

        def put(rows: list[list[Any]]) -> tuple[Any, Any]:
            x = torch.from_numpy(rows[0][0].copy())
            return x, x if in_place else x.new_zeros((self._size, *x.shape) if work.op == "all_gather" else x.shape)

        def run(pair: tuple[Any, Any]) -> tuple[Any, Any]:
            for _ in range(work.loop):
                call(*pair)
            return pair

        return Program(put, run, lambda pair: [[pair[1].numpy()]], chains=in_place)

    def _tree(self, work: Workload) -> Program:
        """Gradients are views of their buckets, as with ``gradient_as_bucket_view``: nothing is copied."""
        limit, buckets = FIRST_BUCKET, [[0, 0]]
        for size in work.sizes:
            if buckets[-1][1] and (buckets[-1][1] + size) * work.dtype.itemsize > limit:
                limit = BUCKET
                buckets.append([buckets[-1][0] + buckets[-1][1], 0])
            buckets[-1][1] += size

        def run(flat: Any) -> Any:
            for _ in range(work.loop):
                pending = [dist.all_reduce(flat[first : first + n], async_op=True) for first, n in buckets]
                for request in pending:
                    request.wait()
            return flat

        return Program(
            lambda rows: torch.from_numpy(np.concatenate(rows[0])),
            run,
            lambda flat: [work.split(flat.numpy())],
        )
