"""The call site of a collective: the line of the user's code that made it, as records and messages name it.

A program carries a hash of the line, the attribute ``site`` of its handlers. The hash must not change when somebody
edits another function of the file, or JAX's compilation cache would lose the program. So it is made from the names of
the file and the function, the number of the line inside the function, and the function of this package or of JAX that
the line calls.
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path
from typing import NamedTuple

import jax

from pycollective.ordering import jax_internals
from pycollective.transport import watch

_NOT_THE_USERS = tuple(
    str(path) + "/" for path in (Path(__file__).parents[1], Path(jax.__file__).parent, sysconfig.get_path("stdlib"))
)
"""Folders whose functions stand between the user's line and the primitive. Libraries of networks are users."""


class CallSite(NamedTuple):
    """A line that makes a collective.

    Attributes:
        file: the name of the file.
        line: the number of the line in it.
        function: the function around the line.
        line_in_function: the number of the line from the function's first line, which is 0.
        entry: the function that the line calls, such as ``psum``.
    """

    file: str
    line: int
    function: str
    line_in_function: int
    entry: str

    @property
    def text(self) -> str:
        """As messages name it: the name of the file, the line, and the function."""
        return f"{self.file}:{self.line} ({self.function})"

    @property
    def site(self) -> int:
        """A hash, which is the same on every rank; not 0."""
        is_cell = self.file.startswith("<") or self.file.removesuffix(".py").isdecimal()  # of IPython or a notebook
        file = "" if is_cell else self.file  # a cell has another name in each process
        facts = repr((file, self.function, self.line_in_function, self.entry))
        return int.from_bytes(hashlib.blake2b(facts.encode(), digest_size=8).digest(), "little", signed=True) | 1


def site_of_lowered() -> int:
    """The attribute ``site`` of the collective that is lowered now; 0 if nobody knows where it was called."""
    found = _innermost(jax_internals.frames_of_user())
    if found is None:
        return 0
    watch.add_site(found.site, found.text)
    return found.site


def _innermost(frames: list[jax_internals.Frame]) -> CallSite | None:
    """The innermost frame that is not JAX's or this package's.

    Example:
        >>> frame = jax_internals.Frame
        >>> _innermost([frame(jax.__file__, "psum", 1, 7), frame("/home/me/train.py", "step", 10, 12)]).text
        'train.py:12 (step)'
    """
    entry = ""
    for frame in frames:
        if not frame.file.startswith(_NOT_THE_USERS):
            file = frame.file if frame.file.startswith("<") else Path(frame.file).name
            return CallSite(file, frame.line, frame.function, frame.line - frame.first_line, entry)
        entry = frame.function
    return None
