"""The norm of a Mamba-2 block."""

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import NamedArray

from .._axes import require_axes
from ._config import Mamba2Config


class RmsNorm(eqx.Module):
    r"""A root-mean-square norm over `Embed`, \(x / \sqrt{\overline{x^2} + \epsilon} \cdot w\).

    It runs in float32, or in float64 where that is its input's dtype, and rounds once at the end.

    Attributes:
        weight: The factors \(w\): `Embed`.
        eps: Added to the mean square under the root.
    """

    weight: NamedArray
    eps: float = eqx.field(static=True)

    @staticmethod
    def init(config: Mamba2Config) -> "RmsNorm":
        """A norm that scales nothing yet.

        Args:
            config: The sizes.

        Returns:
            The norm, with weights of one.

        Example:
            >>> from stackax.mamba2 import Mamba2Config, RmsNorm
            >>> RmsNorm.init(Mamba2Config(layers=1, width=32, vocab_size=8)).weight.shape
            {'embed': 32}
        """
        return RmsNorm(hax.ones(config.Embed), config.norm_eps)

    def __call__(self, x: NamedArray) -> NamedArray:
        """Norms each position by itself.

        Args:
            x: The residual stream, with `Embed` and any other axes.

        Returns:
            An array with the axes, their order and the dtype of `x`.

        Raises:
            TypeError: if `x` is not a NamedArray.
            ValueError: if `x` lacks `Embed`.

        Example:
            >>> import haliax as hax
            >>> from stackax.mamba2 import Mamba2Config, RmsNorm
            >>> norm = RmsNorm.init(Mamba2Config(layers=1, width=32, vocab_size=8))
            >>> round(float(norm(hax.full({"embed": 32}, 3.0)).array[0]), 5)
            1.0
        """
        require_axes("x", x, *self.weight.axes)
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean_square = hax.mean(hax.square(wide), self.weight.axes)
        normed = wide * hax.rsqrt(mean_square + self.eps) * self.weight
        return normed.rearrange(x.axes).astype(x.dtype)
