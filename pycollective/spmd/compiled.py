"""A compiled function whose body may speak with other ranks: how a call of it reaches XLA, in its turn."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import jax
from jax.extend.core import ClosedJaxpr

from pycollective.errors import message
from pycollective.named_axes import fusion, overlap
from pycollective.named_axes.names import naming_axes
from pycollective.ordering import dispatch, donation, region
from pycollective.ordering.dispatch import (
    WithCompletion,
    committed_devices,
    default_devices,
    limit_programs_in_flight,
    wait_for_earlier_programs,
)
from pycollective.ordering.jax_internals import at_top_level
from pycollective.ranks import agreement
from pycollective.spmd import device_program

P = ParamSpec("P")
R = TypeVar("R")


def _elsewhere(error: ValueError) -> bool:
    """Whether JAX refuses arguments since they lie on other devices than the program."""
    return "incompatible devices" in str(error)


def _devices_named(shardings: Any) -> frozenset[jax.Device]:
    """Those over which shardings, or what holds some, lie."""
    found = [getattr(leaf, "sharding", leaf) for leaf in jax.tree.leaves(shardings)]
    return frozenset(device for leaf in found for device in region.devices_of_sharding(leaf))


class _Found(NamedTuple):
    """What ranks compare of a program at a function's first call."""

    notes: list[agreement.TraceReport]
    sums: overlap.Found


