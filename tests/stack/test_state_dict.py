"""State dicts: one entry per layer and leaf, named as by torch's Sequential, read back strictly."""

import dataclasses

import equinox as eqx
import haliax as hax
import haliax.state_dict as hsd
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from stackax import BlockSeq, Stacked
from tests.zoo import CONTAINERS, NAMED_MLP, PLAIN_MLP, PlainMlp, layers

N = 3


@pytest.fixture(params=CONTAINERS)
def stack(request):
    return NAMED_MLP.stack(N, container=request.param)


def zeros_like(tree):
    return jax.tree.map(jnp.zeros_like, tree)


def assert_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("prefix", [None, "model.layers"])
def test_keys_are_the_layers_index_and_the_leafs_path(stack, prefix):
    start = f"{prefix}." if prefix else ""
    state = stack.to_state_dict(prefix)
    assert set(state) == {f"{start}{i}.{leaf}" for i in range(N) for leaf in ("up", "down", "gain")}
    for i, block in enumerate(NAMED_MLP.layer_list(N)):
        np.testing.assert_allclose(state[f"{start}{i}.up"], block.up.array, rtol=1e-6)


@pytest.mark.parametrize("prefix", [None, "h"])
def test_what_was_written_is_read_back(stack, prefix):
    state = stack.to_state_dict(prefix)
    assert_equal(zeros_like(stack).from_state_dict(state, prefix), stack)


@pytest.mark.parametrize("prefix", [None, "h"])
def test_haliaxs_functions_read_and_write_the_same(stack, prefix):
    state = hsd.to_state_dict(stack, prefix)
    assert set(state) == set(stack.to_state_dict(prefix))
    assert_equal(hsd.from_state_dict(zeros_like(stack), state, prefix), stack)


def test_both_containers_read_each_others_dicts():
    stacked, seq = (NAMED_MLP.stack(N, container=c) for c in CONTAINERS)
    assert_equal(zeros_like(stacked).from_state_dict(seq.to_state_dict("h"), "h"), stacked)
    for a, b in zip(
        zeros_like(seq).from_state_dict(stacked.to_state_dict("h"), "h"), seq, strict=True
    ):
        assert_equal(a, b)


@pytest.mark.parametrize("container", CONTAINERS)
def test_plain_arrays_are_written_and_read_too(container):
    stack = PLAIN_MLP.stack(N, container=container)
    state = stack.to_state_dict("h")
    assert set(state) == {f"h.{i}.{leaf}" for i in range(N) for leaf in ("up", "down", "gain")}
    assert_equal(zeros_like(stack).from_state_dict(state, "h"), stack)


def test_a_missing_layer_raises_and_is_named(stack):
    state = {k: v for k, v in stack.to_state_dict("h").items() if not k.startswith("h.1.")}
    with pytest.raises((KeyError, ValueError), match=r"h\.1\.|(?s:h.*layers \[1\])"):
        stack.from_state_dict(state, "h")


def test_fewer_layers_than_the_stack_has_raise(stack):
    state = {k: v for k, v in stack.to_state_dict("h").items() if not k.startswith("h.2.")}
    with pytest.raises((KeyError, ValueError), match=r"h\.2\.|3"):
        stack.from_state_dict(state, "h")


def test_more_layers_than_the_stack_has_raise(stack):
    longer = NAMED_MLP.stack(N + 1, container=type(stack))
    with pytest.raises((KeyError, ValueError), match=r"h\.3\.|3"):
        stack.from_state_dict(longer.to_state_dict("h"), "h")


def test_a_missing_leaf_of_one_layer_raises_and_is_named(stack):
    state = stack.to_state_dict("h")
    del state["h.1.gain"]
    with pytest.raises((KeyError, ValueError), match=r"h\.1\.gain"):
        stack.from_state_dict(state, "h")


def test_a_leaf_of_another_shape_raises(stack):
    state = stack.to_state_dict("h")
    state["h.1.up"] = jnp.zeros((2, 2))
    with pytest.raises((ValueError, TypeError)):
        stack.from_state_dict(state, "h")


def test_other_entries_of_the_dict_are_left_alone(stack):
    state = stack.to_state_dict("model.h") | {"model.embed": jnp.zeros(3), "modelXh.0.up": 1}
    assert_equal(zeros_like(stack).from_state_dict(state, "model.h"), stack)


def test_a_leaf_whose_own_name_is_a_number_is_no_layer():
    class Holder(eqx.Module):
        parts: list

        def __call__(self, x):
            return x

    for container in CONTAINERS:
        parts = lambda i: [jnp.full((2,), i), jnp.full((3,), 10 + i)]  # noqa: E731
        stack = container.from_layers([Holder(parts(float(i))) for i in range(N)])
        state = stack.to_state_dict("h")
        assert set(state) == {f"h.{i}.parts.{j}" for i in range(N) for j in range(2)}
        np.testing.assert_array_equal(state["h.2.parts.1"], [12, 12, 12])
        assert_equal(zeros_like(stack).from_state_dict(state, "h"), stack)


# Stacks of stacks


OUTER, INNER = 2, 3
LEAVES = ("named", "plain")


class Leaf(eqx.Module):
    """A block as small as can be, of both kinds of arrays."""

    named: hax.NamedArray
    plain: jax.Array

    @staticmethod
    def init(*, key):
        numbers = jr.uniform(key, (2,))
        return Leaf(hax.named(numbers, "two"), numbers[0])

    def __call__(self, x):
        return jnp.sin(x * self.plain) + self.named.array[1]


