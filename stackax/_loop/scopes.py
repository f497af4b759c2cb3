"""Named scopes that say, to whoever reads a traced loop, what its operations are and how often they
run: a `while` of the program holds no count of its trips."""

import re
from contextlib import AbstractContextManager

import jax

REMATTED = "rematted_computation"  # what jax.checkpoint calls it as well


def rematted() -> AbstractContextManager:
    """Marks the operations that a backward pass does for the second time."""
    return jax.named_scope(REMATTED)


def mean_trips(trips: int, runs: int) -> AbstractContextManager:
    """Marks a loop that is run `runs` times and takes `trips` trips in all of them."""
    return jax.named_scope(f"trips[{trips}:{max(1, runs)}]")


def read_mean_trips(name_stack: str) -> float | None:
    """The mean number of trips of a loop, from the scopes that it was traced in."""
    marks = re.findall(r"trips\[(\d+):(\d+)\]", name_stack)
    return int(marks[-1][0]) / int(marks[-1][1]) if marks else None
