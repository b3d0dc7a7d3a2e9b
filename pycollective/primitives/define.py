"""How a collective becomes a primitive of JAX.

:class:`Collective` defines a collective by what is special about it: which of its arrays have a block for each rank,
the collective of its cotangents, and the attributes of its handler. Abstract evaluation, lowering, differentiation and
batching follow from these. An operation that does not fit defines its rules itself, with the functions of this file.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from pycollective.errors import message
from pycollective.jax_support import jax_internals
from pycollective.ordering import eager, transforms
from pycollective.ordering.effect import effect
from pycollective.primitives import dtypes, local_steps, lowering
from pycollective.primitives.passed import Passed
from pycollective.ranks.participants import Participants
from pycollective.transport import native
from pycollective.transport.chosen import transport
from pycollective.transport.protocol import HandlerCall, Structs

Array = jax.Array
Attributes = dict[str, Any]


def primitive(name: str, *, multiple_results: bool = False) -> Primitive:
    """Returns a primitive without rules. A call outside any trace runs as a program of its own."""
    new = Primitive(name)
    new.multiple_results = multiple_results
    new.def_impl(partial(eager.apply, new))
    return new


def attributes(*, comm: Participants, **params: Any) -> Attributes:
    """The attributes of a handler that takes the parameters of its primitive as they are: comm, op, root."""
    return {
        "comm": comm._key,
        **{name: native.op_number(value) if name == "op" else value for name, value in params.items()},
    }


def lower(primitive: Primitive, attributes: Callable[..., Attributes] = attributes) -> None:
    """Registers the lowerings of a primitive to the handlers of its name, for CPU devices and for accelerators.

    A primitive with a parameter ``in_place`` lets XLA give its results the buffers of its operands. If each rank has
    several accelerators, the primitive becomes the local steps of its name with the primitive between ranks inside.

    Args:
        primitive: a primitive whose abstract evaluation reports our effect.
        attributes: a function from the other parameters of the primitive to the attributes of its handler.
    """
    device_lowering = functools.cache(partial(native.ffi_lowering, f"device_{primitive.name}"))
    steps = local_steps.STEPS.get(primitive.name)

    def for_host(params: dict[str, Any], operands: Structs, results: Structs) -> lowering.Form:
        in_place = params.pop("in_place", ())
        return transport().lower_operation(primitive.name, attributes(**params), in_place, operands, results)

    def for_accelerator(params: dict[str, Any], *_: Structs) -> lowering.Form:
        axes = params["comm"]._local_axes
        if axes and steps is not None:
            ranks = params.pop("comm")._comm
            local = local_steps.LocalDevices(axes, ranks.size)
            return lowering.Decomposition(partial(steps, partial(primitive.bind, comm=ranks), local, **params), axes)
        return HandlerCall(device_lowering(params.pop("in_place", ())), attributes(**params))

    lowering.lower(primitive, for_host, for_accelerator)


COLLECTIVES: dict[Primitive, Collective] = {}
"""All collectives with one operand and one result, by their primitives."""


class Collective:
    """A collective with one operand and one result: its primitive, and a function that binds it.

    A collective with a parameter ``op`` is a reduction. It needs dtypes that MPI can reduce, and is linear if ``op`` is
    "sum". A collective without ``op`` moves arrays of any dtype.

    Args:
        name: the name of the primitive and of its handlers.
        transpose: a function; ``transpose(ct, comm=comm, **params)`` is the cotangent of the operand. None: the
            collective itself.
        operand_blocks: whether the operand has a leading axis with a block for each rank, in MPI's rank order.
        result_blocks: whether the result has such an axis.
        in_place: whether the result may take the buffer of the operand.
        attributes: a function from the parameters to the attributes of the handler.
        alone: a function; ``alone(x, **params)`` is the result of one rank. None: the operand, as blocks or not.

    Attributes:
        primitive: the primitive.
    """

    def __init__(
        self,
        name: str,
        *,
        transpose: Callable[..., Array] | None = None,
        operand_blocks: bool = False,
        result_blocks: bool = False,
        in_place: bool = False,
        attributes: Callable[..., Attributes] = attributes,
        alone: Callable[..., Array] | None = None,
    ) -> None:
        self.primitive = primitive(name)
        self._alone = alone
        COLLECTIVES[self.primitive] = self
        self._transpose = self if transpose is None else transpose
        self._operand_blocks = operand_blocks
        self._result_blocks = result_blocks
        self._hints = {"in_place": (True,)} if in_place else {}
        self.primitive.def_effectful_abstract_eval(self._abstract_eval)
        transforms.repeat_by_policy(self.primitive)
        lower(self.primitive, attributes)
        ad.primitive_jvps[self.primitive] = self._jvp_rule
        ad.primitive_transposes[self.primitive] = self._transpose_rule
        batching.primitive_batchers[self.primitive] = self._batching_rule

    def __call__(self, x: Array, *, comm: Participants, passed: Passed | None = None, **params: Any) -> Array:
        """Binds the primitive to ``x`` in a dtype that MPI knows. ``passed``: what the user passed; None: ``x``."""
        passed = Passed.of([x]) if passed is None else passed
        bind = partial(self.primitive.bind, comm=comm, passed=passed, **params, **self._hints)
        return dtypes.reduced(bind, x, params["op"]) if "op" in params else dtypes.moved(bind, x)

    def on_one_rank(self, x: Array, **params: Any) -> Array:
        """The result of one rank, where nothing is sent; ``params`` are those of the primitive."""
        if self._alone is not None:
            return self._alone(x, **params)
        y = x[0] if self._operand_blocks else x
        return y[None] if self._result_blocks else y

    def _abstract_eval(self, x: Any, *, comm: Participants, **_: Any) -> Any:
        block = x.shape[1:] if self._operand_blocks else x.shape
        shape = (comm.size, *block) if self._result_blocks else block
        return jax_internals.result(shape, x.dtype, x), {effect}

    # The tangent goes through the same collective. Both are bound by __call__, in a dtype that MPI knows.
    def _jvp_rule(
        self,
        primals: Sequence[Array],
        tangents: Sequence[Any],
        *,
        passed: Passed,
        in_place: tuple[bool, ...] = (),
        **params: Any,
    ) -> Any:
        (x,), (t,) = primals, tangents
        y = self(x, passed=passed, **params)
        if params.get("op", "sum") != "sum":
            refuse_derivative(self.primitive.name, "op='sum'", "Use op='sum', or lax.stop_gradient.", params)
        return y, self(t, passed=passed.tangent(), **params)

    def _transpose_rule(
        self, ct: Any, x: Any, *, passed: Passed, in_place: tuple[bool, ...] = (), **params: Any
    ) -> list[Any]:
        if type(ct) is ad.Zero:
            return [ad.Zero(x.aval.to_tangent_aval())]
        return [self._transpose(ct, passed=passed.transpose(), **params)]

    def _batching_rule(self, args: Sequence[Array], dims: Sequence[int], **params: Any) -> Any:
        # The axis of the ranks' blocks stays first; the batch axis comes second.
        if self._operand_blocks:
            return self.primitive.bind(jnp.moveaxis(args[0], dims[0], 1), **params), int(self._result_blocks)
        return self.primitive.bind(*args, **params), dims[0] + int(self._result_blocks)


def refuse_derivative(name: str, what: str, remedy: str, params: dict[str, Any]) -> NoReturn:
    """Raises NotImplementedError for an operation that has no derivative.

    Args:
        name: the operation.
        what: a form of it that has a derivative.
        remedy: what to do instead.
        params: the parameters of the operation.
    """
    got = f"{name} with op={params['op']!r}" if "op" in params else name
    raise NotImplementedError(message(name, f"a differentiable operation, {what}", got, remedy))
