"""``shard_map``: :func:`jax.shard_map` over a mesh of ranks x local devices."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NoReturn, overload

import jax
import numpy as np
from jax.sharding import PartitionSpec

from pycollective import errors
from pycollective.jax_support import jaxprs
from pycollective.named_axes.mesh import Mesh
from pycollective.named_axes.names import AxisName
from pycollective.spmd import shard_map_semantics
from pycollective.spmd.compiled import CompiledFunction, Lowered, P, R
from pycollective.spmd.device_program import names_of
from pycollective.spmd.tracing import (
    PlacedArguments,
    TracedFunction,
    as_arrays,
    as_indices,
    broadcast_prefix,
    trace_and_apply,
    trace_as_shard_map,
)

_NOT_GIVEN = object()


@jax.tree_util.register_static
class _Static:
    """A leaf of the arguments that is no array. It is a pytree without leaves: :func:`jax.jit` treats it as static.

    Attributes:
        value: the leaf.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def __hash__(self) -> int:
        return hash((type(self.value), self.value))

    def __eq__(self, other: object) -> bool:  # 1, 1.0 and True are equal, and make different programs
        return isinstance(other, _Static) and type(self.value) is type(other.value) and self.value == other.value


def _with_values(args: Any) -> Any:
    """Returns the user's arguments: each :class:`_Static` is replaced by its value."""
    leaves, tree = jax.tree.flatten(args, is_leaf=lambda x: isinstance(x, _Static))
    return jax.tree.unflatten(tree, [x.value if isinstance(x, _Static) else x for x in leaves])


