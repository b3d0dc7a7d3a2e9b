"""What must hold for each program that XLA has compiled for a GPU, and a program in a few letters."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pycollective.jax_support.program_text import Instruction, Program, attribute, numbers
from tests.compiled_for_gpu.compiler import Compiled

_HANDLER = "pycollective_device_"

_OF_CALLS = {"allreduce": "A", "allreduce_start": "S", "allreduce_done": "D"}
_OF_XLA = {"all-reduce": "L", "reduce-scatter": "R", "all-gather": "G"}

_MOVES_NOTHING = {"after-all", "bitcast", "constant", "get-tuple-element", "parameter", "tuple"}


def call_name(instruction: Instruction) -> str:
    """The handler that an instruction calls, without the prefix of all; "" if it calls none of ours."""
    target = attribute(instruction, "custom_call_target").strip('"')
    return target.removeprefix(_HANDLER) if target.startswith(_HANDLER) else ""


def order(program: Program, computation: str | None = None) -> str:
    """Our calls in the order in which they run: those of a loop in round brackets, those of branches in square ones."""
    found = []
    for one in program.computations[computation or program.entry]:
        if call := call_name(one):
            found.append(call)
        elif any(inside := [order(program, name) for name in _inner(one)]):
            found.append(f"({'; '.join(filter(None, inside))})" if one.opcode == "while" else f"[{' | '.join(inside)}]")
    return " ".join(found)


def letters(program: Program, elements: int, computation: str | None = None) -> str:
    """What runs, but for small work, in letters and with the brackets of :func:`order`.

    A, S and D are a sum between ranks, its start and its end; c is another call of ours; L, R and G are XLA's own
    all-reduce, reduce-scatter and all-gather, between the GPUs of a rank; m is a matrix product; C copies an array with
    at least so many elements. The condition of a loop is left out.
    """
    found = []
    for one in program.computations[computation or program.entry]:
        if call := call_name(one):
            found.append(_OF_CALLS.get(call, "c"))
        elif one.opcode in ("while", "conditional"):
            inside = [letters(program, elements, name) for name in _inner(one)]
            found.append(f"({inside[1]})" if one.opcode == "while" else f"[{'|'.join(inside)}]")
        else:
            work = _work(program, one)
            found += [_OF_XLA[part.collective] for part in work if part.collective in _OF_XLA]
            if any(part.opcode == "dot" or "cublas" in attribute(part, "custom_call_target") for part in work):
                found.append("m")
            elif {part.opcode for part in work} <= {"copy", "copy-start"} and one.results[0].elements >= elements:
                found.append("C")
    return "".join(found)


def _work(program: Program, one: Instruction) -> list[Instruction]:
    """What an instruction does: what is fused in it, or itself."""
    if one.opcode not in ("fusion", "fusion-start"):
        return [one]
    return [part for name in one.called for part in program.computations[name] if part.opcode not in _MOVES_NOTHING]


def check(compiled: Compiled, calls: str) -> None:
    """Checks that a program makes these calls, in the form of :func:`order`, and that all holds which must always."""
    assert order(compiled.program) == calls
    check_tokens(compiled.program)
    check_halves(compiled.program)
    check_recorded(compiled)
    check_early_kernels(compiled)


def check_tokens(program: Program) -> None:
    """Each call takes the token of the call that stands before it, also across the ends of loops and branches."""
    for name, body in program.computations.items():
        named = {one.name: one for one in body}
        last: str | None = None
        for one in body:
            if not _keeps_order(program, one):
                continue
            taken = {origin for operand in one.operands for origin in _origins(named, operand, tokens=True)}
            if last is None:
                first = "after-all" if name == program.entry else "parameter"
                assert {named[origin].opcode for origin in taken} == {first}, f"{name}: {one.name} takes {taken}"
            else:
                assert taken == {last}, f"{name}: {one.name} takes the token of {taken}, and stands behind {last}"
            last = one.name
        if last is not None and name != program.entry:
            (root,) = (one for one in body if one.is_root)
            if tokens := {*_origins(named, root.name, tokens=True)}:  # the condition of a loop has none
                assert tokens == {last}, f"{name} returns the token of {tokens}, and ends with {last}"


def _keeps_order(program: Program, one: Instruction) -> bool:
    """Whether an instruction is one of our calls, or a loop or a conditional with some, but for the ends of sums."""
    if call := call_name(one):
        return call != "allreduce_done"
    return one.opcode in ("while", "conditional", "call") and any(
        _keeps_order(program, part) for inner in one.called for part in program.computations[inner]
    )


def _origins(
    named: dict[str, Instruction], name: str, place: int | None = None, *, tokens: bool = False
) -> Iterator[str]:
    """The names of the instructions that have made the arrays in a value, or its tokens.

    Args:
        named: the instructions of the computation.
        name: of the instruction whose result the value is.
        place: the element of the result that it is; None for the whole.
        tokens: whether the tokens are asked for, and not the arrays.
    """
    one = named[name]
    if one.opcode in ("get-tuple-element", "bitcast"):
        if any((shape.dtype == "token") is tokens for shape in one.results):
            inside = numbers(attribute(one, "index"))[0] if one.opcode == "get-tuple-element" else place
            yield from _origins(named, one.operands[0], inside, tokens=tokens)
    elif one.opcode == "tuple":
        for operand in one.operands if place is None else one.operands[place : place + 1]:
            yield from _origins(named, operand, tokens=tokens)
    elif any((shape.dtype == "token") is tokens for shape in one.results):
        yield name


def check_halves(program: Program) -> None:
    """The results of the start of a sum stay where they are until its end, and nothing else reads them."""
    for body in program.computations.values():
        named = {one.name: one for one in body}
        starts = {one.name for one in body if call_name(one) == "allreduce_start"}
        for one in body:
            if call_name(one) in ("allreduce_start", "allreduce_done"):
                arrays = [name for name in one.operands if named[name].results[0].dtype != "token"]
                assert _in_place(one) == len(arrays), f"{one.name} has results in buffers of their own"
            if call_name(one) == "allreduce_done":
                assert {origin for name in one.operands for origin in _origins(named, name)} <= starts, one
            elif one.opcode not in _MOVES_NOTHING:
                read = {origin for name in one.operands for origin in _origins(named, name)} & starts
                assert not read, f"{one.name} reads the array of {read}, whose end comes later"


def _in_place(call: Instruction) -> int:
    """The number of results of a call that take the buffers of operands."""
    found = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", call.attributes)
    return found[1].count("(") if found else 0


def check_recorded(compiled: Compiled) -> None:
    """No call of ours stands in a command buffer, where its handler would run once, when the graph is recorded."""
    named = {one.name: call_name(one) for body in compiled.program.computations.values() for one in body}
    ours = {name for name, call in named.items() if call}
    found = {thunk.name: thunk for thunk in compiled.thunks if thunk.name in ours}
    assert found.keys() == ours
    assert all(thunk.kind == "kCustomCall" and not thunk.is_recorded for thunk in found.values()), found


def check_early_kernels(compiled: Compiled) -> None:
    """No kernel right before a call of ours lets what follows begin before it ends (programmatic dependent launch).

    XLA marks such kernels since JAX 0.11. The compiler of JAX 0.10 has no mark, but it writes the code of the kernels.
    """
    assert "griddepcontrol.launch_dependents" not in compiled.code

    def through(name: str, before: list[Instruction]) -> list[Instruction]:
        """Goes through a computation. Takes and returns what may have run last."""
        for one in compiled.program.computations[name]:
            if call_name(one):
                early = [kernel.name for kernel in before if 'xla.pdl_launch="true"' in kernel.attributes]
                assert not early, f"{one.name} stands behind {early}, which lets it begin early"
            if one.opcode == "while":
                for inner in 2 * _inner(one):  # what ends a trip stands before the next one
                    before = through(inner, before)
            elif one.opcode == "conditional":
                before = [last for inner in _inner(one) for last in through(inner, before)]
            elif one.opcode not in _MOVES_NOTHING:
                before = [one]
        return before

    through(compiled.program.entry, [])


def _inner(one: Instruction) -> list[str]:
    """The condition and the body of a loop, or the branches of a conditional; none of another instruction."""
    if one.opcode == "while":
        return [attribute(one, name).lstrip("%") for name in ("condition", "body")]
    return list(one.called) if one.opcode == "conditional" else []
