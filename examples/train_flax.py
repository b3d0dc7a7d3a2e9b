"""Trains a Flax network with batch normalisation on handwritten digits, data-parallel over ranks x local devices.

    mpirun -n 2 python examples/train_flax.py
    JAX_NUM_CPU_DEVICES=4 mpirun -n 2 python examples/train_flax.py --devices 2
    mpirun -n 2 python examples/train_flax.py --checkpoints build/flax    # started again, it goes on from there

It is a program for ``jax.pmap`` that calls ``pc.pmap`` instead. One of its lines communicates, the ``lax.pmean`` in
``train_step``. ``nn.BatchNorm(axis_name="batch")`` takes its statistics over the whole batch. The losses are the same
on any number of ranks and devices, up to rounding.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from jax import lax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import pycollective as pc
from checkpoints import Checkpoints


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12, help="passes over the training set (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="rows of all ranks together (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and order of rows (default %(default)s)")
    parser.add_argument("--devices", type=int, help="local devices of each rank (default all)")
    parser.add_argument("--steps", type=int, default=sys.maxsize, help="stop after this many steps")
    parser.add_argument("--checkpoints", type=Path, help="directory to save to after each epoch, and to go on from")
    parser.add_argument("--losses", type=Path, help="write the loss of every step to this JSON file")
    return parser.parse_args()


# The network, which knows nothing of MPI ---------------------------------------------------------------------


class Network(nn.Module):
    @nn.compact
    def __call__(self, images, train):
        """Maps images (rows, 8, 8, 1) to logits (rows, 10)."""
        x = images
        for features, stride in ((32, 1), (64, 2)):
            x = nn.Conv(features, (3, 3), stride, use_bias=False)(x)
            x = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name="batch")(x)
            x = nn.gelu(x)  # smooth; at the kink of relu a rounding error could choose the gradient
        return nn.Dense(10)(x.reshape(len(x), -1))


class TrainState(train_state.TrainState):
    batch_stats: Any


def train_step(state, images, labels):
    def mean_loss(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, updates = state.apply_fn(variables, images, train=True, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), updates["batch_stats"]

    (loss, batch_stats), grads = jax.value_and_grad(mean_loss, has_aux=True)(state.params)
    # All devices have the same number of rows, so the mean of their means is the mean over the batch.
    loss, grads = lax.pmean((loss, grads), "batch")
    return state.apply_gradients(grads=grads, batch_stats=batch_stats), loss


@jax.jit
def count_correct(state, images, labels):
    logits = state.apply_fn({"params": state.params, "batch_stats": state.batch_stats}, images, train=False)
    return jnp.sum(logits.argmax(-1) == labels)


# Training ----------------------------------------------------------------------------------------------------


def train(state, images, labels, args, comm, devices):
    """Returns the trained state and the loss of every step. After a signal there are fewer steps."""
    # All devices share one state, before and after a step. The rows have a first axis over this rank's devices.
    step = pc.pmap(train_step, "batch", in_axes=(None, 0, 0), out_axes=None, donate_argnums=0)
    steps_per_epoch = len(images) // args.batch_size
    total = min(args.epochs * steps_per_epoch, args.steps)

    # The losses depend on these settings, and not on the number of ranks.
    settings = {name: getattr(args, name) for name in ("epochs", "batch_size", "seed", "steps")}
    checkpoints = Checkpoints(args.checkpoints, settings, comm)
    epoch, start = checkpoints.restore({**arrays_of(state), "losses": np.zeros(total, np.float32)})
    losses = list(start.pop("losses")[: epoch * steps_per_epoch])
    state = state.replace(**start)
    with tqdm(total=total, initial=len(losses), unit="step", disable=comm.rank != 0) as bar:
        while len(losses) < total:
            # Every rank draws the same numbers, and draws them again when it goes on from a checkpoint.
            rng = np.random.default_rng((args.seed, epoch))
            order = rng.permutation(len(images))[: steps_per_epoch * args.batch_size]
            for batch in order.reshape(steps_per_epoch, comm.size, devices, -1)[: total - len(losses)]:
                rows = batch[comm.rank]  # this rank's share: (devices, rows of a device)
                state, loss = step(state, images[rows], labels[rows])
                losses.append(loss)
                bar.update()
            epoch += 1
            if comm.rank == 0:  # reading the loss waits for it, so once an epoch
                bar.write(f"epoch {epoch}: loss {loss:.4f}")
            if checkpoints.enabled:
                padded = np.pad(np.array(losses), (0, total - len(losses)))
                checkpoints.save(epoch, {**arrays_of(state), "losses": padded})
                if checkpoints.asked():
                    break
    return state, [float(loss) for loss in losses]


def arrays_of(state):
    """Returns the parts of the state that change."""
    return {name: getattr(state, name) for name in ("step", "params", "opt_state", "batch_stats")}


def main():
    args = parse_arguments()
    comm = pc.init(devices=args.devices)
    devices = args.devices or jax.local_device_count()
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    images, test_images, labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    if args.batch_size % (comm.size * devices) or not 0 < args.batch_size <= len(images):
        error = (
            f"train_flax: expected --batch-size to be a multiple of ranks x devices, {comm.size} x {devices}, from 1 "
            f"to {len(images)}, got {args.batch_size}. Choose {32 * comm.size * devices}, for example."
        )
        sys.exit(error if comm.rank == 0 else 1)

    network = Network()
    variables = network.init(jax.random.key(args.seed), images[:1], train=False)
    optimizer = optax.sgd(0.05, momentum=0.9, nesterov=True)
    state = TrainState.create(apply_fn=network.apply, tx=optimizer, **variables)
    state, losses = train(state, images, labels, args, comm, devices)

    if comm.rank == 0:  # every rank has the whole trained network, so rank 0 can test it alone
        if args.losses:
            args.losses.write_text(json.dumps(losses))
        print(f"test accuracy {count_correct(state, test_images, test_labels) / len(test_labels):.4f}")


if __name__ == "__main__":
    main()
