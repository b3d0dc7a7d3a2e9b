"""Device programs with the meaning of :func:`jax.shard_map`.

:func:`jax.shard_map` over an abstract mesh of the full sizes needs no devices. Its trace for the shapes of the global
arrays is one equation: JAX has made its checks, found its types, and taken the derivatives inside the function. The
primitive of this file holds the parts of this equation. Its rules for differentiation and batching rebuild JAX's
equation for the global shapes and let JAX transform it. The results are again equations of :func:`jax.shard_map`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal
from jax.interpreters import ad, batching
from jax.sharding import PartitionSpec

from pycollective.jax_support import jax_internals, jaxprs
from pycollective.named_axes.mesh import Mesh
from pycollective.named_axes.names import explain_unbound_names
from pycollective.spmd import checkpoints, device_program
from pycollective.spmd.device_program import global_aval, zero_if_none

shard_map_p = device_program.new_primitive("pycollective_shard_map")


def trace(
    fun: Callable[..., Any],
    mesh: Mesh,
    arrays: Sequence[Any],
    *,
    in_specs: Any,
    out_specs: Any,
    check_vma: bool,
    arguments: Callable[[Sequence[Any]], Sequence[Any]] = tuple,
) -> tuple[ClosedJaxpr, Any]:
    """Traces :func:`jax.shard_map` of ``fun``. Returns its jaxpr, and the tree structure of its results.

    Args:
        fun: a function from one device's blocks to one device's blocks; it may name the axes of ``mesh``.
        mesh: the mesh, whose axes are bound.
        arrays: arrays, or shapes and dtypes, of the global arguments.
        in_specs: the option of :func:`jax.shard_map`.
        out_specs: the option of :func:`jax.shard_map`.
        check_vma: the option of :func:`jax.shard_map`.
        arguments: a function that makes the arguments of ``fun`` from ``arrays``.
    """

    def traced(check_vma: bool) -> tuple[ClosedJaxpr, Any]:
        program = _shard_map(fun, mesh, in_specs, out_specs, check_vma)
        closed, results = jax.make_jaxpr(lambda *xs: program(*arguments(xs)), return_shape=True)(*arrays)
        return closed, jax.tree.structure(results)

    with explain_unbound_names(*mesh.shape), jax.sharding.use_abstract_mesh(jaxprs.NO_MESH):
        try:
            return traced(check_vma)
        except AssertionError as error:
            if error.args or not check_vma:
                raise
            failed = error
        # If an axis is not bound, JAX with types raises an AssertionError without a message. Without types its error
        # names the axis.
        try:
            traced(check_vma=False)
        except NameError:
            raise
        except Exception as other:
            raise failed from other
        raise failed


def _shard_map(fun: Callable[..., Any], mesh: Mesh, in_specs: Any, out_specs: Any, check_vma: bool) -> Any:
    return jax.shard_map(fun, mesh=mesh.abstract_mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def apply(closed: ClosedJaxpr, mesh: Mesh, args: Sequence[Any]) -> list[Any]:
    """Applies a jaxpr of :func:`trace`, or a transform of such a jaxpr, to this rank's own blocks.

    Returns:
        The results; None for a result that depends on no argument, whose derivative is zero.
    """
    values: dict[Any, Any] = dict(
        zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *args], strict=True)
    )
    used = jaxprs.all_reads(closed.jaxpr)
    for eqn in closed.jaxpr.eqns:
        operands = [var.val if isinstance(var, Literal) else values.get(var) for var in eqn.invars]
        if eqn.primitive.name == "shard_map":
            if not eqn.effects and used.isdisjoint(eqn.outvars):
                continue
            assert all(x is not None for x in operands), "a constant of global shape"
            specs = eqn.params["in_specs"], eqn.params["out_specs"]
            params = device_program.parameters(mesh, eqn.params["jaxpr"], *specs, eqn.effects)
            results: Sequence[Any] = shard_map_p.bind(*operands, **params, check_vma=eqn.params["check_vma"])
        elif any(x is None for x in operands) or all(isinstance(var, Literal) for var in eqn.invars):
            continue
        else:  # an elementwise operation, such as a cotangent divided by the number of devices that share the result
            results = jaxprs.rebind(eqn, operands)
            assert all(y.shape in {jnp.shape(x) for x in operands} for y in results), (
                f"{eqn.primitive} is not elementwise"
            )
        values.update(zip(eqn.outvars, results, strict=True))
    return [None if isinstance(var, Literal) else values.get(var) for var in closed.jaxpr.outvars]


# Derivatives and batches: JAX transforms the equation on global arrays -------------------------------------------


def _function(
    body: Any, mesh: Mesh, in_specs: Sequence[PartitionSpec], out_specs: Sequence[PartitionSpec], check_vma: bool
) -> Callable[..., list[Any]]:
    function: Callable[..., list[Any]] = _shard_map(
        jaxprs.as_function(body), mesh, tuple(in_specs), list(out_specs), check_vma
    )
    return function


def _jaxpr(fun: Callable[..., Any], *args: Any) -> ClosedJaxpr:
    with jax.sharding.use_abstract_mesh(jaxprs.NO_MESH):
        return jax.make_jaxpr(fun)(*args)


def _jvp_rule(
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    body: Any,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    check_vma: bool,
    **_: Any,
) -> Any:
    function = _function(body, mesh, in_specs, out_specs, check_vma)
    places = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    operands = list(map(partial(global_aval, mesh), primals, in_specs))
    tree: Any = None

    def forward(*operands: Any) -> list[Any]:
        nonlocal tree
        values = [operands[i] for i in places]
        outs, linear = jax.linearize(lambda *values: function(*jaxprs.replaced(operands, places, values)), *values)
        leaves, tree = jax.tree.flatten(linear)
        return [*outs, *leaves]

    first = _jaxpr(forward, *operands)
    results = apply(first, mesh, primals)
    outs = results[: len(out_specs)]
    residuals = [
        var.val if isinstance(var, Literal) else x for var, x in zip(first.jaxpr.outvars, results, strict=True)
    ][len(out_specs) :]

    def linear(*args: Any) -> list[Any]:
        derivative = jax.tree.unflatten(tree, args[: len(residuals)])
        return list(derivative(*args[len(residuals) :]))

    directions = [tangents[i] for i in places]
    second = _jaxpr(
        linear,
        *(jaxprs.aval_like(aval) for aval in first.out_avals[len(out_specs) :]),
        *(global_aval(mesh, t, in_specs[i]) for t, i in zip(directions, places, strict=True)),
    )
    derivatives = apply(second, mesh, [*residuals, *directions])
    return outs, [zero_if_none(t, jax.typeof(y)) for t, y in zip(derivatives, outs, strict=True)]


def _transpose_rule(
    cts: Sequence[Any],
    *args: Any,
    body: Any,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    check_vma: bool,
    **_: Any,
) -> list[Any]:
    function = _function(body, mesh, in_specs, out_specs, check_vma)
    # Indices of the operands that get cotangents, of the other operands, and of the results that have cotangents.
    linear = [i for i, x in enumerate(args) if ad.is_undefined_primal(x)]
    known = [i for i in range(len(args)) if i not in linear]
    wanted = [i for i, ct in enumerate(cts) if type(ct) is not ad.Zero]
    avals = [global_aval(mesh, x.aval if i in linear else x, in_specs[i]) for i, x in enumerate(args)]

    def transposed(*values: Any) -> Any:
        constants, given = values[: len(known)], values[len(known) :]

        def of_linear(*operands: Any) -> list[Any]:
            everything = jaxprs.replaced(jaxprs.replaced(avals, known, constants), linear, operands)
            results = function(*everything)
            return [results[i] for i in wanted]

        return jax.linear_transpose(of_linear, *(avals[i] for i in linear))(list(given))

    closed = _jaxpr(transposed, *(avals[i] for i in known), *(global_aval(mesh, cts[i], out_specs[i]) for i in wanted))
    results = apply(closed, mesh, [*(args[i] for i in known), *(cts[i] for i in wanted)])
    given = [zero_if_none(ct, args[i].aval) for i, ct in zip(linear, results, strict=True)]
    return jaxprs.replaced([None] * len(args), linear, given)


def _batching_rule(
    axis_data: Any,
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    body: Any,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    check_vma: bool,
    **_: Any,
) -> Any:
    batch = device_program.batch(axis_data, args, dims, body=body, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    function = _shard_map(batch.function, mesh, tuple(batch.in_specs), batch.out_specs, check_vma)
    closed = _jaxpr(function, *map(partial(global_aval, mesh), batch.operands, batch.in_specs))
    return apply(closed, mesh, batch.operands), batch.out_dims


def _error_check_rule(
    error: Any,
    enabled: Any,
    *args: Any,
    body: Any,
    mesh: Mesh,
    in_specs: Any,
    out_specs: Any,
    check_vma: bool,
    **_: Any,
) -> tuple[Any, list[Any]]:
    def applied(fun: Callable[..., Any], operands: Sequence[Any], specs: Any, own: PartitionSpec) -> list[Any]:
        function = _shard_map(fun, mesh, tuple(specs), (own, list(out_specs)), check_vma)
        return apply(_jaxpr(function, *map(partial(global_aval, mesh), operands, specs)), mesh, operands)

    return device_program.return_errors(error, enabled, args, body=body, mesh=mesh, in_specs=in_specs, apply=applied)


def _check(*, body: Any, mesh: Mesh, check_vma: bool, **_: Any) -> None:
    """Checks a body under its axes and types, for ``jax_enable_checks``."""
    _jaxpr(_shard_map(lambda: jax_internals.check(body), mesh, (), None, check_vma))


jax_internals.check_with(shard_map_p, _check)
jax_internals.return_errors_with(shard_map_p, _error_check_rule)
ad.primitive_jvps[shard_map_p] = _jvp_rule
ad.primitive_transposes[shard_map_p] = _transpose_rule
batching.fancy_primitive_batchers[shard_map_p] = _batching_rule


def _with_axes_bound(params: dict[str, Any], call: Callable[[], Any]) -> Any:
    mapped = partial(_shard_map, mesh=params["mesh"], in_specs=(), out_specs=(), check_vma=params["check_vma"])
    return checkpoints.call_inside(lambda fun: _jaxpr(mapped(fun)), call)


def _own_axes(params: dict[str, Any], aval: Any) -> tuple[Any, ...]:
    varying = jax_internals.varying_axes_of(aval) if params["check_vma"] else params["mesh"].shape
    return tuple(name for name in params["mesh"].shape if name in varying)


checkpoints.register(shard_map_p, _with_axes_bound, _own_axes)
