"""Builds the native transport: one C++ library that needs neither MPI nor Python's headers at compile time."""

from pathlib import Path

from jax.ffi import include_dir
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext


class BuildLibrary(build_ext):
    """A plain shared library, loaded with ctypes: no Python version in its name."""

    def get_ext_filename(self, fullname):
        return fullname.replace(".", "/") + ".so"


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
