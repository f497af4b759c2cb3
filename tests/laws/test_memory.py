"""Law: what XLA plans for temporaries follows from the policy, whatever the number of layers.

Every figure is `memory_analysis().temp_size_in_bytes` of the jitted, undonated value_and_grad,
compiled and never run. A hand-written `jax.lax.scan` of the same block is the reference.
"""

import functools as ft

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

from stackax import ScanCheckpointPolicy, Stacked
from tests.reference.loops import lax_fold
from tests.reference.programs import compile_gradient, temp_bytes
from tests.zoo import (
    INTERNALS,
    NAMES,
    NESTED,
    NONE,
    OFFLOADED_CARRIES,
    OFFLOADED_NAMES,
    OFFLOADED_SLOTS,
    SIMPLE,
    SLOTS2,
    Attention,
    PlainMlp,
    layers,
    platform_warnings_ignored,
)


class Problem:
    """A block and its carry at sizes that dwarf the loops' counters and tables.

    Attributes:
        carry_bytes, layer_bytes: what one carry and one layer's parameters weigh.
    """

    def __init__(self, make, carry: tuple[int, ...]):
        self.make, self.carry = make, jax.ShapeDtypeStruct(carry, jnp.float32)
        self.carry_bytes = self.carry.size * 4
        layer = eqx.filter_eval_shape(lambda: make(key=jr.key(0)))
        self.layer_bytes = sum(leaf.size * 4 for leaf in jax.tree.leaves(layer))

    def stacked(self, n: int):
        """The parameters of n layers, as shapes only."""
        return eqx.filter_eval_shape(
            lambda: jax.vmap(lambda key: self.make(key=key))(jr.split(jr.key(0), n))
        )


# The parameters of a layer weigh 4 carries.
MLP = Problem(ft.partial(PlainMlp, 128, 512), (256, 128))
ATTENTION = Problem(ft.partial(Attention, 64, 256, 4), (2, 64, 64))
# The parameters of a layer weigh 256 carries.
HEAVY = Problem(ft.partial(PlainMlp, 128, 512), (4, 128))


@ft.cache
def compiled(problem: Problem, n: int, policy):
    """The compiled gradient of a stack under a policy, or by hand (`"lax"`, `"lax remat"`)."""

    def loss(stacked, x):
        if isinstance(policy, str) and policy.startswith("lax"):
            out = lax_fold(stacked, x, remat=policy == "lax remat")
        else:
            out = Stacked(stacked, layers(n), ScanCheckpointPolicy()).fold(x, remat=policy)
        return jnp.sum(out**2)

    with platform_warnings_ignored():
        return compile_gradient(loss, problem.stacked(n), problem.carry)


def temp(problem: Problem, n: int, policy) -> int:
    return compiled(problem, n, policy).memory_analysis().temp_size_in_bytes


def slots(k: int) -> ScanCheckpointPolicy:
    return ScanCheckpointPolicy(slots=k)


@pytest.mark.parametrize("n", [17, 64])
def test_no_remat_costs_what_a_hand_written_scan_costs(n):
    assert temp(MLP, n, False) == pytest.approx(temp(MLP, n, "lax"), rel=0.01)


@pytest.mark.parametrize("n", [2, 17, 64])
def test_simple_remat_costs_what_a_checkpointed_hand_written_scan_costs(n):
    assert temp(MLP, n, True) == pytest.approx(temp(MLP, n, "lax remat"), rel=0.01)


def test_remat_of_attention_costs_what_a_checkpointed_hand_written_scan_costs():
    assert temp(ATTENTION, 17, True) == pytest.approx(temp(ATTENTION, 17, "lax remat"), rel=0.01)


def test_named_arrays_cost_what_plain_arrays_cost():
    """Simple remat of a NamedArray block against a hand-written scan of the same shapes."""
    Batch, Embed, Hidden = hax.make_axes(batch=128, embed=128, hidden=512)

    class NamedBlock(eqx.Module):
        up: hax.NamedArray
        down: hax.NamedArray

        def __call__(self, x):
            hidden = hax.tanh(hax.dot(x, self.up, axis=Embed))
            return x + hax.dot(hidden, self.down, axis=Hidden)

    def make():
        Layers = layers(16)
        ups, downs = hax.zeros((Layers, Embed, Hidden)), hax.zeros((Layers, Hidden, Embed))
        return Stacked(NamedBlock(ups, downs), Layers, ScanCheckpointPolicy(simple=True))

    def by_hand(weights, x):
        body = lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None)  # noqa: E731
        body = jax.checkpoint(body, prevent_cse=False)
        return jnp.sum(jax.lax.scan(body, x, weights)[0] ** 2)

    stack = jax.eval_shape(make)
    x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    ours = temp_bytes(
        lambda stack, x: jnp.sum(stack.fold(hax.named(x, (Batch, Embed))).array ** 2), stack, x
    )
    weights = (stack.stacked.up.array, stack.stacked.down.array)
    theirs = temp_bytes(by_hand, weights, x)
    assert ours == pytest.approx(theirs, rel=0.01)


