"""The order of MPI calls: JAX's ordered effect, the token in the lowering, and the region.

MPI needs every rank to make the same calls in the same order, while XLA's CPU runtime runs independent calls
concurrently. So each of our primitives carries an ordered effect, and its lowering takes and returns XLA's token;
JAX itself threads the token through scan, while, cond and nested jit.

A program with an ordered effect leaves JAX's fast dispatch. Hence the *region*: one primitive without effects
whose body is lowered with a token of its own. Inside, the order is that token's; between programs it is that of their
turns (``turns``). A region must be a whole program: inside another one two regions would have no order between them.

This is the only file that uses JAX beyond its public API:

=====================================  ==============================================================
``jax._src.core.abstract_token``       the aval of a token operand, which ``jax.ffi.ffi_lowering`` knows
``jax._src.core.trace_state_clean``    whether a call happens at top level or inside a trace
``jax._src.core.get_axis_env``         the axes that transforms bind, for messages
``InternalMutableArrayEffect``           of a jaxpr that makes references: its lowering takes them away
``NamedAxisEffect``                     of a jaxpr that names an axis: who binds the axis takes it away
``jax._src.effects`` (its type sets)   to register an ordered effect; mpi4jax and jax's own debug_print
                                       do the same
``mlir.jaxpr_subcomp``, ``TokenSet``   exported, but their signature has changed before
``jax._src.dispatch.RuntimeTokenSet``  to see each dispatch of a program with our effect (two methods wrapped)
``traceback_util.register_exclusion``  to leave our frames out of tracebacks and of ``jax.debug.breakpoint``,
                                       which makes constants of what it finds in them
``linear_call_p`` (custom_derivatives) its abstract evaluation forgets the effects of what it calls
``DynamicJaxprTrace.make_eqn``         to see that of the primitives that other libraries define (wrapped)
=====================================  ==============================================================
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Container, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, Primitive, Var
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from pycollective import turns
from pycollective.errors import message
from pycollective.jaxprs import again, evaluate, function, inner_jaxprs, is_foreign, is_reshape, split_arrays

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


_PACKAGE = str(Path(__file__).parent)
hide_frames(_PACKAGE)
source_info_util.register_exclusion(_PACKAGE)  # an operation's line is that of the user's call


class OrderedCollective(jax_effects.Effect):  # type: ignore[misc]
    """The effect of every primitive here: it speaks with other ranks, so its place in the program matters."""

    def __repr__(self) -> str:
        return "OrderedCollective"

    # One effect for all communicators: calls on two of them must keep one order too, or ranks that meet on both
    # could wait for each other. Equal by type, so that copies of a jaxpr agree.
    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


for _types in _TYPE_SETS:
    _types.add_type(OrderedCollective)

effect = OrderedCollective()

token_aval = abstract_token
"""The type of a token."""


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


@functools.lru_cache(maxsize=4096)
def _effects_of_program(primitive: Primitive, avals: tuple[Any, ...], params: tuple[tuple[str, Any], ...]) -> Any:
    structs = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in avals]
    closed = jax.make_jaxpr(lambda *operands: primitive.impl(*operands, **dict(params)))(*structs)
    return frozenset({effect} & closed.jaxpr.effects)


def _report_effects_of_programs() -> None:
    """Lets the equations of other libraries' primitives have our effect where their programs have it."""
    make_eqn = DynamicJaxprTrace.make_eqn

    @functools.wraps(make_eqn)
    def reporting(
        self: Any, in_tracers: Any, out_avals: Any, primitive: Any, params: Any, effects: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if not effects and is_foreign(primitive):
            avals = tuple(tracer.aval for tracer in in_tracers)
            # One that JAX cannot trace, or whose parameters it could not compare, holds no collective of ours.
            with contextlib.suppress(
                AssertionError, AttributeError, LookupError, NameError, NotImplementedError, TypeError, ValueError
            ):
                effects = _effects_of_program(primitive, avals, tuple(sorted(params.items())))
        return make_eqn(self, in_tracers, out_avals, primitive, params, effects, *args, **kwargs)

    DynamicJaxprTrace.make_eqn = reporting


_report_effects_of_programs()


def lower_jaxpr(ctx: Any, jaxpr: Any, tokens: Any, args: Sequence[Any]) -> tuple[Sequence[Any], Any]:
    """``jaxpr`` with ``args`` for its constants and inputs, in the place that ``ctx`` says."""
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


# The region -----------------------------------------------------------------------------------------------

region_p = Primitive("pycollective_region")
region_p.multiple_results = True


@region_p.def_effectful_abstract_eval
def _region_abstract_eval(*_: Any, jaxpr: Any) -> Any:
    return [var.aval for var in jaxpr.outvars], without_references(jaxpr.effects) - {effect}


def _region_lowering(ctx: Any, *args: Any, jaxpr: Any) -> Sequence[Any]:
    tokens = mlir.TokenSet({**dict(ctx.tokens_in.items()), effect: stablehlo.create_token()})
    if without_references(jaxpr.effects) == jaxpr.effects:
        outs, tokens_out = lower_jaxpr(ctx, jaxpr, tokens, args)
    else:  # JAX turns references into values where it lowers a function
        inner = ctx.replace(tokens_in=tokens)
        body = function(jaxpr.replace(constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars]))
        outs, tokens_out = mlir.lower_fun(body)(inner, *args), inner.tokens_out
    if len(ctx.tokens_in):  # the body has ordered effects of others, such as jax.debug.print(ordered=True)
        ctx.set_tokens_out(tokens_out.subset([kind for kind, _ in ctx.tokens_in.items()]))
    return outs


