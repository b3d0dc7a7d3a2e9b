"""Walks through jaxprs, and what lies in their parameters."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.extend.core import primitives as jax_primitives

from pycollective.ordering import jax_internals

P = ParamSpec("P")
R = TypeVar("R")

NO_MESH = jax.sharding.AbstractMesh((), ())
"""That of a trace which no :func:`jax.shard_map` surrounds."""

Equation = Callable[[JaxprEqn, list[Any]], Sequence[Any]]
"""The results of an equation for these operands."""


def abstract_mesh(sizes: Mapping[Any, int]) -> jax.sharding.AbstractMesh:
    """One with axes of these sizes, by their names, which no type of an array names, whatever JAX's default is."""
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def replaced(items: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """``items`` with ``values`` in ``places``."""
    filled = list(items)
    for place, value in zip(places, values, strict=True):
        filled[place] = value
    return filled


def split_arrays(args: Any, kwargs: Any) -> tuple[list[Any], Callable[[Sequence[Any]], tuple[Any, Any]]]:
    """The arrays among the arguments of a traced function, and a way to put others in their places.

    The rest is static: what :func:`jax.jit` does not trace.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

    def with_arrays(arrays: Sequence[Any]) -> tuple[Any, Any]:
        args, kwargs = jax.tree.unflatten(tree, replaced(leaves, places, arrays))
        return args, kwargs

    return [leaves[place] for place in places], with_arrays


def like(value: Any, parts: Sequence[Any]) -> Any:
    """A tuple or list of ``parts`` of the type of ``value``, which may be a named tuple."""
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


def inner_jaxprs(eqn: Any) -> list[Any]:
    """The jaxprs in the parameters of an equation, without their constants."""
    parts = [
        part for value in eqn.params.values() for part in (value if isinstance(value, (tuple, list)) else (value,))
    ]
    opened = [part.jaxpr if isinstance(part, ClosedJaxpr) else part for part in parts]
    return [part for part in opened if isinstance(part, Jaxpr)]


def reads(reader: JaxprEqn | Jaxpr) -> list[Var]:
    """The variables that an equation reads, or that a program returns."""
    atoms = reader.outvars if isinstance(reader, Jaxpr) else reader.invars
    return [atom for atom in atoms if isinstance(atom, Var)]


def all_reads(jaxpr: Any) -> set[Var]:
    """The variables that some equation of a program reads, or that it returns."""
    return {var for reader in (*jaxpr.eqns, jaxpr) for var in reads(reader)}


def is_reshape(eqn: JaxprEqn) -> bool:
    """Whether it gives an array another shape and no more, for which XLA does nothing."""
    if eqn.primitive.name not in ("reshape", "squeeze", "broadcast_in_dim", "expand_dims"):
        return False
    source, (result,) = eqn.invars[0], eqn.outvars
    return isinstance(source, Var) and source.aval.size == result.aval.size


def evaluate(closed: ClosedJaxpr, equation: Equation, *args: Any) -> list[Any]:
    """``closed`` on ``args`` under the caller's trace and mesh: each equation as ``equation`` says."""
    jaxpr = closed.jaxpr
    mesh = jax.sharding.get_abstract_mesh()
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))

    def read(atom: Any) -> Any:
        # A literal may have a type with the mesh of its trace, which an array of NumPy has not.
        if isinstance(atom, Literal):
            return np.asarray(atom.val) if isinstance(atom.val, np.ndarray) else atom.val
        return values[atom]

    for eqn in jaxpr.eqns:
        # What replaces an equation keeps the user's line and scopes, but not the mesh under which it was traced.
        stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
        with (
            source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
            eqn.ctx.manager,
            jax.sharding.use_abstract_mesh(NO_MESH),  # first, since JAX refuses one mesh inside another
            jax.sharding.use_abstract_mesh(mesh),
        ):
            results = equation(eqn, list(map(read, eqn.invars)))
        values.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def bind(eqn: JaxprEqn, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    """The equation again, with other operands and parameters."""
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return results if eqn.primitive.multiple_results else [results]


def rebind(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """The equation as it is, with other operands."""
    return bind(eqn, operands, eqn.params)


def function(jaxpr: Any) -> Callable[..., list[Any]]:
    """A jaxpr without constants, as a function.

    Not :func:`jax.extend.core.jaxpr_as_fun`: that switches ``jax_debug_nans`` off in this thread, for good.
    """
    closed = ClosedJaxpr(jaxpr, ())
    return lambda *args: evaluate(closed, rebind, *args)


def bind_mapped(eqn: JaxprEqn, operands: Sequence[Any], change: Callable[[ClosedJaxpr], ClosedJaxpr]) -> Sequence[Any]:
    """The equation again, with the jaxprs in its parameters changed: new ones take and return what the old ones do."""
    consts: list[Any] = []

    def new(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return change(value)
        if isinstance(value, Jaxpr):  # open, as in checkpoint: what would be its constants become operands
            closed = change(ClosedJaxpr(value, ()))
            consts.extend(closed.consts)
            return closed.jaxpr.replace(constvars=[], invars=[*closed.jaxpr.constvars, *closed.jaxpr.invars])
        if isinstance(value, (tuple, list)):
            return like(value, list(map(new, value)))
        return value

    params = {name: new(value) for name, value in eqn.params.items()}
    return bind(eqn, [*consts, *operands], params)


_JAXS_OWN = frozenset(value for value in vars(jax_primitives).values() if isinstance(value, Primitive))


@functools.lru_cache(maxsize=4096)  # asked for each equation that JAX traces
def is_foreign(primitive: Primitive) -> bool:
    """Whether another library has defined the primitive, by a function that JAX can trace: Equinox does, for lineax."""
    module = getattr(primitive.impl, "__module__", None) or "functools"  # functools.partial: JAX's eager dispatch
    return primitive not in _JAXS_OWN and module.partition(".")[0] not in ("jax", "functools", "pycollective")


def is_high(eqn: JaxprEqn) -> bool:
    """See :func:`jax_internals.is_high`."""
    return jax_internals.is_high(eqn, inner_jaxprs(eqn))


def hides_program(eqn: JaxprEqn) -> bool:
    """Whether it stands for a function that JAX has yet to trace, so that its parameters do not tell what it does."""
    return is_foreign(eqn.primitive) or is_high(eqn)


def implementation(eqn: JaxprEqn, axis_env: Sequence[tuple[Any, int]]) -> ClosedJaxpr | None:
    """The program that an equation hides, if it does; nobody knows how that uses the jaxprs in its parameters."""
    if is_high(eqn):
        function = jax_internals.low_level(eqn.primitive)
    elif is_foreign(eqn.primitive):
        function = eqn.primitive.impl
    else:
        return None
    avals = [aval_like(var.aval) for var in eqn.invars]
    with jax.sharding.use_abstract_mesh(NO_MESH):
        return jax.make_jaxpr(functools.partial(function, **eqn.params), axis_env=list(axis_env))(*avals)


def rebuilt_shard_map(eqn: JaxprEqn, equation: Equation) -> Callable[..., Any]:
    """The :func:`jax.shard_map` of an equation, with each equation inside as ``equation`` says."""
    closed = ClosedJaxpr(eqn.params["jaxpr"], ())
    program: Callable[..., Any] = jax.shard_map(
        lambda *blocks: evaluate(closed, equation, *blocks),
        mesh=eqn.params["mesh"],
        in_specs=tuple(eqn.params["in_specs"]),
        out_specs=list(eqn.params["out_specs"]),
        check_vma=eqn.params["check_vma"],
    )
    return outside_meshes(program)


def manual_sizes(mesh: jax.sharding.AbstractMesh) -> list[int]:
    """The sizes of the axes over which a program around is one of several devices' own."""
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return [size for size, kind in kinds if kind == jax.sharding.AxisType.Manual]


def outside_meshes(fun: Callable[P, R]) -> Callable[P, R]:
    """``fun`` in a trace under a mesh as if it were under none: it may use meshes of its own."""

    @functools.wraps(fun)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.sharding.use_abstract_mesh(NO_MESH):
            return fun(*args, **kwargs)

    return function


def dependents(jaxpr: Any, sources: Iterable[Var], always: Callable[[JaxprEqn], bool] = lambda _: False) -> set[Var]:
    """What depends on ``sources``, or on equations that ``always`` names; everything where there are references."""
    found = set(sources)
    references = any(hasattr(var.aval, "inner_aval") for eqn in jaxpr.eqns for var in eqn.outvars)
    for eqn in jaxpr.eqns:
        if references or always(eqn) or not found.isdisjoint(var for var in eqn.invars if isinstance(var, Var)):
            found.update(eqn.outvars)
    return found


def called(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What an equation is that nothing but its derivative makes more than a call."""
    if eqn.primitive in (jax_primitives.custom_jvp_call_p, jax_primitives.custom_vjp_call_p):
        closed: ClosedJaxpr = eqn.params["call_jaxpr"]
        return closed
    return eqn.params["callee"] if eqn.primitive.name == "linear_call" else None


def aval_like(aval: Any) -> Any:
    """For :func:`jax.make_jaxpr`: of the shape and dtype of ``aval``, outside any mesh."""
    if hasattr(aval, "inner_aval"):  # a reference
        return jax.ShapeDtypeStruct(aval.inner_aval.shape, aval.inner_aval.dtype, is_ref=True)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def map_jaxprs(jaxpr: Any, change: Callable[[Any], Any]) -> Any:
    """``jaxpr`` with all jaxprs that its equations hold, and then itself, replaced by what ``change`` makes of them.

    One result for each, itself where nothing changes: JAX compiles a function that is called twice once.
    """
    changed: dict[int, Any] = {}

    def whole(jaxpr: Any) -> Any:
        if id(jaxpr) not in changed:
            eqns = []
            for eqn in jaxpr.eqns:
                params = {name: inner(value) for name, value in eqn.params.items()}
                same = all(params[name] is value for name, value in eqn.params.items())
                eqns.append(eqn if same else eqn.replace(params=params))
            same = all(map(operator.is_, eqns, jaxpr.eqns))
            changed[id(jaxpr)] = change(jaxpr if same else jaxpr.replace(eqns=eqns))
        return changed[id(jaxpr)]

    def inner(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            new = whole(value.jaxpr)
            if new is value.jaxpr:
                return value
            return changed.setdefault(id(value), ClosedJaxpr(new, value.consts))
        if isinstance(value, Jaxpr):
            return whole(value)
        if isinstance(value, tuple) and any(isinstance(part, (Jaxpr, ClosedJaxpr)) for part in value):
            parts = [inner(part) for part in value]
            return value if all(map(operator.is_, parts, value)) else like(value, parts)
        return value

    return whole(jaxpr)