class Group(eqx.Module):
    """A block that holds a stack of blocks and a bias of its own."""

    inner: Stacked
    bias: jax.Array

    @staticmethod
    def init(*, key):
        return Group(make_inner(key=key), jr.uniform(key))

    def __call__(self, x):
        return self.inner.fold(x) + self.bias


def make_inner(*, key):
    return Stacked.init(hax.Axis("inner", INNER), Leaf)(key=key)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_stack_of_stacks_counts_the_outer_index_first(container):
    stack = container.init(layers(OUTER), make_inner)(key=jr.key(0))
    state = stack.to_state_dict()
    expected = {f"{i}.{j}.{leaf}" for i in range(OUTER) for j in range(INNER) for leaf in LEAVES}
    assert set(state) == expected
    for i in range(OUTER):
        for j in range(INNER):
            np.testing.assert_array_equal(state[f"{i}.{j}.named"], stack[i][j].named.array)
    assert_equal(zeros_like(stack).from_state_dict(state), stack)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_stack_inside_a_block_is_written_under_its_field(container):
    stack = container.init(layers(OUTER), Group)(key=jr.key(0))
    state = stack.to_state_dict("h")
    inner = {
        f"h.{i}.inner.{j}.{leaf}" for i in range(OUTER) for j in range(INNER) for leaf in LEAVES
    }
    assert set(state) == inner | {f"h.{i}.bias" for i in range(OUTER)}
    np.testing.assert_array_equal(state["h.1.inner.2.plain"], stack[1].inner[2].plain)
    assert_equal(zeros_like(stack).from_state_dict(state, "h"), stack)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_stack_of_stacks_folds_as_two_python_loops(container):
    stack = container.init(layers(OUTER), Group)(key=jr.key(0))
    x = expected = jnp.asarray(0.5)
    for i in range(OUTER):
        for j in range(INNER):
            expected = stack[i].inner[j](expected)
        expected = expected + stack[i].bias
    np.testing.assert_allclose(stack.fold(x), expected, rtol=1e-5)


def test_three_levels_keep_their_order():
    middle = lambda *, key: Stacked.init(hax.Axis("middle", 2), make_inner)(key=key)  # noqa: E731
    stack = Stacked.init(layers(2), middle)(key=jr.key(0))
    state = stack.to_state_dict("h")
    np.testing.assert_array_equal(state["h.1.0.2.named"], stack[1][0][2].named.array)
    assert_equal(zeros_like(stack).from_state_dict(state, "h"), stack)


# Export to torch


In, Mid, Heads, Size = hax.make_axes(input=4, mid=4, heads=2, head_size=2)


class Projections(eqx.Module):
    """Two linear layers with several axes in and out."""

    query: hax.nn.Linear
    out: hax.nn.Linear

    @staticmethod
    def init(*, key):
        k_query, k_out = jr.split(key)
        query = hax.nn.Linear.init(In, (Heads, Size), key=k_query, out_first=True)
        return Projections(query, hax.nn.Linear.init((Heads, Size), In, key=k_out, out_first=True))

    def __call__(self, x):
        return self.out(self.query(x))


@pytest.mark.parametrize("container", CONTAINERS)
def test_export_to_torch_flattens_every_layers_linears(container):
    stack = container.init(layers(N), Projections)(key=jr.key(0))
    state = hsd.to_torch_compatible_state_dict(stack, prefix="h")
    for i, block in enumerate(stack):
        expected = hsd.to_torch_compatible_state_dict(block, prefix=f"h.{i}")
        for name, array in expected.items():
            np.testing.assert_array_equal(state[name], array)
        assert state[f"h.{i}.query.weight"].shape == (Heads.size * Size.size, In.size)
    assert len(state) == 4 * N


@pytest.mark.parametrize("container", CONTAINERS)
def test_import_from_torch_restores_what_was_exported(container):
    stack = container.init(layers(N), Projections)(key=jr.key(0))
    state = hsd.to_torch_compatible_state_dict(stack, prefix="h")
    assert_equal(hsd.from_torch_compatible_state_dict(zeros_like(stack), state, prefix="h"), stack)


def test_haliaxs_scan_aware_tree_map_sees_one_layer_at_a_time():
    from haliax.tree_util import scan_aware_tree_map

    stack = Stacked.init(layers(N), Projections)(key=jr.key(0))
    is_linear = lambda x: isinstance(x, hax.nn.Linear)  # noqa: E731

    def centre(x):
        if not is_linear(x):
            return x
        return dataclasses.replace(x, weight=x.weight - hax.mean(x.weight))

    mapped = scan_aware_tree_map(centre, stack, is_leaf=is_linear)
    for block, original in zip(mapped, stack, strict=True):
        expected = original.query.weight - hax.mean(original.query.weight)
        np.testing.assert_allclose(
            block.query.weight.rearrange(expected.axes).array, expected.array, atol=1e-6
        )


def test_a_model_that_holds_a_stack_is_written_and_read_whole():
    class Model(eqx.Module):
        embed: hax.NamedArray
        h: Stacked

    model = Model(hax.ones(In), NAMED_MLP.stack(N))
    state = hsd.to_state_dict(model, "model")
    assert {"model.embed", "model.h.0.up", "model.h.2.gain"} <= set(state)
    assert_equal(hsd.from_state_dict(zeros_like(model), state, "model"), model)


def test_block_seq_of_unlike_layers_is_written_layer_by_layer():
    seq = BlockSeq.from_layers([PlainMlp(key=jr.key(0)), eqx.nn.LayerNorm(4)])
    assert set(seq.to_state_dict()) == {"0.up", "0.down", "0.gain", "1.weight", "1.bias"}
