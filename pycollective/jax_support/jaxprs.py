"""Jaxprs: what an equation reads and holds, evaluation with some equations changed, and the replacement of jaxprs."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.extend.core import primitives as jax_primitives
from jax.interpreters import batching

from pycollective.jax_support import jax_internals

P = ParamSpec("P")
R = TypeVar("R")

NO_MESH = jax.sharding.AbstractMesh((), ())
"""The mesh of a trace that is inside no :func:`jax.shard_map`."""

Equation = Callable[[JaxprEqn, list[Any]], Sequence[Any]]
"""A function from an equation and its operands to its results."""


def abstract_mesh(sizes: Mapping[Any, int]) -> jax.sharding.AbstractMesh:
    """A mesh with axes of these names and sizes, of the type ``Auto``, so that types of arrays do not name them."""
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return jax.sharding.AbstractMesh(tuple(sizes.values()), tuple(sizes), axis_types=types)


def replaced(items: Sequence[Any], places: Sequence[int], values: Sequence[Any]) -> list[Any]:
    """``items``, where the items in ``places`` are replaced by ``values``."""
    filled = list(items)
    for place, value in zip(places, values, strict=True):
        filled[place] = value
    return filled


def split_arrays(args: Any, kwargs: Any) -> tuple[list[Any], Callable[[Sequence[Any]], tuple[Any, Any]]]:
    """The arrays among the arguments of a traced function, and a function that puts other arrays in their places.

    The other arguments are static: :func:`jax.jit` does not trace them.
    """
    leaves, tree = jax.tree.flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, (jax.Array, np.ndarray))]

    def with_arrays(arrays: Sequence[Any]) -> tuple[Any, Any]:
        args, kwargs = jax.tree.unflatten(tree, replaced(leaves, places, arrays))
        return args, kwargs

    return [leaves[place] for place in places], with_arrays


def _sequence_like(value: Any, parts: Sequence[Any]) -> Any:
    """``parts`` as a sequence of the type of ``value``: a tuple, a named tuple or a list."""
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)


_NAMES_OF_PLAIN = """
    abs add and argmax argmin broadcast_in_dim clamp concatenate convert_element_type copy cos cumsum div dot_general
    dynamic_slice dynamic_update_slice eq exp exp2 expm1 floor gather ge gt integer_pow iota is_finite le log log1p
    logistic lt max min mul ne neg not or pad pow reduce_max reduce_min reduce_sum rem reshape rev rsqrt select_n sign
    sin slice sort sqrt square squeeze stop_gradient sub tanh transpose
"""

PLAIN = frozenset(getattr(jax_primitives, f"{name}_p", None) for name in _NAMES_OF_PLAIN.split())
"""Primitives of JAX whose parameters hold no program and name no axis.

Most equations of a program have one of them. Each pass asks this first: a step has thousands of equations, of which
the pass looks for a few.
"""


def inner_jaxprs(eqn: Any) -> Sequence[Any]:
    """The jaxprs in the parameters of an equation, without their constants."""
    if eqn.primitive in PLAIN:
        return ()
    found: list[Any] = []
    for value in eqn.params.values():
        if isinstance(value, (tuple, list)):
            found += [part for part in value if isinstance(part, (ClosedJaxpr, Jaxpr))]
        elif isinstance(value, (ClosedJaxpr, Jaxpr)):
            found.append(value)
    return [part.jaxpr if isinstance(part, ClosedJaxpr) else part for part in found]


def all_equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    """The equations of a program and of the programs in it. Each equation comes before the equations inside it."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive not in PLAIN:
            for inner in inner_jaxprs(eqn):
                yield from all_equations(inner)


def not_plain_equations(jaxpr: Any) -> Iterator[JaxprEqn]:
    """Those of :func:`all_equations` whose primitives are not plain."""
    for eqn in jaxpr.eqns:
        if eqn.primitive not in PLAIN:
            yield eqn
            for inner in inner_jaxprs(eqn):
                yield from not_plain_equations(inner)


def reads(reader: JaxprEqn | Jaxpr) -> list[Var]:
    """The variables that an equation reads, or that a program returns."""
    atoms = reader.outvars if isinstance(reader, Jaxpr) else reader.invars
    return [atom for atom in atoms if isinstance(atom, Var)]


def all_reads(jaxpr: Any) -> set[Var]:
    """The variables that some equation of a program reads, or that it returns."""
    return {var for reader in (*jaxpr.eqns, jaxpr) for var in reads(reader)}


def is_reshape(eqn: JaxprEqn) -> bool:
    """Whether an equation only gives an array another shape, for which XLA does nothing."""
    if eqn.primitive.name not in ("reshape", "squeeze", "broadcast_in_dim", "expand_dims"):
        return False
    source, (result,) = eqn.invars[0], eqn.outvars
    return isinstance(source, Var) and source.aval.size == result.aval.size


