"""Weights for modules whose own first ones are too regular to test with, and slow to draw."""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np


def draw_like(make, seed=0, **scales):
    """What `make()` returns, with normal weights in the place of its own; nothing is compiled.

    Matrices have a variance of one over their last axis, vectors a standard deviation of 0.3
    around what they start from (norms and skips around 1). Nothing stays 0 or 1, so that no weight
    can be forgotten unseen. Plain arrays, such as counters, are zeros.

    Args:
        make: Makes the module.
        seed: Decides the weights.
        scales: Factors by the name of a field, for its arrays.
    """
    chance = np.random.default_rng(seed)
    leaves, treedef = jax.tree_util.tree_flatten_with_path(
        eqx.filter_eval_shape(make), is_leaf=lambda x: isinstance(x, hax.NamedArray)
    )

    def draw(path, leaf):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jnp.zeros(leaf.shape, leaf.dtype)
        if not isinstance(leaf, hax.NamedArray):
            return leaf
        shape, name = leaf.array.shape, jax.tree_util.keystr(path)
        values = chance.normal(size=shape)
        own_axes = [axis for axis in leaf.axes if axis.name != "layers"]
        if len(own_axes) > 1 and not name.endswith(".D"):
            values = values * shape[-1] ** -0.5
        else:
            values = 0.3 * values + (1.0 if "norm" in name or name.endswith(".D") else 0.0)
        for field, scale in scales.items():
            if field in name:
                values = values * scale
        return hax.named(jnp.asarray(values, leaf.dtype), leaf.axes)

    return jax.tree.unflatten(treedef, [draw(path, leaf) for path, leaf in leaves])
