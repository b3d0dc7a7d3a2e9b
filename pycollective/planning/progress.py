"""A progress bar on the terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress


@contextmanager
def progress(what: str, *, show: bool) -> Iterator[tuple[Callable[[int], None], Callable[..., None]]]:
    """Shows a bar for as long: functions that add to what is to be done, and that say how much of it has been done.

    The second one also takes words that replace ``what`` from then on.

    Args:
        what: what is under way, in a word.
        show: whether there is a bar; if not, the functions do nothing that can be seen.
    """
    with Progress(console=Console(stderr=True), transient=True, disable=not show) as bar:
        task = bar.add_task(what, total=0)

        def grow(count: int) -> None:
            bar.update(task, total=(bar.tasks[0].total or 0) + count)

        def advance(count: int, what: str | None = None) -> None:
            bar.update(task, advance=count, description=what)

        yield grow, advance
