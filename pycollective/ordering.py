"""The order of MPI calls: JAX's ordered effect, the token in the lowering, and the region.

MPI needs every rank to make the same calls in the same order, while XLA's CPU runtime runs independent calls
concurrently. So each of our primitives carries an ordered effect, and its lowering takes and returns XLA's token;
JAX itself threads the token through scan, while, cond and nested jit.

A program with an ordered effect leaves JAX's fast dispatch. Hence the *region*: one primitive without effects
whose body is lowered with a token of its own. Inside, the order is that token's. Between two programs it is the
order of dispatch: XLA's CPU client makes each program wait for the one that the same thread enqueued before it on
the same device (``PjRtCpuClient``, "last enqueue event"), and a program on several devices wait for the last one on
several ("last collective launch event"). The one kind does not wait for the other: :func:`take_turn` sees to that. A
region must be a whole program: inside another program two regions would have no order between them.

This is the only file that uses JAX beyond its public API:

=====================================  ==============================================================
``jax._src.core.abstract_token``       the aval of a token operand, which ``jax.ffi.ffi_lowering`` knows
``jax._src.core.trace_state_clean``    whether a call happens at top level or inside a trace
``jax._src.effects`` (its type sets)   to register an ordered effect; mpi4jax and jax's own debug_print
                                       do the same
``mlir.jaxpr_subcomp``, ``TokenSet``   exported, but their signature has changed before
``module_context.axis_context``        of a lowering: ``num_devices``, ``device_assignment``, or ``mesh``,
                                       ``manual_axes``: on which devices the program will run, and how
=====================================  ==============================================================
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, Var
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from pycollective.errors import message

SUPPORTED_JAX = ">= 0.9, < 0.13"

try:
    from jax._src import effects as jax_effects
    from jax._src.core import abstract_token, trace_state_clean

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
except (ImportError, AttributeError) as error:
    raise ImportError(
        message("ordering", f"jax {SUPPORTED_JAX}", f"jax {jax.__version__}: {error}", "Install a supported jax.")
    ) from error


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


HOSTS: tuple[str, ...] = ("cpu",)
ACCELERATORS: tuple[str, ...] = ("cuda", "rocm")
"""JAX's names of the platforms that we lower for; MPI reads and writes the memory of a host's devices."""

Call = tuple[Callable[..., Any], dict[str, Any]]
"""An FFI lowering whose first operand and first result are tokens (see ``transport``), and the handler's attributes."""


class Steps(NamedTuple):
    """A primitive as a program of others.

    Attributes:
        fun: of the operands' values, to a value or a sequence of them; traced, so it may use the primitives here.
        axes: names and sizes of the axes that it uses, bound by the program around it.
    """

    fun: Callable[..., Any]
    axes: tuple[tuple[str, int], ...]


def lower(
    primitive: Primitive,
    on_host: Callable[[dict[str, Any]], Call] | None,
    on_device: Callable[[dict[str, Any]], Call | Steps],
) -> None:
    """Registers the lowerings of an ordered primitive.

    Args:
        primitive: its abstract evaluation must report :data:`effect`.
        on_host: maps the primitive's parameters to what a device of ``HOSTS`` does; None: it cannot.
        on_device: the same for one of ``ACCELERATORS``.
    """

    def lowering(how: Callable[[dict[str, Any]], Call | Steps], ctx: Any, *operands: Any, **params: Any) -> Any:
        if (outs := on_copies(primitive, ctx, operands, params)) is not None:
            return outs
        devices, manual = _devices_of_program(primitive.name, ctx.module_context.axis_context)
        chosen = how(params)
        if isinstance(chosen, Steps):
            return _lower_steps(ctx, chosen, operands)
        call, attributes = chosen
        inner = ctx.replace(avals_in=(abstract_token, *ctx.avals_in), avals_out=(abstract_token, *ctx.avals_out))
        # On accelerators each device that has a copy makes the call for itself, with its like on the other ranks: these
        # must then have as many. To meet, as on the host, they would have to copy from one device to another.
        copies = manual == (_COPIES,) and how is on_host
        attributes = {**attributes, "spread": -devices if copies else devices}
        token, *results = call(inner, ctx.tokens_in.get(effect), *operands, **attributes)
        ctx.set_tokens_out(ctx.tokens_in.update_tokens(mlir.TokenSet({effect: token})))
        return results

    def elsewhere(ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]:
        raise NotImplementedError(
            message(
                primitive.name,
                "a program on CPU devices or GPUs, as pycollective.init's devices are",
                f"one for {', '.join(ctx.module_context.platforms)}",
                "Move the arrays to one of jax.local_devices(), or set JAX_PLATFORMS.",
            )
        )

    hows = dict.fromkeys(ACCELERATORS, on_device)
    if on_host is not None:
        hows |= dict.fromkeys(HOSTS, on_host)
    for platform, how in hows.items():
        mlir.register_lowering(primitive, functools.partial(lowering, how), platform=platform)
    mlir.register_lowering(primitive, elsewhere)


_COPIES = "pycollective copies"
"""The axis of the devices that have copies of one call's operands."""


