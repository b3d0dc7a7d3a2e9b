"""All uses of JAX's private parts, and of public parts that JAX does not promise to keep, but for jax_dispatch.py's.

=======================================  ==============================================================
``jax._src.core.abstract_token``         the type of a token operand for ``jax.ffi.ffi_lowering``
``jax._src.core.trace_state_clean``      tells whether a call happens at top level or inside a trace
``jax._src.core.get_axis_env``           lists the axes that transforms bind, for messages
``jax._src.core.extend_axis_env_nd``     binds axes around ``jax.make_jaxpr``, whose own option ends before its checks
``jax._src.core.InternalMutableArrayEffect``  the effect of a jaxpr that makes references; its lowering removes it
``jax._src.core.NamedAxisEffect``        the effect of a jaxpr that names an axis; the binding of the axis removes it
``jax._src.effects`` (its type sets)     register an ordered effect; mpi4jax and JAX's own debug_print do the same
``mlir.jaxpr_subcomp``, ``TokenSet``     are exported, but their signature has changed before
``traceback_util.register_exclusion``    removes our frames from tracebacks and from ``jax.debug.breakpoint``, which
                                         makes constants of the values in them
``linear_call_p`` (custom_derivatives)   its abstract evaluation omits the effects of the function that it calls; ours
                                         reports them; ``jaxprs`` adds the rule for vmap, which JAX lacks
``jax._src.core.custom_typechecks``      how ``jax_enable_checks`` checks an equation whose jaxpr names axes that the
                                         equation binds; ``check_jaxpr`` and ``jaxprs_in_params``, which
                                         ``jax.extend`` exports later than JAX 0.9, check that jaxpr
``jax._src.checkify.error_checks``       how ``jax.experimental.checkify`` makes an equation return its errors
``DynamicJaxprTrace.make_eqn``           wrapped, to add the effects of primitives that other libraries define
``loops._while_lowering``                lowers each while loop but those that ``transforms`` lowers
``loops._scan_known_hoisting``           wrapped: takes what is the same in each trip out of a differentiated scan
``loops._scan_partial_eval_custom``      bound to a wrapped ``partial_eval_jaxpr_nounits``: the same for a checkpoint
``pe.partial_eval_jaxpr_custom``         divides a jaxpr as a policy of :func:`jax.checkpoint` says
``pe.ensure_enum``, ``RecomputeType``    what such a policy returns
``util.weakref_cache_key_types``         types of parameters that no cache of JAX's keeps alive
``Primitive.is_high``, ``to_lojax``      from 0.12 on JAX replaces some primitives before it lowers a program
``ir.Location.child_loc``, ``NameLoc``   the place of an operation without its name, to give it another one
``mhlo.backend_config``                  where ``jax.ffi`` has put the attributes of a call that is lowered already
``source_info.name_stack``               of an equation: whether it comes from a transpose
``aval.vma``, ``aval.manual_axis_type``  the axes along which a value varies: the first in JAX 0.9, the second later
``parallel.all_gather_invariant``        in JAX 0.9 what is ``lax.all_gather(to="invarying")`` from 0.10 on
=======================================  ==============================================================

If JAX lacks one of them, the import of this file fails with a message; ``checkify`` is imported later.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, TypeVar

import jax
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Primitive
from jax.extend.core.primitives import scan_p
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir
from jax.interpreters.mlir import ir

from pycollective.errors import message

SUPPORTED_JAX = ">= 0.9.2, < 0.13"


def unsupported(error: Exception) -> ImportError:
    """The error that this JAX lacks what we use of it."""
    got = f"jax {jax.__version__}: {error}"
    return ImportError(message("ordering", f"jax {SUPPORTED_JAX}", got, "Install a supported jax."))


try:
    from jax._src import effects as jax_effects
    from jax._src.core import (
        InternalMutableArrayEffect,
        NamedAxisEffect,
        abstract_token,
        check_jaxpr,
        custom_typechecks,
        extend_axis_env_nd,
        get_axis_env,
        jaxprs_in_params,
        trace_state_clean,
    )
    from jax._src.custom_derivatives import linear_call_p
    from jax._src.interpreters import partial_eval as pe
    from jax._src.interpreters.partial_eval import DynamicJaxprTrace
    from jax._src.lax import parallel
    from jax._src.lax.control_flow import loops
    from jax._src.traceback_util import register_exclusion as hide_frames
    from jax._src.util import weakref_cache_key_types

    _TYPE_SETS = (
        jax_effects.ordered_effects,
        jax_effects.shardable_ordered_effects,
        jax_effects.lowerable_effects,
        jax_effects.control_flow_allowed_effects,
        jax_effects.custom_derivatives_allowed_effects,
        jax_effects.remat_allowed_effects,
    )
    _SUBCOMP_PARAMETERS = frozenset(inspect.signature(mlir.jaxpr_subcomp).parameters)
    _LACKING = {"tokens", "dim_var_values"} - _SUBCOMP_PARAMETERS
    if _LACKING:
        raise ImportError(f"jaxpr_subcomp has no parameter {sorted(_LACKING)}")
    if "effects" not in inspect.signature(DynamicJaxprTrace.make_eqn).parameters:
        raise ImportError("DynamicJaxprTrace.make_eqn has no parameter effects")
    _EXPECTED = ["jaxpr_known", "known_consts"]
    if list(inspect.signature(loops._scan_known_hoisting).parameters)[:2] != _EXPECTED:
        raise ImportError(f"_scan_known_hoisting has other parameters than {_EXPECTED}")
    _EXPECTED = ["jaxpr", "unknowns", "instantiate"]
    if list(inspect.signature(pe.partial_eval_jaxpr_nounits).parameters) != _EXPECTED:
        raise ImportError(f"partial_eval_jaxpr_nounits has other parameters than {_EXPECTED}")
    _scan_rule = loops._scan_partial_eval_custom
    if not {"pe", "partial_eval_jaxpr_nounits"} <= {*_scan_rule.__code__.co_names}:
        raise ImportError("_scan_partial_eval_custom does not call pe.partial_eval_jaxpr_nounits")
    if pe.partial_eval_jaxpr_custom_rules[scan_p] is not _scan_rule:
        raise ImportError("the rule of scan is not _scan_partial_eval_custom")
    _move_to_front = pe.move_binders_to_front
except (ImportError, AttributeError, KeyError) as error:
    raise unsupported(error) from error


T = TypeVar("T")

_PACKAGE = str(Path(__file__).parents[1])
hide_frames(_PACKAGE)
source_info_util.register_exclusion(_PACKAGE)  # the line of an operation is the line of the user's call


while_lowering = loops._while_lowering
"""JAX's lowering of a while loop."""

