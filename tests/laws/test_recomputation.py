"""Law: where remat is asked for, the compiled program really computes again.

XLA removes a loop of one trip and an unrolled loop, and then merges a recomputation with the
forward pass unless a barrier stands between them. The CPU compiler of jax 0.10 drops that barrier
whatever is asked of it; there a warning has to say so.
"""

import functools as ft

import jax
import jax.numpy as jnp
import pytest

from stackax import BlockSeq, ScanCheckpointPolicy, Stacked
from tests.reference.programs import compile_gradient, count_dots, equations
from tests.zoo import BATCH, EMBED, KEEPS_BARRIERS, PLAIN_MLP, layers, platform_warnings_ignored

X = jax.ShapeDtypeStruct((BATCH, EMBED), jnp.float32)


def loss_of(n: int, policy, container, unroll):
    """The loss of a stack as a function of its array leaves and the carry."""
    stack = PLAIN_MLP.stack(n, container=container)
    if container is Stacked:
        parameters = stack.stacked
        rebuild = lambda p: Stacked(p, layers(n), ScanCheckpointPolicy())  # noqa: E731
    else:
        parameters = list(stack.unstacked())
        rebuild = lambda p: BlockSeq(p, layers(n), ScanCheckpointPolicy())  # noqa: E731

    def loss(parameters, x):
        return jnp.sum(rebuild(parameters).fold(x, remat=policy, unroll=unroll) ** 2)

    return loss, parameters


@ft.cache
def dots(n: int, policy, container=Stacked, unroll=None) -> int:
    """The dot products in the compiled gradient."""
    loss, parameters = loss_of(n, policy, container, unroll)
    with platform_warnings_ignored():
        return count_dots(compile_gradient(loss, parameters, X).as_text())


# The forward pass of a layer has two dot products.
STRAIGHT = {
    "one layer": (1, Stacked, None),
    "unrolled": (2, Stacked, True),
    "one layer of a BlockSeq": (1, BlockSeq, None),
    "a BlockSeq": (2, BlockSeq, None),
}
POLICIES = {
    "simple": (True, 2),
    "names": (ScanCheckpointPolicy(save_block_internals=["mlpwi"]), 1),
}


@pytest.mark.skipif(not KEEPS_BARRIERS, reason="this compiler drops barriers; see the next test")
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", STRAIGHT)
def test_a_straight_program_computes_every_layer_again(case, policy):
    n, container, unroll = STRAIGHT[case]
    spec, per_layer = POLICIES[policy]
    again = dots(n, spec, container, unroll) - dots(n, False, container, unroll)
    assert again == per_layer * n


@pytest.mark.skipif(KEEPS_BARRIERS, reason="this compiler keeps barriers; see the test before")
@pytest.mark.parametrize("case", STRAIGHT)
def test_a_compiler_that_undoes_remat_is_warned_of(case):
    from stackax._policy import lower

    n, container, unroll = STRAIGHT[case]
    loss, parameters = loss_of(n, True, container, unroll)
    lower._warn_once.cache_clear()
    with pytest.warns(UserWarning, match="barrier"):
        jaxpr = jax.make_jaxpr(jax.grad(loss))(parameters, X)
    checkpoints = [e for e in equations(jaxpr) if "prevent_cse" in e.params]
    assert checkpoints and all(e.params["prevent_cse"] for e in checkpoints)


@pytest.mark.parametrize("unroll", [None, 2], ids=str)
def test_a_loop_that_survives_computes_again(unroll):
    """Four layers: `unroll=2` leaves a loop of two trips."""
    if unroll == 2 and not KEEPS_BARRIERS:
        pytest.skip("two layers in one trip are merged by a compiler that drops barriers")
    assert dots(4, True, unroll=unroll) - dots(4, False, unroll=unroll) >= 2


def test_a_schedule_computes_again_on_every_compiler():
    assert dots(4, ScanCheckpointPolicy(slots=2)) > dots(4, False)


def test_prevent_cse_false_is_obeyed():
    """Asked not to stand in the way, a single layer's recomputation is merged."""
    policy = ScanCheckpointPolicy(prevent_cse=False)
    assert dots(1, policy) == dots(1, False)


def barriers(n: int, policy, unroll=None) -> int:
    loss, parameters = loss_of(n, policy, Stacked, unroll)
    with platform_warnings_ignored():
        jaxpr = jax.make_jaxpr(jax.grad(loss))(parameters, X)
    return sum(bool(e.params.get("prevent_cse")) for e in equations(jaxpr))


def test_a_barrier_stands_exactly_where_the_loop_does_not_survive():
    assert barriers(4, True) == 0
    assert barriers(1, True) > 0
    for unroll in (True, 4, 8):
        assert barriers(4, True, unroll=unroll) > 0
    assert barriers(4, ScanCheckpointPolicy(prevent_cse=True)) > 0
