"""The results of a run: a table in nccl-tests' words, and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass

COLUMNS = (
    f"{'size':>11} {'count':>11} {'type':>9}  {'implementation':<26} {'median':>10} {'min':>10} {'p99':>10} "
    f"{'algbw':>8} {'busbw':>8} {'#wrong':>6} {'/raw':>7} {'roofline':>8}"
)
UNITS = (
    f"{'(B)':>11} {'(elements)':>11} {'':>9}  {'':<26} {'(us)':>10} {'(us)':>10} {'(us)':>10} "
    f"{'(GB/s)':>8} {'(GB/s)':>8}"
)


@dataclass(frozen=True)
class Row:
    """One implementation at one workload: a line of the table.

    Attributes:
        op: the operation, or ``tree:MODEL``.
        mode: how it was called.
        size: the number of bytes.
        count: the number of elements.
        type: the dtype of an element.
        implementation: the implementation's name.
        median_us: the median time of a call, in microseconds.
        min_us: the time of the fastest call.
        p99_us: the time that 99 of 100 calls did not exceed.
        algbw: bytes over time, in GB/s.
        busbw: algbw times nccl-tests' factor, in GB/s.
        wrong: the number of wrong elements.
        over_raw: the median over that of raw MPI; None without raw MPI.
        roofline: the least time on this hardware over the median.
    """

    op: str
    mode: str
    size: int
    count: int
    type: str
    implementation: str
    median_us: float
    min_us: float
    p99_us: float
    algbw: float
    busbw: float
    wrong: int
    over_raw: float | None
    roofline: float

    def line(self) -> str:
        """The line of the table."""
        raw = "-" if self.over_raw is None else f"{self.over_raw:.2f}x"
        return (
            f"{self.size:>11} {self.count:>11} {self.type:>9}  {self.implementation:<26} {self.median_us:>10.1f} "
            f"{self.min_us:>10.1f} {self.p99_us:>10.1f} {self.algbw:>8.3f} {self.busbw:>8.3f} {self.wrong:>6} {raw:>7} "
            f"{self.roofline:>8.0%}"
        )

    def as_json(self) -> dict[str, object]:
        return asdict(self)
