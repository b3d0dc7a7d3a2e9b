"""Parsers of Python on files and texts that are cut, changed and mixed: a result, or the error that they document."""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pycollective.distributed.program_collectives import collectives_in
from pycollective.jax_support import program_text
from pycollective.planning.by_formulas.step_record import Steps
from pycollective.planning.profile import OPERATIONS, Group, Profile
from pycollective.report import command
from tests.fuzz.mutations import DEEP, FUZZED, changed_json, changed_texts, files, limited_memory


@pytest.fixture(autouse=True)
def _limited() -> Iterator[None]:
    with limited_memory():
        yield


@contextlib.contextmanager
def file_with(text: str, name: str) -> Iterator[Path]:
    """A file of this name and text, by itself in a folder."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / name
        file.write_text(text, errors="surrogatepass")
        yield file


# What a job has left ----------------------------------------------------------------------------------------------

RECORDS = files("records")
TRACES = files("traces")
TOKENS = ['"', "{", "}", "[", "]", ",", ":", "null", "true", "-1", "0", "1e999", "NaN", "\\ud800", '"ranks"', "\n"]


def report(folder: Path, *more: str) -> tuple[int, str]:
    """The status of ``pycollective report`` and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = command.main([str(folder), *more])
    out.getvalue().encode()
    if status == 1:
        expected = (
            "pycollective.report: expected a file of pycollective.trace, or a folder with files rank-R.json, got "
        )
        assert err.getvalue().startswith(expected)
    else:
        assert (status, err.getvalue()) == (0, "")
    return status, out.getvalue()


@FUZZED
@given(changed_json(RECORDS) | changed_texts(RECORDS, TOKENS), st.sampled_from([None, *RECORDS]))
@example(DEEP, RECORDS[0])
def test_records(text: str, other: str | None) -> None:
    with file_with(text, "rank-0.json") as file:
        if other is not None:
            file.with_name("rank-1.json").write_text(other)
        status, told = report(file.parent)
    assert status == 0 or other is None
    assert "collectives" in told or status == 1


@FUZZED
@given(changed_json(TRACES) | changed_texts(TRACES, TOKENS))
@example(DEEP)
def test_traces(text: str) -> None:
    with file_with(text, "trace.json") as file:
        status, told = report(file)
    assert "traced for" in told or status == 1


# Profiles of clusters ---------------------------------------------------------------------------------------------

READY_MADE = Path(program_text.__file__).parents[1] / "planning" / "profiles" / "dgx-a100.json"
PROFILES = [READY_MADE.read_text(), *files("profiles")]


@FUZZED
@given(changed_json(PROFILES) | changed_texts(PROFILES, TOKENS))
@example(DEEP)
def test_profiles(text: str) -> None:
    with file_with(text, "cluster.json") as file:
        try:
            profile = Profile.load(file)
        except ValueError as error:
            told = str(error)
            assert told.startswith(f"pycollective.plan: expected a profile of a cluster, got {file}: ")
            assert told.endswith("Measure one with `pycollective profile -o cluster.json`.")
            return
        profile.save(file)
        assert Profile.load(file) == profile
    times = [
        *(profile.product_s(dtype, m, 64, 1000, 2, form) for dtype in ("float32", "int8") for m in (1, 100)
          for form in ("NN", "NT", "TN", "TT")),
        profile.stream_s(1e6, 100, (1000,)),
        profile.convolution_s("bfloat16", 10, 1e9),
    ]  # fmt: skip
    for programs, operations in profile.collectives.items():
        for operation in operations.keys() & set(OPERATIONS):
            times += [profile.collective_s(operation, 1e5, group, programs) for group in (Group(2, 1), Group(2, 3))]
    assert all(0 <= seconds < math.inf for seconds in times), times


STEPS = ['{"seconds": [0.5, 0.25, 0.125, 0.125], "memory": 1048576}', '{"seconds": [1.0], "memory": null}', "[0.5, 1]"]


@FUZZED
@given(changed_json(STEPS) | changed_texts(STEPS, TOKENS))
@example(DEEP)
def test_steps(text: str) -> None:
    with file_with(text, "steps.json") as file:
        try:
            seconds, memory = Steps.load(file)
        except ValueError as error:
            told = str(error)
            assert told.startswith(f"pycollective.plan: expected the times of steps, got {file}")
            return
    assert all(0 <= second < math.inf for second in seconds)
    assert memory is None or isinstance(memory, int)


# XLA's text -------------------------------------------------------------------------------------------------------

PROGRAMS = files("programs")
OF_XLA = [
    "replica_groups=", "{{0,1},{2,3}}", "{}", "[2,4]<=[8]", "[4,2]<=[2,2,2]T(2,1,0)", "mesh['a'=2,'b'=4] {'a'}",
    "'a':(2)2", "T(1,0)", "source_target_pairs={{0,1}}", "ENTRY ", "ROOT ", "%", " = ", "(", ")", "{", "}", "\n",
    ", metadata={", '"', "f32[8]{0}", "f32[8]{9}", "all-gather(", ", to_apply=%add", "99999999999", "0", "<=",
    "[99999,99999]<=[99999,99999]", "mesh['a'=99999,'b'=99999] {'a'}", "a" * 3000,
]  # fmt: skip


@FUZZED
@given(changed_texts(PROGRAMS, OF_XLA))
def test_programs(text: str) -> None:
    try:
        program = program_text.Program.read(text)
    except ValueError:
        return
    for instructions in program.computations.values():
        for one in instructions:
            assert one.nbytes >= 0
            assert all(shape.neighbours is None or shape.dims[shape.neighbours] > 1 for shape in one.results)
            assert all(isinstance(name, str) for name in one.called)
            program_text.attribute(one, "dimensions")


@FUZZED
@given(changed_texts(PROGRAMS, OF_XLA), st.integers(1, 16))
@example("%a = f32[] all-gather(%x), replica_groups={{,}}", 4)
@example("%a = f32[] all-gather(%x), replica_groups=[0,4]<=[0]", 4)
@example("%a = f32[] all-gather(%x), replica_groups={{0,9}}", 4)
@example("%a = f32[] all-gather(%x), replica_groups=[99999,99999]<=[9999800001]", 4)
@example("%a = f32[] all-gather(%x), replica_groups=mesh['a'=99999,'b'=99999] {'a'}", 4)
@example("%a = f32[] all-gather(%x), replica_groups=mesh['a'=4] {'a':(0)2}", 4)
@example("%a = f32[] all-gather(%x), replica_groups=mesh['a'=4] {'b'}", 4)
def test_collectives_of_programs(text: str, size: int) -> None:
    try:
        found = list(collectives_in(program_text.without_metadata(text), size))
    except RuntimeError as error:
        told = str(error)
        assert told.startswith("pycollective.distributed: expected collectives in a known form in XLA's program")
        return
    for one in found:
        assert one.groups
        assert all(0 <= place < size for group in one.groups for place in group)
        assert one.largest >= 0
    program_text.pairs_in(text)
