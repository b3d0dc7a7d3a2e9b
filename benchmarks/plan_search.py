"""How long it takes to find a plan by compilation: for a GPT of four blocks with Adam, on 64 absent devices.

python benchmarks/plan_search.py
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax
import optax
from plan import decoder

import pycollective as pc

Tree = Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="dgx-a100")
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--compilations", type=int, default=60)
    options = parser.parse_args()
    loss, params, tokens = decoder(options.layers, batch=2 * options.devices)
    adam = optax.adam(1e-3)

    def step(params: Tree, state: Tree, tokens: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        updates, state = adam.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    started = time.perf_counter()
    ranking = pc.plan(
        step,
        params,
        jax.eval_shape(adam.init, params),
        tokens,
        profile=options.profile,
        devices=options.devices,
        compilations=options.compilations,
    )
    print(f"{len(ranking)} plans in {time.perf_counter() - started:.0f} s; the best: {ranking.best}")


if __name__ == "__main__":
    main()
