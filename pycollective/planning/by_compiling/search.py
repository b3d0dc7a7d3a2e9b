"""Finds the best way to spread a step over devices."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from typing import Any

from pycollective.errors import fail
from pycollective.planning.by_compiling.candidates import Candidate, Spec, candidates, variations
from pycollective.planning.by_compiling.compiled_candidate import Request
from pycollective.planning.by_compiling.compiling import Compilers
from pycollective.planning.by_compiling.plans import Measured, Plan, Ranking, devices_of_job
from pycollective.planning.by_compiling.prediction import Prediction, predict
from pycollective.planning.by_compiling.trace import Step, trace
from pycollective.planning.by_compiling.verify import measure
from pycollective.planning.profile import Profile
from pycollective.planning.progress import progress
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.meeting import complete, first_of, meet_or_fail
from pycollective.ranks.world import world_if_known

_WHERE = "plan"
_REFINED = 3  # the best candidates whose arrays are cut in other ways, one after the other


def plan(
    step: Callable[..., Any],
    *args: Any,
    profile: Profile | str | os.PathLike[str],
    devices: int | None = None,
    memory: float | None = None,
    donate_argnums: int | Sequence[int] = (),
    compilations: int = 60,
    processes: int | None = None,
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
        progress: whether to show a progress bar on a terminal. Default True.
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
    found = _on_one_rank(
        devices,
        profile,
        lambda: _search(traced, profile, devices, limit, compilations, processes or os.cpu_count() or 1, show=show),
    )
    plans = [Plan(*each, traced.signature) for each in found]
    if verify:
        plans = _verified(plans, measure(plans[:verify], step, *args), limit)
    return Ranking(tuple(plans))


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


def _on_one_rank(devices: int, profile: Profile, search: Callable[[], list[Found]]) -> list[Found]:
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
    return list(found)


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
    traced: Step, profile: Profile, devices: int, limit: int, compilations: int, processes: int, *, show: bool
) -> list[Found]:
    """Compiles candidates and returns those that fit, the fastest first."""
    every = list(candidates(traced.leaves, devices))
    chosen = [one for one in every if one.argument_bytes(traced.leaves) <= limit][:compilations]
    if not chosen:
        least = min(one.argument_bytes(traced.leaves) for one in every)
        _refuse_memory(limit, f"{least:,} B for the arguments alone")
    found: list[Found] = []
    errors: list[str] = []
    known: set[Any] = set()
    with (
        Compilers(traced.program, devices, processes) as compilers,
        progress("compiling", show=show) as (grow, advance),
    ):

        def add(more: Sequence[Candidate]) -> list[Found]:
            start = len(found)
            grow(len(more))
            known.update(one.key for one in more)
            requests = [Request(one, traced.signature.outs, traced.donated) for one in more]
            for request, compiled in compilers.compile_all(requests):
                advance(1)
                if isinstance(compiled, str):
                    errors.append(compiled)
                else:
                    prediction = predict(compiled.work, compiled.memory, profile)
                    found.append((request.candidate, compiled.out_specs, prediction))
            return found[start:]

        order = _order(limit)
        _refine(
            sorted(add(chosen), key=order)[:_REFINED],
            order,
            traced,
            limit,
            known,
            compilations - len(chosen),
            add,
        )
    if not found:
        fail(ValueError, _WHERE, None, "a step that XLA can spread", errors[0], "Look at the first error of XLA.")
    found.sort(key=order)
    fitting = [each for each in found if each[-1].at_most <= limit]
    if not fitting:
        least = min(each[-1].at_most for each in found)
        _refuse_memory(limit, f"up to {least:,} B for the plan that needs least")
    return fitting


def _order(limit: int) -> Callable[[Found], tuple[bool, float, str]]:
    """The order of plans: those that fit first, then by time; the same in each run, whatever was compiled first."""
    return lambda found: (found[-1].at_most > limit, found[-1].seconds, repr(found[0]))


def _refine(
    starts: Sequence[Found],
    order: Callable[[Found], Any],
    traced: Step,
    limit: int,
    known: Set[Any],
    compilations: int,
    add: Callable[[Sequence[Candidate]], list[Found]],
) -> None:
    """Cuts the arrays of some plans in other ways, one after the other, the largest first. It keeps what pays."""
    of_shape = {leaf.shape: number for number, leaf in enumerate(traced.leaves) if leaf.shape}
    by_size = sorted(of_shape.values(), key=lambda number: -traced.leaves[number].nbytes)
    for best in starts:
        for number in by_size:
            more = [
                one
                for one in variations(best[0], traced.leaves, number)
                if one.key not in known and one.argument_bytes(traced.leaves) <= limit
            ]
            if 0 < len(more) <= compilations:
                compilations -= len(more)
                best = min([best, *add(more)], key=order)


def _refuse_memory(limit: int, got: str) -> None:
    remedy = "Use more devices, a smaller batch, or jax.checkpoint."
    fail(ValueError, _WHERE, None, f"a plan that fits into {limit:,} B on each device", got, remedy)
