"""The function whose programs docs/pipeline.md shows, after each pass of the pipeline.

python -m pycollective.spmd.show docs/pictures/pipeline.py:step 'f32[]' 'f32[3]' > docs/pictures/pipeline.txt
"""

from __future__ import annotations

from typing import Any

from jax import lax

import pycollective as pc


@pc.jit(axis_name="i")
def step(loss: Any, grad: Any) -> Any:
    """Averages a loss and a gradient over the ranks."""
    return lax.pmean(loss, "i"), lax.pmean(grad, "i")
