"""The constants of messages, by MPI's names.

They need neither MPI nor JAX, so a program may use them before :func:`pycollective.init`.
"""

from __future__ import annotations

import enum


class MessageConstant(enum.Enum):
    """A constant in the place of a rank or of a tag. It is no integer: each MPI library has integers of its own.

    Attributes:
        meaning: the ranks or tags that the constant stands for.
    """

    ANY_SOURCE = "any rank", "The source of a message from any rank, for :func:`recv`. Source: MPI standard, 3.2.4."
    ANY_TAG = "any tag", "Any tag, for :func:`recv` and :func:`sendrecv`. Source: MPI standard, 3.2.4."
    PROC_NULL = (
        "no rank",
        "No rank. A message to it is not sent, and a message from it is not received. Source: MPI standard, 3.11.",
    )

    def __init__(self, meaning: str, description: str) -> None:
        self.meaning = meaning
        self.__doc__ = description

    def __repr__(self) -> str:
        """The name as a program writes it."""
        return f"pc.{self.name}"

    __str__ = __repr__


ANY_SOURCE, ANY_TAG, PROC_NULL = MessageConstant
