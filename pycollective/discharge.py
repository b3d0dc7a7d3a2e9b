"""jaxpr -> jaxpr: jax.lax's collectives over the axes of a mesh become primitives over its groups of devices.

:func:`jax.make_jaxpr` traces a function whose axes are bound to their full sizes; JAX's own rules have then
differentiated and batched its collectives. :func:`evaluate` goes through that jaxpr once more under a trace: equations
without our axes are bound again as they are, those that hold jaxprs with ours get them discharged, and a collective
over our axes is replaced as ``discharge_rules`` says. Collectives over other axes are left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn
from jax.extend.core import primitives as jax_primitives

from pycollective import jaxprs
from pycollective.checks import naming_axes
from pycollective.discharge_rules import RULES, bad_params
from pycollective.errors import message
from pycollective.jaxprs import inner_jaxprs, like, replaced
from pycollective.mesh import Mesh


def bind_axes(fun: Callable[..., Any], mesh: Mesh, *args: Any) -> ClosedJaxpr:
    """The jaxpr of ``fun``, a function of arrays to a flat list of arrays, with the axes of ``mesh`` bound.

    Args:
        fun: may use the axes by name.
        mesh: binds them.
        args: anything with a shape and a dtype: one device's operands.
    """
    with naming_axes(*mesh.shape):
        return jax.make_jaxpr(fun, axis_env=list(mesh.shape.items()))(*args)


def collectives(jaxpr: Any, mesh: Mesh) -> list[str]:
    """One line for each collective over the axes of ``mesh``, which all ranks must have in common."""
    lines = []
    for eqn in jaxpr.eqns:
        if _is_ours(eqn, mesh):
            operands = ", ".join(str(var.aval) for var in eqn.invars)
            params = ", ".join(f"{name}={value}" for name, value in sorted(eqn.params.items()) if value is not None)
            lines.append(f"{eqn.primitive.name}({operands}; {params})")
        for inner in inner_jaxprs(eqn):
            lines += collectives(inner, mesh)
    return lines


def evaluate(closed: ClosedJaxpr, mesh: Mesh, *args: Any) -> list[Any]:
    """``closed`` on ``args`` with every collective over the axes of ``mesh`` replaced, under the caller's trace.

    The caller binds the local names of axes with several local devices. Raises as :func:`discharge`.
    """
    return jaxprs.evaluate(closed, *args, equation=partial(_equation, mesh))


def discharge(closed: ClosedJaxpr, mesh: Mesh) -> ClosedJaxpr:
    """The same as a jaxpr.

    Raises:
        NotImplementedError: a collective that has no rule, or one over our axes and others at once.
        ValueError: parameters that JAX leaves for XLA to refuse.
    """
    if not _mentions(closed.jaxpr, mesh):
        return closed
    local = [(axis.local_name, axis.local) for axis in mesh.axes if axis.local > 1]
    return jax.make_jaxpr(partial(evaluate, closed, mesh), axis_env=local)(
        *(_like(var.aval) for var in closed.jaxpr.invars)
    )


def _like(aval: Any) -> Any:
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _axes(eqn: JaxprEqn) -> tuple[Any, ...]:
    """The axes that a collective names; an int is a positional axis."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(axes) if isinstance(axes, (tuple, list)) else (axes,)


def _is_ours(eqn: JaxprEqn, mesh: Mesh) -> bool:
    return any(not isinstance(name, int) and name in mesh.shape for name in _axes(eqn))


def _mentions(jaxpr: Any, mesh: Mesh) -> bool:
    return any(_is_ours(eqn, mesh) or _holds(eqn, mesh) for eqn in jaxpr.eqns)


def _holds(eqn: JaxprEqn, mesh: Mesh) -> bool:
    return any(_mentions(jaxpr, mesh) for jaxpr in inner_jaxprs(eqn))


def _equation(mesh: Mesh, eqn: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
    if _is_ours(eqn, mesh):
        return _collective(eqn, operands, mesh)
    if not _holds(eqn, mesh):
        return jaxprs.bind(eqn, operands)
    if eqn.primitive is jax_primitives.custom_jvp_call_p:
        return _custom_jvp(eqn, mesh)(*operands)
    if eqn.primitive is jax_primitives.custom_vjp_call_p:
        return _custom_vjp(eqn, mesh)(*operands)
    consts: list[Any] = []
    params = {name: _map_jaxprs(value, mesh, consts) for name, value in eqn.params.items()}
    return _bind(eqn.primitive, [*consts, *operands], params)


def _bind(primitive: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    results = primitive.bind(*operands, **primitive.get_bind_params(params))
    return results if primitive.multiple_results else [results]


def _map_jaxprs(value: Any, mesh: Mesh, consts: list[Any]) -> Any:
    """The same parameter with its jaxprs discharged."""
    if isinstance(value, ClosedJaxpr):
        return discharge(value, mesh)
    if isinstance(value, Jaxpr):  # open, as in checkpoint: what would be its constants become operands
        closed = discharge(ClosedJaxpr(value, ()), mesh)
        consts += closed.consts
        jaxpr = closed.jaxpr
        return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])
    if isinstance(value, (tuple, list)):
        return like(value, [_map_jaxprs(part, mesh, consts) for part in value])
    return value


