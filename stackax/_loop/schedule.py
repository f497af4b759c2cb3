"""Which carry to keep, restore, advance and differentiate, and when. Pure Python.

A schedule is a tree of spans of steps. A span's carry-in is kept while it is worked on. Its
children partition it: the loop advances through them keeping each child's carry-in, then works on
the children from the last to the first. A span without children starts over from its own carry-in
for every step, because no slot is left to keep another.

`revolve` builds the tree with the fewest forward evaluations for a number of slots, `segmented` the
tree of equal segments; `compile_tree` flattens a tree into the tables that a loop follows.
"""

import functools as ft
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Span(NamedTuple):
    """Steps `start` to `stop - 1`, and how they are divided."""

    start: int
    stop: int
    children: tuple["Span", ...] = ()

    @property
    def steps(self) -> int:
        return self.stop - self.start


class Advance(NamedTuple):
    """Keep the current carry, that of step `start`, in `slot`; run steps `start` to `stop - 1`."""

    slot: int
    start: int
    stop: int


class Program(NamedTuple):
    """A tree of spans as tables of int32.

    Attributes:
        slots: How many carries are kept at once.
        forward: `(slots, 2)`; the forward pass keeps the carry in slot `i`, then runs the steps
            from `forward[i, 0]` up to `forward[i, 1]`.
        restore: `(steps, 2)`; the slot that the backward pass restores before it differentiates
            step `i`, and the step whose carry is in it.
        first, last: `(steps,)`; the rows of `advances` that it then runs.
        advances: `(rows, 3)`; rows of `Advance`.
    """

    slots: int
    forward: np.ndarray
    restore: np.ndarray
    first: np.ndarray
    last: np.ndarray
    advances: np.ndarray

    @property
    def evaluations(self) -> int:
        """Forward evaluations of a step: forward pass, advances, and one to differentiate each."""
        return 2 * len(self.restore) + self.advanced_steps

    @property
    def advanced_steps(self) -> int:
        """How many steps the backward pass runs to get from a kept carry to another."""
        return int((self.advances[:, 2] - self.advances[:, 1]).sum())

    @property
    def advanced_rows(self) -> int:
        """How many rows of `advances` the backward pass runs."""
        return int(self.last.max(initial=0))


def schedule_for(
    steps: int, *, nested: bool | int | tuple[int, ...], slots: int | None
) -> Span | None:
    """The tree that a policy's fields ask for, or None where every carry is kept.

    `nested=True` is the binomial schedule with the fewest slots that costs no more than nesting by
    the square root of the number of steps does: three evaluations a step.
    """
    if nested is True and steps > 0:
        slots = fewest_slots(steps, evaluations_per_step=3)
    if slots is not None:
        return revolve(steps, slots) if slots < steps else None
    if nested is False or steps == 0:
        return None
    counts = nested if isinstance(nested, tuple) else (nested,)
    return segmented(steps, counts) if counts[0] < steps else None


def revolve(steps: int, slots: int) -> Span:
    """The binomial schedule: the fewest evaluations that `slots` carries allow.

    References:
        Griewank and Walther (2000), algorithm 799. With s slots, one of which holds the span's own
        carry-in, at most C(s + r, s) steps can be reversed with r advances of each, so a split is
        optimal when it leaves to both sides no more than their share of that number.
    """
    return _revolve(0, steps, min(slots, steps), already_run=True)


def segmented(steps: int, counts: tuple[int, ...]) -> Span:
    """`counts[0]` equal segments, each of `counts[1]` segments, and so on; then single steps."""
    return _segmented(0, steps, counts)


def fewest_slots(steps: int, evaluations_per_step: int) -> int:
    """The fewest slots whose binomial schedule stays within `evaluations_per_step * steps`."""
    return next(
        slots
        for slots in range(1, steps + 1)
        if optimal_evaluations(steps, slots) <= evaluations_per_step * steps
    )


def optimal_evaluations(steps: int, slots: int) -> int:
    """The least number of forward evaluations with `slots` carries, the forward pass included.

    Each step is evaluated once in the forward pass and once to be differentiated; C(slots + r,
    r + 1) steps more are advanced through r times each, the cheapest first.
    """
    evaluations, left, repeats = 2 * steps, steps, 0
    while left > 0:
        share = min(left, math.comb(slots + repeats, repeats + 1))
        evaluations += repeats * share
        left -= share
        repeats += 1
    return evaluations


