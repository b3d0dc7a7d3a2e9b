"""Messages that travel while the program computes: MPI's isend, irecv and isendrecv, and the wait for them."""

from __future__ import annotations

import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pycollective.collectives import checks
from pycollective.collectives.checks import Array, PyTree
from pycollective.errors import fail
from pycollective.primitives import dtypes, requests
from pycollective.primitives.passed import EMPTY_TREE, NOTHING
from pycollective.primitives.requests import NO_DATA, Route, Template
from pycollective.ranks.communicator import Communicator
from pycollective.ranks.world import given_or_world
from pycollective.transport.message_constants import PROC_NULL, MessageConstant


@jax.tree_util.register_pytree_node_class
class Request:
    """Messages under way. :func:`isend`, :func:`irecv` and :func:`isendrecv` make it, and :func:`wait` ends it.

    It is a pytree, so programs return it, take it as an argument, and carry it through loops. Its leaves are numbers of
    messages in this process; they have no meaning in another process, in a checkpoint or on another rank. A tree of
    zeros in its place is a request without messages: :func:`wait` gives zeros for it.

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> request = pc.isendrecv(jnp.arange(3), source=pc.world().rank, dest=pc.world().rank)
        >>> pc.wait(request).tolist()
        [0, 1, 2]
    """

    __slots__ = ("_comm", "_facts", "_kept", "_numbers")

    def __init__(self, numbers: list[Any], kept: PyTree, facts: Any) -> None:
        """Keeps the arguments.

        Args:
            numbers: of each message, or pair of messages, its number.
            kept: what the wait returns if no rank sends anything; else None.
            facts: the operation, a weak reference to the communicator, the routes of the messages, and the structure
                and the leaves of what arrives, as shapes and dtypes. JAX keeps them with the structures of programs.
        """
        self._numbers, self._kept, self._facts = numbers, kept, facts
        self._comm: Communicator | None = facts[1]()

    def tree_flatten(self) -> tuple[Any, Any]:
        """The arrays of the request, and what else it holds."""
        return (self._numbers, self._kept), self._facts

    @classmethod
    def tree_unflatten(cls, facts: Any, children: Any) -> Request:
        """The inverse of :meth:`tree_flatten`."""
        numbers, kept = children
        return cls(numbers, kept, facts)

    def __repr__(self) -> str:
        return f"Request({self._facts[0]} on {self._comm!r})"


def isend(x: PyTree, comm: Communicator | None = None, *, dest: int | MessageConstant, tag: int = 0) -> Request:
    """Starts to send the arrays to one rank, and returns at once. The arrays are copied, so they may be used at once.

    Args:
        x: an array or a pytree of arrays.
        comm: a communicator, the world by default.
        dest: the rank that receives, by :func:`irecv`, :func:`recv` or the like; or :data:`PROC_NULL`: then nothing is
            sent.
        tag: a number from 0 on, for which the receiver asks. Default 0.

    Returns:
        The request, for :func:`wait`, whose result is None.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.
        NotImplementedError: while tracing, for a derivative with respect to ``x``: :func:`isendrecv` has one.

    Dtypes:
        All, and keys of :mod:`jax.random`.

    Differentiation:
        None: raises NotImplementedError.

    Order:
        Program order. The call waits for no other rank.

    Source:
        MPI_Isend (MPI standard, 3.7.2).

    Example:
        Two ranks exchange, whichever of the calls they make first:

        >>> import jax.numpy as jnp, pycollective as pc
        >>> other = pc.world().rank ^ 1
        >>> other = other if other < pc.world().size else pc.PROC_NULL
        >>> sent = pc.isend(jnp.full(3, pc.world().rank), dest=other)
        >>> received = pc.irecv(jnp.zeros(3, int), source=other)
        >>> _, y = pc.wait((sent, received))
        >>> other is pc.PROC_NULL or y.tolist() == [other] * 3
        True
    """
    where = "isend"
    comm = given_or_world(where, comm)
    to = checks.rank_or_constant(where, comm, "dest", dest, [PROC_NULL])
    number = checks.tag(where, comm, "tag", tag)
    arrays = jax.tree.leaves(checks.map_arrays(where, comm, lambda leaf: leaf, x))
    if to is PROC_NULL:
        return Request([], None, (where, weakref.ref(comm), (), None, ()))
    route = Route(where, NO_DATA, NO_DATA, PROC_NULL, to, number, 0)
    return _started(where, comm, arrays, None, None, route)


