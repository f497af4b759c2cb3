"""A stack as a sequence of layers: length, indexing, slicing, iteration, replacement."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from stackax import Stacked
from tests.zoo import CONTAINERS, MANY_TYPES, NAMED_MLP, PLAIN_MLP, NamedMlp, PlainMlp, layers

N = 4


@pytest.fixture(params=CONTAINERS)
def stack(request):
    """Four layers whose gains are 0, 1, 2, 3."""
    return numbered(N, request.param)


def numbered(n: int, container):
    template = PLAIN_MLP.layer_list(1)[0]
    with_gain = lambda i: eqx.tree_at(lambda m: m.gain, template, jnp.asarray(float(i)))  # noqa: E731
    return container.from_layers([with_gain(i) for i in range(n)])


def gains(stack) -> list[float]:
    return [float(block.gain) for block in stack.unstacked()]


def test_len_is_the_number_of_layers(stack):
    assert len(stack) == N == stack.Layers.size


@pytest.mark.parametrize("index", [0, 1, N - 1, -1, -N, np.int64(2)], ids=repr)
def test_an_integer_gets_one_block(stack, index):
    for block in (stack[index], stack.get_layer(index)):
        assert isinstance(block, PlainMlp) and block.up.shape == (4, 8)
        assert float(block.gain) == range(N)[index]


@pytest.mark.parametrize("index", [N, N + 5, -N - 1], ids=repr)
def test_an_index_out_of_range_raises_and_says_how_many_layers_there_are(stack, index):
    for get in (stack.get_layer, stack.__getitem__):
        with pytest.raises(IndexError, match=str(N)):
            get(index)
    with pytest.raises(IndexError, match=str(N)):
        stack.set_layer(index, stack[0])


SLICES = [
    slice(None),
    slice(1, 3),
    slice(None, -1),
    slice(2, None),
    slice(None, None, 2),
    slice(None, None, -1),
    slice(3, 0, -2),
    slice(2, 2),
    slice(1, 100),
]


@pytest.mark.parametrize("piece", SLICES, ids=str)
def test_a_slice_gets_the_same_container_of_fewer_layers(stack, piece):
    cut = stack[piece]
    assert type(cut) is type(stack)
    expected = list(range(N))[piece]
    assert gains(cut) == expected and len(cut) == len(expected)
    assert cut.Layers == hax.Axis(stack.Layers.name, len(expected))
    assert cut.gradient_checkpointing == stack.gradient_checkpointing


def test_a_slice_runs(stack):
    x = jnp.ones((2, 4))
    np.testing.assert_allclose(stack[2:].fold(stack[:2].fold(x)), stack.fold(x), rtol=1e-6)


@pytest.mark.parametrize("index", ["a", 1.0, None, (0, 1)], ids=repr)
def test_what_is_neither_an_integer_nor_a_slice_raises_type_error(stack, index):
    with pytest.raises(TypeError):
        stack[index]


def test_iteration_yields_every_block_once_and_ends(stack):
    assert [float(block.gain) for block in stack] == [0, 1, 2, 3]


def test_reversed_yields_the_blocks_backwards(stack):
    assert [float(block.gain) for block in reversed(stack)] == [3, 2, 1, 0]


def test_a_plain_for_loop_over_the_stack_is_its_fold(stack):
    x = expected = jnp.ones((2, 4))
    for block in stack:
        expected = block(expected)
    np.testing.assert_allclose(stack.fold(x), expected, rtol=1e-6)


def test_unstacked_gives_all_blocks_in_order(stack):
    assert [float(block.gain) for block in stack.unstacked()] == [0, 1, 2, 3]


@pytest.mark.parametrize("index", [0, 2, -1])
def test_set_layer_replaces_one_layer_of_a_copy(stack, index):
    new = eqx.tree_at(lambda m: m.gain, stack[0], jnp.asarray(9.0))
    changed = stack.set_layer(index, new)
    expected = [0.0, 1.0, 2.0, 3.0]
    expected[index] = 9.0
    assert gains(changed) == expected and gains(stack) == [0, 1, 2, 3]
    assert type(changed) is type(stack) and changed.Layers == stack.Layers


@pytest.mark.parametrize(
    "wrong",
    [PlainMlp(4, 6, key=jr.key(0)), NAMED_MLP.layer_list(1)[0], eqx.nn.LayerNorm(4)],
    ids=["shapes", "class", "other class"],
)
def test_a_stacked_refuses_a_layer_that_does_not_fit(wrong):
    with pytest.raises((ValueError, TypeError)):
        numbered(N, Stacked).set_layer(1, wrong)


@pytest.mark.parametrize("block", [NAMED_MLP, MANY_TYPES], ids=lambda block: block.name)
@pytest.mark.parametrize("container", CONTAINERS)
def test_layers_of_every_kind_can_be_taken_out_and_put_back(container, block):
    stack = block.stack(N, container=container)
    back = stack.set_layer(1, stack[1])
    carry = block.carry(jr.key(0))
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(stack), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
    np.testing.assert_array_equal(
        jax.tree.leaves(back.fold(carry))[0], jax.tree.leaves(stack.fold(carry))[0]
    )


def test_named_arrays_lose_the_layers_axis_wherever_it_stands():
    Layers, Embed = layers(3), hax.Axis("embed", 4)

    class Bias(eqx.Module):
        last: hax.NamedArray

        def __call__(self, x):
            return x + self.last

    stacked = Bias(hax.named(jnp.arange(12.0).reshape(4, 3), (Embed, Layers)))
    stack = Stacked(stacked, Layers, NAMED_MLP.stack(1).gradient_checkpointing)
    assert stack[1].last.axes == (Embed,)
    np.testing.assert_array_equal(stack[1].last.array, [1, 4, 7, 10])
    np.testing.assert_array_equal(stack.fold(hax.zeros(Embed)).array, [3, 12, 21, 30])


def test_slicing_works_under_jit_and_is_differentiable(stack):
    x = jnp.ones((2, 4))

    def loss(stack):
        return jnp.sum(stack[1:3].fold(x)) + jnp.sum(stack[0].gain)

    gradient = eqx.filter_jit(eqx.filter_grad(loss))(stack)
    slopes = gains(gradient)
    assert slopes[0] == 1 and slopes[1] != 0 and slopes[2] != 0 and slopes[3] == 0


def test_the_named_module_is_returned_by_get_layer():
    assert isinstance(NAMED_MLP.stack(N).get_layer(1), NamedMlp)
