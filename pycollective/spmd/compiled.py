"""Compiled functions that may hold collectives: how a call is traced, agreed on by the ranks, and dispatched."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import jax

from pycollective.errors import message
from pycollective.jax_support import donation
from pycollective.jax_support.jax_internals import at_top_level
from pycollective.named_axes import overlap
from pycollective.named_axes.names import explain_unbound_names
from pycollective.ordering import dispatch, region
from pycollective.ordering.dispatch import (
    WithCompletion,
    committed_devices,
    default_devices,
    limit_programs_in_flight,
    wait_for_earlier_programs,
)
from pycollective.ranks import agreement
from pycollective.spmd import pipeline

P = ParamSpec("P")
R = TypeVar("R")


def _is_about_devices(error: Exception) -> bool:
    """Returns whether JAX has refused the arguments because they lie on other devices than the program."""
    return "incompatible devices" in str(error)


def _is_about_meshes(error: Exception) -> bool:
    """Returns whether XLA of JAX 0.12 has refused to compile a program for the mesh on which an argument lies.

    If two meshes have the same devices, XLA uses one of them for both. If this one has an additional axis of size 1,
    our calls are not manual over all axes, and XLA refuses them. The error comes before anything has run.
    """
    return "side-effect HLO cannot have a replicated sharding" in str(error)


def _devices_named(shardings: Any) -> frozenset[jax.Device]:
    """Returns the devices of all shardings in a tree. A leaf may also be a layout or an array, which has a sharding."""
    found = [getattr(leaf, "sharding", leaf) for leaf in jax.tree.leaves(shardings)]
    return frozenset(device for leaf in found for device in region.devices_of_sharding(leaf))


class _Findings(NamedTuple):
    """The findings of a trace that the ranks must compare at the function's first call.

    Attributes:
        notes: the collectives over named axes.
        orders: the orders in which sums begin.
    """

    notes: list[agreement.TraceReport]
    orders: overlap.FoundOrders


class CompiledFunction(Generic[P, R]):
    """A compiled function: what :func:`pycollective.jit`, ``pmap`` and ``shard_map`` return.

    A call at top level runs one region (``ordering/region.py``), which JAX dispatches at full speed. A call inside
    another trace must keep its collectives in order with those of the surrounding program. So it is a call of plain
    :func:`jax.jit` with an ordered effect, and JAX can differentiate and batch it.
    """

    def __init__(
        self,
        fun: Callable[P, R],
        options: dict[str, Any],
        place: Callable[[Any, Any], tuple[Any, Any]] | None = None,
        where: str = "jit",
        wrapped: Callable[..., Any] | None = None,
    ) -> None:
        """Keeps the function. The first call compiles it.

        Args:
            fun: the function of this rank's own arrays.
            options: options of :func:`jax.jit`.
            place: a function that moves arguments, positional and by keyword, to the devices of the program. None: the
                program runs on the devices of its arguments.
            where: the name of the public function, for messages.
            wrapped: the user's function, if ``fun`` binds axes around it.
        """
        of_user: Callable[..., Any] = fun if wrapped is None else wrapped
        functools.update_wrapper(self, of_user)
        self._fun = fun
        self._where = where
        self._place = place
        self._always_places = False  # set when a call has had arguments on other devices or meshes
        self._overlap = overlap.Overlap()
        donated = donation.Donated.of(fun, options)
        shardings = options.get("out_shardings")
        named = _devices_named((options.get("in_shardings"), shardings))
        self._passes = pipeline.passes_of(where, fun, self._overlap)
        self._new_region = functools.partial(
            region.Region, fun, donated=donated, with_completion=shardings is not None, devices=named
        )
        self._program = self._new_region(passes=list(self._passes.values()))
        of_region = {} if shardings is None else {"out_shardings": dispatch.WithCompletion(shardings, None)}
        self._options = {**options, **of_region}
        self._top_level = jax.jit(self._program, **self._options)  # for calls at top level
        self._nested = jax.jit(fun, **options)  # for calls inside a trace
        self._agreed = False  # whether all ranks have made the first call, and agree
        _functions.add(self)

    def __repr__(self) -> str:
        return f"<pycollective function {self._fun!r}>"

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        # This is the hot path: a call with 4 B takes 8 us in total, so each look-up here counts.
        if not (self._agreed and at_top_level()):
            return self._call_first_or_nested(args, kwargs)
        if self._program.devices is not dispatch.ONLY_DEVICE:
            return self._dispatch(args, kwargs)
        # A copy of `_dispatch` for a rank with one device: no arguments to move, no devices to look up.
        must_limit = wait_for_earlier_programs(dispatch.ONLY_DEVICE)
        outs = self._top_level(*args, **kwargs)
        return limit_programs_in_flight(outs) if must_limit or type(outs) is WithCompletion else outs

    def _call_first_or_nested(self, args: Any, kwargs: Any) -> Any:
        """Makes a call inside a trace, or the first call."""
        if not at_top_level():
            return self._call_nested(args, kwargs)
        if jax.config.jax_disable_jit:  # each operation is a program of its own
            dispatch.wait_for_all_programs()
            return self._fun(*args, **kwargs)
        self._prepare_first_call(args, kwargs)
        return self._dispatch(args, kwargs)

    def _call_nested(self, args: Any, kwargs: Any) -> Any:
        try:
            return self._nested(*args, **kwargs)
        except ValueError as error:
            if self._place is None or not _is_about_devices(error):
                raise
        args, kwargs = self._place(args, kwargs)
        return self._nested(*args, **kwargs)

    def _dispatch(self, args: Any, kwargs: Any) -> Any:
        """Dispatches the program: waits for earlier programs, and moves the arguments if that is needed."""
        if self._always_places and self._place is not None:
            args, kwargs = self._place(args, kwargs)
        devices = self._program.devices
        if isinstance(devices, str):  # DEVICES_OF_ARGUMENTS
            devices = committed_devices(args, kwargs)
            if devices is None:
                devices = default_devices()
            elif self._place is not None and devices != default_devices():
                args, kwargs = self._place(args, kwargs)
                devices = committed_devices(args, kwargs) or default_devices()
        must_limit = wait_for_earlier_programs(devices)
        try:
            outs = self._top_level(*args, **kwargs)
        except (ValueError, jax.errors.JaxRuntimeError) as error:
            if self._place is None or self._always_places or not (_is_about_devices(error) or _is_about_meshes(error)):
                raise
            self._always_places = True  # for all later calls: other programs do not pay for the move
            return self._dispatch(args, kwargs)
        return limit_programs_in_flight(outs) if must_limit or type(outs) is WithCompletion else outs

    def _dispatch_compiled(self, program: Any, devices: dispatch.Devices | None, args: Any, kwargs: Any) -> Any:
        """Dispatches a program that the user has compiled. Other programs of the function may have other devices."""
        must_limit = wait_for_earlier_programs(devices and dispatch.devices_of_program(devices))
        outs = program(*args, **kwargs)
        return limit_programs_in_flight(outs) if must_limit or type(outs) is WithCompletion else outs

    def _prepare_first_call(self, args: Any, kwargs: Any) -> None:
        """Prepares the first call: all ranks trace the function, and compare the findings."""
        with explain_unbound_names(), self._collect_for_comparison(may_reorder=True) as (notes, orders):
            try:
                self._top_level.trace(*args, **kwargs)  # JAX keeps the trace: the call does not trace again
            finally:
                agreement.compare_reports(notes)
        if not self._overlap.agree_on(orders):
            self._top_level.clear_cache()
        self._agreed = True

    @contextlib.contextmanager
    def _collect_for_comparison(self, *, may_reorder: bool) -> Iterator[_Findings]:
        """Collects the findings of a trace. ``may_reorder``: see :meth:`overlap.Overlap.collect_orders`."""
        if self._program.traced:  # `lower` has traced it: JAX would reuse this trace
            self._top_level.clear_cache()
        collect_orders = self._overlap.collect_orders(may_reorder=may_reorder)
        with agreement.collect_reports() as notes, collect_orders as orders:
            yield _Findings(notes, orders)

    def _agree_on_lowered(self, found: _Findings) -> None:
        """Compares the findings of a program that was lowered before the ranks agreed, before its first call."""
        if not self._agreed:
            agreement.compare_reports(found.notes)
            self._overlap.agree_on(found.orders)
            self._agreed = True
        elif not self._overlap.has_agreed_order(found.orders):
            raise RuntimeError(
                message(
                    self._where,
                    "a program that was lowered after the first call, where ranks agreed on the order of its sums",
                    "one that was lowered before, with another order",
                    "Lower and compile it again.",
                )
            )

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)  # in a class: a method, as with jax.jit

    def trace(self, *args: P.args, **kwargs: P.kwargs) -> jax.stages.Traced:
        """Traces a call, as :meth:`jax.stages.Wrapped.trace` does. JAX dispatches a program compiled from it slowly."""
        return self._nested.trace(*args, **kwargs)

    def eval_shape(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Returns the shapes and dtypes of the results, as JAX's method does. No other rank needs to make this call."""
        return self._nested.eval_shape(*args, **kwargs)

    def lower(self, *args: P.args, **kwargs: P.kwargs) -> Lowered:
        """Lowers the program of a call at top level, as JAX's method does. No other rank needs to make this call."""
        if self._agreed:
            return Lowered(self._top_level.lower(*args, **kwargs), self, None)
        with self._collect_for_comparison(may_reorder=False) as found:
            return Lowered(self._top_level.lower(*args, **kwargs), self, found)

    def programs(self, *args: P.args, **kwargs: P.kwargs) -> dict[str, region.Program]:
        """Returns the program of a call at top level after the trace and after each pass, by the pass's name."""
        found: dict[str, region.Program] = {}

        def recorded(name: str, change: region.Pass) -> region.Pass:
            return lambda program: found.setdefault(name, change(program))

        passes = [recorded("trace", lambda program: program)]
        passes += [recorded(name, change) for name, change in self._passes.items()]
        jax.jit(self._new_region(passes=passes), **self._options).trace(*args, **kwargs)
        return found

    def clear_cache(self) -> None:
        """Forgets the compiled programs."""
        self._top_level.clear_cache()
        self._nested.clear_cache()