at_top_level = trace_state_clean
"""Returns whether the call is outside all of JAX's traces."""


def keep_weakly(kind: type[T]) -> type[T]:
    """A decorator of a class whose objects are parameters of equations: only programs keep them, and no cache of JAX's.

    JAX looks the abstract evaluation of an equation up by its parameters, for all programs together.
    """
    weakref_cache_key_types.add(kind)
    return kind


def bound_axes() -> tuple[Any, ...]:
    """The names of the axes that the transforms around this call bind."""
    return tuple(get_axis_env().axis_sizes)


def axes_bound(sizes: Mapping[Any, int]) -> AbstractContextManager[None]:
    """Binds axes of these names and sizes while a function is traced."""
    bound: AbstractContextManager[None] = extend_axis_env_nd(list(sizes.items()))
    return bound


class OrderedEffect(jax_effects.Effect):  # type: ignore[misc]
    """Base class of ordered effects. Each subclass is one effect: all its objects are equal."""

    def __init_subclass__(cls) -> None:
        for types in _TYPE_SETS:
            types.add_type(cls)

    def __repr__(self) -> str:
        return type(self).__name__

    # Copies of a jaxpr hold copies of the effect: these must be equal.
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


def without_references(effects: Iterable[Any]) -> set[Any]:
    """The effects without those of references that the program itself makes."""
    return {kind for kind in effects if not isinstance(kind, InternalMutableArrayEffect)}


def without_names(effects: Iterable[Any], names: Container[Any]) -> set[Any]:
    """The effects without those that say that the program names one of these axes."""
    return {kind for kind in effects if not (isinstance(kind, NamedAxisEffect) and kind.name in names)}


