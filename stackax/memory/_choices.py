"""What there is to choose from: the subsets of the names in a block, and numbers of slots.

A policy that keeps the values K of a layer has its backward pass compute again whatever the
derivatives read and K does not cut off. That is a walk over the layer's equations, which is made
once for all layers and for each subset. What it can't tell is the working set of the backward
pass: for that a subset has to be traced (`_search`).
"""

import collections
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, Literal
from jax.extend.core.primitives import name_p

from .. import _jax
from .._loop.schedule import fewest_slots
from ._bytes import bytes_of
from ._cost import equation_flops
from ._program import Program
from ._walk import call_of, scan_of

# A block with more names keeps the rest out of the search, which would trace too many subsets.
_MOST_NAMES = 10


class Operation(NamedTuple):
    """An equation of a layer: what it reads and makes, as numbers of values, and its cost."""

    reads: tuple[int, ...]
    makes: tuple[int, ...]
    flops: float


class Layer(NamedTuple):
    """What a loop runs once a trip, without remat.

    Attributes:
        length: The number of trips.
        operations: In order.
        maker: For each value that an operation makes, which one.
        sizes: The bytes of each value.
        named: The values of each name.
        needed: The values that the backward pass reads.
    """

    length: int
    operations: list[Operation]
    maker: dict[int, int]
    sizes: dict[int, int]
    named: dict[str, list[int]]
    needed: list[int]

    def keep(self, names: Sequence[str]) -> tuple[dict[str, int], float]:
        """What keeping `names` comes to.

        Returns:
            The bytes in all layers of each name that has an effect, and the operations repeated.
        """
        cut = {value: name for name in names for value in self.named.get(name, ())}
        kept: set[int] = set()
        again: set[int] = set()
        pending = list(self.needed)
        while pending:
            value = pending.pop()
            if value in cut:
                kept.add(value)
            elif (operation := self.maker.get(value)) is not None and operation not in again:
                again.add(operation)
                pending += self.operations[operation].reads
        size_of: collections.Counter[str] = collections.Counter()
        for value in kept:
            size_of[cut[value]] += self.length * self.sizes[value]
        flops = sum(self.operations[operation].flops for operation in again)
        return dict(size_of), self.length * flops


class Subset(NamedTuple):
    """Names to keep, and what it comes to in all layers.

    Attributes:
        names: The names.
        bytes: The bytes kept of each.
        flops: The operations repeated.
    """

    names: tuple[str, ...]
    bytes: dict[str, int]
    flops: float


def layers_of(program: Program) -> list[Layer]:
    """The loops with named values in a program that was traced without remat."""
    residuals = {x for x in program.residuals if not isinstance(x, Literal)}
    layers = list(_loops(program.jaxpr, residuals, 1))
    # Blocks in a Python loop stand in the program itself, beside what surrounds the stack.
    layers.append(_Builder().build(program.jaxpr, program.residuals, 1))
    return [layer for layer in layers if layer.named]


def _loops(jaxpr: Jaxpr, residuals: Collection[Any], trips: int) -> Iterator[Layer]:
    """The loops of a jaxpr that runs so many times; those in calls, and in loops without names."""
    for eqn in jaxpr.eqns:
        if _jax.is_transposed(eqn):
            continue
        loop, called = scan_of(eqn), call_of(eqn)
        if loop is not None:
            stacked = list(zip(eqn.outvars, loop.body.outvars, strict=True))[loop.carries :]
            needed = [inner for outer, inner in stacked if outer in residuals]
            layer = _Builder().build(loop.body, needed, trips * loop.length)
            if layer.named:
                yield layer
            else:
                inner = {x for x in needed if not isinstance(x, Literal)}
                yield from _loops(loop.body, inner, trips * loop.length)
        elif called is not None:
            returned = zip(eqn.outvars, called.outvars, strict=True)
            inner = {x for outer, x in returned if outer in residuals}
            yield from _loops(called, {x for x in inner if not isinstance(x, Literal)}, trips)


def subsets_of(layers: list[Layer], names: Collection[str]) -> list[Subset]:
    """The subsets of the names of which each member saves operations; the empty one first."""
    in_order = list(dict.fromkeys(name for layer in layers for name in layer.named))
    every = [n for n in in_order if n in names and _keep(layers, [n])[0]]
    if len(every) > _MOST_NAMES:
        every = sorted(every, key=lambda name: -_gain(layers, every, name))[:_MOST_NAMES]
    found: dict[tuple[str, ...], Subset] = {}
    for count in range(len(every) + 1):
        for subset in itertools.combinations(every, count):
            found[subset] = Subset(subset, *_keep(layers, subset))

    def saves(subset: tuple[str, ...], at: int) -> bool:
        return found[subset].flops < found[subset[:at] + subset[at + 1 :]].flops

    return [found[s] for s in found if all(saves(s, at) for at in range(len(s)))]


def slots_to_try(length: int) -> list[int]:
    """Numbers of carries to keep: every third of an octave, and that of `nested=True`."""
    steps = {round(2 ** (third / 3)) for third in range(3 * length.bit_length() + 1)}
    usual = fewest_slots(length, evaluations_per_step=3) if length else 1
    return sorted(k for k in steps | {usual} if k < length)


def _keep(layers: list[Layer], names: Sequence[str]) -> tuple[dict[str, int], float]:
    """The bytes that keeping `names` comes to, of those that have an effect, and the operations."""
    kept: collections.Counter[str] = collections.Counter()
    flops = 0.0
    for layer in layers:
        size_of, again = layer.keep(names)
        kept.update(size_of)
        flops += again
    return dict(kept), flops


def _gain(layers: list[Layer], names: Sequence[str], name: str) -> float:
    """Operations that a name saves beside all others, for each byte that it keeps."""
    without = _keep(layers, [other for other in names if other != name])[1]
    size = sum(_keep(layers, [name])[0].values())
    return (without - _keep(layers, names)[1]) / max(1, size)


class _Builder:
    """Writes a loop's body as operations on numbered values, calls inlined."""

    def __init__(self) -> None:
        self.layer = Layer(0, [], {}, {}, {}, [])

    def build(self, body: Jaxpr, needed: list[Any], length: int) -> Layer:
        numbers = self._inline(body, [self._new(var) for var in body.invars])
        found = [numbers[var] for var in needed if not isinstance(var, Literal)]
        return self.layer._replace(length=length, needed=found)

    def _inline(self, jaxpr: Jaxpr, inputs: list[int]) -> dict[Any, int]:
        numbers = dict(zip(jaxpr.invars, inputs, strict=True))
        numbers |= {var: self._new(var) for var in jaxpr.constvars}
        for eqn in jaxpr.eqns:
            reads = [self._new(x) if isinstance(x, Literal) else numbers[x] for x in eqn.invars]
            called = call_of(eqn)
            if called is not None:
                inner = self._inline(called, reads)
                made = [
                    self._new(x) if isinstance(x, Literal) else inner[x] for x in called.outvars
                ]
            else:
                made = [self._new(var) for var in eqn.outvars]
                self.layer.maker.update(dict.fromkeys(made, len(self.layer.operations)))
                operation = Operation(tuple(reads), tuple(made), equation_flops(eqn))
                self.layer.operations.append(operation)
            if eqn.primitive is name_p:
                self.layer.named.setdefault(eqn.params["name"], []).extend(made)
            numbers.update(zip(eqn.outvars, made, strict=True))
        return numbers

    def _new(self, var: Any) -> int:
        number = len(self.layer.sizes)
        self.layer.sizes[number] = bytes_of(var.aval)
        return number
