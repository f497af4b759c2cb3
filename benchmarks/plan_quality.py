"""Whether plans under a budget fit, and how near they come to the least recomputation possible.

Three stacks (a transformer block, a gated MLP with four names, a tower with eight), 20 budgets
each, from the least peak that any choice reaches to that of no remat. The best is found by trying
every subset of the names and every number of slots against the compiler's own figures.

budgets                how many were planned for, in all
fit                    the share of verified plans whose compiled peak is within the budget
monotonic              whether the predicted peak never falls when the budget rises
worst_flops_over_best  the largest recomputation over the least of what fits
seconds_8_names        one plan, unverified, for the tower
"""

import itertools
import time
from types import SimpleNamespace
from unittest import mock

import jax
import named_blocks
import numpy as np
from report import run

from stackax import ScanCheckpointPolicy
from stackax._policy.names import names_unchecked
from stackax.memory import Plan, _plan, explain, plan
from stackax.memory._bytes import bytes_of
from stackax.memory._choices import slots_to_try
from stackax.memory._cost import step_cost
from stackax.memory._measure import compiled_bytes
from stackax.memory._program import as_call, as_step, trace

BUDGETS = 20
# Passes of XLA decide the bytes, and LLVM decides most of the time.
COMPILER_OPTIONS = {"xla_backend_optimization_level": 0}


class Choice:
    """A policy, its recomputation, and bounds of its peak.

    Attributes:
        recomputed_flops: From the trace.
        floor_bytes: What the compiled peak can't be below: what is kept is alive all at once.
    """

    def __init__(self, policy: ScanCheckpointPolicy, problem: named_blocks.Problem) -> None:
        call = as_call(problem.loss, problem[1:], "plan_quality").with_remat(policy)
        program = trace(call, 0, "plan_quality")
        given = set(program.jaxpr.invars)
        kept = {x for x in program.residuals if x not in given}
        self.policy = policy
        self.recomputed_flops = step_cost(program).recomputed_flops
        returned = program.step.jaxpr
        self.floor_bytes = sum(bytes_of(x.aval) for x in (*kept, *given, *returned.outvars))


class Enumeration:
    """Every choice there is for a stack, the least recomputation first."""

    def __init__(self, problem: named_blocks.Problem) -> None:
        self.problem = problem
        self._statistics: dict[ScanCheckpointPolicy, SimpleNamespace] = {}
        with names_unchecked():
            policies = list(self._policies())
            choices = [Choice(policy, problem) for policy in policies]
        self.choices = sorted(choices, key=lambda c: (c.recomputed_flops, c.floor_bytes))

    def _policies(self):
        yield ScanCheckpointPolicy(disable=True)
        yield ScanCheckpointPolicy(simple=True)
        names = self._names()
        for count in range(1, len(names) + 1):
            for subset in itertools.combinations(names, count):
                yield ScanCheckpointPolicy(save_block_internals=subset)
        for slots in slots_to_try(self.problem.stack.Block.size):
            yield ScanCheckpointPolicy(slots=slots)

    def _names(self) -> list[str]:
        """The names that, asked for alone, are kept."""

        def kept(name: str) -> bool:
            policy = ScanCheckpointPolicy(save_block_internals=[name])
            report = explain(*self.problem, argnums=0, remat=policy)
            # Of a carry, every policy keeps the value anyway.
            return any(r.name == name and r.kind == "computed" for r in report.residuals)

        return [n for n in sorted(explain(*self.problem, argnums=0).names) if kept(n)]

    def compile_step(self, call, argnums, caller) -> SimpleNamespace:
        """Stands in for the plan's own: each policy is compiled once."""
        policy = call.stacks[0].gradient_checkpointing
        if policy not in self._statistics:
            step = as_step(call, argnums, caller)
            lowered = jax.jit(step.value_and_gradients).lower(*step.shapes)
            analysis = lowered.compile(COMPILER_OPTIONS).memory_analysis()
            self._statistics[policy] = SimpleNamespace(memory_analysis=lambda: analysis)
        return self._statistics[policy]

    def peak_bytes(self, choice: Choice) -> int:
        """The compiler's figure: arguments, outputs and temporary memory."""
        call = as_call(self.problem.loss, self.problem[1:], "plan").with_remat(choice.policy)
        figures = compiled_bytes(self.compile_step(call, 0, "plan"))
        peak = sum(figures[f"{part}_bytes"] for part in ("argument", "output", "temp"))
        assert peak >= choice.floor_bytes, (choice.policy, peak, choice.floor_bytes)
        return peak

    def least_bytes(self) -> int:
        """The least peak that any choice has."""
        least = self.peak_bytes(min(self.choices, key=lambda c: c.floor_bytes))
        for choice in sorted(self.choices, key=lambda c: c.floor_bytes):
            if choice.floor_bytes < least:
                least = min(least, self.peak_bytes(choice))
        return least

    def best_flops(self, budget: int) -> float:
        """The least recomputation of what fits."""
        possible = (c for c in self.choices if c.floor_bytes <= budget)
        return next(c.recomputed_flops for c in possible if self.peak_bytes(c) <= budget)

    def plans(self, budgets: list[int]) -> list[Plan]:
        """Verified plans; what they trace and compile is shared between them."""
        search = _plan.Search(as_call(self.problem.loss, self.problem[1:], "plan"), 0, None)
        with (
            mock.patch.object(_plan, "Search", lambda *_: search),
            mock.patch.object(_plan, "compile_step", self.compile_step),
        ):
            return [plan(*self.problem, argnums=0, budget_bytes=b, verify=True) for b in budgets]


def measure() -> dict[str, object]:
    """All figures."""
    found = [of_stack(make()) for make in (named_blocks.mlp, named_blocks.transformer)]
    found.append(of_stack(named_blocks.tower()))
    return {
        "budgets": sum(each["budgets"] for each in found),
        "fit": sum(each["fit"] for each in found) / len(found),
        "monotonic": all(each["monotonic"] for each in found),
        "worst_flops_over_best": max(each["worst"] for each in found),
        "seconds_8_names": seconds(named_blocks.tower()),
    }


def of_stack(problem: named_blocks.Problem) -> dict[str, float]:
    """The figures of one stack."""
    all_choices = Enumeration(problem)
    most = all_choices.peak_bytes(all_choices.choices[0])
    budgets = [int(b) for b in np.geomspace(all_choices.least_bytes(), most, BUDGETS).round()]
    plans = all_choices.plans(budgets)
    peaks = [found.chosen.peak_bytes for found in plans]
    return {
        "budgets": len(plans),
        "fit": sum(found.fits for found in plans) / len(plans),
        "monotonic": peaks == sorted(peaks),
        "worst": max(
            _over(found.chosen.recomputed_flops, all_choices.best_flops(found.budget_bytes))
            for found in plans
        ),
    }


def _over(flops: float, best: float) -> float:
    return 1.0 if flops == best else flops / best if best else float("inf")


def seconds(problem: named_blocks.Problem) -> float:
    """The time of one plan."""
    start = time.perf_counter()
    plan(*problem, argnums=0, budget_bytes="16MiB")
    return time.perf_counter() - start


if __name__ == "__main__":
    run(__doc__, measure)
