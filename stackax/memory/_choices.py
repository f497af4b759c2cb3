"""Which policies are worth a closer look: of all subsets of a block's names, the few that no other
beats in both bytes kept and operations repeated.

A policy that keeps the values K of a layer has its backward pass compute again whatever the
derivatives read and K does not cut off. That is a walk over the layer's equations, which is made
once for all layers and for each subset; only the subsets on the front are traced as programs.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, Literal
from jax.extend.core.primitives import name_p

from .. import _jax
from .._loop.schedule import fewest_slots
from .._policy.policy import ScanCheckpointPolicy
from ._bytes import bytes_of
from ._cost import equation_flops
from ._program import Program
from ._walk import call_of, scan_of

# 2 ** 12 walks take about a second; a block with more names keeps the rest out of the search.
_MOST_NAMES = 12
# A choice that repeats hardly less than the one before it is not worth the bytes it keeps.
_WORTHWHILE = 0.98


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

    def keep(self, names: Sequence[str]) -> tuple[frozenset[str], int, float]:
        """What keeping `names` comes to.

        Returns:
            The names that have an effect, the bytes of all layers, and the operations repeated.
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
        size = sum(self.sizes[value] for value in kept)
        flops = sum(self.operations[operation].flops for operation in again)
        return frozenset(cut[value] for value in kept), self.length * size, self.length * flops


def layers_of(program: Program) -> list[Layer]:
    """The loops with named values in a program that was traced without remat."""
    layers = []
    for eqn in program.jaxpr.eqns:
        loop = scan_of(eqn)
        if loop is None or _jax.is_transposed(eqn):
            continue
        residuals = {x for x in program.residuals if not isinstance(x, Literal)}
        stacked = zip(eqn.outvars[loop.carries :], loop.body.outvars[loop.carries :], strict=True)
        needed = [inner for outer, inner in stacked if outer in residuals]
        layer = _Builder().build(loop.body, needed, loop.length)
        layers.append(layer)
    # Blocks in a Python loop stand in the program itself, beside what surrounds the stack.
    layers.append(_Builder().build(program.jaxpr, program.residuals, 1))
    return [layer for layer in layers if layer.named]


def names_to_keep(layers: list[Layer]) -> list[tuple[str, ...]]:
    """The subsets of names on the front of bytes and operations, the fewest bytes first."""
    names = list(dict.fromkeys(name for layer in layers for name in layer.named))
    names = [name for name in names if any(layer.keep([name])[0] for layer in layers)]
    if len(names) > _MOST_NAMES:
        names = sorted(names, key=lambda name: -_gain(layers, name))[:_MOST_NAMES]
    found: dict[frozenset[str], tuple[int, float]] = {}
    for count in range(len(names) + 1):
        for subset in itertools.combinations(names, count):
            kept = [layer.keep(subset) for layer in layers]
            effective = frozenset().union(*(each[0] for each in kept))
            found[effective] = sum(each[1] for each in kept), sum(each[2] for each in kept)
    front, least = [], float("inf")
    for subset, (_, flops) in sorted(found.items(), key=lambda item: item[1]):
        if flops < _WORTHWHILE * least or not front:
            front.append(tuple(name for name in names if name in subset))
            least = flops
    return front


def slots_to_try(length: int) -> list[int]:
    """Numbers of carries to keep: every third of an octave, and that of `nested=True`."""
    steps = {round(2 ** (third / 3)) for third in range(3 * length.bit_length() + 1)}
    usual = fewest_slots(length, evaluations_per_step=3) if length else 1
    return sorted(k for k in steps | {usual} if k < length)


def policies_to_try(
    layers: list[Layer], length: int, match_names: Any, offload: bool
) -> Iterator[ScanCheckpointPolicy]:
    """The policies that a plan chooses from.

    Args:
        layers: The loops, traced without remat.
        length: The number of layers of the longest stack.
        match_names: That of the policies.
        offload: Whether values may be kept in the host's memory.
    """
    yield ScanCheckpointPolicy(disable=True)
    subsets = names_to_keep(layers)
    carries = (True, "offload") if offload else (True,)
    for names, save_carries in itertools.product(subsets, carries):
        if not names:
            yield ScanCheckpointPolicy(simple=True, save_carries=save_carries)
            continue
        places = [(names, ()), ((), names)] if offload else [(names, ())]
        for saved, offloaded in places:
            yield ScanCheckpointPolicy(
                save_carries=save_carries,
                save_block_internals=saved or False,
                offload_block_internals=offloaded,
                match_names=match_names,
            )
    for slots, save_carries in itertools.product(slots_to_try(length), carries):
        yield ScanCheckpointPolicy(slots=slots, save_carries=save_carries)


def _gain(layers: list[Layer], name: str) -> float:
    """Operations that a name saves, for each byte that it keeps."""
    size = sum(layer.keep([name])[1] for layer in layers)
    saved = sum(layer.keep([])[2] - layer.keep([name])[2] for layer in layers)
    return saved / max(1, size)


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
