"""The primitives on one communicator: one registration block each, always in the same order.

Block by block: primitive, abstract evaluation, lowering, differentiation, batching. A block whose result or operand
has a leading axis of ``size`` ranks is in MPI's rank order. ``allreduce``, ``reduce``, ``scan``, ``exscan`` and
``reduce_scatter`` below are functions over their primitives: they put dtypes that MPI cannot add into ones that it
can, and every rule goes through them, so that cotangents of bfloat16 are summed as carefully as values.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from pycollective import hierarchy, ordering
from pycollective.communicator import Communicator
from pycollective.config import config
from pycollective.errors import message
from pycollective.members import Members
from pycollective.mpi import MPI
from pycollective.transport import native

Array = jax.Array
OPS = ("sum", "prod", "min", "max")
"""Those of MPI."""
SUMS = ("sum", "sum_bfloat16")
"""What is linear. "sum_bfloat16" adds float32 that goes between ranks as bfloat16, for ``allreduce`` alone."""


def _primitive(name: str, *, multiple_results: bool = False) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_impl(partial(ordering.apply, primitive))
    return primitive


def _abstract(primitive: Primitive, shape: Callable[..., tuple[int, ...]]) -> None:
    """Abstract evaluation: the operand's dtype, the shape that ``shape(x, **params)`` says, the ordered effect."""

    def rule(x: Any, **params: Any) -> Any:
        return ordering.result(shape(x, **params), x.dtype, x), {ordering.effect}

    primitive.def_effectful_abstract_eval(rule)


def _lower(primitive: Primitive, attributes: Callable[..., dict[str, Any]]) -> None:
    """The lowerings. A primitive with a parameter ``in_place`` lets XLA give its results the operands' buffers.

    Over several accelerators of each rank it becomes the local steps of its name around itself on the ranks.
    """
    lowering = functools.cache(partial(native.ffi_lowering, primitive.name))
    device_lowering = functools.cache(partial(native.ffi_lowering, f"device_{primitive.name}"))
    steps = hierarchy.STEPS.get(primitive.name)

    def on_host(params: dict[str, Any]) -> ordering.Call:
        return lowering(params.pop("in_place", ())), attributes(**params)

    def on_device(params: dict[str, Any]) -> ordering.Call | ordering.Steps:
        axes = params["comm"].local_axes
        if axes and steps is not None:
            ranks = params.pop("comm").comm
            local = hierarchy.Local(axes, ranks.size)
            return ordering.Steps(partial(steps, partial(primitive.bind, comm=ranks), local, **params), axes)
        return device_lowering(params.pop("in_place", ())), attributes(**params)

    ordering.lower(primitive, on_host, on_device)


def _same_shape(x: Any, **_: Any) -> tuple[int, ...]:
    return tuple(x.shape)


def _gathered_shape(x: Any, comm: Members, **_: Any) -> tuple[int, ...]:
    return (comm.size, *x.shape)


def _block_shape(x: Any, **_: Any) -> tuple[int, ...]:
    return tuple(x.shape[1:])


def _comm(comm: Members) -> dict[str, int]:
    return {"comm": comm.number}


def _comm_op(comm: Members, op: str) -> dict[str, int]:
    return {"comm": comm.number, "op": native.OPS[op]}


def _comm_root(comm: Members, root: int) -> dict[str, int]:
    return {"comm": comm.number, "root": root}


def _comm_op_root(comm: Members, op: str, root: int) -> dict[str, int]:
    return {"comm": comm.number, "op": native.OPS[op], "root": root}


def _batch_in_place(bind: Callable[..., Array], args: Sequence[Array], dims: Sequence[int], **params: Any) -> Any:
    """The operation is elementwise: the batch axis stays where it is."""
    return bind(*args, **params), dims[0]


def _batch_gather(bind: Callable[..., Array], args: Sequence[Array], dims: Sequence[int], **params: Any) -> Any:
    """The result has one more leading axis than the operand."""
    return bind(*args, **params), dims[0] + 1


def _batch_blocks(
    bind: Callable[..., Array], args: Sequence[Array], dims: Sequence[int], *, out: int, **params: Any
) -> Any:
    """The operand's leading axis counts ranks: the batch axis goes behind it, and comes back as axis ``out``."""
    return bind(jnp.moveaxis(args[0], dims[0], 1), **params), out


