"""The build ID of the native library: a digest of the sources, which ``setup.py`` gives to the linker.

``setup.py`` and ``scripts/gpu-check`` load this file by its path, since the package may not be importable there. It
needs only the standard library.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

_NOTE = b"\x04\x00\x00\x00\x20\x00\x00\x00\x03\x00\x00\x00GNU\x00"
"""How a build ID of 32 bytes begins in an ELF file: the lengths of name and content, NT_GNU_BUILD_ID, and the name."""


def of_sources(root: Path) -> str:
    """Returns the build ID that a library made from this tree has: 64 hexadecimal digits.

    Args:
        root: the directory with ``setup.py`` and ``native/``.
    """
    digest = hashlib.sha256()
    for path in sorted([root / "setup.py", *root.glob("native/**/*.cc"), *root.glob("native/**/*.h")]):
        digest.update(f"{path.relative_to(root).as_posix()} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def of_library(content: bytes) -> str:
    """Returns the build ID in a library, or "" if it has none of this length: an older ``setup.py`` gave it none.

    Args:
        content: the bytes of the file.
    """
    _, found, rest = content.partition(_NOTE)
    return rest[:32].hex() if found else ""
