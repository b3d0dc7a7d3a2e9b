"""Layouts of a network written with ``pycollective.parallel``, and formulas for what a step takes in each of them.

Devices form a mesh with the axes "stage", "data", "context" and "model", the last one over neighbours. b is the number
of examples in a microbatch of a device, m that of the microbatches, p that of the stages.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from pycollective.planning.by_formulas.network import Held, MatMul, Network, Part
from pycollective.planning.by_formulas.stage_cuts import cut_evenly
from pycollective.planning.profile import AXES, NARROW, Group, Profile, group_of

_CHUNKS = 2  # of each stage in the interleaved schedule, where layouts are enumerated

_MOST = 1.2
"""How many times the estimated memory was needed at most: docs/plan.md has what was measured."""


class Layout(NamedTuple):
    """A way to train a network.

    Attributes:
        data: the number of devices along the axis of the examples.
        model: that along the axis of heads and hidden units.
        context: that along the axis of the positions.
        stage: the number of stages of the pipeline.
        zero: the stage of ZeRO over the axes of the examples and of the positions, or 0.
        schedule: "gpipe", "1f1b", "interleaved" or "zero-bubble"; "" without a pipeline.
        microbatches: the number of microbatches of a device's batch.
        wire_dtype: "bfloat16" for gradients that travel in it, or "".
        remat: whether the backward pass computes each part's forward pass again (:func:`jax.checkpoint`), as far as it
            needs the results, and only what goes into the parts is kept.
        chunks: the number of chunks of each stage; more than one with the interleaved schedule.
    """

    data: int
    model: int
    context: int
    stage: int
    zero: int = 0
    schedule: str = ""
    microbatches: int = 1
    wire_dtype: str = ""
    remat: bool = False
    chunks: int = 1

    def __str__(self) -> str:
        """The layout in few words.

        Example:
            >>> print(Layout(2, 1, 1, 2, zero=1, schedule="1f1b", microbatches=4), "|", Layout(1, 1, 1, 1))
            data 2, stage 2, zero 1, 1f1b of 4 | one device
        """
        below = ("schedule", "microbatches", "chunks", "wire_dtype", "remat")
        others = {name: value for name, value in self._asdict().items() if name not in below}
        words = [f"{name} {value}" for name, value in others.items() if value != self._field_defaults.get(name, 1)]
        pipeline = [f"{self.schedule} of {self.microbatches}"] if self.schedule else []
        chunks = [f"{self.chunks} chunks"] if self.chunks > 1 else []
        last = filter(None, [self.wire_dtype, "remat" if self.remat else ""])
        return ", ".join([*words, *pipeline, *chunks, *last]) or "one device"

    @property
    def replicas(self) -> int:
        """The number of devices with the same parameters."""
        return self.data * self.context

    def arguments(self) -> list[str]:
        """The options of ``examples/train_gpt.py``, and of programs that name theirs as it does.

        Example:
            >>> " ".join(Layout(2, 1, 1, 2, schedule="1f1b", microbatches=4).arguments())
            '--data 2 --model 1 --context 1 --stage 2 --zero 0 --schedule 1f1b --microbatches 4'
        """
        options = {name.replace("_", "-"): value for name, value in self._asdict().items()}
        del options["remat"]
        if self.chunks == 1:
            del options["chunks"]
        if self.stage == 1:
            del options["microbatches"]
        words = [word for name, value in options.items() if value != "" for word in (f"--{name}", str(value))]
        return [*words, "--remat"] if self.remat else words


class Estimate(NamedTuple):
    """What a step takes in a layout.

    Attributes:
        computing_s: seconds of the passes of the slowest stage, and of the optimizer.
        communication_s: seconds of its collectives and messages, but for those that pass during a backward pass.
        bubble_s: seconds in which it waits for other stages.
        memory: bytes that the device of the fullest stage needs.
        cuts: the number of parts of each stage, or with chunks of each chunk in the order of the network.
    """

    computing_s: float
    communication_s: float
    bubble_s: float
    memory: int
    cuts: tuple[int, ...]

    @property
    def seconds(self) -> float:
        """The seconds of the step."""
        return self.computing_s + self.communication_s + self.bubble_s

    @property
    def at_most(self) -> int:
        """The bytes that a device has to have, since the estimate may be too small."""
        return math.ceil(self.memory * _MOST)


class Row(NamedTuple):
    """A layout in a ranking.

    Attributes:
        layout: the layout.
        estimate: what a step is predicted to take.
        measured_s: what it took, in seconds, where it was run.
        measured_memory: the bytes that it needed on the device that needed most, where the program said so.
        failure: how its run failed; "" where it ended well, or was not run.
    """

    layout: Layout
    estimate: Estimate
    measured_s: float | None = None
    measured_memory: int | None = None
    failure: str = ""

    @property
    def needed(self) -> int:
        """The bytes that a device has to have, as measured or else as the estimate says at most."""
        return self.estimate.at_most if self.measured_memory is None else self.measured_memory

    def arguments(self) -> list[str]:
        """The program's options for it, with the cuts of a pipeline, which may be uneven."""
        words = self.layout.arguments()
        if self.layout.stage > 1:
            words += ["--cuts", ",".join(map(str, self.estimate.cuts))]
        return words

    def as_dict(self) -> dict[str, Any]:
        """The row for a JSON file."""
        return {
            **self.layout._asdict(),
            **self.estimate._asdict(),
            "seconds": self.estimate.seconds,
            "measured_s": self.measured_s,
            "measured_memory": self.measured_memory,
            "failure": self.failure,
        }


