"""The gated MLP of a transformer block (SwiGLU)."""

import equinox as eqx
import haliax as hax
import jax.random as jr
from haliax import NamedArray
from jaxtyping import PRNGKeyArray

from .._axes import require_axes
from .._linear import project
from .._policy.names import checkpoint_name
from ._config import TransformerConfig


def swiglu(gate: NamedArray, up: NamedArray) -> NamedArray:
    r"""The SwiGLU activation, \(\mathrm{silu}(\mathrm{gate}) \cdot \mathrm{up}\).

    Args:
        gate: An array with any axes; \(\mathrm{silu}(g) = g / (1 + e^{-g})\).
        up: An array with the same axes.

    Returns:
        Their gated product, with the axes and dtype of `gate`.

    Raises:
        TypeError: if an argument is not a NamedArray.
        ValueError: if the axes differ.

    Example:
        >>> import haliax as hax
        >>> from stackax.transformer import swiglu
        >>> float(swiglu(hax.full({"mlp": 1}, 1.0), hax.full({"mlp": 1}, 2.0)).array[0])
        1.4621171951293945

    References:
        Shazeer, GLU Variants Improve Transformer, https://arxiv.org/abs/2002.05202, equation 6.
    """
    require_axes("gate", gate)
    require_axes("up", up, *gate.axes)
    require_axes("gate", gate, *up.axes)
    return hax.nn.silu(gate) * up


class GatedMlp(eqx.Module):
    """Two projections up, one gating the other, and one down.

    Named for checkpoint policies: `mlpwi_0` (the gate before its activation), `mlpwi_1` (what it
    gates) and `mlpwo` (the output).

    Attributes:
        gate_proj: From `Embed` to `Mlp`.
        up_proj: From `Embed` to `Mlp`.
        down_proj: From `Mlp` to `Embed`.
    """

    gate_proj: hax.nn.Linear
    up_proj: hax.nn.Linear
    down_proj: hax.nn.Linear

    @staticmethod
    def init(config: TransformerConfig, *, key: PRNGKeyArray) -> "GatedMlp":
        """Draws the weights of one layer's MLP.

        Args:
            config: The sizes.
            key: A PRNG key. Weights are drawn as those of `Attention`, with `down_proj` the
                smaller one.

        Returns:
            The module, with weights in float32.

        Example:
            >>> import jax
            >>> from stackax.transformer import TransformerConfig, GatedMlp
            >>> config = TransformerConfig(layers=1, width=12, heads=2, vocab_size=8, seq_len=4)
            >>> GatedMlp.init(config, key=jax.random.key(0)).down_proj.weight.shape
            {'embed': 12, 'mlp': 32}
        """
        Embed, Mlp = config.Embed, config.Mlp
        gate_key, up_key, down_key = jr.split(key, 3)
        return GatedMlp(
            gate_proj=hax.nn.Linear.init(Embed, Mlp, key=gate_key, use_bias=False),
            up_proj=hax.nn.Linear.init(Embed, Mlp, key=up_key, use_bias=False),
            down_proj=hax.nn.Linear.init(
                Mlp, Embed, key=down_key, use_bias=False, init_scale=(2 * config.layers) ** -0.5
            ),
        )

    def __call__(self, x: NamedArray) -> NamedArray:
        """Maps each position by itself.

        Args:
            x: The normalised residual stream, with `Embed` and any other axes.

        Returns:
            The MLP's output, with the axes and dtype of `x`.

        Raises:
            TypeError: if `x` is not a NamedArray.
            ValueError: if `x` lacks `Embed`.

        Example:
            >>> import haliax as hax
            >>> import jax
            >>> from stackax.transformer import TransformerConfig, GatedMlp
            >>> config = TransformerConfig(layers=1, width=16, heads=4, vocab_size=8, seq_len=4)
            >>> mlp = GatedMlp.init(config, key=jax.random.key(0))
            >>> mlp(hax.ones((config.Pos, config.Embed))).shape
            {'position': 4, 'embed': 16}
        """
        gate = checkpoint_name(project(self.gate_proj, x), "mlpwi_0")
        up = checkpoint_name(project(self.up_proj, x), "mlpwi_1")
        out = project(self.down_proj, swiglu(gate, up))
        return checkpoint_name(out.rearrange(x.axes), "mlpwo")
