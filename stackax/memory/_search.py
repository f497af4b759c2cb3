"""The search of a plan: which of the choices are traced, and which are tried for a budget.

There are up to thousands of subsets of the names in a block, and a trace takes a part of a second.
What a subset keeps and repeats is known of all (`_choices`); its working set is learned by tracing
some, and guessed of the others from the nearest that was traced. Whatever then seems to be on the
front is traced, until all that seems to be there was; and, for a budget, what seems to be near it.
"""

import dataclasses
import itertools
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax.extend.core import Literal as Constant

from .. import _jax
from .._loop.schedule import optimal_evaluations
from .._policy.names import names_found, names_unchecked
from .._policy.policy import ScanCheckpointPolicy
from ._bytes import bytes_of
from ._choices import Subset, layers_of, slots_to_try, subsets_of
from ._cost import forward_cost, step_cost
from ._guess import Guesses
from ._peak import estimate_peak
from ._program import Call, Program, trace

# Estimates of two policies are off by some 2 % from each other, and guesses of them by more.
_NEAR = 1.02
_PERHAPS_NEAR = 1.05


class Point(NamedTuple):
    """A policy, and what a step under it is estimated to need.

    Attributes:
        policy: The policy.
        peak_bytes: Arguments, outputs and temporary memory.
        temp_bytes: Temporary memory.
        low_bytes, high_bytes: The band in which the compiler's `temp_bytes` is expected.
        offloaded_bytes: What is kept in the host's memory instead.
        recomputed_flops: Operations that the backward pass repeats.
        forward_evaluations: How often the forward pass's operations run, 1 without recomputation.
    """

    policy: ScanCheckpointPolicy
    peak_bytes: int
    temp_bytes: int
    low_bytes: int
    high_bytes: int
    offloaded_bytes: int
    recomputed_flops: float
    forward_evaluations: float


class Search:
    """The choices of a plan, each traced once.

    Attributes:
        front: The choices that no other beats in peak, recomputation and bytes moved to the host,
            the least peak first.
    """

    def __init__(
        self, call: Call, argnums: int | Sequence[int] | None, offload: bool | None
    ) -> None:
        """Traces what seems to be on the front.

        Args:
            call: What is planned for; it has a stack.
            argnums: Which arguments are differentiated.
            offload: Whether values may be kept in the host's memory; None means where that is
                another than the device's.
        """
        self._call, self._argnums = call, argnums
        self._match_names: Literal["all", "any"] = "all" if len(call.stacks) == 1 else "any"
        self._length = max(stack.Block.size for stack in call.stacks)
        self._may_offload = jax.default_backend() != "cpu" if offload is None else offload
        self._traced: dict[ScanCheckpointPolicy, Point] = {}
        self._subsets = self._allowed_subsets()
        self._guesses = Guesses(self._subsets)
        kept = self._explore()
        self._others = [self._trace(ScanCheckpointPolicy(disable=True)), *self._with_slots()]
        if self._may_offload:
            self._others += [self._offloading(point) for point in pareto_front(kept)]
        self.front = pareto_front([*kept, *self._others])

    @property
    def considered(self) -> int:
        """How many choices were traced, or read off two that were."""
        return len({*self._traced, *(point.policy for point in self._others)})

    def best(self, budget: int) -> Point | None:
        """What repeats least, and then moves least to the host, of what fits."""
        fitting = (point for point in self.near(budget) if point.peak_bytes <= budget)
        return next(fitting, None)

    def near(self, budget: int) -> Iterator[Point]:
        """Yields whatever may fit, on the front or not, in the order of what it repeats."""
        entries: list[tuple[tuple[float, int, int], Point | Subset]] = [
            (_work(point), point) for point in self._others
        ]
        for subset, guess in zip(self._subsets, self._guesses.peaks(), strict=True):
            if guess <= _PERHAPS_NEAR * budget:
                entries.append(((subset.flops, 0, guess), subset))
        for _, entry in sorted(entries, key=lambda entry: entry[0]):
            point = self._keeping(entry) if isinstance(entry, Subset) else entry
            if point.peak_bytes <= _NEAR * budget:
                yield from self._partly_offloading(point, budget)
                yield point

    def _allowed_subsets(self) -> list[Subset]:
        """The subsets of names that the stacks accept."""
        plain = trace(self._call.with_remat("none"), self._argnums, "plan")
        layers = layers_of(plain)
        names = {name for layer in layers for name in layer.named}
        with names_found() as found:
            # A name that is new makes a program that is new, which no cache has.
            policy = ScanCheckpointPolicy(save_block_internals=[*names, secrets.token_hex()])
            trace(self._call.with_remat(policy), self._argnums, "plan")
        names &= frozenset().union(*found)

        def is_accepted(subset: Subset) -> bool:
            mine = set(subset.names)
            if self._match_names == "all":
                return all(mine <= each for each in found)
            return not mine or all(mine & each for each in found)

        return [subset for subset in subsets_of(layers, names) if is_accepted(subset)]

    def _explore(self) -> list[Point]:
        """Traces subsets until all that seem to be on their front were."""
        while todo := self._guesses.to_learn():
            for at in todo:
                self._guesses.learn(at, self._keeping(self._subsets[at]).peak_bytes)
        return [self._keeping(self._subsets[at]) for at in self._guesses.learned]

    def _keeping(self, subset: Subset) -> Point:
        return self._trace(self._policy(subset.names))

    def _policy(
        self, saved: tuple[str, ...], offloaded: tuple[str, ...] = (), moves_carries: bool = False
    ) -> ScanCheckpointPolicy:
        save_carries = "offload" if moves_carries else True
        if not saved and not offloaded:
            return ScanCheckpointPolicy(simple=True, save_carries=save_carries)
        return ScanCheckpointPolicy(
            save_carries=save_carries,
            save_block_internals=saved or False,
            offload_block_internals=offloaded,
            match_names=self._match_names,
        )

    def _offloading(self, point: Point) -> Point:
        """The same values, all in the host's memory."""
        return self._trace(self._policy((), point.policy.saved_names, moves_carries=True))

    def _partly_offloading(self, point: Point, budget: int) -> Iterator[Point]:
        """Yields choices with a part of what `point` offloads on the device, if they fit, in the
        order of what is still moved."""
        names = point.policy.offloaded_names
        if not point.offloaded_bytes or point.policy.slots:
            return
        on_device = self._trace(self._policy(names))
        price = (on_device.peak_bytes - point.peak_bytes) / point.offloaded_bytes
        for moved, size in self._moves(names, point.offloaded_bytes):
            if on_device.peak_bytes - price * size <= _NEAR * budget:
                saved = tuple(name for name in names if name not in moved)
                rest = tuple(name for name in names if name in moved)
                part = self._trace(self._policy(saved, rest, _CARRIES in moved))
                if part.peak_bytes <= budget:
                    yield part

    def _moves(self, names: tuple[str, ...], all_bytes: int) -> list[tuple[set[str], int]]:
        """What may be moved, names and carries, but for all and nothing; the least bytes first."""
        subset = next(subset for subset in self._subsets if set(subset.names) == set(names))
        sizes = {**subset.bytes, _CARRIES: all_bytes - sum(subset.bytes.values())}
        moves = [
            (set(moved), sum(sizes[item] for item in moved))
            for count in range(1, len(sizes))
            for moved in itertools.combinations(sizes, count)
        ]
        return sorted(moves, key=lambda move: move[1])

    def _with_slots(self) -> Iterator[Point]:
        places = (True, "offload") if self._may_offload else (True,)
        for slots, save_carries in itertools.product(slots_to_try(self._length), places):
            yield self._of_slots(ScanCheckpointPolicy(slots=slots, save_carries=save_carries))

    def _of_slots(self, policy: ScanCheckpointPolicy) -> Point:
        """Of slots from 2 on, two points give all others.

        A slot more is one carry more, and the operations repeated are those of a layer for each
        step that the schedule advances: both are laws of the loop (`tests/laws/`).
        """
        slots, most = policy.slots, self._length - 1
        assert slots is not None
        is_law = all(stack.Block.size == self._length for stack in self._call.stacks)
        if not is_law or not 2 < slots < most:
            return self._trace(policy)
        few, many = (self._trace(dataclasses.replace(policy, slots=k)) for k in (2, most))
        of_slots = (slots - 2) / (most - 2)
        steps = [optimal_evaluations(self._length, k) for k in (2, slots, most)]
        of_steps = (steps[0] - steps[1]) / (steps[0] - steps[2])
        numbers = {
            name: _between(few, many, name, of_steps if name in _REPEATED else of_slots)
            for name in Point._fields[1:]
        }
        return Point(policy, **numbers)

    def _trace(self, policy: ScanCheckpointPolicy) -> Point:
        if policy not in self._traced:
            with names_unchecked():  # they were just read
                self._traced[policy] = _point(policy, self._call, self._argnums)
        return self._traced[policy]