class _WithStatics(CompiledFunction[Any, Any]):
    """A compiled function with arguments that are no arrays. ``hide`` puts them into :class:`_Static`."""

    def __init__(self, hide: Callable[[Any], Any], *of_function: Any) -> None:
        super().__init__(*of_function)
        self._hide = hide

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*self._hide(args), **kwargs)

    def _dispatch_compiled(self, program: Any, devices: Any, args: Any, kwargs: Any) -> Any:
        return super()._dispatch_compiled(program, devices, self._hide(args), kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        return super().trace(*self._hide(args), **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        return super().eval_shape(*self._hide(args), **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        return super().lower(*self._hide(args), **kwargs)


@overload
def shard_map(
    fun: Callable[P, R],
    /,
    *,
    mesh: Mesh,
    in_specs: Any = ...,
    out_specs: Any,
    axis_names: Iterable[AxisName] = frozenset(),
    check_vma: bool = True,
    donate_argnums: int | Iterable[int] = (),
) -> CompiledFunction[P, R]: ...


@overload
def shard_map(
    fun: None = None,
    /,
    *,
    mesh: Mesh,
    in_specs: Any = ...,
    out_specs: Any,
    axis_names: Iterable[AxisName] = frozenset(),
    check_vma: bool = True,
    donate_argnums: int | Iterable[int] = (),
) -> Callable[[Callable[P, R]], CompiledFunction[P, R]]: ...


def shard_map(
    fun: Callable[P, R] | None = None,
    /,
    *,
    mesh: Mesh,
    in_specs: Any = _NOT_GIVEN,
    out_specs: Any,
    axis_names: Iterable[AxisName] = frozenset(),
    check_vma: bool = True,
    donate_argnums: int | Iterable[int] = (),
) -> Any:
    """Maps a function over the blocks of global arrays on the devices of all ranks, as :func:`jax.shard_map` does.

    ``y[block d] = fun(x[block d])`` on device d. It is also a decorator. Each rank passes and gets its *own block* of
    each global array: the part that its devices hold. For example, if all devices of a rank lie along ``"model"``, the
    rank's own block of an array with the spec ``P("data", "model")`` is cut along the first axis only: the rank's
    devices hold all parts along the second axis.

    Args:
        fun: a function from one device's blocks to one device's blocks. It may name the axes of ``mesh``. None, the
            default, makes a decorator.
        mesh: a mesh of :func:`pycollective.make_mesh`.
        in_specs: for each argument a :class:`jax.sharding.PartitionSpec`, or a prefix of the tree of arguments with
            such leaves. It must be given. A spec names the axes of the mesh along which each axis of the array is cut.
            Along an axis that it does not name, all devices have the same values. None instead of a spec is for a
            value that ``fun`` gets unchanged: an array that all devices share; or a string, a function or a Python
            number, and each of its values compiles a program of its own.
        out_specs: the same for the results.
        axis_names: all axes of the mesh, or empty, the default. Functions that are mapped over some of the axes, which
            JAX supports, are refused.
        check_vma: whether JAX's types say along which axes a value varies, as in :func:`jax.shard_map`. Default True:
            the types must show that a result is the same along each axis that its spec does not name, and the gradient
            of a summed loss, taken inside ``fun``, counts the sum once.
        donate_argnums: the arguments whose buffers the results may reuse. Default: none.

    Returns:
        The compiled function of this rank's own blocks. It can be differentiated, batched, and called inside other JAX
        functions. It has the methods ``lower``, ``trace``, ``eval_shape`` and ``clear_cache`` of :func:`jax.jit`.

    Raises:
        ValueError: while tracing, for a block that cannot be cut into equal parts for this rank's devices, or a spec
            with a name that is no axis of the mesh.
        NotImplementedError: while tracing, for a collective that this package does not know.
        RuntimeError: at the first call, if the ranks' collectives over the axes differ.

    Differentiation:
        Both modes, with the meaning of :func:`jax.shard_map` in one process with as many devices: an argument gets the
        sum of the cotangents of all devices that share it.

    Order:
        As for :func:`pycollective.jit`.

    Source:
        :func:`jax.shard_map`.

    Example:
        >>> import jax, jax.numpy as jnp, pycollective as pc
        >>> from jax.sharding import PartitionSpec as P
        >>> mesh = pc.make_mesh((-1,), ("data",))
        >>> total = pc.shard_map(lambda x: jax.lax.psum(x.sum(), "data"), mesh=mesh, in_specs=P("data"), out_specs=P())
        >>> float(total(jnp.ones(jax.local_device_count()))) == mesh.shape["data"]
        True
    """
    if fun is None:
        return functools.partial(
            shard_map,
            mesh=mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=axis_names,
            check_vma=check_vma,
            donate_argnums=donate_argnums,
        )

    if not isinstance(mesh, Mesh):
        errors.fail(TypeError, "shard_map", None, "a pycollective.Mesh", repr(mesh), "Make it with pc.make_mesh.")
    if in_specs is _NOT_GIVEN:
        remedy = "Write them down. JAX infers them from explicit axes of a mesh, and meshes of pycollective have none."
        errors.fail(TypeError, "shard_map", mesh.comm, "in_specs", "none", remedy)
    if axis_names and set(axis_names) != set(mesh.shape):
        remedy = "Leave axis_names out, and name in the specs the axes along which arrays are cut."
        expected = f"a function of all axes of {mesh!r}"
        errors.fail(NotImplementedError, "shard_map", mesh.comm, expected, f"axis_names={axis_names}", remedy)

    def fail(expected: str, got: Any, remedy: str) -> NoReturn:
        errors.fail(ValueError, "shard_map", mesh.comm, expected, got, remedy)

    def check(place: str, x: Any, spec: Any) -> None:
        if not isinstance(spec, PartitionSpec):
            fail(f"a PartitionSpec in in_specs{place}", repr(spec), "Write P() for an array that all devices share.")
        names = names_of(spec)
        if len(set(names)) < len(names) or any(name not in mesh.shape for name in names):
            fail(f"axes of {mesh!r} in in_specs{place}, each once", spec, "Name axes of the mesh.")
        if len(spec) > x.ndim:
            expected = f"a spec of at most {x.ndim} entries in in_specs{place} for shape {tuple(x.shape)}"
            fail(expected, spec, "Drop the last entries.")

    def check_division(place: str, x: Any, spec: PartitionSpec) -> None:
        for length, part in zip(x.shape, spec, strict=False):
            along = part if isinstance(part, tuple) else (part,)
            local = math.prod(axis.local for axis in mesh.axes if axis.name in along)
            if length % local:
                expected = f"a length that is a multiple of the {local} devices along {part!r} of in_specs{place}"
                fail(expected, x.shape, "Pad it.")

    def place(args: Any, _: Any) -> PlacedArguments:
        leaves, tree = jax.tree.flatten(args)
        entries = broadcast_prefix(in_specs, args)
        # An argument with the spec None is no operand.
        places = [i for i, (_, spec) in enumerate(entries) if spec is not None]
        arrays = as_arrays([leaves[i] for i in places])
        for x, i in zip(arrays, places, strict=True):
            check(entries[i][0], x, entries[i][1])

        def with_arrays(arrays: Sequence[Any]) -> tuple[Any, Any]:
            return jax.tree.unflatten(tree, jaxprs.replaced(leaves, places, arrays)), {}

        return PlacedArguments(mesh, arrays, [entries[i][1] for i in places], with_arrays)

    def hide(args: Any) -> Any:
        def hidden(x: Any) -> Any:
            if isinstance(x, (jax.Array, np.ndarray, np.generic, _Static)):
                return x
            if not isinstance(x, Hashable):
                errors.fail(
                    TypeError,
                    "shard_map",
                    mesh.comm,
                    "arrays and hashable values where in_specs has None",
                    f"{x!r} of {type(x).__name__}",
                    "Pass a tuple, or an object with __hash__: a program is compiled for each value.",
                )
            return _Static(x)

        def of(spec: Any, part: Any) -> Any:
            return part if spec is not None else jax.tree.map(hidden, part, is_leaf=lambda x: isinstance(x, _Static))

        try:
            return jax.tree.map(of, in_specs, args, is_leaf=lambda spec: spec is None)
        except ValueError:  # in_specs is no prefix of the arguments; the trace says so
            return args

    @functools.wraps(fun)
    def bound(*args: Any) -> Any:
        args = _with_values(args)
        options = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": check_vma}

        def trace() -> tuple[PlacedArguments, TracedFunction]:
            try:
                placed = place(args, {})
            except (ValueError, TypeError):
                # Trace as JAX would: if JAX finds an error too, the user gets JAX's own.
                shard_map_semantics.trace(fun, mesh, (), arguments=lambda _: args, **options)
                raise
            entries = [entry for entry in broadcast_prefix(in_specs, args) if entry[1] is not None]
            for (entry, spec), x in zip(entries, placed.arrays, strict=True):
                check_division(entry, x, spec)

            def arguments(arrays: Sequence[Any]) -> tuple[Any, ...]:
                return tuple(placed.with_arrays(arrays)[0])

            return placed, trace_as_shard_map(fun, placed, arguments=arguments, **options)

        return trace_and_apply("shard_map", fun, mesh.comm, trace)

    options = {"donate_argnums": as_indices(donate_argnums)}
    of_function = bound, options, lambda *given: place(*given).on_mesh_devices(), "shard_map", fun
    has_none = None in jax.tree.leaves(in_specs, is_leaf=lambda spec: spec is None)
    return _WithStatics(hide, *of_function) if has_none else CompiledFunction(*of_function)
