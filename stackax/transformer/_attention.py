"""Causal self-attention with rotary embedding and grouped-query heads."""

import equinox as eqx
import haliax as hax
import jax.random as jr
from haliax import NamedArray
from jaxtyping import PRNGKeyArray

from .._axes import require_axes
from .._linear import project
from .._policy.names import checkpoint_name
from ._attend import attend
from ._config import TransformerConfig
from ._rotary import apply_rotary


class Attention(eqx.Module):
    """Causal self-attention: projections around `apply_rotary` and `attend`.

    Named for checkpoint policies: `query_proj` and `key_proj` (after the rotary turn, where the
    backward pass of attention needs them), `value_proj`, `context` (what the heads read) and
    `out_proj`.

    Attributes:
        query_proj: From `Embed` to `Heads` and `HeadDim`.
        key_proj: From `Embed` to `KVHeads` and `HeadDim`.
        value_proj: From `Embed` to `KVHeads` and `HeadDim`.
        out_proj: From `Heads` and `HeadDim` to `Embed`.
        config: The sizes.
    """

    query_proj: hax.nn.Linear
    key_proj: hax.nn.Linear
    value_proj: hax.nn.Linear
    out_proj: hax.nn.Linear
    config: TransformerConfig = eqx.field(static=True)

    @staticmethod
    def init(config: TransformerConfig, *, key: PRNGKeyArray) -> "Attention":
        """Draws the weights of one layer's attention.

        Args:
            config: The sizes.
            key: A PRNG key. Weights are truncated normal with variance one over the inputs
                summed; those of `out_proj` are smaller by the square root of 2 `layers`, so that
                the residual stream does not grow with the depth.

        Returns:
            The module, with weights in float32.

        Example:
            >>> import jax
            >>> from stackax.transformer import TransformerConfig, Attention
            >>> config = TransformerConfig(
            ...     layers=1, width=16, heads=4, kv_heads=2, vocab_size=8, seq_len=4
            ... )
            >>> Attention.init(config, key=jax.random.key(0)).key_proj.weight.shape
            {'kv_heads': 2, 'head_dim': 4, 'embed': 16}
        """
        Embed, HeadDim = config.Embed, config.HeadDim
        QueryOut, KeyOut = (config.Heads, HeadDim), (config.KVHeads, HeadDim)
        q_key, k_key, v_key, out_key = jr.split(key, 4)
        return Attention(
            query_proj=hax.nn.Linear.init(Embed, QueryOut, key=q_key, use_bias=False),
            key_proj=hax.nn.Linear.init(Embed, KeyOut, key=k_key, use_bias=False),
            value_proj=hax.nn.Linear.init(Embed, KeyOut, key=v_key, use_bias=False),
            out_proj=hax.nn.Linear.init(
                QueryOut, Embed, key=out_key, use_bias=False, init_scale=(2 * config.layers) ** -0.5
            ),
            config=config,
        )

    def __call__(self, x: NamedArray, positions: NamedArray | None = None) -> NamedArray:
        """Lets each position read from itself and from those before it.

        Args:
            x: The normalised residual stream, with `Embed`, an axis "position" of any size, and
                any batch axes.
            positions: The position of each entry for the rotary embedding, with the axis
                "position" and, where sequences differ, batch axes. None means 0, 1, 2, ...

        Returns:
            What was read, with the axes and dtype of `x`.

        Raises:
            TypeError: if `x` or `positions` is not a NamedArray.
            ValueError: if `x` lacks an axis, or `positions` has one that `x` has not.

        Example:
            >>> import equinox as eqx
            >>> import haliax as hax
            >>> import jax
            >>> from stackax.transformer import TransformerConfig, Attention
            >>> config = TransformerConfig(layers=1, width=16, heads=4, vocab_size=8, seq_len=4)
            >>> attention = Attention.init(config, key=jax.random.key(0))
            >>> eqx.filter_jit(attention)(hax.ones((config.Pos, config.Embed))).shape
            {'position': 4, 'embed': 16}
        """
        config = self.config
        require_axes("x", x, config.Embed, config.Pos.name)
        Pos = x.resolve_axis(config.Pos.name)
        positions = hax.arange(Pos) if positions is None else positions

        query = project(self.query_proj, x)
        key = project(self.key_proj, x)
        value = checkpoint_name(project(self.value_proj, x), "value_proj")
        query = apply_rotary(query, positions, config.HeadDim, theta=config.rope_theta)
        key = apply_rotary(key, positions, config.HeadDim, theta=config.rope_theta)

        context = attend(
            checkpoint_name(query, "query_proj"),
            checkpoint_name(key, "key_proj"),
            value,
            Pos=Pos,
            Heads=config.Heads,
            KVHeads=config.KVHeads,
            HeadDim=config.HeadDim,
            is_causal=True,
        )
        out = project(self.out_proj, checkpoint_name(context, "context"))
        return checkpoint_name(out.rearrange(x.axes), "out_proj")
