"""What does each policy keep, repeat and cost, of one transformer stack?

48 layers of width 128, 4 heads, 4 sequences of 128, float32: the step of `value_and_grad`, jitted
without donation. `python -m stackax tradeoffs --layers 48 --batch 4` prints the same for a stack of
any size. Steps run in turn in one process, and times are ratios of medians.

kept_bytes           what the backward pass keeps on the device beside the arguments
temp_bytes           temporary memory, the compiler's figure, what is kept included
forward_evaluations  how often the forward pass's operations run in a step
recomputed_share     the share of the step's operations that the backward pass repeats
relative_time        the time of a step over that without remat
"""

import jax
from report import run

from stackax._commands.rows import rows_of
from stackax._commands.sizes import DEFAULTS, stack_and_input

SIZES = {**DEFAULTS, "layers": 48, "batch": 4}
# From what keeps most to what keeps least.
POLICIES = (
    "none",
    "minimal_with_context",
    "minimal",
    "save_qkv_proj",
    "full",
    "slots=16",
    "nested",
    "slots=4",
)


def measure() -> dict[str, float]:
    """All figures."""
    jax.config.update("jax_enable_compilation_cache", False)
    rows = rows_of(POLICIES, *stack_and_input(SIZES), base="none", is_timed=True)
    figures = {
        "kept_bytes": [row.kept_bytes for row in rows],
        "temp_bytes": [row.compiled_temp_bytes for row in rows],
        "forward_evaluations": [row.forward_evaluations for row in rows],
        "recomputed_share": [row.recomputed_flops / row.flops for row in rows],
        "relative_time": [row.relative_time for row in rows],
    }
    return {
        f"{figure}_{row.policy}": value
        for figure, values in figures.items()
        for row, value in zip(rows, values, strict=True)
    }


if __name__ == "__main__":
    run(__doc__, measure)
