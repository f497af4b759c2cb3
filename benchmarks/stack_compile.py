"""What the loops cost in time, to compile and to run, against a hand-written lax.scan.

Steps run in turn in one process; ratios are of medians.

grad_compile_n96_over_n8    compiling the gradient, no remat: 96 layers over 8
run_over_lax_scan           a step with simple remat over a hand-written scan of jax.checkpoint
slots12_step_over_simple    transformer, 64 layers: slots=12 over simple remat
slots64_step_over_simple    slots=64, which is simple remat, over simple remat
nested_step_over_simple     nested=True over simple remat
slots_compile_over_simple   tracing and compiling slots=12 over simple remat
"""

import jax
from blocks import Transformer
from report import run
from steps import lax_step, median_ratio, stackax_step, with_shapes
from turns import compile_seconds

from stackax import ScanCheckpointPolicy

LAYERS = 64


def measure() -> dict[str, float]:
    """All figures."""
    jax.config.update("jax_enable_compilation_cache", False)
    simple = stackax_step(Transformer, LAYERS, True)
    slots = {k: stackax_step(Transformer, LAYERS, ScanCheckpointPolicy(slots=k)) for k in (12, 64)}
    nested = stackax_step(Transformer, LAYERS, "nested")
    by_hand = lax_step(Transformer, LAYERS, remat=True)
    deep, shallow = (stackax_step(Transformer, n, False) for n in (96, 8))
    return {
        "grad_compile_n96_over_n8": compile_ratio(deep, shallow),
        "slots_compile_over_simple": compile_ratio(slots[12], simple),
        "run_over_lax_scan": median_ratio(Transformer, simple, by_hand, rounds=5),
        "slots12_step_over_simple": median_ratio(Transformer, slots[12], simple, rounds=5),
        "slots64_step_over_simple": median_ratio(Transformer, slots[64], simple, rounds=5),
        "nested_step_over_simple": median_ratio(Transformer, nested, simple, rounds=5),
    }


def compile_ratio(ours: tuple, peer: tuple) -> float:
    """The time to trace and compile one step over that of another."""
    steps = {"ours": with_shapes(Transformer, *ours), "peer": with_shapes(Transformer, *peer)}
    seconds = compile_seconds(steps)
    return seconds["ours"] / seconds["peer"]


if __name__ == "__main__":
    run(__doc__, measure)
