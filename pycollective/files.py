"""Files that the package writes. In a folder in which others may write, none goes where another user has pointed it.

A file is written under a new name beside its place, and then takes its own. So a link that lies in its place, or under
a name that somebody has guessed, leads nowhere. ``native/monitor/own_file.h`` does the same for what is written without
Python.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def replaced(path: str | os.PathLike[str], mode: str = "w") -> Iterator[IO[Any]]:
    """Opens a new file, which takes the place of ``path`` at the end.

    A reader of ``path`` sees all of it, or what was there before; after an error, what was there before. A link of
    this user, or of root, is followed, and so is what is no file of this user's, such as ``/dev/stdout``. A link of
    another user is replaced.

    Args:
        path: the place.
        mode: ``"w"`` for text or ``"wb"`` for bytes.

    Raises:
        OSError: the file cannot be written there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replaced(f"{folder}/a.txt") as file:
        ...         _ = file.write("here")
        ...     Path(f"{folder}/a.txt").read_text()
        'here'
    """
    place = _place(Path(path))
    if place is None:
        with open(path, mode) as file:
            yield file
        return
    partial = place.with_name(f".{place.name}.{secrets.token_hex(8)}.part")
    number = os.open(partial, _NEW, 0o666)
    try:
        with open(number, mode) as file:
            with suppress(FileNotFoundError):
                about = place.lstat()
                if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid():
                    os.fchmod(number, stat.S_IMODE(about.st_mode))
            yield file
        partial.replace(place)
    finally:
        partial.unlink(missing_ok=True)


def write(path: str | os.PathLike[str], text: str) -> None:
    """Writes a text, as :func:`replaced` does."""
    with replaced(path) as file:
        file.write(text)


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Writes a figure of matplotlib, as :func:`replaced` does, in the format that the suffix names; none: ``.png``."""
    place = Path(path) if Path(path).suffix else Path(path).with_suffix(".png")
    with replaced(place, "wb") as file:
        figure.savefig(file, format=place.suffix[1:])


def own_folder(path: Path) -> bool:
    """Makes a folder that this user alone can read and write, if there is none.

    Returns:
        Whether there is such a folder, which belongs to this user and which others cannot write. A link is none.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     own_folder(Path(folder) / "a"), oct((Path(folder) / "a").stat().st_mode)
        (True, '0o40700')
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    about = path.lstat()
    is_own = stat.S_ISDIR(about.st_mode) and about.st_uid == os.geteuid() and not about.st_mode & 0o022
    return is_own and os.access(path, os.W_OK)


def _place(path: Path) -> Path | None:
    """Where a new file belongs; None for what is no file: a pipe or a terminal, or an error that ``open`` names."""
    try:
        about = path.lstat()
        if about.st_uid not in (0, os.geteuid()):
            return path
        if stat.S_ISLNK(about.st_mode):
            link, path = path, Path(os.path.realpath(path))
            about = link.stat()  # of /dev/stdout the path leads nowhere, the link does
    except FileNotFoundError:
        return path
    return path if stat.S_ISREG(about.st_mode) else None
