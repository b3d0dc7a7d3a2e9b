"""Where the user called an operation: the frames of Python that JAX has recorded for it.

What a traceback of :mod:`jax.extend.source_info_util` has is as in JAX 0.9 to 0.12.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.extend import source_info_util


class Frame(NamedTuple):
    """A frame of a traceback: a file, a function, the first line of the function, and the line."""

    file: str
    function: str
    first_line: int
    line: int


def frames_of_user() -> list[Frame]:
    """The frames in which the user called the operation that is lowered now, the innermost first."""
    traceback = source_info_util.current().traceback
    return [
        Frame(frame.file_name, frame.function_name, frame.function_start_line, frame.line_num)
        for frame in (traceback.frames if traceback is not None else ())
    ]


_JAX = str(Path(jax.__file__).parent)


def called_from(eqn: Any) -> Frame | None:
    """The innermost frame outside of JAX in which an equation was traced.

    None inside a function that JAX itself compiles, such as :func:`jax.numpy.where`: its frames end there.
    """
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_JAX):
            return Frame(frame.file_name, frame.function_name, frame.function_start_line, frame.line_num)
    return None


def is_in_package(frame: Frame, name: str) -> bool:
    """Whether a frame is in a file of a package of Python, by its path."""
    return name in Path(frame.file).parts
