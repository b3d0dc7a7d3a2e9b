"""Checkpoints that all ranks write and read, each its own parts, while the training goes on. They need tensorstore.

A checkpoint is a directory, named after its step:

    layout.json           the number of ranks, a random token of this write, and the notes, such as the position of the
                          data loader; written first
    arrays.TOKEN/NAME     one array of the state, in the format Zarr 3; each rank writes the chunks that it has
    done.TOKEN.RANK       this rank has written all its chunks

A checkpoint is complete if there is a file ``done.TOKEN.RANK`` of each rank. So ranks need not communicate at the end
of a write, and a job may end at any time: what is not complete is not read. A thread of ranks that have failed may go
on to write while the same step is written anew: it has another token, so it writes nothing that is read. An array in
Zarr does not depend on how it was cut, so a job may read it on another layout.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import secrets
import shutil
import urllib.parse
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore

from pycollective import files
from pycollective.errors import fail, message
from pycollective.named_axes.mesh import Mesh
from pycollective.parallel.axes import AxisName, names_of
from pycollective.primitives import dtypes
from pycollective.ranks.communicator import Communicator

Array = Any
Tree = Any

_LAYOUT = "layout.json"
_WHERE = "parallel.Checkpoints"


@dataclasses.dataclass(frozen=True)
class Slices:
    """How :func:`shard`, :func:`initialized_slices` and :func:`zero` cut an array: a spec for :class:`Checkpoints`.

    The last dimension of a rank's array is cut along an axis, and zeros fill the end of the last slices.

    Attributes:
        axis_name: the axis of :func:`shard`, a name or a tuple of names.
        size: the number of elements of the last dimension without the zeros: the size of the whole array, or that of
            one layer if layers are stacked along a first axis.
    """

    axis_name: AxisName
    size: int


def slices_of(shapes: Tree, axis_name: AxisName, *, stacked: bool = False) -> Tree:
    """Returns the specs of the slices of parameters, for :class:`Checkpoints`.

    Args:
        shapes: the whole parameters, or a tree of :class:`jax.ShapeDtypeStruct`.
        axis_name: the axis of :func:`shard`.
        stacked: whether the arrays are layers that are stacked along a first axis. Default False.

    Returns:
        A tree like ``shapes`` of :class:`Slices`.

    Example:
        >>> import jax.numpy as jnp
        >>> slices_of({"w": jnp.ones((3, 4))}, "data")
        {'w': Slices(axis_name='data', size=12)}
    """
    return jax.tree.map(lambda x: Slices(axis_name, math.prod(jnp.shape(x)[1 if stacked else 0 :])), shapes)


def specs_of_state(state: Tree, params: Tree, specs: Tree) -> Tree:
    """Returns the specs of an optimizer's state: those of the parameters for its moments, none for its counts.

    A leaf of the state belongs to the parameter whose path is the end of its own path, and whose shape it has.

    Args:
        state: the state of the optimizer for this rank's parameters: of :func:`zero`, :func:`sliced`,
            :func:`for_parts`, :func:`apply_if_finite`, or of optax.
        params: what the moments are like: this rank's parameters, or their slices. Arrays or
            :class:`jax.ShapeDtypeStruct`.
        specs: the specs of these, a tree that is a prefix of ``params``.

    Returns:
        A tree like ``state`` of specs, for :class:`Checkpoints`.

    Raises:
        ValueError: a leaf of the state has dimensions, and belongs to no parameter.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> params = {"w": jnp.ones(4)}
        >>> specs = specs_of_state(optax.adam(1e-3).init(params), params, {"w": jax.P("data")})
        >>> specs[0].mu == {"w": jax.P("data")}, specs[0].count == jax.P()
        (True, True)
    """
    paths = jax.tree_util.tree_leaves_with_path(params)
    known = [
        (path, jnp.shape(x), spec)
        for (path, x), spec in zip(paths, jax.tree.leaves(jax.tree.broadcast(specs, params)), strict=True)
    ]

    def spec_of(path: Any, x: Any) -> Any:
        shape = jnp.shape(x)
        own = [
            (len(end), spec) for end, of_end, spec in known if path[len(path) - len(end) :] == end and of_end == shape
        ]
        if own:
            return max(own, key=lambda found: found[0])[1]
        if shape:
            name = jax.tree_util.keystr(path)
            got, remedy = f"{list(shape)} at {name}", "Write the specs of this state yourself."
            raise ValueError(message("parallel.specs_of_state", "leaves like the parameters, or scalars", got, remedy))
        return jax.sharding.PartitionSpec()

    return jax.tree.map_with_path(spec_of, state)


class Restored(NamedTuple):
    """What :meth:`Checkpoints.restore` has read.

    Attributes:
        step: the step of the checkpoint.
        state: this rank's state, arrays of NumPy and keys.
        notes: the notes.
    """

    step: int
    state: Tree
    notes: Any


class Checkpoints:
    """The checkpoints of a training in a directory that all ranks see.

    ``save`` copies this rank's arrays to the memory of the host and returns; a thread writes them. No rank has the
    whole state. A state is read on any layout: other numbers of ranks and devices, other specs.

    Args:
        directory: the directory, the same on all ranks; it need not exist.
        comm: the communicator of all ranks of the training.
        keep: the number of complete checkpoints to keep while another one is written, from 1. Default 2.

    Raises:
        ValueError: ``keep`` is below 1.

    Order:
        Each method is outside programs. All ranks of ``comm`` must make the same calls; they wait for each other by
        messages of mpi4py.

    Example:
        >>> import tempfile, jax, jax.numpy as jnp, numpy as np, pycollective as pc
        >>> comm = pc.world()
        >>> mesh = pc.make_mesh((-1,), ("data",))
        >>> folder = comm.mpi.bcast(tempfile.mkdtemp() if comm.rank == 0 else None)
        >>> checkpoints = Checkpoints(folder, comm)
        >>> state = {"w": np.full(3, comm.rank, np.float32), "count": jnp.int32(7)}  # w is cut, count is not
        >>> specs = {"w": jax.P("data"), "count": jax.P()}
        >>> checkpoints.save(20, state, mesh, specs, notes={"position": 40})
        >>> step, state, notes = checkpoints.restore(state, mesh, specs)  # on this layout, or another one
        >>> step, notes, bool((state["w"] == comm.rank).all()), state["count"].tolist()
        (20, {'position': 40}, True, 7)
        >>> checkpoints.close()
    """

    def __init__(self, directory: str | os.PathLike[str], comm: Communicator, *, keep: int = 2) -> None:
        if keep < 1:
            fail(ValueError, _WHERE, comm, "keep of at least 1", keep, "Keep the newest checkpoint at least.")
        self._directory, self._comm, self._keep = Path(directory).absolute(), comm, keep
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="pycollective-checkpoints")
        self._writing: Future[None] | None = None
        self._checked: set[tuple[int, ...]] = set()  # the layouts that save has checked: a hash of each rank's blocks

    def save(self, step: int, state: Tree, mesh: Mesh, specs: Tree, *, notes: Any = None) -> None:
        """Begins to write a checkpoint. A checkpoint of this step that is complete already stays as it is.

        It first waits for the previous write. Then the oldest checkpoints are removed.

        Args:
            step: the number of the step, from 0.
            state: a tree of this rank's arrays: of numbers, or keys of :mod:`jax.random`. Ranks may have different
                trees, such as the stages of a pipeline; then equal paths in them must mean one array. The arrays may be
                donated or changed after the call.
            mesh: the mesh of the arrays, of :func:`pycollective.make_mesh`. With several pipelines or stages, that of
                this rank's stage.
            specs: how the arrays are cut along the mesh: a :class:`jax.sharding.PartitionSpec`, as in ``out_specs`` of
                ``shard_map``, or :class:`Slices`; or a tree of them that is a prefix of ``state``.
            notes: what else belongs to the checkpoint, as JSON can have it: the position of the data loader, losses,
                settings. Those of rank 0 count. Default None.

        Raises:
            ValueError: on all ranks: a spec does not fit; no rank has some elements of an array, or two ranks have the
                same ones, as when the stages of a pipeline use equal names.
            TypeError: on all ranks: JSON cannot have the notes.
            OSError, RuntimeError: on all ranks: a rank could not write the previous checkpoint; rank 0 could not make
                the directory of this one, or remove an old one.
        """
        self.wait()
        blocks: list[_Block] = []
        problem: Exception | None = None
        token: str | None = secrets.token_hex(8)  # that of rank 0 counts
        try:
            text = json.dumps({"ranks": self._comm.size, "token": token, "notes": notes})
            blocks = _blocks(state, mesh, specs)
        except (TypeError, ValueError) as error:
            problem = error
        self._raise_on_all(problem)
        self._check_layout(blocks)
        folder = self._directory / str(step)
        if self._comm.rank == 0:
            try:
                self._remove_old()
                if _complete_layout(folder):
                    token = None
                else:
                    _remove(folder)
                    folder.mkdir(parents=True, exist_ok=True)  # a thread of ranks that have failed may write there
                    _publish(folder / _LAYOUT, text)
            except OSError as error:
                problem = error
        self._raise_on_all(problem)
        token = self._comm.mpi.bcast(token)
        if token is not None:
            own = [(block, np.array(block.values(), copy=True)) for block in blocks if block.is_writer]
            self._writing = self._thread.submit(_write, folder, token, self._comm.rank, own)

    def restore(self, like: Tree, mesh: Mesh, specs: Tree) -> Restored | None:
        """Reads this rank's part of the newest complete checkpoint, after the write that is under way.

        Args:
            like: a tree of what this rank shall have: arrays, or :class:`jax.ShapeDtypeStruct`. It may have fewer
                arrays than the checkpoint.
            mesh: the mesh of these arrays. It need not be that of :meth:`save`.
            specs: how these arrays are cut along the mesh, as for :meth:`save`.

        Returns:
            The step, the state and the notes. None on all ranks if there is no complete checkpoint.

        Raises:
            ValueError: on all ranks: the checkpoint lacks an array, or a part of it, or has it in another shape or
                dtype; a spec does not fit.
            OSError: on all ranks: a rank could not read it.
        """
        self.wait()
        found = self._newest()
        if found is None:
            return None
        step, layout = found
        state, problem = None, None
        try:
            arrays = _arrays(self._directory / str(step), layout["token"])
            values = [block.read(arrays) for block in _blocks(like, mesh, specs)]
            state = jax.tree.structure(like).unflatten(values)
        except (ValueError, OSError) as error:
            problem = error
        self._raise_on_all(problem)
        return Restored(step, state, layout["notes"])

    def latest_step(self) -> int | None:
        """Returns the step of the newest complete checkpoint, the same on all ranks; None if there is none.

        Raises:
            OSError: on all ranks: rank 0 could not read the directory.
        """
        newest = self._newest()
        return None if newest is None else newest[0]

    def wait(self) -> None:
        """Waits until all ranks have written the checkpoint that is under way.

        Raises:
            OSError, ValueError, RuntimeError: on all ranks: a rank could not write it.
        """
        problem = None
        if self._writing is not None:
            problem = self._writing.exception()
            self._writing = None
        self._raise_on_all(problem)

    def close(self) -> None:
        """Waits for the write that is under way, and ends the thread."""
        self.wait()
        self._thread.shutdown()

    def _raise_on_all(self, problem: BaseException | None) -> None:
        """Raises the error of the first rank that has one, on all ranks."""
        own = None
        if problem is not None:
            kind = next((kind for kind in (ValueError, TypeError, OSError) if isinstance(problem, kind)), RuntimeError)
            text = str(problem)
            if not text.startswith("pycollective."):
                text = f"{_WHERE}: {type(problem).__name__}: {text}"
            own = kind, text
        for rank, found in enumerate(self._comm.mpi.allgather(own)):
            if found is not None:
                raise found[0](f"{found[1]} (on rank {rank})") from problem

    def _newest(self) -> tuple[int, Any] | None:
        """Returns the step and the layout of the newest complete checkpoint, the same on all ranks."""
        found, problem = None, None
        if self._comm.rank == 0:
            try:
                found = max(self._complete().items(), default=None)
            except OSError as error:
                problem = error
        self._raise_on_all(problem)
        newest: tuple[int, Any] | None = self._comm.mpi.bcast(found)
        return newest

    def _check_layout(self, blocks: Sequence[_Block]) -> None:
        """Raises an error on all ranks if not each element of each array has one rank that writes it."""
        own = [(b.name, b.shape, b.dtype, b.starts, b.count) for b in blocks if b.is_writer]
        layout = tuple(self._comm.mpi.allgather(hash(tuple(own))))
        if layout in self._checked:
            return
        of_ranks = self._comm.mpi.allgather(own)
        found: dict[str, Any] = {}
        counts: dict[str, int] = {}
        writers: dict[Any, int] = {}
        for rank, blocks_of_rank in enumerate(of_ranks):
            for name, shape, dtype, starts, count in blocks_of_rank:
                first = found.setdefault(name, (shape, dtype, rank))
                if first[:2] != (shape, dtype):
                    expected = f"{name} to be one array, {first[1]}{list(first[0])} as on rank {first[2]}"
                    self._refuse_layout(expected, f"{dtype}{list(shape)} on rank {rank}")
                other = writers.setdefault((name, starts), rank)
                if other != rank and count:
                    self._refuse_layout(
                        f"one rank with each part of {name}", f"ranks {other} and {rank} with the same part"
                    )
                counts[name] = counts.get(name, 0) + count
        for name, count in counts.items():
            shape = found[name][0]
            if count != math.prod(shape):
                self._refuse_layout(f"ranks that have all elements of {name}, {list(shape)}", f"{count} elements")
        self._checked.add(layout)

    def _refuse_layout(self, expected: str, got: str) -> None:
        remedy = "Give arrays of different stages different paths, and the specs by which they are cut."
        fail(ValueError, _WHERE, self._comm, expected, got, remedy)

    def _complete(self) -> dict[int, Any]:
        """Returns the layouts of the complete checkpoints by their steps."""
        layouts = {int(path.name): _complete_layout(path) for path in self._folders()}
        return {step: layout for step, layout in layouts.items() if layout}

    def _folders(self) -> Iterable[Path]:
        if not self._directory.is_dir():
            return []
        return [
            path
            for path in self._directory.iterdir()
            if path.name.isdecimal() and path.name == str(int(path.name)) and path.is_dir()
        ]

    def _remove_old(self) -> None:
        """Removes all but the newest complete checkpoints. No rank writes."""
        kept = set(sorted(self._complete())[-self._keep :])
        for path in self._folders():
            if int(path.name) not in kept:
                _remove(path)


def _complete_layout(folder: Path) -> Any:
    """Returns the layout of a complete checkpoint; None if there is none."""
    try:
        layout = json.loads((folder / _LAYOUT).read_text())
        ranks, token, _ = layout["ranks"], layout["token"], layout["notes"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # not there, or not what save writes
        return None
    return layout if all(_done(folder, token, rank).exists() for rank in range(ranks)) else None


def _arrays(folder: Path, token: str) -> Path:
    return folder / f"arrays.{token}"


def _done(folder: Path, token: str, rank: int) -> Path:
    return folder / f"done.{token}.{rank}"


def _publish(path: Path, text: str = "") -> None:
    """Writes a file that is there with all its text, or not at all, also after a crash of the host."""
    with files.replaced(path) as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _remove(folder: Path) -> None:
    """Removes a checkpoint. If the job ends meanwhile, what is left is not complete."""
    (folder / _LAYOUT).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _write(folder: Path, token: str, rank: int, own: Sequence[tuple[_Block, Array]]) -> None:
    """Writes a rank's blocks, and then the file that says so."""
    writes = [block.write(_arrays(folder, token), values) for block, values in own]
    for write in writes:
        write.result()
    _publish(_done(folder, token, rank))


