"""Law: whatever a step does, a loop that owns its backward pass does what the Python loop does.

A step is a function of the library's `scan`; each row is a thing that loops are known to trip over.
"""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from stackax import ScanCheckpointPolicy, scan
from tests.reference.loops import stack_trees
from tests.reference.programs import plain, relative_error, run_together, take
from tests.zoo import SLOTS1, layers

N = 2
POLICIES = (SLOTS1,)
Layers = layers(N)
WEIGHTS = jnp.linspace(0.5, 1.5, N * 3).reshape(N, 3)
X = jnp.asarray([0.3, -0.2, 0.8])


@dataclasses.dataclass(frozen=True)
class Case:
    """A step, and what it is called with.

    Attributes:
        step: `step(carry, weight, closed) -> (carry, output)`; `closed` is closed over.
        carry: the first carry as a function of a float array.
        read: the float array of the last carry and outputs that the loss is made of.
    """

    step: Callable
    carry: Callable = lambda x: x
    read: Callable = lambda carry, outputs: (carry, outputs)


def plain_step(c, w, closed):
    c = jnp.sin(c * w) + closed
    return c, c * c


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, ct: (jnp.clip(ct, -0.1, 0.1),))


@jax.custom_jvp
def softened(x):
    return jnp.abs(x)


softened.defjvp(lambda p, t: (softened(*p), jnp.tanh(*p) * t[0]))


def with_key(c, w, closed):
    x, key = c
    key, own = jr.split(key)
    x = jnp.sin(x * w) + closed * jr.normal(own, x.shape)
    return (x, key), jr.key_data(own)


def with_counter(c, w, closed):
    x, n, seen = c
    x = jnp.where(n % 2 == 0, jnp.sin(x * w), jnp.cos(x * w)) + closed
    return (x, n + 1, seen.at[n].set(True)), (n, seen)


def with_gather(c, w, closed):
    x, i = c
    return (jnp.sin(x * w) + closed * x[i], (i + 1) % 3), w[i]


def with_inner_loops(c, w, closed):
    c = jax.lax.fori_loop(0, 3, lambda _, c: jnp.sin(c * w) + closed, c)
    c = jax.lax.cond(c[0] > 0, lambda c: c * w, lambda c: c - w, c)
    return jax.lax.scan(lambda c, v: (c + v * w, c[0]), c, jnp.arange(2.0))


def with_named(c, w, closed):
    named = hax.named(c["x"].array * w + closed, "three")
    return {"x": hax.sin(named), "none": None}, {"named": named, "none": None}


