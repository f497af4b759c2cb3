"""Law: whatever a policy keeps, results and gradients are those of the plain Python loop.

Gradients for the blocks' parameters, the carry, a per-layer argument, a shared argument and a value
that the step closes over, in float32, to 1e-6 of the largest entry.
"""

import functools as ft

import equinox as eqx
import pytest

from stackax import BlockSeq, Stacked
from tests.reference.loops import python_loop
from tests.reference.programs import relative_error, run_together, take
from tests.zoo import (
    BLOCKS,
    CORE_POLICIES,
    LENGTHS,
    NESTED,
    PRESETS,
    RECORDING,
    SIMPLE,
    SLOTS2,
    VOCABULARY,
    WAVE,
    Block,
    Policy,
    inputs,
    platform_warnings_ignored,
    policies,
    schedules,
    via,
    weigh,
)


def gradient(run, blocks, x):
    """The result of `run(blocks, x)`, weighed, and its gradients for blocks and inputs."""

    def loss(both):
        out = run(*both)
        return weigh(out), out

    (_, out), gradients = eqx.filter_value_and_grad(loss, has_aux=True)((blocks, x))
    return out, gradients


def program(block: Block, n: int, policy: Policy, container=Stacked, **options):
    """A function of nothing but arrays that runs a container and differentiates it."""
    stack = block.stack(n, policy.spec, container)
    arrays, static = eqx.partition(stack, eqx.is_array)

    def run(arrays, x):
        out, (blocks, inputs) = gradient(
            lambda stack, x: via(stack, x, scans=block.scans, **options),
            eqx.combine(arrays, static),
            x,
        )
        return out, list(blocks.unstacked()), inputs

    return run, arrays


def reference(block: Block, n: int, **options):
    """The same for the plain loop over a list of blocks made one by one."""
    arrays, static = eqx.partition(block.layer_list(n), eqx.is_array)

    def run(arrays, x):
        out, (blocks, inputs) = gradient(
            lambda blocks, x: python_loop(blocks, x, scans=block.scans, **options),
            eqx.combine(arrays, static),
            x,
        )
        return out, blocks, inputs

    return run, arrays


def run_cases(cases: dict[str, tuple], n: int, block: Block):
    """Runs `(function, arrays)` pairs on the block's inputs, all compiled as one program."""
    arrays = {name: arrays for name, (_, arrays) in cases.items()}
    programs = {
        name: lambda every, x, run=run, name=name: run(every[name], x)
        for name, (run, _) in cases.items()
    }
    with platform_warnings_ignored():
        return run_together(programs, arrays, inputs(block, n))


def check(results, name: str, block: Block, expected: str = "python loop"):
    (out, blocks, x), (out0, blocks0, x0) = take(results, name), take(results, expected)
    assert relative_error(out, out0) <= block.tolerance
    assert relative_error(x, x0) <= block.tolerance
    # The two lists of blocks differ in their containers' static fields only.
    for layer, layer0 in zip(blocks, blocks0, strict=True):
        assert relative_error(eqx.filter(layer, eqx.is_array), layer0) <= block.tolerance


N = 5


# A BlockSeq compiles each layer: presets are names, and one schedule of each kind is enough there.
FOR_BLOCK_SEQ = tuple(p for p in policies(3) if p not in PRESETS + schedules(3)) + (NESTED, SLOTS2)


@ft.cache
def every_policy(n: int, container, some: tuple[Policy, ...]):
    cases = {p.name: program(VOCABULARY, n, p, container) for p in some}
    return run_cases(cases | {"python loop": reference(VOCABULARY, n)}, n, VOCABULARY)


@pytest.mark.parametrize("policy", policies(N), ids=lambda p: p.name)
def test_every_policy_leaves_gradients_unchanged(policy):
    check(every_policy(N, Stacked, policies(N)), policy.name, VOCABULARY)


@pytest.mark.parametrize("policy", FOR_BLOCK_SEQ, ids=lambda p: p.name)
def test_every_policy_leaves_the_gradients_of_a_block_seq_unchanged(policy):
    check(every_policy(3, BlockSeq, FOR_BLOCK_SEQ), policy.name, VOCABULARY)


TRICKY_BLOCKS = tuple(block for block in BLOCKS if block not in (VOCABULARY, WAVE))


@ft.cache
def every_block(block: Block):
    cases = {policy.name: program(block, 2, policy) for policy in CORE_POLICIES}
    return run_cases(cases | {"python loop": reference(block, 2)}, 2, block)


@pytest.mark.parametrize("policy", CORE_POLICIES, ids=lambda p: p.name)
@pytest.mark.parametrize("block", TRICKY_BLOCKS, ids=lambda b: b.name)
def test_every_block_has_the_gradients_of_the_python_loop(block, policy):
    check(every_block(block), policy.name, block)


@ft.cache
def every_schedule(n: int):
    cases = {policy.name: program(WAVE, n, policy) for policy in (SIMPLE, *schedules(n))}
    return run_cases(cases | {"python loop": reference(WAVE, n)}, n, WAVE)


@pytest.mark.parametrize(
    "n, policy",
    [(n, p) for n in LENGTHS if n != N for p in (SIMPLE, *schedules(n))],
    ids=lambda x: x.name if isinstance(x, Policy) else f"N={x}",
)
def test_every_schedule_is_right_at_every_length(n, policy):
    check(every_schedule(n), policy.name, WAVE)


LOOPS = {
    "simple, reversed, unrolled by 2": (SIMPLE, dict(reverse=True, unroll=2)),
    "slots=2, reversed": (SLOTS2, dict(reverse=True)),
    "slots=2, unrolled": (SLOTS2, dict(unroll=True)),
    "slots=2, reversed, unrolled by 2": (SLOTS2, dict(reverse=True, unroll=2)),
}


@ft.cache
def every_loop(block: Block):
    cases = {name: program(block, 3, policy, **how) for name, (policy, how) in LOOPS.items()}
    references = {
        f"python loop, {backwards}": reference(block, 3, reverse=backwards)
        for backwards in (False, True)
    }
    return run_cases(cases | references, 3, block)


@pytest.mark.parametrize("loop", LOOPS)
def test_reversed_and_unrolled_scans_have_the_gradients_of_the_python_loop(loop):
    expected = f"python loop, {bool(LOOPS[loop][1].get('reverse'))}"
    check(every_loop(RECORDING), loop, RECORDING, expected)
