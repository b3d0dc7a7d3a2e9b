"""Builds the native transport: one C++ library that needs neither MPI nor Python's headers at compile time."""

import fcntl
import hashlib
import os
import runpy
import shutil
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

from jax.ffi import include_dir
from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

BUILD_ID = runpy.run_path("pycollective/build_id.py")["of_sources"](Path())


class BuildLibrary(build_ext):
    """A plain shared library, loaded with ctypes: no Python version in its name."""

    def get_ext_filename(self, fullname):
        return fullname.replace(".", "/") + ".so"

    def build_extension(self, ext):
        """Compiles, which takes a minute of one core, unless that was done here before, for another environment say."""
        of = [BUILD_ID, sysconfig.get_platform(), version("jax"), version("jaxlib")]
        of += [os.environ.get(name, "") for name in ("CXX", "CC", "CFLAGS")]
        made_from = hashlib.sha256(repr(of).encode())
        kept = Path("build", f"native-{made_from.hexdigest()[:16]}.so")
        built = Path(self.get_ext_fullpath(ext.name))
        kept.parent.mkdir(exist_ok=True)
        with Path("build", "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two environments may be made at once
            if not kept.exists():
                self.force = True  # what lies there may be newer than the sources, and made with other flags
                self._compile_in_parallel()
                super().build_extension(ext)
                whole = kept.with_suffix(".part")
                shutil.copyfile(built, whole)
                whole.replace(kept)
        built.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(kept, built)

    def _compile_in_parallel(self):
        compile_some = self.compiler.compile

        def compile_all(sources, **options):
            with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
                return [made for some in pool.map(lambda one: compile_some([one], **options), sources) for made in some]

        self.compiler.compile = compile_all


class AnyPythonWheel(bdist_wheel):
    """One wheel for every Python 3 and every MPI of a platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPythonWheel},
    ext_modules=[
        Extension(
            "pycollective._native",
            sources=sorted(str(path) for path in Path("native").rglob("*.cc")),
            depends=sorted(str(path) for path in Path("native").rglob("*.h")),
            include_dirs=["native"],
            language="c++",
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-g0",  # without debugging symbols, which Python's own flags ask for: they are 16 of 17 MB
                "-fvisibility=hidden",
                "-Wall",
                "-Wextra",
                "-Wconversion",
                "-isystem",
                include_dir(),
            ],
            extra_link_args=[f"-Wl,--build-id=0x{BUILD_ID}"],
        )
    ],
)
