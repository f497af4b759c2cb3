"""Operations are counted to the unit: whole steps, the forward pass, and what is done again."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from haliax import Axis

from stackax import ScanCheckpointPolicy, Stacked
from stackax._loop.schedule import compile_tree, schedule_for
from stackax.memory import explain

N, ROWS, WIDTH = 7, 3, 5
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
WEIGHTS = jax.ShapeDtypeStruct((N, WIDTH, WIDTH), jnp.float32)
DOT = 2 * ROWS * WIDTH * WIDTH
ELEMENTS = ROWS * WIDTH


class Sine(eqx.Module):
    """sin(sin(x w) v): two products, of which a backward pass repeats both."""

    w: jax.Array
    v: jax.Array

    def __init__(self, *, key):
        self.w = self.v = jr.normal(key, (WIDTH, WIDTH))

    def __call__(self, x):
        return jnp.sin(jnp.sin(x @ self.w) @ self.v)


def stack(n=N):
    return Stacked.init(Axis("layers", n), Sine)(key=jr.key(0))


def test_a_chain_of_products():
    report = explain(lambda w, x: (x @ w[0]).sum(), WEIGHTS, X)
    assert report.forward_flops == DOT + ELEMENTS
    assert report.flops >= 3 * DOT  # a product for each gradient
    assert report.recomputed_flops == 0 and report.forward_evaluations == 1


# Of a layer, its backward pass repeats both products and the inner sine; and takes both cosines,
# which are none of the forward pass's.
AGAIN = 2 * DOT + ELEMENTS
COSINES = 2 * ELEMENTS
LAYER = 2 * DOT + 2 * ELEMENTS


def test_simple_remat_repeats_each_layer_once():
    report = explain(stack(), X, remat=True)
    assert report.forward_flops == N * LAYER
    assert report.recomputed_flops == N * (AGAIN + COSINES)


SCHEDULES = [dict(slots=1), dict(slots=2), dict(slots=3), dict(nested=True), dict(nested=(3, 2))]


@pytest.mark.parametrize("fields", SCHEDULES, ids=str)
def test_a_schedule_repeats_what_its_program_says(fields):
    tree = schedule_for(N, nested=fields.get("nested", False), slots=fields.get("slots"))
    advanced = compile_tree(tree).evaluations - 2 * N
    report = explain(stack(), X, remat=ScanCheckpointPolicy(**fields))
    assert report.recomputed_flops == N * (AGAIN + COSINES) + advanced * LAYER
    assert not report.has_unknown_loops


def test_the_step_without_remat_and_with_it_differ_by_what_is_repeated():
    none, simple = (explain(stack(), X, remat=remat) for remat in (False, True))
    assert simple.flops - none.flops == simple.recomputed_flops - N * COSINES


def test_a_loop_of_unknown_length_is_counted_once_and_said_to_be():
    def f(x):
        steps = jax.lax.stop_gradient(x[0, 0]).astype(int)
        shift = jax.lax.while_loop(lambda i: i < steps, lambda i: i + 1, 0)
        return (x * shift).sum()

    assert explain(f, X).has_unknown_loops


def test_the_dearest_branch_of_a_cond_counts():
    def f(x):
        return jax.lax.cond(x[0, 0] > 0, lambda: x @ jnp.ones((WIDTH, WIDTH)), lambda: x).sum()

    assert explain(f, X).forward_flops >= DOT


def test_convolutions_and_grouped_products_count_their_multiplies():
    images, kernel = jnp.ones((1, 4, 8, 8)), jnp.ones((6, 2, 3, 3))

    def convolve(kernel):
        return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", feature_group_count=2)

    report = explain(convolve, kernel)
    assert report.forward_flops == 2 * (6 * 8 * 8) * (2 * 3 * 3)

    def ragged(w):
        return jax.lax.ragged_dot(jnp.ones((10, 4)), w, jnp.array([3, 7]))

    assert explain(ragged, jnp.ones((2, 4, 6))).forward_flops == 2 * 10 * 4 * 6
