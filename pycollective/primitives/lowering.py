"""How a primitive with our effect becomes a call of a handler: which handler, on which devices, after which token.

A lowering reads on which devices the program around will run, and how: JAX's ``module_context.axis_context`` has
either ``num_devices`` and ``device_assignment``, or ``mesh`` and ``manual_axes``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from jax.extend.core import Primitive
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from pycollective.errors import message
from pycollective.jax_support import call_site, jax_internals, jaxprs
from pycollective.ordering import operand_order
from pycollective.ordering.effect import effect
from pycollective.primitives.passed import NOTHING, Passed
from pycollective.transport import native
from pycollective.transport.protocol import Composition, HandlerCall, Structs

HOSTS: tuple[str, ...] = ("cpu",)
ACCELERATORS: tuple[str, ...] = ("cuda", "rocm")
"""JAX's names of the platforms that we lower for. MPI can read and write the memory of the devices of ``HOSTS``."""


class Decomposition(NamedTuple):
    """A primitive in terms of other primitives.

    Attributes:
        fun: a function from the operands to one result or a sequence of results. It is traced, so it may use our
            primitives.
        axes: names and sizes of the axes that it uses; the program around it binds them.
    """

    fun: Callable[..., Any]
    axes: tuple[tuple[str, int], ...]


Form = HandlerCall | Composition | Decomposition
"""What a primitive may become in a program."""


def lower(
    primitive: Primitive,
    for_host: Callable[[dict[str, Any], Structs, Structs], Form] | None,
    for_accelerator: Callable[[dict[str, Any], Structs, Structs], Form],
) -> None:
    """Registers the lowerings of a primitive with our effect.

    Args:
        primitive: a primitive whose abstract evaluation reports :data:`effect`.
        for_host: maps the parameters, operands and results of the primitive to its form on a device of ``HOSTS``; None:
            it has none there.
        for_accelerator: maps them to its form on a device of ``ACCELERATORS``.
    """

    def lowering(
        form_of: Callable[[dict[str, Any], Structs, Structs], Form], ctx: Any, *operands: Any, **params: Any
    ) -> Any:
        if (outs := lower_on_all_copies(primitive, ctx, operands, params)) is not None:
            return outs
        passed: Passed = params.pop("passed", NOTHING)
        devices, manual = _devices_of_program(primitive.name, ctx.module_context.axis_context)
        if "comm" in params:
            # Until XLA has compiled the program. (JAX exports no program that has "keepalives".)
            weakref.finalize(ctx.module_context.module, id, params["comm"]).atexit = False
        _check_lengths(primitive.name, (*ctx.avals_in, *ctx.avals_out))
        form = form_of(params, _structs(ctx.avals_in), _structs(ctx.avals_out))
        if isinstance(form, Decomposition):
            return _lower_decomposition(ctx, form, operands)
        if isinstance(form, Composition):
            if devices > 1:
                raise NotImplementedError(
                    message(
                        primitive.name,
                        "a program on one device of each rank, as init's transport needs",
                        f"one on {devices}",
                        "Leave the arrays on one device, or leave transport out.",
                    )
                )
            return _lower_composition(ctx, form, operands, passed)
        on_host = form_of is for_host
        # On accelerators each device that has a copy makes the call itself, together with its partners on the other
        # ranks: these need as many copies. One call for all, as on the host, would copy from device to device.
        one_call_for_all = manual == (_COPIES,) and on_host
        site = call_site.site_of_lowered(passed.derivative, passed.program)
        own = _with_dtypes(form.attributes, ctx.avals_in, passed)
        attributes = {
            **own,
            "devices": devices,
            "replicated": one_call_for_all,
            "site": site,
            "order": passed.order or 0,
            "section": passed.section,
        }
        with jax_internals.location_named(ctx, name_in_profiles(primitive.name, _structs(ctx.avals_in))):
            taken = operands if on_host else apart(operands)
            results = jax_internals.lower_call(ctx, effect, form.rule, taken, attributes)
        if passed.order is None and primitive.name in operand_order.REDUCTIONS:
            kind = repr((primitive.name, own, ctx.avals_in))
            operand_order.number_reduction(ctx.module_context.module, kind, results[0].owner, operands)
        if not on_host:
            results = apart(results)
        return results if form.results_rule is None else jax_internals.lower_on_results(ctx, form.results_rule, results)

    def other_platform(ctx: Any, *operands: Any, **params: Any) -> Sequence[Any]:
        raise NotImplementedError(
            message(
                primitive.name,
                "a program on CPU devices or GPUs, as pycollective.init's devices are",
                f"one for {', '.join(ctx.module_context.platforms)}",
                "Move the arrays to one of jax.local_devices(), or set JAX_PLATFORMS.",
            )
        )

    forms = dict.fromkeys(ACCELERATORS, for_accelerator)
    if for_host is not None:
        forms |= dict.fromkeys(HOSTS, for_host)
    for platform, form_of in forms.items():
        # JAX would lower equal calls of a program once, and all of them would have the line of the first one.
        rule = functools.partial(lowering, form_of)
        mlir.register_lowering(primitive, rule, platform=platform, cacheable=False)
    mlir.register_lowering(primitive, other_platform)