def result(shape: Sequence[int], dtype: Any, *operands: Any) -> Any:
    """The type of a result: it varies along the axes of the mesh along which any operand varies."""
    varying = frozenset().union(*map(varying_axes_of, operands))
    if not varying:
        return jax.core.ShapedArray(tuple(shape), dtype)
    like = next(x for x in operands if varying_axes_of(x))
    spec = jax.sharding.PartitionSpec(*[None] * len(shape))
    # Since JAX 0.10 the names are part of a type of their own.
    kind = (
        {"vma": varying} if hasattr(like, "vma") else {"manual_axis_type": type(like.manual_axis_type)(varying=varying)}
    )
    return like.update(
        shape=tuple(shape), dtype=dtype, weak_type=False, sharding=like.sharding.update(spec=spec), **kind
    )


def varying_axes_of(aval: Any) -> frozenset[Any]:
    """The axes along which a value of this type varies; none where they are not checked."""
    names: frozenset[Any] = aval.vma if hasattr(aval, "vma") else aval.manual_axis_type.varying
    return names


def varying_axes(x: Any) -> frozenset[Any]:
    """The axes along which a value of a program varies, by JAX's types; none where they are not checked."""
    return varying_axes_of(jax.typeof(x))


def all_gather_invarying(x: Any, axis_name: Any, *, axis: int = 0, tiled: bool = False) -> Any:
    """Gathers a value that varies, by JAX's types, to one that does not; the transpose takes this device's part."""
    if jax.__version_info__ < (0, 10):
        return parallel.all_gather_invariant(x, axis_name, axis=axis, tiled=tiled)
    return jax.lax.all_gather(x, axis_name, axis=axis, tiled=tiled, to="invarying")


@linear_call_p.def_effectful_abstract_eval
def _linear_call_abstract_eval(*_: Any, callee: Any, **__: Any) -> Any:
    return callee.out_avals, callee.effects


def check(jaxpr: Any) -> None:
    """Does what JAX does to each jaxpr under ``jax_enable_checks``: raises an error if its types are wrong."""
    check_jaxpr(jaxpr)


def check_with(
    primitive: Primitive,
    inside: Callable[..., None],
    effects: Callable[[Sequence[Any], dict[str, Any], Iterable[Any]], Iterable[Any]] = lambda _, __, declared: declared,
) -> None:
    """Sets how ``jax_enable_checks`` checks an equation.

    JAX itself would check the jaxprs of a primitive without the axes that the primitive binds.

    Args:
        primitive: the primitive of the equation.
        inside: called with the parameters; it checks the jaxprs in them.
        effects: the effects of the equation, from its operands, its parameters and the effects that its primitive
            declares.
    """

    def typecheck(_: Any, *operands: Any, **params: Any) -> Any:
        inside(**params)
        outs, declared = primitive.abstract_eval(*(x.aval for x in operands), **params)
        return outs if primitive.multiple_results else [outs], set(effects(operands, params, declared))

    custom_typechecks[primitive] = typecheck


def _check_inner_jaxprs(**params: Any) -> None:
    for jaxpr in jaxprs_in_params(params):
        check(jaxpr)


_ERROR_CHECKS: dict[Primitive, Callable[..., Any]] = {}


