"""The side channel of a monitor (native/monitor/side_channel.h), as a stranger and as a rank of its job meet it.

The protocol is written here a second time. Each monitor is a process of its own: rank 0 of two ranks, without MPI.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from pycollective.environment import NATIVE_LIBRARY
from pycollective.transport import native_library

SECRET = bytes(range(64))
NONCE = MAC = 32
STAY, ARE_YOU_THERE, END_NOW = 0, 1, 4
LIMIT_S = 20  # for what must come

MONITORED = """
import os, resource, sys
from pathlib import Path
from pycollective.environment import NATIVE_LIBRARY
from pycollective.transport import native_library, watch

native_library.set_library(native_library.load(Path(NATIVE_LIBRARY)))
secret, host, other = bytes.fromhex(sys.argv[1]), sys.argv[2], sys.argv[3]
listening, port = watch.listen_on(host)
here = watch.Process([(host, port)], os.getpid(), 1, 0, "here")
where = [(other, 0) if other.startswith("@") else ("127.0.0.1", int(other))] if other else []
there = watch.Process(where, os.getpid(), 1, 0, "here") if other else watch.NO_PROCESS
watch.start_monitor(watch.Monitoring(0, [here, there], [listening], secret, 0.0, 0.0, "", True, False))
print(port, flush=True)
usual = resource.getrlimit(resource.RLIMIT_NOFILE)
for line in sys.stdin:
    if line == "no more files\\n":
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), usual[1]))
    else:
        resource.setrlimit(resource.RLIMIT_NOFILE, usual)
    print("done", flush=True)
"""


class Monitored:
    """A process with a monitor.

    Args:
        host: where it listens.
        other: the port or the name of rank 1, which rank 0 guards; "": there is no other rank.
    """

    def __init__(self, host: str = "127.0.0.1", other: str = "") -> None:
        self.host = host
        self.process = subprocess.Popen(
            [sys.executable, "-c", MONITORED, SECRET.hex(), host, other],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.port = int(self.read())

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.read() == "done"

    def connect(self) -> socket.socket:
        if self.host.startswith("@"):
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(LIMIT_S)
            connection.connect("\0" + self.host[1:])
            return connection
        return socket.create_connection((self.host, self.port), timeout=LIMIT_S)

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def monitored(host: str = "127.0.0.1", other: str = "") -> Iterator[Monitored]:
    one = Monitored(host, other)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.communicate()


@pytest.fixture(scope="module")
def monitor() -> Iterator[Monitored]:
    with monitored() as one:
        yield one


def number(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def key(role: str, nonces: bytes, secret: bytes = SECRET, rank: int = 0) -> bytes:
    return hmac.digest(secret, number(len(role)) + role.encode() + number(rank) + nonces, "sha256")


def frame(own: bytes, kind: int, text: bytes = b"") -> bytes:
    head = number(kind) + number(len(text))
    head += hmac.digest(own, head, "sha256")
    return head + text + hmac.digest(own, head + text, "sha256")


def read(connection: socket.socket, most: int) -> bytes:
    """So many bytes, or those that come before the end."""
    found = b""
    with suppress(ConnectionResetError):
        while len(found) < most and (part := connection.recv(most - len(found))):
            found += part
    return found


def greet(connection: socket.socket, rank: int = 0) -> bytes:
    """Says hello, checks the other side's proof, and returns the numbers of both sides."""
    own = secrets.token_bytes(NONCE)
    connection.sendall(own)
    answer = read(connection, NONCE + MAC)
    nonces = own + answer[:NONCE]
    assert answer[NONCE:] == key("answers", nonces, rank=rank)
    return nonces


def ask(monitor: Monitored, kind: int = ARE_YOU_THERE, text: bytes = b"") -> bytes:
    with closing(monitor.connect()) as connection:
        nonces = greet(connection)
        connection.sendall(frame(key("requests", nonces), kind, text))
        reply = read(connection, 1 << 20)
        text = reply[16 + MAC : -MAC]
        assert reply == frame(key("replies", nonces), kind, text)
        return text


