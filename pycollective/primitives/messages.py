"""Messages between two ranks, and the barrier. Most of these operations lack an operand or a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad, batching

from pycollective.errors import message
from pycollective.jax_support import jax_internals
from pycollective.ordering.effect import effect
from pycollective.primitives import define, dtypes
from pycollective.primitives.passed import EMPTY_TREE, NOTHING, Passed
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.participants import Participants
from pycollective.transport import native
from pycollective.transport.message_constants import ANY_TAG, PROC_NULL, MessageConstant
from pycollective.transport.mpi import MPI, number_in_mpi

Array = jax.Array
Rank = int | MessageConstant
Tag = int | MessageConstant

_REMEDY = "Use sendrecv or ppermute, whose cotangents have a way back."


class StatusPlace:
    """Where MPI writes the status of a message, as a parameter of a primitive: hashable, and it keeps the status alive.

    Args:
        status: the status; two places are equal if they hold the same object.
    """

    def __init__(self, status: MPI.Status) -> None:
        self._status = status

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StatusPlace) and self._status is other._status

    def __hash__(self) -> int:
        return id(self._status)

    @property
    def address(self) -> int:
        """The address of the ``MPI_Status``."""
        return MPI._addressof(self._status)


_in_programs: set[StatusPlace] = set()
"""The places that lowered programs name by their addresses: a compiled program may outlive all else that names them."""


def _status_attributes(status: StatusPlace | None) -> dict[str, int]:
    """The address for a program that is lowered, and the process that has it; 0 for None."""
    if status is None:
        return {"status": 0, "process": 0}
    _in_programs.add(status)
    return {"status": status.address, "process": native.this_process()}


# sendrecv sends x to dest and returns what source sent, an array of the given shape and dtype.
sendrecv_p = define.primitive("sendrecv")


def _sendrecv_abstract_eval(x: Any, *, shape: tuple[int, ...], dtype: Any, **_: Any) -> Any:
    return jax_internals.result(shape, dtype, x), {effect}


def _sendrecv_attributes(
    comm: Communicator, source: Rank, dest: Rank, send_tag: int, recv_tag: Tag, status: StatusPlace | None, **_: Any
) -> dict[str, Any]:
    ranks = {"source": number_in_mpi(source), "dest": number_in_mpi(dest)}
    tags = {"send_tag": send_tag, "recv_tag": 0 if source is PROC_NULL else number_in_mpi(recv_tag)}
    return {"comm": comm._key, **ranks, **tags, **_status_attributes(status)}


sendrecv_p.def_effectful_abstract_eval(_sendrecv_abstract_eval)
define.lower(sendrecv_p, _sendrecv_attributes)


def _sendrecv_transpose_rule(
    ct: Any, x: Any, *, source: Rank, dest: Rank, send_tag: int, recv_tag: Tag, comm: Communicator, **_: Any
) -> list[Any]:
    # The cotangent of what source sent goes back to source; the cotangent of x comes back from dest. From PROC_NULL
    # come zeros: x that was sent to no rank has no influence.
    aval = x.aval.to_tangent_aval()
    if type(ct) is ad.Zero:
        return [ad.Zero(aval)]
    if recv_tag is ANY_TAG and source is not PROC_NULL:
        raise NotImplementedError(
            message(
                "sendrecv",
                "a number as recv_tag under reverse-mode differentiation",
                repr(recv_tag),
                "Name the tag: the cotangent goes back with it.",
            )
        )

    back = sendrecv_p.bind(
        ct,
        shape=aval.shape,
        dtype=aval.dtype,
        comm=comm,
        source=dest,
        dest=source,
        send_tag=0 if recv_tag is ANY_TAG else recv_tag,
        recv_tag=send_tag,
        status=None,
    )
    return [back]


def _sendrecv_jvp_rule(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> Any:
    (x,), (t,) = primals, tangents
    y = sendrecv_p.bind(x, **params)
    if type(t) is ad.Zero or not jnp.issubdtype(params["dtype"], jnp.inexact):
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    return y, sendrecv_p.bind(t, **{**params, "status": None})


def _sendrecv_batching_rule(
    args: Sequence[Array], dims: Sequence[int], *, shape: tuple[int, ...], **params: Any
) -> Any:
    # All ranks must run under the same vmap: then the array that arrives has the batch axis as well, in front.
    x = jnp.moveaxis(args[0], dims[0], 0)
    return sendrecv_p.bind(x, shape=(x.shape[0], *shape), **params), 0


def sendrecv(
    x: Array,
    like: Array | jax.ShapeDtypeStruct,
    *,
    comm: Communicator,
    source: Rank,
    dest: Rank,
    send_tag: int,
    recv_tag: Tag,
    status: StatusPlace | None = None,
) -> Array:
    """Sends ``x`` to ``dest`` and returns what ``source`` sent, an array of the shape and dtype of ``like``."""
    wire = jax.eval_shape(dtypes.to_wire, like)
    y = sendrecv_p.bind(
        dtypes.to_wire(x),
        shape=wire.shape,
        dtype=wire.dtype,
        comm=comm,
        source=source,
        dest=dest,
        send_tag=send_tag,
        recv_tag=recv_tag,
        status=status,
    )
    return dtypes.from_wire(y, like)


ad.primitive_jvps[sendrecv_p] = _sendrecv_jvp_rule
ad.primitive_transposes[sendrecv_p] = _sendrecv_transpose_rule
batching.primitive_batchers[sendrecv_p] = _sendrecv_batching_rule


# send and recv ---------------------------------------------------------------------------------------------

send_p = define.primitive("send", multiple_results=True)
recv_p = define.primitive("recv")  # its operand, of shape (*batch, 0), has no data; it carries the axes of vmap


@send_p.def_effectful_abstract_eval
def _send_abstract_eval(x: Any, **_: Any) -> Any:
    return [], {effect}


@recv_p.def_effectful_abstract_eval
def _recv_abstract_eval(batch: Any, *, shape: tuple[int, ...], dtype: Any, **_: Any) -> Any:
    return jax_internals.result((*batch.shape[:-1], *shape), dtype, batch), {effect}


def _recv_attributes(
    comm: Communicator, source: Rank, tag: Tag, status: StatusPlace | None, **_: Any
) -> dict[str, Any]:
    number = 0 if source is PROC_NULL else number_in_mpi(tag)
    return {"comm": comm._key, "source": number_in_mpi(source), "tag": number, **_status_attributes(status)}


def _send_attributes(comm: Communicator, dest: int, tag: int) -> dict[str, Any]:
    return {"comm": comm._key, "dest": dest, "tag": tag}


def _send_jvp_rule(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> Any:
    if all(type(t) is ad.Zero for t in tangents):
        return send_p.bind(*primals, **params), []
    return define.refuse_derivative("send", "one with a result", _REMEDY, params)


def _send_batching_rule(args: Sequence[Array], dims: Sequence[int], **params: Any) -> Any:
    # As in sendrecv: one message with the batch axis in front.
    return send_p.bind(jnp.moveaxis(args[0], dims[0], 0), **params), []


def send(x: Array, *, comm: Communicator, dest: int, tag: int) -> None:
    """Sends ``x`` to ``dest``."""
    send_p.bind(dtypes.to_wire(x), comm=comm, dest=dest, tag=tag)


def recv(
    like: Array | jax.ShapeDtypeStruct,
    *,
    comm: Communicator,
    source: Rank,
    tag: Tag,
    status: StatusPlace | None = None,
) -> Array:
    """Returns what ``source`` sent, an array of the shape and dtype of ``like``."""
    wire = jax.eval_shape(dtypes.to_wire, like)
    # Under vmap `like` has a batch axis that its shape does not show. An empty slice of it has that axis, too.
    batch = jnp.zeros(0) if isinstance(like, jax.ShapeDtypeStruct) else jnp.ravel(dtypes.to_wire(like))[:0]
    y = recv_p.bind(batch, shape=wire.shape, dtype=wire.dtype, comm=comm, source=source, tag=tag, status=status)
    return dtypes.from_wire(y, like)


define.lower(send_p, _send_attributes)
ad.primitive_jvps[send_p] = _send_jvp_rule
batching.primitive_batchers[send_p] = _send_batching_rule


def _recv_jvp_rule(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> Any:
    if all(type(t) is ad.Zero for t in tangents):
        y = recv_p.bind(*primals, **params)
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    return define.refuse_derivative("recv", "one with an operand", _REMEDY, params)


def _recv_batching_rule(args: Sequence[Array], dims: Sequence[int], **params: Any) -> Any:
    return recv_p.bind(jnp.moveaxis(args[0], dims[0], 0), **params), 0


define.lower(recv_p, _recv_attributes)
ad.primitive_jvps[recv_p] = _recv_jvp_rule
batching.primitive_batchers[recv_p] = _recv_batching_rule


# Trees without arrays --------------------------------------------------------------------------------------
#
# They are messages of no elements: the other end may send arrays, or wait for some.


def send_empty_tree(*, comm: Communicator, dest: int, tag: int) -> None:
    """Sends a tree without arrays to ``dest``."""
    send_p.bind(jnp.zeros(0, bool), comm=comm, dest=dest, tag=tag, passed=EMPTY_TREE)


def recv_empty_tree(*, comm: Communicator, source: Rank, tag: Tag, status: StatusPlace | None = None) -> None:
    """Receives a tree without arrays from ``source``."""
    recv_p.bind(
        jnp.zeros(0),
        shape=(0,),
        dtype=np.dtype(bool),
        comm=comm,
        source=source,
        tag=tag,
        status=status,
        passed=EMPTY_TREE,
    )


def sendrecv_empty_tree(*, comm: Communicator, **params: Any) -> None:
    """Sends a tree without arrays and receives another one; the parameters are those of :func:`sendrecv`."""
    sendrecv_p.bind(jnp.zeros(0, bool), shape=(0,), dtype=np.dtype(bool), comm=comm, **params, passed=EMPTY_TREE)


# barrier ---------------------------------------------------------------------------------------------------

barrier_p = define.primitive("barrier", multiple_results=True)


@barrier_p.def_effectful_abstract_eval
def _barrier_abstract_eval(**_: Any) -> Any:
    return [], {effect}


define.lower(barrier_p)


def barrier(comm: Participants, passed: Passed = NOTHING) -> None:
    """Returns on each rank when all ranks have called it. ``passed``: what the user passed to a collective."""
    barrier_p.bind(comm=comm, passed=passed)
