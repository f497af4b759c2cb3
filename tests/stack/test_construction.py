"""Making stacks: from Haliax modules, any Equinox class, a factory, or finished layers."""

import dataclasses

import equinox as eqx
import haliax as hax
import haliax.nn
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from stackax import BlockFoldable, BlockSeq, ScanCheckpointPolicy, Stacked, per_layer, shared
from tests.reference.programs import relative_error
from tests.zoo import BLOCKS, CONTAINERS, EMBED, NAMED_MLP, Embed, NamedMlp, layers

N = 3


def arrays(tree):
    """The arrays of a tree, with typed keys as integers."""
    filtered = eqx.filter(tree, eqx.is_array)
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return jax.tree.map(lambda x: jr.key_data(x) if is_key(x) else x, filtered)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_init_makes_the_layers_that_a_loop_over_split_keys_makes(block, container):
    made = block.stack(N, container=container).unstacked()
    assert len(made) == N
    for actual, expected in zip(made, block.layer_list(N), strict=True):
        assert relative_error(arrays(actual), arrays(expected)) <= 1e-6


@pytest.mark.parametrize("container", CONTAINERS)
def test_an_equinox_class_without_init_is_constructed_itself(container):
    stack = container.init(layers(N), eqx.nn.Linear)(4, 4, key=jr.key(0))
    x = jnp.ones(4)
    expected = x
    for key in jr.split(jr.key(0), N):
        expected = eqx.nn.Linear(4, 4, key=key)(expected)
    np.testing.assert_allclose(stack.fold(x), expected, rtol=1e-5)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize(
    "module, args, kwargs",
    [
        (eqx.nn.MLP, (4, 4, 8, 1), {}),
        (eqx.nn.LayerNorm, (4,), {}),
        (eqx.nn.GRUCell, (4, 4), {}),
        (eqx.nn.Conv1d, (2, 2, 3), {"padding": 1}),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_other_equinox_classes_stack_too(container, module, args, kwargs):
    keys = {} if module is eqx.nn.LayerNorm else {"key": jr.key(0)}
    stack = container.init(layers(N), module)(*args, **kwargs, **keys)
    assert len(stack) == N and isinstance(stack[1], module)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_factory_is_called_once_per_layer_with_its_own_key(container):
    def make(width, *, key, scale):
        return NamedMlp.init(key=key) if width == EMBED and scale == 2.0 else None

    stack = container.init(layers(N), make)(EMBED, key=jr.key(0), scale=2.0)
    for actual, expected in zip(stack.unstacked(), NAMED_MLP.layer_list(N), strict=True):
        assert relative_error(arrays(actual), arrays(expected)) <= 1e-6


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_key_for_each_layer_is_taken_as_given(container):
    keys = jr.split(jr.key(3), N)
    stack = container.init(layers(N), NamedMlp)(key=keys)
    for actual, key in zip(stack.unstacked(), keys, strict=True):
        assert relative_error(arrays(actual), arrays(NamedMlp.init(key=key))) <= 1e-6


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_shared_key_makes_equal_layers(container):
    stack = container.init(layers(N), NamedMlp)(key=shared(jr.key(3)))
    assert relative_error(arrays(stack[0]), arrays(stack[2])) == 0


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("count", [N - 1, N + 1])
def test_another_number_of_keys_raises_and_names_the_argument(container, count):
    with pytest.raises(ValueError, match="key"):
        container.init(layers(N), NamedMlp)(key=jr.split(jr.key(0), count))


class Given(eqx.Module):
    """A module of what it was given."""

    named: hax.NamedArray
    table: hax.NamedArray
    plain: jax.Array
    rate: float
    word: str = eqx.field(static=True)

    @staticmethod
    def init(named, table, plain, rate, word):
        return Given(named, table, plain, rate, word)

    def __call__(self, x):
        return x * self.named * self.plain * self.rate + hax.sum(self.table)


def given(container):
    Layers = layers(N)
    named = hax.named(jnp.arange(N * EMBED, dtype=jnp.float32).reshape(EMBED, N), (Embed, Layers))
    table = hax.arange(hax.Axis("table", 5)) * 1.0
    make = container.init(Layers, Given)
    return make(named, table, plain=per_layer(jnp.arange(3.0)), rate=0.5, word="w"), named, table


@pytest.mark.parametrize("container", CONTAINERS)
def test_init_slices_named_arguments_on_the_layers_axis_and_shares_the_rest(container):
    stack, named, table = given(container)
    for i, block in enumerate(stack):
        np.testing.assert_array_equal(block.named.array, named["layers", i].array)
        assert block.named.axes == (Embed,)
        np.testing.assert_array_equal(block.table.array, table.array)
        assert block.plain.shape == () and block.plain == i
        assert block.rate == 0.5 and block.word == "w"


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_positional_name_of_the_axis_is_haliaxs(container):
    stack = container.init(Block=layers(N), module=NamedMlp)(key=jr.key(0))
    assert stack.Block == layers(N) and stack.Layers == layers(N)


@pytest.mark.parametrize("container", CONTAINERS)
def test_an_axis_must_be_given_as_an_axis(container):
    with pytest.raises((TypeError, ValueError), match="Axis"):
        container.init("layers", NamedMlp)(key=jr.key(0))


def test_init_works_inside_jit_and_eval_shape():
    make = Stacked.init(layers(N), NamedMlp)
    eager = make(key=jr.key(0))
    jitted = eqx.filter_jit(make)(key=jr.key(0))
    assert relative_error(arrays(jitted), arrays(eager)) <= 1e-6
    shapes = eqx.filter_eval_shape(make, key=jr.key(0))
    assert shapes.stacked.up.axes == eager.stacked.up.axes


# from_layers


@pytest.mark.parametrize("container", CONTAINERS)
def test_from_layers_keeps_the_layers(container):
    layer_list = NAMED_MLP.layer_list(N)
    stack = container.from_layers(layer_list)
    assert stack.Layers == hax.Axis("layers", N)
    for actual, expected in zip(stack, layer_list, strict=True):
        assert relative_error(arrays(actual), arrays(expected)) == 0


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("axis", ["depth", hax.Axis("depth", N)], ids=["name", "axis"])
def test_from_layers_takes_a_name_or_an_axis(container, axis):
    stack = container.from_layers(NAMED_MLP.layer_list(N), Layers=axis)
    assert stack.Layers == hax.Axis("depth", N)


@pytest.mark.parametrize("container", CONTAINERS)
def test_from_layers_takes_any_sequence_and_an_iterator(container):
    layer_list = NAMED_MLP.layer_list(N)
    assert len(container.from_layers(tuple(layer_list))) == N
    assert len(container.from_layers(iter(layer_list))) == N


@pytest.mark.parametrize("container", CONTAINERS)
def test_from_layers_raises_when_the_axis_has_another_size(container):
    with pytest.raises(ValueError, match="4"):
        container.from_layers(NAMED_MLP.layer_list(N), Layers=hax.Axis("layers", 4))


def test_stacked_from_no_layers_raises():
    with pytest.raises(ValueError, match="layer"):
        Stacked.from_layers([])


class Odd(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return x * self.weight


@pytest.mark.parametrize(
    "odd",
    [Odd(jnp.ones(5)), Odd(jnp.ones(4, jnp.int32)), eqx.nn.LayerNorm(4)],
    ids=["shape", "dtype", "class"],
)
def test_stacked_from_unlike_layers_raises_and_says_which(odd):
    with pytest.raises(ValueError, match="2") as raised:
        Stacked.from_layers([Odd(jnp.ones(4)), Odd(jnp.ones(4)), odd])
    assert "BlockSeq" in str(raised.value)


def test_a_block_seq_holds_unlike_layers():
    seq = BlockSeq.from_layers([Odd(jnp.full(4, 2.0)), eqx.nn.Linear(4, 4, key=jr.key(0))])
    x = jnp.ones(4)
    np.testing.assert_allclose(seq.fold(x), seq[1](2 * x), rtol=1e-6)


def test_layers_that_differ_in_a_static_field_do_not_stack():
    linear = [eqx.nn.Linear(4, 4, use_bias=b, key=jr.key(0)) for b in (True, False)]
    with pytest.raises(ValueError):
        Stacked.from_layers(linear)


def test_from_layers_is_differentiable():
    weights = jnp.arange(1.0, 4.0)
    product = lambda ws: Stacked.from_layers([Odd(w) for w in ws]).fold(jnp.ones(()))  # noqa: E731
    np.testing.assert_allclose(jax.grad(product)(weights), 6 / weights, rtol=1e-6)


# Types


def test_stacked_is_an_instance_of_haliaxs_stacked():
    assert isinstance(NAMED_MLP.stack(N), haliax.nn.Stacked)
    assert isinstance(Stacked.from_layers(NAMED_MLP.layer_list(N)), haliax.nn.Stacked)


def test_a_module_that_is_no_stack_is_still_no_instance_of_haliaxs_stacked():
    assert not isinstance(NAMED_MLP.layer_list(1)[0], haliax.nn.Stacked)
    assert not isinstance(3, haliax.nn.Stacked)


@pytest.mark.parametrize("kind", [Stacked, BlockSeq, BlockFoldable])
def test_containers_can_be_subscripted_with_their_block(kind):
    class Model(eqx.Module):
        blocks: kind[NamedMlp]  # pyright: ignore[reportInvalidTypeForm]

    assert Model(NAMED_MLP.stack(N)).blocks.Layers.size == N


@pytest.mark.parametrize("container", CONTAINERS)
def test_replace_swaps_a_field(container):
    stack = NAMED_MLP.stack(N, container=container)
    policy = ScanCheckpointPolicy(slots=2)
    replaced = dataclasses.replace(stack, gradient_checkpointing=policy)
    assert replaced.gradient_checkpointing == policy and replaced.Layers == stack.Layers


def test_fields_have_haliaxs_names():
    names = [field.name for field in dataclasses.fields(Stacked)]
    assert names[:3] == ["stacked", "Block", "gradient_checkpointing"]
    names = [field.name for field in dataclasses.fields(BlockSeq)]
    assert names[:3] == ["blocks", "Block", "gradient_checkpointing"]


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_stack_is_a_pytree_of_its_parameters(container):
    stack = NAMED_MLP.stack(N, container=container)
    doubled = jax.tree.map(lambda x: 2 * x, stack)
    np.testing.assert_allclose(doubled[1].up.array, 2 * stack[1].up.array)


@pytest.mark.parametrize("container", CONTAINERS)
def test_tree_at_reaches_into_a_stack(container):
    stack = Stacked.init(layers(N), eqx.nn.Linear)(4, 4, key=jr.key(0))
    zeroed = eqx.tree_at(lambda s: s.stacked.bias, stack, jnp.zeros((N, 4)))
    assert jnp.all(zeroed[2].bias == 0)


@pytest.mark.parametrize("container", CONTAINERS)
def test_with_policy_changes_the_policy_and_nothing_else(container):
    stack = NAMED_MLP.stack(N, container=container)
    changed = stack.with_policy("nested")
    assert type(changed) is container
    assert changed.gradient_checkpointing == ScanCheckpointPolicy(nested=True)
    assert relative_error(arrays(changed.unstacked()), arrays(stack.unstacked())) == 0
    assert stack.gradient_checkpointing == ScanCheckpointPolicy(disable=True)
    with pytest.raises(ValueError, match="nested"):
        stack.with_policy("nestd")


DIFFERENCES = {
    "a size": (eqx.nn.Linear(4, 5, key=jr.key(0)), r"at \.weight: it is float32\[5, 4\], not"),
    "a missing array": (
        eqx.nn.Linear(4, 4, use_bias=False, key=jr.key(0)),
        r"at \.bias: it is None, not float32\[4\]",
    ),
    "a class": (eqx.nn.MLP(4, 4, 4, 1, key=jr.key(0)), "it is MLP, not Linear"),
}


@pytest.mark.parametrize("name", DIFFERENCES)
def test_blocks_that_differ_are_refused_with_the_place_where_they_do(name):
    other, message = DIFFERENCES[name]
    with pytest.raises(ValueError, match=message):
        Stacked.from_layers([eqx.nn.Linear(4, 4, key=jr.key(0)), other])


def test_blocks_of_other_depth_are_refused_with_their_lengths():
    shallow, deep = (eqx.nn.MLP(4, 4, 4, depth, key=jr.key(0)) for depth in (1, 2))
    with pytest.raises(ValueError, match=r"at \.layers: it is 3 long, not 2 long"):
        Stacked.from_layers([shallow, deep])
