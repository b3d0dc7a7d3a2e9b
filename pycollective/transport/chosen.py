"""The transport of this process, by the argument of :func:`pycollective.init`."""

from __future__ import annotations

import importlib
from collections.abc import Callable

from pycollective.transport.handlers import Native
from pycollective.transport.protocol import Transport


def _by_mpi4jax() -> Transport:
    module = importlib.import_module("pycollective.transport.by_mpi4jax")  # few jobs need its files
    made: Transport = module.ByMpi4jax()
    return made


TRANSPORTS: dict[str, Callable[[], Transport]] = {"native": Native, "mpi4jax": _by_mpi4jax}
"""What makes the transports, by their names; the first is the default."""

_chosen: list[Transport] = []


def choose(name: str | None) -> None:
    """Chooses the transport, before any program; None for the default."""
    _chosen[:] = [TRANSPORTS[name or next(iter(TRANSPORTS))]()]


def transport() -> Transport:
    """The chosen transport."""
    (chosen,) = _chosen
    return chosen
