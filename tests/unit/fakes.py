"""Stand-ins for programs that a machine may have."""

from __future__ import annotations

from pathlib import Path


def launcher(path: Path, says: str) -> Path:
    """Makes a program at ``path`` that prints ``says``, as an mpiexec prints its version. Returns ``path``."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path
