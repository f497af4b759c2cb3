"""Law: jit, vmap, jvp, linearize, second derivatives and their mixtures work under every policy.

All transformations of one policy are compiled as one program; the reference is the Python loop
under the same transformations.
"""

import functools as ft
import re

import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

from stackax import ScanCheckpointPolicy, Stacked, shared
from tests.reference.programs import relative_error, run_together, take
from tests.zoo import (
    AFFINE,
    BATCH,
    EMBED,
    NESTED,
    NONE,
    OFFLOADED_CARRIES,
    OFFLOADED_SLOTS,
    SIMPLE,
    SLOTS1,
    Policy,
    layers,
    platform_warnings_ignored,
)

N = 2
POLICIES = (
    NONE,
    SIMPLE,
    OFFLOADED_CARRIES,
    SLOTS1,
    OFFLOADED_SLOTS,
)
# JAX itself can't differentiate twice in reverse through a value that it sent to the host.
TWICE_REVERSIBLE = tuple(p for p in POLICIES if not p.scheduled and not p.offloads)


def stacked_loop(policy):
    """The network as a function of (parameters, carry, shift), run by a stack."""

    def run(blocks, x, shift):
        stack = Stacked(blocks, layers(N), ScanCheckpointPolicy())
        return stack.fold(x, shared(shift), remat=policy)

    return run


def python_loop(blocks, x, shift):
    """The same as a plain loop over the layers."""
    for i in range(N):
        x = jax.tree.map(lambda leaf, i=i: leaf[i], blocks)(x, shift)
    return x


def transformed(run):
    """One function per transformation of the loop, each of (parameters, carry, shift)."""
    loss = lambda blocks, x, shift: jnp.sum(jnp.sin(run(blocks, x, shift)))  # noqa: E731
    row = lambda x: x[0]  # noqa: E731
    of_row = lambda f: lambda b, x, s: f(lambda x: run(b, x[None], s)[0])(row(x))  # noqa: E731
    loss_of_row = lambda f: lambda b, x, s: f(lambda x: loss(b, x[None], s))(row(x))  # noqa: E731

    def jvp(blocks, x, shift):
        tangents = jax.tree.map(jnp.cos, (blocks, x, shift))
        return jax.jvp(run, (blocks, x, shift), tangents)

    def linearize(blocks, x, shift):
        out, linear = jax.linearize(lambda b, x: run(b, x, shift), blocks, x)
        return out, linear(jax.tree.map(jnp.cos, blocks), jnp.ones_like(x))

    def linear_transpose(blocks, x, shift):
        linear = jax.linearize(lambda x: run(blocks, x, shift), x)[1]
        return jax.linear_transpose(linear, x)(jnp.cos(x))

    def forward_over_reverse(blocks, x, shift):
        grad = jax.grad(loss, argnums=(0, 1, 2))
        tangents = jax.tree.map(jnp.cos, (blocks, x, shift))
        return jax.jvp(grad, (blocks, x, shift), tangents)

    def grad_of_vmap(blocks, x, shift):
        shifts = jnp.stack([shift, 2 * shift])
        many = jax.vmap(run, in_axes=(None, None, 0))
        return jax.grad(lambda b, x: jnp.sum(jnp.sin(many(b, x, shifts))), (0, 1))(blocks, x)

    def vmap_of_grad(blocks, x, shift):
        two = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.5 * leaf]), blocks)
        each = jax.vmap(jax.value_and_grad(loss, argnums=(0, 1)), in_axes=(0, 0, None))
        return each(two, x[:, None], shift)

    return {
        "jvp": jvp,
        "linearize": linearize,
        "linear_transpose": linear_transpose,
        "forward over reverse": forward_over_reverse,
        "hessian": loss_of_row(jax.hessian),
        "jacfwd": of_row(jax.jacfwd),
        "jacrev": of_row(jax.jacrev),
        "grad of vmap": grad_of_vmap,
        "vmap of grad": vmap_of_grad,
    }


def reverse_over_reverse(run):
    """The gradient of the squared norm of a gradient."""
    loss = lambda blocks, x, shift: jnp.sum(jnp.sin(run(blocks, x, shift)))  # noqa: E731

    def norm(blocks, x, shift):
        gradients = jax.grad(loss, argnums=(0, 1))(blocks, x, shift)
        return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(gradients))

    return jax.grad(norm, argnums=(0, 1))


TRANSFORMS = tuple(transformed(python_loop))


def arguments():
    stack = AFFINE.stack(N)
    return stack.stacked, jr.normal(jr.key(1), (BATCH, EMBED)), jnp.asarray(0.1)


@ft.cache
def results_of(policy: Policy | None):
    run = stacked_loop(policy.spec) if policy else python_loop
    programs = transformed(run)
    if policy is None or policy in TWICE_REVERSIBLE:
        programs["reverse over reverse"] = reverse_over_reverse(run)
    with platform_warnings_ignored():
        return run_together(programs, *arguments())


# Second derivatives are sums of cancelling terms an order larger than they are.
TOLERANCE = {"hessian": 5e-6, "forward over reverse": 5e-6, "reverse over reverse": 5e-6}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_transformation_equals_that_of_the_python_loop(policy, transform):
    actual, expected = (take(results_of(p), transform) for p in (policy, None))
    assert relative_error(actual, expected) <= TOLERANCE.get(transform, 1e-6)


@pytest.mark.parametrize("policy", TWICE_REVERSIBLE, ids=lambda p: p.name)
def test_reverse_over_reverse_works_without_a_schedule(policy):
    actual, expected = (take(results_of(p), "reverse over reverse") for p in (policy, None))
    assert relative_error(actual, expected) <= TOLERANCE["reverse over reverse"]


@pytest.mark.parametrize(
    "policy", [SLOTS1, NESTED, OFFLOADED_SLOTS], ids=lambda policy: policy.name
)
def test_reverse_over_reverse_of_a_schedule_raises_and_names_what_can(policy):
    run = reverse_over_reverse(stacked_loop(policy.spec))
    with platform_warnings_ignored(), pytest.raises(Exception) as raised:
        jax.eval_shape(run, *arguments())
    message = str(raised.value)
    assert re.search("revers", message) and re.search(r"simple|remat=True", message)


def test_reverse_over_forward_over_reverse_of_a_schedule_never_gives_a_wrong_number():
    """The third derivative through a schedule either equals the plain loop's or raises."""

    def third(run):
        loss = lambda x, b, s: jnp.sum(jnp.sin(run(b, x[None], s)))  # noqa: E731

        def curvature(blocks, x, shift):
            grad = jax.grad(lambda x: loss(x, blocks, shift))
            return jax.jvp(grad, (x[0],), (jnp.ones_like(x[0]),))[1]

        return lambda b, x, s: jax.grad(lambda x: jnp.sum(curvature(b, x, s)))(x)

    results = run_together(
        {"schedule": third(stacked_loop(SLOTS1.spec)), "loop": third(python_loop)}, *arguments()
    )
    if isinstance(results["schedule"], Exception):
        assert re.search(r"simple|remat=True", str(results["schedule"]))
    else:
        assert relative_error(results["schedule"], results["loop"]) <= 1e-5
