"""One layer of a Mamba-2 model."""

import equinox as eqx
import jax.numpy as jnp
from haliax import NamedArray
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from .._policy.names import checkpoint_name
from ._cache import Mamba2Cache
from ._config import Mamba2Config
from ._mixer import Mamba2Mixer
from ._norm import RmsNorm


class Mamba2Block(eqx.Module):
    r"""A pre-norm Mamba-2 block: \(x + \mathrm{mixer}(\mathrm{norm}(x))\).

    The block knows nothing of stacks: call it in a plain `for` loop, or give it to
    `stackax.Stacked`. Its residual stream has the axes of a transformer block's, so both kinds
    can follow each other.

    Named for checkpoint policies, beside the names of `Mamba2Mixer`: `decoder_layer_input`.

    Attributes:
        norm: The norm, over `Embed`.
        mixer: What happens between norm and residual stream.
        dtype: What the mixer computes in; None means the dtype of the residual stream.
    """

    norm: RmsNorm
    mixer: Mamba2Mixer
    dtype: jnp.dtype | None = eqx.field(static=True)

    @staticmethod
    def init(
        config: Mamba2Config, *, dtype: DTypeLike | None = None, key: PRNGKeyArray
    ) -> "Mamba2Block":
        """Draws the weights of one layer.

        Args:
            config: The sizes.
            dtype: What the mixer computes in. None means the dtype of the residual stream, which
                another choice leaves as it is.
            key: A PRNG key.

        Returns:
            The block, with weights in float32.

        Example:
            >>> import jax
            >>> from stackax.mamba2 import Mamba2Block, Mamba2Config
            >>> config = Mamba2Config(layers=1, width=32, head_dim=16, state=8, vocab_size=8)
            >>> Mamba2Block.init(config, key=jax.random.key(0)).mixer.out_proj.weight.shape
            {'embed': 32, 'inner': 64}
        """
        return Mamba2Block(
            norm=RmsNorm.init(config),
            mixer=Mamba2Mixer.init(config, key=key),
            dtype=None if dtype is None else jnp.dtype(dtype),
        )

    def __call__(
        self,
        x: NamedArray,
        mask: NamedArray | None = None,
        segment_ids: NamedArray | None = None,
    ) -> NamedArray:
        """The residual stream after this layer.

        Args:
            x: The residual stream, with `Embed`, an axis "position" of any size, and any batch
                axes.
            mask: True at positions that are real, False at padding, as in `Mamba2Mixer`.
            segment_ids: The document of each position, as in `Mamba2Mixer`.

        Returns:
            The residual stream, with the axes, their order and the dtype of `x`.

        Raises:
            TypeError: if an argument is not a NamedArray.
            ValueError: if `x` lacks an axis, or `mask` or `segment_ids` has one that `x` has not.

        Example:
            >>> import haliax as hax
            >>> import jax
            >>> from stackax.mamba2 import Mamba2Block, Mamba2Config
            >>> config = Mamba2Config(layers=1, width=32, head_dim=16, state=8, vocab_size=8)
            >>> block = Mamba2Block.init(config, key=jax.random.key(0))
            >>> jax.eval_shape(block, hax.ones({"position": 4, "embed": 32})).shape
            {'position': 4, 'embed': 32}
        """
        x = checkpoint_name(x, "decoder_layer_input")
        return x + self.mixer(self._normed(x), mask, segment_ids).astype(x.dtype)

    def prefill(
        self,
        x: NamedArray,
        cache: Mamba2Cache,
        mask: NamedArray | None = None,
        segment_ids: NamedArray | None = None,
    ) -> tuple[NamedArray, Mamba2Cache]:
        """`__call__` on a piece of a sequence that goes on from what the cache remembers.

        Args:
            x: As in `__call__`; the piece may be of any length.
            cache: What the layer remembers of the positions before.
            mask: As in `__call__`. The cache is then that of the real positions alone.
            segment_ids: As in `__call__`. None means the document that the cache is in.

        Returns:
            The residual stream, as in `__call__`, and the cache.

        Raises:
            TypeError: if an argument is not a NamedArray.
            ValueError: if `x` lacks an axis, or `mask`, `segment_ids` or the cache has one that
                `x` has not.

        Example:
            >>> import haliax as hax
            >>> import jax
            >>> from stackax.mamba2 import Mamba2Block, Mamba2Cache, Mamba2Config
            >>> config = Mamba2Config(layers=1, width=32, head_dim=16, state=8, vocab_size=8)
            >>> block = Mamba2Block.init(config, key=jax.random.key(0))
            >>> x, cache = hax.ones({"position": 4, "embed": 32}), Mamba2Cache.init(config)
            >>> jax.eval_shape(block.prefill, x, cache)[0].shape
            {'position': 4, 'embed': 32}
        """
        out, cache = self.mixer.prefill(self._normed(x), cache, mask, segment_ids)
        return x + out.astype(x.dtype), cache

    def step(self, x: NamedArray, cache: Mamba2Cache) -> tuple[NamedArray, Mamba2Cache]:
        """`__call__` on one position that goes on from what the cache remembers.

        Args:
            x: The residual stream at the position, with `Embed` and any batch axes.
            cache: What the layer remembers of the positions before.

        Returns:
            The residual stream with the axes, their order and the dtype of `x`, and the cache.

        Raises:
            TypeError: if `x` is not a NamedArray.
            ValueError: if `x` lacks `Embed`, or has other batch axes than the cache.

        Example:
            >>> import haliax as hax
            >>> import jax
            >>> from stackax.mamba2 import Mamba2Block, Mamba2Cache, Mamba2Config
            >>> config = Mamba2Config(layers=1, width=32, head_dim=16, state=8, vocab_size=8)
            >>> block = Mamba2Block.init(config, key=jax.random.key(0))
            >>> x, cache = hax.ones({"embed": 32}), Mamba2Cache.init(config)
            >>> jax.eval_shape(block.step, x, cache)[0].shape
            {'embed': 32}
        """
        out, cache = self.mixer.step(self._normed(x), cache)
        return x + out.astype(x.dtype), cache

    def _normed(self, x: NamedArray) -> NamedArray:
        normed = self.norm(x)
        return normed if self.dtype is None else normed.astype(self.dtype)