@pytest.mark.parametrize(
    "problem, n", [(MLP, 64), (MLP, 17), (ATTENTION, 64)], ids=["mlp-64", "mlp-17", "attention-64"]
)
def test_a_slot_adds_one_carry(problem, n):
    added = temp(problem, n, slots(16)) - temp(problem, n, slots(4))
    assert 0.98 <= added / (12 * problem.carry_bytes) <= 1.02


def test_what_slots_cost_beside_carries_does_not_grow_with_the_layers():
    temps = [temp(MLP, n, slots(4)) for n in (17, 64, 128)]
    assert max(temps) - min(temps) <= 0.02 * MLP.carry_bytes


@pytest.mark.parametrize("k", [17, 20])
def test_as_many_slots_as_layers_cost_what_simple_remat_costs(k):
    assert temp(MLP, 17, slots(k)) <= 1.01 * temp(MLP, 17, True)


@pytest.mark.parametrize(
    "problem, n",
    [(MLP, 1), (MLP, 2), (MLP, 5), (MLP, 17), (MLP, 64), (ATTENTION, 17)],
    ids=lambda x: {MLP: "mlp", ATTENTION: "attention"}.get(x, x),
)
def test_nested_never_costs_more_than_simple_remat(problem, n):
    assert temp(problem, n, NESTED.spec) <= temp(problem, n, True)


NEVER_COPY = (
    NONE,
    SIMPLE,
    INTERNALS,
    NAMES,
    OFFLOADED_CARRIES,
    OFFLOADED_NAMES,
    NESTED,
    SLOTS2,
    OFFLOADED_SLOTS,
)


def heavy_with_a_table(policy) -> int:
    """Temporaries of 16 heavy layers that share a closed-over array of a layer's weight."""
    table = jax.ShapeDtypeStruct((1024, 128), jnp.float32)

    def loss(stacked, x, table):
        step = lambda block, x: block(x + jnp.tanh(x @ table[:128] + table[128]))  # noqa: E731
        if policy == "lax remat":
            body = jax.checkpoint(lambda x, b: (step(b, x), None), prevent_cse=False)
            return jnp.sum(jax.lax.scan(body, x, stacked)[0] ** 2)
        stack = Stacked(stacked, layers(16), ScanCheckpointPolicy())
        return jnp.sum(stack.fold_via(step, remat=policy)(x) ** 2)

    with platform_warnings_ignored():
        return temp_bytes(loss, HEAVY.stacked(16), HEAVY.carry, table)


@ft.cache
def least_heavy() -> int:
    return heavy_with_a_table("lax remat")


@pytest.mark.parametrize("policy", NEVER_COPY, ids=lambda p: p.name)
def test_no_policy_copies_parameters_or_shared_arguments(policy):
    """A copy per layer of either would add 16 layers' worth; allowed is one, the one at work."""
    assert heavy_with_a_table(policy.spec) <= least_heavy() + 1.2 * HEAVY.layer_bytes


@pytest.mark.parametrize("policy", [True, slots(4)], ids=str)
def test_the_length_of_the_program_does_not_depend_on_the_number_of_layers(policy):
    lines = [len(compiled(MLP, n, policy).as_text().splitlines()) for n in (17, 128)]
    assert lines[1] == pytest.approx(lines[0], rel=0.05)


def test_the_length_of_the_program_does_not_depend_on_the_number_of_slots():
    lines = [len(compiled(MLP, 64, slots(k)).as_text().splitlines()) for k in (4, 16)]
    assert lines[1] == pytest.approx(lines[0], rel=0.05)


def test_saved_names_cost_exactly_their_bytes():
    """One name of 512 wide values a layer, on top of simple remat."""
    n = 17
    named = temp(MLP, n, NAMES.spec) - temp(MLP, n, True)
    hidden_bytes = 256 * 512 * 4
    # What is kept need not be in the backward step's working set again.
    assert (n - 2) * hidden_bytes <= named <= (n + 1) * hidden_bytes


def test_saving_all_internals_costs_what_no_remat_costs():
    assert temp(MLP, 17, INTERNALS.spec) <= 1.01 * temp(MLP, 17, "lax")
