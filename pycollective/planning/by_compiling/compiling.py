"""Compiles candidates in processes of their own, some at a time, and remembers what they found."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import math
import os
import pickle
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from pycollective import files
from pycollective.errors import message
from pycollective.jax_support import program_text
from pycollective.planning.by_compiling import compiled_candidate, program_work, reading_order, scratch
from pycollective.planning.by_compiling.compiled_candidate import READY, Compiled, Request

# Where the program stands in its source, and from where it was traced.
_LOCATION = re.compile(r'^#loc.*\n| loc\((?:#\w+|unknown|"(?:[^"\\]|\\.)*")\)', re.MULTILINE)


class Compilers:
    """Processes that compile a program for many virtual devices each.

    Args:
        program: the program, as :meth:`jax.export.Exported.serialize` returns it.
        devices: the number of devices.
        processes: how many compile at a time.
    """

    def __init__(self, program: bytes, devices: int, processes: int) -> None:
        self._program = program
        self._text = _LOCATION.sub("", jax.export.deserialize(bytearray(program)).mlir_module()).encode()
        self._devices = devices
        self._processes = processes
        self._idle: queue.SimpleQueue[subprocess.Popen[bytes] | None] = queue.SimpleQueue()
        self._started: list[subprocess.Popen[bytes]] = []
        for _ in range(processes):
            self._idle.put(None)
        self._folder = _cache_folder()
        self._lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._closed = True  # a thread that still waits for an answer must not start another process
        for process in self._started:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()

    def compile_all(
        self, requests: Sequence[Request], until: float = math.inf
    ) -> Iterator[tuple[Request, Compiled | str]]:
        """Yields each request with what was found, or the error, as soon as it is there.

        Args:
            requests: what is compiled.
            until: the time of :func:`time.monotonic` after which no more are begun, but for the first one.
        """
        done: queue.SimpleQueue[tuple[Request, Compiled | str | BaseException] | None] = queue.SimpleQueue()
        waiting = iter(enumerate(requests))
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    number, request = next(waiting, (0, None))
                if request is None or (number and time.monotonic() > until):
                    done.put(None)
                    return
                try:
                    done.put((request, self._compile(request)))
                except BaseException as error:
                    done.put((request, error))
                    return

        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(self._processes, len(requests)))]
        for thread in threads:
            thread.start()
        working = len(threads)
        while working:
            if (answer := done.get()) is None:
                working -= 1
                continue
            request, found = answer
            if isinstance(found, BaseException):
                raise found
            yield request, found

    def _compile(self, request: Request) -> Compiled | str:
        path = self._folder / f"{self._key(request)}.json" if self._folder else None
        if path and path.exists():
            with contextlib.suppress(FileNotFoundError, ValueError):  # it was removed, or is damaged: made again
                return compiled_candidate.from_json(path.read_text())
        idle = self._idle.get()
        process = idle or self._start()
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            if idle is None:
                pickle.dump((self._devices, self._program), process.stdin)
            pickle.dump(request, process.stdin)
            process.stdin.flush()
            found: Compiled | str = pickle.load(process.stdout)
        except (BrokenPipeError, EOFError):
            found = f"the process that compiled it ended with status {process.wait()}"
            self._idle.put(None)
            return found
        self._idle.put(process)
        if path and isinstance(found, Compiled):
            files.write(path, compiled_candidate.as_json(found))
        return found

    def _start(self) -> subprocess.Popen[bytes]:
        # Slow code is enough, since it never runs.
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
        # XLA warns of arrays that it must move in a bad way. Their time is in the prediction.
        errors_alone = {"TF_CPP_MIN_LOG_LEVEL": "2"}
        environ = {**os.environ, **errors_alone, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
        with self._lock:
            if self._closed:
                raise RuntimeError("these processes have been ended")
            process = subprocess.Popen(
                [sys.executable, "-m", "pycollective.planning.by_compiling.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environ,
            )
            self._started.append(process)
        assert process.stdout is not None
        try:
            ready = pickle.load(process.stdout) == READY
        except EOFError:
            ready = False
        except pickle.UnpicklingError:  # something else writes to its output
            ready = False
            process.kill()
        if not ready:
            got = f"status {process.wait()} before it began"
            remedy = "What it said stands above. Is there memory left, and can Python import pycollective elsewhere?"
            raise RuntimeError(message("plan", "a process that compiles", got, remedy))
        return process

    def _key(self, request: Request) -> str:
        about = repr((jax.__version__, os.environ.get("XLA_FLAGS"), self._devices, request)).encode()
        modules = (compiled_candidate, program_text, program_work, reading_order, scratch)
        readers = (inspect.getsource(module).encode() for module in modules)
        return hashlib.sha256(b"".join([about, *readers, self._text])).hexdigest()


def _cache_folder() -> Path | None:
    """A folder that this user alone can write, since what is read from it is trusted. None if there can be none."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = base / "pycollective" / "plans"
        return folder if files.own_folder(folder) else None
    except (OSError, RuntimeError):  # it cannot be made, or nobody knows where this user is at home
        return None
