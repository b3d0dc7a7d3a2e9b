"""The region: a whole program as one primitive without effects, so that JAX dispatches it at full speed.

A program with an ordered effect leaves JAX's fast dispatch. A region has none: its body is lowered with a token of its
own. That token orders the calls inside; between programs their dispatch does (``dispatch``). A region must be a whole
program: inside another one two regions would have no order between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Primitive, Var
from jax.interpreters import mlir

from pycollective.errors import message
from pycollective.ordering import dispatch, jax_internals
from pycollective.ordering.donation import Donated, without_copies
from pycollective.ordering.effect import effect
from pycollective.ordering.jax_internals import without_references
from pycollective.ordering.jaxprs import evaluate, function, inner_jaxprs, rebind, split_arrays

region_p = Primitive("pycollective_region")
region_p.multiple_results = True


@region_p.def_effectful_abstract_eval
def _region_abstract_eval(*_: Any, jaxpr: Any) -> Any:
    return [var.aval for var in jaxpr.outvars], without_references(jaxpr.effects) - {effect}


def _region_lowering(ctx: Any, *args: Any, jaxpr: Any) -> Sequence[Any]:
    return jax_internals.lower_with_new_token(ctx, effect, jaxpr, args, function)


mlir.register_lowering(region_p, _region_lowering)


@region_p.def_impl
def _region_impl(*args: Any, jaxpr: Any) -> list[Any]:
    """Op by op: what JAX does under ``jax_debug_nans`` with a program whose results have NaNs, to find their origin.

    It goes as far as the first collective. This rank does that for itself, so no other would answer.
    """

    def equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if effect in eqn.effects:
            raise FloatingPointError(
                message(
                    "jit",
                    "no NaN or infinity in the results",
                    f"one, that no operation makes before the first collective, {eqn.primitive.name} at "
                    f"{source_info_util.summarize(eqn.source_info)}",
                    "What lies behind it one rank cannot run again. An operand of another rank may have been NaN: "
                    "run all ranks with JAX_DISABLE_JIT=1, which checks each operation.",
                )
            )
        return rebind(eqn, operands)

    constants = len(jaxpr.constvars)
    closed = ClosedJaxpr(jaxpr, args[:constants])
    return evaluate(closed, equation, *args[constants:])


class Region:
    """A function whose trace is one region, for :func:`jax.jit` as a whole program (see the head of this file).

    Called with the arguments of ``fun`` it returns what ``fun`` does, or that :class:`dispatch.WithCompletion`.

    Attributes:
        traced: whether there is a program.
        devices: on which its programs run: those that a shard_map or a sharding names; or
            :data:`dispatch.ONLY_DEVICE` on a rank with one device; or :data:`dispatch.DEVICES_OF_ARGUMENTS`, as before
            any trace; None if they differ, or if a mesh around (:func:`jax.set_mesh`) names them.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        *,
        donated: Donated | None = None,
        expand: Callable[[ClosedJaxpr], ClosedJaxpr] = lambda closed: closed,
        rewrite: Callable[[Any], Any] = lambda jaxpr: jaxpr,
        with_completion: bool = False,
        devices: frozenset[jax.Device] = frozenset(),
    ) -> None:
        """Keeps ``fun``.

        Args:
            fun: any function that JAX can trace.
            donated: which inputs the program may overwrite.
            expand: from the program, which nothing will transform any more, to another of the same meaning.
            rewrite: from the jaxpr of the program to another of the same meaning.
            with_completion: whether every call returns a :class:`dispatch.WithCompletion`.
            devices: over which the shardings lie that :func:`jax.jit` has for its arguments and results.
        """
        functools.update_wrapper(self, fun)
        self._expand = expand
        self._rewrite = rewrite
        self._with_completion = with_completion
        self._fun = fun
        self._donated = donated
        self._named = devices
        self.traced = False
        self.devices: dispatch.Devices | str | None = dispatch.DEVICES_OF_ARGUMENTS

    def __repr__(self) -> str:  # JAX's messages name the function so
        return repr(self._fun)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One trace; or under ``JAX_DISABLE_JIT`` one call of ``fun``, whose collectives then run one by one."""
        if jax.config.jax_disable_jit:
            return self._fun(*args, **kwargs)
        arrays, with_arrays = split_arrays(args, kwargs)
        out_tree = None

        def flat(*arrays: Any) -> list[Any]:
            nonlocal out_tree
            args, kwargs = with_arrays(arrays)
            outs, out_tree = jax.tree.flatten(self._fun(*args, **kwargs))
            return [*outs, jnp.zeros(0, bool)]

        closed = self._expand(jax.make_jaxpr(flat)(*arrays))
        devices = dispatch.by_id(self._named | _devices_of(closed.jaxpr))
        under_mesh = not jax.sharding.get_abstract_mesh().empty
        self._note_devices(None if under_mesh else devices or dispatch.DEVICES_OF_ARGUMENTS)
        donated = self._donated.arrays(args, kwargs) if self._donated is not None else ()
        free = frozenset(var for var, x in zip(closed.jaxpr.invars, arrays, strict=True) if id(x) in donated)
        jaxpr = self._rewrite(without_copies(closed.jaxpr, free))
        *outs, completion = region_p.bind(*closed.consts, *arrays, jaxpr=jaxpr)
        given = {*jaxpr.invars, *jaxpr.constvars}
        held = any(isinstance(var, Var) and var not in given for var in jaxpr.outvars[:-1])
        results = jax.tree.unflatten(out_tree, outs)
        if held and not devices and not self._with_completion:
            return results
        return dispatch.WithCompletion(results, completion)

    def _note_devices(self, devices: dispatch.Devices | str | None) -> None:
        if dispatch.local_devices() is dispatch.ONLY_DEVICE:
            devices = dispatch.ONLY_DEVICE
        if self.traced and devices != self.devices:
            # The dispatch that this trace belongs to has taken its turn for other devices: now it takes all turns.
            with jax.ensure_compile_time_eval():
                dispatch.wait_for_earlier_programs(None)
            self.devices = None
        else:
            self.devices = devices
        self.traced = True


def devices_of_sharding(sharding: Any) -> frozenset[jax.Device]:
    """Over which it lies; none for what is no sharding, or names no devices."""
    if not isinstance(sharding, jax.sharding.Sharding) or isinstance(
        getattr(sharding, "mesh", None), jax.sharding.AbstractMesh
    ):
        return frozenset()
    return frozenset(sharding.device_set)


def _devices_of(jaxpr: Any) -> frozenset[jax.Device]:
    """The devices that a program names by a :func:`jax.shard_map`, or by a sharding."""
    found: frozenset[jax.Device] = frozenset()
    for eqn in jaxpr.eqns:
        if isinstance(mesh := eqn.params.get("mesh"), jax.sharding.Mesh):
            found |= frozenset(mesh.devices.flat)
        placed = eqn.params["devices"] if eqn.primitive.name == "device_put" else ()
        for sharding in (eqn.params.get("sharding"), *placed):
            found |= devices_of_sharding(sharding)
        for inner in inner_jaxprs(eqn):
            found |= _devices_of(inner)
    return found
