"""How collectives are read from a compiled program."""

from __future__ import annotations

import pytest

from pycollective.distributed.program_collectives import collectives_in
from pycollective.jax_support.program_text import Program


@pytest.mark.parametrize(
    ("written", "size", "groups"),
    [
        ("{{0,1},{2,3}}", 4, [[0, 1], [2, 3]]),
        ("{{3,1},{0,2}}", 4, [[3, 1], [0, 2]]),
        ("{{0},{1}}", 2, [[0], [1]]),
        ("{}", 3, [[0, 1, 2]]),
        ("[2,2]<=[4]", 4, [[0, 1], [2, 3]]),
        ("[2,3]<=[3,2]T(1,0)", 6, [[0, 2, 4], [1, 3, 5]]),
        ("[4,2]<=[2,2,2]T(1,0,2)", 8, [[0, 1], [4, 5], [2, 3], [6, 7]]),
        ("mesh['a'=2,'b'=3] {'a'}", 6, [[0, 3], [1, 4], [2, 5]]),
        ("mesh['a'=2,'b'=3] {'b'}", 6, [[0, 1, 2], [3, 4, 5]]),
        ("mesh['a'=2,'b'=2] {'b','a'}", 4, [[0, 2, 1, 3]]),
        ("mesh['a'=4] {'a':(1)2}", 4, [[0, 2], [1, 3]]),
        ("mesh['a'=4] {'a':(2)2}", 4, [[0, 1], [2, 3]]),
        ("mesh['a'=8,'b'=2] {'a':(2)2,'b'}", 16, [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]),
        ("mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", 4, [[3, 2], [1, 0]]),
        ("mesh['a'=2,'b'=4], device_ids=([2,2,2]T(1,0,2)) {'a'}", 8, [[0, 2], [1, 3], [4, 6], [5, 7]]),
    ],
)  # fmt: skip
def test_groups(written: str, size: int, groups: list[list[int]]) -> None:
    text = (
        f"HloModule m\n  %a = f32[] all-reduce(%x), channel_id=1, replica_groups={written}, to_apply=%r\n  ROOT %b ..."
    )
    [found] = collectives_in(text, size)
    assert [list(group) for group in found.groups] == groups


@pytest.mark.parametrize(
    ("line", "kind", "count"),
    [
        ("%s = f32[4,5]{1,0} all-reduce(%x), replica_groups={{0,1}}", "all-reduce", 20),
        ("%s = (f32[], bf16[3,2]{1,0}) all-reduce-start(%x, %y), replica_groups={{0,1}}", "all-reduce", 6),
        ("%g = c64[2,6]{1,0} all-gather(%x), replica_groups={{0,1}}", "all-gather", 48),
        ("%r = s8[7]{0} reduce-scatter(%x), replica_groups={{0,1}}", "reduce-scatter", 7),
        ("%t = (f8e4m3fn[9]{0}, f8e4m3fn[9]{0}) all-to-all(%x, %y), replica_groups={{0,1}}", "all-to-all", 9),
        ("ROOT %p = pred[5]{0} collective-permute(%x), source_target_pairs={{0,1}}", "collective-permute", 5),
        ("%s = s64[4294967296]{0} all-reduce(%x), replica_groups={{0,1}}", "all-reduce", 2**32),
    ],
)
def test_kinds_and_counts(line: str, kind: str, count: int) -> None:
    [found] = collectives_in(line, 2)
    assert (found.kind, found.largest) == (kind, count)
    assert [list(group) for group in found.groups] == [[0, 1]]


@pytest.mark.parametrize(
    "line",
    [
        "%a = f32[] all-reduce(%x), replica_groups=<new form>",
        "%a = f32[] new-collective(%x), replica_groups={{0,1}}",
        "%a = f32[] all-reduce(%x), replica_groups={{0,4}}",
        "%a = f32[] all-reduce(%x), replica_groups={{,}}",
        "%a = f32[] all-reduce(%x), replica_groups=[0,4]<=[0]",
        "%a = f32[] all-reduce(%x), replica_groups=[2,2]<=[5]",
        "%a = f32[] all-reduce(%x), replica_groups=[2,3]<=[4]",
        "%a = f32[] all-reduce(%x), replica_groups=[99999,99999]<=[99999,99999]",
        "%a = f32[] all-reduce(%x), replica_groups=mesh['a'=99999,'b'=99999] {'a'}",
        "%a = f32[] all-reduce(%x), replica_groups=mesh['a'=4] {'b'}",
        "%a = f32[] all-reduce(%x), replica_groups=mesh['a'=4] {'a':(0)2}",
        "%a = f32[] all-reduce(%x), replica_groups=mesh['a'=4] {'a':(3)2}",
        "%a = f32[4,4]{2,1} all-reduce(%x), replica_groups={{0,1}}",
    ],
)
def test_another_form_is_an_error(line: str) -> None:
    with pytest.raises(RuntimeError, match=r"expected collectives in a known form in XLA's program, got %a = f32"):
        list(collectives_in(line, 4))


def test_a_program_in_another_form() -> None:
    head = "ENTRY %main (x: f32[4]) -> f32[4] {"
    for line in ("%y = f32[4]", "%y = (f32[4] add(%x, %x)", "%y = f32[4] +(%x)", "%y = f32[4]{1} add(%x, %x)"):
        with pytest.raises(ValueError, match=r"no name|substring|a bracket|no order"):
            Program.read(f"{head}\n  {line}\n}}")
