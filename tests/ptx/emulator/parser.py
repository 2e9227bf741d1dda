"""Parses the PTX of one kernel into instructions, labels, registers, parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

_COMMENTS = re.compile(r"//[^\n]*|^\s*\.(?:loc|file|pragma)[^\n]*", re.M)
_STATEMENTS = re.compile(r"\s*(?:[{}](?=\s)|[\w$]+:(?!:)|[^;]+;)")
_BRACKET = re.compile(r"[{[(]")
_SEPARATOR = re.compile(r"\s*,\s*")
_LABEL = re.compile(r"[\w$]+:")
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w$@]+)\s+)?([\w.:]+)\s*(.*)", re.S)


@dataclass
class Instruction:
    """One instruction."""

    # the whole, such as `ld.global.v4.b32`
    name: str
    # a vector is a tuple
    operands: list[Any]
    predicate: str | None = None
    negated: bool = False
    text: str = ""
    # of the name; the first one is the opcode
    words: list[str] = field(init=False)
    opcode: str = field(init=False)

    def __post_init__(self):
        self.words = _words(self.name)
        self.opcode = self.words[0]

    def has(self, *words: str) -> bool:
        """Whether the name has one of these words."""
        return any(word in self.words for word in words)


@cache
def _words(name: str) -> list[str]:
    return name.split(".")


@dataclass
class Program:
    """One kernel."""

    name: str = ""
    instructions: list[Instruction] = field(default_factory=list)
    # by name, the number of the instruction that follows
    labels: dict[str, int] = field(default_factory=dict)
    # by name, type and count, 0 for a single register
    registers: dict[str, tuple[str, int]] = field(default_factory=dict)
    # names in order
    params: list[str] = field(default_factory=list)
    # the name of the array in shared memory, if there is one
    shared: list[str] = field(default_factory=list)
    # machine.Unit, with these instructions bound, by the kind of launch
    units: dict[Any, Any] = field(default_factory=dict)


def parse(text: str) -> Program:
    """Parse the only kernel of a module."""
    text = _COMMENTS.sub("", text)
    program = Program(shared=re.findall(r"\.shared [^;]*\.b8 ([\w$]+)\[\d*\]", text))
    # each would start at address 0
    assert len(program.shared) <= 1, "several arrays in shared memory"
    head, rest = text[text.index(".entry") :].split("{", 1)
    program.name = head.split("(")[0].split()[1]
    program.params = re.findall(r"\.param [^,]*?([\w$]+)(?:\[\d+\])?\s*[,)\n]", head)
    depth, scope, scopes = 0, {}, 0
    for statement in _STATEMENTS.findall(rest[: _end_of_body(rest)]):
        statement = statement.strip()
        if statement in ("{", "}"):
            # a block of inline assembly has registers and labels of its own
            depth += 1 if statement == "{" else -1
            scopes += statement == "{"
            scope = {} if not depth else scope
            continue
        _parse_statement(program, statement.rstrip(";").strip(), depth, scope, scopes)
    return program


def _end_of_body(text: str) -> int:
    depth = 1
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return brace.start()
    raise ValueError("a kernel without an end")


def _parse_statement(
    program: Program, line: str, depth: int, scope: dict[str, str], scopes: int
) -> None:
    if line.startswith(".reg"):
        for name, register in _registers_of(line):
            scoped = f"{name}@{scopes}" if depth else name
            if depth:
                scope[name] = scoped
            program.registers[scoped] = register
    elif _LABEL.fullmatch(line):
        name = line[:-1]
        if depth:
            scope[name] = f"{name}@{scopes}"
        program.labels[scope.get(name, name)] = len(program.instructions)
    elif line and not line.startswith("."):
        for name, scoped in scope.items():
            line = re.sub(rf"(?<![\w%$]){re.escape(name)}(?![\w$])", scoped, line)
        program.instructions.append(parse_instruction(line))


def _registers_of(line: str) -> list[tuple[str, tuple[str, int]]]:
    registers = []
    for kind, names in re.findall(r"\.reg\s+\.(\w+)\s+(.*)", line):
        for name in names.split(","):
            match = re.fullmatch(r"\s*(%?[\w$]+)(?:<(\d+)>)?\s*", name)
            assert match, line
            registers.append((match[1], (kind, int(match[2] or 0))))
    return registers


def parse_instruction(line: str) -> Instruction:
    """Parse one instruction, without its semicolon."""
    match = _INSTRUCTION.match(line)
    assert match, line
    negated, predicate, name, operands = match.groups()
    parts = [_operand(part) for part in _split(operands)]
    return Instruction(_plain(name), parts, predicate, bool(negated), line)


@cache
def _plain(name: str) -> str:
    """Return a name without colons: `.shared` alone means `.shared::cta`."""
    return name.replace("shared::cta", "shared").replace("::", "_")


def _split(text: str) -> list[str]:
    """Split operands at the commas outside of brackets."""
    if not _BRACKET.search(text):
        return _SEPARATOR.split(text.strip()) if text else []
    parts, depth, start = [], 0, 0
    for index, char in enumerate(text):
        depth += char in "{[("
        depth -= char in "}])"
        if char == "," and not depth:
            parts.append(text[start:index].strip())
            start = index + 1
    rest = text[start:].strip()
    return [*parts, rest] if rest else parts


def _operand(text: str) -> Any:
    if text.startswith("{"):
        return tuple(_operand(part) for part in _split(text[1:-1]))
    return text
