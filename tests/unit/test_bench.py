"""What ``pycollective bench`` computes: workloads, their expected results, sizes, traffic; but not times."""

from __future__ import annotations

import argparse
from typing import Any

import jax
import numpy as np
import pytest

from pycollective.bench.operations import OPERATIONS
from pycollective.bench.options import add_options, check, size
from pycollective.bench.workloads import (
    AXIS,
    GRADIENTS,
    TREES,
    Workload,
    count_wrong,
    expected,
    make_workload,
    operands,
    tree_workload,
)


def on_all(workload: Workload, n: int) -> list[list[np.ndarray]]:
    """The results of all participants, by JAX."""
    rows = [operands(workload, i, n) for i in range(n)]
    stacked = [np.stack(leaves) for leaves in zip(*rows, strict=True)]
    out = jax.vmap(workload.function(), axis_name=AXIS, axis_size=n)(*stacked)
    return [[np.asarray(y)[i] for y in out] for i in range(n)]


@pytest.mark.parametrize(
    ("op", "n"), [(op, n) for op in (*OPERATIONS, *GRADIENTS) for n in ((3,) if op == "step" else (1, 2, 3, 4))]
)
def test_expected_is_what_jax_gives(op: str, n: int) -> None:
    workload = Workload("tree", (5, 3), np.dtype(np.float32)) if op == "tree" else make_workload(op, 240, "float32", n)
    for i, got in enumerate(on_all(workload, n)):
        assert count_wrong(workload, got, expected(workload, i, n, 1)) == 0


@pytest.mark.parametrize("op", [op for op, one in OPERATIONS.items() if one.keeps_shape])
def test_expected_of_a_chain(op: str) -> None:
    n, workload = 3, make_workload(op, 240, "float32", 3)
    again = jax.vmap(workload.function(), axis_name=AXIS, axis_size=n)(
        np.stack([row[0] for row in on_all(workload, n)])
    )
    for i in range(n):
        assert count_wrong(workload, [again[0][i]], expected(workload, i, n, 2)) == 0


def test_wrong_elements_are_counted() -> None:
    workload = make_workload("psum", 40, "float32", 2)
    (want,) = expected(workload, 0, 2, 1)
    bad = want.copy()
    bad[[2, 7]] += 1
    assert count_wrong(workload, [bad], [want]) == 2
    assert count_wrong(workload, [want[:5]], [want]) == 10
    assert count_wrong(workload, [np.where(want > 0, np.nan, want)], [want]) == int((want > 0).sum())
    assert count_wrong(workload, [], [want]) == 10


def test_operands_tell_participants_and_places_apart() -> None:
    workload = make_workload("all_to_all", 96, "float32", 4)
    rows = [operands(workload, i, 4)[0] for i in range(4)]
    assert len({row.tobytes() for row in rows}) == 4
    assert len({block.tobytes() for block in rows[0]}) > 1


def test_sums_of_many_stay_exact() -> None:
    # Up to thousands of participants, so that an element is wrong or right, whatever the order of the sum.
    workload = make_workload("psum", 64, "float32", 4096)
    largest = max(expected(workload, 0, 4096, 1)[0])
    assert largest < 2**24


def test_narrow_floats_may_round() -> None:
    workload = make_workload("psum", 40, "bfloat16", 101)
    (want,) = expected(workload, 0, 101, 1)
    assert want.dtype == np.float32
    once = want.astype(jax.numpy.bfloat16)
    assert 0 < np.abs(once.astype(np.float32) - want).max() <= 2
    assert count_wrong(workload, [once], [want]) == 0
    assert count_wrong(workload, [once * np.float32(1.02)], [want]) == want.size


def test_models_have_their_sizes() -> None:
    assert (len(TREES["resnet50"]), sum(TREES["resnet50"])) == (161, 25_557_032)  # torchvision's resnet50
    assert (len(TREES["gpt2-small"]), sum(TREES["gpt2-small"])) == (148, 124_439_808)
    assert tree_workload("many-small", "float32").nbytes == 148 << 10


def test_traffic_is_that_of_the_bus_bandwidth() -> None:
    # The factors for n ranks in nccl-tests, PERFORMANCE.md.
    factors = {"psum": 2 * 3 / 4, "all_gather": 3 / 4, "psum_scatter": 3 / 4, "all_to_all": 3 / 4}
    for op in OPERATIONS:
        workload = make_workload(op, 4096, "float32", 4)
        assert workload.nbytes == 4096
        assert workload.traffic(4) == 4096 * factors.get(op, 1.0)


def test_no_donation_where_shapes_change() -> None:
    with pytest.raises(ValueError, match="all_gather"):
        make_workload("all_gather", 64, "float32", 2, donated=True)


def test_sizes() -> None:
    assert [size(text) for text in ("4", "64K", "1M", "2G", "3KiB", "5kB")] == [4, 65536, 1 << 20, 2 << 30, 3072, 5120]
    for text in ("", "0", "-4", "1.5M", "4T"):
        with pytest.raises(argparse.ArgumentTypeError, match="expected a size"):
            size(text)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--modes", "jit,fast"], "expected some of jit, eager, loop"),
        (["psum", "pusm"], "expected one of psum"),
        (["-b", "1M", "-e", "1K"], "expected -b to be at most -e"),
        (["-n", "0"], "whole number from 1"),
        (["-f", "1"], "whole number from 2"),
        (["--link-gbps", "0"], "positive number"),
        (["--against", "jax-mpi", "--devices", "2"], "expected --devices 1 with --against jax-mpi, got 2"),
        (["--against", "nccl"], "expected some of floor, numpy, copies, mpi4jax, jax-mpi, got 'nccl'"),
    ],
)
def test_bad_options(arguments: list[str], complaint: str, capsys: Any) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    with pytest.raises(SystemExit):
        check(parser, parser.parse_args(arguments))
    assert complaint in capsys.readouterr().err
