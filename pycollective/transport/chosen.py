"""The transport of this process, by the argument of :func:`pycollective.init`."""

from __future__ import annotations

from pycollective.transport.by_mpi4jax import ByMpi4jax
from pycollective.transport.handlers import Native
from pycollective.transport.protocol import Transport

TRANSPORTS: dict[str, type[Transport]] = {"native": Native, "mpi4jax": ByMpi4jax}
"""The transports by their names; the first is the default."""

_chosen: list[Transport] = []


def choose(name: str | None) -> None:
    """Chooses the transport, before any program; None for the default."""
    _chosen[:] = [TRANSPORTS[name or next(iter(TRANSPORTS))]()]


def transport() -> Transport:
    """The chosen transport."""
    (chosen,) = _chosen
    return chosen
