"""Trains a small GPT on global arrays: the program says how arrays are sharded, and XLA adds the collectives.

    python examples/train_sharded.py
    mpirun -n 2 python examples/train_sharded.py --layers 6
    mpirun -n 4 python examples/train_sharded.py --model 2    # 2 x 2 devices: two parts of the batch, two of the model

Two lines are pycollective's, its import and ``pc.distributed.initialize()``; the others are plain JAX. With them the
devices of all ranks, one of each, are JAX's devices, and XLA's collectives go through MPI. The devices form a mesh with
the axes "data" and "model". A batch is cut along "data"; attention heads and hidden units are cut along "model" (as in
Megatron-LM, arXiv:1909.08053). ``ALONG_MODEL`` says so by the names of parameters. The network is written as for one
device. The losses are the same on any mesh, up to rounding.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import pycollective as pc  # before jax, so that XLA finds MPI

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

from corpus import draw_starts, read_text


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=int, default=1, help="devices along 'model' (default %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="of the training (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="rows of all ranks together (default %(default)s)")
    parser.add_argument("--layers", type=int, default=3, help="of the network (default %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="numbers for each character (default %(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="of attention in each layer (default %(default)s)")
    parser.add_argument("--context", type=int, default=64, help="characters of a row (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and batches (default %(default)s)")
    parser.add_argument("--report-every", type=int, default=20, help="steps between lines (default %(default)s)")
    parser.add_argument("--losses", type=Path, help="write the loss of every step to this JSON file")
    return parser.parse_args()


# The network, as for one device ------------------------------------------------------------------------------


def init_params(key, args, vocabulary):
    keys = iter(jax.random.split(key, 6))

    def normal(*shape, scale):
        return scale * jax.random.normal(next(keys), shape)

    layers, width, head, hidden = args.layers, args.width, args.width // args.heads, 4 * args.width
    into, back = width**-0.5, (2 * layers * width) ** -0.5  # so the sum of all blocks' results stays near 1
    return {
        "embed": normal(vocabulary, width, scale=0.05),
        "position": normal(args.context, width, scale=0.05),
        "layers": {  # stacked, for lax.scan
            "norm1": jnp.ones((layers, width)),
            "qkv": normal(layers, 3, width, args.heads, head, scale=into),
            "out": normal(layers, args.heads, head, width, scale=back),
            "norm2": jnp.ones((layers, width)),
            "up": normal(layers, width, hidden, scale=into),
            "down": normal(layers, hidden, width, scale=back),
        },
        "norm": jnp.ones(width),
    }


def mean_loss(params, rows):
    """Returns the cross-entropy of each character of the rows, given those before it, in nats per character."""

    def layer(x, p):
        q, k, v = jnp.einsum("rtw,cwhd->crthd", jax.nn.standardize(x) * p["norm1"], p["qkv"])
        heads = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x += jnp.einsum("rthd,hdw->rtw", heads, p["out"])
        return x + jax.nn.gelu((jax.nn.standardize(x) * p["norm2"]) @ p["up"]) @ p["down"], None

    tokens, expected = rows[:, :-1], rows[:, 1:]
    x, _ = jax.lax.scan(layer, params["embed"][tokens] + params["position"], params["layers"])
    logits = (jax.nn.standardize(x) * params["norm"]) @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, expected).mean()


# Where its arrays lie ----------------------------------------------------------------------------------------

# The parameters that are cut along "model", by name. Each device has the others whole.
ALONG_MODEL = {
    "qkv": P(None, None, None, "model"),
    "out": P(None, "model"),
    "up": P(None, None, "model"),
    "down": P(None, "model"),
}


def shardings_of(tree, mesh):
    """Returns the sharding of each array of a tree. Adam's moments have the names of the parameters, so theirs."""

    def sharding(path, _):
        name = getattr(path[-1], "key", None)  # what is no parameter, as Adam's number of steps, has no such name
        return NamedSharding(mesh, ALONG_MODEL.get(name, P()))

    return jax.tree.map_with_path(sharding, tree)


# Training ----------------------------------------------------------------------------------------------------


def train(text, vocabulary, args, mesh):
    """Returns the loss of every step, and how many characters a second were trained on after the first step."""
    optimizer = optax.adamw(optax.cosine_onecycle_schedule(args.steps, 5e-3))

    def init(key):
        params = init_params(key, args, len(vocabulary))
        return params, optimizer.init(params)

    def step(state, rows):
        params, opt_state = state
        loss, grads = jax.value_and_grad(mean_loss)(params, rows)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    key = jax.random.key(args.seed)
    shardings = shardings_of(jax.eval_shape(init, key), mesh)
    state = jax.jit(init, out_shardings=shardings)(key)  # each device makes its own part
    step = jax.jit(step, out_shardings=(shardings, NamedSharding(mesh, P())), donate_argnums=0)
    along_data = NamedSharding(mesh, P("data"))
    prints = jax.process_index() == 0
    if prints:
        arrays = jax.tree.leaves(state)
        whole, own = sum(x.size for x in arrays), sum(x.addressable_data(0).size for x in arrays)
        print(f"parameters and Adam's moments: {whole:,} numbers, {own:,} of them on each device")

    losses = []
    with tqdm(total=args.steps, unit="step", disable=not prints) as bar:
        for i in range(args.steps):
            # Every rank draws the same places in the text, and reads there the rows of its own device.
            starts = draw_starts(text, args.context, args.batch_size, (args.seed, i))
            rows = jax.make_array_from_callback(
                (args.batch_size, args.context + 1),
                along_data,
                lambda index, starts=starts: text[starts[index[0], None] + np.arange(args.context + 1)],
            )
            state, loss = step(state, rows)
            losses.append(loss)
            bar.update()
            if i == 0:  # it has compiled
                loss.block_until_ready()
                began = time.perf_counter()
            if prints and (i + 1) % args.report_every == 0:  # reading the loss waits for it
                bar.write(f"step {i + 1}: loss {loss:.4f}")
    jax.block_until_ready(state)
    seconds = time.perf_counter() - began
    return [float(loss) for loss in losses], (args.steps - 1) * args.batch_size * args.context / seconds


def main():
    args = parse_arguments()
    pc.distributed.initialize()
    devices, prints = jax.device_count(), jax.process_index() == 0
    data = max(1, devices // args.model)
    if data * args.model != devices or args.heads % args.model or args.width % args.heads or args.batch_size % data:
        error = (
            f"train_sharded: expected --model to be a divisor of {devices} devices and of --heads, --heads of --width, "
            f"and --batch-size to be a multiple of {data}, the devices along 'data', got --model {args.model}, --heads "
            f"{args.heads}, --width {args.width}, --batch-size {args.batch_size}. Choose powers of two."
        )
        sys.exit(error if prints else 1)

    # XLA chooses how what lies between the annotated arrays is sharded: jax.sharding calls such axes Auto.
    mesh = jax.make_mesh((data, args.model), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    losses, speed = train(*read_text(), args, mesh)
    if prints:
        if args.losses:
            args.losses.write_text(json.dumps(losses))
        print(f"{data} x {args.model} devices: loss {losses[0]:.4f} -> {losses[-1]:.4f}, {speed:,.0f} tokens/s")


if __name__ == "__main__":
    main()
