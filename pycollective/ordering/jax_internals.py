"""Each use of JAX beyond its public API, and of what its public API does not promise. No other file has any.

=======================================  ==============================================================
``jax._src.core.abstract_token``         the type of a token operand, which ``jax.ffi.ffi_lowering`` knows
``jax._src.core.trace_state_clean``      tells whether a call happens at top level or inside a trace
``jax._src.core.get_axis_env``           has the axes that transforms bind, for messages
``jax._src.core.InternalMutableArrayEffect``  a jaxpr that makes references has it; its lowering removes it
``jax._src.core.NamedAxisEffect``        a jaxpr that names an axis has it; who binds the axis removes it
``jax._src.effects`` (its type sets)     register an ordered effect; mpi4jax and JAX's own debug_print do the same
``mlir.jaxpr_subcomp``, ``TokenSet``     exported, but their signature has changed before
``jax._src.dispatch.RuntimeTokenSet``    two of its methods are wrapped, to see each dispatch of a program with our
                                         effect
``traceback_util.register_exclusion``    removes our frames from tracebacks and from ``jax.debug.breakpoint``, which
                                         makes constants of what it finds in them
``linear_call_p`` (custom_derivatives)   its abstract evaluation forgets the effects of the function that it calls
``DynamicJaxprTrace.make_eqn``           wrapped, to see the effects of primitives that other libraries define
``Primitive.is_high``, ``to_lojax``      from 0.12 on JAX replaces some primitives by others before it lowers a program
``aval.vma``, ``aval.manual_axis_type``  the axes along which a value varies; the second from 0.10 on
=======================================  ==============================================================

A JAX that lacks one of them is refused when this file is imported.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend import source_info_util
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from pycollective.errors import message

SUPPORTED_JAX = ">= 0.9, < 0.13"

try:
    from jax._src import effects as jax_effects
    from jax._src.core import (
        InternalMutableArrayEffect,
        NamedAxisEffect,
        abstract_token,
        get_axis_env,
        trace_state_clean,
    )
    from jax._src.custom_derivatives import linear_call_p
    from jax._src.dispatch import RuntimeTokenSet
    from jax._src.interpreters.partial_eval import DynamicJaxprTrace
    from jax._src.traceback_util import register_exclusion as hide_frames

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
    for _method, _expected in (("get_token_input", ["eff", "devices"]), ("set_token_result", ["eff", "token"])):
        if list(inspect.signature(getattr(RuntimeTokenSet, _method)).parameters) != ["self", *_expected]:
            raise ImportError(f"RuntimeTokenSet.{_method} has other parameters than {_expected}")
except (ImportError, AttributeError) as error:
    raise ImportError(
        message("ordering", f"jax {SUPPORTED_JAX}", f"jax {jax.__version__}: {error}", "Install a supported jax.")
    ) from error


_PACKAGE = str(Path(__file__).parents[1])
hide_frames(_PACKAGE)
source_info_util.register_exclusion(_PACKAGE)  # the line of an operation is that of the user's call


at_top_level = trace_state_clean
"""Whether a call made now is outside every JAX trace."""


def bound_axes() -> tuple[Any, ...]:
    """The names of the axes that transforms around this call bind."""
    return tuple(get_axis_env().axis_sizes)


class OrderedEffect(jax_effects.Effect):  # type: ignore[misc]
    """Base class of an ordered effect: a subclass names it. All objects of a subclass are one effect."""

    def __init_subclass__(cls) -> None:
        for types in _TYPE_SETS:
            types.add_type(cls)

    def __repr__(self) -> str:
        return type(self).__name__

    # Equal by type, so that copies of a jaxpr agree.
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


def without_references(effects: Iterable[Any]) -> set[Any]:
    """The effects, but for those of references that a program makes for itself."""
    return {kind for kind in effects if not isinstance(kind, InternalMutableArrayEffect)}


def without_names(effects: Iterable[Any], names: Container[Any]) -> set[Any]:
    """The effects, but for those that say that a program names one of these axes."""
    return {kind for kind in effects if not (isinstance(kind, NamedAxisEffect) and kind.name in names)}


def result(shape: Sequence[int], dtype: Any, *operands: Any) -> Any:
    """The type of a result: it varies along the axes of a :func:`jax.shard_map` around along which an operand does."""
    varying = frozenset().union(*map(_varying, operands))
    if not varying:
        return jax.core.ShapedArray(tuple(shape), dtype)
    like = next(x for x in operands if _varying(x))
    spec = jax.sharding.PartitionSpec(*[None] * len(shape))
    # JAX 0.10 has put the names into a type of their own.
    kind = (
        {"vma": varying} if hasattr(like, "vma") else {"manual_axis_type": type(like.manual_axis_type)(varying=varying)}
    )
    return like.update(
        shape=tuple(shape), dtype=dtype, weak_type=False, sharding=like.sharding.update(spec=spec), **kind
    )


def _varying(x: Any) -> frozenset[Any]:
    names: frozenset[Any] = x.vma if hasattr(x, "vma") else x.manual_axis_type.varying
    return names


@linear_call_p.def_effectful_abstract_eval
def _linear_call_abstract_eval(*_: Any, callee: Any, **__: Any) -> Any:
    return callee.out_avals, callee.effects


def report_effects(of: Callable[[Primitive, Sequence[Any], dict[str, Any]], Iterable[Any]]) -> None:
    """Lets JAX record the effects that ``of`` reports in equations whose primitives say that they have none.

    Args:
        of: gets the primitive, the types of the operands and the parameters, and returns effects.
    """
    make_eqn = DynamicJaxprTrace.make_eqn

    @functools.wraps(make_eqn)
    def reporting(
        self: Any, in_tracers: Any, out_avals: Any, primitive: Any, params: Any, effects: Any, *args: Any, **kwargs: Any
    ) -> Any:
        effects = effects or of(primitive, in_tracers, params)
        return make_eqn(self, in_tracers, out_avals, primitive, params, effects, *args, **kwargs)

    DynamicJaxprTrace.make_eqn = reporting


def see_each_dispatch(
    effect: OrderedEffect, before: Callable[[Sequence[jax.Device]], None], after: Callable[[Any], None]
) -> None:
    """Calls functions around each program with ``effect`` that JAX itself dispatches.

    JAX hands such a program a token, which puts it behind the last program with the same effect.

    Args:
        effect: of the programs.
        before: gets the devices of a program before its dispatch.
        after: gets the token that the program returns, after its dispatch.
    """
    token_input, token_result = RuntimeTokenSet.get_token_input, RuntimeTokenSet.set_token_result

    @functools.wraps(token_input)
    def get_token_input(self: Any, eff: Any, devices: Any) -> Any:
        if eff == effect:
            before(devices)
        return token_input(self, eff, devices)

    @functools.wraps(token_result)
    def set_token_result(self: Any, eff: Any, token: Any) -> None:
        token_result(self, eff, token)
        if eff == effect:
            after(token)

    RuntimeTokenSet.get_token_input, RuntimeTokenSet.set_token_result = get_token_input, set_token_result


def is_high(eqn: Any, inner: Sequence[Any]) -> bool:
    """Whether JAX itself, from 0.12 on, replaces the equation by others before it lowers a program: lax.custom_root.

    Args:
        eqn: an equation.
        inner: the jaxprs in its parameters.
    """
    held = any(jaxpr.is_high for jaxpr in inner)
    return not held and bool(eqn.primitive.is_high(*(var.aval for var in eqn.invars), **eqn.params))


def low_level(primitive: Primitive) -> Callable[..., Any]:
    """By which JAX replaces a primitive that :func:`is_high`."""
    function: Callable[..., Any] = primitive.to_lojax
    return function


def never_high(primitive: Primitive) -> None:
    """Tells JAX that nothing replaces this primitive, whatever jaxprs its parameters hold."""
    primitive.is_high = lambda *_, **__: False


def _subcomp(ctx: Any, jaxpr: Any, tokens: Any, args: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """Lowers ``jaxpr`` with ``args`` for its constants and inputs, in the place that ``ctx`` says."""
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


def lower_call(
    ctx: Any, effect: OrderedEffect, call: Callable[..., Any], operands: Sequence[Any], attributes: dict[str, Any]
) -> Sequence[Any]:
    """Lowers a call whose first operand and first result are tokens: it takes and leaves the token of ``effect``."""
    inner = ctx.replace(avals_in=(abstract_token, *ctx.avals_in), avals_out=(abstract_token, *ctx.avals_out))
    token, *results = call(inner, ctx.tokens_in.get(effect), *operands, **attributes)
    ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({effect: token})))
    return results


def lower_inline(ctx: Any, jaxpr: Any, operands: Sequence[Any]) -> Sequence[Any]:
    """Lowers a jaxpr in the place of an equation: its tokens are those of the program around."""
    outs, tokens_out = _subcomp(ctx, jaxpr, ctx.tokens_in, operands)
    ctx.set_tokens_out(tokens_out)
    return outs


def lower_with_new_token(
    ctx: Any, effect: OrderedEffect, jaxpr: Any, operands: Sequence[Any], as_function: Callable[[Any], Any]
) -> Sequence[Any]:
    """Lowers a jaxpr with a token of its own for ``effect``; those of other effects come from the program around.

    Args:
        ctx: of the lowering.
        effect: has a token that begins here.
        jaxpr: what to lower.
        operands: values of its constants and inputs.
        as_function: makes a function from a jaxpr without constants.
    """
    tokens = mlir.TokenSet({**dict(ctx.tokens_in.items()), effect: stablehlo.create_token()})
    if without_references(jaxpr.effects) == jaxpr.effects:
        outs, tokens_out = _subcomp(ctx, jaxpr, tokens, operands)
    else:  # JAX turns references into values where it lowers a function
        inner = ctx.replace(tokens_in=tokens)
        body = as_function(jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]))
        outs, tokens_out = mlir.lower_fun(body)(inner, *operands), inner.tokens_out
    if len(ctx.tokens_in):  # the body has ordered effects of others, such as jax.debug.print(ordered=True)
        ctx.set_tokens_out(tokens_out.subset([kind for kind, _ in ctx.tokens_in.items()]))
    return outs
