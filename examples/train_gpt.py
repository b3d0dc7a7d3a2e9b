"""Trains a small GPT on the source text of Python's standard library, by any strategy of pycollective.parallel.

    mpirun -n 2 python examples/train_gpt.py                                # data-parallel
    mpirun -n 2 python examples/train_gpt.py --zero 2                       # each rank has a part of Adam's state
    mpirun -n 2 python examples/train_gpt.py --model 2                      # ... of each layer
    mpirun -n 2 python examples/train_gpt.py --context 2                    # ... of each row
    mpirun -n 2 python examples/train_gpt.py --stage 2 --schedule 1f1b      # ... of the layers
    mpirun -n 2 python examples/train_gpt.py --local-steps 20               # DiLoCo: they meet every 20 steps
    JAX_NUM_CPU_DEVICES=4 mpirun -n 2 python examples/train_gpt.py --data 2 --context 2 --model 2 --zero 1
    mpirun -n 2 python examples/train_gpt.py --checkpoints build/gpt        # started again, it goes on, on any layout
    mpirun -n 2 -hosts h0,h1 python examples/train_gpt.py --layers 6 --width 256    # gradients travel meanwhile

The devices of all ranks form a mesh with the axes "data", "context" and "model". With stages, the ranks of each stage
form a mesh of their own, and each rank compiles its own stage alone. The losses are the same on any layout, up to
rounding, but for local steps: there they depend on the number of devices along "data", which see each other's work
only now and then.

Each layer has arrays of its own, and a loop of Python runs through them. So the gradients of one layer can travel while
the backward pass computes those of the next; a lax.scan would have all of them at its end.
"""

import argparse
import json
import sys
import zlib
from pathlib import Path

import gpt
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
from pycollective import parallel
from pycollective.planning import StepRecord, transformer

AXES = ("data", "context", "model")
EXAMPLES = ("data", "context")
"""Devices along these axes have the same parameters, and examples or positions of their own."""

SCHEDULES = {
    "gpipe": parallel.gpipe,
    "1f1b": parallel.one_f_one_b,
    "interleaved": parallel.interleaved,
    "zero-bubble": parallel.zero_bubble,
}


