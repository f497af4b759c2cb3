"""Programs that are timed in turn, so that what disturbs one disturbs all."""

import statistics
import time
from collections.abc import Callable, Mapping

import jax


def median_seconds(runs: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median time of each run: all are run in turn, `rounds` times, after once to warm up.

    Args:
        runs: Functions without arguments, by name.
        rounds: How often each is timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            jax.block_until_ready(run())
            if turn:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def compiled(function: Callable, *args) -> jax.stages.Compiled:
    """The function, compiled for these arguments or for their shapes."""
    return jax.jit(function).lower(*args).compile()


def temp_bytes(function: Callable, *args) -> int:
    """The compiler's figure for temporary memory."""
    return compiled(function, *args).memory_analysis().temp_size_in_bytes


def compile_seconds(steps: Mapping[str, tuple], rounds: int = 3) -> dict[str, float]:
    """The median time to trace and compile each step, in turn.

    Args:
        steps: For each name a function and its arguments, of which shapes suffice.
        rounds: How often each is compiled.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, (function, *args) in steps.items():
            jax.clear_caches()
            start = time.perf_counter()
            compiled(function, *args)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}