def _collective(eqn: JaxprEqn, operands: list[Any], mesh: Mesh) -> Sequence[Any]:
    def fail(expected: str, got: str, remedy: str, kind: type[Exception] = NotImplementedError) -> NoReturn:
        where = source_info_util.summarize(eqn.source_info)
        rank, size = mesh.comm.rank, mesh.comm.size
        text = message(eqn.primitive.name, expected, f"{got} at {where}", remedy, rank=rank, size=size)
        raise kind(text)

    rule = RULES.get(eqn.primitive.name)
    if rule is None:
        fail(f"one of {sorted(RULES)} over axes of {mesh!r}", eqn.primitive.name, "Write it with those.")
    names = _axes(eqn)
    positional = tuple(name for name in names if isinstance(name, int))
    ours = tuple(name for name in names if not isinstance(name, int))
    if not all(name in mesh.shape for name in ours):
        fail(
            f"axes of {mesh!r} alone",
            f"{eqn.primitive.name} over {names}",
            "Use one call for these axes and another for the others.",
        )
    params = {name: value for name, value in eqn.params.items() if name not in ("axes", "axis_name", "axis_size")}
    group = mesh.over(ours)
    if (problem := bad_params(group.size, eqn.primitive.name, params)) is not None:
        fail(*problem, kind=ValueError)
    if positional:
        params["positional"] = positional
    return rule(group, *operands, **params)


# Custom derivatives ---------------------------------------------------------------------------------------
#
# Their rules are Python functions that may name our axes, and JAX calls them when somebody differentiates the whole,
# long after discharge. So each is wrapped in one that traces it with the axes bound, and discharges that.


def _differentiable(operands: Sequence[Any]) -> list[int]:
    return [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.inexact)]


def _run(fun: Callable[..., Any], mesh: Mesh, *args: Any) -> list[Any]:
    """``fun(*args)`` with the axes bound and their collectives replaced, under the caller's trace."""
    return evaluate(bind_axes(fun, mesh, *args), mesh, *args)


def _primal(eqn: JaxprEqn, mesh: Mesh) -> Callable[..., list[Any]]:
    """The function that has a rule of its own."""

    def function(*operands: Any) -> list[Any]:
        return evaluate(eqn.params["call_jaxpr"], mesh, *operands)

    return function


def _original(eqn: JaxprEqn, operands: Sequence[Any]) -> Callable[..., tuple[list[Any], list[Any]]]:
    """The call as a function of its differentiable operands: to differentiable results, and to all."""
    places = _differentiable(operands)

    def function(*values: Any) -> tuple[list[Any], list[Any]]:
        results = _bind(eqn.primitive, replaced(operands, places, values), eqn.params)
        return [results[i] for i in _differentiable(results)], list(results)

    return function


def _custom_jvp(eqn: JaxprEqn, mesh: Mesh) -> Callable[..., Any]:
    function = jax.custom_jvp(_primal(eqn, mesh))

    @function.defjvp
    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        places = _differentiable(primals)
        leaves = [*primals, *(tangents[i] for i in places)]

        def both(*leaves: Any) -> list[Any]:
            operands, directions = leaves[: len(primals)], leaves[len(primals) :]
            function = _original(eqn, operands)
            _, derivatives, results = jax.jvp(function, tuple(operands[i] for i in places), directions, has_aux=True)
            return [*results, *derivatives]

        out = _run(both, mesh, *leaves)
        results, derivatives = out[: len(eqn.outvars)], out[len(eqn.outvars) :]
        none = [np.zeros(x.shape, jax.dtypes.float0) for x in results]
        return results, replaced(none, _differentiable(results), derivatives)

    return function


def _custom_vjp(eqn: JaxprEqn, mesh: Mesh) -> Callable[..., Any]:
    function = jax.custom_vjp(_primal(eqn, mesh))

    def forward(*operands: Any) -> tuple[list[Any], tuple[Any, ...]]:
        tree: Any = None

        def run(*operands: Any) -> list[Any]:
            nonlocal tree
            values = [operands[i] for i in _differentiable(operands)]
            _, back, results = jax.vjp(_original(eqn, operands), *values, has_aux=True)
            leaves, tree = jax.tree.flatten(back)
            return [*results, *leaves]

        out = _run(run, mesh, *operands)
        back = jax.tree.unflatten(tree, out[len(eqn.outvars) :])
        return out[: len(eqn.outvars)], (back, operands)

    def backward(residuals: tuple[Any, ...], cotangents: Sequence[Any]) -> tuple[Any, ...]:
        back, operands = residuals
        leaves, tree = jax.tree.flatten((back, [ct for ct in cotangents if ct.dtype != jax.dtypes.float0]))

        def run(*leaves: Any) -> list[Any]:
            back, cotangents = jax.tree.unflatten(tree, leaves)
            return list(back(cotangents))

        out = _run(run, mesh, *leaves)
        return tuple(replaced([None] * len(operands), _differentiable(operands), out))

    function.defvjp(forward, backward)
    return function