class CompiledFunction(Generic[P, R]):
    """A compiled function; what :func:`pycollective.jit`, ``pmap`` and ``shard_map`` return.

    At top level it is one region (see ``ordering``), dispatched by JAX's fast path. Inside a trace its calls must keep
    their order with those around them: there it is plain :func:`jax.jit`, whose effect JAX orders, differentiates and
    batches.
    """

    def __init__(
        self,
        fun: Callable[P, R],
        options: dict[str, Any],
        place: Callable[[Any, Any], tuple[Any, Any]] | None = None,
        where: str = "jit",
    ) -> None:
        """Compiles nothing yet.

        Args:
            fun: what runs on this rank.
            options: those of :func:`jax.jit`.
            place: moves arguments to the devices of the program; None: it has none of its own.
            where: for messages.
        """
        functools.update_wrapper(self, fun)
        self._fun = fun
        self._where = where
        self._place = place
        self._moves: Callable[[Any, Any], tuple[Any, Any]] | None = None  # `place`, once a call needed it
        self._overlap = overlap.Overlap()
        donated = donation.Donated.of(fun, options)
        shardings = options.get("out_shardings")
        named = _devices_named((options.get("in_shardings"), shardings))
        self._program = region.Region(
            fun,
            donated=donated,
            replace_device_programs=self._expand,
            rearrange_sums=self._rewrite,
            with_completion=shardings is not None,
            devices=named,
        )
        of_region = {} if shardings is None else {"out_shardings": dispatch.WithCompletion(shardings, None)}
        self._region = jax.jit(self._program, **{**options, **of_region})
        self._nested = jax.jit(fun, **options)
        self._agreed = False  # whether all ranks have made the first call

    def __repr__(self) -> str:
        return f"<pycollective function {self._fun!r}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # Every look-up here is paid by every call: one of 4 B takes 8 us in all.
        if not (self._agreed and at_top_level()):
            return self._call_slowly(args, kwargs)
        if self._program.devices is not dispatch.ONLY_DEVICE:
            return self._dispatch(self._region, args, kwargs)
        # As `_dispatch`, where there is nothing to move and nothing to look up.
        keeps = wait_for_earlier_programs(dispatch.ONLY_DEVICE)
        outs = self._region(*args, **kwargs)
        return limit_programs_in_flight(outs) if keeps or type(outs) is WithCompletion else outs

    def _call_slowly(self, args: Any, kwargs: Any) -> Any:
        """A call inside a trace, or the first one."""
        if not at_top_level():
            return self._call_nested(args, kwargs)
        if jax.config.jax_disable_jit:  # each operation is a program of its own
            dispatch.wait_for_all_programs()
            return self._fun(*args, **kwargs)
        self._call_first(args, kwargs)
        return self._dispatch(self._region, args, kwargs)

    def _call_nested(self, args: Any, kwargs: Any) -> Any:
        try:
            return self._nested(*args, **kwargs)
        except ValueError as error:
            if self._place is None or not _elsewhere(error):
                raise
        args, kwargs = self._place(args, kwargs)
        return self._nested(*args, **kwargs)

    def _dispatch(self, program: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Calls a compiled program of the region."""
        if self._moves is not None:
            args, kwargs = self._moves(args, kwargs)
        devices = self._program.devices
        if isinstance(devices, str):  # those of the arguments
            devices = committed_devices(args, kwargs)
            if devices is None:
                devices = default_devices()
            elif self._place is not None and devices != default_devices():
                args, kwargs = self._place(args, kwargs)
                devices = committed_devices(args, kwargs) or default_devices()
        keeps = wait_for_earlier_programs(devices)
        try:
            outs = program(*args, **kwargs)
        except ValueError as error:
            if self._place is None or self._moves is not None or not _elsewhere(error):
                raise
            self._moves = self._place  # from now on, so that programs which never need it pay nothing
            return self._dispatch(program, args, kwargs)
        return limit_programs_in_flight(outs) if keeps or type(outs) is WithCompletion else outs

    def _call_first(self, args: Any, kwargs: Any) -> None:
        """What comes before the first call: all ranks trace, and compare what they found."""
        with naming_axes(), self._finding(free=True) as (notes, sums):
            try:
                self._region.trace(*args, **kwargs)  # kept by JAX: the call does not trace again
            finally:
                agreement.compare_reports(notes)
        if not self._overlap.settle(sums):
            self._region.clear_cache()
        self._agreed = True

    def _expand(self, closed: ClosedJaxpr) -> ClosedJaxpr:
        agreement.report_program(self._where, self._fun, lambda: device_program.collectives(closed.jaxpr))
        return device_program.expand(closed)

    def _rewrite(self, jaxpr: Any) -> Any:
        return self._overlap(fusion.join_reductions(jaxpr))

    @contextlib.contextmanager
    def _finding(self, *, free: bool) -> Iterator[_Found]:
        """What is found while the program is traced inside; ``free`` as :meth:`overlap.Overlap.finding` has it."""
        if self._program.traced:  # by `lower`: in what JAX keeps of that nothing is found
            self._region.clear_cache()
        with agreement.collect_reports() as notes, self._overlap.finding(free=free) as sums:
            yield _Found(notes, sums)

    def _meet(self, found: _Found) -> None:
        """What comes before the first call of a program that was traced when ranks had not agreed."""
        if not self._agreed:
            agreement.compare_reports(found.notes)
            self._overlap.settle(found.sums)
            self._agreed = True
        elif not self._overlap.admits(found.sums):
            raise RuntimeError(
                message(
                    self._where,
                    "a program that was lowered after the first call, where ranks agreed on the order of its sums",
                    "one that was lowered before, with another order",
                    "Lower and compile it again.",
                )
            )

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)  # a method, as jax.jit's

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Traced:
        """As :meth:`jax.stages.Wrapped.trace`. Compiled from here, the program takes JAX's slower dispatch."""
        return self._nested.trace(*args, **kwargs)

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """The shapes and dtypes of the results, as that of :func:`jax.jit`. No other rank needs to make this call."""
        return self._nested.eval_shape(*args, **kwargs)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """The program of a top-level call, as :meth:`jax.stages.Wrapped.lower`, for which no other rank is needed."""
        if self._agreed:
            return Lowered(self._region.lower(*args, **kwargs), self, None)
        with self._finding(free=False) as found:
            return Lowered(self._region.lower(*args, **kwargs), self, found)

    def clear_cache(self) -> None:
        """Forgets the compiled programs."""
        self._region.clear_cache()
        self._nested.clear_cache()


class _Stage:
    """A stage of JAX's, but for its results: those of the region, without the completion that may be among them."""

    def __init__(self, stage: Any, jitted: CompiledFunction[..., Any], found: _Found | None) -> None:
        self._stage = stage
        self._jitted = jitted
        self._found = found  # what no call has compared yet

    def __repr__(self) -> str:
        return f"<pycollective {type(self).__name__} of {self._jitted._fun!r}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # serialization reads those: a compiled program belongs to the process that made it
            raise AttributeError(
                f"{self!r} has no attribute {name!r}: it cannot be serialized, and runs in this process alone"
            )
        return getattr(self._stage, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in dir(self._stage) if not name.startswith("_"))})

    @property
    def out_tree(self) -> Any:
        """The structure of the results."""
        return jax.tree.structure(self.out_info)

    @property
    def out_info(self) -> Any:
        """As :attr:`jax.stages.Lowered.out_info`."""
        return _results(self._stage.out_info)


class Lowered(_Stage):
    """What :meth:`CompiledFunction.lower` returns: a :class:`jax.stages.Lowered` in all but its class."""

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """As :meth:`jax.stages.Lowered.compile`."""
        return Compiled(self._stage.compile(*args, **kwargs), self._jitted, self._found)


class Compiled(_Stage):
    """A compiled program: a :class:`jax.stages.Compiled` in all but its class. Its calls take their turn."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._found is not None:
            self._jitted._meet(self._found)
            self._found = None
        return self._jitted._dispatch(self._stage, args, kwargs)

    @property
    def output_shardings(self) -> Any:
        """As :attr:`jax.stages.Compiled.output_shardings`."""
        return _results(self._stage.output_shardings)

    @property
    def output_formats(self) -> Any:
        """As :attr:`jax.stages.Compiled.output_formats`."""
        return _results(self._stage.output_formats)


def _results(outs: Any) -> Any:
    return outs.outs if type(outs) is dispatch.WithCompletion else outs
