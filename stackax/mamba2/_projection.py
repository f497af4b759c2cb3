"""Linear layers that start as the paper's and compute in the dtype of their input."""

import dataclasses

import haliax as hax
from haliax import Axis, NamedArray
from haliax.axis import axis_spec_to_tuple
from jaxtyping import PRNGKeyArray

from .._axes import forbid_axes, require_axes


def draw_linear(
    In: Axis, Out: Axis, *, use_bias: bool, scale: float = 1.0, key: PRNGKeyArray
) -> hax.nn.Linear:
    r"""A linear layer, uniform between \(\pm s / \sqrt{\mathrm{In}}\), its bias zero.

    Args:
        In: The input axis.
        Out: The output axis.
        use_bias: Whether it has a bias.
        scale: The factor \(s\).
        key: A PRNG key.

    Returns:
        The layer, in float32.

    Example:
        >>> import haliax as hax
        >>> import jax
        >>> from stackax.mamba2._projection import draw_linear
        >>> In, Out = hax.make_axes(embed=8, inner=16)
        >>> draw_linear(In, Out, use_bias=False, key=jax.random.key(0)).weight.shape
        {'inner': 16, 'embed': 8}
    """
    bound = scale * In.size**-0.5
    weight = hax.random.uniform(key, (Out, In), minval=-bound, maxval=bound)
    return hax.nn.Linear(weight, hax.zeros(Out) if use_bias else None, In, Out)


def project(linear: hax.nn.Linear, x: NamedArray) -> NamedArray:
    """`x` through a linear layer, with its weights cast to the dtype of `x`.

    Args:
        linear: The layer, from the axis `linear.In` to the axis `linear.Out`.
        x: An array with `linear.In` and any other axes but `linear.Out`.

    Returns:
        An array with the other axes of `x`, then `linear.Out`, in the dtype of `x`.

    Raises:
        TypeError: if `x` is not a NamedArray.
        ValueError: if `x` lacks the input axis or has the output axis.

    Example:
        >>> import haliax as hax
        >>> import jax
        >>> from stackax.mamba2._projection import draw_linear, project
        >>> In, Out = hax.make_axes(embed=8, inner=16)
        >>> linear = draw_linear(In, Out, use_bias=True, key=jax.random.key(0))
        >>> project(linear, hax.ones({"position": 3, "embed": 8})).shape
        {'position': 3, 'inner': 16}
    """
    require_axes("x", x, *axis_spec_to_tuple(linear.In))
    forbid_axes("x", x, *axis_spec_to_tuple(linear.Out))
    weight = linear.weight.astype(x.dtype)
    bias = None if linear.bias is None else linear.bias.astype(x.dtype)
    return dataclasses.replace(linear, weight=weight, bias=bias)(x)
