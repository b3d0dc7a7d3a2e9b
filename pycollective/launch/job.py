"""What ``pycollective run`` starts, whichever launcher it takes."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from pycollective.errors import message


@dataclass(frozen=True)
class Job:
    """A program, the number of its ranks, and their hosts.

    Attributes:
        ranks: the number of ranks.
        command: the command of each rank.
        hosts: the names of the hosts, each with its number of ranks or None; empty for this host, or for the hosts of
            the allocation.
        hostfile: a file that lists the hosts instead, in the launcher's own form.
        label: whether each line of output begins with its rank.
        oversubscribe: whether there may be more ranks than cores.
        carried: the names of the variables that the ranks on all hosts need.
        elastic: whether the other ranks live on when one has died.
    """

    ranks: int
    command: Sequence[str]
    hosts: Sequence[tuple[str, int | None]] = ()
    hostfile: str | None = None
    label: bool = False
    oversubscribe: bool = False
    carried: Sequence[str] = ()
    elastic: bool = False

    def shares(self) -> list[tuple[str, int]]:
        """The hosts, each with its number of ranks. Hosts without a number get as equal a number as can be.

        Example:
            >>> Job(5, (), [("a", None), ("b", None)]).shares()
            [('a', 3), ('b', 2)]
        """
        open_hosts = sum(number is None for _, number in self.hosts)
        left = max(self.ranks - sum(number or 0 for _, number in self.hosts), 0)
        rest = iter(spread(left, [left] * open_hosts))
        parts = [(name, next(rest) if number is None else number) for name, number in self.hosts]
        return [(name, number) for name, number in parts if number > 0]

    def capacity(self) -> dict[str, int]:
        """How many ranks each host can take: its number, or as many as the fullest host without a number gets.

        Example:
            >>> Job(5, (), [("a", None), ("b", None), ("c", 1)]).capacity()
            {'a': 2, 'b': 2, 'c': 1}
        """
        open_hosts = sum(number is None for _, number in self.hosts)
        left = max(self.ranks - sum(number or 0 for _, number in self.hosts), 0)
        most = max(-(-left // max(open_hosts, 1)), 1)
        return {name: most if number is None else number for name, number in self.hosts}

    def ranks_of_each_host(self) -> int:
        """The number of ranks on each host, for a launcher that takes one number for all hosts.

        Raises:
            ValueError: the numbers differ.
        """
        numbers = {number for _, number in self.shares()}
        if len(numbers) > 1:
            got = ", ".join(f"{number} on {name}" for name, number in self.shares())
            remedy = "Choose other --ranks or --hosts, or another launcher with --mpi."
            raise ValueError(message("run", "the same number of ranks on each host for this launcher", got, remedy))
        return numbers.pop()


def spread(ranks: int, capacity: Sequence[int]) -> list[int]:
    """The number of ranks on each host: as equal as their capacity allows; when all are full, as equal as can be.

    Example:
        >>> spread(5, [4, 1, 1]), spread(3, [4, 4]), spread(5, [1, 1])
        ([3, 1, 1], [2, 1], [3, 2])
    """
    # The next rank goes to the smallest of (is full, ranks, host): hosts that are not full come first, and among these
    # the host with the fewest ranks.
    hosts = [(limit <= 0, 0, i) for i, limit in enumerate(capacity)]
    heapq.heapify(hosts)
    for _ in range(ranks if hosts else 0):
        _, number, i = hosts[0]
        heapq.heapreplace(hosts, (number + 1 >= capacity[i], number + 1, i))
    return [number for _, number, _ in sorted(hosts, key=lambda host: host[2])]