def parse_arguments(words=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--data", type=int, help="devices along 'data', with rows of their own (default all that are left)")
    add("--model", type=int, default=1, help="devices along 'model': heads, hidden units (default %(default)s)")
    add("--context", type=int, default=1, help="devices along 'context': parts of a row (default %(default)s)")
    add("--stage", type=int, default=1, help="stages of a pipeline, over ranks (default %(default)s)")
    add("--schedule", choices=SCHEDULES, help="of the pipeline (default 1f1b)")
    add(
        "--cuts",
        type=lambda text: [int(n) for n in text.split(",")],
        help="parts of each stage, as 3,2, or of each chunk in the order of the network (default even)",
    )
    add("--microbatches", type=int, help="of a pipeline's batch (default two for each stage)")
    add("--chunks", type=int, default=2, help="of each stage, with --schedule interleaved (default %(default)s)")
    add("--remat", action="store_true", help="compute activations again in the backward pass, and keep few of them")
    add("--zero", type=int, choices=range(4), default=0, help="stage of ZeRO along data and context (default none)")
    add("--local-steps", type=int, default=0, help="steps between two meetings along 'data' (default: always together)")
    add("--steps", type=int, default=600, help="of the training (default %(default)s)")
    add("--batch-size", type=int, default=16, help="rows of all devices together (default %(default)s)")
    add("--layers", type=int, default=3, help="of the network (default %(default)s)")
    add("--width", type=int, default=64, help="of the network, a multiple of 4 (default %(default)s)")
    add("--wire-dtype", choices=["bfloat16"], help="dtype in which gradients travel (default theirs)")
    add("--seed", type=int, default=0, help="of parameters, batches, sample (default %(default)s)")
    add("--devices", type=int, help="local devices of each rank (default all; with stages one)")
    add(
        "--step-times",
        type=Path,
        help="write what steps take to this JSON file: seconds and memory; each is waited for",
    )
    add("--losses", type=Path, help="write the loss of every step to this JSON file")
    add("--checkpoints", type=Path, help="directory to save to, and to go on from")
    add("--save-every", type=int, default=100, help="steps between checkpoints (default %(default)s)")
    add("--sample", type=int, default=0, help="characters to print at the end (default %(default)s)")
    return parser.parse_args(words)


def network(words):
    """Returns what `pycollective plan` has to know of the network, for the words of a command line."""
    args = parse_arguments(words)
    _, vocabulary = read_text()
    entries = -(-len(vocabulary) // gpt.HEADS) * gpt.HEADS
    sizes = {"layers": args.layers, "width": args.width, "heads": gpt.HEADS, "positions": gpt.CONTEXT}
    return transformer(**sizes, vocabulary=entries, examples=args.batch_size)


# The layout --------------------------------------------------------------------------------------------------


class Layout:
    """Which part of the network, of its arrays and of the batch this rank's devices have."""

    def __init__(self, args, comm):
        per_stage = comm.size // args.stage
        self.stage, place = divmod(comm.rank, per_stage)
        self.across_stages = comm.split(place, key=self.stage) if args.stage > 1 else None
        same_stage = comm.split(self.stage, key=place) if args.stage > 1 else comm
        self.mesh = pc.make_mesh((args.data, args.context, args.model), AXES, comm=same_stage)
        options = {"chunks": args.chunks} if args.schedule == "interleaved" else {}
        self.schedule = SCHEDULES[args.schedule](args.stage, args.microbatches, **options) if args.stage > 1 else None
        chunks = self.schedule.chunks if self.schedule else 1
        ends = np.cumsum(args.cuts)[:-1] if args.cuts else args.stage * chunks
        parts = np.array_split(gpt.part_names(args.layers), ends)
        # Of a pipeline's chunks each rank has every stage-th one.
        self.chunks = [[str(name) for name in chunk] for chunk in parts[self.stage :: args.stage]]

    def own(self, params):
        """Returns the parameters of this rank's stage."""
        return {name: params[name] for chunk in self.chunks for name in chunk}

    def on_devices(self, fun, in_specs, out_specs, **options):
        """Compiles a function of what one device has. A state has a leading axis of one, which is the device's."""
        return pc.shard_map(fun, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False, **options)


def problems(args, devices):
    """Yields a sentence for each thing about the layout that cannot be."""
    if min(args.data, args.model, args.context, args.stage, args.microbatches) < 1 or args.local_steps < 0:
        yield "expected numbers of devices, stages, microbatches from 1 on, and of local steps from 0 on, got less."
    others = args.model * args.context * args.stage
    if args.data * others != devices:
        yield (
            f"expected --data x --context x --model x --stage to be the {devices} devices, got {args.data} x "
            f"{args.context} x {args.model} x {args.stage}. Choose factors of the number of ranks times --devices."
        )
    if args.batch_size % (args.data * args.microbatches):
        yield (
            f"expected --batch-size to be a multiple of {args.data} (--data) x {args.microbatches} (--microbatches), "
            f"got {args.batch_size}. Choose powers of two."
        )
    if gpt.HEADS % args.model or args.width % gpt.HEADS:
        yield (
            f"expected --model to be a divisor of {gpt.HEADS} heads and --width a multiple of them, got {args.model} "
            f"and {args.width}. Choose powers of two."
        )
    if gpt.CONTEXT % args.context:
        yield f"expected --context to be a divisor of {gpt.CONTEXT}, got {args.context}. Choose a power of two."
    if args.stage > 1 and (args.devices or 1) > 1:
        yield f"expected --devices 1 with stages, got {args.devices}. Start a rank for each device."
    if args.stage == 1 and (args.schedule or args.microbatches > 1):
        yield f"expected --stage above 1 for --schedule or --microbatches, got {args.stage}. A pipeline has stages."
    chunks = args.stage * (args.chunks if args.schedule == "interleaved" else 1)
    if args.chunks < 2:
        yield f"expected --chunks of at least 2, got {args.chunks}. Without chunks choose --schedule 1f1b."
    if args.stage > 1 and chunks > args.layers + 2:
        yield f"expected at most {args.layers + 2} parts of the network, got {chunks}. Choose more --layers."
    cuts = ",".join(map(str, args.cuts or []))
    if args.cuts and len(args.cuts) != chunks:
        yield (
            f"expected --cuts with a number for each of {chunks} stages or chunks, got {cuts}. "
            "Leave it out for even ones."
        )
    elif args.cuts and (min(args.cuts) < 1 or sum(args.cuts) != args.layers + 2):
        yield (
            f"expected --cuts of {args.layers + 2} parts, one or more for each of {chunks} stages or chunks, "
            f"got {cuts}. The embedding and the output are parts too."
        )
    if args.zero == 3 and args.stage > 1:
        yield "expected --zero 0, 1 or 2 with stages, got 3. Each microbatch would gather all parameters again."
    if args.zero and args.local_steps:
        yield f"expected --zero 0 with --local-steps, got {args.zero}. Devices that train apart cannot share a state."


# The programs, as one device sees them -----------------------------------------------------------------------


def cut(path):
    """Returns the dimension along which an array of the state is cut along "model", or None. Its name tells it."""
    names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    return gpt.CUT.get(names[-1])


def own_part(path, x):
    """Returns what this device has of an array of the state."""
    if cut(path) is None:
        return x
    length = x.shape[cut(path)] // lax.axis_size("model")
    return lax.dynamic_slice_in_dim(x, lax.axis_index("model") * length, length, cut(path))


def all_parts(path, x):
    """The inverse of :func:`own_part`."""
    return x if cut(path) is None else lax.all_gather(x, "model", axis=cut(path), tiled=True)


def recomputed(_, fun):
    """Keeps what goes into a part of the network, not what the part computes of it."""
    return jax.checkpoint(fun)


class Programs:
    """What the devices do. ``start``, ``load``, ``step`` and ``save`` map trees whose leaves are a device's own."""

    def __init__(self, args, layout, params):
        self.args, self.layout = args, layout
        self.wire_dtype = args.wire_dtype and jnp.dtype(args.wire_dtype)
        self.adamw = optax.adamw(optax.cosine_onecycle_schedule(args.steps, 5e-3))
        self.optimizer = self.adamw
        if args.zero in (1, 2):
            self.optimizer = parallel.zero(self.adamw, EXAMPLES, stage=args.zero, wire_dtype=self.wire_dtype)
        if args.local_steps:
            self.optimizer = parallel.diloco(self.adamw, None, args.local_steps, "data", wire_dtype=self.wire_dtype)

        def shape_of_part(path, x):
            shape = [n // args.model if i == cut(path) else n for i, n in enumerate(x.shape)]
            return jax.ShapeDtypeStruct(shape, x.dtype)

        self.shapes = jax.tree_util.tree_map_with_path(shape_of_part, params)

    def start(self, params):
        """Returns the first state, of whole parameters."""
        own = jax.tree_util.tree_map_with_path(own_part, params)
        if self.args.zero == 3:
            own = parallel.shard(own, EXAMPLES)
        return {"params": own, "opt_state": self.optimizer.init(own)}

    def load(self, state):
        """Returns this device's part of what :meth:`save` returned, on this layout or another."""
        if self.args.local_steps:
            state = jax.tree.map(lambda x: x[lax.axis_index("data")], state)
        own = jax.tree_util.tree_map_with_path(own_part, state)
        if self.args.zero:
            own["opt_state"] = parallel.shard_state(self.adamw, own["opt_state"], EXAMPLES)
        if self.args.zero == 3:
            own["params"] = parallel.shard(own["params"], EXAMPLES)
        return own

    def save(self, state):
        """Returns the state whole. Devices that train apart have states of their own, stacked along a first axis."""
        state = dict(state)
        if self.args.zero:
            state["opt_state"] = parallel.unshard_state(self.adamw, state["opt_state"], self.shapes, EXAMPLES)
        if self.args.zero == 3:
            state["params"] = parallel.unshard(state["params"], self.shapes, EXAMPLES)
        state = jax.tree_util.tree_map_with_path(all_parts, state)
        return jax.tree.map(lambda x: lax.all_gather(x, "data"), state) if self.args.local_steps else state

    def step(self, state, tokens, targets):
        """Returns the next state, and the loss at this device's positions."""
        params = state["params"]
        loss, grads = self.loss_and_grads(params, (tokens, targets))
        if self.args.local_steps:
            grads = lax.pmean(grads, "context")
        elif self.args.zero == 0:
            grads = pc.pmean(grads, EXAMPLES, wire_dtype=self.wire_dtype)
        updates, opt_state = self.optimizer.update(grads, state["opt_state"], params)
        return {"params": optax.apply_updates(params, updates), "opt_state": opt_state}, loss

    def loss_and_grads(self, params, batch):
        layout, remat = self.layout, self.args.remat
        around = recomputed if remat else gpt.direct
        if layout.schedule is None:

            def gathered(name, fun):
                return parallel.gathered(fun, self.shapes[name], EXAMPLES, **({"policy": None} if remat else {}))

            (names,) = layout.chunks
            run = gpt.forward(names, gathered if self.args.zero == 3 else around)
            return jax.value_and_grad(lambda p: run(p, None, batch))(params)

        tokens, targets = (x.reshape(self.args.microbatches, -1, x.shape[-1]) for x in batch)
        stages = [gpt.forward(names, around) for names in layout.chunks]
        between = jax.ShapeDtypeStruct((*tokens.shape[1:], self.args.width), jnp.float32)
        run = parallel.pipeline(stages, layout.schedule, between, layout.across_stages)
        loss, grads = run([{name: params[name] for name in names} for names in layout.chunks], (tokens, targets))
        return loss, {name: g for chunk in grads for name, g in chunk.items()}


# Training ----------------------------------------------------------------------------------------------------


def own_block(x, spec, mesh):
    """Returns the part of a global array that lies on this rank's devices."""
    places = np.unravel_index(mesh.comm.rank, [axis.ranks for axis in mesh.axes])
    for axis, place in zip(mesh.axes, places, strict=True):
        if axis.name in tuple(spec):
            x = np.split(x, axis.ranks, tuple(spec).index(axis.name))[place]
    return x


def train(params, text, args, comm):
    """Returns the loss of every step, and what it takes to draw a sample; after a signal there are fewer steps."""
    layout = Layout(args, comm)
    params = layout.own(params)
    programs = Programs(args, layout, params)
    own = P(AXES)  # of a leading axis that has an entry for each device

    def first(tree):
        return jax.tree.map(lambda x: x[0], tree)

    def stacked(tree):
        return jax.tree.map(lambda x: jnp.asarray(x)[None], tree)

    rows = P("data", "context")
    start = layout.on_devices(lambda params: stacked(programs.start(params)), P(), own)
    load = layout.on_devices(lambda state: stacked(programs.load(state)), P(), own)
    save = layout.on_devices(lambda state: programs.save(first(state)), own, P())
    step = layout.on_devices(
        lambda state, *batch: stacked(programs.step(first(state), *batch)), (own, rows, rows), own, donate_argnums=0
    )
    mean = layout.on_devices(lambda losses: lax.pmean(losses[0], AXES), own, P())

    def by_name(whole):
        """Returns the arrays of all stages. A name tells where in the tree of a state an array is."""
        named = {jax.tree_util.keystr(path): np.asarray(x) for path, x in jax.tree.leaves_with_path(whole)}
        for others in layout.across_stages.mpi.allgather(named) if layout.across_stages else []:
            named |= others
        return named

    # The losses depend on these settings, and not on the layout. Another Python has another library, so another text.
    names = ["steps", "batch_size", "layers", "width", "seed", "wire_dtype", "local_steps"]
    settings = {name: getattr(args, name) for name in (*names, *(["data"] if args.local_steps else []))}
    settings["text"] = zlib.crc32(text.tobytes())
    checkpoints = Checkpoints(args.checkpoints, settings, comm)
    state, done, losses = start(params), 0, []
    if checkpoints.enabled:
        whole = save(state)
        template = {**by_name(whole), "losses": np.zeros(args.steps, np.float32)}
        done, stored = checkpoints.restore(template)
        losses = [np.full(len(layout.mesh.local_mesh.devices.flat), loss) for loss in stored["losses"][:done]]
        if done:
            state = load(jax.tree.map_with_path(lambda path, _: stored[jax.tree_util.keystr(path)], whole))

    def mean_losses():
        padded = [*losses, *[np.zeros_like(losses[0])] * (args.steps - len(losses))]
        return np.asarray(mean(np.stack(padded, axis=1)))

    record = StepRecord(args.step_times, comm)
    with tqdm(total=args.steps, initial=done, unit="step", disable=comm.rank != 0) as bar:
        for i in range(done, args.steps):
            # Every rank draws the same numbers, and draws them again when it goes on from a checkpoint.
            starts = draw_starts(text, gpt.CONTEXT, args.batch_size, (args.seed, i))
            drawn = text[starts[:, None] + np.arange(gpt.CONTEXT + 1)]
            batch = (own_block(x, rows, layout.mesh) for x in (drawn[:, :-1], drawn[:, 1:]))
            state, loss = record.step(step, state, *batch)
            losses.append(loss)
            bar.update()
            if i % 20 == 19:  # reading the loss waits for it
                bar.set_postfix(loss=f"{np.mean(loss):.4f}")
            asked = checkpoints.enabled and i % 20 == 19 and checkpoints.asked()
            if checkpoints.enabled and (asked or len(losses) % args.save_every == 0 or len(losses) == args.steps):
                checkpoints.save(i + 1, {**by_name(save(state)), "losses": mean_losses()})
            if asked:
                break
    record.save()
    return mean_losses()[: len(losses)].tolist(), by_name(save(state)) if args.sample else None


def draw_sample(state, params, args, vocabulary, text):
    """Returns characters that the network draws, on one device. ``params`` has the names of the parameters."""

    def param(name, key):
        x = state[f"['params'][{name!r}][{key!r}]"]
        return x.mean(axis=0) if args.local_steps else x

    params = {name: {key: param(name, key) for key in part} for name, part in params.items()}
    draw = lambda *arguments: gpt.sample(*arguments, args.layers, len(vocabulary))  # noqa: E731
    for axis in AXES:
        draw = jax.vmap(draw, None, axis_size=1, axis_name=axis)
    tokens = jax.jit(draw)(params, text[: gpt.CONTEXT], jax.random.split(jax.random.key(args.seed), args.sample))
    return "".join(vocabulary[np.asarray(tokens).reshape(-1)])


def main():
    args = parse_arguments()
    comm = pc.init(devices=args.devices or (1 if args.stage > 1 else None))
    if args.microbatches is None:
        args.microbatches = 2 * args.stage if args.stage > 1 else 1
    devices = comm.size * len(pc.make_mesh((-1,), ("all",)).local_mesh.devices.flat)
    if args.data is None:
        args.data = max(1, devices // max(1, args.model * args.context * args.stage))
    for problem in problems(args, devices):
        sys.exit(f"train_gpt: {problem}" if comm.rank == 0 else 1)
    if args.stage > 1 and args.schedule is None:
        args.schedule = "1f1b"

    text, vocabulary = read_text()
    rng = np.random.default_rng(args.seed)  # gives the same numbers on all ranks
    params = gpt.init_params(rng, len(vocabulary), args.layers, args.width)
    losses, state = train(params, text, args, comm)
    if comm.rank == 0:
        if args.losses:
            args.losses.write_text(json.dumps(losses))
        if len(losses) < args.steps:
            print(f"asked to stop after step {len(losses)}: the same command goes on from there")
        print(f"loss {losses[0]:.4f} -> {np.mean(losses[-20:]):.4f}, in nats per character")
        if args.sample:
            print(draw_sample(state, params, args, vocabulary, text))


if __name__ == "__main__":
    main()
