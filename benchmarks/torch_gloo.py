"""PyTorch's collectives: ``torch.distributed`` with gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pycollective.bench.implementations import Program
from pycollective.bench.workloads import Workload

FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # the sizes of DistributedDataParallel's buckets, in bytes


def join(address: str, rank: int, size: int, _devices: int) -> TorchGloo:
    """Joins this process to a process group. A torch process has one CPU device."""
    dist.init_process_group("gloo", init_method=f"tcp://{address}", world_size=size, rank=rank)
    return TorchGloo(rank, size)


class TorchGloo:
    """torch.distributed on tensors that exist already. A tree goes in buckets, as in DistributedDataParallel."""

    name = "torch gloo"

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def barrier(self) -> None:
        """Waits for the other processes."""
        dist.barrier()

    def program(self, workload: Workload) -> Program | None:
        if workload.mode == "eager" or workload.dtype.kind not in "iuf":
            return None
        if workload.op == "tree":
            return self._tree(workload)
        right, left = (self._rank + 1) % self._size, (self._rank - 1) % self._size

        def ring(x: Any, y: Any) -> None:
            request = dist.isend(x, right)
            dist.recv(y, left)
            request.wait()

        # For sums and broadcasts gloo writes the result over the operand.
        calls: dict[str, Callable[[Any, Any], Any]] = {
            "psum": lambda _, y: dist.all_reduce(y),
            "broadcast": lambda _, y: dist.broadcast(y, 0),
            "all_gather": lambda x, y: dist.all_gather(list(y), x),
            "all_to_all": lambda x, y: dist.all_to_all_single(y, x),
            "ppermute": ring,
        }
        operation = workload.operation
        if operation is None or workload.op not in calls:
            return None
        call, in_place = calls[workload.op], workload.op in ("psum", "broadcast")

        def put(xs: list[list[Any]]) -> tuple[Any, Any]:
            x = torch.from_numpy(xs[0][0].copy())
            return x, x if in_place else x.new_zeros(operation.result(workload.count, self._size))

        def run(pair: tuple[Any, Any]) -> tuple[Any, Any]:
            for _ in range(workload.loop):
                call(*pair)
            return pair

        return Program(put, run, lambda pair: [[pair[1].numpy()]], chained=in_place)

    def _tree(self, workload: Workload) -> Program:
        """Gradients are views of their buckets, as with ``gradient_as_bucket_view``, so nothing is copied."""
        limit, buckets = FIRST_BUCKET, [[0, 0]]
        for size in workload.sizes:
            if buckets[-1][1] and (buckets[-1][1] + size) * workload.dtype.itemsize > limit:
                limit = BUCKET
                buckets.append([buckets[-1][0] + buckets[-1][1], 0])
            buckets[-1][1] += size

        def run(flat: Any) -> Any:
            for _ in range(workload.loop):
                pending = [dist.all_reduce(flat[first : first + n], async_op=True) for first, n in buckets]
                for request in pending:
                    request.wait()
            return flat

        return Program(
            lambda xs: torch.from_numpy(np.concatenate(xs[0])),
            run,
            lambda flat: [workload.split(flat.numpy())],
        )
