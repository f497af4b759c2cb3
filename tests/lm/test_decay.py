import dataclasses
import functools as ft

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest

from stackax.lm import Decoder, weight_decay_mask
from stackax.mamba2 import Mamba2Config
from tests.reference.weights import draw_like

CONFIG = Mamba2Config(
    layers=2, width=8, head_dim=4, state=3, vocab_size=13, proj_bias=True, skip="channel"
)
DECAYS = {"embedding.weight", "head.weight", "conv_weight", "in_proj.weight", "out_proj.weight"}


@pytest.fixture(scope="module")
def model():
    config = dataclasses.replace(CONFIG, tied_head=False)
    return draw_like(ft.partial(Decoder.init, config, key=jr.key(0)))


def test_matrices_and_tables_decay_and_nothing_else_of_a_mamba2(model):
    paths = jax.tree_util.tree_flatten_with_path(weight_decay_mask(model))[0]
    names = {jax.tree_util.keystr(path).lstrip("."): decays for path, decays in paths}
    for name, decays in names.items():
        assert decays == any(name.endswith(end) for end in DECAYS), name
    spared = ("A_log", "D", "dt_bias", "conv_bias", "norm_weight", "norm.weight", "proj.bias")
    for end in spared:  # a skip per channel has two axes, and is spared all the same
        assert any(name.endswith(end) for name in names), f"{end} is not in the model"


def test_optax_shrinks_what_the_mask_says(model):
    weights = eqx.filter(model.stack.stacked.mixer, eqx.is_array)
    optimizer = optax.adamw(0.1, weight_decay=0.5, mask=weight_decay_mask)
    zeros = jax.tree.map(jnp.zeros_like, weights)
    state = jax.jit(optimizer.init)(weights)
    updates, _ = jax.jit(optimizer.update)(zeros, state, weights)
    mask = weight_decay_mask(weights)
    is_named = lambda x: isinstance(x, hax.NamedArray)  # noqa: E731
    leaves = (jax.tree.leaves(tree, is_leaf=is_named) for tree in (updates, weights, mask))
    for update, weight, decays in zip(*leaves, strict=True):
        expected = -0.05 * weight.array if decays else 0 * weight.array
        np.testing.assert_allclose(update.array, expected, atol=1e-7)


def test_a_plain_array_raises_because_its_axes_are_not_told():
    with pytest.raises(TypeError, match=r"\['w'\] is a .*, but weight_decay_mask"):
        weight_decay_mask({"w": jnp.zeros((2, 2))})
