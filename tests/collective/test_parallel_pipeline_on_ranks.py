"""Pipelines over ranks, against the whole network in one process."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import pycollective as pc
from pycollective.parallel.pipeline import Record, forward_pipeline, measured, pipeline
from pycollective.parallel.schedules import Kind, Schedule, forward_only, gpipe, interleaved, one_f_one_b, zero_bubble
from pycollective.parallel.stages import activation_shapes
from pycollective.parallel.tied_parameters import tied_parameters
from tests.cases import values
from tests.collective.programs import once, oracle_devices

Array = Any
Tree = Any
P = jax.sharding.PartitionSpec

WIDTHS = (5, 7, 6, 4, 3, 8, 5, 6, 9)
ROWS = 4


def stage_of(number: int, stages: int) -> Callable[[Tree, Tree, Tree], Tree]:
    """Returns a stage. All differ in shapes; the first one is an embedding as well, the last one the loss."""

    def stage(params: Tree, x: Tree, microbatch: Tree) -> Tree:
        if number == 0:
            tokens = microbatch["tokens"]
            x = {"h": params["embedding"][tokens], "tokens": tokens, "half": jnp.zeros(3, jnp.bfloat16)}
        h = jnp.tanh(x["h"] @ params["w"] + params["b"][None])
        if number == stages - 1:
            extra = jnp.sum(x["half"].astype(jnp.float32)) + jnp.mean(x["tokens"].astype(jnp.float32))
            return jnp.mean((h.sum(axis=1) - microbatch["y"]) ** 2) + extra * h[0, 0]
        # An integer passes beside, and numbers of few bits, whose gradients have few bits as well.
        half = x["half"] * params["b"][0].astype(jnp.bfloat16) + h[0, :3].astype(jnp.bfloat16)
        return {"h": h, "tokens": x["tokens"] + number, "half": half}

    return stage


def params_of(number: int) -> Tree:
    shape = WIDTHS[number], WIDTHS[number + 1]
    params = {"w": values(shape, seed=number), "b": values(shape[1:], seed=10 + number)}
    return params | ({"embedding": values((11, WIDTHS[0]), seed=20)} if number == 0 else {})


def microbatches_of(count: int) -> Tree:
    tokens = np.random.default_rng(3).integers(0, 11, (count, ROWS)).astype(np.int32)
    return {"tokens": tokens, "y": values((count, ROWS), seed=5)}


def one(microbatches: Tree) -> Tree:
    return jax.tree.map(lambda x: x[0], microbatches)


def whole(stages: list[Callable[..., Any]], params: list[Tree], microbatches: Tree) -> tuple[Any, list[Tree]]:
    """Returns the mean of the losses and its gradients, by :func:`jax.grad` of the network as one function.

    If the last stage returns auxiliary results beside the loss, they stand beside the mean, stacked.
    """

    def value(params: list[Tree]) -> tuple[Array, Tree]:
        results: list[Any] = []
        for k in range(len(jax.tree.leaves(microbatches)[0])):
            x = None
            for stage, own in zip(stages, params, strict=True):
                x = stage(own, x, jax.tree.map(lambda leaf: leaf[k], microbatches))
            results.append(x if isinstance(x, tuple) else (x, None))
        losses, aux = jax.tree.map(lambda *xs: jnp.stack(xs), *results)
        return jnp.mean(losses), aux

    (mean, aux), grads = jax.value_and_grad(value, has_aux=True)(params)
    return mean if aux is None else (mean, aux), grads


def close(got: Tree, want: Tree, rtol: float = 1e-5) -> None:
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        if a.dtype == jax.dtypes.float0:
            continue
        np.testing.assert_allclose(a, b, rtol, rtol, err_msg=str(path))


SCHEDULES = {
    "gpipe of 3": lambda p: gpipe(p, 3),
    "1f1b of 1": lambda p: one_f_one_b(p, 1),
    "1f1b of 6": lambda p: one_f_one_b(p, 6),
    "interleaved of 3": lambda p: interleaved(p, 3, 2),
    "interleaved of 4": lambda p: interleaved(p, 4, 2),
    "zero bubble of 1": lambda p: zero_bubble(p, 1),
    "zero bubble of 5": lambda p: zero_bubble(p, 5),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_value_and_gradients_are_those_of_the_whole_network(name: str, world: pc.Communicator) -> None:
    schedule: Schedule = SCHEDULES[name](world.size)
    number = world.size * schedule.chunks
    stages, params = [stage_of(i, number) for i in range(number)], [params_of(i) for i in range(number)]
    microbatches = microbatches_of(schedule.microbatches)
    exact = partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})  # numbers of few bits have few
    value, grads = once(world.size, lambda: exact(lambda p: whole(stages, p, microbatches))(params))
    own: Any = slice(world.rank, None, world.size) if schedule.chunks > 1 else world.rank
    between = activation_shapes(stages[own], params[own], one(microbatches), world)
    got = pc.jit(pipeline(stages[own], schedule, between, world))(params[own], microbatches)
    close(got, (value, grads[own]))


def with_more(number: int, stages: int) -> Callable[[Tree, Tree, Tree], Tree]:
    """Returns a stage with a key and an integer among its parameters. The last one has the embedding, and metrics."""

    def stage(params: Tree, x: Tree, microbatch: Tree) -> Tree:
        noise = 1 + jax.random.uniform(params["key"]) * params["times"].astype(jnp.float32)
        params = params | {"w": params["w"] * noise}
        y = stage_of(number, stages)(params, x, microbatch)
        if number < stages - 1:
            return y
        predicted = params["embedding"][microbatch["tokens"]].sum(axis=1)
        loss = y * (1 + jnp.mean(predicted**2))
        return loss, {"predicted": predicted, "positive": jnp.sum(predicted > 0), "y": {"y": y}}

    return stage


@pytest.mark.parametrize("name", ["interleaved of 3", "zero bubble of 5"])
def test_metrics_shared_and_integer_parameters_and_an_evaluation(name: str, world: pc.Communicator) -> None:
    schedule: Schedule = SCHEDULES[name](world.size)
    count = world.size * schedule.chunks
    stages = [with_more(i, count) for i in range(count)]
    embedding = params_of(0)["embedding"]
    params = [params_of(i) | {"key": jax.random.key(i), "times": np.int32(i % 3)} for i in range(count)]
    params[-1]["embedding"] = embedding
    microbatches = microbatches_of(schedule.microbatches)

    def oracle() -> Any:
        def value(params: list[Tree], shared: Array) -> tuple[Array, Tree]:
            params = [own | ({"embedding": shared} if "embedding" in own else {}) for own in params]
            results = []
            for k in range(schedule.microbatches):
                x = None
                for stage, own in zip(stages, params, strict=True):
                    x = stage(own, x, jax.tree.map(lambda leaf: leaf[k], microbatches))
                results.append(x)
            losses, aux = jax.tree.map(lambda *xs: jnp.stack(xs), *results)
            return jnp.mean(losses), (losses, aux)

        options: dict[str, Any] = {"compiler_options": {"xla_allow_excess_precision": False}}
        differentiated = jax.value_and_grad(value, (0, 1), has_aux=True, allow_int=True)
        return jax.jit(differentiated, **options)(params, embedding)

    (value, (losses, aux)), (grads, of_embedding) = once(world.size, oracle)
    for of_stage in grads:
        of_stage |= {"embedding": of_embedding} if "embedding" in of_stage else {}
    own: Any = slice(world.rank, None, world.size) if schedule.chunks > 1 else world.rank

    def shared(params: Tree) -> list[tuple[str, Tree]]:
        of_chunks = params if schedule.chunks > 1 else [params]
        return [("embedding", chunk["embedding"]) for chunk in of_chunks if "embedding" in chunk]

    shapes = activation_shapes(stages[own], params[own], one(microbatches), world, last=True)
    tied = tied_parameters(shared, params[own], world) if count > 1 else None
    options: dict[str, Any] = {"has_aux": True, "allow_int": True, "tied": tied}
    train = pipeline(stages[own], schedule, shapes, world, **options)
    forward = forward_only(world.size, schedule.microbatches, schedule.chunks)
    evaluate = forward_pipeline(stages[own], forward, shapes, world)
    got, evaluated = pc.jit(lambda *args: (train(*args), evaluate(*args)))(params[own], microbatches)
    close(got, ((value, aux), grads[own]))
    close(evaluated, (losses, aux))


def test_what_cannot_be_tied_is_told_on_all_ranks(world: pc.Communicator) -> None:
    last = world.size - 1
    # With one rank both copies are there.
    a, b = jnp.ones((3, 2)), jnp.ones((2, 3) if world.rank == last else (3, 2))
    params = [{"a": a, "n": jnp.int32(0)}, b]

    def tied(select: Callable[[Any], Any], params: Any = params) -> Any:
        return tied_parameters(select, params, world)

    with pytest.raises(
        ValueError, match=r"tied_parameters: expected copies of 'w' like float32\[3,2\] at \[0\] of rank 0"
    ):
        tied(lambda p: [("w", p[0]["a"]), ("w", p[1])])
    with pytest.raises(ValueError, match=rf"expected several copies of 'w', got one, on rank {last}"):
        tied(lambda p: {"w": p[1]} if world.rank == last else {})
    with pytest.raises(ValueError, match=rf"subtrees of the parameters of rank {last}, got KeyError: 'c'\. Select"):
        tied(lambda p: {"w": p[0]["a" if world.rank < last else "c"]})
    with pytest.raises(ValueError, match="rank 0, got a leaf that is selected twice"):
        tied(lambda p: [("w", p[0]["a"]), ("v", p[0])])
    select = lambda p: [("w", p[0]), ("w", p[1])]
    own = [{"w": a, "b": a}, {"w": a, "x" if world.rank == last else "b": a}]  # the order of leaves is another
    with pytest.raises(ValueError, match=rf"'w' like .* at \['w'\] of rank 0, got .* at \['x'\] on rank {last}"):
        tied(select, own)
    own = [{"w": a, "n": jnp.zeros(n, jnp.int32)} for n in (2, 3 if world.rank == last else 2)]
    with pytest.raises(ValueError, match=rf"int32\[2\] at \['n'\], .* got int32\[3\] at \['n'\], .* on rank {last}"):
        tied(select, own)
    found = tied(lambda p: [("w", p[0]), ("w", p[0] | {"a": p[2]})], [*params, a])
    assert found.groups == ((tuple(range(world.size)), ((0,), (3,))),)  # no integers
    stage = lambda w, x, microbatch: (w[0]["a"] * microbatch).sum()
    run = pipeline(
        stage, gpipe(world.size, 1), jax.ShapeDtypeStruct((), jnp.float32), world, allow_int=True, tied=found
    )
    with pytest.raises(ValueError, match=r"expected the parameters of tied_parameters, float32\[3,2\] at \[0\]\['a'\]"):
        jax.make_jaxpr(run)(params, jnp.ones(1))


def split_world(world: pc.Communicator, others: int) -> tuple[int, int, pc.Communicator, pc.Communicator]:
    """Returns the number of this rank's stage, and of stages; the ranks with this stage; the ranks of this pipeline."""
    stage, other = divmod(world.rank, others)
    same_stage, same_pipeline = world.split(stage, key=other), world.split(other, key=stage)
    assert same_stage is not None
    assert same_pipeline is not None
    return stage, world.size // others, same_stage, same_pipeline


