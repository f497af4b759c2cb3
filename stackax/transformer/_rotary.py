"""Rotary position embedding, as a function without weights."""

import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from .._axes import axis_name, require_axes


def apply_rotary(
    x: NamedArray,
    positions: NamedArray,
    HeadDim: Axis | str,
    *,
    theta: float = 10_000.0,
) -> NamedArray:
    r"""Turns the feature pairs of each head by an angle that grows with the position.

    With \(d\) features, pair \(i\) is features \(i\) and \(i + d/2\) (the half-split layout of
    Llama and NeoX, not the interleaved one of GPT-J), turned at position \(p\) by
    \(p\,\theta^{-2i/d}\). A query turned at \(p\) and a key turned at \(q\) have a dot product
    that depends on the positions only through \(p - q\).

    Args:
        x: Queries or keys, with `HeadDim`, the axes of `positions`, and any others.
        positions: The position of each entry, integers or floats, usually with the one axis
            `Pos`. Its axes must be axes of `x`.
        HeadDim: The features of one head, an even number.
        theta: Base of the wavelengths, which run from \(2\pi\) to about \(2\pi\theta\) positions.

    Returns:
        `x` turned, with its axes and its dtype. The turn itself is done in float32.

    Raises:
        TypeError: if `x` or `positions` is not a NamedArray.
        ValueError: if `x` lacks `HeadDim` or an axis of `positions`, or `HeadDim` is odd.

    Example:
        >>> import haliax as hax
        >>> from stackax.transformer import apply_rotary
        >>> q = hax.ones({"position": 4, "head_dim": 8})
        >>> turned = apply_rotary(q, hax.arange(hax.Axis("position", 4)), "head_dim")
        >>> turned.shape
        {'position': 4, 'head_dim': 8}

    References:
        Su et al., RoFormer: Enhanced Transformer with Rotary Position Embedding,
        https://arxiv.org/abs/2104.09864, equation 34.
    """
    require_axes("positions", positions)
    require_axes("x", x, HeadDim, *positions.axes)
    d = x.axis_size(axis_name(HeadDim))
    if d % 2:
        raise ValueError(f"axis {axis_name(HeadDim)!r} of x has {d} features, but must be even")
    Half = Axis(axis_name(HeadDim), d // 2)

    # Made in float64 and rounded once: a power computed in float32 would already be off by an
    # error that a long sequence multiplies.
    frequencies = hax.named((theta ** (-np.arange(0, d, 2) / d)).astype(np.float32), Half)
    angles = positions.astype(jnp.float32).broadcast_axis(Half) * frequencies
    cos, sin = hax.cos(angles), hax.sin(angles)

    first, second = (
        x.slice({Half.name: start}, {Half.name: Half}).astype(jnp.float32) for start in (0, d // 2)
    )
    turned = [first * cos - second * sin, second * cos + first * sin]
    return hax.concatenate(Half.name, turned).rearrange(x.axes).astype(x.dtype)
