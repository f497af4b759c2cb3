"""A plan fits its budget by the compiler's own figure, at the least recomputation there is."""

import itertools

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

from stackax import BlockSeq, ScanCheckpointPolicy, Stacked, checkpoint_name
from stackax.memory import _plan, explain, plan
from stackax.memory._choices import Subset, layers_of, slots_to_try, subsets_of
from stackax.memory._guess import Guesses
from stackax.memory._program import as_call, trace
from stackax.memory._search import Search
from tests.zoo import platform_warnings_ignored

N, ROWS, WIDTH, HIDDEN = 6, 64, 16, 64
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


class Mlp(eqx.Module):
    """Two products with three names: a cheap one to repeat, a dear one, and one never needed."""

    up: jax.Array
    down: jax.Array

    def __init__(self, *, key):
        self.up, self.down = jr.normal(key, (WIDTH, HIDDEN)), jr.normal(key, (HIDDEN, WIDTH))

    def __call__(self, x):
        hidden = checkpoint_name(x @ self.up, "up")
        hidden = checkpoint_name(jnp.sin(hidden), "sine")
        return x + checkpoint_name(hidden @ self.down, "down")


def make(container=Stacked, n=N):
    return container.init(hax.Axis("layers", n), Mlp)(key=jr.key(0))


def enumerated():
    """Peak and recomputation of every subset of the names and of every loop, from its report."""
    policies = [ScanCheckpointPolicy(disable=True), ScanCheckpointPolicy(simple=True)]
    subsets = [["up", "sine"], ["up"], ["sine"]]
    policies += [ScanCheckpointPolicy(save_block_internals=subset) for subset in subsets]
    policies += [ScanCheckpointPolicy(slots=k) for k in slots_to_try(N)]
    reports = [explain(make(), X, remat=policy) for policy in policies]
    return [(r.peak_bytes, r.recomputed_flops) for r in reports]


@pytest.fixture(scope="module")
def front():
    return plan(make(), X, budget_bytes="1 GiB").front


def test_no_choice_repeats_less_in_as_many_bytes(front):
    for peak, flops in enumerated():
        fitting = [point.recomputed_flops for point in front if point.peak_bytes <= peak]
        assert min(fitting) <= 1.05 * flops


