"""What :func:`jax.export.export` has to be told so that it writes a program with collectives."""

from __future__ import annotations

import jax.export

from pycollective.ranks.world import world
from pycollective.transport import native


def export_checks() -> list[jax.export.DisabledSafetyCheck]:
    """The safety checks of :func:`jax.export.export` that refuse programs with collectives, for ``disabled_checks``.

    JAX writes only calls of handlers that promise to stay compatible. The handlers of this package make no such
    promise: an exported program runs with the build of the package, and on the rank, that have exported it. Elsewhere
    its call raises an error.

    - Each rank exports its own program, and loads that.
    - The process that loads it calls :func:`init` with the same devices, and makes the communicators that the program
      uses in the same order as the process that exported it.
    - Derivatives are exported too, if :meth:`jax.export.Exported.serialize` gets ``vjp_order=1``.
    - All lengths are numbers, not symbols, and ``platforms`` has one platform: JAX joins no ordered calls of several.
    - A loaded program may stand in other programs: its ``call`` is a function as any other for ``pc.jit``,
      ``jax.grad``, ``lax.scan`` and ``lax.cond``. JAX has no :func:`jax.vmap` of it.

    Returns:
        A check for each handler. :func:`init` is called, unless it has been.

    Example:
        >>> import jax.numpy as jnp, pycollective as pc
        >>> from jax import export, lax
        >>> mean = pc.jit(lambda x: lax.pmean(x, "batch"), axis_name="batch")
        >>> written = export.export(mean, disabled_checks=pc.export_checks())(jnp.ones(3)).serialize()
        >>> export.deserialize(written).call(jnp.ones(3))
        Array([1., 1., 1.], dtype=float32)
    """
    world()
    return [jax.export.DisabledSafetyCheck.custom_call(f"pycollective_{target}") for target in native.all_targets()]
