"""Builds the native transport: one C++ library that needs neither MPI nor Python's headers at compile time."""

import hashlib
import os
import shutil
import sysconfig
from importlib.metadata import version
from pathlib import Path

from jax.ffi import include_dir
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class BuildLibrary(build_ext):
    """A plain shared library, loaded with ctypes: no Python version in its name."""

    def get_ext_filename(self, fullname):
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext):
        """Compiles, which takes a minute, unless that was done here before: for another environment, say."""
        of = [sysconfig.get_platform(), version("jax"), version("jaxlib")]
        of += [os.environ.get(name, "") for name in ("CXX", "CC", "CFLAGS")]
        made_from = hashlib.sha256(repr(of).encode())
        for path in ("setup.py", *ext.sources, *ext.depends):
            made_from.update(Path(path).read_bytes())
        kept = Path("build", f"native-{made_from.hexdigest()[:16]}.so")
        built = Path(self.get_ext_fullpath(ext.name))
        if kept.exists():
            built.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(kept, built)
        else:
            super().build_extension(ext)
            kept.parent.mkdir(exist_ok=True)
            whole = kept.with_suffix(f".{os.getpid()}")  # two environments may be made at once
            shutil.copyfile(built, whole)
            whole.replace(kept)


class AnyPythonWheel(bdist_wheel):
    """One wheel for every Python 3 and every MPI of a platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPythonWheel},
    ext_modules=[
        Extension(
            "pycollective._native",
            sources=sorted(str(path) for path in Path("native").glob("*.cc")),
            depends=sorted(str(path) for path in Path("native").glob("*.h")),
            language="c++",
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-fvisibility=hidden",
                "-Wall",
                "-Wextra",
                "-Wconversion",
                "-isystem",
                include_dir(),
            ],
        )
    ],
)
