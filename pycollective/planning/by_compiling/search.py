"""Finds the best way to spread a step over devices."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple, cast

from pycollective.errors import fail
from pycollective.planning.by_compiling.candidates import Candidate, Spec, candidates, variations
from pycollective.planning.by_compiling.compiled_candidate import Request
from pycollective.planning.by_compiling.compiling import Compilers
from pycollective.planning.by_compiling.plans import Measured, Plan, Ranking, devices_of_job
from pycollective.planning.by_compiling.prediction import Prediction, predict
from pycollective.planning.by_compiling.program_work import IRREGULAR
from pycollective.planning.by_compiling.trace import Step, trace
from pycollective.planning.by_compiling.verify import measure
from pycollective.planning.profile import ARRAYS, Profile, group_of
from pycollective.planning.progress import progress
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.meeting import complete, first_of, meet_or_fail
from pycollective.ranks.world import world_if_known

_WHERE = "plan"
_REFINED = 3  # the best candidates whose arrays are cut in other ways, one after the other
_NEAR = 1.02  # of an equal share of the computation: there is hardly anything left to gain
_SLOW = 1.1  # of the fastest plan: what takes longer is not refined
_IRREGULAR = 0.01  # of the predicted time: these are predicted as passes, and may take many times as long
_DOUBTFUL = 0.2  # of the predicted time: what is more makes the order of plans doubtful
_LITTLE = 0.01  # of the fastest plan: arrays that are sent in less are left as they are


def plan(
    step: Callable[..., Any],
    *args: Any,
    profile: Profile | str | os.PathLike[str],
    devices: int | None = None,
    memory: float | None = None,
    donate_argnums: int | Sequence[int] = (),
    compilations: int = 60,
    processes: int | None = None,
    seconds: float | None = None,
    progress: bool = True,
    verify: int = 0,
) -> Ranking:
    """Finds the best way to spread a step of training, or any other function of arrays, over devices.

    Each candidate is a mesh with the axes "data" and "model", and for each array the axes along which it is cut. Other
    processes compile the candidates for virtual devices of this machine. XLA's programs show what each device computes,
    sends and keeps. No cluster is needed, and no data. In a job all ranks must make this call; rank 0 compiles, and
    all ranks return the same result. An argument that the step returns with the same tree and shapes is *state*: it is
    spread in the same way before and after the step. The other arguments are *data*.

    Args:
        step: a function of trees of arrays that :func:`jax.jit` can compile, written for global arrays.
        args: the arguments of ``step``, arrays or :class:`jax.ShapeDtypeStruct`, with the shapes of global arrays.
        profile: the speed of the cluster: a :class:`pycollective.planning.Profile`, the file that
            ``pycollective profile`` has written, or the name of a ready-made profile, such as "dgx-a100".
        devices: the number of devices. Default: that of the profile.
        memory: the number of bytes that a device can use. Default: that of the profile.
        donate_argnums: the arguments whose memory the results may reuse, as in :func:`jax.jit`. Default: none.
        compilations: the largest number of candidates that are compiled. Default 60.
        processes: the number of candidates that are compiled at the same time. Default: the number of cores.
        seconds: the time after which no more candidates are compiled; the first ones always are. Default: no limit.
        progress: whether to show a progress bar on a terminal, with the best plan so far. Default True.
        verify: the number of the best plans that are run for some steps on the devices of this job
            (:func:`pycollective.planning.measure`). These plans come first, in the order of their times. A plan that
            needed more memory than ``memory`` comes last. Default 0.

    Returns:
        The plans that fit into memory, the fastest first.

    Raises:
        ValueError: the step cannot be traced or has side effects; no plan fits into memory, or no plan that was run;
            ``devices`` and the profile do not fit each other; the ranks of a host in this job are not consecutive, or
            their number is not that of the profile.
        RuntimeError: the processes that compile cannot start.

    Order:
        Outside programs: rank 0 sends its result to the other ranks.

    Example:
        >>> import jax, jax.numpy as jnp, pycollective as pc
        >>> from pycollective.planning.example import profile  # an invented cluster of 2 hosts with 2 ranks
        >>> def step(params, x):
        ...     return params - 0.1 * jax.grad(lambda p: jnp.mean((x @ p) ** 2))(params)
        >>> params, x = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((4096, 64), "float32")
        >>> ranking = pc.plan(step, params, x, profile=profile, devices=2, compilations=4)
        >>> best = ranking.best  # each device has half of the columns, and nothing is sent
        >>> best.candidate.specs, best.prediction.communication_s
        (((None, 'model'), (None, None)), 0)
    """
    for name, value, least in (
        ("compilations", compilations, 1),
        ("processes", 1 if processes is None else processes, 1),
        ("verify", verify, 0),
    ):
        if value < least:
            fail(ValueError, _WHERE, None, f"{name} to be at least {least}", value, "Choose a larger number.")
    if not isinstance(profile, Profile):
        profile = Profile.load(profile)
    devices = profile.check_devices(devices)
    if verify:
        devices_of_job(devices)  # before the long search
    limit = profile.memory if memory is None else int(memory)
    traced = trace(step, args, donate_argnums)
    show = progress and sys.stderr.isatty()
    until = math.inf if seconds is None else time.monotonic() + seconds
    at_a_time = processes or os.cpu_count() or 1
    found, alone = _on_one_rank(
        devices,
        profile,
        lambda: _search(traced, profile, devices, limit, compilations, at_a_time, until, show=show),
    )
    plans = [Plan(*each, traced.signature) for each in found]
    if verify:
        plans = _verified(plans, measure(plans[:verify], step, *args), limit)
    return Ranking(tuple(plans), alone, (*_notes(traced, plans), *profile.notes))


def _notes(traced: Step, plans: Sequence[Plan]) -> tuple[str, ...]:
    """What the user may not expect of these plans, and where their predictions may be far off."""
    notes = []
    shares: dict[str, float] = {}
    for prediction in (one.prediction for one in plans if one.measured is None):
        for why, seconds in prediction.doubtful_s:
            shares[why] = max(seconds / prediction.seconds, shares.get(why, 0.0))
    for why, share in shares.items():
        if share > (_IRREGULAR if why == IRREGULAR else _DOUBTFUL):
            notes.append(
                f"{why} take up to {share:.1%} of a plan's predicted time, and the profile does not know what they"
                " take, so the order of the plans may be wrong; run the best ones with pc.plan(verify=)"
            )
    if traced.leaves and not traced.signature.states:
        notes.append(
            "the step returns none of its arguments again, with the same tree, shapes and dtypes, so all of them are"
            " taken for data; a step of training returns its parameters"
        )
    return tuple(notes)


def _verified(plans: Sequence[Plan], measured: Sequence[Measured], limit: int) -> list[Plan]:
    """The plans that were run come first, by their times, but last if they needed more memory than there is."""
    by_time = sorted(zip(measured, plans, strict=False), key=lambda pair: pair[0].seconds)
    ran = [replace(one, measured=took) for took, one in by_time]
    fitting = [one for one in ran if one.needed <= limit]
    if not fitting:
        least = min(one.needed for one in ran)
        _refuse_memory(limit, f"{least:,} B for the plan that needed least of those that were run")
    return [*fitting, *plans[len(ran) :], *(one for one in ran if one.needed > limit)]


Found = tuple[Candidate, tuple[Spec, ...], Prediction]
"""A plan without the trees of the step, as ranks send it."""

Findings = tuple[list[Found], Prediction | None]
"""The plans, and what the step takes on one device."""


def _on_one_rank(devices: int, profile: Profile, search: Callable[[], Findings]) -> Findings:
    """Returns what the search finds. In a job the first rank searches, and the others wait for it."""
    comm = world_if_known()
    if comm is None or comm.size == 1:
        return search()
    if devices == comm.size:
        _check_hosts(comm, profile)
    own: Any = None  # the plans, or an error
    if comm.rank == 0:
        try:
            own = search()
        except Exception as error:  # all ranks raise it
            own = error
    found = complete(comm, _WHERE, _WHERE, _WHERE, lambda: meet_or_fail(comm, _WHERE, own, first_of))
    if isinstance(found, Exception):
        raise found
    return cast(Findings, found)


def _check_hosts(comm: Communicator, profile: Profile) -> None:
    """Collectives are predicted for a mesh in which the devices of a host are neighbours, as many as in the profile."""
    hosts = comm.mpi.allgather(comm.host_index)
    if hosts != sorted(hosts):
        got = f"hosts {hosts} of ranks 0 to {comm.size - 1}"
        remedy = "Start them host by host, as `mpirun --map-by slot` and `srun --distribution=block` do."
        fail(ValueError, _WHERE, comm, "ranks of which those of a host have neighbouring numbers", got, remedy)
    of_each = set(Counter(hosts).values())
    expected = min(profile.per_host, comm.size)
    if of_each != {expected}:
        got = " or ".join(map(str, sorted(of_each)))
        remedy = "Measure a profile of these ranks with `pycollective profile`, or plan outside of the job."
        fail(ValueError, _WHERE, comm, f"{expected} ranks on each host, as in the profile", got, remedy)


def _search(
    traced: Step,
    profile: Profile,
    devices: int,
    limit: int,
    compilations: int,
    processes: int,
    until: float,
    *,
    show: bool,
) -> Findings:
    """Compiles candidates and returns those that fit, the fastest first, and what one device takes by itself."""
    every = list(candidates(traced.leaves, devices))
    chosen = [one for one in every if one.argument_bytes(traced.leaves) <= limit][:compilations]
    if not chosen:
        least = min(one.argument_bytes(traced.leaves) for one in every)
        _refuse_memory(limit, f"{least:,} B for the arguments alone")
    found: list[Found] = []
    by_itself: list[Prediction] = []  # what one device takes that does all
    errors: list[str] = []
    known: set[Any] = set()
    order = _order(limit)
    whole = Candidate(
        devices, 1, "all of it on each device", tuple((None,) * len(leaf.shape) for leaf in traced.leaves)
    )
    with (
        Compilers(traced.program, devices, processes) as compilers,
        progress("compiling", show=show) as (grow, advance),
    ):

        def add(more: Sequence[Candidate], *others: Candidate) -> list[Found]:
            start = len(found)
            grow(len(more) + len(others))
            known.update(one.key for one in more)
            requests = [Request(one, traced.signature.outs, traced.donated) for one in (*more[:1], *others, *more[1:])]
            for request, compiled in compilers.compile_all(requests, until):
                if isinstance(compiled, str):
                    errors.append(compiled)
                else:
                    prediction = predict(compiled.work, compiled.memory, profile)
                    if request.candidate in others:
                        by_itself.append(prediction)
                    else:
                        found.append((request.candidate, compiled.out_specs, prediction))
                best = f", best so far {min(found, key=order)[-1].seconds * 1e3:.3g} ms" if found else ""
                advance(1, f"compiling{best}")
            return found[start:]

        starts = sorted(add(chosen, whole), key=order)[:_REFINED]
        search = _Refinement(order, traced, limit, known, compilations - len(chosen), add, until)
        search.refine(starts, profile, devices, by_itself[0].computing_s / devices if by_itself else 0.0)
    if not found:
        fail(ValueError, _WHERE, None, "a step that XLA can spread", errors[0], "Look at the first error of XLA.")
    found.sort(key=order)
    fitting = [each for each in found if each[-1].at_most <= limit]
    if not fitting:
        least = min(each[-1].at_most for each in found)
        _refuse_memory(limit, f"up to {least:,} B for the plan that needs least")
    return fitting, next(iter(by_itself), None)


def _order(limit: int) -> Callable[[Found], tuple[bool, float, str]]:
    """The order of plans: those that fit first, then by time; the same in each run, whatever was compiled first."""
    return lambda found: (found[-1].at_most > limit, found[-1].seconds, repr(found[0]))


class _Refinement(NamedTuple):
    """Cuts the arrays of some plans in other ways, one after the other, the largest first. It keeps what pays.

    What can bring little is not compiled: all of it once the best plan takes hardly longer than an equal share of what
    one device computes; plans that are much slower than the best; arrays that are sent in a small part of its time.
    """

    order: Callable[[Found], Any]
    traced: Step
    limit: int
    known: Set[Any]
    compilations: int
    add: Callable[[Sequence[Candidate]], list[Found]]
    until: float

    def refine(self, starts: Sequence[Found], profile: Profile, devices: int, share: float) -> None:
        """Refines the best plans; ``share``: the seconds of an equal share of the computation."""
        leaves, left = self.traced.leaves, self.compilations
        sizes: dict[tuple[int, ...], int] = {}
        for leaf in leaves:
            sizes[leaf.shape] = sizes.get(leaf.shape, 0) + leaf.nbytes
        numbers = {leaf.shape: number for number, leaf in enumerate(leaves) if leaf.shape}
        by_size = sorted(numbers.values(), key=lambda number: -leaves[number].nbytes)
        top = starts[0] if starts else None
        for best in starts:
            for number in by_size:
                assert top is not None
                fits = top[-1].at_most <= self.limit
                fastest = top[-1].seconds
                if time.monotonic() > self.until or (fits and best[-1].seconds > _SLOW * fastest):
                    break
                if fits and fastest < _NEAR * share:
                    return
                if fits and _sending_s(sizes[leaves[number].shape], profile, devices) < _LITTLE * fastest:
                    continue
                more = [
                    one
                    for one in variations(best[0], leaves, number)
                    if one.key not in self.known and one.argument_bytes(leaves) <= self.limit
                ]
                if 0 < len(more) <= left:
                    left -= len(more)
                    best = min([best, *self.add(more)], key=self.order)
                    top = min(top, best, key=self.order)


def _sending_s(nbytes: int, profile: Profile, devices: int) -> float:
    """The seconds of what arrays of so many bytes are sent in a step if they are cut: there, back, and as gradients."""
    if devices == 1:
        return 0.0
    group = group_of(range(devices), profile.per_host)
    each = (profile.collective_s(name, nbytes, group, ARRAYS) for name in ("psum", "all_gather", "all_gather"))
    return sum(each) + profile.stream_s(6 * nbytes)


def _refuse_memory(limit: int, got: str) -> None:
    remedy = "Use more devices, a smaller batch, or jax.checkpoint."
    fail(ValueError, _WHERE, None, f"a plan that fits into {limit:,} B on each device", got, remedy)