mlir.register_lowering(region_p, _region_lowering)


@region_p.def_impl
def _region_impl(*args: Any, jaxpr: Any) -> list[Any]:
    """Op by op: what JAX does under ``jax_debug_nans`` with a program whose results have NaNs, to find their origin.

    It goes as far as the first collective. This rank does that for itself, so no other would answer.
    """

    def equation(eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if effect in eqn.effects:
            raise FloatingPointError(
                message(
                    "jit",
                    "no NaN or infinity in the results",
                    f"one, that no operation makes before the first collective, {eqn.primitive.name} at "
                    f"{source_info_util.summarize(eqn.source_info)}",
                    "What lies behind it one rank cannot run again. An operand of another rank may have been NaN: "
                    "run all ranks with JAX_DISABLE_JIT=1, which checks each operation.",
                )
            )
        return again(eqn, operands)

    constants = len(jaxpr.constvars)
    closed = ClosedJaxpr(jaxpr, args[:constants])
    return evaluate(closed, equation, *args[constants:])


def without_copies(jaxpr: Any, free: frozenset[Var] = frozenset()) -> Any:
    """Drops the hint ``in_place`` where the operand must survive: an input of the program, or read again later.

    XLA would copy such an operand in order to overwrite the copy, which costs more than MPI's own two-buffer form.

    Args:
        jaxpr: the program.
        free: inputs that it may overwrite.
    """
    buffers = _buffers(jaxpr)

    def buffers_of(atoms: Iterable[Any]) -> set[Var]:
        return {buffers.get(var, var) for var in atoms if isinstance(var, Var)}

    kept = {*jaxpr.invars, *jaxpr.constvars} - free
    kept |= buffers_of(jaxpr.outvars)
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        reads = buffers_of(eqn.invars)
        if hints := eqn.params.get("in_place"):
            arrays = zip(hints, eqn.invars, strict=True)
            ours = tuple(hint and isinstance(var, Var) and buffers.get(var, var) not in kept for hint, var in arrays)
            eqn = eqn.replace(params={**eqn.params, "in_place": ours})
        if eqn.primitive.name in ("jit", "pjit"):  # JAX inlines it
            closed = eqn.params["jaxpr"]
            inner = without_copies(closed.jaxpr, _free_inside(eqn, closed.jaxpr, kept, buffers))
            eqn = eqn.replace(params={**eqn.params, "jaxpr": ClosedJaxpr(inner, closed.consts)})
        elif eqn.primitive.name == "shard_map":  # the same program on each device
            inner = eqn.params["jaxpr"]
            inner = without_copies(inner, _free_inside(eqn, inner, kept, buffers))
            eqn = eqn.replace(params={**eqn.params, "jaxpr": inner})
        eqns.append(eqn)
        kept |= reads
    return jaxpr.replace(eqns=eqns[::-1])


def _free_inside(eqn: Any, inner: Any, kept: set[Var], buffers: dict[Var, Var]) -> frozenset[Var]:
    """The inputs of a program that an equation holds which nobody reads behind it."""
    pairs = zip(eqn.invars, inner.invars, strict=True)
    return frozenset(var for outer, var in pairs if isinstance(outer, Var) and buffers.get(outer, outer) not in kept)


def _buffers(jaxpr: Any) -> dict[Var, Var]:
    """For what only has another shape than an array before it, that array: XLA gives both one buffer."""
    buffers: dict[Var, Var] = {}
    for eqn in jaxpr.eqns:
        if is_reshape(eqn):
            source = eqn.invars[0]
            buffers[eqn.outvars[0]] = buffers.get(source, source)
    return buffers


class Donated(NamedTuple):
    """Which arguments of a function its program may overwrite: JAX's ``donate_argnums`` and ``donate_argnames``."""

    numbers: frozenset[int]
    names: frozenset[str]

    @classmethod
    def of(cls, fun: Callable[..., Any], options: dict[str, Any]) -> Donated:
        """Those that the options of :func:`jax.jit` name, in both ways where the signature tells."""
        numbers, names = options.get("donate_argnums"), options.get("donate_argnames")
        numbers = () if numbers is None else (numbers,) if isinstance(numbers, int) else tuple(numbers)
        names = () if names is None else (names,) if isinstance(names, str) else tuple(names)
        try:
            known = list(inspect.signature(fun).parameters)
        except (TypeError, ValueError):  # JAX infers nothing either
            known = []
        places = {known[i]: i for i in range(len(known))}
        return cls(
            frozenset(
                [
                    *(i % len(known) if known and i < 0 else i for i in numbers),
                    *(places[n] for n in names if n in places),
                ]
            ),
            frozenset([*names, *(known[i] for i in numbers if -len(known) <= i < len(known))]),
        )

    def arrays(self, args: Any, kwargs: Any) -> set[int]:
        """The ids of the arrays in those arguments."""
        chosen = [args[i] for i in self.numbers if i < len(args)], [kwargs[n] for n in self.names if n in kwargs]
        return {id(leaf) for leaf in jax.tree.leaves(chosen)}


class Region:
    """A function whose trace is one region, for :func:`jax.jit` as a whole program (see the head of this file).

    Called with the arguments of ``fun`` it returns what ``fun`` does, or that :class:`turns.Witnessed`.

    Attributes:
        traced: whether there is a program.
        devices: of its programs: those that a shard_map or a sharding names, or :data:`turns.ALONE` on a rank with one
            device, or :data:`turns.OF_ARGUMENTS`, as before any trace; None if that differs, or if a mesh around
            (:func:`jax.set_mesh`) says it.
    """

    def __init__(
        self,
        fun: Callable[..., Any],
        *,
        donated: Donated | None = None,
        expand: Callable[[ClosedJaxpr], ClosedJaxpr] = lambda closed: closed,
        rewrite: Callable[[Any], Any] = lambda jaxpr: jaxpr,
        witnessed: bool = False,
        devices: frozenset[jax.Device] = frozenset(),
    ) -> None:
        """Keeps ``fun``.

        Args:
            fun: any function that JAX can trace.
            donated: which inputs the program may overwrite.
            expand: from the program, which nothing will transform any more, to another of the same meaning.
            rewrite: from the jaxpr of the program to another of the same meaning.
            witnessed: whether every call returns a :class:`turns.Witnessed`.
            devices: over which the shardings lie that :func:`jax.jit` has for its arguments and results.
        """
        functools.update_wrapper(self, fun)
        self._expand = expand
        self._rewrite = rewrite
        self._witnessed = witnessed
        self._fun = fun
        self._donated = donated
        self._named = devices
        self.traced = False
        self.devices: turns.Devices | str | None = turns.OF_ARGUMENTS

    def __repr__(self) -> str:  # JAX's messages name the function so
        return repr(self._fun)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One trace; or under ``JAX_DISABLE_JIT`` one call of ``fun``, whose collectives then run one by one."""
        if jax.config.jax_disable_jit:
            return self._fun(*args, **kwargs)
        arrays, with_arrays = split_arrays(args, kwargs)
        out_tree = None

        def flat(*arrays: Any) -> list[Any]:
            nonlocal out_tree
            args, kwargs = with_arrays(arrays)
            outs, out_tree = jax.tree.flatten(self._fun(*args, **kwargs))
            return [*outs, jnp.zeros(0, bool)]

        closed = self._expand(jax.make_jaxpr(flat)(*arrays))
        devices = turns.in_order(self._named | _devices_of(closed.jaxpr))
        under_mesh = not jax.sharding.get_abstract_mesh().empty
        self._note_devices(None if under_mesh else devices or turns.OF_ARGUMENTS)
        donated = self._donated.arrays(args, kwargs) if self._donated is not None else ()
        free = frozenset(var for var, x in zip(closed.jaxpr.invars, arrays, strict=True) if id(x) in donated)
        jaxpr = self._rewrite(without_copies(closed.jaxpr, free))
        *outs, witness = region_p.bind(*closed.consts, *arrays, jaxpr=jaxpr)
        given = {*jaxpr.invars, *jaxpr.constvars}
        held = any(isinstance(var, Var) and var not in given for var in jaxpr.outvars[:-1])
        results = jax.tree.unflatten(out_tree, outs)
        return results if held and not devices and not self._witnessed else turns.Witnessed(results, witness)

    def _note_devices(self, devices: turns.Devices | str | None) -> None:
        if turns.local_devices() is turns.ALONE:
            devices = turns.ALONE
        if self.traced and devices != self.devices:
            # The dispatch that this trace belongs to has taken its turn for other devices: now it takes all turns.
            with jax.ensure_compile_time_eval():
                turns.take_turn(None)
            self.devices = None
        else:
            self.devices = devices
        self.traced = True


def devices_of_sharding(sharding: Any) -> frozenset[jax.Device]:
    """Over which it lies; none for what is no sharding, or names no devices."""
    if not isinstance(sharding, jax.sharding.Sharding) or isinstance(
        getattr(sharding, "mesh", None), jax.sharding.AbstractMesh
    ):
        return frozenset()
    return frozenset(sharding.device_set)


def _devices_of(jaxpr: Any) -> frozenset[jax.Device]:
    """The devices that a program names by a :func:`jax.shard_map`, or by a sharding."""
    found: frozenset[jax.Device] = frozenset()
    for eqn in jaxpr.eqns:
        if isinstance(mesh := eqn.params.get("mesh"), jax.sharding.Mesh):
            found |= frozenset(mesh.devices.flat)
        placed = eqn.params["devices"] if eqn.primitive.name == "device_put" else ()
        for sharding in (eqn.params.get("sharding"), *placed):
            found |= devices_of_sharding(sharding)
        for inner in inner_jaxprs(eqn):
            found |= _devices_of(inner)
    return found


@functools.lru_cache(maxsize=4096)
def _eager_program(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> tuple[Callable[..., Any], Region]:
    region = Region(lambda *operands: primitive.bind(*operands, **dict(params)))
    return jax.jit(region), region


def apply(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """Runs an ordered primitive outside any trace: the implementation rule of every primitive here.

    Compiled once per shape, dtype and parameters, all of which are hashable.
    """
    program, region = _eager_program(primitive, tuple(sorted(params.items())))
    devices = region.devices
    turns.take_turn(turns.devices_for(operands, {}) if isinstance(devices, str) else devices)
    if jax.config.jax_disable_jit:  # as JAX's own primitives, compiled even then
        with jax.disable_jit(False):
            outs = program(*operands)
    else:
        outs = program(*operands)
    if type(outs) is turns.Witnessed and not jax.tree.leaves(outs.outs):
        outs.witness.block_until_ready()  # no result to wait on, so errors must show here
    return turns.keep(outs)


at_top_level = trace_state_clean
"""Whether a call made now is outside every JAX trace."""


def bound_axes() -> tuple[Any, ...]:
    """The names of the axes that transforms around this call bind."""
    return tuple(get_axis_env().axis_sizes)


def _see_each_dispatch() -> None:
    """Lets programs that JAX itself dispatches take their turn too.

    These are the programs of plain :func:`jax.jit`, and those of ours inside a transform. JAX hands each a token of our
    effect, which puts it behind the last of their kind.
    """
    token_input, token_result = RuntimeTokenSet.get_token_input, RuntimeTokenSet.set_token_result

    @functools.wraps(token_input)
    def get_token_input(self: Any, eff: Any, devices: Any) -> Any:
        if type(eff) is OrderedCollective:
            turns.take_turn(turns.ALONE if turns.local_devices() is turns.ALONE else turns.in_order(devices))
        return token_input(self, eff, devices)

    @functools.wraps(token_result)
    def set_token_result(self: Any, eff: Any, token: Any) -> None:
        token_result(self, eff, token)
        if type(eff) is OrderedCollective:
            turns.keep(turns.Witnessed(None, token))

    RuntimeTokenSet.get_token_input, RuntimeTokenSet.set_token_result = get_token_input, set_token_result


_see_each_dispatch()
