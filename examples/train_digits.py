"""Trains a small convolutional network on handwritten digits, data-parallel over MPI ranks.

    mpirun -n 2 python examples/train_digits.py
    mpirun -n 2 python examples/train_digits.py --checkpoints build/digits    # started again, it goes on from there

Every rank holds the same parameters and sees its own rows of each batch. Two lines communicate: the averages in
``step`` and the sum in ``count_correct``. The losses are the same on any number of ranks, up to rounding.
"""

import argparse
import json
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import pycollective as pc
from checkpoints import Checkpoints


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30, help="passes over the training set (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=128, help="rows of all ranks together (default %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=0.2, help="its peak (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and order of rows (default %(default)s)")
    parser.add_argument("--wire-dtype", choices=["bfloat16"], help="dtype in which gradients travel (default theirs)")
    parser.add_argument("--checkpoints", type=Path, help="directory to save to after each epoch, and to go on from")
    parser.add_argument("--plot", type=Path, default="digits_loss.png", help="loss curve (default %(default)s)")
    parser.add_argument("--losses", type=Path, help="also write the loss of every step to this JSON file")
    return parser.parse_args()


# The network: plain functions of a dictionary of arrays -----------------------------------------------------


def init_params(rng):
    def layer(*shape):
        scale = np.sqrt(2 / np.prod(shape[:-1]))
        return {"w": rng.normal(scale=scale, size=shape).astype(np.float32), "b": np.zeros(shape[-1], np.float32)}

    return {"conv1": layer(3, 3, 1, 32), "conv2": layer(3, 3, 32, 64), "dense": layer(4 * 4 * 64, 10)}


