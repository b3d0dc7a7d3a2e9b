"""What a profile of JAX says of the time that sums between ranks take on a GPU: how much of it the GPU computes.

A staged sum copies each piece from the device and back to it, on two streams of its own (``native/device.cc``). So it
is under way from the first copy from the device until as many have gone back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

FROM_DEVICE, TO_DEVICE = "MemcpyD2H", "MemcpyH2D"
_DEVICE, _STREAM = "/device:GPU", "Stream #"  # how XLA's profiler begins the names of planes and lines


class Span(NamedTuple):
    """From one moment to another, nanoseconds."""

    start: float
    end: float


class Event(NamedTuple):
    """Something that a stream of a device did."""

    stream: str
    name: str
    span: Span


@dataclass(frozen=True)
class Overlap:
    """Attributes are nanoseconds.

    Attributes:
        sums: during which a sum was under way.
        kernels: during which a kernel ran.
        both: at once.
    """

    sums: float
    kernels: float
    both: float

    @property
    def share(self) -> float:
        """Of the time of the sums, that in which the GPU computed."""
        return self.both / self.sums


def union(spans: Iterable[Span]) -> list[Span]:
    """The same moments as disjoint spans, in order."""
    merged: list[Span] = []
    for span in sorted(spans):
        if merged and span.start <= merged[-1].end:
            merged[-1] = Span(merged[-1].start, max(merged[-1].end, span.end))
        else:
            merged.append(span)
    return merged


def length(spans: Iterable[Span]) -> float:
    """Of the moments in any of them."""
    return sum(span.end - span.start for span in union(spans))


def common(first: Iterable[Span], second: Iterable[Span]) -> list[Span]:
    """The moments that are in both."""
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


def under_way(come: Sequence[Span], gone: Sequence[Span]) -> list[Span]:
    """When more copies had begun to come than had gone back.

    Raises:
        ValueError: they are not as many.
    """
    if len(come) != len(gone):
        raise ValueError(f"expected as many copies to the device as from it, got {len(gone)} and {len(come)}")
    spans, start, pieces = [], 0.0, 0
    for moment, change in sorted([(span.start, 1) for span in come] + [(span.end, -1) for span in gone]):
        if pieces == 0:
            start = moment
        pieces += change
        if pieces == 0:
            spans.append(Span(start, moment))
    return spans


def overlap(events: Sequence[Event]) -> Overlap:
    """Of the sums in a profile.

    Raises:
        ValueError: it has no copies, or such that do not belong to sums.
    """
    come, gone = _busiest(events, FROM_DEVICE), _busiest(events, TO_DEVICE)
    if not come or not gone:
        names = sorted({event.name for event in events if event.name.startswith("Memcpy")})
        raise ValueError(f"expected copies from the device and to it, got {names or 'none'}")
    sums = under_way(come, gone)
    kernels = [event.span for event in events if not event.name.startswith(("Memcpy", "Memset"))]
    return Overlap(length(sums), length(kernels), length(common(sums, kernels)))


def _busiest(events: Sequence[Event], name: str) -> list[Span]:
    """The copies of that name on the stream that has most: XLA's own, of a scalar say, are on others."""
    streams: dict[str, list[Span]] = {}
    for event in events:
        if event.name == name:
            streams.setdefault(event.stream, []).append(event.span)
    return max(streams.values(), key=len, default=[])


def read(folder: Path) -> list[Event]:
    """What the streams of all GPUs did, from what ``jax.profiler.trace(folder)`` wrote.

    Raises:
        ValueError: there is no profile, or no stream in it.
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