@contextmanager
def at_line_of(eqn: JaxprEqn, mesh: Any) -> Iterator[None]:
    """Gives new equations the user's line and scopes of ``eqn``, but not the mesh under which it was traced.

    Args:
        eqn: the equation.
        mesh: the mesh of the new equations.
    """
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with (
        source_info_util.user_context(eqn.source_info.traceback, name_stack=stack),
        eqn.ctx.manager,
        jax.sharding.use_abstract_mesh(NO_MESH),  # JAX refuses one mesh inside another, so leave it first
        jax.sharding.use_abstract_mesh(mesh),
    ):
        yield


def evaluate(closed: ClosedJaxpr, equation: Equation, *args: Any) -> list[Any]:
    """Evaluates ``closed`` for ``args`` under the caller's trace and mesh; ``equation`` evaluates each equation."""
    jaxpr = closed.jaxpr
    mesh = jax.sharding.get_abstract_mesh()
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *args], strict=True))

    def read(atom: Any) -> Any:
        # The type of a literal may name the mesh of its trace; an array of NumPy names none.
        if isinstance(atom, Literal):
            return np.asarray(atom.val) if isinstance(atom.val, np.ndarray) else atom.val
        return values[atom]

    for eqn in jaxpr.eqns:
        with at_line_of(eqn, mesh):
            results = equation(eqn, list(map(read, eqn.invars)))
        values.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, jaxpr.outvars))


def bind(eqn: JaxprEqn, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    """Binds the primitive of an equation to other operands and parameters."""
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return results if eqn.primitive.multiple_results else [results]


def rebind(eqn: JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    """Binds the primitive of an equation to other operands, with the parameters that the equation has."""
    return bind(eqn, operands, eqn.params)


def with_constants_as_inputs(jaxpr: Any) -> Any:
    """A jaxpr whose constants are its first inputs."""
    return jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars])


def as_function(jaxpr: Any) -> Callable[..., list[Any]]:
    """A jaxpr without constants, as a function.

    :func:`jax.extend.core.jaxpr_as_fun` would do the same, but it switches ``jax_debug_nans`` off in this thread.
    """
    closed = ClosedJaxpr(jaxpr, ())
    return lambda *args: evaluate(closed, rebind, *args)


