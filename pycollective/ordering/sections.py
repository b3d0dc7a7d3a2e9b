"""The sections of a program: the collectives that each run of it makes in the same order.

Ranks on several hosts, and many ranks of one host, compare each call of a section in its first run. In later runs
they compare once that it is this section, and its other calls need no comparison (native/calls/comparison.h). So a
call tells its section, in the attribute ``section``. A section ends where a conditional or a loop with a condition
makes collectives: which calls these are depends on data. They are in no section, and after them a new one begins.

The number of a section is a hash of its calls as this rank makes them: the same line, shapes, dtypes, parameters, and
lengths of the loops around. So two programs of one rank whose sections have one number make the same calls there. Other
ranks may have other numbers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from jax.extend import source_info_util
from jax.extend.core import JaxprEqn

from pycollective.jax_support import call_site
from pycollective.jax_support.jaxprs import PLAIN, inner_jaxprs, not_plain_equations, with_inner
from pycollective.ordering.effect import effect

_RUN_IN_ORDER = frozenset(
    {"scan", "jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "shard_map"}
    | {"checkpoint", "remat", "remat2"}  # jax.checkpoint in different versions of JAX
)
"""Primitives that run the program that they hold in the same way each time."""

_MESSAGES = frozenset({"send", "recv", "sendrecv", "isendrecv", "wait"})
"""Primitives that are no collectives: ranks compare the two ends of a message alone."""


def with_sections(jaxpr: Any, is_counted: Callable[[Any], bool]) -> Any:
    """A whole program, each of whose collectives has its section in the parameter ``passed``.

    Args:
        jaxpr: the program, as it will be lowered.
        is_counted: whether the calls of these participants are to have sections.
    """
    if not _communicates(jaxpr, is_counted):
        return jaxpr
    collected = _Walk(is_counted)
    collected.program(jaxpr)
    return _Walk(is_counted, [_number([str(place), *calls]) for place, calls in enumerate(collected.texts)]).program(
        jaxpr
    )


def _number(facts: list[str]) -> int:
    """A hash of 62 bits, not 0: with the bit that says whether a call begins the section, an attribute holds it."""
    digest = hashlib.blake2b("\n".join(facts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2 | 1


def _is_call(eqn: JaxprEqn, is_counted: Callable[[Any], bool]) -> bool:
    is_ours = "passed" in eqn.params and "comm" in eqn.params and eqn.primitive.name not in _MESSAGES
    return is_ours and is_counted(eqn.params["comm"])


def _communicates(jaxpr: Any, is_counted: Callable[[Any], bool]) -> bool:
    return _has_effect(jaxpr) and any(_is_call(eqn, is_counted) for eqn in not_plain_equations(jaxpr))


class _Walk:
    """A walk over a program in the order in which it runs. The first one collects the calls, the second one marks them.

    Attributes:
        texts: for each section a text for each call and loop.
    """

    def __init__(self, is_counted: Callable[[Any], bool], numbers: list[int] | None = None) -> None:
        self._is_counted = is_counted
        self._numbers = numbers  # of the sections; None: the walk collects
        self._begun: frozenset[Any] = frozenset()  # the participants that have made a call in this section
        self._meshes: tuple[Any, ...] = ()  # around this place
        self._marked: dict[Any, tuple[Any, frozenset[Any]]] = {}  # by where a program stands: JAX compiles each once
        self._closed: dict[Any, Any] = {}
        self.texts: list[list[str]] = [[]]

    def program(self, jaxpr: Any) -> Any:
        """Walks over a program. The second walk returns the program with marks."""
        place = id(jaxpr), len(self.texts), self._begun, self._meshes
        if place in self._marked:
            new, self._begun = self._marked[place]
            return new
        new = jaxpr.replace(eqns=[self._equation(eqn) for eqn in jaxpr.eqns]) if _has_effect(jaxpr) else jaxpr
        if self._numbers is not None and len(self.texts) == place[1]:
            self._marked[place] = new, self._begun
        return new

    def _equation(self, eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive in PLAIN:
            return eqn
        if _is_call(eqn, self._is_counted):
            return self._call(eqn)
        inner = [each for each in inner_jaxprs(eqn) if _communicates(each, self._is_counted)]
        if not inner:
            if _is_foreign(eqn):
                self._end()
            return eqn
        if len(inner) > 1 or eqn.primitive.name not in _RUN_IN_ORDER:
            self._end()
            return eqn
        meshes, self._meshes = self._meshes, (*self._meshes, *_mesh_of(eqn))
        (program,) = inner
        new_of = {id(each): each for each in inner_jaxprs(eqn)}
        if eqn.primitive.name != "scan":
            new_of[id(program)] = self.program(program)
        elif self._begins_in_each_trip(program):
            # In each trip the first calls begin a section: the trip before may have made calls that depend on data, or
            # the section would begin in each trip, and go on behind the loop.
            self._end()
            new_of[id(program)] = self.program(program)
            self._end()
        else:
            self.texts[-1].append(f"{eqn.params['length']} times")
            new_of[id(program)] = self.program(program)
            self.texts[-1].append("end")
        self._meshes = meshes
        return eqn if self._numbers is None else with_inner(eqn, lambda jaxpr: new_of[id(jaxpr)], self._closed)

    def _call(self, eqn: JaxprEqn) -> JaxprEqn:
        maker = self._maker(eqn)
        begins = len(self.texts) > 1 and maker not in self._begun  # the first call of a run needs no mark
        self._begun = self._begun | {maker}
        if self._numbers is None:
            self.texts[-1].append(_text(eqn, self._meshes))
            return eqn
        section = self._numbers[len(self.texts) - 1] << 1 | begins
        return eqn.replace(params={**eqn.params, "passed": eqn.params["passed"]._replace(section=section)})

    def _maker(self, eqn: JaxprEqn) -> Any:
        """What decides on which channel a call is made."""
        return eqn.params["comm"]._key, self._meshes

    def _begins_in_each_trip(self, jaxpr: Any) -> bool:
        """Whether a section ends in the program of a loop, or a call in it would begin the section under way."""
        inside = _Walk(self._is_counted)
        inside._meshes = self._meshes
        inside.program(jaxpr)
        return len(inside.texts) > 1 or (len(self.texts) > 1 and not inside._begun <= self._begun)

    def _end(self) -> None:
        """Ends the section."""
        self.texts.append([])
        self._begun = frozenset()


def _has_effect(jaxpr: Any) -> bool:
    return effect in jaxpr.effects


def _is_foreign(eqn: JaxprEqn) -> bool:
    """Whether an equation that holds no calls in its programs may make some all the same: nobody sees which.

    Such are another library's operations, and primitives that hide a program until they are lowered.
    """
    is_ours = "comm" in eqn.params  # a message, or a collective between ranks that share a board
    return effect in eqn.effects and not is_ours and not any(map(_has_effect, inner_jaxprs(eqn)))


def _mesh_of(eqn: JaxprEqn) -> tuple[Any, ...]:
    mesh = eqn.params.get("mesh")
    return () if mesh is None else (tuple(mesh.shape.items()),)


def _text(eqn: JaxprEqn, meshes: tuple[Any, ...]) -> str:
    """All that decides what a call posts for the comparison, as far as this rank's program does."""
    passed = eqn.params["passed"]
    params = {name: value for name, value in eqn.params.items() if name not in ("comm", "in_place")}
    types = [(var.aval.shape, str(var.aval.dtype)) for var in eqn.invars]
    with source_info_util.user_context(eqn.source_info.traceback):
        site = call_site.site_of_lowered(passed.derivative, passed.program)
    return repr((eqn.primitive.name, eqn.params["comm"]._key, meshes, types, sorted(params.items()), site))