def return_errors_with(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Sets how ``jax.experimental.checkify`` makes an equation return its errors; :func:`checkify` tells it.

    Args:
        primitive: the primitive of the equation.
        rule: a function from the errors so far, the kinds of errors to find, the operands, and the parameters by
            keyword, to the errors and the results.
    """
    _ERROR_CHECKS[primitive] = rule


@functools.cache
def checkify() -> Any:
    """The module ``jax.experimental.checkify``, told the rules of :func:`return_errors_with`.

    It must be called before such a primitive is first used. It is not part of ``import jax``, and takes 10 ms.
    """
    try:
        module = importlib.import_module("jax._src.checkify")
        numbered = hasattr(module, "CheckifyContext")  # since JAX 0.12
        rules = {primitive: _numbered(rule) if numbered else rule for primitive, rule in _ERROR_CHECKS.items()}
        module.error_checks.update(rules)
    except (ImportError, AttributeError) as error:
        raise unsupported(error) from error
    return module


def _numbered(rule: Callable[..., Any]) -> Callable[..., Any]:
    """A rule that gives new errors the numbers behind those that JAX's context has given to others.

    JAX numbers the errors that the rule finds behind those in the names of the errors so far. So a name that nothing
    has stands for the last number of the context, while the rule is called.
    """

    def with_context(context: Any, error: Any, *args: Any, **params: Any) -> tuple[Any, Any]:
        first = context.current_code
        names = {first - 1: None, **error._metadata} if first else error._metadata
        found, results = rule(error._replace(_metadata=names), *args, **params)
        names = {number: name for number, name in found._metadata.items() if name is not None}
        context.advance(max(0, 1 + max(names, default=-1) - first))
        return found._replace(_metadata=names), results

    return with_context


def report_effects(of: Callable[[Primitive, Sequence[Any], dict[str, Any], Iterable[Any]], Iterable[Any]]) -> None:
    """Lets JAX record the effects that ``of`` reports for each equation.

    Args:
        of: a function from the primitive, its operands, its parameters and the effects that it declares to effects.
    """
    make_eqn = DynamicJaxprTrace.make_eqn

    @functools.wraps(make_eqn)
    def reporting(
        self: Any, in_tracers: Any, out_avals: Any, primitive: Any, params: Any, effects: Any, *args: Any, **kwargs: Any
    ) -> Any:
        reported = of(primitive, in_tracers, params, effects)
        if reported and not effects and primitive not in custom_typechecks:  # or JAX's check finds other effects
            check_with(primitive, _check_inner_jaxprs, functools.partial(of, primitive))
        return make_eqn(self, in_tracers, out_avals, primitive, params, reported, *args, **kwargs)

    DynamicJaxprTrace.make_eqn = reporting


def keep_in_loops(effect: OrderedEffect) -> None:
    """Lets each trip of a scan make its calls with ``effect`` when JAX divides the scan, to differentiate it.

    JAX evaluates what depends on the constants of the scan alone once, before the loop. It drops the equations whose
    results nothing uses. It asks for no effects, so a scan with ``effect`` is left as it is here.
    """
    hoist, divide = loops._scan_known_hoisting, pe.partial_eval_jaxpr_nounits

    @functools.wraps(hoist)
    def hoisting(jaxpr: Any, constants: list[Any], residuals: int, *others: Any) -> Any:
        if effect in jaxpr.effects:
            return jaxpr, constants, [False] * residuals, []
        return hoist(jaxpr, constants, residuals, *others)

    @functools.wraps(divide)
    def dividing(jaxpr: Any, unknowns: Sequence[bool], instantiate: Any) -> Any:
        if effect not in jaxpr.effects:
            return divide(jaxpr, unknowns, instantiate)
        # The first part, before the loop, only hands the constants on; those that are references stay in their places.
        known = [not each for each in unknowns]
        avals = [aval for aval, before in zip(jaxpr.in_avals, known, strict=True) if before]
        handed_on = jax.make_jaxpr(lambda *xs: xs)(*(jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals))
        unnamed = handed_on.jaxpr.replace(debug_info=handed_on.jaxpr.debug_info.with_unknown_names())
        return ClosedJaxpr(unnamed, []), _move_to_front(jaxpr, known), [True] * len(jaxpr.out_avals), avals

    loops._scan_known_hoisting = hoisting
    of_rule = SimpleNamespace(**{**vars(pe), divide.__name__: dividing})
    rule = FunctionType(_scan_rule.__code__, {**vars(loops), "pe": of_rule}, _scan_rule.__name__)
    pe.partial_eval_jaxpr_custom_rules[scan_p] = rule


def allow_in_checkpoint(effect: jax_effects.Effect) -> None:
    """Lets :func:`jax.checkpoint` repeat operations with an effect of this type."""
    jax_effects.remat_allowed_effects.add_type(type(effect))


def saves(policy: Any) -> bool:
    """Whether a policy of :func:`jax.checkpoint` saves a result, by what it returned. An offloaded result is saved."""
    return not isinstance(pe.ensure_enum(policy), pe.RecomputeType)


def divided_by_policy(jaxpr: Any, inst_in: Sequence[bool], policy: Callable[..., Any]) -> tuple[Any, Any, list[bool]]:
    """Divides a jaxpr as a policy of :func:`jax.checkpoint` says.

    Args:
        jaxpr: a jaxpr without constants.
        inst_in: which of its inputs the second part may have as they are.
        policy: the policy.

    Returns:
        The jaxpr of the first part, which returns all results and then the residuals; the jaxpr of the second part,
        whose inputs are the residuals and then those of ``inst_in``; which results the second part returns.
    """
    unknown = [False] * len(jaxpr.invars)
    first, second, _, inst_out, _ = pe.partial_eval_jaxpr_custom(jaxpr, unknown, list(inst_in), False, False, policy)
    return first, second, inst_out


def effects_kept_by_checkpoint(effects: Iterable[Any]) -> set[Any]:
    """The effects for which :func:`jax.checkpoint` keeps the results of an equation."""
    return {kind for kind in effects if not isinstance(kind, (NamedAxisEffect, InternalMutableArrayEffect))}


def is_high(eqn: Any, inner: Sequence[Any]) -> bool:
    """Whether JAX 0.12 and later replaces the equation by others before it lowers a program, as for lax.custom_root.

    Args:
        eqn: an equation.
        inner: the jaxprs in its parameters.
    """
    only_inside = any(jaxpr.is_high for jaxpr in inner)
    return not only_inside and bool(eqn.primitive.is_high(*(var.aval for var in eqn.invars), **eqn.params))


@functools.lru_cache(maxsize=4096)  # called for each equation that this package looks at
def may_be_high(primitive: Primitive) -> bool:
    """Whether :func:`is_high` may be true for an equation of this primitive: it has a rule of its own for that."""
    return getattr(primitive.is_high, "__func__", primitive.is_high) is not Primitive.is_high


def low_level(primitive: Primitive) -> Callable[..., Any]:
    """The function by which JAX replaces a primitive that :func:`is_high`."""
    function: Callable[..., Any] = primitive.to_lojax
    return function


def never_high(primitive: Primitive) -> None:
    """Tells JAX not to replace this primitive, whatever jaxprs its parameters hold."""
    primitive.is_high = lambda *_, **__: False


def _subcomp(ctx: Any, jaxpr: Any, tokens: Any, args: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """Lowers ``jaxpr`` in the place of the equation of ``ctx``; ``args`` are its constants and inputs."""
    optional = {"const_lowering": getattr(ctx, "const_lowering", None), "outer_traceback": None}
    constants = len(jaxpr.constvars)
    outs, tokens_out = mlir.jaxpr_subcomp(
        ctx.module_context,
        jaxpr,
        ctx.name_stack,
        tokens,
        args[:constants],
        *args[constants:],
        dim_var_values=ctx.dim_var_values,
        **{name: value for name, value in optional.items() if name in _SUBCOMP_PARAMETERS},
    )
    return outs, tokens_out


def counts_of_scan(eqn: Any) -> tuple[int, int]:
    """How many of a scan's operands are constants, and how many carries follow them."""
    if "ft_in" not in eqn.params:  # before JAX 0.12
        return eqn.params["num_consts"], eqn.params["num_carry"]
    constants, carries, _ = eqn.params["ft_in"].unpack()
    return len(list(constants)), len(list(carries))


def location_named(ctx: Any, name: str) -> ir.Location:
    """The place of the operation that is lowered now, where XLA calls it ``name``: profiles show that name.

    Args:
        ctx: the context of the lowering.
        name: letters, digits and ``_``; XLA makes ``_`` of others.
    """
    loc = ir.Location.current
    while _is_name(loc) and not _is_file(loc.child_loc):  # a place in a file has the name of its function
        loc = loc.child_loc
    scope = str(ctx.name_stack)
    return ir.Location.name(f"{scope}/{name}" if scope else name, childLoc=loc)


def is_transposed(eqn: Any) -> bool:
    """Whether an equation comes from a transpose, by JAX's names of scopes. In a scan only the scan itself shows it."""
    return re.search(r"\btranspose\(", str(eqn.source_info.name_stack)) is not None


def _is_name(loc: ir.Location) -> bool:
    return isinstance(loc, ir.NameLoc) if hasattr(ir, "NameLoc") else loc.is_a_name()  # the second in JAX 0.9


def _is_file(loc: ir.Location) -> bool:
    return isinstance(loc, ir.FileLineColLoc) if hasattr(ir, "FileLineColLoc") else loc.is_a_file()


def lower_call(
    ctx: Any, effect: OrderedEffect, call: Callable[..., Any], operands: Sequence[Any], attributes: dict[str, Any]
) -> Sequence[Any]:
    """Lowers a call whose first operand and first result are tokens of ``effect``."""
    inner = ctx.replace(avals_in=(abstract_token, *ctx.avals_in), avals_out=(abstract_token, *ctx.avals_out))
    token, *results = call(inner, ctx.tokens_in.get(effect), *operands, **attributes)
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({effect: token})))
    return results


