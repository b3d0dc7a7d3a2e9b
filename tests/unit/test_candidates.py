"""Which ways to spread a step over devices are tried: what holds for all of them, and the rules by examples."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import jax
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, NamedSharding

from pycollective.planning.by_compiling.candidates import Axes, Candidate, Leaf, Spec, candidates, variations

_SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 8, 12]), max_size=4).map(tuple)
_LEAVES = st.lists(st.tuples(_SHAPES, st.sampled_from([None, 0, 1, 2])), max_size=6).map(
    lambda each: [leaf(shape, state, f"[{number}]") for number, (shape, state) in enumerate(each)]
)
_DEVICES = st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16])


def leaf(shape: tuple[int, ...], state: int | None = 0, path: str = "") -> Leaf:
    return Leaf(path, shape, 4 * math.prod(shape), state)


def part(candidate: Candidate, shape: tuple[int, ...], spec: Spec) -> tuple[int, ...]:
    """The shape of a device's part, by JAX; it raises for a spec that does not fit the shape or the mesh."""
    mesh = AbstractMesh(tuple(candidate.mesh.values()), tuple(candidate.mesh))
    return NamedSharding(mesh, jax.P(*spec)).shard_shape(shape)


def axes_of(entry: Axes) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


def assert_sound(candidate: Candidate, leaves: Sequence[Leaf], devices: int) -> None:
    assert math.prod(candidate.mesh.values()) == devices
    assert set(candidate.mesh) == {"data", "model"}
    parts = [part(candidate, leaf.shape, spec) for leaf, spec in zip(leaves, candidate.specs, strict=True)]
    assert candidate.argument_bytes(leaves) == sum(4 * math.prod(shape) for shape in parts)
    for one, spec in zip(leaves, candidate.specs, strict=True):
        axes = [axis for entry in spec for axis in axes_of(entry)]
        assert len(set(axes)) == len(axes)
        assert all(candidate.mesh[axis] > 1 for axis in axes), "an axis of size 1 cuts nothing"
        assert 0 not in one.shape or all(one.shape[dim] for dim, axis in enumerate(spec) if axis)


@given(_LEAVES, _DEVICES)
@settings(deadline=None)
def test_all_candidates(leaves: list[Leaf], devices: int) -> None:
    found = list(candidates(leaves, devices))
    assert found, "the whole state on each device is always possible"
    for one in found:
        assert_sound(one, leaves, devices)
    assert len({one.key for one in found}) == len(found)
    assert {one.model for one in found} <= {n for n in range(1, devices + 1) if devices % n == 0}
    assert found == list(candidates(leaves, devices)), "the same in each call"


@given(_LEAVES.filter(len), _DEVICES, st.data())
@settings(deadline=None, max_examples=50)
def test_all_variations(leaves: list[Leaf], devices: int, data: st.DataObject) -> None:
    start = data.draw(st.sampled_from(list(candidates(leaves, devices))))
    number = data.draw(st.integers(0, len(leaves) - 1))
    found = list(variations(start, leaves, number))
    for one in found:
        assert_sound(one, leaves, devices)
        assert one.mesh == start.mesh
        for other, (old, new) in enumerate(zip(start.specs, one.specs, strict=True)):
            alike = (leaves[other].shape, old) == (leaves[number].shape, start.specs[number])
            assert new == (one.specs[number] if alike else old)
    # By brute force: for each dimension some axes, where JAX and the sizes allow it.
    axes = [axis for axis, size in start.mesh.items() if size > 1]
    entries = [None, *axes, *([tuple(axes)] if len(axes) > 1 else [])]
    every = {
        spec
        for spec in itertools.product(entries, repeat=len(leaves[number].shape))
        if all(sum(axis in axes_of(entry) for entry in spec) <= 1 for axis in axes)
        and all(
            n and n % math.prod(start.mesh[axis] for axis in axes_of(entry)) == 0
            for n, entry in zip(leaves[number].shape, spec, strict=True)
            if entry
        )
    }
    assert sorted(map(str, every - {start.specs[number]})) == sorted(str(one.specs[number]) for one in found)


def by_rule(leaves: Sequence[Leaf], devices: int, model: int) -> dict[str, tuple[Spec, ...]]:
    """From the words of each rule to how the leaves are cut."""
    return {one.rule: one.specs for one in candidates(leaves, devices) if one.model == model}


ROWS, COLUMNS = ("model", None), (None, "model")
BATCH = leaf((8, 16), None)
LARGER = "state whole, matrices cut by their larger dimension"


def test_one_device() -> None:
    [only] = candidates([leaf((4, 4)), leaf((8,), None)], 1)
    assert only == Candidate(1, 1, "state whole", ((None, None), (None,)))


def test_data_parallelism_is_first_and_the_state_is_cut_along_its_largest_dimension() -> None:
    leaves = [leaf((4, 16)), leaf((16, 8)), leaf((6,)), leaf((32, 4, 4), None), leaf((6, 4), None), leaf((), None)]
    data = (("data", None, None), (None, None), ())  # 6 examples do not divide, and other dimensions are no examples
    assert by_rule(leaves, 4, 1) == {
        "state whole": ((None, None), (None, None), (None,), *data),
        "state cut": ((None, "data"), ("data", None), (None,), *data),
    }
    assert next(iter(candidates(leaves, 4))).rule == "state whole"


def test_two_layers_in_a_row_are_cut_as_megatron_does() -> None:
    """Shoeybi et al. 2019: the first matrix of a pair by its columns, the second by its rows; one sum for each pair."""
    qkv, out, up, down = leaf((16, 48)), leaf((16, 16)), leaf((16, 64)), leaf((64, 16))
    assert by_rule([qkv, out, up, down, BATCH], 2, 2)[LARGER] == (COLUMNS, ROWS, COLUMNS, ROWS, (None, None))


