"""Trains a small GPT on the source text of Python's standard library, data-parallel and, if asked, tensor-parallel.

    mpirun -n 2 python examples/train_gpt.py
    mpirun -n 2 python examples/train_gpt.py --model-parallel 2
    JAX_NUM_CPU_DEVICES=4 mpirun -n 2 python examples/train_gpt.py --model-parallel 2 --sample 400
    mpirun -n 2 python examples/train_gpt.py --checkpoints build/gpt    # started again, it goes on, on any mesh
    mpirun -n 2 -hosts h0,h1 python examples/train_gpt.py --layers 6 --width 256    # gradients travel meanwhile

The devices of all ranks form a mesh with the axes "data" and "model". Along "data" each device sees its own rows of a
batch; along "model" each device has its own attention heads and hidden units: see ``LAYER_SPECS``. Each block of the
network ends with a sum over "model". Its derivative begins with a sum too (g and f of Megatron-LM, arXiv:1909.08053):
JAX adds it, since its types say what varies along an axis. The losses are the same on any mesh, up to rounding.

Each layer has arrays of its own, and a loop of Python runs through them. So the gradients of one layer can travel while
the backward pass computes those of the next; a lax.scan would have all of them at its end.
"""

import argparse
import json
import sys
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P
from tqdm import tqdm

import pycollective as pc
from checkpoints import Checkpoints
from corpus import draw_starts, read_text

CONTEXT, HEADS = 64, 4


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="of the training (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="rows of all ranks together (default %(default)s)")
    parser.add_argument("--layers", type=int, default=3, help="of the network (default %(default)s)")
    parser.add_argument("--width", type=int, default=64, help="of the network, a multiple of 4 (default %(default)s)")
    parser.add_argument("--model-parallel", type=int, default=1, help="devices along 'model' (default %(default)s)")
    parser.add_argument("--wire-dtype", choices=["bfloat16"], help="dtype in which gradients travel (default theirs)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, batches, sample (default %(default)s)")
    parser.add_argument("--devices", type=int, help="local devices of each rank (default all)")
    parser.add_argument("--losses", type=Path, help="write the loss of every step to this JSON file")
    parser.add_argument("--checkpoints", type=Path, help="directory to save to, and to go on from")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints (default %(default)s)")
    parser.add_argument("--sample", type=int, default=0, help="characters to print at the end (default %(default)s)")
    return parser.parse_args()


# The network, as one device sees it --------------------------------------------------------------------------

# The axis of each parameter that is cut along "model".
LAYER_SPECS = {
    "norm1": P(),
    "qkv": P(None, None, "model"),
    "out": P("model"),
    "norm2": P(),
    "up": P(None, "model"),
    "down": P("model"),
}


def init_params(rng, vocabulary, layers, width):
    """Returns the parameters, and the axes along which each is cut."""

    def normal(*shape, scale):
        return rng.normal(scale=scale, size=shape).astype(np.float32)

    def layer():
        return {
            "norm1": np.ones(width, np.float32),
            "qkv": normal(3, width, HEADS, head, scale=into),
            "out": normal(HEADS, head, width, scale=back),
            "norm2": np.ones(width, np.float32),
            "up": normal(width, hidden, scale=into),
            "down": normal(hidden, width, scale=back),
        }

    head, hidden = width // HEADS, 4 * width
    into, back = width**-0.5, (2 * layers * width) ** -0.5  # so the sum of all blocks' results stays near 1
    params = {
        "embed": normal(vocabulary, width, scale=0.05),
        "position": normal(CONTEXT, width, scale=0.05),
        "layers": [layer() for _ in range(layers)],
        "norm": np.ones(width, np.float32),
    }
    return params, {"embed": P(), "position": P(), "layers": [LAYER_SPECS] * layers, "norm": P()}


def predict(params, tokens):
    """Maps tokens (rows, CONTEXT) to the logits of the next tokens (rows, CONTEXT, vocabulary)."""
    x = params["embed"][tokens] + params["position"]
    for p in params["layers"]:
        q, k, v = jnp.einsum("rtw,cwhd->crthd", jax.nn.standardize(x) * p["norm1"], p["qkv"])
        heads = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x += lax.psum(jnp.einsum("rthd,hdw->rtw", heads, p["out"]), "model")
        hidden = jax.nn.gelu((jax.nn.standardize(x) * p["norm2"]) @ p["up"])
        x += lax.psum(hidden @ p["down"], "model")
    return (jax.nn.standardize(x) * params["norm"]) @ params["embed"].T


def mean_loss(params, rows):
    return optax.softmax_cross_entropy_with_integer_labels(predict(params, rows[:, :-1]), rows[:, 1:]).mean()


def make_step(optimizer, wire_dtype=None):
    def step(params, opt_state, rows):
        # The cast makes the parameters vary along "data"; else JAX would sum their derivatives by itself. All devices
        # have the same number of rows, so the mean of their means is the mean over the batch.
        own = lax.pcast(params, "data", to="varying")
        loss, grads = jax.value_and_grad(mean_loss)(own, rows)
        loss, grads = lax.pmean(loss, "data"), pc.pmean(grads, "data", wire_dtype=wire_dtype)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    return step


def sample(params, prompt, keys):
    """Draws a token for each key, from what the network expects after the last CONTEXT tokens."""

    def append(tokens, key):
        token = jax.random.categorical(key, predict(params, tokens[None])[0, -1])
        return jnp.append(tokens[1:], token), token

    return lax.scan(append, prompt, keys)[1]


