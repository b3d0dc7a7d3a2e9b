"""Bad input to pc.pmap, pc.shard_map and pc.make_mesh gives one clear error on every rank, and no hang."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P
from mpi4py import MPI

import pycollective as pc
from pycollective.primitives import exchanges, lowering
from pycollective.ranks.setup import devices_of_this_rank
from tests.collective.programs import RUNTIME_ERRORS
from tests.spmd.conftest import LOCAL, needs_local
from tests.under_mpirun import RANK, SIZE

D = max(LOCAL)  # the number of local devices that pc.init gets
TOTAL = SIZE * D
HERE = rf"\(rank {RANK} of {SIZE}\)\. [A-Z]"  # the end of a message, and the start of its remedy
X = np.ones((D, 3), np.float32)

needs_two = pytest.mark.skipif(SIZE < 2, reason="LOUD: needs two ranks (run under mpirun -n 2)")
needs_several = pytest.mark.skipif(TOTAL < 2, reason="LOUD: needs two devices")


def total(*args: Any) -> Any:
    return lax.psum(args[0], "i")


def mesh(**options: Any) -> pc.Mesh:
    return pc.make_mesh((-1,), ("i",), **options)


def call(fun: Callable[..., Any], in_specs: Any, out_specs: Any, *args: Any) -> Any:
    return pc.shard_map(fun, mesh=mesh(), in_specs=in_specs, out_specs=out_specs)(*args)


# pmap -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, D + 1])
def test_mapped_axis_of_a_wrong_length(length: int) -> None:
    with pytest.raises(
        ValueError, match=rf"pmap: expected a mapped axis of this rank's {D} device\(s\), got length {length} {HERE}"
    ):
        pc.pmap(total, "i")(np.ones((length, 3)))


def test_mapped_axis_that_is_not_as_long_as_devices() -> None:
    devices = devices_of_this_rank()[:1]
    with pytest.raises(ValueError, match=rf"pmap: expected a mapped axis of this rank's 1 device.*got length 2 {HERE}"):
        pc.pmap(total, "i", devices=devices)(np.ones((2, 3)))


@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
def test_different_mapped_lengths(keyword: bool) -> None:
    x, y = np.ones((D, 2)), np.ones((D + 1, 2))
    with pytest.raises(
        ValueError, match=rf"pmap: expected mapped axes of one length, got lengths \[{D}, {D + 1}\] {HERE}"
    ):
        if keyword:
            pc.pmap(lambda x, *, y: total(x), "i")(x, y=y)
        else:
            pc.pmap(total, "i")(x, y)


@pytest.mark.parametrize("args", [(), (X,)], ids=["no arguments", "None"])
def test_nothing_mapped(args: Any) -> None:
    with pytest.raises(ValueError, match=rf"pmap: expected an argument with a mapped axis, got in_axes=None {HERE}"):
        pc.pmap(lambda *args: lax.axis_index("i"), "i", in_axes=None)(*args)


@pytest.mark.parametrize("wrong", [TOTAL + 1, 0, "a"])
def test_wrong_axis_size(wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"pmap: expected axis_size {TOTAL}, {SIZE} ranks x {D}, got {wrong} {HERE}"):
        pc.pmap(total, "i", axis_size=wrong)(X)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(SIZE + 1, marks=needs_two),
        100 * SIZE,
        0,
    ],
    ids=["does not divide", "too many", "none"],
)
def test_wrong_axis_size_where_nothing_is_mapped(wrong: int) -> None:
    with pytest.raises(ValueError, match=rf"pmap: expected axis_size .*got {wrong} {HERE}"):
        pc.pmap(total, "i", in_axes=None, axis_size=wrong)(1.0)


@pytest.mark.parametrize(
    ("in_axes", "args"),
    [((0,), (X, X)), ((0, 0, None), (X, X)), (({"a": 0},), ({"b": X},)), (((0, 0), 0), (X, X))],
    ids=["too few", "too many", "other key", "deeper"],
)
def test_in_axes_that_are_no_prefix(in_axes: Any, args: Any) -> None:
    with pytest.raises(
        ValueError, match=r"(?s)pmap: expected in_axes to be a prefix .*got \(.* for PyTreeDef.*Give one"
    ):
        pc.pmap(lambda *args: total(X[0]), "i", in_axes=in_axes)(*args)


@pytest.mark.parametrize(("axis", "x"), [(2, X), (-3, X), (0, 1.0)])
def test_in_axes_out_of_range(axis: int, x: Any) -> None:
    text = rf"pmap: expected in_axes{{}} to be an axis of args\[0\]{{}}, got {axis} for shape \(.*\) {HERE}"
    with pytest.raises(ValueError, match=text.format("", "")):
        pc.pmap(total, "i", in_axes=axis)(x)
    with pytest.raises(ValueError, match=text.format(r"\[0\]\['a'\]\[1\]", r"\['a'\]\[1\]")):
        pc.pmap(total, "i", in_axes=({"a": [0, axis]}, None))({"a": [X, x]}, 1.0)


def test_keyword_that_has_no_axis() -> None:
    with pytest.raises(
        ValueError, match=rf"expected in_axes to be an axis of kwargs\['k'\], got 0 for shape \(\) {HERE}"
    ):
        pc.pmap(lambda x, k: total(x), "i")(X, k=1.0)


@pytest.mark.parametrize("name", ["in_axes", "out_axes"])
def test_axes_that_are_no_numbers(name: str) -> None:
    for wrong, place in (("a", ""), ([0, "a"], r"\[1\]"), (({"k": 0.5},), r"\[0\]\['k'\]"), ((None, True), r"\[1\]")):
        with pytest.raises(ValueError, match=rf"pmap: expected {name}{place} to be an int or None, got .* {HERE}"):
            pc.pmap(total, "i", **{name: wrong})(X)


@pytest.mark.parametrize(
    ("fun", "out_axes"),
    [(total, (0, 0)), (lambda x: {"a": total(x)}, {"b": 0}), (lambda x: (x, x), (0,)), (total, [0])],
    ids=["deeper", "other key", "too few", "list"],
)
def test_out_axes_that_are_no_prefix(fun: Any, out_axes: Any) -> None:
    with pytest.raises(
        ValueError, match=r"(?s)pmap: expected out_axes to be a prefix .*got .* for PyTreeDef.*Give one"
    ):
        pc.pmap(fun, "i", out_axes=out_axes)(X)


@pytest.mark.parametrize("axis", [2, 5, -3])
def test_out_axes_out_of_range(axis: int) -> None:
    with pytest.raises(ValueError, match=rf"pmap: expected out_axes .*got {axis} "):
        pc.pmap(total, "i", out_axes=axis)(X)


@pytest.mark.parametrize("fun", [lambda x: lax.psum(x, "j"), lambda x: lax.all_gather(x, ("i", "j"))])
def test_unknown_axis_name(fun: Any) -> None:
    for program in (
        lambda: pc.pmap(fun, "i")(X),
        lambda: call(fun, P("i"), P("i"), X),
        lambda: pc.jit(fun, axis_name="i")(X),
        lambda: pc.pmap(fun)(X),
    ):
        with pytest.raises(NameError, match=r"unbound axis name: [ij]") as caught:
            program()
        assert "pycollective: the axis names bound around this call: " in caught.value.__notes__[0]
    with pytest.raises(NameError, match=r"psum: expected an axis name that a transform .* binds \('i'\), .*got 'j'"):
        pc.pmap(lambda x: pc.psum(x, "j"), "i")(X)


@pytest.mark.parametrize("function", [pc.pmap, pc.shard_map], ids=["pmap", "shard_map"])
@pytest.mark.parametrize("wrong", ["text", [object()]], ids=["str", "object"])
def test_not_an_array(function: Any, wrong: Any) -> None:
    options = {"axis_name": "i"} if function is pc.pmap else {"mesh": mesh(), "in_specs": P("i"), "out_specs": P("i")}
    with pytest.raises(TypeError, match="type <class '(str|object)'>"):
        function(total, **options)(wrong)
    with pytest.raises(TypeError, match="not a valid JAX (array )?type"):
        function(lambda x: wrong, **options)(X)


@pytest.mark.skipif(jax.local_device_count() == D, reason="LOUD: pc.init took all local devices")
def test_devices_that_init_does_not_know(world: pc.Communicator) -> None:
    devices = [*devices_of_this_rank(), jax.local_devices()[-1]]
    text = rf"Mesh: expected a device of pycollective.init\(devices=...\), got \[CpuDevice\(id=\d\)\] {HERE}"
    with pytest.raises(ValueError, match=text):
        pc.pmap(total, "i", devices=devices)(np.ones((D + 1, 3)))
    with pytest.raises(ValueError, match=text):
        mesh(devices=devices)


@pytest.mark.skipif(D < 2, reason="LOUD: needs two local devices")
def test_a_program_inside_one_of_several_devices() -> None:
    inners = (
        lambda x: pc.pmap(total, "j")(x[None])[0],
        pc.jit(total, axis_name="j"),
        pc.shard_map(total, mesh=mesh(), in_specs=P(), out_specs=P(), check_vma=False),
        jax.shard_map(
            total,
            mesh=jax.sharding.Mesh(np.array(jax.devices()[:1]), ("j",)),
            in_specs=P(),
            out_specs=P(),
            check_vma=False,
        ),
    )
    for inner in inners:
        with pytest.raises(NotImplementedError, match=rf"expected a program over Mesh.* by itself, got .*{HERE}"):
            pc.pmap(inner, "i")(X)


# shard_map and meshes -------------------------------------------------------------------------------------


def test_specs_that_jax_refuses() -> None:
    # The errors are JAX's own, which name the place.
    tree = {"a": [X, X]}
    both = lambda tree: (total(tree["a"][0]), tree["a"][1])
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (({"a": [P("i"), P("j")]},), P("i"), ValueError, r"in_specs\[0\]\['a'\]\[1\] refers to 'j'"),
        (P(("i", "j")), P("i"), ValueError, "in_specs refers to 'j'"),
        (P("i"), (P(), P("j")), ValueError, r"out_specs\[1\] refers to 'j'"),
        (({"a": [P("i"), "i"]},), P("i"), TypeError, r"in_specs\[0\]\['a'\]\[1\] is i of type str"),
        (P("i"), (P(), 3), TypeError, r"out_specs\[1\] is 3 of type int"),
        (P("i"), None, ValueError, r"(?s)shard_map out_specs.*NoneType"),
        (P(None, None, "i"), P("i"), ValueError, r"in_specs is P\(None, None, 'i'\) which has length 3.*args\[0\]"),
        (P("i"), P(None, None, "i"), ValueError, "out_specs is .*which has length 3"),
        ((P("i"), P("i")), P("i"), ValueError, "(?s)different lengths of tuple at key path.*shard_map in_specs"),
        (({"b": P("i")},), P("i"), ValueError, r"(?s)at key path\n *shard_map in_specs\[0\]"),
        (P("i"), (P("i"),), ValueError, "(?s)different lengths of tuple at key path.*shard_map out_specs"),
    ]
    for in_specs, out_specs, kind, text in cases:
        with pytest.raises(kind, match=text):
            call(both, in_specs, out_specs, tree)


@needs_several
def test_result_that_is_not_shared() -> None:
    for fun in (lambda x: x.sum(), lambda x: lax.axis_index("i")):
        with pytest.raises(ValueError, match=r"out_specs is P\(\) which implies .* replicated across mesh axis 'i'"):
            call(fun, P("i"), P(), X)


def test_spec_that_names_an_axis_twice() -> None:
    with pytest.raises(ValueError, match=rf"expected axes of Mesh.* in in_specs, each once, got P\('i', 'i'\) {HERE}"):
        call(total, P("i", "i"), P("i"), np.ones((TOTAL, TOTAL)))


def test_without_in_specs_or_with_few_axes() -> None:
    with pytest.raises(TypeError, match=rf"shard_map: expected in_specs, got none {HERE}"):
        pc.shard_map(total, mesh=mesh(), out_specs=P())
    two = pc.make_mesh((-1, 1), ("i", "j"))
    with pytest.raises(
        NotImplementedError, match=rf"expected a function of all axes .*got axis_names=\{{'i'\}} {HERE}"
    ):
        pc.shard_map(total, mesh=two, in_specs=P("i"), out_specs=P(), axis_names={"i"})
    every = pc.shard_map(total, mesh=two, in_specs=P("i"), out_specs=P(), axis_names={"i", "j"})
    assert (np.asarray(every(X)) == TOTAL).all()


def test_backend_of_pmap() -> None:
    with pytest.raises(ValueError, match=rf"pmap: expected backend=None, got 'cpu' {HERE}"):
        pc.pmap(total, "i", backend="cpu")


@pytest.mark.skipif(D < 2, reason="LOUD: needs two local devices")
@pytest.mark.parametrize(("spec", "shape"), [(P("i"), (D + 1, 3)), (P(None, "i"), (3, D + 1)), (P(("i",)), (D - 1,))])
def test_block_that_does_not_divide(spec: Any, shape: tuple[int, ...]) -> None:
    block = rf"\({shape[0]}.*\)"
    along = rf"a length that is a multiple of the {D} devices along .*'i'.* of in_specs"
    text = rf"shard_map: expected {along}, got {block} {HERE}"
    with pytest.raises(ValueError, match=text):
        call(total, spec, spec, np.ones(shape))


def test_a_mesh_of_jax() -> None:
    theirs = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(TypeError, match=r"shard_map: expected a .*Mesh"):
        pc.shard_map(total, mesh=theirs, in_specs=P("i"), out_specs=P("i"))(X)


@pytest.mark.parametrize(
    "shape",
    [(TOTAL + 1, 1), (2 * TOTAL, 2), (-1, -1), (-1, 7), (-1, 7 * TOTAL), (-1, 0), (-TOTAL, -1), (0, TOTAL)],
    ids=str,
)
def test_mesh_of_a_wrong_total(shape: tuple[int, int]) -> None:
    text = rf"make_mesh: expected axes of {TOTAL} devices \({SIZE} ranks x {D} local\)"
    with pytest.raises(ValueError, match=rf"{text}, got shape \({shape[0]}, {shape[1]}\) {HERE}"):
        pc.make_mesh(shape, ("data", "model"))


@pytest.mark.parametrize("names", [("i", "i"), ("i",), ("i", "j", "k")], ids=str)
def test_names_of_a_mesh(names: tuple[str, ...]) -> None:
    with pytest.raises(
        ValueError, match=rf"make_mesh: expected a name of its own for each axis, got shapes .*names .* {HERE}"
    ):
        pc.make_mesh((TOTAL, 1), names)


def test_sizes_that_are_no_integers() -> None:
    with pytest.raises((TypeError, ValueError), match="make_mesh: expected"):
        pc.make_mesh((TOTAL + 0.5,), ("i",))  # type: ignore[list-item]


@pytest.mark.skipif(SIZE not in (2, 4), reason="LOUD: needs 2 or 4 ranks")
@needs_local(3 if SIZE == 2 else 2)
def test_axis_that_cuts_a_rank_into_no_box(world: pc.Communicator) -> None:
    # 2 ranks of 3 devices as 3 x 2, or 3 ranks of 2 devices as 2 x 3: a rank starts or ends inside a row.
    ranks, local = (2, 3) if SIZE == 2 else (3, 2)
    comm = world.split(color=0 if world.rank < ranks else None)
    if comm is None:
        return
    devices = devices_of_this_rank()[:local]
    text = rf"make_mesh: expected each rank's {local} devices to fill whole axes .*got shape \({local}, {ranks}\)"
    if (ranks, local) == (2, 3):
        with pytest.raises(ValueError, match=rf"{text} of .*\(rank {comm.rank} of {ranks}\)\. Choose"):
            pc.make_mesh((3, 2), ("data", "model"), comm=comm, devices=devices)
        assert pc.make_mesh((2, 3), ("data", "model"), comm=comm, devices=devices).shape == {"data": 2, "model": 3}
    else:
        with pytest.raises(ValueError, match=rf"{text} of .*\(rank {comm.rank} of {ranks}\)\. Choose"):
            pc.make_mesh((2, 3), ("data", "model"), comm=comm, devices=devices)
        assert pc.make_mesh((3, 2), ("data", "model"), comm=comm, devices=devices).shape == {"data": 3, "model": 2}


# Collectives ----------------------------------------------------------------------------------------------

GROUPED: dict[str, Callable[[Any, Any], Any]] = {
    "psum": lambda x, groups: lax.psum(x, "i", axis_index_groups=groups),
    "pmax": lambda x, groups: lax.pmax(x, "i", axis_index_groups=groups),
    "all_gather": lambda x, groups: lax.all_gather(x, "i", axis_index_groups=groups),
    "psum_scatter": lambda x, groups: lax.psum_scatter(x[:1], "i", axis_index_groups=groups),
    "all_to_all": lambda x, groups: lax.all_to_all(x[:1], "i", 0, 0, axis_index_groups=groups),
}


@needs_several
@pytest.mark.parametrize("name", sorted(GROUPED))
def test_groups_with_a_device_twice(name: str) -> None:
    with pytest.raises(ValueError, match="axis_index_groups"):
        pc.pmap(lambda x: GROUPED[name](x, [[0] * TOTAL]), "i")(X)


@needs_several
@pytest.mark.parametrize("name", sorted(GROUPED))
def test_groups_that_leave_a_device_out(name: str) -> None:
    with pytest.raises(ValueError, match="axis_index_groups"):
        pc.pmap(lambda x: GROUPED[name](x, [[0]]), "i")(X)


@pytest.mark.skipif(TOTAL < 3, reason="LOUD: needs three devices")
@pytest.mark.parametrize("name", ["all_gather", "psum_scatter", "all_to_all"])
def test_groups_of_different_sizes(name: str) -> None:
    with pytest.raises(ValueError, match="axis_index_groups"):
        pc.pmap(lambda x: GROUPED[name](x, [[0], list(range(1, TOTAL))]), "i")(X)


@pytest.mark.parametrize(
    "perm",
    [[(0, 0), (0, 0)], [(0, 0), (-TOTAL, 1)], [(0, 99)], [(-99, 0)]],
    ids=["twice", "twice again", "past the end", "too low"],
)
def test_perm(perm: Any) -> None:
    with pytest.raises(ValueError, match="ppermute"):
        pc.pmap(lambda x: lax.ppermute(x, "i", perm), "i")(X)


def test_pbroadcast_source() -> None:
    with pytest.raises(ValueError, match="pbroadcast: expected"):
        pc.pmap(lambda x: lax.pbroadcast(x, "i", 99), "i")(X)


@needs_several
def test_blocks_of_a_collective_that_do_not_divide() -> None:
    x = np.ones((D, 11), np.float32)
    for fun in (
        lambda x: lax.psum_scatter(x, "i", tiled=True),
        lambda x: lax.psum_scatter(x, "i"),
        lambda x: lax.all_to_all(x, "i", 0, 0),
        lambda x: lax.all_to_all(x, "i", 0, 0, tiled=True),
    ):
        with pytest.raises(ValueError, match=rf"(?=.*\b11\b).*\b{TOTAL}\b"):  # the error is JAX's own
            pc.pmap(fun, "i")(x)


def line_of(fun: Callable[..., Any], text: str) -> int:
    """Returns the number of the line of a function that contains a text."""
    lines, start = inspect.getsourcelines(fun)
    return start + next(i for i, line in enumerate(lines) if text in line)


def test_over_an_axis_of_ours_and_another_at_once() -> None:
    theirs = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("j",))

    def inner(x: Any) -> Any:
        return lax.all_gather(x, ("i", "j"))

    nested = jax.shard_map(inner, mesh=theirs, in_specs=P("j"), out_specs=P("j"), check_vma=False)
    where = rf"test_bad_input\.py:{line_of(inner, 'all_gather')}"
    with pytest.raises(
        NotImplementedError,
        match=rf"expected axes of Mesh.* alone, got all_gather over \('i', 'j'\) at .*{where}.*{HERE}",
    ):
        pc.jit(nested, axis_name="i")(X)
    total = jax.shard_map(
        lambda x: lax.psum(x, ("i", "j")), mesh=theirs, in_specs=P("j"), out_specs=P(), check_vma=False
    )
    assert (np.asarray(pc.jit(total, axis_name="i")(X)) == SIZE).all()


unknown_p = Primitive("an_unknown_collective")
unknown_p.def_abstract_eval(lambda x, *, axis_name: x)


def unknown(x: Any) -> Any:
    return unknown_p.bind(x, axis_name="i")


def in_scan(x: Any) -> Any:
    return lax.scan(lambda c, _: (unknown(c), None), x, None, length=2)[0]


@pytest.mark.parametrize("fun", [unknown, in_scan, jax.jit(unknown), jax.checkpoint(unknown)])
def test_collective_without_a_rule(fun: Any) -> None:
    where = rf"test_bad_input\.py:{line_of(unknown, 'bind')}"
    for program in (
        lambda: pc.pmap(fun, "i")(X),
        lambda: call(fun, P("i"), P("i"), X),
        lambda: pc.jit(fun, axis_name="i")(X),
    ):
        with pytest.raises(
            NotImplementedError, match=rf"expected one of \[.*'psum'.*got an_unknown_collective at .*{where}.*{HERE}"
        ):
            program()


# What is not ours: exceptions of the user, communicators, ranks that differ ----------------------------------


class OwnError(Exception):
    pass


def raises(x: Any) -> Any:
    y = lax.psum(x, "i")
    raise OwnError(f"of shape {y.shape}")


@pytest.mark.parametrize("fun", [raises, lambda x: jax.vmap(raises)(x), lambda x: lax.cond(True, raises, raises, x)])
def test_exception_of_the_user(fun: Any) -> None:
    for program in (
        lambda: pc.pmap(fun, "i")(X),
        lambda: call(fun, P("i"), P("i"), X),
        lambda: pc.jit(fun, axis_name="i")(X),
        lambda: jax.jit(pc.pmap(fun, "i"))(X),
        lambda: jax.grad(lambda x: pc.pmap(fun, "i")(x).sum())(X),
    ):
        with pytest.raises(OwnError, match=r"of shape \(.*\)") as caught:
            program()
        last = traceback.extract_tb(caught.value.__traceback__)[-1]
        assert last.lineno == line_of(raises, "raise OwnError")
        assert last.name == "raises"


def test_same_program_after_an_exception(world: pc.Communicator) -> None:
    wrong = [True]

    @pc.pmap(axis_name="i")
    def fun(x: Any) -> Any:
        if wrong:
            raise OwnError
        return lax.psum(x, "i")

    with pytest.raises(OwnError):
        fun(X)
    wrong.clear()
    assert (np.asarray(fun(X)) == TOTAL).all()


def freed(world: pc.Communicator) -> pc.Communicator:
    part = world.split(color=0)
    assert part is not None
    part.free()
    return part


FREED = r"expected a live communicator, got world/\d+, which was freed \(rank \d of \d\)\. Keep"


def test_freed_communicator(world: pc.Communicator) -> None:
    with pytest.raises(ValueError, match=FREED):
        pc.pmap(total, "i", comm=freed(world))(X)
    with pytest.raises(ValueError, match=FREED):
        pc.jit(total, axis_name="i", comm=freed(world))(X)


def test_mesh_over_a_freed_communicator(world: pc.Communicator) -> None:
    comm = freed(world)
    with pytest.raises(ValueError, match=FREED):
        pc.make_mesh((-1,), ("i",), comm=comm)


def test_communicator_freed_before_a_call(world: pc.Communicator) -> None:
    part = world.split(color=0)
    assert part is not None
    ours = pc.make_mesh((-1,), ("i",), comm=part)
    mapped = pc.shard_map(total, mesh=ours, in_specs=P("i"), out_specs=P("i"))
    compiled = pc.pmap(total, "i", comm=part)
    assert (np.asarray(compiled(X)) == TOTAL).all()
    part.free()
    with pytest.raises(ValueError, match=FREED):
        mapped(X)
    with pytest.raises(RUNTIME_ERRORS, match="expected a live communicator, got a freed one"):
        compiled(X).block_until_ready()


@pytest.mark.parametrize("wrong", [MPI.COMM_WORLD, "world"], ids=["mpi4py", "str"])
def test_not_a_communicator(wrong: Any) -> None:
    for program in (
        lambda: pc.make_mesh((-1,), ("i",), comm=wrong),
        lambda: pc.pmap(total, "i", comm=wrong)(X),
        lambda: pc.jit(total, axis_name="i", comm=wrong)(X),
    ):
        with pytest.raises(TypeError, match="expected a Communicator, got"):
            program()


@needs_two
@pytest.mark.parametrize("kind", ["shape", "dtype", "operation"])
def test_ranks_that_disagree(kind: str, world: pc.Communicator) -> None:
    # The test has its own communicator, so that messages still pending do not reach other tests.
    comm = world.split(color=0)
    assert comm is not None
    odd = world.rank == world.size - 1
    x = np.ones((D, 4 if odd and kind == "shape" else 3), np.int32 if odd and kind == "dtype" else np.float32)
    fun = (lambda x: lax.pmax(x, "i")) if odd and kind == "operation" else total
    with pytest.raises(
        RuntimeError, match=rf"pmap: expected the same program on every rank, here with .*, got .* {HERE}"
    ):
        pc.pmap(fun, "i", comm=comm)(x).block_until_ready()


@pytest.mark.skipif(SIZE < 2 or D < 2, reason="LOUD: needs two ranks of two devices")
@pytest.mark.parametrize("name", ["psum", "all_gather"])
def test_ranks_that_map_different_numbers_of_devices(name: str, world: pc.Communicator) -> None:
    comm = world.split(color=0)
    assert comm is not None
    count = 1 if world.rank == world.size - 1 else 2
    with pytest.raises(
        RuntimeError, match=rf"pmap: expected the same program on every rank, here with .*, got .* {HERE}"
    ):
        pc.pmap(lambda x: getattr(lax, name)(x, "i"), "i", comm=comm)(X[:count]).block_until_ready()


@pytest.mark.skipif(not lowering.HOSTS, reason="LOUD: accelerators make no collective as a team")
def test_a_collective_that_local_devices_cannot_make_together(world: pc.Communicator) -> None:
    group = mesh().group_along(("i",))
    each = jax.shard_map(
        lambda x: exchanges.gather(x, comm=group, root=0),
        mesh=group.mesh.local_mesh,
        in_specs=P("i"),
        out_specs=P("i"),
        check_vma=False,
    )
    with pytest.raises(
        RUNTIME_ERRORS, match="gather: expected a collective over ranks, got one over several devices of each rank"
    ):
        jax.block_until_ready(pc.jit(each)(X))
