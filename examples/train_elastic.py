"""Trains the network of train_digits.py, and goes on when ranks die: the others take over their rows.

    pycollective run -n 3 --elastic examples/train_elastic.py            # Open MPI 5
    mpiexec --with-ft ulfm -n 3 python examples/train_elastic.py         # the same

Kill a rank to see it. The losses are the same on any number of ranks, up to rounding, so a death does not change them.
"""

import argparse
import json
import os
import signal
from pathlib import Path

import jax
import numpy as np
import optax
from sklearn.datasets import load_digits
from tqdm import tqdm
from train_digits import init_params, predict

import pycollective as pc

STEPS_PER_COMMIT = 10


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="gradient steps (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="rows of all ranks together (default %(default)s)")
    parser.add_argument("--kill", type=int, metavar="STEP", help="let the last rank kill itself before this step")
    parser.add_argument("--losses", type=Path, help="write the loss of every step to this JSON file")
    return parser.parse_args()


def main():
    args = parse_arguments()
    digits = load_digits()
    images, labels = (digits.images[..., None] / 16).astype(np.float32), digits.target.astype(np.int32)
    optimizer = optax.sgd(0.1, momentum=0.9)

    def loss_of_rows(params, images, labels):
        logits = predict(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).sum() / args.batch_size

    @pc.jit
    def step(params, opt_state, images, labels):
        # Ranks may have unequal numbers of rows: what they add up are sums over rows, not means.
        loss, grads = pc.psum(jax.value_and_grad(loss_of_rows)(params, images, labels))
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    started_last = pc.world().rank == pc.world().size - 1

    @pc.elastic.run
    def train(state, world):
        with tqdm(total=args.steps, initial=state.step, unit="step", disable=world.rank != 0) as bar:
            while state.step < args.steps:
                if started_last and state.step == args.kill:
                    os.kill(os.getpid(), signal.SIGKILL)
                rng = np.random.default_rng(state.step)  # every rank draws the same rows, and takes its share
                rows = np.array_split(rng.choice(len(images), args.batch_size), world.size)[world.rank]
                state.params, state.opt_state, loss = step(state.params, state.opt_state, images[rows], labels[rows])
                state.losses = [*state.losses, loss]
                state.step += 1
                bar.update()
                if state.step % STEPS_PER_COMMIT == 0:
                    state.commit()

    params = init_params(np.random.default_rng(0))
    state = pc.elastic.State(params=params, opt_state=optimizer.init(params), step=0, losses=[])
    train(state)
    if pc.world().rank == 0:
        losses = [float(loss) for loss in state.losses]
        if args.losses:
            args.losses.write_text(json.dumps(losses))
        print(f"loss {losses[0]:.4f} at the first step, {losses[-1]:.4f} at the last, on {pc.world().size} ranks")


if __name__ == "__main__":
    main()
