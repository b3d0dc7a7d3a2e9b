"""Messages under way: a request is a value of the program between the start of messages and the wait for them.

The value is a number that the handler of the start gives, as a float32, and under :func:`jax.vmap` an array of equal
numbers with the batch axes. It is a float since the cotangent of the number of one message is the number of another,
which brings the cotangent back: the transpose of a start is a wait, and the transpose of a wait is a start.

The data lie in memory of the native library in between, since XLA may give the arrays of a program away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching

from pycollective.jax_support import jax_internals
from pycollective.ordering.effect import effect
from pycollective.primitives import define
from pycollective.primitives.messages import Rank, Tag
from pycollective.primitives.passed import NOTHING, Passed
from pycollective.ranks.communicator import Communicator
from pycollective.transport import native
from pycollective.transport.mpi import number_in_mpi

Array = jax.Array


class Template(NamedTuple):
    """The shape of an array without the axes of :func:`jax.vmap`, and its dtype, which has whole bytes."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


NO_DATA = Template((0,), np.dtype(bool))
"""Of a message to or from no rank."""


class Route(NamedTuple):
    """The two messages of a request. Either may be to or from ``PROC_NULL``: then there is none.

    Attributes:
        operation: the public function that starts them.
        sent: the array that is sent.
        received: the array that is received.
        source: the rank from which an array comes.
        dest: the rank to which an array goes.
        send_tag: the tag of the array that is sent.
        recv_tag: the tag of the array that is received.
    """

    operation: str
    sent: Template
    received: Template
    source: Rank
    dest: Rank
    send_tag: Tag
    recv_tag: Tag

    def back(self) -> Route:
        """The route of the cotangents."""
        return self._replace(
            sent=self.received,
            received=self.sent,
            source=self.dest,
            dest=self.source,
            send_tag=self.recv_tag,
            recv_tag=self.send_tag,
        )


isendrecv_p = define.primitive("isendrecv")
wait_p = define.primitive("wait")


def isendrecv(x: Array, *, route: Route, comm: Communicator, passed: Passed = NOTHING) -> Array:
    """Starts the messages of a route, one with ``x``, and returns their number."""
    number: Array = isendrecv_p.bind(x, route=route, batch=(), comm=comm, passed=passed)
    return number


def wait(number: Array, after: Sequence[Array] = (), *, route: Route, comm: Communicator) -> Array:
    """Waits for started messages when the arrays ``after`` are there. Returns the array that has come, or zeros."""
    arrived: Array = wait_p.bind(number, *after, route=route, comm=comm)
    return arrived


# Starts ------------------------------------------------------------------------------------------------------


@isendrecv_p.def_effectful_abstract_eval
def _isendrecv_abstract_eval(x: Any, *, batch: tuple[int, ...], **_: Any) -> Any:
    return jax_internals.result(batch, np.dtype("float32"), x), {effect}


def _isendrecv_attributes(comm: Communicator, route: Route, batch: tuple[int, ...]) -> dict[str, Any]:
    shape, dtype = (*batch, *route.received.shape), route.received.dtype
    return {
        "comm": comm._key,
        "source": number_in_mpi(route.source),
        "dest": number_in_mpi(route.dest),
        "send_tag": route.send_tag,
        "recv_tag": route.recv_tag,
        "shape": shape,
        "dtype": native.dtype_number(str(dtype)),
    }


def _isendrecv_jvp_rule(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> Any:
    (x,), (t,) = primals, tangents
    if type(t) is not ad.Zero and params["route"].operation == "isend":
        remedy = "Use isendrecv, sendrecv or ppermute, whose cotangents have a way back."
        define.refuse_derivative("isend", "one with a result", remedy, params)
    number = isendrecv_p.bind(x, **params)
    if type(t) is ad.Zero:
        return number, ad.Zero(jax.typeof(number).to_tangent_aval())
    return number, isendrecv_p.bind(t, **params)


def _isendrecv_transpose_rule(
    ct: Any, x: Any, *, route: Route, comm: Communicator, passed: Passed, **_: Any
) -> list[Any]:
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval.to_tangent_aval())]
    return [wait_p.bind(ct, route=route.back(), comm=comm)]


def _isendrecv_batching_rule(
    args: Sequence[Array], dims: Sequence[int], *, batch: tuple[int, ...], **params: Any
) -> Any:
    # As in sendrecv: one message with the batch axis in front.
    x = jnp.moveaxis(args[0], dims[0], 0)
    return isendrecv_p.bind(x, batch=(x.shape[0], *batch), **params), 0


define.lower(isendrecv_p, _isendrecv_attributes)
ad.primitive_jvps[isendrecv_p] = _isendrecv_jvp_rule
ad.primitive_transposes[isendrecv_p] = _isendrecv_transpose_rule
batching.primitive_batchers[isendrecv_p] = _isendrecv_batching_rule


# Waits -------------------------------------------------------------------------------------------------------


@wait_p.def_effectful_abstract_eval
def _wait_abstract_eval(number: Any, *after: Any, route: Route, **_: Any) -> Any:
    shape, dtype = route.received
    return jax_internals.result((*number.shape, *shape), dtype, number, *after), {effect}


def _wait_attributes(comm: Communicator, route: Route) -> dict[str, Any]:
    return {"comm": comm._key}


def _wait_jvp_rule(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> Any:
    arrived = wait_p.bind(*primals, **params)
    if type(tangents[0]) is ad.Zero:
        return arrived, ad.Zero(jax.typeof(arrived).to_tangent_aval())
    return arrived, wait_p.bind(tangents[0], **params)  # `after` is there already, and would be kept for it


def _wait_transpose_rule(ct: Any, number: Any, *, route: Route, comm: Communicator) -> list[Any]:
    if type(ct) is ad.Zero:
        return [ad.Zero(number.aval.to_tangent_aval())]
    batch = ct.shape[: ct.ndim - len(route.received.shape)]
    return [isendrecv_p.bind(ct, route=route.back(), batch=batch, comm=comm, passed=NOTHING)]


def _wait_batching_rule(args: Sequence[Array], dims: Sequence[int | None], **params: Any) -> Any:
    number, *after = args
    if dims[0] is None:  # only `after` has the axis
        return wait_p.bind(number, *after, **params), None
    return wait_p.bind(jnp.moveaxis(number, dims[0], 0), *after, **params), 0


define.lower(wait_p, _wait_attributes)
ad.primitive_jvps[wait_p] = _wait_jvp_rule
ad.primitive_transposes[wait_p] = _wait_transpose_rule
batching.primitive_batchers[wait_p] = _wait_batching_rule
