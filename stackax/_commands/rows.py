"""Policies beside each other, for the same step: what is estimated, compiled and measured."""

import functools as ft
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from ..memory import Report, explain
from ..memory._measure import compiled_bytes
from .sizes import loss

ROUNDS = 5


class Row(NamedTuple):
    """A policy, and what a step under it needs and costs.

    Attributes:
        policy: What was typed.
        kept_bytes: What the backward pass keeps on the device beside the arguments.
        offloaded_bytes: What it keeps in the host's memory.
        estimated_temp_bytes: Temporary memory, from the trace.
        compiled_temp_bytes: The compiler's figure.
        forward_evaluations: How often the forward pass's operations run.
        flops: Operations of the step.
        recomputed_flops: Operations that the backward pass repeats.
        compile_seconds: Time to trace and compile.
        seconds: Median time of a step; None where it was not run.
        relative_time: `seconds` over those of the policy that is compared with.
    """

    policy: str
    kept_bytes: int
    offloaded_bytes: int
    estimated_temp_bytes: int
    compiled_temp_bytes: int
    forward_evaluations: float
    flops: float
    recomputed_flops: float
    compile_seconds: float
    seconds: float | None = None
    relative_time: float | None = None


def rows_of(policies: Sequence[str], stack: Any, x: Any, *, base: str, is_timed: bool) -> list[Row]:
    """A row for each policy.

    Args:
        policies: What was typed.
        stack: The stack, as shapes.
        x: Its input, as a shape.
        base: The policy, one of them, whose time is 1.
        is_timed: Whether the steps are run.
    """
    rows, steps = [], []
    for policy in tqdm(policies, desc="compile", unit="policy", leave=False):
        own = stack.with_policy(policy)
        report = explain(loss, own, x, argnums=0)
        start = time.perf_counter()
        step = jax.jit(jax.value_and_grad(loss)).lower(own, x).compile()
        rows.append(_row(policy, report, step, time.perf_counter() - start))
        steps.append(step)
    if not is_timed:
        return rows
    filled, x = _filled((stack, x))
    seconds = _median_seconds(
        [
            ft.partial(step, filled.with_policy(policy), x)
            for step, policy in zip(steps, policies, strict=True)
        ]
    )
    unit = seconds[policies.index(base)]
    timed = zip(rows, seconds, strict=True)
    return [row._replace(seconds=own, relative_time=own / unit) for row, own in timed]


def _row(policy: str, report: Report, step: Any, compile_seconds: float) -> Row:
    return Row(
        policy=policy,
        kept_bytes=report.kept_bytes,
        offloaded_bytes=report.offloaded_bytes,
        estimated_temp_bytes=report.peak.temp_bytes,
        compiled_temp_bytes=compiled_bytes(step)["temp_bytes"],
        forward_evaluations=report.forward_evaluations,
        flops=report.flops,
        recomputed_flops=report.recomputed_flops,
        compile_seconds=compile_seconds,
    )


def _filled(shapes: Any) -> Any:
    """Arrays of the shapes, drawn by NumPy: JAX's draws take longer to compile than a step."""
    draw = np.random.default_rng(0)
    return jax.tree.map(
        lambda a: jnp.asarray(0.02 * draw.standard_normal(a.shape), a.dtype), shapes
    )


def _median_seconds(runs: Sequence[Callable[[], Any]]) -> list[float]:
    """The times of the runs, in turn, so that what else the machine does meets all alike."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in tqdm(range(1 + ROUNDS), desc="run", unit="round", leave=False):
        for run, seconds in zip(runs, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(run())
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds[1:]) for seconds in times]
