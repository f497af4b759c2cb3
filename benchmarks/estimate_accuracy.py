"""How near the estimated peak comes to the compiler's figure, over a grid of stacks.

Compiled is `memory_analysis().temp_size_in_bytes` of the jitted, undonated value_and_grad;
estimated is what `estimate_peak` says of its trace. The held-out programs are unlike the grid's.

cases                how many programs were compared
within_10_percent    the fraction whose estimate is within 10 % of the compiler's figure
worst_under_percent  by how much the worst estimate falls short of it, in percent
worst_over_percent   by how much the worst one exceeds it
in_band              the fraction whose compiled figure is in the estimate's band
milliseconds         what one estimate takes, the median
held_out_...         the same for the held-out programs
"""

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
from estimate_cases import grid
from estimate_held_out import programs
from report import run
from rich.console import Console
from rich.table import Table

from stackax.memory._peak import Peak, estimate_peak


@dataclasses.dataclass(frozen=True)
class Row:
    """A program's estimate beside the compiler's figure."""

    columns: tuple[str, ...]
    peak: Peak
    compiled: int
    seconds: float

    @property
    def ratio(self) -> float:
        """Estimated over compiled."""
        return self.peak.temp_bytes / self.compiled

    @property
    def is_in_band(self) -> bool:
        """Whether the compiled figure lies in the estimate's band."""
        return self.peak.low_bytes <= self.compiled <= self.peak.high_bytes


def measure() -> dict[str, float]:
    """All figures; the tables are printed on the way, unless JSON is asked for."""
    on_grid = [compare(*program) for program in _grid_programs()]
    held_out = [compare((name,), *program) for name, program in programs()]
    if "--json" not in sys.argv:
        show(on_grid, ("block", "dtype", "N", "batch x seq", "policy"))
        show(held_out, ("held-out program",))
    return figures(on_grid) | {f"held_out_{k}": v for k, v in figures(held_out).items()}


def figures(rows: list[Row]) -> dict[str, float]:
    """What the rows come to."""
    ratios = [row.ratio for row in rows]
    return {
        "cases": len(rows),
        "within_10_percent": sum(abs(ratio - 1) <= 0.1 for ratio in ratios) / len(rows),
        "worst_under_percent": max(0.0, 100 * (1 - min(ratios))),
        "worst_over_percent": max(0.0, 100 * (max(ratios) - 1)),
        "in_band": sum(row.is_in_band for row in rows) / len(rows),
        "milliseconds": 1e3 * statistics.median(row.seconds for row in rows),
    }


def _grid_programs() -> Iterator[tuple[tuple[str, ...], Callable, tuple[Any, ...]]]:
    # jaxlib 0.10 keeps bfloat16 residuals in float32 on a CPU: its figures are not predicted.
    is_new = tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12)
    for case in grid(("float32", "bfloat16") if is_new else ("float32",)):
        size = f"{case.batch} x {case.seq}"
        columns = (case.block, case.dtype, str(case.layers), size, case.policy)
        yield columns, *case.program()


def compare(columns: tuple[str, ...], loss: Callable, args: tuple[Any, ...]) -> Row:
    """Traces, estimates and compiles one program."""
    step = jax.value_and_grad(loss)
    closed = jax.make_jaxpr(step)(*args)
    start = time.perf_counter()
    peak = estimate_peak(closed)
    seconds = time.perf_counter() - start
    compiled = jax.jit(step).lower(*args).compile().memory_analysis().temp_size_in_bytes
    return Row(columns, peak, compiled, seconds)


def show(rows: list[Row], headers: tuple[str, ...]) -> None:
    """Prints one line per program."""
    table = Table()
    for header in (*headers, "estimated MiB", "compiled MiB", "ratio", "in band"):
        table.add_column(header, justify="left" if header in headers else "right")
    for row in rows:
        figures = (row.peak.temp_bytes / 2**20, row.compiled / 2**20)
        table.add_row(
            *row.columns,
            *(f"{figure:.2f}" for figure in figures),
            f"{row.ratio:.3f}",
            "yes" if row.is_in_band else "no",
        )
    Console().print(table)


if __name__ == "__main__":
    run(__doc__, measure)