_functions: weakref.WeakSet[CompiledFunction[..., Any]] = weakref.WeakSet()
"""The compiled functions of this process."""


def forget_agreements() -> None:
    """Makes the next call of each function a first call, since another set of ranks must agree on its programs."""
    for function in list(_functions):
        function._agreed = False
        function._overlap.forget()
    jax.clear_caches()


class _Stage:
    """Wraps a stage of JAX (lowered, compiled) of a region. It hides the completion that may be among the results."""

    def __init__(self, stage: Any, function: CompiledFunction[..., Any], found: _Findings | None) -> None:
        self._stage = stage
        self._function = function
        self._found = found  # findings that the ranks have not compared yet

    def __repr__(self) -> str:
        return f"<pycollective {type(self).__name__} of {self._function._fun!r}>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # JAX's serialization reads such names
            raise AttributeError(
                f"{self!r} has no attribute {name!r}: it cannot be serialized, and runs in this process alone"
            )
        return getattr(self._stage, name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in dir(self._stage) if not name.startswith("_"))})

    @property
    def out_tree(self) -> Any:
        """The tree structure of the results."""
        return jax.tree.structure(self.out_info)

    @property
    def out_info(self) -> Any:
        """The shapes and dtypes of the results; see :attr:`jax.stages.Lowered.out_info`."""
        return dispatch.results_of(self._stage.out_info)


class Lowered(_Stage):
    """The result of :meth:`CompiledFunction.lower`, with all attributes of :class:`jax.stages.Lowered`."""

    def compile(self, *args: Any, **kwargs: Any) -> Compiled:
        """Compiles the program; see :meth:`jax.stages.Lowered.compile`."""
        return Compiled(self._stage.compile(*args, **kwargs), self._function, self._found)


class Compiled(_Stage):
    """A compiled program, with all attributes of :class:`jax.stages.Compiled`. Its calls have program order."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._found is not None:
            self._function._agree_on_lowered(self._found)
            self._found = None
        return self._function._dispatch_compiled(self._stage, self._devices, args, kwargs)

    @functools.cached_property
    def _devices(self) -> dispatch.Devices | None:
        """The devices of the program; None if they are not known."""
        return tuple(_devices_named(self._stage.output_shardings)) or None

    @property
    def output_shardings(self) -> Any:
        """The shardings of the results; see :attr:`jax.stages.Compiled.output_shardings`."""
        return dispatch.results_of(self._stage.output_shardings)

    @property
    def output_formats(self) -> Any:
        """The shardings and layouts of the results; see :attr:`jax.stages.Compiled.output_formats`."""
        return dispatch.results_of(self._stage.output_formats)