CASES = {
    "plain": Case(plain_step),
    "only the carry matters": Case(plain_step, read=lambda carry, outputs: carry),
    "only the outputs matter": Case(plain_step, read=lambda carry, outputs: outputs),
    "only one output matters": Case(plain_step, read=lambda carry, outputs: outputs[1]),
    "nothing matters": Case(plain_step, read=lambda carry, outputs: jnp.zeros(())),
    "the carry is not read": Case(lambda c, w, closed: (jnp.sin(w) + closed, w * c[0])),
    "the weight is not read": Case(lambda c, w, closed: (jnp.sin(c) * closed, None)),
    "the carry is only passed on": Case(lambda c, w, closed: (c, w * closed)),
    "the output is the weight": Case(lambda c, w, closed: (jnp.sin(c * w) + closed, w)),
    "the output is the carry": Case(lambda c, w, closed: (jnp.sin(c * w) + closed, c)),
    "custom_vjp": Case(lambda c, w, closed: (clipped(jnp.sin(c * w)) + closed, None)),
    "custom_jvp": Case(lambda c, w, closed: (softened(c * w) + closed, softened(w))),
    "stop_gradient": Case(lambda c, w, closed: (jnp.sin(c * jax.lax.stop_gradient(w)) + closed, w)),
    "a key in the carry": Case(with_key, lambda x: (x, jr.key(3)), lambda c, o: c[0]),
    "integers and bools in the carry": Case(
        with_counter, lambda x: (x, jnp.asarray(0), jnp.zeros(N, bool)), lambda c, o: c[0]
    ),
    "an index in the carry": Case(
        with_gather, lambda x: (x, jnp.asarray(0)), lambda c, o: (c[0], o)
    ),
    "loops and branches inside": Case(with_inner_loops),
    "named arrays and None in a dict": Case(
        with_named, lambda x: {"x": hax.named(x, "three"), "none": None}
    ),
    "bfloat16 inside": Case(
        lambda c, w, closed: (
            jnp.sin(c * w) + closed * jnp.sum(w.astype(jnp.bfloat16)).astype(jnp.float32),
            None,
        )
    ),
    "complex numbers": Case(
        lambda c, w, closed: (c * jnp.exp(1j * w) + closed, None),
        lambda x: x.astype(jnp.complex64),
        lambda c, o: jnp.real(c) + jnp.imag(c) ** 2,
    ),
    "an array of no elements": Case(
        lambda c, w, closed: ((jnp.sin(c[0] * w) + closed, c[1]), c[1]),
        lambda x: (x, jnp.zeros((0, 2))),
        lambda c, o: c[0],
    ),
    "no arrays in the carry": Case(
        lambda c, w, closed: (None, jnp.sin(w) * closed), lambda x: None
    ),
    "a Python number as the carry": Case(
        lambda c, w, closed: (c * jnp.sum(w) + closed, None), lambda x: 1.0
    ),
}


def by_scan(remat, case: Case, weights, x, closed):
    step = lambda carry, w: case.step(carry, w, closed)  # noqa: E731
    return scan(step, Layers, remat=remat)(case.carry(x), weights)


def by_python(case: Case, weights, x, closed):
    carry, outputs = case.carry(x), []
    for w in weights:
        carry, output = case.step(carry, w, closed)
        outputs.append(output)
    return carry, stack_trees(outputs)


def differentiated(run):
    def loss(case, weights, x, closed):
        carry, outputs = run(case, weights, x, closed)
        read = jax.tree.leaves(case.read(carry, outputs))
        total = sum(jnp.sum(leaf * jnp.asarray(0.7)) for leaf in read if leaf.dtype != bool)
        return total, plain((carry, outputs))

    return lambda case: jax.grad(ft.partial(loss, case), argnums=(0, 1, 2), has_aux=True)


LOOPS = {
    "python": differentiated(by_python),
    **{policy.name: differentiated(ft.partial(by_scan, policy.spec)) for policy in POLICIES},
}


@ft.cache
def results() -> dict[Any, Any]:
    programs = {(c, loop): make(CASES[c]) for c in CASES for loop, make in LOOPS.items()}
    return run_together(programs, WEIGHTS, X, jnp.asarray(0.1))


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_are_those_of_the_python_loop(case, policy):
    actual, expected = take(results(), (case, policy.name)), take(results(), (case, "python"))
    assert relative_error(actual, expected) <= 2e-6


# A loop inside other transformations of JAX


def fold_loss(remat, weights, x):
    step = lambda c, w: (jnp.sin(c * w) + 0.1, None)  # noqa: E731
    return jnp.sum(scan(step, Layers, remat=remat)(x, weights)[0])


def mapped_with_a_collective(remat, weights, x):
    def step(c, w):
        return jnp.sin(c * w) + jax.lax.pmean(c, "batch"), None

    run = lambda x: scan(step, Layers, remat=remat)(x, weights)[0]  # noqa: E731
    return jnp.sum(jax.vmap(run, axis_name="batch")(jnp.stack([x, 2 * x])))


def inside_a_scan(remat, weights, x):
    body = lambda c, s: (fold_loss(remat, weights * s, c * x), c)  # noqa: E731
    carry, outs = jax.lax.scan(body, jnp.asarray(1.0), jnp.asarray([0.5, 1.5]))
    return carry + jnp.sum(outs)