def test_the_predicted_peak_never_falls_when_the_budget_rises(front):
    peaks = [point.peak_bytes for point in front]
    flops = [point.recomputed_flops for point in front]
    assert peaks == sorted(peaks) and flops == sorted(flops, reverse=True)
    for at in (0, len(front) // 2, len(front) - 1):
        chosen = plan(make(), X, budget_bytes=peaks[at] + 1)
        assert chosen.fits and chosen.chosen == front[at]


def test_a_verified_plan_fits_by_the_compilers_figure(front):
    for budget in (front[1].peak_bytes, front[-2].peak_bytes):
        verified = plan(make(), X, budget_bytes=budget, verify=True)
        assert verified.fits and verified.compiled_peak_bytes <= budget
        assert "compiled at" in verified.reason


def test_verification_goes_on_where_the_compiler_disagrees(front, monkeypatch):
    budget = front[1].peak_bytes

    def compiled_bytes(policy):
        peak = budget if policy == front[1].policy else 2**50
        return {"argument_bytes": peak, "output_bytes": 0, "temp_bytes": 0}

    policy_of = lambda call, *_: call.stacks[0].gradient_checkpointing  # noqa: E731
    monkeypatch.setattr(_plan, "compile_step", policy_of)
    monkeypatch.setattr(_plan, "compiled_bytes", compiled_bytes)
    for given in (budget - 1, budget, front[2].peak_bytes):
        verified = plan(make(), X, budget_bytes=given, verify=True)
        assert verified.fits == (given >= budget) and verified.policy == front[1].policy
        assert verified.compiled_peak_bytes == budget


def test_what_is_near_a_budget_comes_in_the_order_of_what_it_repeats(front):
    search = Search(as_call(make(), (X,), "plan"), None, None)
    for point in front:
        near = list(search.near(point.peak_bytes))
        again = [choice.recomputed_flops for choice in near]
        assert again == sorted(again) and point in near
        assert all(choice.peak_bytes <= 1.02 * point.peak_bytes for choice in near)


def test_guesses_are_right_where_each_name_changes_the_working_set_on_its_own():
    changes, sizes = {"a": -3, "b": 5, "c": 0, "d": -8}, {"a": 7, "b": 2, "c": 9, "d": 4}
    subsets = [
        Subset(names, {name: sizes[name] for name in names}, 100.0 - sum(map(ord, names)) / 10)
        for count in range(5)
        for names in itertools.combinations("abcd", count)
    ]
    peaks = [100 + sum(changes[n] + sizes[n] for n in subset.names) for subset in subsets]
    guesses = Guesses(subsets)
    for at in guesses.to_learn():
        guesses.learn(at, peaks[at])
    assert len(guesses.learned) == 10  # none, each, all but each, and all
    assert guesses.peaks() == peaks


def test_what_cannot_fit_says_what_comes_nearest(front):
    least = front[0].peak_bytes
    result = plan(make(), X, budget_bytes=least - 1)
    assert not result.fits
    assert result.chosen == result.least and result.least.peak_bytes == least
    assert result.policy == ScanCheckpointPolicy(slots=1)
    assert "Nothing fits" in result.reason and "slots=1" in str(result)


def layers(stack=None):
    call = as_call(make() if stack is None else stack, (X,), "plan")
    with platform_warnings_ignored():
        return layers_of(trace(call.with_remat("none"), None, "plan"))


def test_the_model_of_a_layer_agrees_with_the_traced_program():
    (layer,) = layers()
    for names in ([], ["up"], ["sine"], ["up", "sine"], ["down"]):
        policy = ScanCheckpointPolicy(save_block_internals=names) if names else True
        kept, flops = layer.keep(names)
        if set(kept) == set(names):
            report = explain(make(), X, remat=policy)
            assert flops == report.recomputed_flops
            rows = [r for r in report.residuals if r.name in names]
            assert kept == {n: sum(r.bytes for r in rows if r.name == n) for n in names}
        else:
            assert names == ["down"] and not kept


def test_names_that_save_nothing_are_not_considered():
    subsets = {subset.names for subset in subsets_of(layers(), {"up", "sine", "down"})}
    assert subsets == {(), ("up",), ("sine",), ("up", "sine")}


class Fused(eqx.Module):
    """One product for two values, each of which has to be kept to save it."""

    weight: jax.Array

    def __init__(self, *, key):
        self.weight = jr.normal(key, (WIDTH, 2 * WIDTH))

    def __call__(self, x):
        gate, up = jnp.split(x @ self.weight, 2, axis=-1)
        return x + checkpoint_name(gate, "gate") * checkpoint_name(up, "up")


def test_names_that_save_something_only_together_are_considered_together():
    stack = Stacked.init(hax.Axis("layers", N), Fused)(key=jr.key(0))
    assert {subset.names for subset in subsets_of(layers(stack), {"gate", "up"})} == {
        (),
        ("gate", "up"),
    }


def test_names_are_found_in_calls_and_in_loops_over_batches():
    def loss(stack, x):
        return stack.fold(x).sum()

    def over_batches(stack, xs):
        return jax.lax.map(lambda x: loss(stack, x), xs).sum()

    plain = plan(loss, make(), X, budget_bytes="1 GiB", argnums=0).front
    for _ in range(2):  # the second time JAX knows the program
        jitted = plan(jax.jit(loss), make(), X, budget_bytes="1 GiB", argnums=0).front
        assert [p.policy for p in jitted] == [p.policy for p in plain]
    xs = jax.ShapeDtypeStruct((3, *X.shape), X.dtype)
    front = plan(over_batches, make(), xs, budget_bytes="1 GiB", argnums=0).front
    assert any(point.policy.saved_names for point in front)


class Nameless(eqx.Module):
    """A product."""

    weight: jax.Array

    def __init__(self, *, key):
        self.weight = jr.normal(key, (WIDTH, WIDTH))

    def __call__(self, x):
        return x + jnp.tanh(x @ self.weight)


def test_only_policies_that_every_stack_accepts_are_considered():
    def f(stacks, x):
        x = checkpoint_name(jnp.sin(x), "outside")
        return stacks["b"].fold(stacks["a"].fold(x)).sum()

    nameless = Stacked.init(hax.Axis("layers", 2), Nameless)(key=jr.key(0))
    one = plan(f, {"a": make(), "b": make(n=3)}, X, budget_bytes="1 GiB", argnums=0).front
    assert any(point.policy.saved_names for point in one)
    assert all("outside" not in point.policy.saved_names for point in one)
    two = plan(f, {"a": make(), "b": nameless}, X, budget_bytes="1 GiB", argnums=0).front
    assert not any(point.policy.saved_names for point in two)  # they would be refused


def test_blocks_in_a_python_loop_have_names_to_choose_from():
    assert ("up", "sine") in {
        s.names for s in subsets_of(layers(make(BlockSeq, 2)), {"up", "sine"})
    }


def offloads(point):
    return point.policy.save_carries == "offload" or bool(point.policy.offloaded_names)


def test_the_host_is_used_only_where_it_is_one_unless_asked(front):
    assert not any(map(offloads, front))  # a CPU has no other memory
    with platform_warnings_ignored():
        asked = plan(make(), X, budget_bytes="1 GiB", offload=True)
    assert any(offloads(point) and point.offloaded_bytes > 0 for point in asked.front)
    assert not offloads(asked.chosen)  # there is room for all on the device


def test_no_more_is_moved_to_the_host_than_the_budget_needs():
    with platform_warnings_ignored():
        front = plan(make(), X, budget_bytes="1 GiB", offload=True).front
        names = {"up", "sine"}
        all_moved = next(p for p in front if set(p.policy.offloaded_names) == names)
        moved = [
            plan(make(), X, budget_bytes=all_moved.peak_bytes + more, offload=True).chosen
            for more in (0, N * ROWS * WIDTH * 4, N * ROWS * HIDDEN * 4)
        ]
    assert moved[0].policy == all_moved.policy
    assert set(moved[1].policy.offloaded_names) == names and moved[1].policy.save_carries is True
    assert len(moved[2].policy.offloaded_names) == len(moved[2].policy.saved_names) == 1
    assert len({point.recomputed_flops for point in moved}) == 1


def test_a_function_of_two_stacks_gets_one_policy_for_both():
    def f(stacks, x):
        return stacks["a"].fold(stacks["b"].fold(x)).sum()

    stacks = {"a": make(), "b": make(n=3)}
    chosen = plan(f, stacks, X, budget_bytes="1 GiB", argnums=0)
    assert chosen.policy == ScanCheckpointPolicy(disable=True)
    assert any(point.policy.saved_names for point in chosen.front)


def test_arguments_on_the_host_do_not_count_against_the_budget():
    x = jax.device_put(jnp.ones((X.shape[0], WIDTH)), jax.memory.Space.Host)

    def loss(stack, x):
        return stack.fold(jax.device_put(x, jax.memory.Space.Device)).sum()

    with pytest.raises(ValueError, match="below the arguments alone"):
        plan(loss, make(), X, budget_bytes=WEIGHT_BYTES + 1, argnums=0)
    with platform_warnings_ignored():
        assert not plan(loss, make(), x, budget_bytes=WEIGHT_BYTES + 1, argnums=0).fits


def test_a_plan_can_be_written_as_json_and_used_as_it_is():
    chosen = plan(make(), X, budget_bytes="1 GiB")
    row = chosen.to_dict()["chosen"]
    assert row["policy"] == "ScanCheckpointPolicy(disable=True)"
    assert row["peak_bytes"] == chosen.chosen.peak_bytes
    assert make().with_policy(chosen.policy).gradient_checkpointing == chosen.policy


@pytest.mark.parametrize("container", [Stacked, BlockSeq])
def test_a_call_with_a_policy_of_its_own_is_warned_of(container):
    def pinned(stack, x):
        return stack.fold(x, remat="none").sum()

    with pytest.warns(UserWarning, match="remat='none', which wins over the policies that"):
        explain(pinned, make(container, 2), X, remat="save_all")
    with pytest.warns(UserWarning, match="leave it out"):
        plan(pinned, make(container, 2), X, budget_bytes="1 GiB")
    with platform_warnings_ignored():
        explain(pinned, make(container, 2), X)  # nothing else is tried


WEIGHT_BYTES = N * 2 * WIDTH * HIDDEN * 4
BAD_CALLS = {
    "budget below the weights": (
        lambda: plan(make(), X, budget_bytes=WEIGHT_BYTES - 1),
        ValueError,
        "below the arguments alone",
    ),
    "no unit": (lambda: plan(make(), X, budget_bytes="64 parsecs"), ValueError, "64 parsecs"),
    "no stack": (
        lambda: plan(lambda x: x.sum(), X, budget_bytes="1 GiB"),
        TypeError,
        "plan has no policy to choose",
    ),
    "no array": (lambda: plan(make(), "x", budget_bytes="1 GiB"), TypeError, "'x', a str"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_named(name):
    call, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        call()


def test_points_between_two_traced_ones_are_those_that_a_trace_would_give():
    front = plan(make(n=12), X, budget_bytes="1 GiB").front
    slots = [point for point in front if point.policy.slots and 2 < point.policy.slots < 11]
    assert len(slots) > 3
    for point in slots:
        report = explain(make(n=12), X, remat=point.policy)
        assert point.recomputed_flops == pytest.approx(report.recomputed_flops, rel=1e-9)
        assert point.peak_bytes == pytest.approx(report.peak_bytes, rel=1e-3)