def is_sent_away(connection: socket.socket) -> bool:
    return read(connection, 1) == b""


# The codes ----------------------------------------------------------------------------------------------------------


def mac(own: bytes, text: bytes) -> bytes:
    made = ctypes.create_string_buffer(MAC)
    sizes = ctypes.c_int64(len(own)), ctypes.c_int64(len(text))
    native_library.load(NATIVE_LIBRARY).pycollective_hmac(own, sizes[0], text, sizes[1], made)
    return made.raw


@pytest.mark.parametrize(
    ("own", "text", "expected"),
    [
        (b"\x0b" * 20, b"Hi There", "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"),
        (b"Jefe", b"what do ya want for nothing?", "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"),
        (b"\xaa" * 20, b"\xdd" * 50, "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"),
        (
            b"\xaa" * 131,
            b"Test Using Larger Than Block-Size Key - Hash Key First",
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54",
        ),
    ],
)
def test_the_codes_of_rfc_4231(own: bytes, text: bytes, expected: str) -> None:
    assert mac(own, text).hex() == expected


def test_codes_of_all_lengths() -> None:
    for count in (*range(130), 1000, 1_000_000):
        text, own = b"a" * count, bytes(range(256))[: min(count, 200)]
        assert mac(own, text) == hmac.digest(own, text, hashlib.sha256), count


# Those who ask ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", f"@pycollective-test-{os.getpid()}"], ids=["TCP", "Unix"])
def test_a_rank_gets_an_answer(host: str) -> None:
    with monitored(host) as monitor:
        assert ask(monitor) == b"yes"


def test_a_wrong_secret_gets_none_and_ends_nobody(monitor: Monitored) -> None:
    with closing(monitor.connect()) as connection:
        nonces = greet(connection)
        wrong = key("requests", nonces, secret=bytes(64))
        connection.sendall(frame(wrong, END_NOW, number(3) + number(1) + b"x"))
        assert is_sent_away(connection)
    assert monitor.process.poll() is None
    assert ask(monitor) == b"yes"


def test_a_recorded_request_is_of_no_use(monitor: Monitored) -> None:
    with closing(monitor.connect()) as connection:
        nonces = greet(connection)
        request = frame(key("requests", nonces), ARE_YOU_THERE)
        connection.sendall(request)
        assert len(read(connection, 1 << 10)) == 16 + 2 * MAC + len(b"yes")
    with closing(monitor.connect()) as connection:
        connection.sendall(nonces[:NONCE])
        again = read(connection, NONCE + MAC)
        assert len(again) == NONCE + MAC
        assert again[:NONCE] != nonces[NONCE:]
        connection.sendall(request)
        assert is_sent_away(connection)


def test_a_changed_text_of_a_rank_is_refused(monitor: Monitored) -> None:
    with closing(monitor.connect()) as connection:
        request = frame(key("requests", greet(connection)), END_NOW, number(3) + number(1) + b"x")
        connection.sendall(request[: 16 + MAC] + number(4) + request[16 + MAC + 8 :])
        assert is_sent_away(connection)
    assert monitor.process.poll() is None


def test_the_proof_of_the_answering_side_is_none_of_the_asking_one(monitor: Monitored) -> None:
    with closing(monitor.connect()) as connection:
        own = secrets.token_bytes(NONCE)
        connection.sendall(own)
        proof = read(connection, NONCE + MAC)[NONCE:]
        connection.sendall(frame(proof, ARE_YOU_THERE))
        assert is_sent_away(connection)