def irecv(like: PyTree, comm: Communicator | None = None, *, source: int | MessageConstant, tag: int = 0) -> Request:
    """Starts to receive arrays from one rank, and returns at once.

    Args:
        like: an array, a :class:`jax.ShapeDtypeStruct`, or a pytree of them: the shapes and dtypes of what arrives.
            Its values are read only with the source :data:`PROC_NULL`.
        comm: a communicator, the world by default.
        source: the rank that sends, by :func:`isend`, :func:`send` or the like; or :data:`PROC_NULL`: then nothing is
            received. :data:`ANY_SOURCE` is refused, as is :data:`ANY_TAG`: the parts of two messages could mix.
        tag: the tag that the sender gives. Default 0.

    Returns:
        The request, for :func:`wait`, whose result is the arrays that arrive, of the shapes and dtypes of ``like``.
        With the source :data:`PROC_NULL` they are those of :func:`recv`.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.

    Shape:
        Of the result of :func:`wait`: that of ``like``.

    Dtypes:
        All, and keys of :mod:`jax.random`.

    Differentiation:
        The result has no derivative: the sender's :func:`isend` raises NotImplementedError.

    Order:
        Program order: messages from one rank with one tag arrive in the order of the calls. The call waits for no other
        rank.

    Source:
        MPI_Irecv (MPI standard, 3.7.2).

    Example:
        See :func:`isend`.
    """
    where = "irecv"
    comm = given_or_world(where, comm)
    origin = checks.rank_or_constant(where, comm, "source", source, [PROC_NULL])
    number = checks.tag(where, comm, "tag", tag)
    like = jax.tree.map(lambda leaf: checks.template(where, comm, leaf), like)
    if origin is PROC_NULL:
        return Request([], jax.tree.map(checks.filled, like), (where, weakref.ref(comm), (), None, ()))
    templates, tree = jax.tree.flatten(like)
    route = Route(where, NO_DATA, NO_DATA, origin, PROC_NULL, 0, number)
    # Under vmap the templates have a batch axis that their shapes do not show. An empty slice of each has it, too.
    batches = [lax.stop_gradient(_empty_slice(leaf)) for leaf in templates]
    return _started(where, comm, batches, tree, templates, route)


def isendrecv(
    x: PyTree,
    comm: Communicator | None = None,
    *,
    source: int | MessageConstant,
    dest: int | MessageConstant,
    like: PyTree | None = None,
    send_tag: int = 0,
    recv_tag: int = 0,
) -> Request:
    """Starts to send arrays to one rank and to receive arrays from another, and returns at once.

    Args:
        x: an array or a pytree of arrays to send. They are copied, so they may be used at once.
        comm: a communicator, the world by default.
        source: the rank to receive from, or :data:`PROC_NULL`: then nothing is received, and the result is zeros.
        dest: the rank to send to, or :data:`PROC_NULL`: then nothing is sent.
        like: as for :func:`sendrecv`. Default: ``x``.
        send_tag: the tag of the message that is sent. Default 0.
        recv_tag: the tag of the message that is received. Default 0.

    Returns:
        The request, for :func:`wait`, whose result is the arrays that arrive, of the shapes and dtypes of ``like``.

    Raises:
        TypeError, ValueError: while tracing, for an argument of a wrong type, shape or value.

    Shape:
        Of the result of :func:`wait`: that of ``like``, by default of ``x``.

    Dtypes:
        All, and keys of :mod:`jax.random`.

    Differentiation:
        The transpose is :func:`isendrecv` with ``source`` and ``dest`` swapped: it starts where the program waits, and
        waits where the program starts. So cotangents travel while the program computes, too. A rank whose derivative
        does not depend on what it received sends no cotangent, and the other rank waits for it: add ``0 * jnp.sum(y)``
        to its loss.

    Order:
        Program order. The call waits for no other rank.

    Source:
        MPI_Isendrecv (MPI standard, 3.10).

    Example:
        Each rank of a ring computes while an array travels:

        >>> import jax, jax.numpy as jnp, pycollective as pc
        >>> ring = pc.make_cart((0,), periods=True)
        >>> source, dest = ring.shift(0)
        >>> @jax.jit
        ... def step(x):
        ...     request = pc.isendrecv(x, ring, source=source, dest=dest)
        ...     own = jnp.sum(x**2)
        ...     return own + jnp.sum(pc.wait(request, after=own))
        >>> float(step(jnp.ones(3)))
        6.0
    """
    where = "isendrecv"
    comm = given_or_world(where, comm)
    origin = checks.rank_or_constant(where, comm, "source", source, [PROC_NULL])
    to = checks.rank_or_constant(where, comm, "dest", dest, [PROC_NULL])
    tags = checks.tag(where, comm, "send_tag", send_tag), checks.tag(where, comm, "recv_tag", recv_tag)
    arrays, structure = jax.tree.flatten(checks.map_arrays(where, comm, lambda leaf: leaf, x))
    templates, tree = jax.tree.flatten(
        jax.tree.map(lambda leaf: checks.template(where, comm, leaf), x if like is None else like)
    )
    if structure != tree:
        expected = f"like of the structure of x, {structure}"
        fail(ValueError, where, comm, expected, tree, "Send and receive the same number of arrays.")
    route = Route(where, NO_DATA, NO_DATA, origin, to, *tags)
    return _started(where, comm, arrays, tree, templates, route)