def bind_with_jaxprs(
    eqn: JaxprEqn, operands: Sequence[Any], change: Callable[[ClosedJaxpr], ClosedJaxpr]
) -> Sequence[Any]:
    """Binds the primitive of an equation with ``change`` applied to the jaxprs in its parameters.

    Args:
        eqn: the equation.
        operands: its new operands.
        change: maps a jaxpr to one with the same inputs and outputs.
    """
    consts: list[Any] = []

    def new(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return change(value)
        if isinstance(value, Jaxpr):  # without constants, as in checkpoint: new constants become operands
            closed = change(ClosedJaxpr(value, ()))
            consts.extend(closed.consts)
            return with_constants_as_inputs(closed.jaxpr)
        if isinstance(value, (tuple, list)):
            return _sequence_like(value, list(map(new, value)))
        return value

    params = {name: new(value) for name, value in eqn.params.items()}
    return bind(eqn, [*consts, *operands], params)


_PRIMITIVES_OF_JAX = frozenset(value for value in vars(jax_primitives).values() if isinstance(value, Primitive))


@functools.lru_cache(maxsize=4096)  # called for each equation that JAX traces
def is_foreign(primitive: Primitive) -> bool:
    """Whether another library defines the primitive by a function that JAX can trace, as Equinox does for lineax."""
    module = getattr(primitive.impl, "__module__", None) or "functools"  # JAX's eager dispatch is a functools.partial
    return primitive not in _PRIMITIVES_OF_JAX and module.partition(".")[0] not in ("jax", "functools", "pycollective")


def is_high(eqn: JaxprEqn) -> bool:
    """Whether JAX replaces the equation before it lowers a program; see :func:`jax_internals.is_high`."""
    return jax_internals.may_be_high(eqn.primitive) and jax_internals.is_high(eqn, inner_jaxprs(eqn))


def hides_program(eqn: JaxprEqn) -> bool:
    """Whether an equation stands for a function that JAX has not traced yet: its parameters do not show the program."""
    return is_foreign(eqn.primitive) or is_high(eqn)


def hidden_program(eqn: JaxprEqn, axis_env: Sequence[tuple[Any, int]]) -> ClosedJaxpr | None:
    """The program that an equation hides, traced now; None if it hides none.

    Args:
        eqn: an equation. How a hidden program uses the jaxprs in the parameters of ``eqn`` is not known.
        axis_env: names and sizes of the axes around the equation.
    """
    if is_high(eqn):
        function = jax_internals.low_level(eqn.primitive)
    elif is_foreign(eqn.primitive):
        function = eqn.primitive.impl
    else:
        return None
    avals = [aval_like(var.aval) for var in eqn.invars]
    with jax.sharding.use_abstract_mesh(NO_MESH):
        return jax.make_jaxpr(functools.partial(function, **eqn.params), axis_env=list(axis_env))(*avals)


def _batch_linear_call(
    args: Sequence[Any], dims: Sequence[int | None], *, callee: ClosedJaxpr, transpose_thunk: Any, **counts: int
) -> tuple[Any, Sequence[int]]:
    """The batching rule of JAX's ``linear_call``, which has none: both functions of the call under :func:`jax.vmap`."""
    first = counts["num_callee_consts"]
    linear = first + counts["num_res"]
    (size,) = {x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None}

    def whole(x: Any, dim: int | None) -> Any:
        return jnp.broadcast_to(x, (size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)

    def forward(fixed: Sequence[Any], xs: Sequence[Any]) -> Any:
        def one(fixed: Sequence[Any], xs: Sequence[Any]) -> list[Any]:
            return evaluate(callee, rebind, *fixed, *xs)

        return jax.vmap(one, in_axes=(list(dims[:linear]), 0))(fixed, xs)

    def backward(fixed: Sequence[Any], cts: Sequence[Any]) -> Any:
        transposed, consts = transpose_thunk()

        def one(residuals: Sequence[Any], cts: Sequence[Any]) -> list[Any]:
            return evaluate(transposed, rebind, *consts, *residuals, *cts)

        return jax.vmap(one, in_axes=(list(dims[first:linear]), 0))(fixed[first:], cts)

    xs = list(map(whole, args[linear:], dims[linear:]))
    outs = jax.custom_derivatives.linear_call(forward, backward, list(args[:linear]), xs)
    return outs, [0] * len(outs)


batching.primitive_batchers[jax_internals.linear_call_p] = _batch_linear_call


def rebuilt_shard_map(eqn: JaxprEqn, equation: Equation) -> Callable[..., Any]:
    """The :func:`jax.shard_map` of an equation as a function; ``equation`` evaluates each equation inside."""
    closed = ClosedJaxpr(eqn.params["jaxpr"], ())
    program: Callable[..., Any] = jax.shard_map(
        lambda *blocks: evaluate(closed, equation, *blocks),
        mesh=eqn.params["mesh"],
        in_specs=tuple(eqn.params["in_specs"]),
        out_specs=list(eqn.params["out_specs"]),
        check_vma=eqn.params["check_vma"],
    )
    return outside_meshes(program)


def on_devices(
    program: ClosedJaxpr,
    mesh: jax.sharding.Mesh,
    operands: Sequence[Any],
    results: Sequence[Any],
    in_specs: Sequence[jax.sharding.PartitionSpec],
    out_specs: Sequence[jax.sharding.PartitionSpec],
) -> ClosedJaxpr:
    """A program that runs ``program`` on each device of a mesh by :func:`jax.shard_map`, without its types.

    JAX traces a shard_map without operands and results, since its other parameters do not depend on them. No type
    names the mesh, as in the programs that the equations inside a shard_map hold.

    Args:
        program: the program of one device.
        mesh: the devices.
        operands: the types of the operands, outside any mesh.
        results: the types of the results, outside any mesh.
        in_specs: the spec of each operand.
        out_specs: the spec of each result.
    """
    jaxpr = with_constants_as_inputs(program.jaxpr)
    specs = (*[jax.sharding.PartitionSpec()] * len(program.consts), *in_specs), tuple(out_specs)

    def traced(function: Callable[..., Any], specs: Any, consts: Sequence[Any], operands: Sequence[Any]) -> ClosedJaxpr:
        in_specs, out_specs = specs
        with jax.sharding.use_abstract_mesh(NO_MESH):
            mapped = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
            return jax.make_jaxpr(lambda *operands: mapped(*consts, *operands))(*operands)

    # JAX's checks want the types, and the effects of references have the numbers of inputs.
    if jax.config.jax_enable_checks or jax_internals.without_references(jaxpr.effects) != jaxpr.effects:
        function = as_function(jaxpr)
        whole = list(map(aval_like, operands))
        return traced(lambda *operands: tuple(function(*operands)), specs, program.consts, whole)
    new = traced(lambda: (), ((), ()), (), ()).jaxpr
    (eqn,) = new.eqns
    params = {**eqn.params, "jaxpr": jaxpr, "in_specs": specs[0], "out_specs": specs[1]}
    effects = eqn.effects | jax_internals.without_names(jaxpr.effects, mesh.axis_names)
    constvars = [Var(var.aval) for var in program.jaxpr.constvars]
    invars, outvars = list(map(Var, operands)), list(map(Var, results))
    eqn = eqn.replace(invars=[*constvars, *invars], outvars=outvars, params=params, effects=effects)
    new = new.replace(constvars=constvars, invars=invars, outvars=outvars, eqns=[eqn], effects=effects)
    return ClosedJaxpr(new, program.consts)


def manual_sizes(mesh: jax.sharding.AbstractMesh) -> list[int]:
    """The sizes of the axes along which each device runs the program around on its own (JAX's type ``Manual``)."""
    kinds = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return [size for size, kind in kinds if kind == jax.sharding.AxisType.Manual]


def outside_meshes(fun: Callable[P, R]) -> Callable[P, R]:
    """``fun``, called as if no mesh were set around the call, so that it may use meshes of its own."""

    @functools.wraps(fun)
    def function(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.sharding.use_abstract_mesh(NO_MESH):
            return fun(*args, **kwargs)

    return function


def dependents(jaxpr: Any, sources: Iterable[Var], always: Callable[[JaxprEqn], bool] = lambda _: False) -> set[Var]:
    """The variables that depend on ``sources``, or on an equation for which ``always`` is true.

    In a jaxpr with references these are all variables: a reference carries values past the operands.
    """
    found = set(sources)
    references = any(hasattr(var.aval, "inner_aval") for eqn in jaxpr.eqns for var in eqn.outvars)
    for eqn in jaxpr.eqns:
        if references or always(eqn) or not found.isdisjoint(var for var in eqn.invars if isinstance(var, Var)):
            found.update(eqn.outvars)
    return found


def called_jaxpr(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr that an equation calls, if it is a mere call with a derivative rule of its own; else None."""
    if eqn.primitive in (jax_primitives.custom_jvp_call_p, jax_primitives.custom_vjp_call_p):
        closed: ClosedJaxpr = eqn.params["call_jaxpr"]
        return closed
    return eqn.params["callee"] if eqn.primitive.name == "linear_call" else None


def aval_like(aval: Any) -> Any:
    """An argument of :func:`jax.make_jaxpr` with the shape and dtype of ``aval``, outside any mesh."""
    if hasattr(aval, "inner_aval"):  # a reference
        return jax.ShapeDtypeStruct(aval.inner_aval.shape, aval.inner_aval.dtype, is_ref=True)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type)


def map_jaxprs(jaxpr: Any, change: Callable[[Any], Any]) -> Any:
    """Applies ``change`` to all jaxprs that the equations of ``jaxpr`` hold, from the inside out, and then to it.

    One jaxpr gives one result, itself if nothing changes: so JAX compiles a function once that is called twice.
    """
    changed: dict[int, Any] = {}
    closed: dict[Any, Any] = {}

    def with_inner_changed(jaxpr: Any) -> Any:
        if id(jaxpr) not in changed:
            eqns = [
                eqn if eqn.primitive in PLAIN or not inner_jaxprs(eqn) else with_inner(eqn, with_inner_changed, closed)
                for eqn in jaxpr.eqns
            ]
            same = all(map(operator.is_, eqns, jaxpr.eqns))
            changed[id(jaxpr)] = change(jaxpr if same else jaxpr.replace(eqns=eqns))
        return changed[id(jaxpr)]

    return with_inner_changed(jaxpr)


def with_inner(eqn: JaxprEqn, change: Callable[[Any], Any], closed: dict[Any, Any]) -> JaxprEqn:
    """An equation with ``change`` applied to the jaxprs that it holds; itself if nothing changes.

    Args:
        eqn: the equation.
        change: a function from a jaxpr to a jaxpr.
        closed: the closed jaxprs that earlier calls have made, to which this one adds. So a closed jaxpr and the new
            jaxpr in it give one closed jaxpr, which JAX compiles once.
    """

    def new_value(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            new = change(value.jaxpr)
            if new is value.jaxpr:
                return value
            return closed.setdefault((id(value), id(new)), ClosedJaxpr(new, value.consts))
        if isinstance(value, Jaxpr):
            return change(value)
        if isinstance(value, tuple) and any(isinstance(part, (Jaxpr, ClosedJaxpr)) for part in value):
            parts = [new_value(part) for part in value]
            return value if all(map(operator.is_, parts, value)) else _sequence_like(value, parts)
        return value

    params = {name: new_value(value) for name, value in eqn.params.items()}
    same = all(params[name] is value for name, value in eqn.params.items())
    return eqn if same else eqn.replace(params=params)