def wide_stage(number: int, stages: int, *, averages: bool) -> Callable[[Tree, Tree, Tree], Tree]:
    """Returns a stage whose layer is cut along "model". The loss may be each device's own, or averaged over "data"."""

    def stage(params: Tree, taken: Tree, microbatch: Tree) -> Tree:
        x, gain = (microbatch, jnp.float32(1)) if taken is None else (taken["x"], taken["gain"])
        x = x + lax.psum(jnp.tanh(x @ params["up"]) @ params["down"], "model")
        gain = gain * params["gain"]  # at first it is the same along "data"
        if number < stages - 1:
            return {"x": x, "gain": gain}
        # The devices along "data" have other losses for the same examples.
        loss = jnp.mean(x**2) * gain * (1 + lax.axis_index("data")).astype(jnp.float32)
        return lax.pmean(loss, "data") if averages else loss, x

    return stage


CUT = {"up": P(None, "model"), "down": P("model", None), "gain": P()}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis", ["data", "model"])
@pytest.mark.parametrize("name", ["1f1b", "zero bubble"])
def test_inside_shard_map(name: str, axis: str, check_vma: bool, world: pc.Communicator) -> None:
    # Half of the ranks have the first stages where there are as many: 2 x 2 of 4 ranks, 2 x 1 of 2, 1 x 3 of 3.
    others = 2 if world.size % 2 == 0 else 1
    stage, stages, same_stage, same_pipeline = split_world(world, others)
    shape = (others, 1) if axis == "data" else (1, others)
    functions = [wide_stage(i, stages, averages=name == "zero bubble") for i in range(stages)]
    params = [
        {"up": values((6, 4), seed=i), "down": values((4, 6), seed=9 + i), "gain": np.float32(1.5 + i)}
        for i in range(stages)
    ]
    x = values((3, 2 * ROWS, 6), seed=1)

    def over_data(value_and_grads: tuple[tuple[Array, Array], Tree]) -> tuple[Tree, Tree]:
        (value, aux), grads = value_and_grads
        return (lax.pmean(value, "data"), aux), grads if check_vma else lax.psum(grads, "data")

    schedule = {"1f1b": one_f_one_b, "zero bubble": zero_bubble}[name](stages, 3)
    between = {
        "x": jax.ShapeDtypeStruct((2 * ROWS // shape[0], 6), jnp.float32),
        "gain": jax.ShapeDtypeStruct((), jnp.float32),
    }
    shapes = [between] * (stages - 1) + [(between["gain"], between["x"])]
    share = lambda p: {name: p[name] for name in ("gain", "up")} if stages > 1 else {}
    mesh = pc.make_mesh(shape, ("data", "model"), comm=same_stage)

    def block(array: Array, spec: Any) -> Array:
        for dim, cut in enumerate(spec):
            if cut is not None:
                index, count = (same_stage.rank, others) if cut == axis else (0, 1)
                array = np.split(array, count, axis=dim)[index]
        return array

    own = jax.tree.map(block, params[stage], CUT)
    tied = tied_parameters(share, own, same_pipeline)
    run = pipeline(functions[stage], schedule, shapes, same_pipeline, varying="data", has_aux=True, tied=tied)
    specs: dict[str, Any] = {
        "in_specs": (CUT, P(None, "data")),
        "out_specs": ((P(), P(None, "data")), CUT),
        "check_vma": check_vma,
    }
    step = pc.shard_map(lambda p, x: over_data(run(p, x)), mesh=mesh, **specs)
    got = step(own, block(x, P(None, "data")))

    def oracle() -> Any:
        mesh = jax.sharding.Mesh(np.asarray(oracle_devices(others)).reshape(shape), ("data", "model"))
        all_specs = {
            "in_specs": ([CUT] * stages, P(None, "data")),
            "out_specs": ((P(), P(None, "data")), [CUT] * stages),
        }
        program = lambda p, x: over_data(whole(functions, p, x))
        return jax.jit(jax.shard_map(program, mesh=mesh, **all_specs, check_vma=check_vma))(params, x)

    (value, aux), grads = once(world.size, oracle)
    summed = grads[stage] | (share({name: sum(of_stage[name] for of_stage in grads) for name in CUT}))
    close(got, ((value, block(aux, P(None, "data"))), jax.tree.map(block, summed, CUT)))


def test_inside_jit_with_an_axis(world: pc.Communicator) -> None:
    others = 2 if world.size % 2 == 0 else 1
    stage, stages, same_stage, same_pipeline = split_world(world, others)
    functions, params = [stage_of(i, stages) for i in range(stages)], [params_of(i) for i in range(stages)]
    microbatches = microbatches_of(3 * others)
    env = [("data", others)]
    between = activation_shapes(functions[stage], params[stage], one(microbatches), same_pipeline, axis_env=env)
    run = pipeline(functions[stage], one_f_one_b(stages, 3), between, same_pipeline)
    step = pc.jit(lambda p, x: lax.pmean(run(p, x), "data"), axis_name="data", comm=same_stage)
    got = step(params[stage], jax.tree.map(lambda x: x[same_stage.rank :: others], microbatches))
    exact = partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    value, grads = once(world.size, lambda: exact(lambda p: whole(functions, p, microbatches))(params))
    close(got, (value, grads[stage]))


def test_a_rank_keeps_the_activations_that_the_schedule_says(world: pc.Communicator) -> None:
    width, rows, layers = 16, 128, 2

    def stage(params: list[Array], x: Array, microbatch: Array) -> Array:
        x = microbatch if world.rank == 0 else x
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2) if world.rank == world.size - 1 else x

    params = [values((width, width), seed=i) for i in range(layers)]

    def activations(schedule: Schedule) -> float:
        run = pc.jit(pipeline(stage, schedule, jax.ShapeDtypeStruct((rows, width), jnp.float32), world))
        compiled = run.lower(params, jnp.ones((schedule.microbatches, rows, width))).compile()
        return compiled.memory_analysis().temp_size_in_bytes / (4 * rows * width)

    few, more = world.size + 1, 3
    grown = {
        maker: activations(maker(world.size, few + more)) - activations(maker(world.size, few))
        for maker in (gpipe, one_f_one_b, zero_bubble)
    }
    assert grown[gpipe] > 0.9 * more * 2 * layers  # a tanh has two residuals
    assert grown[one_f_one_b] < layers
    assert grown[zero_bubble] < layers


def test_computations_run_in_the_order_of_the_schedule(world: pc.Communicator) -> None:
    record: Record = []
    seconds = 0.004

    def asleep(x: Array) -> Array:
        def sleep(x: Array) -> Array:
            time.sleep(seconds)
            return np.asarray(x)

        return jax.pure_callback(sleep, jax.ShapeDtypeStruct((ROWS,), jnp.float32), x)

    slow = jax.custom_vjp(asleep)
    slow.defvjp(lambda x: (asleep(x), None), lambda _, dy: (asleep(dy),))  # which depends on nothing else

    def stage(w: Array, x: Array, microbatch: Array) -> Array:
        y = slow(w * (microbatch if world.rank == 0 else x))
        return y.sum() if world.rank == world.size - 1 else y

    schedule = one_f_one_b(world.size, 4)
    run = pc.jit(pipeline(stage, schedule, jax.ShapeDtypeStruct((ROWS,), jnp.float32), world, record=record))
    for _ in range(2):
        jax.block_until_ready(run(jnp.float32(1), jnp.ones((4, ROWS))))
    ran = measured(schedule, record, world)
    for order, spans in zip(schedule.actions, ran.spans, strict=True):
        assert [span.action for span in spans] == [action for action in order if action.peer is None]
        ends = [time for span in spans for time in (span.start, span.end)]
        assert ends == sorted(ends)
        assert all(span.end - span.start >= seconds for span in spans)
    # A stage begins when the one before, or after it, has ended; both ranks read the clock of this host.
    when = {(rank, *span.action[::2]): span for rank, spans in enumerate(ran.spans) for span in spans}
    for rank in range(world.size - 1):
        for k in range(4):
            assert when[rank, Kind.FORWARD, k].end <= when[rank + 1, Kind.FORWARD, k].start
            assert when[rank + 1, Kind.BACKWARD, k].end <= when[rank, Kind.BACKWARD, k].start
    computing = sum(span.end - span.start for spans in ran.spans for span in spans)
    assert ran.total == max(spans[-1].end for spans in ran.spans)
    assert abs(ran.bubble - (1 - computing / (world.size * ran.total))) < 1e-9
    with pytest.raises(
        ValueError, match=r"a record of the 8 computations of rank 0 in one_f_one_b, got 7.5, or others"
    ):
        measured(schedule, record[1:16] if world.rank == 0 else record, world)


def test_stages_that_do_not_fit_are_told_on_all_ranks(world: pc.Communicator) -> None:
    def shapes(stage: Any, params: Any = 1.0, **options: Any) -> Any:
        return activation_shapes(stage, params, jnp.ones((ROWS, 3)), world, **options)

    last = world.size - 1

    def narrow(w: Any, x: Array, microbatch: Array) -> Array:
        x = microbatch if world.rank == 0 else x
        return x @ jnp.ones((3 if world.rank < last else 9, 3))

    found = re.escape(f"stage {last}, on rank {last}, to take what it gets, got ")
    what = "a microbatch alone" if last == 0 else r"what the stage before gives, float32\[4,3\]"
    with pytest.raises(ValueError, match=f"activation_shapes: expected {found}{what}: TypeError: dot_general"):
        shapes(narrow)
    with pytest.raises(ValueError, match=r"expected a loss, one floating-point number, .* got float32\[4,3\]\. Let"):
        shapes(lambda w, x, microbatch: microbatch)
    with pytest.raises(ValueError, match=r"the same number of stages on each rank, got \[(1|2)(, 2)*\], and \["):
        shapes([narrow] * (1 if world.rank == 0 else 2), [1.0, 1.0])
    with pytest.raises(ValueError, match="NameError: Found an unbound axis name: data"):
        shapes(lambda w, x, microbatch: lax.psum(microbatch.sum(), "data"))
    assert (
        shapes(lambda w, x, microbatch: lax.psum(microbatch.sum(), "data"), axis_env=[("data", 2)])
        == [jax.ShapeDtypeStruct((), jnp.float32)] * last
    )


def test_wrong_arguments(world: pc.Communicator) -> None:
    p, like = world.size, jax.ShapeDtypeStruct((3,), jnp.float32)
    stage = lambda w, x, microbatch: w * microbatch
    with pytest.raises(ValueError, match=rf"pipeline: expected a schedule for {p} ranks, got one for {p + 1}"):
        pipeline(stage, gpipe(p + 1, 2), like, world)
    with pytest.raises(ValueError, match="expected 2 stages on each rank, as interleaved has, got 1"):
        pipeline(stage, interleaved(p, 2, 2), like, world)
    with pytest.raises(ValueError, match=rf"expected what passes after each of {p - 1} stages, got a list of {p}"):
        pipeline(stage, gpipe(p, 2), [like] * p, world)
    schedule = gpipe(p, 2)
    lacking = dataclasses.replace(schedule, actions=tuple(actions[1:] for actions in schedule.actions))
    with pytest.raises(ValueError, match=r"simulate: expected 1 of forward of microbatch 0, chunk 0 on rank 0, got 0"):
        pipeline(stage, lacking, like, world)
    run = pipeline(stage, schedule, like, world)
    with pytest.raises(ValueError, match=r"2 microbatches along the first axis .* got the shape \(3, 3\) at the only"):
        pc.jit(run)(1.0, jnp.ones((3, 3)))
    with pytest.raises(ValueError, match=r"gradients, or allow_int=True, got int32 at \['n'\]"):
        pc.jit(run)({"n": jnp.int32(1)}, jnp.ones((2, 3)))
    with pytest.raises(NameError, match="parallel.pipeline: expected a call where the axis 'data' is bound"):
        pc.jit(pipeline(stage, schedule, like, world, varying="data"))(1.0, jnp.ones((2, 3)))
    two = pipeline([stage, stage], interleaved(p, 2, 2), like, world)
    with pytest.raises(ValueError, match="expected 2 trees of parameters, got 3"):
        pc.jit(two)([1.0, 1.0, 1.0], jnp.ones((2, 3)))
    # On the last rank it is the loss that is wrong. All ranks raise before they wait for each other.
    wanted = (
        "a loss, one floating-point number" if world.rank == p - 1 else r"stage \d to give float32\[3\], as between"
    )
    with pytest.raises(ValueError, match=f"expected {wanted}.*, got float32\\[4\\]"):
        pc.jit(run)(1.0, jnp.ones((2, 4)))


def test_what_passes_may_vary_along_named_axes_only(world: pc.Communicator) -> None:
    mesh = pc.make_mesh((world.size,), ("data",))
    alone = world.split(world.rank)
    assert alone is not None
    run = pipeline(lambda w, x, microbatch: w * microbatch.sum(), gpipe(1, 2), [], alone)
    step = pc.shard_map(run, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P(), P()))
    with pytest.raises(ValueError, match=r"stage 0 gives to vary along \[\] at most, got along \['data'\]"):
        step(jnp.float32(1), jnp.ones((2, 3)))


def test_the_value_varies_as_what_passes_does(world: pc.Communicator) -> None:
    # Else a rank that has not the loss would take the losses of several pipelines for one value, and go on alone.
    alone = world.split(world.rank)
    assert alone is not None
    stage = lambda w, x, microbatch: (w * microbatch).sum()
    run = pipeline(stage, gpipe(world.size, 2), jax.ShapeDtypeStruct((), jnp.float32), world, varying="data")
    specs: dict[str, Any] = {"in_specs": (P(), P(None, "data")), "out_specs": P()}
    step = pc.shard_map(lambda w, x: run(w, x)[0], mesh=pc.make_mesh((1,), ("data",), comm=alone), **specs)
    with pytest.raises(ValueError, match="out_specs"):
        step(jnp.float32(1), jnp.ones((2, 3)))