_CARRIES = ""  # the name of no value
_REPEATED = ("recomputed_flops", "forward_evaluations")


def pareto_front(points: Sequence[Point]) -> list[Point]:
    """The points that no other beats in peak, recomputation and bytes on the host."""
    front: list[Point] = []
    for point in sorted(points, key=lambda point: (point.peak_bytes, *_work(point))):
        beaten = any(
            other.recomputed_flops <= point.recomputed_flops
            and other.offloaded_bytes <= point.offloaded_bytes
            for other in front
        )
        if not beaten:
            front.append(point)
    return front


def _work(point: Point) -> tuple[float, int, int]:
    """What a choice costs in time, operations before copies; of two alike, the least peak."""
    return point.recomputed_flops, point.offloaded_bytes, point.peak_bytes


def _between(few: Point, many: Point, name: str, share: float) -> Any:
    a, b = getattr(few, name), getattr(many, name)
    return type(a)(round(a + share * (b - a)) if isinstance(a, int) else a + share * (b - a))


def _point(policy: ScanCheckpointPolicy, call: Call, argnums: int | Sequence[int] | None) -> Point:
    program = trace(call.with_remat(policy), argnums, "plan")
    peak, again = estimate_peak(program.step), step_cost(program).recomputed_flops
    forward = forward_cost(program).flops
    return Point(
        policy=policy,
        peak_bytes=peak.argument_bytes + peak.output_bytes + peak.temp_bytes,
        temp_bytes=peak.temp_bytes,
        low_bytes=peak.low_bytes,
        high_bytes=peak.high_bytes,
        offloaded_bytes=_offloaded_bytes(program),
        recomputed_flops=again,
        forward_evaluations=1 + again / forward if forward else 1.0,
    )


def _offloaded_bytes(program: Program) -> int:
    given = set(program.jaxpr.invars)
    kept = {x for x in program.residuals if not isinstance(x, Constant) and x not in given}
    return sum(bytes_of(x.aval) for x in kept if _jax.is_on_host(x.aval))
