"""The sections of a program: the collectives that each run of it makes in the same order.

Ranks on several hosts compare each call of a section in its first run. In later runs they compare once that it is this
section, and its other calls need no comparison (native/calls/comparison.h). So a call tells its section, in the
attribute ``section``. A section ends where a conditional or a loop with a condition makes collectives: which calls
these are depends on data. They are in no section, and after them a new one begins.

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

from pycollective.jax_support.jaxprs import inner_jaxprs, map_jaxprs

_RUN_ONCE = frozenset(
    {"jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "shard_map"}
    | {"checkpoint", "remat", "remat2"}  # jax.checkpoint in different versions of JAX
)
"""Primitives that run the program that they hold once."""

_MESSAGES = frozenset({"send", "recv", "sendrecv"})
"""Primitives that are no collectives: ranks compare the two ends of a message alone."""


def with_sections(jaxpr: Any, is_counted: Callable[[Any], bool]) -> Any:
    """A whole program, each of whose collectives has its section in the parameter ``passed``.

    Args:
        jaxpr: the program, as it will be lowered.
        is_counted: whether the calls of these participants are to have sections.
    """
    if not _communicates(jaxpr, is_counted):
        return jaxpr
    opaque: set[int] = set()  # ids of programs that run in several sections
    while (found := _Sections(jaxpr, is_counted, opaque)).conflicts:
        opaque |= found.conflicts
    numbers = {place: _number(text) for place, text in enumerate(found.texts)}
    marks = {eqn: numbers[place] << 1 | begins for eqn, (place, begins) in found.places.items()}

    def marked(jaxpr: Any) -> Any:
        eqns = [_with_section(eqn, marks[id(eqn)]) if id(eqn) in marks else eqn for eqn in jaxpr.eqns]
        return jaxpr.replace(eqns=eqns) if any(id(eqn) in marks for eqn in jaxpr.eqns) else jaxpr

    return map_jaxprs(jaxpr, marked)


def _number(calls: list[str]) -> int:
    """A hash of 62 bits, not 0: with the bit that says whether a call begins the section, an attribute holds it."""
    digest = hashlib.blake2b("\n".join(calls).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2 | 1


def _with_section(eqn: JaxprEqn, section: int) -> JaxprEqn:
    return eqn.replace(params={**eqn.params, "passed": eqn.params["passed"]._replace(section=section)})


def _is_call(eqn: JaxprEqn, is_counted: Callable[[Any], bool]) -> bool:
    params = eqn.params
    is_ours = "passed" in params and "comm" in params and eqn.primitive.name not in _MESSAGES
    return is_ours and is_counted(params["comm"])


def _communicates(jaxpr: Any, is_counted: Callable[[Any], bool]) -> bool:
    return any(
        _is_call(eqn, is_counted) or any(_communicates(inner, is_counted) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


class _Sections:
    """The sections of a program.

    Attributes:
        texts: for each section a text for each call and loop.
        places: for each call, by the id of its equation, the number of its section, and whether the call begins it.
        conflicts: ids of programs whose calls would have several sections, since they run in several places.
    """

    def __init__(self, jaxpr: Any, is_counted: Callable[[Any], bool], opaque: set[int]) -> None:
        self._is_counted = is_counted
        self._opaque = opaque
        self._begins = False  # the next call: the first one of a run needs no mark
        self.texts: list[list[str]] = [[]]
        self.places: dict[int, tuple[int, bool]] = {}
        self.conflicts: set[int] = set()
        self._visit(jaxpr)

    def _visit(self, jaxpr: Any) -> None:
        for eqn in jaxpr.eqns:
            if _is_call(eqn, self._is_counted):
                place = len(self.texts) - 1, self._begins
                if self.places.setdefault(id(eqn), place) != place:
                    self.conflicts.add(id(jaxpr))
                self.texts[-1].append(_text(eqn))
                self._begins = False
                continue
            inner = [each for each in inner_jaxprs(eqn) if _communicates(each, self._is_counted)]
            if not inner:
                continue
            (program, *others) = inner
            is_loop = eqn.primitive.name == "scan"
            if others or not (is_loop or eqn.primitive.name in _RUN_ONCE) or id(program) in self._opaque:
                self._end()
            elif not is_loop:
                self._visit(program)
            elif self._depends_on_data(program):
                self._end()  # a trip may follow another one
                self._visit(program)
                self._end()
            else:
                self.texts[-1].append(f"{eqn.params['length']} times")
                self._visit(program)
                self.texts[-1].append("end")

    def _end(self) -> None:
        """Ends the section."""
        self.texts.append([])
        self._begins = True

    def _depends_on_data(self, jaxpr: Any) -> bool:
        """Whether a program makes calls that are in no section."""
        return any(
            eqn.primitive.name not in _RUN_ONCE | {"scan"} or id(inner) in self._opaque or self._depends_on_data(inner)
            for eqn in jaxpr.eqns
            for inner in inner_jaxprs(eqn)
            if _communicates(inner, self._is_counted)
        )


def _text(eqn: JaxprEqn) -> str:
    """All that decides what a call posts for the comparison, as far as this rank's program does."""
    params = {name: value for name, value in eqn.params.items() if name not in ("comm", "in_place")}
    types = [(var.aval.shape, str(var.aval.dtype)) for var in eqn.invars]
    line = source_info_util.summarize(eqn.source_info)
    return repr((eqn.primitive.name, eqn.params["comm"]._key, types, sorted(params.items()), line))