# Training ----------------------------------------------------------------------------------------------------


def whole(x, spec):
    """Gathers an array of which each device along "model" holds a part."""
    cut = tuple(spec)
    return lax.all_gather(x, "model", axis=cut.index("model"), tiled=True) if "model" in cut else x


def own_block(x, spec, mesh):
    """Returns the part of a global array that lies on this rank's devices."""
    places = np.unravel_index(mesh.comm.rank, [axis.ranks for axis in mesh.axes])
    for axis, place in zip(mesh.axes, places, strict=True):
        if axis.name in tuple(spec):
            x = np.split(x, axis.ranks, tuple(spec).index(axis.name))[place]
    return x


def train(params, param_specs, text, args, mesh):
    """Returns this rank's own block of the trained parameters, and the loss of every step.

    After a signal there are fewer steps.
    """
    optimizer = optax.adamw(optax.cosine_onecycle_schedule(args.steps, 5e-3))
    opt_state = optimizer.init(params)
    # Adam's moments are cut as the parameters are.
    opt_specs = optax.tree.map_params(
        optimizer, lambda _, spec: spec, opt_state, param_specs, transform_non_params=lambda _: P()
    )
    step = pc.shard_map(
        make_step(optimizer, args.wire_dtype),
        mesh=mesh,
        in_specs=(param_specs, opt_specs, P("data")),
        out_specs=(param_specs, opt_specs, P()),
        donate_argnums=(0, 1),
    )
    # A checkpoint holds whole arrays, so that a training on another mesh can go on from it.
    specs = {"params": param_specs, "opt_state": opt_specs}
    # By JAX's types a gathered array still varies along the axis, so this program has no types.
    gather = pc.shard_map(
        lambda state: jax.tree.map(whole, state, specs), mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=False
    )

    # The losses depend on these settings, and not on the mesh. Another Python has another library, so another text.
    settings = {name: getattr(args, name) for name in ("steps", "batch_size", "layers", "width", "seed", "wire_dtype")}
    settings["text"] = zlib.crc32(text.tobytes())
    checkpoints = Checkpoints(args.checkpoints, settings, mesh.comm)
    start = {"params": params, "opt_state": opt_state, "losses": np.zeros(args.steps, np.float32)}
    done, start = checkpoints.restore(start)
    losses = list(start.pop("losses")[:done])
    state = jax.tree.map(lambda x, spec: own_block(x, spec, mesh), start, specs)
    params, opt_state = state["params"], state["opt_state"]

    with tqdm(total=args.steps, initial=done, unit="step", disable=mesh.comm.rank != 0) as bar:
        for i in range(done, args.steps):
            # Every rank draws the same numbers, and draws them again when it goes on from a checkpoint.
            starts = draw_starts(text, CONTEXT, args.batch_size, (args.seed, i))
            rows = own_block(text[starts[:, None] + np.arange(CONTEXT + 1)], P("data"), mesh)
            params, opt_state, loss = step(params, opt_state, rows)
            losses.append(loss)
            bar.update()
            if i % 20 == 19:  # reading the loss waits for it
                bar.set_postfix(loss=f"{loss:.4f}")
            asked = checkpoints.enabled and i % 20 == 19 and checkpoints.asked()
            if checkpoints.enabled and (asked or len(losses) % args.save_every == 0 or len(losses) == args.steps):
                padded = np.pad(np.array(losses), (0, args.steps - len(losses)))
                checkpoints.save(i + 1, {**gather({"params": params, "opt_state": opt_state}), "losses": padded})
            if asked:
                break
    return params, [float(loss) for loss in losses]


def main():
    args = parse_arguments()
    comm = pc.init(devices=args.devices)
    mesh = pc.make_mesh((-1, args.model_parallel), ("data", "model"))
    if args.batch_size % mesh.shape["data"] or HEADS % mesh.shape["model"] or args.width % HEADS:
        error = (
            f"train_gpt: expected --batch-size to be a multiple of {mesh.shape['data']}, --model-parallel to be a "
            f"divisor of {HEADS} heads and --width to be a multiple of {HEADS}, got {args.batch_size}, "
            f"{args.model_parallel} and {args.width}. Choose powers of two."
        )
        sys.exit(error if comm.rank == 0 else 1)

    text, vocabulary = read_text()
    rng = np.random.default_rng(args.seed)  # gives the same numbers on all ranks
    params, param_specs = init_params(rng, len(vocabulary), args.layers, args.width)
    params, losses = train(params, param_specs, text, args, mesh)
    if comm.rank == 0:
        if args.losses:
            args.losses.write_text(json.dumps(losses))
        if len(losses) < args.steps:
            print(f"asked to stop after step {len(losses)}: the same command goes on from there")
        print(f"loss {losses[0]:.4f} -> {np.mean(losses[-20:]):.4f}, in nats per character")
    if args.sample:  # on all ranks, since each may hold a part of the model
        draw = pc.shard_map(sample, mesh=mesh, in_specs=(param_specs, P(), P()), out_specs=P())
        tokens = draw(params, text[:CONTEXT], jax.random.split(jax.random.key(args.seed), args.sample))
        if comm.rank == 0:
            print("".join(vocabulary[np.asarray(tokens)]))


if __name__ == "__main__":
    main()
