"""A program of this host that has nothing to do with a job cannot keep its ranks from reporting."""

from __future__ import annotations

import re
from pathlib import Path

from tests.e2e.launch import mpirun

PROGRAM = """
import os, socket, threading, time
from pathlib import Path

import jax.numpy as jnp

import pycollective as pc

comm = pc.init(timeout=5)


def sockets_of_the_monitor():
    numbers = [name for name in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{name}")]
    own = {os.readlink(f"/proc/self/fd/{number}") for number in numbers}
    found = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[6]}]" in own and fields[-1].startswith("@pycollective-"):
            found.append((socket.AF_UNIX, chr(0) + fields[-1][1:]))
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if f"socket:[{fields[9]}]" in own and fields[3] == "0A" and fields[1].startswith("0100007F:"):
            found.append((socket.AF_INET, ("127.0.0.1", int(fields[1].partition(":")[2], 16))))
    return found


def stay(family, address):
    connection = socket.socket(family)
    connection.connect(address)
    while True:
        try:
            connection.send(b"x")
        except OSError:
            return stay(family, address)
        time.sleep(0.8)


def rank_0_forgets_its_call():
    where = sockets_of_the_monitor()
    assert where
    for family, address in where:
        for _ in range(3):
            threading.Thread(target=stay, args=(family, address), daemon=True).start()
    time.sleep(60)


if comm.rank == 0:
    rank_0_forgets_its_call()
pc.psum(jnp.float32(1), comm).block_until_ready()
"""


def test_slow_strangers_do_not_silence_a_rank(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    (tmp_path / "records").symlink_to(tmp_path)  # records do not go where a link leads
    done = mpirun(2, str(program), timeout=60, cwd=tmp_path, env={"PYCOLLECTIVE_RECORDS": "records"})
    assert done.returncode not in (0, 124, 137), done.stderr
    assert "rank_0_forgets_its_call" in done.stderr, done.stderr
    assert "does not answer" not in done.stderr, done.stderr
    folder = re.escape(str(tmp_path / "records"))
    why = rf"The last calls are not in {folder}: it is a link or a file, not a folder\. Name another folder by PYCOLL"
    assert re.search(why, done.stderr), done.stderr
    assert not list(tmp_path.glob("rank-*"))