def _devices_of_program(name: str, context: Any) -> tuple[int, tuple[Any, ...]]:
    """On how many devices the program that is lowered runs, and which axes of them it has taken into its own hands.

    Inside :func:`jax.shard_map` and :func:`jax.pmap` each device makes the calls of its own program; these axes are
    all there are. A program that XLA cuts up has none.
    """

    def refuse(got: str, remedy: str) -> NoReturn:
        raise NotImplementedError(
            message(name, "a program on devices of this process, or manual over all axes of its mesh", got, remedy)
        )

    mesh = getattr(context, "mesh", None)
    if mesh is None:
        devices = context.num_devices or 1
        assigned = getattr(context, "device_assignment", None) or ()
        if devices > max(1, jax.local_device_count()) or any(d.process_index != jax.process_index() for d in assigned):
            refuse(f"one on {devices} devices of several processes", "Give each rank devices and arrays of its own.")
        return devices, ()
    others = [axis for axis, size in mesh.shape.items() if size > 1 and axis not in context.manual_axes]
    if mesh.size > 1 and others:
        refuse(
            f"axes {others} that are left to XLA",
            "Call it outside jax.shard_map, or with all axes in shard_map's axis_names (that is its default).",
        )
    return mesh.size, tuple(mesh.axis_names)


def on_copies(primitive: Primitive, ctx: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any] | None:
    """Lowers a call in a program that XLA cuts up: each of its devices gets all of the operands. None for others.

    XLA takes no call with a side effect there but on one device or, as here, in the hands of each.
    """
    devices, manual = _devices_of_program(primitive.name, ctx.module_context.axis_context)
    if devices == 1 or manual:
        return None
    mesh = jax.sharding.AbstractMesh((devices,), (_COPIES,))
    whole = jax.sharding.PartitionSpec()
    one_device = functools.partial(primitive.bind, **params)
    all_devices = jax.shard_map(one_device, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return _lower_steps(ctx, Steps(all_devices, ()), operands)


def _lower_steps(ctx: Any, steps: Steps, operands: Sequence[Any]) -> Sequence[Any]:
    like = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in ctx.avals_in]
    closed = jax.make_jaxpr(steps.fun, axis_env=list(steps.axes))(*like)
    assert not closed.consts, "constants would have to become operands"
    outs, tokens_out = _lower_jaxpr(ctx, closed.jaxpr, ctx.tokens_in, operands)
    ctx.set_tokens_out(tokens_out)
    return outs


def _lower_jaxpr(ctx: Any, jaxpr: Any, tokens: Any, args: Sequence[Any]) -> tuple[Sequence[Any], Any]:
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
    return [var.aval for var in jaxpr.outvars], jaxpr.effects - {effect}


def _region_lowering(ctx: Any, *args: Any, jaxpr: Any) -> Sequence[Any]:
    tokens = mlir.TokenSet({**dict(ctx.tokens_in.items()), effect: stablehlo.create_token()})
    outs, tokens_out = _lower_jaxpr(ctx, jaxpr, tokens, args)
    if len(ctx.tokens_in):  # the body has ordered effects of others, such as jax.debug.print(ordered=True)
        ctx.set_tokens_out(tokens_out.subset([kind for kind, _ in ctx.tokens_in.items()]))
    return outs


mlir.register_lowering(region_p, _region_lowering)


def _without_copies(jaxpr: Any) -> Any:
    """Drops the hint ``in_place`` where the operand must survive: an input of the program, or read again later.

    XLA would copy such an operand in order to overwrite the copy, which costs more than MPI's own two-buffer form.
    """
    kept = {*jaxpr.invars, *jaxpr.constvars, *(var for var in jaxpr.outvars if isinstance(var, Var))}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        reads = {var for var in eqn.invars if isinstance(var, Var)}
        if hints := eqn.params.get("in_place"):
            arrays = zip(hints, eqn.invars, strict=True)
            free = tuple(hint and isinstance(var, Var) and var not in kept for hint, var in arrays)
            eqn = eqn.replace(params={**eqn.params, "in_place": free})
        if eqn.primitive.name == "shard_map":  # the same program on each device
            eqn = eqn.replace(params={**eqn.params, "jaxpr": _without_copies(eqn.params["jaxpr"])})
        eqns.append(eqn)
        kept |= reads
    return jaxpr.replace(eqns=eqns[::-1])


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


class Witnessed(NamedTuple):
    """What a program returns whose own results say nothing of its end.

    Either none of them is computed in the region: JAX drops equations without effects that nothing uses, and a region
    that only sends has no other result to hold it. Or it runs on several devices, for :func:`keep_few`.

    Attributes:
        outs: of the function.
        witness: an empty array, there when the program has run.
    """

    outs: Any
    witness: jax.Array


