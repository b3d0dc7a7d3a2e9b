"""How a collective becomes a primitive of JAX.

:class:`Collective` defines one whole from what is different about it: where its arrays have a block for each rank, how
its cotangents travel, and the attributes of its handler. Its abstract evaluation, lowering, differentiation and
batching follow from that. Operations that do not fit define those rules themselves, with the functions here.
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
from pycollective.ordering import eager, jax_internals
from pycollective.ordering.effect import effect
from pycollective.primitives import dtypes, local_steps, lowering
from pycollective.ranks.participants import Participants
from pycollective.transport import native

Array = jax.Array
Attributes = dict[str, Any]


def primitive(name: str, *, multiple_results: bool = False) -> Primitive:
    """A primitive without rules, which runs as a program of its own where nothing traces it."""
    new = Primitive(name)
    new.multiple_results = multiple_results
    new.def_impl(partial(eager.apply, new))
    return new


def attributes(*, comm: Participants, **params: Any) -> Attributes:
    """The attributes of a handler that are the parameters of the primitive: the communicator, an op, a root."""
    return {
        "comm": comm.key,
        **{name: native.op_number(value) if name == "op" else value for name, value in params.items()},
    }


def lower(primitive: Primitive, attributes: Callable[..., Attributes] = attributes) -> None:
    """Registers the lowerings of a primitive: to the handlers of its name, for CPU devices and for accelerators.

    A primitive with a parameter ``in_place`` lets XLA give its results the buffers of its operands. Over several
    accelerators of each rank it becomes the local steps of its name around itself between ranks.

    Args:
        primitive: its abstract evaluation must report our effect.
        attributes: from the other parameters of the primitive to the attributes of its handler.
    """
    host_lowering = functools.cache(partial(native.ffi_lowering, primitive.name))
    device_lowering = functools.cache(partial(native.ffi_lowering, f"device_{primitive.name}"))
    steps = local_steps.STEPS.get(primitive.name)

    def on_host(params: dict[str, Any]) -> lowering.Call:
        return host_lowering(params.pop("in_place", ())), attributes(**params)

    def on_device(params: dict[str, Any]) -> lowering.Call | lowering.Steps:
        axes = params["comm"].local_axes
        if axes and steps is not None:
            ranks = params.pop("comm").comm
            local = local_steps.LocalDevices(axes, ranks.size)
            return lowering.Steps(partial(steps, partial(primitive.bind, comm=ranks), local, **params), axes)
        return device_lowering(params.pop("in_place", ())), attributes(**params)

    lowering.lower(primitive, on_host, on_device)


class Collective:
    """A collective with one operand and one result, as a function over its primitive.

    With a parameter ``op`` it is a reduction: of dtypes that MPI can reduce, linear where ``op`` is "sum". Otherwise it
    moves arrays of any dtype.

    Args:
        name: of the primitive and of its handlers.
        transpose: ``transpose(ct, comm=comm, **params)`` is the cotangent of the operand. None: the collective itself.
        operand_blocks: whether the operand has a leading axis with a block for each rank, in MPI's rank order.
        result_blocks: whether the result has one.
        in_place: whether the result may take the buffer of the operand.
        attributes: from the parameters to the attributes of the handler.

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
    ) -> None:
        self.primitive = primitive(name)
        self._transpose = self if transpose is None else transpose
        self._operand_blocks = operand_blocks
        self._result_blocks = result_blocks
        self._hints = {"in_place": (True,)} if in_place else {}
        self.primitive.def_effectful_abstract_eval(self._abstract_eval)
        lower(self.primitive, attributes)
        ad.primitive_jvps[self.primitive] = self._jvp_rule
        ad.primitive_transposes[self.primitive] = self._transpose_rule
        batching.primitive_batchers[self.primitive] = self._batching_rule

    def __call__(self, x: Array, *, comm: Participants, **params: Any) -> Array:
        """Binds the primitive to ``x`` in a dtype that MPI knows."""
        bind = partial(self.primitive.bind, comm=comm, **params, **self._hints)
        return dtypes.reduced(bind, x, params["op"]) if "op" in params else dtypes.moved(bind, x)

    def _abstract_eval(self, x: Any, *, comm: Participants, **_: Any) -> Any:
        block = x.shape[1:] if self._operand_blocks else x.shape
        shape = (comm.size, *block) if self._result_blocks else block
        return jax_internals.result(shape, x.dtype, x), {effect}

    # The tangent takes the same way as the value; so do both in the dtype that MPI knows, by __call__.
    def _jvp_rule(
        self, primals: Sequence[Array], tangents: Sequence[Any], *, in_place: tuple[bool, ...] = (), **params: Any
    ) -> Any:
        (x,), (t,) = primals, tangents
        y = self(x, **params)
        if params.get("op", "sum") != "sum":
            refuse_derivative(self.primitive.name, "op='sum'", "Use op='sum', or lax.stop_gradient.", params)
        return y, self(t, **params)

    def _transpose_rule(self, ct: Any, x: Any, *, in_place: tuple[bool, ...] = (), **params: Any) -> list[Any]:
        if type(ct) is ad.Zero:
            return [ad.Zero(x.aval.to_tangent_aval())]
        return [self._transpose(ct, **params)]

    def _batching_rule(self, args: Sequence[Array], dims: Sequence[int], **params: Any) -> Any:
        # The axis that counts ranks stays in front, and the batch axis goes behind it.
        if self._operand_blocks:
            return self.primitive.bind(jnp.moveaxis(args[0], dims[0], 1), **params), int(self._result_blocks)
        return self.primitive.bind(*args, **params), dims[0] + int(self._result_blocks)


def refuse_derivative(name: str, what: str, remedy: str, params: dict[str, Any]) -> NoReturn:
    """Raises NotImplementedError for an operation that has no derivative.

    Args:
        name: of the operation.
        what: would have one.
        remedy: what to do instead.
        params: of the operation.
    """
    got = f"{name} with op={params['op']!r}" if "op" in params else name
    raise NotImplementedError(message(name, f"a differentiable operation, {what}", got, remedy))
