"""Reads from a profile of JAX how long sums between ranks take, and for how much of this time the GPU computes.

A staged sum copies each piece from the device and back to it, on two streams of its own
(``native/devices/device.cc``). So a sum is under way from its first copy from the device until as many copies to the
device have ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

FROM_DEVICE, TO_DEVICE = "MemcpyD2H", "MemcpyH2D"
_DEVICE, _STREAM = "/device:GPU", "Stream #"  # how XLA's profiler begins the names of planes and lines


class Span(NamedTuple):
    """The time from one moment to another, in nanoseconds."""

    start: float
    end: float


class Event(NamedTuple):
    """Something that a stream of a device did."""

    stream: str
    name: str
    span: Span


@dataclass(frozen=True)
class Overlap:
    """How long sums and kernels took, in nanoseconds.

    Attributes:
        sums: the time in which a sum was under way.
        kernels: the time in which a kernel ran.
        both: the time in which a sum was under way and a kernel ran.
    """

    sums: float
    kernels: float
    both: float

    @property
    def share(self) -> float:
        """The part of the sums' time in which a kernel ran."""
        return self.both / self.sums


def union(spans: Iterable[Span]) -> list[Span]:
    """Returns the same moments as disjoint spans, in order."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


def length(spans: Iterable[Span]) -> float:
    """Returns how long the spans are together; moments in several of them count once."""
    return sum(span.end - span.start for span in union(spans))


def common(first: Iterable[Span], second: Iterable[Span]) -> list[Span]:
    """Returns the moments that are in both."""
    a, b = union(first), union(second)
    found, i, j = [], 0, 0
    while i < len(a) and j < len(b):
        start, end = max(a[i].start, b[j].start), min(a[i].end, b[j].end)
        if start < end:
            found.append(Span(start, end))
        if a[i].end < b[j].end:
            i += 1
        else:
            j += 1
    return found


def under_way(from_device: Sequence[Span], to_device: Sequence[Span]) -> list[Span]:
    """Returns when sums were under way: more copies from the device had begun than copies to it had ended.

    Raises:
        ValueError: the numbers of the copies differ.
    """
    if len(from_device) != len(to_device):
        counts = f"{len(to_device)} and {len(from_device)}"
        raise ValueError(f"expected as many copies to the device as from it, got {counts}")
    spans, start, pieces = [], 0.0, 0
    changes = [(span.start, 1) for span in from_device] + [(span.end, -1) for span in to_device]
    for moment, change in sorted(changes):
        if pieces == 0:
            start = moment
        pieces += change
        if pieces == 0:
            spans.append(Span(start, moment))
    return spans


def overlap(events: Sequence[Event]) -> Overlap:
    """Returns the overlap of sums and kernels in a profile.

    Raises:
        ValueError: the profile has no copies, or copies that do not belong to sums.
    """
    from_device, to_device = _busiest(events, FROM_DEVICE), _busiest(events, TO_DEVICE)
    if not from_device or not to_device:
        names = sorted({event.name for event in events if event.name.startswith("Memcpy")})
        raise ValueError(f"expected copies from the device and to it, got {names or 'none'}")
    sums = under_way(from_device, to_device)
    kernels = [event.span for event in events if not event.name.startswith(("Memcpy", "Memset"))]
    return Overlap(length(sums), length(kernels), length(common(sums, kernels)))


def _busiest(events: Sequence[Event], name: str) -> list[Span]:
    """Returns the copies of this name on the stream that has most of them. XLA's own copies are on other streams."""
    streams: dict[str, list[Span]] = {}
    for event in events:
        if event.name == name:
            streams.setdefault(event.stream, []).append(event.span)
    return max(streams.values(), key=len, default=[])


def read(folder: Path) -> list[Event]:
    """Reads what the streams of all GPUs did, from the files that ``jax.profiler.trace(folder)`` has written.

    Raises:
        ValueError: there is no profile, or it has no streams of a GPU.
    """
    from jax.profiler import ProfileData

    files = sorted(folder.rglob("*.xplane.pb"))
    if not files:
        raise ValueError(f"expected a profile in {folder}, got none")
    planes = list(ProfileData.from_file(str(files[-1])).planes)
    events = [
        Event(line.name, event.name, Span(event.start_ns, event.start_ns + event.duration_ns))
        for plane in planes
        if plane.name.startswith(_DEVICE)
        for line in plane.lines
        if line.name.startswith(_STREAM)
        for event in line.events
    ]
    if not events:
        raise ValueError(f"expected streams of a GPU, got {', '.join(plane.name for plane in planes) or 'nothing'}")
    return events