def _not_linear(name: str, what: str, remedy: str) -> Callable[..., Any]:
    def rule(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> Any:
        raise NotImplementedError(message(name, f"a differentiable operation, {what}", _with_op(name, params), remedy))

    return rule


def _with_op(name: str, params: dict[str, Any]) -> str:
    return f"{name} with op={params['op']!r}" if "op" in params else name


def _linear(
    primitive: Primitive,
    bind: Callable[..., Array],
    transpose: Callable[..., Array],
    only_sum: bool = False,
) -> None:
    """Differentiation of an operation that is linear (for ``only_sum``: where its op is "sum").

    The tangent takes the same way as the value, ``bind``; the cotangent takes ``transpose(ct, **params)``.
    """

    def jvp(
        primals: Sequence[Array], tangents: Sequence[Any], *, in_place: tuple[bool, ...] = (), **params: Any
    ) -> Any:
        (x,), (t,) = primals, tangents
        y = bind(x, **params)
        if only_sum and params["op"] != "sum":
            _not_linear(primitive.name, "op='sum'", "Use op='sum', or lax.stop_gradient.")(primals, tangents, **params)
        return y, bind(t, **params)

    def transpose_rule(ct: Any, x: Any, *, in_place: tuple[bool, ...] = (), **params: Any) -> list[Any]:
        if type(ct) is ad.Zero:
            return [ad.Zero(x.aval.to_tangent_aval())]
        return [transpose(ct, **params)]

    ad.primitive_jvps[primitive] = jvp
    ad.primitive_transposes[primitive] = transpose_rule


# Dtypes of reductions --------------------------------------------------------------------------------------


def _wide(x: Array, op: str) -> Array:
    """``x`` in a dtype whose arithmetic MPI has.

    Floats of 16 and 8 bits are reduced in float32 and rounded once; integers below a byte in int8; sums and products
    of bool in int32, as :func:`jax.lax.psum` does.
    """
    dtype = x.dtype
    if dtype == jnp.bool_:
        return x.astype(jnp.int32) if op in (*SUMS, "prod") else x
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        return x.astype(jnp.float32)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return x.astype(jnp.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint8)
    return x


def _narrow(y: Array, like: Array) -> Array:
    """The inverse of :func:`_wide`; sums of bool stay int32."""
    return y if like.dtype == jnp.bool_ else y.astype(like.dtype)


def _reduced(bind: Callable[..., Array], x: Array, op: str, **params: Any) -> Array:
    """Binds a reduction of ``x`` in a dtype whose arithmetic MPI has, and returns to the dtype of ``x``."""
    return _narrow(bind(_wide(x, op), op=op, **params), x)


def _to_wire(x: Array) -> Array:
    """``x`` as an array of whole bytes, which MPI can move: keys as their data, smaller numbers widened."""
    dtype = x.dtype
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.key_data(x)
    if jnp.issubdtype(dtype, jnp.integer) and jnp.iinfo(dtype).bits < 8:
        return x.astype(jnp.int8 if jnp.issubdtype(dtype, jnp.signedinteger) else jnp.uint8)
    if jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 8:
        return x.astype(jnp.float32)
    return x


def _from_wire(y: Array, like: Array | jax.ShapeDtypeStruct) -> Array:
    """The inverse of :func:`_to_wire` for what arrived in the place of ``like``."""
    if jax.dtypes.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(y, impl=jax.random.key_impl(like))
    return y.astype(like.dtype)


def _moved(bind: Callable[..., Array], x: Array, **params: Any) -> Array:
    """Binds an operation that moves ``x`` unchanged."""
    return _from_wire(bind(_to_wire(x), **params), x)


# allreduce: y = op over ranks s of x_s, for any number of arrays in one call ---------------------------------

allreduce_p = _primitive("allreduce", multiple_results=True)


@allreduce_p.def_effectful_abstract_eval
def _allreduce_abstract_eval(*xs: Any, **_: Any) -> Any:
    return [ordering.result(x.shape, x.dtype, x) for x in xs], {ordering.effect}


def allreduce_attributes(comm: Members, op: str) -> dict[str, int]:
    """Of the handler."""
    return {**_comm_op(comm, op), "bucket_bytes": config.bucket_bytes}


_lower(allreduce_p, allreduce_attributes)


def allreduce_all(xs: Sequence[Array], *, comm: Members, op: str) -> list[Array]:
    """``y = op_s x_s`` for each of ``xs``, on every rank."""
    if not xs:
        return []
    ys = allreduce_p.bind(*(_wide(x, op) for x in xs), comm=comm, op=op, in_place=(True,) * len(xs))
    return [_narrow(y, x) for y, x in zip(ys, xs, strict=True)]


def allreduce(x: Array, *, comm: Members, op: str) -> Array:
    """``y = op_s x_s`` on every rank."""
    return allreduce_all([x], comm=comm, op=op)[0]


def _for_nonzero(function: Callable[[list[Any]], list[Any]], values: Sequence[Any], zeros: list[Any]) -> list[Any]:
    """``function`` of those values that are not symbolic zeros; ``zeros`` for the others."""
    places = [i for i, value in enumerate(values) if type(value) is not ad.Zero]
    for place, result in zip(places, function([values[i] for i in places]), strict=True):
        zeros[place] = result
    return zeros


def _allreduce_jvp_rule(
    primals: Sequence[Array], tangents: Sequence[Any], *, comm: Members, op: str, in_place: tuple[bool, ...]
) -> Any:
    ys = allreduce_all(primals, comm=comm, op=op)
    zeros = [ad.Zero(jax.typeof(y).to_tangent_aval()) for y in ys]
    if op in SUMS:
        return ys, _for_nonzero(lambda ts: allreduce_all(ts, comm=comm, op=op), tangents, zeros)
    if op in ("min", "max"):
        # dy = sum_s m_s dx_s / sum_s m_s with m_s = [x_s == y]: the mean over the ranks that hold the extreme, as
        # jax's reduce_max does over elements.
        for i, (x, y, t) in enumerate(zip(primals, ys, tangents, strict=True)):
            if type(t) is not ad.Zero:
                mask = (x == y).astype(t.dtype)
                # In two calls: the tangent's must be linear, and the other not depend on it.
                holders = allreduce(mask, comm=comm, op="sum")
                zeros[i] = allreduce(t * mask, comm=comm, op="sum") / holders
        return ys, zeros
    return _not_linear("allreduce", "op='sum', 'min' or 'max'", "Use exp(psum(log(x))) where x > 0.")(
        primals, tangents, op=op
    )


def _allreduce_transpose_rule(
    cts: Sequence[Any], *xs: Any, comm: Members, op: str, in_place: tuple[bool, ...]
) -> list[Any]:
    # y_r = sum_s x_s  =>  ct_s = sum_r ct_r
    zeros = [ad.Zero(x.aval.to_tangent_aval()) for x in xs]
    return _for_nonzero(lambda cts: allreduce_all(cts, comm=comm, op=op), cts, zeros)


def _allreduce_batching_rule(args: Sequence[Array], dims: Sequence[Any], **params: Any) -> Any:
    return allreduce_p.bind(*args, **params), dims


ad.primitive_jvps[allreduce_p] = _allreduce_jvp_rule
ad.primitive_transposes[allreduce_p] = _allreduce_transpose_rule
batching.primitive_batchers[allreduce_p] = _allreduce_batching_rule


# reduce: y = op over ranks of x_s at the root, zeros elsewhere ----------------------------------------------

reduce_p = _primitive("reduce")
_abstract(reduce_p, _same_shape)
_lower(reduce_p, _comm_op_root)


def reduce(x: Array, *, comm: Members, op: str, root: int) -> Array:
    """``y_root = op_s x_s``; zeros on the other ranks."""
    return _reduced(partial(reduce_p.bind, in_place=(True,)), x, op, comm=comm, root=root)


def _reduce_transpose(ct: Array, *, comm: Members, op: str, root: int) -> Array:
    return bcast(ct, comm=comm, root=root)


_linear(reduce_p, reduce, _reduce_transpose, only_sum=True)
batching.primitive_batchers[reduce_p] = partial(_batch_in_place, reduce_p.bind)


# bcast: y = x_root -----------------------------------------------------------------------------------------

bcast_p = _primitive("bcast")
_abstract(bcast_p, _same_shape)
_lower(bcast_p, _comm_root)


def bcast(x: Array, *, comm: Members, root: int) -> Array:
    """``y = x_root`` on every rank."""
    return _moved(partial(bcast_p.bind, in_place=(True,)), x, comm=comm, root=root)


def _bcast_transpose(ct: Array, *, comm: Members, root: int) -> Array:
    return reduce(ct, comm=comm, op="sum", root=root)


_linear(bcast_p, bcast, _bcast_transpose)
batching.primitive_batchers[bcast_p] = partial(_batch_in_place, bcast_p.bind)


# allgather: y[s] = x_s -------------------------------------------------------------------------------------

allgather_p = _primitive("allgather")
_abstract(allgather_p, _gathered_shape)
_lower(allgather_p, _comm)


def allgather(x: Array, *, comm: Members) -> Array:
    """``y[s] = x_s`` on every rank: shape ``(size, *x.shape)``."""
    return _moved(allgather_p.bind, x, comm=comm)


def _allgather_transpose(ct: Array, *, comm: Members) -> Array:
    return reduce_scatter(ct, comm=comm, op="sum")


_linear(allgather_p, allgather, _allgather_transpose)
batching.primitive_batchers[allgather_p] = partial(_batch_gather, allgather_p.bind)


# reduce_scatter: y_r = op over ranks s of x_s[r] ------------------------------------------------------------

reduce_scatter_p = _primitive("reduce_scatter")
_abstract(reduce_scatter_p, _block_shape)
_lower(reduce_scatter_p, _comm_op)


def reduce_scatter(x: Array, *, comm: Members, op: str) -> Array:
    """``y_r = op_s x_s[r]`` for ``x`` of shape ``(size, ...)``."""
    return _reduced(reduce_scatter_p.bind, x, op, comm=comm)


def _reduce_scatter_transpose(ct: Array, *, comm: Members, op: str) -> Array:
    return allgather(ct, comm=comm)


_linear(reduce_scatter_p, reduce_scatter, _reduce_scatter_transpose, only_sum=True)
batching.primitive_batchers[reduce_scatter_p] = partial(_batch_blocks, reduce_scatter_p.bind, out=0)


# alltoall: y_r[s] = x_s[r] ---------------------------------------------------------------------------------

alltoall_p = _primitive("alltoall")
_abstract(alltoall_p, _same_shape)
_lower(alltoall_p, _comm)


def alltoall(x: Array, *, comm: Members) -> Array:
    """``y_r[s] = x_s[r]`` for ``x`` of shape ``(size, ...)``."""
    return _moved(alltoall_p.bind, x, comm=comm)


_linear(alltoall_p, alltoall, alltoall)  # its own transpose
batching.primitive_batchers[alltoall_p] = partial(_batch_blocks, alltoall_p.bind, out=1)


# gather: y[s] = x_s at the root, zeros elsewhere ------------------------------------------------------------

gather_p = _primitive("gather")
_abstract(gather_p, _gathered_shape)
_lower(gather_p, _comm_root)


def gather(x: Array, *, comm: Communicator, root: int) -> Array:
    """``y_root[s] = x_s``: shape ``(size, *x.shape)`` on every rank, zeros on the others."""
    return _moved(gather_p.bind, x, comm=comm, root=root)


# scatter: y_r = x_root[r] ----------------------------------------------------------------------------------

scatter_p = _primitive("scatter")
_abstract(scatter_p, _block_shape)
_lower(scatter_p, _comm_root)


def scatter(x: Array, *, comm: Communicator, root: int) -> Array:
    """``y_r = x_root[r]`` for ``x`` of shape ``(size, ...)``."""
    return _moved(scatter_p.bind, x, comm=comm, root=root)


_linear(gather_p, gather, scatter)
batching.primitive_batchers[gather_p] = partial(_batch_gather, gather_p.bind)
_linear(scatter_p, scatter, gather)
batching.primitive_batchers[scatter_p] = partial(_batch_blocks, scatter_p.bind, out=0)


# scan: y_r = op over ranks s <= r; exscan: over s < r, zeros on rank 0 --------------------------------------


def _prefix(name: str) -> tuple[Primitive, Callable[..., Array]]:
    primitive = _primitive(name)
    _abstract(primitive, _same_shape)
    _lower(primitive, _comm_op)

    def prefix(x: Array, *, comm: Communicator, op: str) -> Array:
        return _reduced(partial(primitive.bind, in_place=(True,)), x, op, comm=comm)

    def transpose(ct: Array, *, comm: Communicator, op: str) -> Array:
        # y_r = sum_{s <= r} x_s  =>  ct_s = sum_{r >= s} ct_r: the same with the ranks in opposite order.
        return prefix(ct, comm=comm.reversed(), op=op)

    _linear(primitive, prefix, transpose, only_sum=True)
    batching.primitive_batchers[primitive] = partial(_batch_in_place, primitive.bind)
    return primitive, prefix


scan_p, scan = _prefix("scan")
exscan_p, exscan = _prefix("exscan")


# ppermute: y_d = x_s for each pair (s, d) of perm, zeros where there is none --------------------------------

ppermute_p = _primitive("ppermute")
_abstract(ppermute_p, _same_shape)


def _ppermute_attributes(comm: Members, perm: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    dest, source = comm.routes(perm)
    return {"comm": comm.number, "dest": dest, "source": source, "pattern": zlib.crc32(repr(sorted(perm)).encode())}


_lower(ppermute_p, _ppermute_attributes)


def ppermute(x: Array, *, comm: Members, perm: tuple[tuple[int, int], ...]) -> Array:
    """``y_d = x_s`` for ``(s, d)`` in ``perm``; zeros on ranks that are nobody's destination."""
    return _moved(ppermute_p.bind, x, comm=comm, perm=perm)


def _ppermute_transpose(ct: Array, *, comm: Members, perm: tuple[tuple[int, int], ...]) -> Array:
    return ppermute(ct, comm=comm, perm=tuple((dest, source) for source, dest in perm))


_linear(ppermute_p, ppermute, _ppermute_transpose)
batching.primitive_batchers[ppermute_p] = partial(_batch_in_place, ppermute_p.bind)


# sendrecv: sends x to dest, returns what source sent, of the given shape and dtype --------------------------

sendrecv_p = _primitive("sendrecv")


def _sendrecv_abstract_eval(x: Any, *, shape: tuple[int, ...], dtype: Any, **_: Any) -> Any:
    return ordering.result(shape, dtype, x), {ordering.effect}


def _sendrecv_attributes(
    comm: Communicator, source: int, dest: int, send_tag: int, recv_tag: int, **_: Any
) -> dict[str, int]:
    return {"comm": comm.number, "source": source, "dest": dest, "send_tag": send_tag, "recv_tag": recv_tag}


sendrecv_p.def_effectful_abstract_eval(_sendrecv_abstract_eval)
_lower(sendrecv_p, _sendrecv_attributes)


def _sendrecv_transpose_rule(
    ct: Any, x: Any, *, source: int, dest: int, send_tag: int, recv_tag: int, comm: Communicator, **_: Any
) -> list[Any]:
    # What came from source goes back to it, and what went to dest comes back.
    aval = x.aval.to_tangent_aval()
    if type(ct) is ad.Zero:
        return [ad.Zero(aval)]
    if source == MPI.ANY_SOURCE or recv_tag == MPI.ANY_TAG:
        raise NotImplementedError(
            message(
                "sendrecv",
                "a source and a tag under reverse-mode differentiation",
                "any source or any tag",
                "The cotangent goes back to the source: name it.",
            )
        )

    back = sendrecv_p.bind(
        ct,
        shape=aval.shape,
        dtype=aval.dtype,
        comm=comm,
        source=dest,
        dest=source,
        send_tag=recv_tag,
        recv_tag=send_tag,
    )
    return [back]


def _sendrecv_jvp_rule(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> Any:
    (x,), (t,) = primals, tangents
    y = sendrecv_p.bind(x, **params)
    if type(t) is ad.Zero or not jnp.issubdtype(params["dtype"], jnp.inexact):
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    return y, sendrecv_p.bind(t, **params)


def _sendrecv_batching_rule(
    args: Sequence[Array], dims: Sequence[int], *, shape: tuple[int, ...], **params: Any
) -> Any:
    # All ranks are taken to run under the same vmap, so what arrives has the batch axis too; in front.
    x = jnp.moveaxis(args[0], dims[0], 0)
    return sendrecv_p.bind(x, shape=(x.shape[0], *shape), **params), 0


def sendrecv(
    x: Array,
    like: Array | jax.ShapeDtypeStruct,
    *,
    comm: Communicator,
    source: int,
    dest: int,
    send_tag: int,
    recv_tag: int,
) -> Array:
    """Sends ``x`` to ``dest``; what ``source`` sent, of the shape and dtype of ``like``."""
    wire = jax.eval_shape(_to_wire, like)
    y = sendrecv_p.bind(
        _to_wire(x),
        shape=wire.shape,
        dtype=wire.dtype,
        comm=comm,
        source=source,
        dest=dest,
        send_tag=send_tag,
        recv_tag=recv_tag,
    )
    return _from_wire(y, like)


ad.primitive_jvps[sendrecv_p] = _sendrecv_jvp_rule
ad.primitive_transposes[sendrecv_p] = _sendrecv_transpose_rule
batching.primitive_batchers[sendrecv_p] = _sendrecv_batching_rule


# send and recv ---------------------------------------------------------------------------------------------

send_p = _primitive("send", multiple_results=True)
recv_p = _primitive("recv")  # its operand has shape (*batch, 0): no data, but a batch axis where vmap gives one


@send_p.def_effectful_abstract_eval
def _send_abstract_eval(x: Any, **_: Any) -> Any:
    return [], {ordering.effect}


@recv_p.def_effectful_abstract_eval
def _recv_abstract_eval(batch: Any, *, shape: tuple[int, ...], dtype: Any, **_: Any) -> Any:
    return ordering.result((*batch.shape[:-1], *shape), dtype, batch), {ordering.effect}


def _recv_attributes(comm: Communicator, source: int, tag: int, **_: Any) -> dict[str, int]:
    return {"comm": comm.number, "source": source, "tag": tag}


def _send_attributes(comm: Communicator, dest: int, tag: int) -> dict[str, int]:
    return {"comm": comm.number, "dest": dest, "tag": tag}


def _send_jvp_rule(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> Any:
    if all(type(t) is ad.Zero for t in tangents):
        return send_p.bind(*primals, **params), []
    return _not_linear("send", "one with a result", "Use sendrecv or ppermute, whose cotangents have a way back.")(
        primals, tangents, **params
    )


def _send_batching_rule(args: Sequence[Array], dims: Sequence[int], **params: Any) -> Any:
    # One message with the batch axis in front, as sendrecv's.
    return send_p.bind(jnp.moveaxis(args[0], dims[0], 0), **params), []


def send(x: Array, *, comm: Communicator, dest: int, tag: int) -> None:
    """Sends ``x`` to ``dest``."""
    send_p.bind(_to_wire(x), comm=comm, dest=dest, tag=tag)


def recv(like: Array | jax.ShapeDtypeStruct, *, comm: Communicator, source: int, tag: int) -> Array:
    """What ``source`` sent, of the shape and dtype of ``like``."""
    wire = jax.eval_shape(_to_wire, like)
    # Under vmap `like` has a batch axis that its shape does not show; an empty part of it has that axis too.
    batch = jnp.zeros(0) if isinstance(like, jax.ShapeDtypeStruct) else jnp.ravel(_to_wire(like))[:0]
    y = recv_p.bind(batch, shape=wire.shape, dtype=wire.dtype, comm=comm, source=source, tag=tag)
    return _from_wire(y, like)


_lower(send_p, _send_attributes)
ad.primitive_jvps[send_p] = _send_jvp_rule
batching.primitive_batchers[send_p] = _send_batching_rule


def _recv_jvp_rule(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> Any:
    if all(type(t) is ad.Zero for t in tangents):
        y = recv_p.bind(*primals, **params)
        return y, ad.Zero(jax.typeof(y).to_tangent_aval())
    return _not_linear("recv", "one with an operand", "Use sendrecv or ppermute, whose cotangents have a way back.")(
        primals, tangents, **params
    )


def _recv_batching_rule(args: Sequence[Array], dims: Sequence[int], **params: Any) -> Any:
    return recv_p.bind(jnp.moveaxis(args[0], dims[0], 0), **params), 0


_lower(recv_p, _recv_attributes)
ad.primitive_jvps[recv_p] = _recv_jvp_rule
batching.primitive_batchers[recv_p] = _recv_batching_rule


# barrier ---------------------------------------------------------------------------------------------------

barrier_p = _primitive("barrier", multiple_results=True)


@barrier_p.def_effectful_abstract_eval
def _barrier_abstract_eval(**_: Any) -> Any:
    return [], {ordering.effect}


_lower(barrier_p, _comm)