class Region:
    """A function whose trace is one region, for :func:`jax.jit` as a whole program (see the head of this file).

    Called with the arguments of ``fun`` it returns what ``fun`` does, or that :class:`Witnessed`.

    Attributes:
        traced: whether there is a program.
        devices: of its programs, if they run on several; empty for one; None if that differs, or before any trace.
    """

    def __init__(
        self, fun: Callable[..., Any], *, donates: bool = False, rewrite: Callable[[Any], Any] = lambda jaxpr: jaxpr
    ) -> None:
        """Keeps ``fun``.

        Args:
            fun: any function that JAX can trace.
            donates: whether the program may overwrite its inputs.
            rewrite: from the jaxpr of the program to another of the same meaning.
        """
        functools.update_wrapper(self, fun)
        self._rewrite = rewrite
        self._fun = fun
        self._donates = donates
        self.traced = False
        self.devices: tuple[jax.Device, ...] | None = None

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

        closed = jax.make_jaxpr(flat)(*arrays)
        devices = _devices_of(closed.jaxpr)
        if not self.traced:
            self.devices = devices
        elif devices != self.devices:
            # The dispatch that this trace belongs to has taken its turn for other devices: now it takes all turns.
            with jax.ensure_compile_time_eval():
                take_turn(None)
            self.devices = None
        self.traced = True
        jaxpr = self._rewrite(closed.jaxpr if self._donates else _without_copies(closed.jaxpr))
        *outs, witness = region_p.bind(*closed.consts, *arrays, jaxpr=jaxpr)
        given = {*jaxpr.invars, *jaxpr.constvars}
        held = any(isinstance(var, Var) and var not in given for var in jaxpr.outvars[:-1])
        results = jax.tree.unflatten(out_tree, outs)
        return results if held and not devices else Witnessed(results, witness)


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


def _devices_of(jaxpr: Any) -> tuple[jax.Device, ...]:
    """The devices of a program that holds a :func:`jax.shard_map`; empty if it holds none."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "shard_map":
            return tuple(eqn.params["mesh"].devices.flat)
        for inner in inner_jaxprs(eqn):
            if devices := _devices_of(inner):
                return devices
    return ()


@functools.lru_cache(maxsize=4096)
def _eager_program(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    return jax.jit(Region(lambda *operands: primitive.bind(*operands, **dict(params))))


def apply(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """Runs an ordered primitive outside any trace: the implementation rule of every primitive here.

    Compiled once per shape, dtype and parameters, all of which are hashable.
    """
    program = _eager_program(primitive, tuple(sorted(params.items())))
    take_turn(())
    if jax.config.jax_disable_jit:  # as JAX's own primitives, compiled even then
        with jax.disable_jit(False):
            outs = program(*operands)
    else:
        outs = program(*operands)
    if type(outs) is not Witnessed:
        return outs
    outs.witness.block_until_ready()  # no result to wait on, so errors must show here
    return outs.outs


at_top_level = trace_state_clean
"""Whether a call made now is outside every JAX trace."""


# Between programs ------------------------------------------------------------------------------------------


_MOST_AHEAD = 4
"""Programs on several devices that may wait to run. XLA's CPU client may have just one thread a device, and from the
33rd program on a device the dispatch itself keeps one of them until another program ends; if that one needs all
threads, to meet in a collective, both wait for ever (so do ``jax.pmap`` and XLA's own collectives). This leaves room
for what else the user dispatches between ours."""


class _Turn:
    """Whose turn it is: XLA orders programs on one device among each other, and programs on several, but not both."""

    devices: tuple[jax.Device, ...] | None = ()  # of the last program that was dispatched, as Region.devices
    ahead: ClassVar[deque[jax.Array]] = deque()  # witnesses of programs on several devices


def take_turn(devices: tuple[jax.Device, ...] | None) -> None:
    """Comes before the dispatch of a program, with its ``Region.devices``: waits for those that XLA will not order.

    A program on one device waits for the last one on several, and the other way round; None waits for both.
    """
    if devices is None or devices != _Turn.devices:
        _wait(_Turn.devices)
        _Turn.devices = devices


def keep_few(witness: jax.Array) -> None:
    """Comes after the dispatch of a program on several devices: waits while too many have not run."""
    _Turn.ahead.append(witness)
    if len(_Turn.ahead) > _MOST_AHEAD:
        # An error of that program is raised where its results are used, not in a call that has nothing to do with it.
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            _Turn.ahead.popleft().block_until_ready()


def flush() -> None:
    """Waits until all programs that this thread has dispatched have run."""
    jax.effects_barrier()
    _wait(None)


def _wait(devices: tuple[jax.Device, ...] | None) -> None:
    """Until the programs on several devices have run, or for () those on one, or for None all."""
    local = jax.local_devices()
    if devices != () and len(local) > 1:
        _wait_for_several(devices or tuple(local))
    if not devices:
        for device in local:
            # Ordered behind everything enqueued before it; an identity function would not be dispatched at all.
            _marker(jax.device_put(np.int32(0), device)).block_until_ready()


def _wait_for_several(devices: tuple[jax.Device, ...]) -> None:
    sharding = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), "d"), jax.sharding.PartitionSpec("d"))
    _marker(jax.device_put(np.zeros(len(devices), np.int32), sharding)).block_until_ready()


_marker = jax.jit(lambda x: x + 1)