def lower_on_results(ctx: Any, call: Callable[..., Any], results: Sequence[Any]) -> Sequence[Any]:
    """Lowers a call that gets the results of an equation and has results of the same shapes and dtypes."""
    return call(ctx.replace(avals_in=ctx.avals_out), *results)


def set_attribute(call: ir.Operation, name: str, value: int) -> None:
    """Changes an attribute, an int64, of a handler's call that is lowered already."""
    attributes = {each.name: each.attr for each in ir.DictAttr(call.attributes["mhlo.backend_config"])}
    attributes[name] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), value)
    call.attributes["mhlo.backend_config"] = ir.DictAttr.get(attributes)


def lower_inline(ctx: Any, jaxpr: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Lowers a jaxpr in the place of an equation, with the tokens of the program around."""
    outs, tokens_out = _subcomp(ctx, jaxpr, ctx.tokens_in, operands)
    ctx.set_tokens_out(tokens_out)
    return outs


def lower_between(
    ctx: Any,
    effect: OrderedEffect,
    before: tuple[Callable[..., Any], dict[str, Any]],
    jaxpr: Any,
    after: tuple[Callable[..., Any], dict[str, Any]],
    operands: Sequence[Any],
) -> Sequence[Any]:
    """Lowers a jaxpr in the place of an equation, between two calls that have tokens and attributes but no results.

    The first call gets the operands, the second one the results.
    """
    first = ctx.replace(avals_out=())
    lower_call(first, effect, before[0], operands, before[1])
    inside = ctx.replace(tokens_in=first.tokens_out)
    results = lower_inline(inside, jaxpr, operands)
    last = ctx.replace(avals_in=ctx.avals_out, avals_out=(), tokens_in=inside.tokens_out)
    lower_call(last, effect, after[0], results, after[1])
    ctx.set_tokens_out(last.tokens_out)
    return results


def lower_with_new_token(
    ctx: Any, effect: OrderedEffect, jaxpr: Any, operands: Sequence[Any], as_function: Callable[[Any], Any]
) -> Sequence[Any]:
    """Lowers a jaxpr with a new token for ``effect``; the tokens of other effects come from the program around.

    Args:
        ctx: the context of the lowering.
        effect: the effect with a new token.
        jaxpr: the jaxpr.
        operands: the values of its constants and inputs.
        as_function: makes a function from a jaxpr without constants.
    """
    tokens = mlir.TokenSet({**dict(ctx.tokens_in.items()), effect: stablehlo.create_token()})
    if without_references(jaxpr.effects) == jaxpr.effects:
        outs, tokens_out = _subcomp(ctx, jaxpr, tokens, operands)
    else:  # JAX turns references into values only when it lowers a function
        inner = ctx.replace(tokens_in=tokens)
        body = as_function(jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]))
        outs, tokens_out = mlir.lower_fun(body)(inner, *operands), inner.tokens_out
    if len(ctx.tokens_in):  # the body has other ordered effects, such as jax.debug.print(ordered=True)
        ctx.set_tokens_out(tokens_out.subset([kind for kind, _ in ctx.tokens_in.items()]))
    return outs
