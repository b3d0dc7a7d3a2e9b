"""How an ordered primitive becomes a call of the transport: which handler, on which devices, behind which token.

A lowering reads what JAX hands it of the program around, ``module_context.axis_context``: ``num_devices`` and
``device_assignment``, or ``mesh`` and ``manual_axes``: on which devices the program will run, and how.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pycollective.errors import message
from pycollective.ordering import jax_internals, jaxprs
from pycollective.ordering.effect import effect

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
        # On accelerators each device that has a copy makes the call for itself, with its like on the other ranks: these
        # must then have as many. To meet, as on the host, they would have to copy from one device to another.
        copies = manual == (_COPIES,) and how is on_host
        attributes = {**attributes, "spread": -devices if copies else devices}
        return jax_internals.lower_call(ctx, effect, call, operands, attributes)

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
            "Call it outside jax.shard_map and jax.set_mesh, or with all axes in shard_map's axis_names, the default.",
        )
    return mesh.size, tuple(mesh.axis_names)


def on_copies(primitive: Primitive, ctx: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any] | None:
    """Lowers a call in a program that XLA cuts up: each of its devices gets all of the operands. None for others.

    XLA takes no call with a side effect there but on one device or, as here, in the hands of each.
    """
    devices, manual = _devices_of_program(primitive.name, ctx.module_context.axis_context)
    if devices == 1 or manual:
        return None
    mesh = jaxprs.abstract_mesh({_COPIES: devices})
    whole = jax.sharding.PartitionSpec()
    one_device = functools.partial(primitive.bind, **params)
    all_devices = jax.shard_map(one_device, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return _lower_steps(ctx, Steps(jaxprs.outside_meshes(all_devices), ()), operands)


def _lower_steps(ctx: Any, steps: Steps, operands: Sequence[Any]) -> Sequence[Any]:
    like = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in ctx.avals_in]
    closed = jax.make_jaxpr(steps.fun, axis_env=list(steps.axes))(*like)
    assert not closed.consts, "constants would have to become operands"
    return jax_internals.lower_inline(ctx, closed.jaxpr, operands)