def _revolve(start: int, stop: int, slots: int, *, already_run: bool) -> Span:
    children: list[Span] = []
    at = start
    while slots > 1 and stop - at > 1:
        size = _first_child(stop - at, slots, already_run)
        children.append(_revolve(at, at + size, slots, already_run=False))
        at, slots = at + size, slots - 1
    return Span(start, stop, (*children, Span(at, stop)) if children else ())


def _first_child(steps: int, slots: int, already_run: bool) -> int:
    """How many steps go before the next kept carry."""
    repeats = 0
    while _capacity(slots, repeats, already_run) < steps:
        repeats += 1
    # The loop still has to run through the first child of a span that has not been run, so that
    # child can afford one advance less a step than the rest.
    own = repeats if already_run else repeats - 1
    at_least = _capacity(slots, own - 1, already_run=False)
    at_most_after = _capacity(slots - 1, repeats, already_run)
    return max(1, at_least, steps - at_most_after)


def _capacity(slots: int, repeats: int, already_run: bool) -> int:
    """How many steps can be reversed with at most `repeats` advances through each."""
    if repeats < 0:
        return 0
    if already_run:  # the sum of C(slots + r, r + 1) over r up to `repeats`
        return math.comb(slots + repeats + 1, repeats + 1) - 1
    return math.comb(slots + repeats, repeats)


def _segmented(start: int, stop: int, counts: tuple[int, ...]) -> Span:
    steps = stop - start
    if steps == 1:
        return Span(start, stop)
    pieces = min(counts[0], steps) if counts else steps
    bounds = [start + steps * i // pieces for i in range(pieces + 1)]
    children = (_segmented(a, b, counts[1:]) for a, b in itertools.pairwise(bounds))
    return Span(start, stop, tuple(children))


@ft.lru_cache(maxsize=256)
def compile_tree(root: Span) -> Program:
    """Flattens a tree into the tables that a loop follows."""
    children = root.children or (root,)
    forward = [Advance(i, child.start, child.stop) for i, child in enumerate(children)]
    steps = list(_reverse(children, slots=range(root.steps)))
    rows = [advance for step in steps for advance in step.advances]
    slots = 1 + max(advance.slot for advance in [*forward, *rows])
    # Slots that only the backward pass fills are made by the forward pass's idle last rows.
    table = [(advance.start, advance.stop) for advance in forward]
    table += [(root.stop, root.stop)] * (slots - len(table))
    last = np.cumsum([len(step.advances) for step in steps], dtype=np.int32)
    return Program(
        slots=slots,
        forward=np.asarray(table, np.int32),
        restore=np.asarray([step.restore for step in steps], np.int32)[::-1],
        first=np.asarray([0, *last[:-1]], np.int32)[::-1],
        last=last[::-1],
        advances=np.asarray(rows + [(0, 0, 0)] * max(0, 2 - len(rows)), np.int32),
    )


class _Step(NamedTuple):
    """What the backward pass does before it differentiates one step."""

    restore: tuple[int, int]
    advances: tuple[Advance, ...]


def _reverse(children: tuple[Span, ...], slots: Sequence[int]) -> Iterator[_Step]:
    """Steps from the last to the first, with each child's carry-in in the slot of its place."""
    for i, child in reversed(list(enumerate(children))):
        yield from _reverse_span(child, slots[i], slots[i + 1 :])


def _reverse_span(span: Span, base: int, free: Sequence[int]) -> Iterator[_Step]:
    """The same for a span of which only the carry-in is kept, in slot `base`."""
    if not span.children:
        for step in reversed(range(span.start, span.stop)):
            advance = Advance(base, span.start, step)
            yield _Step((base, span.start), (advance,) if step > span.start else ())
        return
    slots = [base, *free]
    run = zip(slots, span.children[:-1], strict=False)
    pending = tuple(Advance(slot, child.start, child.stop) for slot, child in run)
    for step in _reverse(span.children, slots):
        yield _Step((base, span.start), pending + step.advances) if pending else step
        pending = ()