def inside_a_loop_of_its_own_kind(remat, weights, x):
    body = lambda c, s: (fold_loss(remat, weights * s[0], c * x), None)  # noqa: E731
    scales = jnp.asarray([[0.5], [1.5], [1.0]])
    return scan(body, "layers", remat=remat)(jnp.asarray(1.0), scales)[0]


def closed_over_batches(remat, weights, x):
    """The loop closes over what vmap has batched, and slices what it has not."""

    def run(y):
        step = lambda c, w: (jnp.sin(c * w * y), None)  # noqa: E731
        return jnp.sum(scan(step, Layers, remat=remat)(x, weights)[0])

    return jnp.sum(jax.vmap(run)(jnp.stack([x, 2 * x])))


INSIDE = {
    "checkpoint": lambda remat, w, x: jax.checkpoint(ft.partial(fold_loss, remat))(w, x),
    "jit": lambda remat, w, x: jax.jit(ft.partial(fold_loss, remat))(w, x),
    "cond": lambda remat, w, x: jax.lax.cond(
        x[0] > 0, ft.partial(fold_loss, remat), lambda w, x: jnp.sum(w), w, x
    ),
    "scan": inside_a_scan,
    "a loop under the same policy": inside_a_loop_of_its_own_kind,
    "vmap with a collective": mapped_with_a_collective,
    "vmap of a closure": closed_over_batches,
    "a gradient taken inside": lambda remat, w, x: fold_loss(
        False, w, jax.lax.stop_gradient(jax.grad(lambda x: fold_loss(remat, w, x))(x)) + x
    ),
}


@ft.cache
def inside_results() -> dict[Any, Any]:
    programs = {
        (place, policy.name): jax.grad(ft.partial(run, policy.spec), argnums=(0, 1))
        for place, run in INSIDE.items()
        for policy in POLICIES
    }
    references = {
        (place, "none"): jax.grad(ft.partial(run, False), argnums=(0, 1))
        for place, run in INSIDE.items()
    }
    return run_together(programs | references, WEIGHTS, X)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("place", INSIDE)
def test_a_loop_inside_another_transformation_has_the_same_gradient(place, policy):
    results = inside_results()
    actual, expected = take(results, (place, policy.name)), take(results, (place, "none"))
    assert relative_error(actual, expected) <= 2e-6


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_a_frozen_weight_costs_no_gradient(policy):
    """Differentiated for the carry alone, the loop keeps nothing for the weights' sake."""
    heavy = jnp.ones((N, 3, 50))
    step = lambda c, w: (jnp.sin(c * jnp.sum(w, -1)), None)  # noqa: E731
    loss = lambda x: jnp.sum(scan(step, Layers, remat=policy.spec)(x, heavy)[0])  # noqa: E731
    jaxpr = jax.make_jaxpr(jax.grad(loss))(X)
    made = [v.aval.shape for eqn in jaxpr.eqns for v in eqn.outvars]
    assert heavy.shape not in made


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
def test_integer_arguments_have_float0_gradients(policy):
    counts = jnp.arange(N)
    step = lambda c, w, n: (jnp.sin(c * w) * (1 + n), None)  # noqa: E731
    loss = lambda x, n: jnp.sum(scan(step, Layers, remat=policy.spec)(x, WEIGHTS, n)[0])  # noqa: E731
    gradient, of_counts = jax.grad(loss, argnums=(0, 1), allow_int=True)(X, counts)
    assert of_counts.dtype == jax.dtypes.float0 and of_counts.shape == (N,)
    assert np.all(np.isfinite(gradient))


def test_printing_inside_a_block_prints_once_per_evaluation(capsys):
    """Effects of a block are kept in the forward pass."""
    policy = ScanCheckpointPolicy(slots=2)

    def step(c, w):
        jax.debug.print("step")
        return jnp.sin(c * w), None

    jax.block_until_ready(scan(step, Layers, remat=policy)(X, WEIGHTS))
    jax.effects_barrier()
    assert capsys.readouterr().out.count("step") == N