def predict(params, images):
    """Maps images (rows, 8, 8, 1) to logits (rows, 10)."""
    x = images
    for name, stride in (("conv1", 1), ("conv2", 2)):
        x = lax.conv_general_dilated(
            x, params[name]["w"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        # gelu is smooth. At the kink of relu the last bit of a sum, which depends on the number of ranks, could decide
        # between two gradients, and the losses would differ.
        x = jax.nn.gelu(x + params[name]["b"])
    return x.reshape(len(x), -1) @ params["dense"]["w"] + params["dense"]["b"]


def mean_loss(params, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, images), labels).mean()


# What the ranks do together ---------------------------------------------------------------------------------


def make_step(optimizer, wire_dtype=None):
    # The step does not need the old parameters again. They are donated, so the new ones take their memory.
    @partial(pc.jit, donate_argnums=(0, 1))
    def step(params, opt_state, images, labels):
        # All ranks have the same number of rows, so the mean of their means is the mean over the batch.
        loss, grads = jax.value_and_grad(mean_loss)(params, images, labels)
        loss, grads = pc.pmean(loss), pc.pmean(grads, wire_dtype=wire_dtype)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


@pc.jit
def count_correct(params, images, labels):
    return pc.psum(jnp.sum(predict(params, images).argmax(-1) == labels))


def rows_of_rank(rows, comm):
    """Returns this rank's share of ``rows``, which is as large as every other rank's."""
    share = len(rows) // comm.size
    return rows[comm.rank * share : (comm.rank + 1) * share]


def train(params, images, labels, args, comm):
    """Returns the trained parameters and the loss of every step. After a signal there are fewer steps."""
    steps_per_epoch = len(images) // args.batch_size
    total = args.epochs * steps_per_epoch
    optimizer = optax.sgd(optax.cosine_onecycle_schedule(total, args.learning_rate), momentum=0.9, nesterov=True)
    step = make_step(optimizer, args.wire_dtype)
    # Each image comes in nine forms: as it is, and moved by a pixel in eight directions. Each epoch takes one of them.
    shifted = np.stack([np.roll(images, (down, right), axis=(1, 2)) for down in (-1, 0, 1) for right in (-1, 0, 1)])

    # The losses depend on these settings, and not on the number of ranks.
    settings = {name: getattr(args, name) for name in ("epochs", "batch_size", "learning_rate", "seed", "wire_dtype")}
    checkpoints = Checkpoints(args.checkpoints, settings, comm)
    start = {"params": params, "opt_state": optimizer.init(params), "losses": np.zeros(total, np.float32)}
    epoch, state = checkpoints.restore(start)
    params, opt_state = state["params"], state["opt_state"]
    losses = list(state["losses"][: epoch * steps_per_epoch])
    with tqdm(total=total, initial=len(losses), unit="step", disable=comm.rank != 0) as bar:
        while epoch < args.epochs:
            # Every rank draws the same numbers, and draws them again when it goes on from a checkpoint.
            rng = np.random.default_rng((args.seed, epoch))
            order, which = rng.permutation(len(images)), rng.integers(9, size=len(images))
            for batch in range(steps_per_epoch):
                rows = rows_of_rank(order[batch * args.batch_size : (batch + 1) * args.batch_size], comm)
                params, opt_state, loss = step(params, opt_state, shifted[which[rows], rows], labels[rows])
                losses.append(loss)
                bar.update()
            bar.set_postfix(loss=f"{loss:.4f}")  # this waits for the loss, so once an epoch
            epoch += 1
            if checkpoints.enabled:
                padded = np.pad(np.array(losses), (0, total - len(losses)))
                checkpoints.save(epoch, {"params": params, "opt_state": opt_state, "losses": padded})
                if checkpoints.asked():
                    break
    return params, np.array(losses)


def test_accuracy(params, images, labels, comm):
    # Rows are added so that all ranks have the same number. No digit is -1, so these rows never count as correct.
    padding = -len(images) % comm.size
    images = np.pad(images, [(0, padding), (0, 0), (0, 0), (0, 0)])
    padded_labels = np.pad(labels, (0, padding), constant_values=-1)
    correct = count_correct(params, rows_of_rank(images, comm), rows_of_rank(padded_labels, comm))
    return int(correct) / len(labels)


def plot(losses, smooth_over, path):
    from matplotlib.figure import Figure  # only rank 0 draws, so the other ranks need not import it

    figure = Figure(figsize=(7, 4), layout="constrained")  # without pyplot, which would look for a display
    axes = figure.subplots()
    axes.plot(np.arange(1, len(losses) + 1), losses, color="tab:blue", alpha=0.35, linewidth=1, label="each step")
    window = min(smooth_over, len(losses))
    smooth = np.convolve(losses, np.full(window, 1 / window), mode="valid")
    axes.plot(np.arange(window, len(losses) + 1), smooth, color="tab:blue", label=f"mean of the last {window} steps")
    axes.set(xlabel="step", ylabel="training loss (cross-entropy, nats)", yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def main():
    args = parse_arguments()
    comm = pc.world()
    digits = load_digits()
    images = (digits.images[..., None] / 16).astype(np.float32)
    labels = digits.target.astype(np.int32)
    images, test_images, labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    if args.batch_size % comm.size or not 0 < args.batch_size <= len(images):
        error = (
            f"train_digits: expected --batch-size to be a multiple of the number of ranks, {comm.size}, from 1 to "
            f"{len(images)}, got {args.batch_size}. Choose {64 * comm.size}, for example."
        )
        sys.exit(error if comm.rank == 0 else 1)

    rng = np.random.default_rng(args.seed)  # gives the same numbers on all ranks
    # So the ranks have the same parameters already. Parameters from a file, for example, would need the broadcast.
    params = pc.broadcast(init_params(rng))
    params, losses = train(params, images, labels, args, comm)
    accuracy = test_accuracy(params, test_images, test_labels, comm)

    if comm.rank == 0:
        plot(losses, len(images) // args.batch_size, args.plot)
        if args.losses:
            args.losses.write_text(json.dumps(losses.tolist()))
        if len(losses) < args.epochs * (len(images) // args.batch_size):
            print(f"asked to stop after step {len(losses)}: the same command goes on from there")
        print(f"test accuracy {accuracy:.4f}")
        print(f"loss curve in {args.plot.resolve()}")


if __name__ == "__main__":
    main()
