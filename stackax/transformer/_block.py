"""One layer of a decoder-only transformer."""

import equinox as eqx
import haliax as hax
import jax.random as jr
from haliax import NamedArray
from jaxtyping import PRNGKeyArray

from .._axes import require_axes
from .._policy.names import checkpoint_name
from ._attention import Attention
from ._config import TransformerConfig
from ._mlp import GatedMlp
from ._norm import rms_norm


class TransformerBlock(eqx.Module):
    r"""A pre-norm transformer block: \(x + \mathrm{attention}(\mathrm{norm}(x))\), then the MLP.

    The block knows nothing of stacks: call it in a plain `for` loop, or give it to
    `stackax.Stacked`. It computes in the dtype of its input, and casts its weights to it.

    Named for checkpoint policies, beside the names of `Attention` and `GatedMlp`:
    `decoder_layer_input`.

    Attributes:
        attention_norm: The norm before the attention, over `Embed`.
        attention: The attention.
        mlp_norm: The norm before the MLP, over `Embed`.
        mlp: The MLP.
    """

    attention_norm: hax.nn.RmsNorm
    attention: Attention
    mlp_norm: hax.nn.RmsNorm
    mlp: GatedMlp

    @staticmethod
    def init(config: TransformerConfig, *, key: PRNGKeyArray) -> "TransformerBlock":
        """Draws the weights of one layer.

        Args:
            config: The sizes.
            key: A PRNG key.

        Returns:
            The block, with weights in float32.

        Example:
            >>> import jax
            >>> from stackax.transformer import TransformerConfig, TransformerBlock
            >>> config = TransformerConfig(layers=1, width=16, heads=4, vocab_size=8, seq_len=4)
            >>> block = TransformerBlock.init(config, key=jax.random.key(0))
            >>> block.mlp_norm.weight.shape
            {'embed': 16}
        """
        attention_key, mlp_key = jr.split(key)
        return TransformerBlock(
            attention_norm=rms_norm(config),
            attention=Attention.init(config, key=attention_key),
            mlp_norm=rms_norm(config),
            mlp=GatedMlp.init(config, key=mlp_key),
        )

    def __call__(self, x: NamedArray, positions: NamedArray | None = None) -> NamedArray:
        """The residual stream after this layer.

        Args:
            x: The residual stream, with `Embed`, an axis "position" of any size, and any batch
                axes.
            positions: The position of each entry, with the axis "position" and, where sequences
                differ, batch axes. None means 0, 1, 2, ...

        Returns:
            The residual stream, with the axes, their order and the dtype of `x`.

        Raises:
            TypeError: if `x` or `positions` is not a NamedArray.
            ValueError: if `x` lacks an axis, or `positions` has one that `x` has not.

        Example:
            >>> import haliax as hax
            >>> import jax
            >>> from stackax.transformer import TransformerConfig, TransformerBlock
            >>> config = TransformerConfig(layers=2, width=16, heads=4, vocab_size=8, seq_len=4)
            >>> x = hax.ones((config.Pos, config.Embed))
            >>> for key in jax.random.split(jax.random.key(0), config.layers):
            ...     x = TransformerBlock.init(config, key=key)(x)
            >>> x.shape
            {'position': 4, 'embed': 16}
        """
        require_axes("x", x, self.attention.config.Embed, self.attention.config.Pos.name)
        x = checkpoint_name(x, "decoder_layer_input")
        x = x + self.attention(self.attention_norm(x), positions)
        return x + self.mlp(self.mlp_norm(x))
