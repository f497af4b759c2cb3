"""Gated root-mean-square norm over plain arrays."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._shapes import bind_shapes, require_floating


def gated_rms_norm(
    y: Float[Array, "*batch C"],
    gate: Float[Array, "*batch C"],
    weight: Float[Array, " C"],
    *,
    groups: int,
    eps: float,
    norm_before_gate: bool = False,
) -> Float[Array, "*batch C"]:
    r"""Normalises each group of channels and multiplies by the activated gate.

    \(w \cdot \mathrm{norm}(y \cdot \mathrm{silu}(z))\), or with the norm first,
    \(w \cdot \mathrm{norm}(y) \cdot \mathrm{silu}(z)\), where
    \(\mathrm{norm}(u) = u / \sqrt{\mathrm{mean}(u^2) + \epsilon}\) over the channels of a group.

    Args:
        y: What is normalised, C channels.
        gate: The gate z before its activation.
        weight: One factor a channel.
        groups: How many equal groups of neighbouring channels are normalised apart.
        eps: Added to the mean square.
        norm_before_gate: False as in the released models, where the gate comes first.

    Returns:
        An array with the shape and dtype of `y`; it is computed in float32 or wider.

    Raises:
        TypeError: if an argument is not an array of floating-point numbers.
        ValueError: if shapes do not fit, or `groups` does not divide the channels.

    Example:
        >>> import jax.numpy as jnp
        >>> from stackax.mamba2 import gated_rms_norm
        >>> y = gated_rms_norm(jnp.ones(8), jnp.ones(8), jnp.ones(8), groups=2, eps=1e-5)
        >>> y.shape
        (8,)

    References:
        `RMSNormGated` of state-spaces/mamba, `mamba_ssm/ops/triton/layernorm_gated.py`.
    """
    sizes = bind_shapes({"y": (y, "*batch C"), "gate": (gate, "*batch C"), "weight": (weight, "C")})
    require_floating(y=y, gate=gate, weight=weight)
    if groups < 1 or sizes["C"] % groups:
        raise ValueError(
            f"groups={groups} does not divide the {sizes['C']} channels of y into equal groups"
        )
    wide = jnp.promote_types(y.dtype, jnp.float32)
    opened = jax.nn.silu(gate.astype(wide))
    u = y.astype(wide) if norm_before_gate else y.astype(wide) * opened
    u = (_normalise(u, groups, eps) * weight.astype(wide)).reshape(y.shape)
    return (u * opened if norm_before_gate else u).astype(y.dtype)


def _normalise(u, groups, eps):
    grouped = u.reshape(*u.shape[:-1], groups, -1)
    mean_square = jnp.mean(jnp.square(grouped), axis=-1, keepdims=True)
    return (grouped * jax.lax.rsqrt(mean_square + eps)).reshape(u.shape)