@dataclasses.dataclass(frozen=True)
class _Block:
    """The part of an array of the state that a rank has.

    Attributes:
        name: the path of the array in the state.
        x: the rank's array, or a :class:`jax.ShapeDtypeStruct`.
        shape: the shape of the whole array; of a key that of its data.
        dtype: the name of its dtype; of a key that of its data.
        starts: where the block begins in the whole array.
        local: the shape of the block, with the zeros that fill slices.
        is_writer: whether this rank is the one that writes the block.
    """

    name: str
    x: Any
    shape: tuple[int, ...]
    dtype: str
    starts: tuple[int, ...]
    local: tuple[int, ...]
    is_writer: bool

    @property
    def region(self) -> tuple[slice, ...]:
        """The elements of the whole array that the block has."""
        return tuple(
            slice(min(start, whole), min(start + length, whole))
            for start, length, whole in zip(self.starts, self.local, self.shape, strict=True)
        )

    @property
    def count(self) -> int:
        """The number of these elements."""
        return math.prod(cut.stop - cut.start for cut in self.region)

    def values(self) -> Array:
        """Returns the rank's array, or the data of a key."""
        return np.asarray(jax.random.key_data(self.x) if _is_key(self.x) else self.x)

    def _open(self, arrays: Path, **metadata: Any) -> Any:
        quoted = urllib.parse.quote(self.name, safe="")
        if len(quoted) > 200:  # the name of a file has at most 255 bytes
            quoted = f"{quoted[:150]}-{hashlib.sha256(self.name.encode()).hexdigest()[:32]}"
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(arrays / quoted)}}
        # Zeros are written as well, so a chunk that is missing has been lost.
        options = metadata | {"store_data_equal_to_fill_value": True, "fill_missing_data_reads": False}
        return tensorstore.open(spec | options, open=True, create=bool(metadata)).result()

    def write(self, arrays: Path, values: Array) -> Any:
        """Begins to write the block, and returns a future."""
        grid = {"name": "regular", "configuration": {"chunk_shape": [max(1, n) for n in self.local]}}
        metadata = {"shape": list(self.shape), "data_type": self.dtype, "chunk_grid": grid}
        store = self._open(arrays, metadata=metadata)
        inside = tuple(slice(0, cut.stop - cut.start) for cut in self.region)
        return store[self.region].write(values[inside])

    def read(self, arrays: Path) -> Array:
        """Reads the block; zeros fill the end of slices.

        Raises:
            ValueError: the checkpoint does not have the array, in this shape and dtype, or lacks a part of it.
        """
        wanted = f"{self.dtype}{list(self.shape)} at {self.name}"
        try:
            store = self._open(arrays)
        except ValueError as error:
            if "NOT_FOUND" not in str(error):
                raise
            raise _unfit(f"{wanted} in {arrays.parent}", "no such array") from error
        stored = f"{store.dtype.name}{list(store.shape)}"
        if (store.dtype.name, store.shape) != (self.dtype, self.shape):
            raise _unfit(f"{wanted} in {arrays.parent}", stored)
        x = np.zeros(self.local, store.dtype.numpy_dtype)
        x[tuple(slice(0, cut.stop - cut.start) for cut in self.region)] = store[self.region].read().result()
        return jax.random.wrap_key_data(jnp.asarray(x), impl=dtypes.key_impl(self.x.dtype)) if _is_key(self.x) else x