def layouts(network: Network, devices: int) -> Iterator[Layout]:
    """Yields the layouts that a network can have: all ordered factorisations of the devices, times their options."""
    for model, context, stage in itertools.product(_divisors(devices), repeat=3):
        if devices % (model * context * stage) or network.heads % model or network.positions % context:
            continue
        data = devices // (model * context * stage)
        if network.examples % data or stage > len(network.parts):
            continue
        for wire_dtype in ("", "bfloat16") if data * context > 1 else ("",):
            # In stage 3 gradients travel in their own dtype.
            most = 0 if data * context == 1 else 2 if stage > 1 or wire_dtype else 3
            for zero in range(most + 1):
                for pipeline in _pipelines(network, stage, data):
                    layout = Layout(data, model, context, stage, zero, wire_dtype=wire_dtype, **pipeline)
                    yield layout
                    # Where the backward pass is split, one that computes again is not: its bubble is that of 1F1B.
                    if layout.schedule != "zero-bubble":
                        yield layout._replace(remat=True)


def _pipelines(network: Network, stage: int, data: int) -> Iterator[dict[str, Any]]:
    """The schedules of a pipeline with numbers of microbatches and of chunks."""
    if stage == 1:
        yield {}
        return
    rows = network.examples // data
    for microbatches in _divisors(rows):
        for schedule in ("gpipe", "1f1b", "zero-bubble"):
            yield {"schedule": schedule, "microbatches": microbatches}
        if microbatches % stage == 0 and stage * _CHUNKS <= len(network.parts):
            yield {"schedule": "interleaved", "microbatches": microbatches, "chunks": _CHUNKS}


@functools.cache
def _divisors(n: int) -> tuple[int, ...]:
    return tuple(i for i in range(1, n + 1) if n % i == 0)


def _bubble(layout: Layout) -> float:
    """The time in which each stage waits for others, in times of both passes of a microbatch.

    These are the bubbles of :mod:`pycollective.parallel.schedules`. The schedule without bubbles fills its own with the
    last third of each microbatch but the first.
    """
    others = layout.stage - 1
    if layout.schedule == "zero-bubble":
        return (2 * others - min(others, layout.microbatches - 1)) / 3
    return others / layout.chunks


class _Seconds(NamedTuple):
    """Seconds that a microbatch takes in a part, or in a stage.

    Attributes:
        forward: computation in the forward pass.
        backward: computation in the backward pass, without remat.
        recomputation: computation that the backward pass of remat repeats.
        sending: communication in both passes, without remat.
        recomputed_sending: communication that the backward pass of remat repeats.
    """

    forward: float
    backward: float
    recomputation: float
    sending: float
    recomputed_sending: float

    @property
    def of_passes(self) -> float:
        """The seconds of both passes without remat."""
        return self.forward + self.backward + self.sending


