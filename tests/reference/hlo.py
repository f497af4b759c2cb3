"""Reading a compiled program: what runs how often, and what it depends on."""

import re
from collections.abc import Iterator
from typing import NamedTuple


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    opcode: str
    operands: tuple[str, ...]
    text: str


class Program:
    """The computations of a compiled program, from its text."""

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        for line in text.splitlines():
            if start := re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line):
                body = self.computations[start[2]] = {}
                if start[1]:
                    self.entry = start[2]
            elif found := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*)$", line):
                # A type, maybe a tuple of types with comments, then the opcode and its operands.
                rest = re.match(
                    r"(?:\([^()]*(?:\([^()]*\)[^()]*)*\)|\S+) ([\w\-]+)\((.*)", found[2]
                )
                operands = re.findall(r"%([\w.\-]+)", rest[2].split("), ")[0])
                body[found[1]] = Instruction(found[1], rest[1], tuple(operands), found[2])

    def runs(self, opcode: str, computation: str | None = None) -> int:
        """How often instructions of that opcode run."""
        total = 0
        for instruction in self.computations[computation or self.entry].values():
            times = 1
            if instruction.opcode == "while":
                times = int(re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.text)[1])
            total += instruction.opcode in (opcode, f"{opcode}-start")
            total += sum(times * self.runs(opcode, each) for each in self._called(instruction))
        return total

    def loop_bodies(self) -> list[dict[str, Instruction]]:
        """The bodies of all loops."""
        every = (i for body in self.computations.values() for i in body.values())
        names = [re.search(r"body=%?([\w.\-]+)", i.text)[1] for i in every if i.opcode == "while"]
        return [self.computations[name] for name in names]

    def behind(self, body: dict[str, Instruction], name: str) -> Iterator[Instruction]:
        """All that an instruction depends on within its computation, fusions opened."""
        seen, left = set(), list(body[name].operands)
        while left:
            name = left.pop()
            if name in seen or name not in body:
                continue
            seen.add(name)
            yield body[name]
            for called in self._called(body[name]):
                yield from self.computations[called].values()
            left += body[name].operands

    def _called(self, instruction: Instruction) -> list[str]:
        names = re.findall(r"(?:body|calls|to_apply)=%?([\w.\-]+)", instruction.text)
        return [name for name in names if name in self.computations]
