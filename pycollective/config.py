"""Settings from the environment, read once at import. An invalid value is an error that lists the valid ones."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from pycollective.errors import message

DEFAULT_TIMEOUT_S = 600.0
"""How many seconds a rank waits for others, if nobody has set a limit."""

MUST_AGREE = {
    "PYCOLLECTIVE_CHECK": "check",
    "PYCOLLECTIVE_SHARED_MEMORY": "shared_memory",
    "PYCOLLECTIVE_BUCKET_BYTES": "bucket_bytes",
    "PYCOLLECTIVE_STAGE_BYTES": "stage_bytes",
    "PYCOLLECTIVE_GPU_DISPATCH": "gpu_dispatch",
    "PYCOLLECTIVE_OVERLAP": "overlap",
}
"""The variables, and their attributes, that must be the same on all ranks: ranks with others would make other calls."""

_BOOLEANS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}
_SHARED_MEMORY = {text: "on" if on else "off" for text, on in _BOOLEANS.items()} | {"buffers": "buffers"}
_OVERLAP = {text: "on" if on else "off" for text, on in _BOOLEANS.items()} | {"auto": "auto"}
_GPU_DISPATCH = {"wait": "wait", "ahead": "ahead"}
_CHECKS = {"never": 0, "first": 1, "every": 2, "always": 3}


class Check(NamedTuple):
    """What ranks look at before a call.

    Attributes:
        when: when they compare their calls; the numbers are those of ``Check`` in native/calls/settings.h.
        nan: whether they look for NaN and Inf in what they bring to it.
    """

    when: int = _CHECKS["every"]
    nan: bool = False


_DEFAULT_CHECK = Check()


@dataclass(frozen=True)
class Config:
    """The settings.

    Each attribute names its variable; the documentation's page of settings is made from these lines.

    Attributes:
        check: when ranks compare what they call: never; the first time that a communicator meets a call; every time, by
            the cheapest way; or always, each with all others, whatever it costs
            (``PYCOLLECTIVE_CHECK=never|first|every|always``, default ``every``). And whether the first call to which a
            rank brings a NaN or an Inf is an error (``nan``, or ``never,nan`` and so on).
        shared_memory: the ranks of a host compare their calls, and exchange the arrays of collectives, in memory that
            they share; or there alone, so that none reads another one's arrays where they are
            (``PYCOLLECTIVE_SHARED_MEMORY=on|off|buffers``, default ``on``).
        malloc: the process keeps freed memory for later arrays (``PYCOLLECTIVE_MALLOC=on|off``, default ``on``).
        timeout: how many seconds a rank may wait for the others in one call before the job is ended with a report, or
            ``off`` (``PYCOLLECTIVE_TIMEOUT``, default 600). If it is given, it is also the limit at a rank's end.
        records: the folder in which each rank writes its last calls when the job fails, or ``off``
            (``PYCOLLECTIVE_RECORDS``, default ``pycollective-records``).
        allow_singleton: a world of one process is accepted under a launcher that started several
            (``PYCOLLECTIVE_ALLOW_SINGLETON=on|off``, default ``off``).
        bucket_bytes: sums that do not depend on each other travel together in buffers of this many bytes; 0: each by
            itself (``PYCOLLECTIVE_BUCKET_BYTES``, default 1 MiB). The same on all ranks.
        gpu_direct: MPI reads and writes the memory of GPUs itself (``PYCOLLECTIVE_GPU_DIRECT=on|off``, default what MPI
            says of itself).
        stage_bytes: where MPI does not, arrays go through page-locked buffers in pieces of this many bytes
            (``PYCOLLECTIVE_STAGE_BYTES``, default 4 MiB). The same on all ranks.
        gpu_dispatch: a collective on a GPU holds the thread that dispatches its program until MPI is done; or the
            program is dispatched ahead of its collectives, where that works, and an error of MPI ends the job
            (``PYCOLLECTIVE_GPU_DISPATCH=wait|ahead``, default ``wait``). The same on all ranks.
        allow_shared_gpu: several ranks may drive one GPU (``PYCOLLECTIVE_ALLOW_SHARED_GPU=on|off``, default ``off``).
        overlap: calls travel while the program computes what does not need them: where that pays, always, or never
            (``PYCOLLECTIVE_OVERLAP=auto|on|off``, default ``auto``: sums on accelerators, and arrays of 512 KiB and
            more between hosts, which ``shared_memory`` must know). The same on all ranks.
    """

    check: Check = _DEFAULT_CHECK
    shared_memory: str = "on"
    malloc: bool = True
    timeout: float | None = None  # None: not given; infinity: off
    records: str = "pycollective-records"  # "": off
    allow_singleton: bool = False
    bucket_bytes: int = 1 << 20
    gpu_direct: bool | None = None  # None: ask MPI
    stage_bytes: int = 4 << 20
    gpu_dispatch: str = "wait"
    allow_shared_gpu: bool = False
    overlap: str = "auto"


def _choice(environ: Mapping[str, str], name: str, values: Mapping[str, object], default: object) -> object:
    text = environ.get(name)
    if text is None or text == "":
        return default
    if text.lower() not in values:
        raise ValueError(
            message("config", f"{name} to be one of {sorted(values)}", repr(text), f"Set or unset {name}.")
        )
    return values[text.lower()]


def _check(environ: Mapping[str, str], name: str) -> Check:
    words = [word.strip() for word in environ.get(name, "").lower().split(",")]
    when = [word for word in words if word not in ("nan", "")]
    if len(when) > 1 or not set(when) <= set(_CHECKS):
        expected = f"{name} to be one of {sorted(_CHECKS)}, nan, or one of these and nan, as in 'first,nan'"
        raise ValueError(message("config", expected, repr(environ[name]), f"Set or unset {name}."))
    return Check(_CHECKS[when[0]] if when else _DEFAULT_CHECK.when, "nan" in words)


def _seconds(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name)
    if text is None or text == "":
        return None
    if _BOOLEANS.get(text.lower()) is False:
        return math.inf
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise ValueError(
            message("config", f"{name} to be a positive number of seconds, or off", repr(text), f"Set or unset {name}.")
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


def _folder(environ: Mapping[str, str], name: str, default: str) -> str:
    text = environ.get(name) or default
    return "" if _BOOLEANS.get(text.lower()) is False else text


def read(environ: Mapping[str, str]) -> Config:
    """Reads the settings.

    Raises:
        ValueError: a variable has a value that is not valid.

    Example:
        >>> read({"PYCOLLECTIVE_CHECK": "always"}).check
        Check(when=3, nan=False)
        >>> read({"PYCOLLECTIVE_CHECK": "nan"}).check
        Check(when=2, nan=True)
    """
    return Config(
        check=_check(environ, "PYCOLLECTIVE_CHECK"),
        shared_memory=_choice(environ, "PYCOLLECTIVE_SHARED_MEMORY", _SHARED_MEMORY, "on"),  # type: ignore[arg-type]
        malloc=_choice(environ, "PYCOLLECTIVE_MALLOC", _BOOLEANS, True),  # type: ignore[arg-type]
        timeout=_seconds(environ, "PYCOLLECTIVE_TIMEOUT"),
        records=_folder(environ, "PYCOLLECTIVE_RECORDS", Config.records),
        allow_singleton=_choice(environ, "PYCOLLECTIVE_ALLOW_SINGLETON", _BOOLEANS, False),  # type: ignore[arg-type]
        bucket_bytes=_bytes(environ, "PYCOLLECTIVE_BUCKET_BYTES", 1 << 20),
        gpu_direct=_choice(environ, "PYCOLLECTIVE_GPU_DIRECT", _BOOLEANS, None),  # type: ignore[arg-type]
        stage_bytes=_bytes(environ, "PYCOLLECTIVE_STAGE_BYTES", 4 << 20, least=1),
        gpu_dispatch=_choice(environ, "PYCOLLECTIVE_GPU_DISPATCH", _GPU_DISPATCH, "wait"),  # type: ignore[arg-type]
        allow_shared_gpu=_choice(environ, "PYCOLLECTIVE_ALLOW_SHARED_GPU", _BOOLEANS, False),  # type: ignore[arg-type]
        overlap=_choice(environ, "PYCOLLECTIVE_OVERLAP", _OVERLAP, "auto"),  # type: ignore[arg-type]
    )


config = read(os.environ)
