"""The constants of messages, by MPI's names.

They need neither MPI nor JAX, so a program may use them before :func:`pycollective.init`.
"""

from __future__ import annotations

import enum


class MessageConstant(enum.Enum):
    """What may stand in the place of a rank or of a tag. It is no number: MPI libraries have different ones."""

    ANY_SOURCE = "any rank"
    ANY_TAG = "any tag"
    PROC_NULL = "no rank"

    def __repr__(self) -> str:
        """As a program writes it."""
        return f"pc.{self.name}"

    __str__ = __repr__


ANY_SOURCE = MessageConstant.ANY_SOURCE
"""As the ``source`` of :func:`pycollective.recv`: a message from any rank."""

ANY_TAG = MessageConstant.ANY_TAG
"""As the ``tag`` of :func:`pycollective.recv`, or the ``recv_tag`` of :func:`pycollective.sendrecv`: any tag."""

PROC_NULL = MessageConstant.PROC_NULL
"""As the source or the destination of a message: no rank. Nothing is sent, and nothing is received."""
