"""Which weights decay."""

from typing import Any

import jax
from haliax import NamedArray

from .._axes import LAYERS

# Rates of decay, skips, step sizes and offsets: pulled towards zero, they would mean something
# else, not less. By the names of the fields that hold them, since a skip may have two axes.
NEVER = frozenset({"A_log", "D", "dt_bias", "bias", "conv_bias"})


def weight_decay_mask(weights: Any) -> Any:
    """True for weights that weight decay should shrink: matrices and tables, and no others.

    Norms, biases, and the `A_log`, `D` and `dt_bias` of a Mamba-2 are left alone. Give it to
    optax as it is: `optax.adamw(1e-3, mask=weight_decay_mask)`.

    Args:
        weights: A model, or any other pytree of NamedArrays. An axis "layers" does not count: what
            is a vector in a layer is one in a stack of them.

    Returns:
        The pytree with a bool for each NamedArray, whatever its axes.

    Raises:
        TypeError: if a leaf is no NamedArray, of which it cannot be told what its axes are.

    Example:
        >>> import haliax as hax
        >>> from stackax.lm import weight_decay_mask
        >>> weights = {
        ...     "up": hax.zeros({"layers": 2, "embed": 4, "mlp": 8}),
        ...     "norm": hax.zeros({"layers": 2, "embed": 4}),
        ...     "A_log": hax.zeros({"layers": 2, "heads": 4}),
        ... }
        >>> weight_decay_mask(weights)
        {'A_log': False, 'norm': False, 'up': True}
    """
    return jax.tree_util.tree_map_with_path(
        _decays, weights, is_leaf=lambda x: isinstance(x, NamedArray)
    )


def _decays(path: tuple, weight: Any) -> bool:
    if not isinstance(weight, NamedArray):
        raise TypeError(
            f"{jax.tree_util.keystr(path)} is a {type(weight).__name__}, but weight_decay_mask "
            "tells matrices by the names of their axes: give a model of NamedArrays"
        )
    last = path[-1] if path else None
    name = getattr(last, "name", getattr(last, "key", None))
    own_axes = [axis for axis in weight.axes if axis.name != LAYERS]
    return name not in NEVER and len(own_axes) >= 2