class _Stages(NamedTuple):
    """The stages of a pipeline, for microbatches of one size.

    Attributes:
        cuts: the number of parts of each, or of each chunk in the order of the network.
        slowest: the number of the slowest.
        seconds: those of the slowest.
        parameters: for each stage the parameters of a device.
        largest: for each stage those of its largest part.
        entering: for each stage the elements of a microbatch that go into its parts.
        held: by the names of :class:`Held`, for each stage the elements that a device has in memory of a microbatch.
        most: the same of the part of the stage that has most of them.
    """

    cuts: tuple[int, ...]
    slowest: int
    seconds: _Seconds
    parameters: tuple[float, ...]
    largest: tuple[float, ...]
    entering: tuple[float, ...]
    held: dict[str, tuple[float, ...]]
    most: dict[str, tuple[float, ...]]


class Estimator:
    """Estimates layouts of one network on one cluster, and remembers what they have in common.

    Args:
        network: the network.
        profile: the speed of the devices and of what connects them.
        dtype: the dtype of the products.
    """

    def __init__(self, network: Network, profile: Profile, dtype: str = "float32") -> None:
        self._network = network
        self._profile = profile
        self._dtype = dtype
        # Most layers are alike. Those are one object, or equal ones.
        self._kinds = list(dict.fromkeys(network.parts))
        self._kind_of = [self._kinds.index(part) for part in network.parts]
        self._stages = functools.cache(self._cut)
        self._group = functools.cache(
            lambda stride, count: group_of(range(0, stride * count, stride), profile.per_host)
        )
        self._collective = functools.cache(self._seconds_of_collective)

    def estimate(self, layout: Layout) -> Estimate:
        """Estimates a step: the slowest stage's passes, its communication, and its waits for the other stages."""
        b = self._network.examples // layout.data // layout.microbatches
        stages = self._stages(layout.model, layout.context, layout.stage, layout.chunks, b)
        own = stages.seconds
        both = own.forward + layout.remat * own.recomputation + own.backward
        sums = own.sending + layout.remat * own.recomputed_sending + self._messages(layout, b)
        parameters = stages.parameters[stages.slowest]
        optimizer_s, gradients_s, gathered_s = self._update(parameters, layout)
        # Sums begin with the first gradients. Those of several microbatches are added up first.
        beside_s = self._profile.beside_s(gradients_s, own.backward, AXES) if layout.microbatches == 1 else 0.0
        # The gradients of each microbatch but the first are added to those before: two arrays are read, one is written.
        adding_s = (layout.microbatches - 1) * self._stream_s(3 * parameters * self._network.itemsize)
        return Estimate(
            layout.microbatches * both + adding_s + optimizer_s,
            layout.microbatches * sums + gradients_s - beside_s + gathered_s,
            _bubble(layout) * (both + sums),
            self._memory(stages, layout),
            stages.cuts,
        )

    def _cut(self, model: int, context: int, stage: int, chunks: int, b: int) -> _Stages:
        """The stages of which the slowest one is as fast as can be, or those of whose chunks it is.

        Of the chunks in the order of the network each stage has every p-th one.
        """
        of_kind = [self._seconds_of_part(part, model, context, b) for part in self._kinds]
        times = [of_kind[kind] for kind in self._kind_of]
        both = [seconds.of_passes for seconds in times]
        cuts = cut_evenly(both, stage * chunks)
        ends = [0, *itertools.accumulate(cuts)]
        spans = [range(low, high) for low, high in itertools.pairwise(ends)]
        owned = [list(itertools.chain(*spans[i::stage])) for i in range(stage)]  # the numbers of a stage's parts

        def of_stages(values: Sequence[float], fold: Callable[[Iterable[float]], float] = sum) -> tuple[float, ...]:
            return tuple(fold(values[part] for part in parts) for parts in owned)

        of_each = of_stages(both)
        slowest = of_each.index(max(of_each))
        seconds = _Seconds(*map(sum, zip(*(times[part] for part in owned[slowest]), strict=True)))
        parameters = [part.cut_parameters / model + part.whole_parameters for part in self._network.parts]
        entering = [0.0, *(part.passed * b / context for part in self._network.parts[:-1])]

        held: dict[str, tuple[float, ...]] = {}
        most: dict[str, tuple[float, ...]] = {}
        for name in Held._fields:
            pairs = [getattr(part.in_memory, name) for part in self._network.parts]
            elements = [(cut / model + whole) * b / context for cut, whole in pairs]
            held[name], most[name] = of_stages(elements), of_stages(elements, max)
        return _Stages(
            cuts,
            slowest,
            seconds,
            of_stages(parameters),
            of_stages(parameters, max),
            of_stages(entering),
            held,
            most,
        )

    def _seconds_of_part(self, part: Part, model: int, context: int, b: int) -> _Seconds:
        """Seconds of b examples.

        A backward pass has two products for each of the forward pass. Remat makes those again whose results the
        backward pass needs; JAX leaves out the others.

        Along "model" each sum is an allreduce of b x positions x width elements, in both passes (Megatron-LM,
        arXiv:1909.08053, section 3). Along "context" keys and values make context - 1 hops in each pass. In the
        backward pass their gradients go with them, and one hop further (ring attention, arXiv:2310.01889).

        Each instruction takes a while by itself, however few examples there are: a third of them in the forward pass.
        With remat there are about as many.
        """
        size = self._network.itemsize
        kept = (part.kept / model + part.kept_whole) * b / context
        activations = self._stream_s(2 * kept * size)
        starts = part.instructions * self._profile.instruction
        products = [self._product_s(product, model, context, b) for product in part.products]
        forward = sum(products)
        recomputation = sum(s for s, product in zip(products, part.products, strict=True) if product.recomputed)
        gradients = sum(
            self._product_s(product, model, context, b, of) for product in part.products for of in ("inputs", "weights")
        )
        along_model = self._group(1, model)
        sums = sum(self._collective("psum", b * elements / context * size, along_model) for elements in part.sums)
        hop = self._collective("ppermute", b * part.ring / context * size, self._group(model, context))
        sending = sums + (context - 1) * hop  # of one pass
        backward = gradients + 2 * activations + 2 / 3 * starts
        forward += activations + starts / 3
        return _Seconds(forward, backward, recomputation + activations, 2 * sending + context * hop, sending)

    def _product_s(self, product: MatMul, model: int, context: int, b: int, gradients: str = "") -> float:
        """Seconds of a product, or of the one that gives the gradients of its "inputs" or of its "weights"."""
        m, k, n = product.m / context, float(product.k), float(product.n)
        times, form = 1.0, "NN"
        if product.cut == "heads":
            # For each block of keys and values that comes round there is a product of each head and example.
            times = b * product.heads / model * context
            k, n = (size / context if size == product.m else size for size in (k, n))
        else:
            m, k, n = b * m, k / (model if product.cut == "k" else 1), n / (model if product.cut == "n" else 1)
            if gradients == "inputs":  # gradient @ weights.T
                k, n, form = n, k, "NT"
            elif gradients == "weights":  # inputs.T @ gradient, whose sums are over the examples
                m, k, form = k, m, "TT"
        return self._profile.part_s(self._profile.product_s(self._dtype, m, k, n, times, form))

    def _stream_s(self, nbytes: float) -> float:
        return self._profile.part_s(self._profile.stream_s(nbytes)) if nbytes else 0.0

    def _seconds_of_collective(self, operation: str, nbytes: float, group: Group, programs: str = AXES) -> float:
        if group.size == 1 or nbytes == 0:
            return 0.0
        return self._profile.part_s(self._profile.collective_s(operation, nbytes, group, programs))

    def _update(self, parameters: float, layout: Layout) -> tuple[float, float, float]:
        """Seconds of the optimizer, of sums of gradients, and of gathering parameters.

        ZeRO (arXiv:1910.02054, section 7): stages 1 and 2 move each gradient and each parameter once, stage 3 gathers
        the parameters twice. A sum in stage 1 moves a gradient twice, as it does without ZeRO.
        """
        size, n = self._network.itemsize, layout.replicas
        nbytes = parameters * size
        # It reads the gradient, the parameter and its own numbers, and writes the last two.
        passes = 3 + 2 * self._network.moments
        optimizer = self._stream_s(passes * nbytes / (n if layout.zero else 1))
        group = self._group(layout.model, n)
        is_narrow = bool(layout.wire_dtype) and size == 4
        if layout.zero == 0:
            sums = self._narrow_sum(nbytes, group) if is_narrow else self._collective("psum", nbytes, group)
            return optimizer, sums, 0.0
        if is_narrow:
            slices = self._collective("all_to_all", nbytes / 2, group)
        else:
            slices = self._collective("psum" if layout.zero == 1 else "psum_scatter", nbytes, group)
        gathered = self._collective("all_gather", (2 if layout.zero == 3 else 1) * nbytes, group)
        return optimizer, slices, gathered

    def _narrow_sum(self, nbytes: float, group: Group) -> float:
        """Seconds of a sum of float32 that travels in bfloat16: half the bytes, if it was not measured."""
        if NARROW in self._profile.collectives:
            return self._collective("psum", nbytes, group, NARROW)
        return self._collective("psum", nbytes / 2, group)

    def _messages(self, layout: Layout, b: int) -> float:
        """Seconds of the messages of a microbatch between stages: an activation and its gradient, for each chunk."""
        if layout.stage == 1:
            return 0.0
        largest = max(part.passed for part in self._kinds) * b / layout.context * self._network.itemsize
        group = self._group(layout.replicas * layout.model, 2)
        return 2 * layout.chunks * self._collective("ppermute", largest, group)

    def _memory(self, stages: _Stages, layout: Layout) -> int:
        """Bytes of a device of the fullest stage.

        Parameters, gradients and the optimizer's numbers for them: ZeRO, arXiv:1910.02054, section 3.1. In a pipeline
        the gradients of a microbatch are there beside their sums; but the first ones of gpipe, when most is kept.

        Activations of as many microbatches as are under way: gpipe m, 1F1B p - i on stage i, interleaved
        1 + (p - 1) / (p v) times that (arXiv:2104.04473, section 2.2), but no more than m. With remat what goes into
        each part, and all of one part for the time of its backward pass (arXiv:1604.06174).

        Where few activations are kept, most is needed when gradients are summed: all of them are there, whole, and
        their sums, and those of a part that are under way. ZeRO 3 has then gathered all parameters.
        """
        n, moments = layout.replicas, self._network.moments
        gradients = 1 / n if layout.zero >= 2 else 1.0
        if layout.microbatches > 1 and (layout.schedule != "gpipe" or layout.remat):
            gradients += self._network.adding
        state = (1 / n if layout.zero == 3 else 1.0) + gradients + moments / (n if layout.zero else 1)
        more = 1 + (layout.stage - 1) / (layout.stage * layout.chunks) if layout.chunks > 1 else 1.0
        if layout.remat:
            summed = "remat_with_grad_sum" if layout.stage == 1 and n > 1 else "remat"
            held, working = stages.held["remat_gathered" if layout.zero == 3 else summed], stages.most["remat_working"]
        else:
            alone = "gathered" if layout.zero == 3 else "plain"
            held, working = stages.held["pipeline" if layout.stage > 1 else alone], stages.most["working"]
        is_added = n > 1 and self._network.adding
        shared = {0: 0, 1: 1 + moments, 2: 1 + moments, 3: 2 + moments}[layout.zero] / n
        adding = shared + (3 + moments if layout.zero == 0 else 2)
        most = 0.0
        for i, (parameters, largest) in enumerate(zip(stages.parameters, stages.largest, strict=True)):
            gathered = largest if layout.zero == 3 else 0.0
            under_way = min(math.inf if layout.schedule == "gpipe" else more * (layout.stage - i), layout.microbatches)
            kept = under_way * stages.entering[i] + held[i] if layout.remat else under_way * held[i]
            most = max(most, state * parameters + gathered + (kept + working[i]))
            if is_added:
                most = max(most, adding * parameters + largest)
        return math.ceil(most * self._network.itemsize)
