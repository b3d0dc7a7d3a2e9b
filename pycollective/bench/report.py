"""What a run leaves behind: a table in nccl-tests' words, and JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass

COLUMNS = (
    f"{'size':>11} {'count':>11} {'type':>9}  {'contender':<26} {'median':>10} {'min':>10} {'p99':>10} "
    f"{'algbw':>8} {'busbw':>8} {'#wrong':>6} {'/raw':>7} {'roofline':>6}"
)
UNITS = (
    f"{'(B)':>11} {'(elements)':>11} {'':>9}  {'':<26} {'(us)':>10} {'(us)':>10} {'(us)':>10} "
    f"{'(GB/s)':>8} {'(GB/s)':>8}"
)


@dataclass(frozen=True)
class Row:
    """One contender at one work.

    Attributes:
        op: the operation, or ``tree:MODEL``.
        mode: how it was called.
        size: bytes.
        count: elements.
        type: of an element.
        contender: who.
        median_us: time of a call, microseconds.
        min_us: of the fastest.
        p99_us: that 99 of 100 calls did not exceed.
        algbw: bytes over time, GB/s.
        busbw: times nccl-tests' factor, GB/s.
        wrong: elements that were not what they must be.
        over_raw: the median over raw MPI's; None without.
        roofline: the least time on this hardware over the median.
    """

    op: str
    mode: str
    size: int
    count: int
    type: str
    contender: str
    median_us: float
    min_us: float
    p99_us: float
    algbw: float
    busbw: float
    wrong: int
    over_raw: float | None
    roofline: float

    def line(self) -> str:
        """As in the table."""
        raw = "-" if self.over_raw is None else f"{self.over_raw:.2f}x"
        return (
            f"{self.size:>11} {self.count:>11} {self.type:>9}  {self.contender:<26} {self.median_us:>10.1f} "
            f"{self.min_us:>10.1f} {self.p99_us:>10.1f} {self.algbw:>8.3f} {self.busbw:>8.3f} {self.wrong:>6} {raw:>7} "
            f"{self.roofline:>6.0%}"
        )

    def as_json(self) -> dict[str, object]:
        return asdict(self)
