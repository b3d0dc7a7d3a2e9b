"""``pycollective plan`` for any program: it runs until the first call of its step, and ranks the plans of that."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from contextlib import suppress

import jax
from rich.console import Console

from pycollective import files
from pycollective.errors import message
from pycollective.launch.started_by import is_rank
from pycollective.planning.by_compiling.first_call import Call, first_call
from pycollective.planning.by_compiling.of_one_rank import without_collectives
from pycollective.planning.by_compiling.plans import Ranking
from pycollective.planning.by_compiling.search import plan
from pycollective.planning.profile import Profile

_WHERE = "plan"


def run(options: argparse.Namespace) -> int:
    """Prints the ranking of the plans of a program's step. Returns the exit status.

    Raises:
        ValueError: the program calls no step before it ends or fails, or there is no plan for that.
        OSError: a file cannot be read or written.
    """
    if is_rank(os.environ):
        got = "one that a launcher has started"
        raise ValueError(message(_WHERE, "a process without ranks", got, "Start it without mpirun or srun."))
    profile = Profile.load(options.profile)
    devices = profile.check_devices(options.devices)
    # The program runs as one rank with one device, so that its step has the whole batch.
    with suppress(RuntimeError):  # devices are in use already
        jax.config.update("jax_num_cpu_devices", 1)
    call, others = first_call(options.program, options.arguments, options.step or "")
    step = without_collectives(call.step, *call.args)

    memory = profile.memory if options.memory is None else options.memory * 2**30
    ranking = plan(
        step,
        *call.args,
        profile=profile,
        devices=devices,
        memory=memory,
        donate_argnums=call.donate_argnums,
        compilations=options.compilations or 60,
        seconds=options.seconds,
    )
    console = Console()
    for line in _report(call, others, ranking, devices, options.top, profile, memory):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if options.json:
        about = {"profile": profile.source, "devices": devices, "memory": memory, "step": str(call)}
        rows = [one.as_dict() for one in ranking]
        text = json.dumps(
            {
                **about,
                "notes": ranking.notes,
                "one_device_s": ranking.one_device and ranking.one_device.seconds,
                "rows": rows,
            },
            indent=1,
        )
        files.write(options.json, text + "\n")
    sys.stdout.flush()
    return 0


def _report(
    call: Call,
    others: list[Call],
    ranking: Ranking,
    devices: int,
    top: int,
    profile: Profile,
    memory: float,
) -> Iterator[str]:
    """The lines that the command prints."""
    best = ranking.best
    yield profile.source
    state = [name for number, name in enumerate(call.names) if number in best.signature.states]
    data = [name for name in call.names if name not in state]
    yield f"step: {call}; state: {', '.join(state) or 'none'}; data: {', '.join(data) or 'none'}"
    if others:
        yield f"called before: {', '.join(map(str, others))}"
    yield f"{len(ranking)} plans on {devices} devices, which have {memory / 2**30:.3g} GiB each; the fastest:"
    for one in ranking.plans[:top]:
        yield f"  {one}"
    for note in ranking.notes:
        yield f"note: {note}"
    took = best.prediction.seconds
    yield f"best plan: {took * 1e3:.3g} ms"
    if alone := ranking.one_device:
        fits = "" if alone.at_most <= memory else f" if it had {alone.at_most / 2**30:.3g} GiB"
        gain = f"the best plan is {alone.seconds / took:.2f} times as fast"
        yield f"one device: {alone.seconds * 1e3:.3g} ms{fits}; {gain}"
    if call.is_parallel:
        written = "as it is written, with the whole state on each device and a part of the data"
        [now, *_] = [*(one for one in ranking if one.candidate.rule == "state whole"), None]
        said = "it does not fit"
        if now:
            gain = f"the best plan is {now.prediction.seconds / took:.2f} times as fast"
            said = f"{now.prediction.seconds * 1e3:.3g} ms; {gain}"
        yield f"{written}: {said}"
    yield f"best plan: a mesh of {' x '.join(f'{name} {size}' for name, size in best.candidate.mesh.items())}, with"
    cut = [(path, spec) for path, spec in zip(best.signature.paths, best.candidate.specs, strict=True) if any(spec)]
    for path, spec in cut:
        place, _, inside = path[1:].partition("]")
        yield f"  {call.names[int(place)]}{inside}: {jax.P(*spec)}"
    if count := len(best.candidate.specs) - len(cut):
        yield f"  {'the other ' if cut else 'all '}{count} arrays whole on each device"
