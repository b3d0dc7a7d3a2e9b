"""Draws the pictures of the documentation: ``python docs/pictures/draw.py`` writes them, ``--check`` compares.

They are SVG with a background of their own, light or dark as the reader's system asks, so they are legible on any page.
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
WIDTH = 760

# What a class of shapes looks like: (light, dark).
_FILL = {
    "card": ("#ffffff", "#161b22"),
    "box": ("#f3f5f8", "#21262d"),
    "code": ("#eef2f7", "#0d1117"),
    "band": ("#f8fafc", "#1b2129"),
    "mpi": ("#e2e8f0", "#30363d"),
    "rank0": ("#dbeafe", "#1d3557"),
    "rank1": ("#fdecc8", "#4a3512"),
    "rank2": ("#d3f3e1", "#123f2c"),
    "rank3": ("#ece4fd", "#372a5e"),
}
_STROKE = {
    "card": ("#d7dde5", "#30363d"),
    "box": ("#cbd5e1", "#3d444d"),
    "code": ("#d7dde5", "#30363d"),
    "band": ("#e2e8f0", "#2a313a"),
    "mpi": ("#94a3b8", "#6e7781"),
    "rank0": ("#3b82f6", "#60a5fa"),
    "rank1": ("#d97706", "#f0b849"),
    "rank2": ("#10a464", "#41c98b"),
    "rank3": ("#8b5cf6", "#a78bfa"),
}
_INK = {
    "text": ("#1f2937", "#e6edf3"),
    "muted": ("#5b6675", "#9da7b3"),
    "line": ("#64748b", "#8b949e"),
}
_SANS = "-apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif"
_MONO = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def _style() -> str:
    def colours(which: int) -> str:
        shapes = [f".{name}{{fill:{_FILL[name][which]};stroke:{_STROKE[name][which]}}}" for name in _FILL]
        edges = [f".edge-{name}{{stroke:{_STROKE[name][which]};fill:none}}" for name in _STROKE]
        tips = [f".tip-{name}{{fill:{_STROKE[name][which]}}}" for name in _STROKE]
        text, muted, line = (_INK[name][which] for name in ("text", "muted", "line"))
        inks = f".text{{fill:{text}}}.muted{{fill:{muted}}}.line{{stroke:{line};fill:none}}.tip{{fill:{line}}}"
        return "".join([*shapes, *edges, *tips, inks])

    fonts = f"text{{font:14px {_SANS}}}.mono{{font:13px {_MONO}}}.small{{font-size:12.5px}}.bold{{font-weight:600}}"
    sizes = ".head{font-size:15px}.big{font-size:19px}"
    return f"{fonts}{sizes}{colours(0)}@media(prefers-color-scheme:dark){{{colours(1)}}}"


class Picture:
    """Shapes in the order in which they are drawn, on a card of ``WIDTH`` x ``height``."""

    def __init__(self, height: int, title: str) -> None:
        self._height = height
        self._title = title
        self._shapes: list[str] = []
        self.box(0.5, 0.5, WIDTH - 1, height - 1, "card", radius=10)

    def box(self, x: float, y: float, width: float, height: float, kind: str, radius: float = 6) -> None:
        """A rectangle."""
        size = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"'
        self._shapes.append(f'<rect {size} class="{kind}"/>')

    def text(self, x: float, y: float, content: str, kind: str = "text", anchor: str = "start") -> None:
        """One line of text; ``y`` is the middle of its height."""
        below = 6.8 if "big" in kind else 4.8
        attributes = f'x="{x:g}" y="{y + below:g}" class="{kind}" text-anchor="{anchor}"'
        self._shapes.append(f'<text {attributes} xml:space="preserve">{escape(content, quote=False)}</text>')

    def lines(self, x: float, y: float, contents: list[str], kind: str = "text", anchor: str = "start") -> None:
        """Lines of text around the height ``y``."""
        for i, content in enumerate(contents):
            self.text(x, y + 18 * (i - (len(contents) - 1) / 2), content, kind, anchor)

    def path(
        self, points: list[tuple[float, float]], kind: str = "", *, width: float = 1.6, dashed: bool = False
    ) -> None:
        """A line through points."""
        steps = " ".join(f"{'ML'[min(i, 1)]}{x:g} {y:g}" for i, (x, y) in enumerate(points))
        dashes = ' stroke-dasharray="5 4"' if dashed else ""
        edge = f"edge-{kind}" if kind else "line"
        self._shapes.append(
            f'<path d="{steps}" class="{edge}" stroke-width="{width:g}"{dashes} stroke-linejoin="round"/>'
        )

    def arrow(
        self, points: list[tuple[float, float]], kind: str = "", *, both: bool = False, dashed: bool = False
    ) -> None:
        """A line with a tip at its end, or at both; its last part is horizontal or vertical."""
        ends = [(points[-2], points[-1])] + ([(points[1], points[0])] if both else [])
        drawn = list(points)
        for start, end in ends:
            dx, dy = (end[0] > start[0]) - (end[0] < start[0]), (end[1] > start[1]) - (end[1] < start[1])
            at = drawn.index(end)
            drawn[at] = (end[0] - 6 * dx, end[1] - 6 * dy)
            corners = [end, (end[0] - 8 * dx + 4 * dy, end[1] - 8 * dy + 4 * dx)]
            corners.append((end[0] - 8 * dx - 4 * dy, end[1] - 8 * dy - 4 * dx))
            shape = " ".join(f"{x:g},{y:g}" for x, y in corners)
            self._shapes.append(f'<polygon points="{shape}" class="{f"tip-{kind}" if kind else "tip"}"/>')
        self.path(drawn, kind, dashed=dashed)

    def svg(self) -> str:
        """The whole file."""
        head = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" role="img"'
        size = f'width="{WIDTH}" height="{self._height}"'
        parts = [f"<title>{escape(self._title)}</title>", f"<style>{_style()}</style>", *self._shapes]
        return "\n".join([f"<svg {head} {size}>", *parts, "</svg>", ""])


def call() -> Picture:
    """The way of a call: from the user's function to MPI and back."""
    rows = [
        ("your function", ['lax.psum((a, b), "batch")'], ["named axes, plain jax.lax,", "in your code or a library's"]),
        (
            "trace",
            ["psum[axes=('batch',)] a", "psum[axes=('batch',)] b"],
            ["JAX traces with the axis at its full", "size; grad and vmap are JAX's rules"],
        ),
        (
            "discharge",
            ["pycollective_allreduce a b"],
            ["collectives become our primitives;", "independent sums become one"],
        ),
        (
            "lowering",
            ["custom_call @pycollective_", "allreduce(token, a, b)"],
            ["one call of the transport;", "a token keeps the order of calls"],
        ),
        ("compile", ["XLA"], ["ranks compare what they traced,", "then XLA compiles it"]),
        (
            "dispatch",
            ["step(params, batch)"],
            ["waits for its turn behind earlier", "programs, then JAX's fast dispatch"],
        ),
        (
            "FFI handler",
            ["Allreduce(token, a, b)"],
            ["C++, called by XLA on each local", "device's thread; devices meet"],
        ),
        ("MPI", ["MPI_Allreduce"], ["one call of the machine's library;", "the sum lies in XLA's own buffer"]),
    ]
    first_call, every_call = range(1, 5), range(5, 8)
    row_height, strip = 62, 38  # a strip with its name stands above each part

    def middle(row: int) -> float:
        return 84 + row_height * row + strip * ((row >= first_call.start) + (row >= every_call.start))

    end = middle(len(rows) - 1)
    picture = Picture(int(end) + 112, "The way of a call")
    picture.text(28, 34, "The way of a call", "text head bold")
    picture.text(196, 34, "what it is there", "muted small")
    picture.text(456, 34, "what happens", "muted small")
    for part, colour, name in (
        (first_call, "rank0", "once, at the first call"),
        (every_call, "rank2", "at every call"),
    ):
        top, bottom = middle(part.start) - 58, middle(part.stop - 1) + 32
        picture.box(14, top, WIDTH - 28, bottom - top, "band", radius=8)
        picture.text(WIDTH - 32, top + 18, name, "muted small bold", "end")
        for row in part:
            picture.box(28, middle(row) - 20, 124, 40, colour)
    picture.box(28, middle(0) - 20, 124, 40, "rank1")
    for row, (name, code, what) in enumerate(rows):
        y = middle(row)
        picture.text(90, y, name, "text bold", "middle")
        picture.box(184, y - 23, 244, 46, "code")
        picture.lines(196, y, code, "text mono")
        picture.lines(456, y, what)
        if row:
            picture.arrow([(90, middle(row - 1) + 20), (90, y - 20)], both=row > every_call.start)
    picture.box(28, end + 56, WIDTH - 56, 36, "mpi")
    picture.text(WIDTH / 2, end + 74, "the other ranks, which make the same call", "text", "middle")
    picture.arrow([(90, end + 20), (90, end + 56)], both=True)
    return picture