def test_slow_strangers_keep_nobody_waiting(monitor: Monitored) -> None:
    strangers = [monitor.connect() for _ in range(300)]
    try:
        for stranger in strangers[::2]:
            stranger.sendall(b"x")
        assert ask(monitor) == b"yes"
        assert all(map(is_sent_away, strangers))
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_stranger_that_never_rests_is_sent_away(monitor: Monitored) -> None:
    with closing(monitor.connect()) as stranger:
        stranger.sendall(secrets.token_bytes(NONCE))
        assert len(read(stranger, NONCE + MAC)) == NONCE + MAC
        until = time.monotonic() + LIMIT_S
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(16 + MAC - 1):  # one byte less than a proof has
                stranger.sendall(b"x")
                time.sleep(0.1)
            assert is_sent_away(stranger)
        assert time.monotonic() < until


def test_a_process_without_descriptors_rests() -> None:
    with monitored() as monitor:
        monitor.tell("no more files")
        with closing(monitor.connect()) as waits:
            before = monitor.cpu_s()
            time.sleep(2)
            assert monitor.cpu_s() - before < 0.4
            monitor.tell("files")
            greet(waits)
        assert ask(monitor) == b"yes"


def test_another_user_of_this_host_is_sent_away() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user, to see how the other user is sent away")
    host = f"@pycollective-test-{secrets.token_hex(8)}"
    program = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.connect(chr(0) + sys.argv[1])\n"
        "try: s.sendall(bytes(32)); print(len(s.recv(1)))\n"
        "except OSError: print(0)"
    )
    with monitored(host) as monitor:
        stranger = [sys.executable, "-c", program, host[1:]]
        done = subprocess.run(stranger, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.stdout == "0\n", done.stderr
        assert ask(monitor) == b"yes"


# Those who are asked ------------------------------------------------------------------------------------------------


@contextmanager
def guarded() -> Iterator[tuple[Monitored, socket.socket]]:
    """A monitor, and the connection by which it guards rank 1, in whose place this test listens."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listening:
        listening.settimeout(LIMIT_S)
        with monitored(other=str(listening.getsockname()[1])) as monitor:
            connection, _ = listening.accept()
            connection.settimeout(LIMIT_S)
            with closing(connection):
                yield monitor, connection


def test_who_has_the_port_of_a_dead_rank_learns_nothing() -> None:
    with guarded() as (_, connection):
        hello = read(connection, NONCE)
        assert len(hello) == NONCE
        assert hello not in SECRET
        connection.sendall(secrets.token_bytes(NONCE + MAC))
        assert read(connection, 1) == b""


def test_a_reflected_proof_is_refused() -> None:
    with guarded() as (monitor, connection), closing(monitor.connect()) as reflector:
        reflector.sendall(read(connection, NONCE))
        proof = read(reflector, NONCE + MAC)  # what rank 0 says of itself, not of rank 1
        assert len(proof) == NONCE + MAC
        connection.sendall(proof)
        assert read(connection, 1) == b""


def test_a_rank_that_proves_itself_is_asked() -> None:
    with guarded() as (_, connection):
        own, theirs = secrets.token_bytes(NONCE), read(connection, NONCE)
        nonces = theirs + own
        connection.sendall(own + key("answers", nonces, rank=1))
        expected = frame(key("requests", nonces, rank=1), STAY)
        assert read(connection, len(expected)) == expected


def test_another_user_who_has_the_name_of_a_rank_hears_nothing() -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user, to see that nobody speaks to the other user")
    name = f"pycollective-test-{secrets.token_hex(8)}"
    program = (
        "import os, socket, sys; os.setuid(65534); s = socket.socket(socket.AF_UNIX); s.bind(chr(0) + sys.argv[1])\n"
        "s.listen(); print('ready', flush=True); print(len(s.accept()[0].recv(1)))"
    )
    with subprocess.Popen([sys.executable, "-c", program, name], stdout=subprocess.PIPE, text=True) as stranger:
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == "ready\n"
            with monitored(other="@" + name):
                assert stranger.communicate(timeout=LIMIT_S)[0] == "0\n"
        finally:
            stranger.kill()
