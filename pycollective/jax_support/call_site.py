"""The call site of a collective: the line of the user's code that made it, as records and messages name it.

A program carries a hash of the line, the attribute ``site`` of its handlers. The hash must not change when somebody
edits another function of the file, or JAX's compilation cache would lose the program. So it is made from the names of
the file and the function, and the number of the line inside the function. The name of the collective is part of it as
well: a sum and a mean are the same call between ranks.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import jax

from pycollective.jax_support import frames
from pycollective.transport import watch

_NOT_THE_USERS = tuple(
    str(path) + "/" for path in (Path(__file__).parents[1], Path(jax.__file__).parent, sysconfig.get_path("stdlib"))
)
"""Folders whose functions stand between the user's line and the primitive. Libraries of networks are users."""

_COLLECTIVES = (str(Path(__file__).parents[1] / "collectives") + "/", inspect.getfile(jax.lax.psum))
"""Where the functions that users call stand: a folder of this package, and a file of JAX."""


def is_of_user(file: str) -> bool:
    """Whether a file of Python is the user's: it belongs neither to this package nor to JAX or Python."""
    return not file.startswith(_NOT_THE_USERS)


class CallSite(NamedTuple):
    """A line that makes a collective.

    Attributes:
        file: the name of the file.
        line: the number of the line in it.
        function: the function around the line.
        line_in_function: the number of the line from the function's first line, which is 0.
        collective: the function of JAX or of this package that makes the call, such as ``pmean``; "" if nobody knows.
        derivative: what JAX has made of that call, such as "transpose"; "" for the call itself.
        program: of a collective over named axes, a hash of all collectives of the program; else 0.
    """

    file: str
    line: int
    function: str
    line_in_function: int
    collective: str
    derivative: str = ""
    program: int = 0

    @property
    def text(self) -> str:
        """As messages name it: the name of the file, the line, the function, and the derivative.

        Example:
            >>> CallSite("train.py", 12, "step", 2, "psum", "transpose").text
            'train.py:12 (step, transpose)'
        """
        return f"{self.file}:{self.line} ({', '.join(filter(None, (self.function, self.derivative)))})"

    @property
    def site(self) -> int:
        """The same on every rank, and not 0: 24 bits for the function, 20 for the line, 20 for the collective.

        A derivative is another collective: it must not meet the call itself, whatever function makes that. So is a
        collective over a named axis in a program with other collectives.
        """
        is_cell = self.file.startswith("<") or self.file.removesuffix(".py").isdecimal()  # of IPython or a notebook
        file = "" if is_cell else self.file  # a cell has another name in each process
        made = f"{self.derivative} of {self.collective}" if self.derivative else self.collective
        function, collective = _hash((file, self.function), 24), _hash((made, self.program), 20) | 1
        bits = function << 40 | (self.line_in_function & 0xFFFFF) << 20 | collective
        return as_int64(bits)


def as_int64(bits: int) -> int:
    """A number of 64 bits as an attribute of a program holds it.

    Example:
        >>> as_int64(5), as_int64((1 << 64) - 1)
        (5, -1)
    """
    return bits - (1 << 64) if bits >> 63 else bits


def _hash(facts: object, bits: int) -> int:
    return int.from_bytes(hashlib.blake2b(repr(facts).encode(), digest_size=8).digest(), "little") % (1 << bits)


call_outside_jit: ContextVar[CallSite | None] = ContextVar("call_outside_jit", default=None)
"""The line of the collective that runs outside any trace: a program of its own, in which no line is the user's."""


def site_of_lowered(derivative: str = "", program: int = 0) -> int:
    """The attribute ``site`` of the collective that is lowered now; 0 if nobody knows where it was called.

    Args:
        derivative: what JAX has made of the call that stands at the line, such as "transpose"; "": it is that call.
        program: see :attr:`CallSite.program`.
    """
    found = _innermost(frames.frames_of_user()) or call_outside_jit.get()
    return site_of(None if found is None else found._replace(derivative=derivative, program=program))


def site_of(line: CallSite | None) -> int:
    """The attribute ``site`` of a line, which messages can name from now on; 0 for None."""
    return 0 if line is None else _known(line)


def line_of_caller() -> CallSite | None:
    """The line of the collective that this thread calls now, outside any trace; None if nobody knows it."""
    return _innermost(_frames(sys._getframe(1)))


def _frames(frame: FrameType | None) -> Iterator[frames.Frame]:
    # An eager call costs as much as a walk over ten frames: those of JAX are passed over first.
    while frame is not None:
        code = frame.f_code
        if _counts(code.co_filename):
            yield frames.Frame(code.co_filename, code.co_qualname, code.co_firstlineno, frame.f_lineno)
        frame = frame.f_back


@functools.lru_cache(maxsize=4096)
def _counts(file: str) -> bool:
    """Whether a frame of this file may be the user's, or that of the function that the user called."""
    return is_of_user(file) or file.startswith(_COLLECTIVES)


@functools.lru_cache(maxsize=4096)
def _known(found: CallSite) -> int:
    watch.add_site(found.site, found.text)
    return found.site


def _innermost(frames: Iterable[frames.Frame]) -> CallSite | None:
    """The innermost frame that is not JAX's or this package's.

    Example:
        >>> frame = frames.Frame
        >>> _innermost([frame(jax.__file__, "psum", 1, 7), frame("/home/me/train.py", "step", 10, 12)]).text
        'train.py:12 (step)'
    """
    collective = ""
    for frame in frames:
        if is_of_user(frame.file):
            file = frame.file.rpartition("/")[2]
            return CallSite(file, frame.line, frame.function, frame.line - frame.first_line, collective)
        if frame.file.startswith(_COLLECTIVES):  # pmean calls psum: the outer one counts
            collective = frame.function
    return None
