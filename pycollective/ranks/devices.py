"""The devices of this process that a rank drives."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from pycollective.errors import message


def local_devices(devices: Sequence[jax.Device] | int | None) -> tuple[jax.Device, ...]:
    """The devices that the argument ``devices`` of ``init`` means: a number of them, some of them, or None for all."""
    local = tuple(jax.local_devices())
    if devices is None:
        return local
    if isinstance(devices, int):
        if not 0 < devices <= len(local):
            raise ValueError(
                message("init", f"devices from 1 to {len(local)}", devices, "This process has no more local devices.")
            )
        return local[:devices]
    chosen = tuple(devices)
    if not chosen or any(not isinstance(device, jax.Device) for device in chosen):
        raise TypeError(
            message("init", "devices: a number or a sequence of jax.Device", repr(devices), "See jax.local_devices().")
        )
    return chosen