def apart(values: Sequence[Any]) -> Sequence[Any]:
    """The same values behind a barrier, over which XLA fuses nothing.

    XLA for GPUs fuses a call with a slice that it reads, and with the update of a slice by its result. Then a call with
    a token ends the process while XLA compiles (jaxlib 0.11.2), and a call in place might write elsewhere.
    """
    return list(stablehlo.OptimizationBarrierOp(list(values)).results) if values else []


def name_in_profiles(name: str, operands: Structs) -> str:
    """The name of a call in XLA's programs, and so in the profiles that :func:`jax.profiler.trace` takes.

    Args:
        name: the primitive.
        operands: its operands.

    Example:
        >>> x = jax.ShapeDtypeStruct((4, 3), "float32")
        >>> name_in_profiles("allreduce", [x]), name_in_profiles("allreduce", [x, x]), name_in_profiles("barrier", [])
        ('pycollective_allreduce_float32_4x3', 'pycollective_allreduce_float32_4x3_and_1_more', 'pycollective_barrier')
    """
    first = [f"{x.dtype}_{'x'.join(map(str, x.shape))}".rstrip("_") for x in operands[:1]]
    more = [f"and_{len(operands) - 1}_more"] if len(operands) > 1 else []
    return "_".join(["pycollective", name, *first, *more])


_COPIES = "pycollective copies"
"""The axis along which each device has a copy of the operands of one call."""


def _devices_of_program(name: str, context: Any) -> tuple[int, tuple[Any, ...]]:
    """The number of devices of the program that is lowered, and the axes along which each device makes its own calls.

    Inside :func:`jax.shard_map` and :func:`jax.pmap` these are all axes. A program that XLA partitions has none.
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
            "Call it outside jax.shard_map and jax.set_mesh, or with all axes in shard_map's axis_names, the default.",
        )
    return mesh.size, tuple(mesh.axis_names)


def lower_on_all_copies(
    primitive: Primitive, ctx: Any, operands: Sequence[Any], params: dict[str, Any]
) -> Sequence[Any] | None:
    """Lowers a call in a program that XLA partitions: each device gets a copy of all operands. None for other programs.

    In such a program XLA accepts a call with a side effect only if each device makes it, inside a ``shard_map``.
    """
    devices, manual = _devices_of_program(primitive.name, ctx.module_context.axis_context)
    if devices == 1 or manual:
        return None
    mesh = jaxprs.abstract_mesh({_COPIES: devices})
    whole = jax.sharding.PartitionSpec()
    one_device = functools.partial(primitive.bind, **params)
    all_devices = jax.shard_map(one_device, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return _lower_decomposition(ctx, Decomposition(jaxprs.outside_meshes(all_devices), ()), operands)


def _check_lengths(name: str, avals: Sequence[Any]) -> None:
    """Refuses symbolic lengths, which an exported program may have: XLA finds no lengths for the results of a call."""
    symbolic = [str(aval.shape) for aval in avals if not all(isinstance(n, int) for n in aval.shape)]
    if symbolic:
        remedy = "Export the program once for each shape that it is called with."
        raise NotImplementedError(message(name, "arrays whose lengths are numbers", f"shape {symbolic[0]}", remedy))


def _lower_decomposition(ctx: Any, form: Decomposition, operands: Sequence[Any]) -> Sequence[Any]:
    return jax_internals.lower_inline(ctx, _traced(form.fun, form.axes, ctx), operands)


def _lower_composition(ctx: Any, form: Composition, operands: Sequence[Any], passed: Passed) -> Sequence[Any]:
    site = call_site.site_of_lowered(passed.derivative, passed.program)
    one_device = {"devices": 1, "replicated": False, "site": site, "order": 0, "section": 0}
    before = form.before.rule, _with_dtypes(form.before.attributes, ctx.avals_in, passed) | one_device
    after = form.after.rule, form.after.attributes | one_device
    with jax.enable_x64(True):  # the operands may have 64 bits where the program around may not make such arrays
        return jax_internals.lower_between(ctx, effect, before, _traced(form.fun, (), ctx), after, operands)


def _with_dtypes(attributes: dict[str, Any], operands: Structs, passed: Passed) -> dict[str, Any]:
    """The attributes of a handler, with what the user passed in ``comm`` if the operands do not show it."""
    if not passed.tree and passed.dtypes in ((), tuple(str(x.dtype) for x in operands)):
        return attributes
    tree = (passed.tree,) if passed.tree else ()
    return {**attributes, "comm": (*attributes["comm"], *map(native.dtype_number, passed.dtypes), *tree)}


def _traced(fun: Callable[..., Any], axes: Sequence[tuple[str, int]], ctx: Any) -> Any:
    """The jaxpr of a function of the operands of the equation that is lowered."""
    closed = jax.make_jaxpr(fun, axis_env=list(axes))(*_structs(ctx.avals_in))
    assert not closed.consts, "constants would have to become operands"
    return closed.jaxpr


def _structs(avals: Sequence[Any]) -> Structs:
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
