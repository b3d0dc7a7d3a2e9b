"""Collectives that move blocks between ranks and change no value."""

from __future__ import annotations

import zlib
from typing import Any

import jax.numpy as jnp

from pycollective.primitives.define import Collective
from pycollective.ranks.participants import Participants

alltoall: Collective = Collective("alltoall", operand_blocks=True, result_blocks=True)
"""``y_r[s] = x_s[r]``; its own transpose."""

gather: Collective = Collective("gather", transpose=lambda ct, **params: scatter(ct, **params), result_blocks=True)
"""``y_root[s] = x_s``; zeros on the other ranks."""

scatter: Collective = Collective("scatter", transpose=lambda ct, **params: gather(ct, **params), operand_blocks=True)
"""``y_r = x_root[r]``."""


def _ppermute_attributes(comm: Participants, perm: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    dest, source = comm._lane_routes(perm)
    return {"comm": comm._key, "dest": dest, "source": source, "pattern": zlib.crc32(repr(sorted(perm)).encode())}


ppermute: Collective = Collective(
    "ppermute",
    transpose=lambda ct, *, perm, **params: ppermute(ct, perm=tuple((dest, source) for source, dest in perm), **params),
    attributes=_ppermute_attributes,
    alone=lambda x, *, perm, **_: x if perm else jnp.zeros_like(x),
)
"""``y_d = x_s`` for each pair ``(s, d)`` of ``perm``; zeros on ranks that are the destination of no pair."""
