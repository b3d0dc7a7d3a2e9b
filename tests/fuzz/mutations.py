"""What becomes of real texts and JSON files that are cut, changed and mixed, for the tests of parsers."""

from __future__ import annotations

import copy
import json
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

CORPUS = Path(__file__).parent / "corpus"

_EXAMPLES = os.environ.get("PYCOLLECTIVE_TEST_FUZZ_EXAMPLES", "")
FUZZED = settings(
    max_examples=int(_EXAMPLES or 400),
    derandomize=not _EXAMPLES,  # a test of scripts/test does not fail by chance; scripts/fuzz looks elsewhere each time
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
)
"""Of each test."""

_MOST_BYTES = 1 << 30


def files(kind: str) -> list[str]:
    """The texts of a folder of the corpus."""
    found = [path.read_text() for path in sorted((CORPUS / kind).iterdir())]
    assert found
    return found


@contextmanager
def limited_memory() -> Iterator[None]:
    """A parser that takes more than a GiB gets a MemoryError."""
    status = Path("/proc/self/status").read_text()
    data = int(status.partition("VmData:")[2].split()[0]) << 10
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (data + _MOST_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@st.composite
def changed_texts(draw: st.DrawFn, corpus: Sequence[str], tokens: Sequence[str]) -> str:
    """A text of a corpus with some parts taken out, repeated, or replaced by tokens and letters."""
    text = draw(st.sampled_from(corpus))
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(text)))
        end = min(len(text), at + draw(st.sampled_from([0, 1, 2, 5, 40, 1000])))
        other = draw(
            st.one_of(
                st.sampled_from(["", *tokens]),
                st.text(max_size=3),
                st.integers(0, 1 << 70).map(str),
                st.just(text[at:end] * draw(st.sampled_from([2, 50]))),
            )
        )
        text = text[:at] + other + text[end:]
    return text


_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from([2**31, 2**63, -(2**63), 10**30, 10**400]),
    st.floats(),
    st.sampled_from([0.5, 8.5, 1e-300, 1e300]),
    st.text(max_size=4),
    st.sampled_from(["[", "[/x]", "[0, 1]", "[0, 99999999]", "\ud800", "$\\frac", "\x1b[31m", "0", "started", "X"]),
)
VALUES = st.one_of(
    _LEAVES, st.lists(_LEAVES, max_size=3), st.dictionaries(st.sampled_from(["ranks", "x", ""]), _LEAVES, max_size=2)
)
"""Any JSON, and what Python reads and writes as JSON besides."""


def _places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to the parts of a value."""
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield (*before, key)
        yield from _places(value[key], (*before, key))


@st.composite
def changed_json(draw: st.DrawFn, corpus: Sequence[str]) -> str:
    """A JSON text of a corpus in which some values are replaced, taken out, or stand twice."""
    whole = json.loads(draw(st.sampled_from(corpus)))
    for _ in range(draw(st.integers(1, 4))):
        places = list(_places(whole))
        if not places:
            break
        # Paths near the top are few among all, so the depth is drawn first.
        depth = draw(st.sampled_from(sorted({len(path) for path in places})))
        *path, last = draw(st.sampled_from([path for path in places if len(path) == depth]))
        parent = whole
        for key in path:
            parent = parent[key]
        way = draw(st.integers(0, 5))
        if way == 0:
            del parent[last]
        elif way == 1 and isinstance(parent, list):
            parent.insert(last, copy.deepcopy(parent[last]))
        elif way == 2 and isinstance(parent, dict):
            parent[draw(st.text(max_size=2))] = parent.pop(last)
        else:
            parent[last] = draw(VALUES)
    return json.dumps(whole)


DEEP = "[" * 100_000
"""Deeper than Python's parser of JSON goes."""