def test_square_matrices_alternate() -> None:
    a, b, c, d = (leaf((16, 16), path=f"[0][{i}]") for i in range(4))
    assert by_rule([a, b, c, d, BATCH], 2, 2)[LARGER] == (COLUMNS, ROWS, COLUMNS, ROWS, (None, None))
    between = [a, leaf((16,)), b, leaf((16, 16), None), c]
    cut = by_rule(between, 2, 2)[LARGER]
    assert cut == (COLUMNS, (None,), ROWS, (None, None), COLUMNS), "what is no matrix of the state does not count"


def test_moments_of_square_matrices_are_cut_as_their_parameters() -> None:
    params = [leaf((16, 16), 0, f"[0][{name!r}]") for name in "abc"]
    moments = [leaf((16, 16), 1, f"[1][0].{kind}[{name!r}]") for kind in ("mu", "nu") for name in "abc"]
    cut = by_rule([*params, *moments, BATCH], 2, 2)[LARGER]
    assert cut[:3] == cut[3:6] == cut[6:9] == (COLUMNS, ROWS, COLUMNS)


def test_matrices_are_cut_all_by_one_dimension() -> None:
    leaves = [leaf((16, 64)), leaf((64, 16)), leaf((3, 8, 16)), leaf((16,)), leaf((5, 16)), leaf((16, 5))]
    rules = by_rule(leaves, 2, 2)
    first = rules["state whole, matrices cut by their first dimension"]
    last = rules["state whole, matrices cut by their last dimension"]
    whole = (None, None)
    assert first == (ROWS, ROWS, (None, "model", None), (None,), whole, ROWS), "5 rows do not divide"
    assert last == (COLUMNS, COLUMNS, (None, None, "model"), (None,), COLUMNS, whole)


def test_matrices_are_cut_along_both_axes() -> None:
    leaves = [leaf((16, 64)), leaf((64, 16)), leaf((64,)), BATCH]
    rules = by_rule(leaves, 4, 2)
    data = ("data", None)
    assert rules[LARGER] == (COLUMNS, ROWS, (None,), data)
    cut = rules["state cut, matrices cut by their larger dimension"]
    assert cut == (("data", "model"), ("model", "data"), ("data",), data)


def test_examples_over_all_devices_while_matrices_are_cut() -> None:
    """Krizhevsky 2014: convolutions have their examples cut, and the wide layer after them its units."""
    leaves = [leaf((16, 64)), leaf((64, 16)), BATCH, leaf((6, 4), None), leaf((), None), leaf((0, 4), None)]
    last = "state whole, matrices cut by their last dimension, examples over all devices"
    assert by_rule(leaves, 4, 4)[last] == (COLUMNS, COLUMNS, ROWS, (None, None), (), (None, None))
    assert f"{LARGER}, examples over all devices" not in by_rule(leaves, 4, 4), (
        "on one axis that is the whole state cut"
    )
    both = by_rule(leaves, 4, 2)[f"{LARGER}, examples over all devices"]
    assert not any(rule.startswith("state cut") and "examples" in rule for rule in by_rule(leaves, 4, 2))
    assert both == (COLUMNS, ROWS, (("data", "model"), None), ("data", None), (), (None, None)), (
        "6 are cut into 2 parts"
    )


def test_zero_stage_one_leaves_the_first_argument_whole() -> None:
    """Rajbhandari et al. 2020: the optimizer's state is cut, the parameters are not."""
    params, moments = leaf((16, 64), 0), leaf((16, 64), 1)
    rules = by_rule([params, moments, BATCH], 2, 1)
    assert rules["state cut but for its first argument"] == ((None, None), (None, "data"), ("data", None))
    assert rules["state cut"] == ((None, "data"), (None, "data"), ("data", None))


def test_rules_that_say_the_same_are_one() -> None:
    rules = by_rule([leaf((16, 64)), BATCH], 4, 1)
    assert list(rules) == ["state whole", "state cut"], "there is only one argument of state"
    along = by_rule([leaf((16, 64))], 2, 2)
    assert LARGER not in along, "on one axis that is the same as cutting the state, and there is no data"


def test_the_key_of_a_candidate() -> None:
    along_data = Candidate(4, 1, "one", ((None, "data"), ()))
    along_model = Candidate(1, 4, "another", ((None, "model"), ()))
    assert along_data.key == along_model.key
    both = Candidate(2, 2, "one", ((None, "data"), ()))
    assert len({along_data.key, both.key, both._replace(specs=((None, "model"), ())).key}) == 3
    assert both.key != Candidate(1, 4, "one", both.specs).key


def test_a_variation_by_example() -> None:
    leaves = [leaf((4, 6), path="[0]"), leaf((4, 6), path="[1]"), leaf((4, 6), path="[2]"), leaf((8,), None)]
    start = Candidate(2, 2, "state whole", (ROWS, COLUMNS, ROWS, ("data",)))
    found = list(variations(start, leaves, 2))
    assert [one.specs[0] for one in found] == [one.specs[2] for one in found]
    assert {one.specs[1] for one in found} == {COLUMNS}
    assert {one.specs[2] for one in found} == {
        (None, None),
        ("data", None),
        (None, "data"),
        (None, "model"),
        ("data", "model"),
        ("model", "data"),
        (("data", "model"), None),  # 6 columns cannot be cut into 4 parts
    }
    assert f"state whole; [2] {jax.P(None, 'data')}" in {one.rule for one in found}
