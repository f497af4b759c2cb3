"""What the policies cost in memory, against a hand-written lax.scan and against Haliax.

Temporary bytes are the compiler's, for the jitted value_and_grad without donation.

no_remat_over_lax_scan                   no remat, 17 transformer layers, over a hand-written scan
simple_over_lax_scan                     simple remat, over a hand-written scan of jax.checkpoint
haliax_nested_over_ours_n64              MLP, nested=True, 64 layers
haliax_nested_over_ours_transformer_n64  the same for the transformer block
transformer_slots16_over_simple_n97      slots=16 over simple remat, 97 layers
mlp_slots16_over_simple_n97              the same for the MLP
nested_over_simple_max                   the largest ratio over both blocks and seven depths
carries_per_slot_min, _max               what one slot more adds, in carries
constant_n128_over_n17                   temp less the slots: 128 layers over 17
hlo_n128_over_n17                        lines of the compiled gradient, slots=8
evaluations_equal_optimum                whether every schedule up to 128 layers is optimal
"""

import functools as ft

from blocks import MLP, Transformer, carry_bytes
from report import run
from steps import compiled, haliax_step, lax_step, stackax_step, temp_bytes

from stackax import ScanCheckpointPolicy
from stackax._loop.schedule import compile_tree, revolve

DEPTHS = (1, 2, 16, 17, 64, 97, 128)


@ft.cache
def ours(block: type, layers: int, remat) -> int:
    """Temporary bytes of our step."""
    return temp_bytes(block, *stackax_step(block, layers, remat))


def slots(count: int) -> ScanCheckpointPolicy:
    """The policy with that many slots."""
    return ScanCheckpointPolicy(slots=count)


def measure() -> dict[str, object]:
    """All figures."""
    return {**against_lax_scan(), **against_haliax(), **of_slots(), **of_schedules()}


def against_lax_scan() -> dict[str, float]:
    """What the plain loop adds to a hand-written one."""
    plain = temp_bytes(Transformer, *lax_step(Transformer, 17, remat=False))
    simple = temp_bytes(Transformer, *lax_step(Transformer, 17, remat=True))
    return {
        "no_remat_over_lax_scan": ours(Transformer, 17, False) / plain,
        "simple_over_lax_scan": ours(Transformer, 17, True) / simple,
    }


def against_haliax() -> dict[str, float]:
    """Haliax's nested remat over ours."""

    def ratio(block: type) -> float:
        return temp_bytes(block, *haliax_step(block, 64, "nested")) / ours(block, 64, "nested")

    return {
        "haliax_nested_over_ours_n64": ratio(MLP),
        "haliax_nested_over_ours_transformer_n64": ratio(Transformer),
    }


def of_slots() -> dict[str, float]:
    """What slots cost, and what they save."""
    steps = [
        (ours(block, layers, slots(16)) - ours(block, layers, slots(8))) / 8 / carry_bytes(block)
        for block in (MLP, Transformer)
        for layers in (17, 64, 97, 128)
    ]
    lines = {n: _lines(Transformer, n) for n in (17, 128)}
    return {
        "transformer_slots16_over_simple_n97": ours(Transformer, 97, slots(16))
        / ours(Transformer, 97, True),
        "mlp_slots16_over_simple_n97": ours(MLP, 97, slots(16)) / ours(MLP, 97, True),
        "nested_over_simple_max": max(
            ours(block, layers, "nested") / ours(block, layers, True)
            for block in (MLP, Transformer)
            for layers in DEPTHS
        ),
        "carries_per_slot_min": min(steps),
        "carries_per_slot_max": max(steps),
        "constant_n128_over_n17": max(
            ours(block, 128, slots(8)) / ours(block, 17, slots(8)) for block in (MLP, Transformer)
        ),
        "hlo_n128_over_n17": lines[128] / lines[17],
    }


def _lines(block: type, layers: int) -> int:
    return len(compiled(block, *stackax_step(block, layers, slots(8))).as_text().splitlines())


def of_schedules() -> dict[str, bool]:
    """Whether each schedule's number of forward evaluations is the least possible."""
    least = _least_evaluations(128)
    return {
        "evaluations_equal_optimum": all(
            compile_tree(revolve(steps, count)).evaluations == least(steps, count)
            for steps in range(1, 129)
            for count in range(1, steps + 1)
        )
    }


def _least_evaluations(most_steps: int):
    """The optimum by dynamic programming, which knows nothing of binomials."""

    @ft.cache
    def advances(steps: int, count: int, already_run: bool) -> int:
        if steps == 1 or count == 1:
            return steps * (steps - 1) // 2
        return min(
            (0 if already_run else first)
            + advances(first, count, False)
            + advances(steps - first, count - 1, already_run)
            for first in range(1, steps)
        )

    return lambda steps, count: 2 * steps + advances(steps, count, True)


if __name__ == "__main__":
    run(__doc__, measure)
