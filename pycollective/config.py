"""Settings from the environment, read once at import. An invalid value is an error that lists the valid ones."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from pycollective.errors import message

_BOOLEANS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
_LANES = {"one": False, "all": True}
_CHECKS = {"never": 0, "first": 1, "always": 2}


@dataclass(frozen=True)
class Config:
    """The settings.

    Attributes:
        check: when ranks compare their calls: 0 never, 1 when a communicator first makes a call, 2 at each call
            (``PYCOLLECTIVE_CHECK=never|first|always``, default ``first``).
        malloc: whether the process keeps freed memory (``PYCOLLECTIVE_MALLOC``, default on).
        timeout: the seconds that a rank may wait inside one MPI call, or at its end for the others, before it reports
            and ends the job; None for no limit (``PYCOLLECTIVE_TIMEOUT``).
        allow_singleton: whether a world of one process is accepted under a launcher that started several
            (``PYCOLLECTIVE_ALLOW_SINGLETON``, default off).
        bucket_bytes: the size of the buffers in which psums that do not depend on each other travel together; 0: each
            psum travels by itself (``PYCOLLECTIVE_BUCKET_BYTES``, default 1 MiB). The same on all ranks.
        gpu_direct: whether MPI reads and writes the memory of GPUs; None: MPI is asked (``PYCOLLECTIVE_GPU_DIRECT``).
        stage_bytes: the size of the pieces in which arrays of GPUs go through page-locked buffers if MPI does not
            (``PYCOLLECTIVE_STAGE_BYTES``, default 4 MiB). The same on all ranks.
        allow_shared_gpu: whether several ranks may drive one GPU (``PYCOLLECTIVE_ALLOW_SHARED_GPU``, default off).
        all_lanes: whether each local device calls MPI for its slice of a large array, instead of one device for all
            (``PYCOLLECTIVE_LANES=one|all``, default ``one``). The same on all ranks.
    """

    check: int = 1
    malloc: bool = True
    timeout: float | None = None
    allow_singleton: bool = False
    bucket_bytes: int = 1 << 20
    gpu_direct: bool | None = None
    stage_bytes: int = 4 << 20
    allow_shared_gpu: bool = False
    all_lanes: bool = False


def _choice(environ: Mapping[str, str], name: str, values: Mapping[str, object], default: object) -> object:
    text = environ.get(name)
    if text is None or text == "":
        return default
    if text.lower() not in values:
        raise ValueError(
            message("config", f"{name} to be one of {sorted(values)}", repr(text), f"Set or unset {name}.")
        )
    return values[text.lower()]


def _seconds(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name)
    if text is None or text == "":
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise ValueError(
            message("config", f"{name} to be a positive number of seconds", repr(text), f"Set or unset {name}.")
        )
    return value


def _bytes(environ: Mapping[str, str], name: str, default: int, least: int = 0) -> int:
    text = environ.get(name)
    if text is None or text == "":
        return default
    if not text.isdecimal() or int(text) < least:
        expected = f"{name} to be a {'positive ' if least else ''}number of bytes"
        raise ValueError(message("config", expected, repr(text), f"Set or unset {name}."))
    return int(text)


def read(environ: Mapping[str, str]) -> Config:
    """Reads the settings.

    Raises:
        ValueError: a variable has a value that is not valid.

    Example:
        >>> read({"PYCOLLECTIVE_CHECK": "always"}).check
        2
    """
    return Config(
        check=_choice(environ, "PYCOLLECTIVE_CHECK", _CHECKS, 1),  # type: ignore[arg-type]
        malloc=_choice(environ, "PYCOLLECTIVE_MALLOC", _BOOLEANS, True),  # type: ignore[arg-type]
        timeout=_seconds(environ, "PYCOLLECTIVE_TIMEOUT"),
        allow_singleton=_choice(environ, "PYCOLLECTIVE_ALLOW_SINGLETON", _BOOLEANS, False),  # type: ignore[arg-type]
        bucket_bytes=_bytes(environ, "PYCOLLECTIVE_BUCKET_BYTES", 1 << 20),
        gpu_direct=_choice(environ, "PYCOLLECTIVE_GPU_DIRECT", _BOOLEANS, None),  # type: ignore[arg-type]
        stage_bytes=_bytes(environ, "PYCOLLECTIVE_STAGE_BYTES", 4 << 20, least=1),
        allow_shared_gpu=_choice(environ, "PYCOLLECTIVE_ALLOW_SHARED_GPU", _BOOLEANS, False),  # type: ignore[arg-type]
        all_lanes=_choice(environ, "PYCOLLECTIVE_LANES", _LANES, False),  # type: ignore[arg-type]
    )


config = read(os.environ)
