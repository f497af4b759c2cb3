"""The norm of a transformer."""

import haliax as hax
import jax.numpy as jnp

from ._config import TransformerConfig


def rms_norm(config: TransformerConfig) -> hax.nn.RmsNorm:
    """A root-mean-square norm over `Embed`: a weight, no bias, statistics in float32.

    Args:
        config: The sizes.

    Returns:
        The norm, with weights of one.

    Example:
        >>> from stackax.transformer import TransformerConfig
        >>> from stackax.transformer._norm import rms_norm
        >>> config = TransformerConfig(layers=1, width=16, heads=4, vocab_size=8, seq_len=4)
        >>> rms_norm(config).weight.shape
        {'embed': 16}
    """
    dtype = jnp.dtype("float32")
    return hax.nn.RmsNorm.init(config.Embed, eps=config.norm_eps, use_bias=False, dtype=dtype)