def wait(request: PyTree, *, after: PyTree = None) -> PyTree:
    """Waits until the messages of requests have arrived and have left.

    Each request is waited for once, in the program that has started it or in another one. What is never waited for is
    told when all ranks have ended.

    Args:
        request: a :class:`Request`, or a pytree of them.
        after: arrays that XLA is to have computed before it waits, so that the messages travel meanwhile. Without them
            XLA chooses: on CPU devices it often waits first. Default None.

    Returns:
        For each request what its function says: None of :func:`isend`, else the arrays that have arrived.

    Raises:
        TypeError: while tracing, for what is no request.
        jax.errors.JaxRuntimeError: at run time, when the message has another shape or dtype, or the request was waited
            for before.

    Differentiation:
        See :func:`isendrecv`.

    Order:
        Program order.

    Source:
        MPI_Wait (MPI standard, 3.7.3).

    Example:
        See :func:`isend`.
    """

    before = [jnp.asarray(leaf) for leaf in jax.tree.leaves(after)]

    def wait_for(one: Any) -> PyTree:
        if not isinstance(one, Request):
            remedy = "Pass what isend, irecv or isendrecv has returned."
            fail(TypeError, "wait", None, "a pycollective.Request, or a pytree of them", repr(one), remedy)
        _, _, routes, tree, templates = one._facts
        if one._comm is None:
            remedy = "Keep the communicator, or the program that has started the messages."
            fail(ValueError, "wait", None, "a request whose communicator is in use", "one that nothing used", remedy)
        comm = given_or_world("wait", one._comm)
        arrived = [
            requests.wait(number, before, route=route, comm=comm)
            for number, route in zip(one._numbers, routes, strict=True)
        ]
        if tree is None:
            return one._kept
        # A tree without arrays has one message, without elements.
        leaves = [dtypes.from_wire(y, template) for y, template in zip(arrived, templates, strict=False)]
        return jax.tree.unflatten(tree, leaves)

    return jax.tree.map(wait_for, request, is_leaf=lambda node: isinstance(node, Request))


def _started(
    where: str,
    comm: Communicator,
    operands: list[Array],
    tree: Any,
    templates: list[checks.Like] | None,
    route: Route,
) -> Request:
    """Starts a message, or a pair of messages, for each operand, and returns the request.

    Args:
        where: the public function.
        comm: the communicator.
        operands: the arrays to send.
        tree: the structure of what arrives; None: nothing arrives.
        templates: the leaves of what arrives; None: nothing arrives.
        route: the route, without the arrays.
    """
    passed = NOTHING
    if not operands:  # the other end may have arrays: one message without elements
        operands, passed = [jnp.zeros(0, bool)], EMPTY_TREE
    received = tuple(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in templates or ())
    wires = [jax.eval_shape(dtypes.to_wire, each) for each in received] or [jax.ShapeDtypeStruct((0,), np.bool_)]
    sent = [dtypes.to_wire(operand) for operand in operands]
    if templates is None:
        wires *= len(sent)
    routes = tuple(
        route._replace(sent=Template(x.shape, np.dtype(x.dtype)), received=Template(y.shape, np.dtype(y.dtype)))
        for x, y in zip(sent, wires, strict=True)
    )
    numbers = [
        requests.isendrecv(x, route=route, comm=comm, passed=passed) for x, route in zip(sent, routes, strict=True)
    ]
    return Request(numbers, None, (where, weakref.ref(comm), routes, tree, received))


def _empty_slice(template: checks.Like) -> Array:
    if isinstance(template, jax.ShapeDtypeStruct):
        return jnp.zeros(0, bool)
    return jnp.ravel(dtypes.to_wire(template))[:0]
