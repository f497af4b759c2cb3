"""A linear layer that computes in the dtype of its input."""

import haliax as hax
from haliax import NamedArray
from haliax.axis import axis_spec_to_tuple

from ._axes import forbid_axes, require_axes


def project(linear: hax.nn.Linear, x: NamedArray) -> NamedArray:
    """`x` through a Haliax linear layer, with the weights cast to the dtype of `x`.

    Weights stay in the dtype that they are trained in, while the product runs in that of the
    residual stream. The axes are checked first, because `haliax.nn.Linear` answers an array
    without its input axis with an outer product. The layer's scale goes onto the product, and not
    as there onto the weights, of which a backward pass without remat would then keep a copy.

    Args:
        linear: The layer, from axes `linear.In` to axes `linear.Out`.
        x: An array with the axes `linear.In` and any others but those of `linear.Out`.

    Returns:
        An array with the other axes of `x`, then `linear.Out`, in the dtype of `x`.

    Raises:
        TypeError: if `x` is not a NamedArray.
        ValueError: if `x` lacks an input axis or has an output axis.

    Example:
        >>> import haliax as hax
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from stackax._linear import project
        >>> In, Out = hax.make_axes(embed=8, mlp=16)
        >>> linear = hax.nn.Linear.init(In, Out, use_bias=False, key=jax.random.key(0))
        >>> project(linear, hax.ones({"position": 3, "embed": 8}, dtype=jnp.bfloat16)).dtype
        dtype(bfloat16)
    """
    require_axes("x", x, *axis_spec_to_tuple(linear.In))
    forbid_axes("x", x, *axis_spec_to_tuple(linear.Out))
    weight, scale = linear.weight.astype(x.dtype), linear.reparam.active_scale
    product = x.dot(weight, axis=linear.In, dot_general=linear.dot_general)
    product = product if scale == 1 else product * scale
    if linear.bias is not None:
        product = product + linear.bias.astype(x.dtype)
    return hax.auto_sharded(product)
