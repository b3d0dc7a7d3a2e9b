"""The speed of a cluster, as a file says it: what ``pycollective profile`` measures, and what plans are made from."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pycollective import files
from pycollective.errors import message
from pycollective.planning.curves import Curve, across

_FORMAT = 1
_FLAT = ("source", "hosts", "ranks", "devices", "memory", "call")
_READY_MADE = Path(__file__).parent / "profiles"
_TABLES = ("products", "transposed_second", "outer", "transposed", "convolutions")
_PASSES = ("streams", "transposes", "tanh")
# Without these what is transposed counts as what is not.
_OPTIONAL = ("transposed_second", "outer", "transposed", "transposes")
_MOST = 1e30  # of all numbers in a file; products of some of them are finite
_WHERE = "plan"
_MEASURE = "Measure one with `pycollective profile -o cluster.json`."

AXES, ARRAYS = "named axes", "global arrays"
"""The two kinds of programs. Collectives over named axes are this package's own; those that XLA makes for global arrays
are made by ``pycollective.distributed``."""

NARROW = "named axes, wire_dtype=bfloat16"
"""Sums over named axes of float32 that travel in bfloat16. The size is that of the float32."""

OPERATIONS = ("psum", "all_gather", "psum_scatter", "all_to_all", "ppermute")
"""The collectives that a profile knows, by JAX's names."""


class Group(NamedTuple):
    """The devices that make a collective together: as many on each of some hosts.

    All devices of the cluster are in such groups, whose collectives are under way at the same time.
    """

    per_host: int
    hosts: int

    @property
    def size(self) -> int:
        """The number of devices."""
        return self.per_host * self.hosts


class Noise(NamedTuple):
    """How much a machine was disturbed while a profile was measured. Of an idle one the first two are near 1.

    Attributes:
        computing: how many times the fastest turn of a program its turns took on average; the median of all programs.
        collectives: how many times the faster one of two measurements of a collective the slower one took; the 90th
            percentile of all sizes.
        load: the processes for each core that ran or waited for one before the measurement, on the busiest host.
    """

    computing: float
    collectives: float
    load: float

    def __str__(self) -> str:
        return (
            f"turns of a program took {self.computing:.2f} times the fastest one (median), a second measurement of a"
            f" collective {self.collectives:.2f} times the first or the other way round (90th percentile), and"
            f" {self.load:.2f} processes ran for each core before"
        )

    @property
    def is_busy(self) -> bool:
        """Whether it is more than an idle machine has."""
        return any(own > most for own, most in zip(self, _QUIET, strict=True))


_QUIET = Noise(1.1, 2.0, 0.3)
"""The most that a machine has on which nobody else computes."""


