"""An interrupt (SIGINT) of a rank that waits for others. Python alone raises it only after the wait, which may not end.

Python's own handler of the signal runs between two steps of the interpreter, and a wait in XLA or MPI is one step. A
thread of this module is told of the signal at once. If the interpreter has not made a step after a moment, and a call
is under way, the rank ends all ranks.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import threading
import time
import traceback
from types import FrameType
from typing import NoReturn

from pycollective.faults import rank_exit
from pycollective.jax_support.call_site import is_of_user
from pycollective.transport import watch

__all__ = ["end_all_on_interrupt"]

_INTERRUPT_TIMEOUT_S = 2.0
"""How long an interrupted call may go on."""


class _State:
    """How often Python has shown an interrupt."""

    shown = 0


def end_all_on_interrupt() -> None:
    """Lets an interrupt end a wait for other ranks.

    It does nothing where the program has a handler of its own, as IPython has, and outside the main thread.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or "IPython" in sys.modules or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    earlier = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    if earlier != -1:  # an event loop runs
        signal.set_wakeup_fd(earlier)
        return
    sender.detach()  # it lives as long as the process
    signal.signal(signal.SIGINT, _show)
    threading.Thread(target=_listen, args=(receiver,), name="pycollective interrupts", daemon=True).start()


def _show(number: int, frame: FrameType | None) -> NoReturn:
    _State.shown += 1
    signal.default_int_handler(number, frame)


def _listen(receiver: socket.socket) -> None:
    while received := receiver.recv(1):
        if received[0] != signal.SIGINT:
            continue
        shown = _State.shown
        time.sleep(_INTERRUPT_TIMEOUT_S)
        is_mine = signal.getsignal(signal.SIGINT) is _show
        if is_mine and _State.shown == shown and (call := _call_under_way()):
            rank_exit.end_all_interrupted(call, _stack_of_main_thread())


def _call_under_way() -> str:
    """The call in which this rank waits; "" if there is none."""
    entries = json.loads(watch.recorder_json(0, 1, ""))["entries"]
    return next((entry["description"] for entry in entries if entry["state"] in ("scheduled", "started")), "")


def _stack_of_main_thread() -> str:
    """Where the user's program stands."""
    main = threading.main_thread().ident
    assert main is not None
    frames = traceback.extract_stack(sys._current_frames()[main])
    users = [frame for frame in frames if is_of_user(frame.filename)]
    return "".join(traceback.format_list(users or frames))
