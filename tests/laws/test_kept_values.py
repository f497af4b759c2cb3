"""Law: the backward pass is handed exactly the values that the policy names, and the inputs.

Counted in the residuals of the traced program, with sizes that tell every value by its shape.
"""

import math

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

from stackax import ScanCheckpointPolicy, Stacked, checkpoint_name
from tests.reference.loops import lax_fold
from tests.reference.programs import residual_shapes
from tests.reference.schedules import smallest_slots_within
from tests.zoo import CONTAINERS, platform_warnings_ignored

N, CARRY, INNER = 6, (7, 5), (7, 11)


class Mlp(eqx.Module):
    up: jax.Array
    down: jax.Array
    gain: jax.Array

    def __init__(self, *, key):
        self.up, self.down = jr.normal(key, (5, 11)), jr.normal(key, (11, 5))
        self.gain = jnp.ones(())

    def __call__(self, x):
        inner = jnp.tanh(checkpoint_name(x @ self.up, "inner"))
        return x + self.gain * checkpoint_name(inner @ self.down, "last")


def kept(policy, container) -> dict[str, int]:
    """How many carries and how many inner values the backward pass of a fold is handed."""
    make = container.init(hax.Axis("layers", N), Mlp)
    stack = make(key=jr.key(0))
    arrays, static = eqx.partition(stack, eqx.is_array)

    def run(arrays, x):
        return eqx.combine(arrays, static).fold(x, remat=policy)

    with platform_warnings_ignored():
        shapes = residual_shapes(run, arrays, jnp.ones(CARRY))
    count = lambda tail: sum(math.prod(s[:-2]) for s in shapes if s[-2:] == tail)  # noqa: E731
    return {"carries": count(CARRY), "inner": count(INNER)}


# `last` has the shape of a carry and is a residual of its own: it counts as one below.
CASES = {
    "simple": (True, N, 0),
    "full": ("full", N, 0),
    "inner by name": (ScanCheckpointPolicy(save_block_internals=["inner"]), N, N),
    "last by name": (ScanCheckpointPolicy(save_block_internals=["last"]), 2 * N, 0),
    "both by name": (ScanCheckpointPolicy(save_block_internals=["inner", "last"]), 2 * N, N),
    "inner offloaded": (ScanCheckpointPolicy(offload_block_internals=["inner"]), N, N),
    "carries offloaded": (ScanCheckpointPolicy(save_carries="offload"), N, 0),
    "a slot": (ScanCheckpointPolicy(slots=1), 1, 0),
    "two slots": (ScanCheckpointPolicy(slots=2), 2, 0),
    "four slots": (ScanCheckpointPolicy(slots=4), 4, 0),
    "as many slots as layers": (ScanCheckpointPolicy(slots=N), N, 0),
    "more slots than layers": (ScanCheckpointPolicy(slots=N + 5), N, 0),
    "nested": ("nested", smallest_slots_within(N, 3 * N), 0),
    "offloaded slots": (ScanCheckpointPolicy(slots=4, save_carries="offload"), 4, 0),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("case", CASES)
def test_the_backward_pass_is_handed_what_the_policy_says(case, container):
    policy, carries, inner = CASES[case]
    assert kept(policy, container) == {"carries": carries, "inner": inner}


@pytest.mark.parametrize("policy", [False, "save_all"], ids=str)
def test_without_remat_the_backward_pass_is_handed_what_a_hand_written_scan_hands_it(policy):
    stacked = Stacked.init(hax.Axis("layers", N), Mlp)(key=jr.key(0)).stacked
    x = jnp.ones(CARRY)
    by_hand = residual_shapes(lambda x: lax_fold(stacked, x), x)
    stack = Stacked(stacked, hax.Axis("layers", N), ScanCheckpointPolicy())
    assert residual_shapes(lambda x: stack.fold(x, remat=policy), x) == by_hand


@pytest.mark.parametrize("segments", [2, 3, 4])
def test_segments_keep_no_more_carries_than_a_segment_count_and_a_segment(segments):
    """n segments keep n carries; working through one adds at most the carries within it."""
    length = math.ceil(N / segments)
    carries = kept(ScanCheckpointPolicy(nested=segments), Stacked)["carries"]
    assert segments <= carries <= segments + length