def group_of(devices: Sequence[int], per_host: int) -> Group:
    """The kind of a group: on how many hosts its devices are, and how many on each.

    Example:
        >>> group_of((0, 1), 2), group_of((0, 2), 2)
        (Group(per_host=2, hosts=1), Group(per_host=1, hosts=2))
    """
    hosts = Counter(device // per_host for device in devices)
    return Group(max(hosts.values()), len(hosts))


@dataclass(frozen=True)
class Profile:
    """The speed and the memory of a cluster.

    Attributes:
        source: where the numbers come from: what measured them and when, or the page that they stand on.
        hosts: the number of hosts.
        ranks: the number of ranks on all of them.
        devices: the number of devices of each rank.
        memory: the bytes that the arrays of a device can take.
        collectives: from the kind of program and the operation to the curve of each group. The size is the number of
            bytes of operand or result, the larger of both. Of sums that travel in bfloat16 there may be none.
        products: from a dtype to the curves of products of matrices (m, k) and (k, n), one for each measured smallest
            number of m, k and n. The size is the number of operations, 2 m k n.
        convolutions: the same for convolutions, as the products that they are: (places of the window in all examples,
            entries of a window) and (entries of a window, channels after it).
        transposed_second: the same for products whose second matrix lies transposed, where m is the smallest; may be
            empty. So are the gradients by what goes into a layer, of few examples.
        outer: the same for products whose first matrix lies transposed, where k is the smallest; may be empty. So are
            the gradients by weights, of few examples.
        transposed: the same for products whose matrices both lie transposed, over the smaller of m and n; may be empty.
        streams: seconds to read and write so many bytes in one pass over arrays.
        tanh: seconds to compute so many hyperbolic tangents, which stand for all functions of that kind.
        transposes: seconds of such a pass that reads one of its arrays, of so many bytes, along the columns; may be
            None.
        call: seconds that the smallest program takes.
        instruction: seconds that each instruction of a program of many takes beside what it takes alone.
        noise: how much the machine was disturbed during the measurement; None if the profile does not say it.
        overlap: from the kind of program to the share of the shorter one, of a collective of all devices and of a
            computation that does not need it, that passes at the same time. What is missing counts as 0.
    """

    source: str
    hosts: int
    ranks: int
    devices: int
    memory: int
    collectives: Mapping[str, Mapping[str, Mapping[Group, Curve]]]
    products: Mapping[str, Mapping[int, Curve]]
    convolutions: Mapping[str, Mapping[int, Curve]]
    streams: Curve
    tanh: Curve
    call: float = 0.0
    transposed_second: Mapping[str, Mapping[int, Curve]] = field(default_factory=dict)
    outer: Mapping[str, Mapping[int, Curve]] = field(default_factory=dict)
    transposed: Mapping[str, Mapping[int, Curve]] = field(default_factory=dict)
    transposes: Curve | None = None
    instruction: float = 0.0
    noise: Noise | None = None
    overlap: Mapping[str, float] = field(default_factory=dict)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on how far the profile can be trusted."""
        if self.noise is None or not self.noise.is_busy:
            return ()
        doubt = "times may be too long and plans in the wrong order; measure again while nobody else computes there"
        return (f"the profile was measured on a busy machine ({self.noise}): {doubt}",)

    @property
    def per_host(self) -> int:
        """The number of devices of each host."""
        return self.ranks * self.devices // self.hosts

    def collective_s(self, operation: str, nbytes: float, group: Group, programs: str = ARRAYS) -> float:
        """Returns the seconds of a collective.

        A group that was not measured gets the time of the nearest one that was, between hosts if it is between hosts.
        Its latency is scaled with the logarithm of the number of devices, and the rest with the bytes that pass the
        narrowest link: that of a host if the group is on several, else that of a device.

        Args:
            operation: "psum", "all_gather", "psum_scatter", "all_to_all" or "ppermute".
            nbytes: the bytes of operand or result, the larger of both.
            group: the devices that make it together.
            programs: "named axes", "global arrays" or "named axes, wire_dtype=bfloat16".

        Raises:
            ValueError: the operation was measured for no group in such programs.

        Example:
            >>> sums = {Group(2, 1): Curve((8, 1024), (1e-6, 5e-6)), Group(1, 2): Curve((8, 1024), (1e-5, 2e-5))}
            >>> one = Curve((1,), (1,))
            >>> profile = Profile("measured", 2, 4, 1, 1, {ARRAYS: {"psum": sums}}, {}, {}, one, one)
            >>> profile.collective_s("psum", 1024, Group(2, 1)), profile.collective_s("psum", 1024, Group(1, 1))
            (5e-06, 0.0)
            >>> round(profile.collective_s("psum", 1024, Group(1, 4)) * 1e6)  # 10 us twice, and the rest 1.5 times
            35
        """
        if group.size == 1:
            return 0.0
        curves = self.collectives.get(programs, {}).get(operation)
        if not curves:
            got = f"one of {self.ranks} rank(s) x {self.devices} device(s) without it"
            remedy = "Measure one with several ranks, and with one device each for global arrays."
            raise ValueError(message(_WHERE, f"a profile with {operation} in programs of {programs}", got, remedy))
        if group in curves:
            return curves[group](nbytes)
        known = min(curves, key=lambda other: _distance(group, other))
        whole = curves[known](nbytes)
        latency = min(curves[known].seconds[0], whole)  # of two sizes that take as long the smaller may seem slower
        steps = math.log2(group.size) / math.log2(known.size)
        moved = _moved(operation, group, self.per_host) / _moved(operation, known, self.per_host)
        return latency * steps + (whole - latency) * moved

    def part_s(self, alone: float) -> float:
        """Returns the seconds that a part adds to a program, from those of a program of this part alone."""
        return max(alone - self.call, 0.0)

    def beside_s(self, communication: float, computing: float, programs: str) -> float:
        """Returns the seconds of collectives and computation that pass at the same time where the program lets them.

        Args:
            communication: the seconds of the collectives.
            computing: those of the computation that may take place during them.
            programs: "named axes" or "global arrays".
        """
        return self.overlap.get(programs, 0.0) * min(communication, computing)

    def product_s(self, dtype: str, m: float, k: float, n: float, batch: float = 1, form: str = "NN") -> float:
        """Returns the seconds of so many products of matrices (m, k) and (k, n) in one call.

        They take as long as one product of as many operations that lies in the same way and whose smallest dimension is
        the same. If the first matrix lies transposed, each of its rows is read in steps, once for each column of the
        second: with few columns these reads take longest. If the second lies transposed too, each of its columns is
        read in steps, once for each row of the first.

        Args:
            dtype: the dtype.
            m: the rows of the first matrix.
            k: what is summed over.
            n: the columns of the second one.
            batch: the number of products.
            form: how the matrices lie: "NN", "NT", "TN" or "TT", where "T" means transposed.
        """
        table, smallest = self.products, min(m, k, n)
        if form == "NT" and m == smallest:
            table = self.transposed_second
        elif form.startswith("T") and smallest == (min(m, n) if form == "TT" else n):
            table = self.transposed
        elif form.startswith("T") and k == smallest:
            table = self.outer
        return across(_by_dtype(table or self.products, dtype), smallest, 2.0 * batch * m * k * n)

    def stream_s(self, nbytes: float, functions: float = 0, transposed: Sequence[float] = ()) -> float:
        """Returns the seconds of a pass over arrays, by what takes longest.

        Args:
            nbytes: the bytes that it reads and writes.
            functions: the number of hyperbolic tangents and the like that it computes.
            transposed: the bytes of each array that it reads along the columns.
        """
        seconds = self.streams(nbytes)
        if functions:
            seconds = max(seconds, self.tanh(functions))
        if transposed and self.transposes:
            seconds = max(seconds, self.call + sum(self.transposes(size) - self.call for size in transposed))
        return seconds

    def convolution_s(self, dtype: str, smallest: float, operations: float) -> float:
        """Returns the seconds of a convolution, by the smallest number of its product and its number of operations."""
        return across(_by_dtype(self.convolutions, dtype), smallest, operations)

    def check_devices(self, devices: int | None) -> int:
        """Returns the number of devices of a plan; default those of the profile.

        Raises:
            ValueError: they are not the devices of whole hosts.
        """
        inside = self.per_host
        if devices is None:
            return self.ranks * self.devices
        if devices < 1 or (devices > inside and devices % inside):
            remedy = "Choose another number, or measure a profile of such hosts."
            raise ValueError(message(_WHERE, f"devices of whole hosts, which have {inside} each", devices, remedy))
        return devices

    def save(self, path: Path) -> None:
        """Writes the profile as JSON."""
        collectives = [
            {"programs": programs, "operation": operation, **group._asdict(), **curve._asdict()}
            for programs, operations in self.collectives.items()
            for operation, curves in operations.items()
            for group, curve in curves.items()
        ]
        tables = {
            name: [
                {"dtype": dtype, "smallest": smallest, **curve._asdict()}
                for dtype, curves in getattr(self, name).items()
                for smallest, curve in curves.items()
            ]
            for name in _TABLES
        }
        flat = {key: getattr(self, key) for key in (*_FLAT, "instruction", "overlap")}
        if self.noise:
            flat["noise"] = self.noise._asdict()
        passes = {name: curve._asdict() for name in _PASSES if (curve := getattr(self, name))}
        rest = {**passes, "collectives": collectives, **tables}
        files.write(path, json.dumps({"format": _FORMAT, **flat, **rest}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Reads a profile.

        Args:
            path: the file, or the name of a ready-made profile: "dgx-a100".

        Raises:
            OSError: there is no such file, or it cannot be read.
            ValueError: the file is no profile.

        Example:
            >>> Profile.load("dgx-a100").per_host
            8
        """
        path = Path(path)
        if not path.exists():
            ready_made = _READY_MADE / f"{path}.json"
            if not ready_made.exists():
                names = ", ".join(sorted(f'"{file.stem}"' for file in _READY_MADE.glob("*.json")))
                expected = f"a file, or the name of a profile that comes with the package, {names}"
                raise FileNotFoundError(message(_WHERE, expected, str(path), _MEASURE))
            path = ready_made
        try:
            return cls._from_json(json.loads(path.read_text()))
        except (KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
            got = f"{path}: {type(error).__name__}: {error}"
            raise ValueError(message(_WHERE, "a profile of a cluster", got, _MEASURE)) from error

    @classmethod
    def _from_json(cls, read: dict[str, Any]) -> Profile:
        if read["format"] != _FORMAT:
            raise ValueError(f"it has format {read['format']}, and this version reads {_FORMAT}")
        collectives: dict[str, dict[str, dict[Group, Curve]]] = {}
        for row in read["collectives"]:
            curves = collectives.setdefault(_text(row, "programs"), {}).setdefault(_text(row, "operation"), {})
            group = Group(row["per_host"], row["hosts"])
            if not all(map(_is_count, group)) or group.size == 1:
                raise ValueError(f"devices that make a collective together are 2 or more, not {tuple(group)}")
            curves[group] = _curve(row)
        rest: dict[str, Any] = {key: read[key] for key in _FLAT}
        rest["source"] = _text(read, "source")
        hosts, ranks, devices, memory = counts = [rest[key] for key in ("hosts", "ranks", "devices", "memory")]
        if not all(map(_is_count, counts)) or ranks % hosts:
            got = f"{hosts} hosts, {ranks} ranks, {devices} devices of {memory} B"
            raise ValueError(f"it needs whole numbers above 0, and as many ranks on each host, not {got}")
        call, instruction = float(read["call"]), float(read.get("instruction", 0.0))
        if not (0 <= call < _MOST and 0 <= instruction < _MOST):
            raise ValueError(f"call and instruction take 0 s or more, not {call} and {instruction}")
        rest.update(call=call, instruction=instruction)
        overlap = rest["overlap"] = {key: float(value) for key, value in read.get("overlap", {}).items()}
        if not all(0 <= share <= 1 for share in overlap.values()):
            raise ValueError(f"overlap is a share from 0 to 1, not {overlap}")
        if "noise" in read:
            noise = rest["noise"] = Noise(**{key: float(value) for key, value in read["noise"].items()})
            if not all(0 <= number < _MOST for number in noise):
                raise ValueError(f"noise has numbers of 0 or more, not {tuple(noise)}")
        for name in _TABLES:
            table = rest[name] = {}
            for row in read.get(name, ()) if name in _OPTIONAL else read[name]:
                if not _is_count(row["smallest"]):
                    raise ValueError(f"the smallest number of {name} is a whole number above 0, not {row['smallest']}")
                table.setdefault(_text(row, "dtype"), {})[row["smallest"]] = _curve(row)
            if not table and name not in _OPTIONAL:
                raise ValueError(f"it has no {name}")
        for name in _PASSES:
            rest[name] = None if name in _OPTIONAL and name not in read else _curve(read[name])
        return cls(**rest, collectives=collectives)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 < value < _MOST


def _text(row: Mapping[str, Any], name: str) -> str:
    if not isinstance(row[name], str):
        raise ValueError(f"{name} is a text, not {row[name]}")
    return row[name]


def _curve(row: Mapping[str, Any]) -> Curve:
    sizes, seconds = tuple(map(float, row["sizes"])), tuple(map(float, row["seconds"]))
    rising = list(sizes) == sorted({*sizes}) and all(1 / _MOST < number < _MOST for number in (*sizes, *seconds))
    if not sizes or len(sizes) != len(seconds) or not rising:
        raise ValueError(f"a curve needs sizes that rise from above 0, and a time for each, not {sizes} and {seconds}")
    return Curve(sizes, seconds)


def _by_dtype(tables: Mapping[str, Mapping[int, Curve]], dtype: str) -> Mapping[int, Curve]:
    """The curves of a dtype. One that was not measured gets those of float32, or of the first one."""
    return tables.get(dtype) or tables.get("float32") or next(iter(tables.values()))


def _distance(group: Group, other: Group) -> tuple[bool, float]:
    """How little a measured group says of another one."""
    apart = abs(math.log(group.per_host / other.per_host)) + abs(math.log(group.hosts / other.hosts))
    return (group.hosts > 1) != (other.hosts > 1), apart


def _moved(operation: str, group: Group, per_host: int) -> float:
    """The bytes that pass the narrowest link for each byte of the array: a host's link, or that of a device."""
    if operation == "all_to_all" and group.hosts > 1:
        return per_host * (group.size - group.per_host) / group.size
    n = group.hosts if group.hosts > 1 else group.size
    share = 1.0 if operation == "ppermute" else (n - 1) / n * (2 if operation == "psum" else 1)
    # Devices of one host that are in one group send and receive an array once for all of them.
    return share * (per_host / (1 if operation == "ppermute" else group.per_host) if group.hosts > 1 else 1)