def _device(picture: Picture, x: float, y: float, number: int, below: str = "") -> None:
    picture.box(x, y, 52, 46, f"rank{number // 2}")
    picture.text(x + 26, y + (17 if below else 23), str(number), "text big bold", "middle")
    if below:
        picture.text(x + 26, y + 36, below, "muted small", "middle")


def devices() -> Picture:
    """Ranks x devices: how devices are numbered, and how meshes cut that row of numbers."""
    picture = Picture(548, "Ranks x devices")
    picture.text(28, 34, "4 ranks x 2 local devices", "text head bold")
    picture.text(WIDTH - 28, 34, "number = rank * local devices + local index", "text mono", "end")
    for host, name in enumerate(("host alpha", "host beta")):
        x = 28 + 360 * host
        picture.box(x, 56, 344, 132, "band", radius=8)
        picture.text(x + 14, 74, name, "muted small bold")
        for local_rank in range(2):
            rank = 2 * host + local_rank
            left = x + 14 + 162 * local_rank
            picture.box(left, 90, 154, 86, "box")
            picture.text(left + 77, 106, f"rank {rank}, a process", "text small", "middle")
            for local in range(2):
                _device(picture, left + 20 + 62 * local, 120, 2 * rank + local, f"local {local}")
    picture.path([(28, 210), (WIDTH - 28, 210)], "card")
    picture.text(28, 236, "Meshes cut the row of numbers into named axes, row by row", "text head bold")
    for rows, columns, left in ((4, 2, 28), (2, 4, 388)):
        picture.text(left, 266, f'make_mesh(({rows}, {columns}), ("data", "model"))', "text mono")
        x, y = left + 74, 318
        across = columns * 60 - 8
        picture.text(x + across / 2, 292, "model", "text bold", "middle")
        picture.arrow([(x, 306), (x + across, 306)])
        down = rows * 54 - 8
        picture.text(left + 46, y + down / 2, "data", "text bold", "end")
        picture.arrow([(left + 58, y), (left + 58, y + down)])
        for i in range(8):
            _device(picture, x + 60 * (i % columns), y + 54 * (i // columns), i)
    picture.lines(250, 423, ["model: within", "each rank", "", "data: across", "the ranks"], "text small")
    both_ways = "model: two ranks, and both devices of each. These"
    picture.lines(
        392,
        475,
        [both_ways, "meet in the rank, then one calls MPI.", "", "data: between ranks 0 and 2, 1 and 3"],
        "text small",
    )
    return picture


def lanes() -> Picture:
    """What the local devices of a rank do in a collective, and which of them calls MPI."""
    picture = Picture(654, "Lanes")
    _panel(
        picture, 20, 'psum(x, "batch"), a named axis', "The devices of a rank meet. One calls MPI for all.", meet=True
    )
    _panel(picture, 386, "psum(x, comm), a communicator", "Each device calls MPI on its own lane.", meet=False)
    _pieces(picture, 406)
    return picture


def _panel(picture: Picture, left: float, title: str, note: str, *, meet: bool) -> None:
    """Two ranks of two devices in one collective."""
    picture.box(left, 20, 354, 362, "band", radius=8)
    picture.text(left + 16, 42, title, "text mono bold")
    picture.text(left + 16, 66, note, "muted small")
    bars = [(300.0, 62.0, "one MPI_Allreduce")] if meet else [(300.0, 28.0, "lane 0"), (334.0, 28.0, "lane 1")]
    for y, height, name in bars:
        picture.box(left + 16, y, 322, height, "mpi")
        picture.text(left + 177, y + height / 2, name, "text small", "middle")
    for rank in range(2):
        x, colour = left + 16 + 166 * rank, f"rank{rank}"
        picture.box(x, 86, 156, 186, "box")
        picture.text(x + 78, 104, f"rank {rank}", "text bold", "middle")
        for local in range(2):
            at = x + 12 + 70 * local
            picture.box(at, 120, 62, 40, colour)
            picture.text(at + 31, 140, f"device {local}", "text small", "middle")
            below = 192 if meet else bars[local][0]
            picture.arrow([(at + 31, 160), (at + 31, below)], colour, both=True)
        if meet:
            picture.box(x + 12, 192, 132, 44, colour)
            picture.lines(x + 78, 214, ["meet in", "shared memory"], "text small", "middle")
            picture.arrow([(x + 43, 236), (x + 43, 300)], colour, both=True)


def _pieces(picture: Picture, top: float) -> None:
    """What the devices of a rank do while a large array goes piece by piece; a colour for each piece."""
    picture.text(28, top + 14, "Large sums over a named axis go in pieces of 2 MiB", "text head bold")
    picture.text(28, top + 40, "sum: local arrays;  MPI: between ranks;  copy: the total to each device", "muted small")
    x, width, y = 150, 112, top + 62
    steps = [
        ([], ["sum 1"]),
        (["MPI 1"], ["sum 2"]),
        (["MPI 2"], ["sum 3", "copy 1"]),
        (["MPI 3"], ["copy 2"]),
        ([], ["copy 3"]),
    ]
    for row, name in enumerate(("device 0", "the others")):
        picture.text(28, y + 20 + 52 * row, name)
    for i, step in enumerate(steps):
        for row, works in enumerate(step):
            for j, work in enumerate(works):
                wide = width / len(works) - 6
                start = x + width * i + j * (wide + 6)
                picture.box(start, y + 52 * row, wide, 40, f"rank{int(work[-1]) - 1}")
                picture.text(start + wide / 2, y + 20 + 52 * row, work, "text small", "middle")
    picture.text(28, y + 114, "time", "muted small")
    picture.arrow([(x, y + 114), (x + 5 * width - 6, y + 114)])
    small = "Up to 256 KiB there are no pieces: the last device to arrive does the work of all."
    picture.text(28, y + 152, small, "text small")


PICTURES = {"call": call, "devices": devices, "lanes": lanes}


def main() -> int:
    """Writes the files, or says which of them are not what this program draws."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a file differs")
    check = parser.parse_args().check
    differ = []
    for name, draw in PICTURES.items():
        path, svg = HERE / f"{name}.svg", draw().svg()
        if not check:
            path.write_text(svg)
        elif not path.exists() or path.read_text() != svg:
            differ.append(str(path))
    if differ:
        sys.stderr.write(f"docs/pictures/draw.py draws other pictures than {', '.join(differ)}. Run it.\n")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())
