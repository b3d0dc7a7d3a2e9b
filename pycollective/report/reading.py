"""JSON files that a job has left. A job may have died, or a disk been full: each value is checked before it is used."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Check = Callable[[Any], bool]
Form = Check | Mapping[str, Any] | Sequence[Any]
"""What a value must be: a check; a dictionary with the forms of some names; a list with the form of each entry."""

_MOST_RANKS = 1 << 20
"""More than any job has. Reports list ranks."""

_SURROGATE = re.compile(r"[\ud800-\udfff]")
_RANKS = re.compile(r"\[(?:\d{1,7}(?:, \d{1,7})*)?\]", re.ASCII)


def text(value: Any) -> bool:
    """Whether a value is a text that can be printed."""
    return isinstance(value, str) and (value.isascii() or not _SURROGATE.search(value))


def whole(value: Any) -> bool:
    """Whether a value is a whole number of 64 bits."""
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def count(value: Any) -> bool:
    """Whether a value is such a number, 0 or more."""
    return whole(value) and value >= 0


def rank(value: Any) -> bool:
    """Whether a value may be the number of a rank."""
    return whole(value) and 0 <= value < _MOST_RANKS


def size(value: Any) -> bool:
    """Whether a value may be a number of ranks."""
    return whole(value) and 0 < value <= _MOST_RANKS


def ranks(value: Any) -> bool:
    """Whether a value lists ranks: ``"[0, 1]"``."""
    return isinstance(value, str) and _RANKS.fullmatch(value) is not None


def microseconds(value: Any) -> bool:
    """Whether a value is a time in microseconds, of some thousand years at most."""
    return type(value) in (int, float) and abs(value) < 1e18


def flag(value: Any) -> bool:
    """Whether a value is true or false."""
    return isinstance(value, bool)


def absent_or(form: Form) -> Check:
    """A check: whether a value is not there, or has a form."""
    return lambda value: value is None or wrong_in(value, form) is None


def groups(value: Any) -> bool:
    """Whether a value is a dictionary of groups, each with its ranks."""
    return isinstance(value, dict) and wrong_in([*value.values()], [{"ranks": ranks}]) is None


def load(file: Path) -> Any:
    """The contents of a file of JSON; None if it is none, or cannot be read."""
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def wrong_in(value: Any, form: Form) -> str | None:
    """Where a value has not its form: the names and numbers that lead there; None if it has.

    Example:
        >>> form = {"rank": rank, "entries": [{"state": text}]}
        >>> wrong_in({"rank": 0, "entries": [{"state": "started"}, {}]}, form)
        'entries[1].state'
        >>> wrong_in({"rank": 0, "entries": [], "more": 3}, form) is None
        True
    """
    found = _wrong_in(value, form)
    return found if found is None else found.removeprefix(".")


def _wrong_in(value: Any, form: Form) -> str | None:
    if callable(form):
        return None if form(value) else ""
    if isinstance(form, Mapping):
        parts = [(f".{name}", value.get(name), own) for name, own in form.items()] if isinstance(value, dict) else None
    else:
        parts = [(f"[{at}]", each, form[0]) for at, each in enumerate(value)] if isinstance(value, list) else None
    if parts is None:
        return ""
    for place, part, own in parts:
        if (found := _wrong_in(part, own)) is not None:
            return place + found
    return None
