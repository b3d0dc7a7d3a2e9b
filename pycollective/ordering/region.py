"""The region: a whole program as one primitive without effects, so that JAX dispatches it at full speed.

JAX dispatches a program with an ordered effect slowly. A region has no effect: its body is lowered with a token of its
own. This token orders the calls inside the program, and ``dispatch`` orders programs. A region must be a whole program,
since two regions inside one program would have no order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Primitive, Var
from jax.interpreters import mlir

from pycollective.errors import message
from pycollective.jax_support import jax_internals
from pycollective.jax_support.donation import Donated, without_copies
from pycollective.jax_support.jax_internals import without_references
from pycollective.jax_support.jaxprs import PLAIN, all_equations, as_function, evaluate, rebind, split_arrays
from pycollective.ordering import dispatch, operand_order, sections
from pycollective.ordering.effect import effect
from pycollective.transport import native

region_p = Primitive("pycollective_region")
region_p.multiple_results = True


@region_p.def_effectful_abstract_eval
def _region_abstract_eval(*_: Any, jaxpr: Any) -> Any:
    return [var.aval for var in jaxpr.outvars], without_references(jaxpr.effects) - {effect}


def _region_lowering(ctx: Any, *args: Any, jaxpr: Any) -> Sequence[Any]:
    return jax_internals.lower_with_new_token(ctx, effect, jaxpr, args, as_function)


mlir.register_lowering(region_p, _region_lowering)


@region_p.def_impl
def _region_impl(*args: Any, jaxpr: Any) -> list[Any]:
    """Runs the program operation by operation, up to the first collective.

    JAX calls it under ``jax_debug_nans`` to find the origin of a NaN in the results. Only this rank calls it, so the
    other ranks would not take part in a collective.
    """

    def equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if effect in eqn.effects:
            raise FloatingPointError(
                message(
                    "jit",
                    "no NaN or infinity in the results",
                    f"one, but none from the operations before the first collective, {eqn.primitive.name} at "
                    f"{source_info_util.summarize(eqn.source_info)}",
                    "One rank cannot run a collective again, nor what follows it. The NaN may come from another rank: "
                    "run all ranks with JAX_DISABLE_JIT=1, which checks each operation.",
                )
            )
        return rebind(eqn, operands)

    constants = len(jaxpr.constvars)
    closed = ClosedJaxpr(jaxpr, args[:constants])
    return evaluate(closed, equation, *args[constants:])


class Program(NamedTuple):
    """A traced program. Passes change it before it becomes a region.

    Attributes:
        closed: the program, after all transforms.
        free: the indices of the inputs that it may overwrite.
    """

    closed: ClosedJaxpr
    free: frozenset[int] = frozenset()

    def changed(self, change: Callable[[Any], Any]) -> Program:
        """Returns the program with ``change`` applied to its jaxpr. The inputs and constants must stay the same."""
        return self._replace(closed=ClosedJaxpr(change(self.closed.jaxpr), self.closed.consts))


Pass = Callable[[Program], Program]
"""A step from a traced function to a region."""


def avoid_copies(program: Program) -> Program:
    """The pass that lets a collective overwrite an operand only if XLA need not copy the operand first."""
    inputs = program.closed.jaxpr.invars
    return program.changed(functools.partial(without_copies, free=frozenset(inputs[place] for place in program.free)))


def number_reductions(program: Program) -> Program:
    """The pass that gives each reduction its number among those that are alike."""
    return program.changed(operand_order.with_numbers)


def mark_sections(program: Program) -> Program:
    """The pass that tells the calls that each run makes in the same order, where ranks do not post them on a board."""
    return program.changed(functools.partial(sections.with_sections, is_counted=functools.cache(_compares_in_sections)))


def _compares_in_sections(participants: Any) -> bool:
    number, *_ = participants._key
    return native.compares_in_sections(number)


class Region:
    """A function whose trace is one region, which :func:`jax.jit` compiles as a whole program.

    A call takes the arguments of ``fun`` and returns the results of ``fun``, or a :class:`dispatch.WithCompletion` of
    them.

    Attributes:
        traced: whether the function was traced.
        devices: the devices on which its programs run, if a shard_map or a sharding names them;
            :data:`dispatch.ONLY_DEVICE` on a rank with one device; :data:`dispatch.DEVICES_OF_ARGUMENTS` if the
            program names none, and before any trace; None if the programs have different devices, or if a mesh around
            the call (:func:`jax.set_mesh`) names them.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        *,
        passes: Sequence[Pass] = (avoid_copies, number_reductions, mark_sections),
        donated: Donated | None = None,
        with_completion: bool = False,
        devices: frozenset[jax.Device] = frozenset(),
    ) -> None:
        """Keeps ``fun``.

        Args:
            fun: any function that JAX can trace.
            passes: the passes over the traced program, in their order.
            donated: the inputs that the program may overwrite.
            with_completion: whether every call returns a :class:`dispatch.WithCompletion`.
            devices: the devices of the shardings that :func:`jax.jit` has for arguments and results.
        """
        functools.update_wrapper(self, fun)
        self._passes = passes
        self._with_completion = with_completion
        self._fun = fun
        self._donated = donated
        self._devices_of_options = devices
        self.traced = False
        self._among: object = None  # the result of `dispatch.traces` at the last trace
        self.devices: dispatch.Devices | str | None = dispatch.DEVICES_OF_ARGUMENTS

    def __repr__(self) -> str:  # JAX shows it in its messages
        return repr(self._fun)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Traces ``fun``. Under ``JAX_DISABLE_JIT`` it calls ``fun``, and each collective runs by itself."""
        if jax.config.jax_disable_jit:
            return self._fun(*args, **kwargs)
        program, arrays, out_tree = self._trace(args, kwargs)
        for change in self._passes:
            program = change(program)
        closed = program.closed
        devices = dispatch.by_id(self._devices_of_options | _devices_of(closed.jaxpr))
        under_mesh = not jax.sharding.get_abstract_mesh().empty
        self._record_devices(None if under_mesh else devices or dispatch.DEVICES_OF_ARGUMENTS)
        *outs, completion = region_p.bind(*closed.consts, *arrays, jaxpr=closed.jaxpr)
        inputs = {*closed.jaxpr.invars, *closed.jaxpr.constvars}
        computes_a_result = any(isinstance(var, Var) and var not in inputs for var in closed.jaxpr.outvars[:-1])
        results = jax.tree.unflatten(out_tree, outs)
        if computes_a_result and not devices and not self._with_completion:
            return results
        return dispatch.WithCompletion(results, completion)

    def _trace(self, args: Any, kwargs: Any) -> tuple[Program, list[Any], Any]:
        """Returns the program before the first pass, its operands, and the tree structure of its results.

        The last result of the program is the completion, an array without elements.
        """
        arrays, with_arrays = split_arrays(args, kwargs)
        out_tree = None

        def flat(*arrays: Any) -> list[Any]:
            nonlocal out_tree
            args, kwargs = with_arrays(arrays)
            outs, out_tree = jax.tree.flatten(self._fun(*args, **kwargs))
            return [*outs, jnp.zeros(0, bool)]

        closed = jax.make_jaxpr(flat)(*arrays)
        donated = self._donated.arrays(args, kwargs) if self._donated is not None else ()
        free = frozenset(place for place, x in enumerate(arrays) if id(x) in donated)
        return Program(closed, free), arrays, out_tree

    def _record_devices(self, devices: dispatch.Devices | str | None) -> None:
        if dispatch.has_one_device():
            devices = dispatch.ONLY_DEVICE
        is_first = not self.traced or self._among is not dispatch.traces()
        if self.traced and devices != self.devices:
            # This trace is part of a dispatch that has waited for programs on other devices, so wait for all programs.
            with jax.ensure_compile_time_eval():
                dispatch.wait_for_earlier_programs(None)
        self.devices = devices if is_first or devices == self.devices else None
        self.traced, self._among = True, dispatch.traces()


def devices_of_sharding(sharding: Any) -> frozenset[jax.Device]:
    """Returns the devices of a sharding; none for another object, or for a sharding without devices."""
    if not isinstance(sharding, jax.sharding.Sharding) or isinstance(
        getattr(sharding, "mesh", None), jax.sharding.AbstractMesh
    ):
        return frozenset()
    return frozenset(sharding.device_set)


def _devices_of(jaxpr: Any) -> frozenset[jax.Device]:
    """Returns the devices that a program names in a :func:`jax.shard_map` or in a sharding."""
    found: frozenset[jax.Device] = frozenset()
    for eqn in all_equations(jaxpr):
        if (sharding := eqn.params.get("sharding")) is not None:
            found |= devices_of_sharding(sharding)
        if eqn.primitive in PLAIN:
            continue
        if isinstance(mesh := eqn.params.get("mesh"), jax.sharding.Mesh):
            found |= frozenset(mesh.devices.flat)
        for sharding in eqn.params["devices"] if eqn.primitive.name == "device_put" else ():
            found |= devices_of_sharding(sharding)
    return found
