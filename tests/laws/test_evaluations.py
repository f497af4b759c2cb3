"""Law: a schedule evaluates each block as rarely as its number of carries allows.

Evaluations are counted by a callback in the data path: what it returns feeds a nonlinearity, so
that neither the forward pass nor the differentiation of a block can do without it.
"""

import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stackax import BlockSeq, ScanCheckpointPolicy, Stacked
from tests.reference.schedules import (
    optimal_evaluations,
    searched_evaluations,
    smallest_slots_within,
)
from tests.zoo import KEEPS_BARRIERS, platform_warnings_ignored

CALLS: list[int] = []


def _record(x):
    CALLS.append(1)
    return np.asarray(x)


@jax.custom_jvp
def counted(x):
    """The identity, counted each time that it is evaluated."""
    return jax.pure_callback(_record, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@counted.defjvp
def _counted_jvp(primals, tangents):
    return counted(*primals), tangents[0]


class Counted(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return jnp.sin(counted(x * self.weight)) ** 2


@ft.cache
def evaluations(n: int, policy, container=Stacked, reverse: bool = False) -> int:
    """How often a block is evaluated while the gradient of a fold runs once."""
    blocks = [Counted(jnp.asarray(1.0 + 0.01 * i)) for i in range(n)]
    arrays, static = eqx.partition(container.from_layers(blocks), eqx.is_array)

    @jax.jit
    def gradient(arrays, x):
        stack = eqx.combine(arrays, static)
        # The value too: a gradient alone needs no forward pass where only the input is kept.
        return jax.value_and_grad(lambda x: stack.fold(x, remat=policy, reverse=reverse))(x)

    CALLS.clear()
    with platform_warnings_ignored():
        jax.block_until_ready(gradient(arrays, jnp.asarray(0.5)))
    jax.effects_barrier()
    return len(CALLS)


def skip_if_merged(n: int, container=Stacked):
    """Skips where the compiler merges the evaluations of a straight program whatever we do."""
    if not KEEPS_BARRIERS and (n == 1 or container is BlockSeq):
        pytest.skip("this compiler drops barriers, and a warning says so")


@pytest.mark.parametrize("n", range(1, 25))
def test_the_closed_form_is_what_an_exhaustive_search_finds(n):
    for k in range(1, n + 3):
        assert optimal_evaluations(n, k) == searched_evaluations(n, k)


@pytest.mark.parametrize(
    "n, k, expected", [(128, 16, 368), (128, 8, 460), (128, 128, 256), (4, 1, 14)]
)
def test_the_closed_form_has_known_values(n, k, expected):
    assert optimal_evaluations(n, k) == expected


@pytest.mark.parametrize("n, k", [(8, 3), (16, 4), (17, 4), (36, 7), (64, 10), (97, 12), (128, 14)])
def test_the_fewest_slots_within_three_evaluations_a_layer_are_known(n, k):
    assert smallest_slots_within(n, 3 * n) == k


@pytest.mark.parametrize(
    "n, k",
    [(1, 1), (2, 1), (3, 2), (5, 9), (17, 4)] + [(8, k) for k in range(1, 9)],
)
def test_slots_evaluate_as_rarely_as_is_possible(n, k):
    skip_if_merged(n)
    assert evaluations(n, ScanCheckpointPolicy(slots=k)) == optimal_evaluations(n, k)


def test_every_schedule_of_up_to_40_layers_is_optimal_before_it_runs():
    """The programs of the loop, counted without running them."""
    from stackax._loop import schedule

    for n in range(1, 41):
        for k in range(1, n + 1):
            program = schedule.compile_tree(schedule.revolve(n, k))
            assert program.evaluations == optimal_evaluations(n, k)
            assert program.slots <= k


@pytest.mark.parametrize("n", [1, 2, 9, 36])
def test_nested_stays_within_three_evaluations_a_layer(n):
    skip_if_merged(n)
    k = smallest_slots_within(n, 3 * n)
    assert evaluations(n, "nested") == optimal_evaluations(n, k) <= 3 * n


@pytest.mark.parametrize("n, segments", [(8, 2), (8, 4), (9, 3), (7, 2)])
def test_segments_evaluate_each_layer_at_most_three_times(n, segments):
    count = evaluations(n, ScanCheckpointPolicy(nested=segments))
    assert 2 * n < count <= 3 * n


@pytest.mark.parametrize("container", [Stacked, BlockSeq])
@pytest.mark.parametrize("policy, expected", [(False, 5), (True, 10), ("save_all", 5)])
def test_plain_policies_evaluate_once_or_twice(policy, expected, container):
    skip_if_merged(5, container)
    assert evaluations(5, policy, container) == expected


def test_a_reversed_fold_has_the_same_schedule():
    policy = ScanCheckpointPolicy(slots=2)
    assert evaluations(5, policy, reverse=True) == optimal_evaluations(5, 2)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_block_seq_follows_the_same_schedule(k):
    skip_if_merged(5, BlockSeq)
    policy = ScanCheckpointPolicy(slots=k)
    assert evaluations(5, policy, BlockSeq) == optimal_evaluations(5, k)


def test_without_a_gradient_every_layer_is_evaluated_once():
    blocks = [Counted(jnp.asarray(1.0 + 0.01 * i)) for i in range(5)]
    stack = Stacked.from_layers(blocks).with_policy(ScanCheckpointPolicy(slots=2))
    CALLS.clear()
    jax.block_until_ready(eqx.filter_jit(stack.fold)(jnp.asarray(0.5)))
    jax.effects_barrier()
    assert len(CALLS) == 5