def _is_key(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jax.dtypes.prng_key))


def _unfit(expected: str, got: str) -> ValueError:
    remedy = "Give the state and the specs with which the checkpoint was saved, or those of another layout of it."
    return ValueError(message(_WHERE, expected, got, remedy))


def _blocks(state: Tree, mesh: Mesh, specs: Tree) -> list[_Block]:
    """Returns what this rank has of each array of the state.

    Raises:
        ValueError: a spec does not fit.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    of_leaves = jax.tree.leaves(jax.tree.broadcast(specs, state))
    return [
        _block(jax.tree_util.keystr(path), x, spec, mesh) for (path, x), spec in zip(leaves, of_leaves, strict=True)
    ]


def _block(name: str, x: Any, spec: Any, mesh: Mesh) -> _Block:
    if not (hasattr(x, "dtype") and hasattr(x, "shape")):
        x = np.asarray(x)
    data = jax.eval_shape(jax.random.key_data, x) if _is_key(x) else x
    local = tuple(data.shape)
    cuts: list[tuple[Any, ...]] = [()] * len(local)
    size = None
    if isinstance(spec, Slices):
        if not local:
            raise _unfit(f"an array with a dimension to cut at {name}", "a scalar")
        cuts[-1], size = tuple(names_of(spec.axis_name)), spec.size
    elif len(spec) > x.ndim:
        raise _unfit(f"a spec of at most {x.ndim} dimensions at {name}", f"{spec}")
    else:
        cuts[: len(spec)] = [() if names is None else tuple(names_of(names)) for names in spec]
    names = [axis.name for axis in mesh.axes]
    used = [cut for of_dimension in cuts for cut in of_dimension]
    for cut in cuts:
        if set(cut) - set(names) or list(cut) != [name for name in names if name in cut]:
            raise _unfit(f"axes of the mesh {names} in their order at {name}", f"{spec}")
    if len(set(used)) < len(used):
        raise _unfit(f"each axis at most once at {name}", f"{spec}")
    places = dict(zip(names, np.unravel_index(mesh.comm.rank, [axis.ranks for axis in mesh.axes]), strict=True))
    axes = {axis.name: axis for axis in mesh.axes}
    shape, starts = [], []
    for length, cut in zip(local, cuts, strict=True):
        ranks = [axes[name].ranks for name in cut]
        index = int(np.ravel_multi_index([int(places[name]) for name in cut], ranks)) if cut else 0
        shape.append(length * math.prod(ranks))
        starts.append(index * length)
    if size is not None:
        devices = math.prod(axes[name].size for name in cuts[-1])
        if not 0 <= shape[-1] - size < max(devices, 1):
            raise _unfit(f"slices of {size} elements on {devices} devices at {name}", f"{shape[-1]} elements in all")
        shape[-1] = size
    is_writer = all(place == 0 for name, place in places.items() if name not in used)
    return _Block(name, x, tuple(shape), np.dtype(data.dtype).name, tuple(starts), local, is_writer)
