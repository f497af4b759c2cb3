"""What a Mamba-2 layer remembers of the positions before: as much after one as after a million."""

from collections.abc import Sequence

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from jax.typing import DTypeLike

from ._config import Mamba2Config


class Mamba2Cache(eqx.Module):
    """What one layer remembers, of a size that does not depend on how much it has read.

    Its dtypes are its own, whatever is computed: the state is a sum over all positions and stays
    in float32 (float64 in a model of float64), the window holds inputs as they were.

    Attributes:
        state: The state space's state: batch axes, `Heads`, `HeadDim`, `State`.
        window: The last inputs of the convolution, the oldest first: batch axes, `Window`,
            `ConvChannels`. Zeros stand for positions before the first.
        segment_id: The document of the last position read, int32: batch axes.
    """

    state: NamedArray
    window: NamedArray
    segment_id: NamedArray

    @staticmethod
    def init(
        config: Mamba2Config, Batch: Sequence[Axis] = (), *, dtype: DTypeLike = jnp.float32
    ) -> "Mamba2Cache":
        """The memory of a layer that has read nothing.

        Args:
            config: The sizes.
            Batch: The batch axes, none for a single sequence.
            dtype: What the layer computes in.

        Returns:
            The cache.

        Example:
            >>> from stackax.mamba2 import Mamba2Cache, Mamba2Config
            >>> config = Mamba2Config(layers=2, width=32, head_dim=16, state=8, vocab_size=256)
            >>> Mamba2Cache.init(config).state.shape
            {'heads': 4, 'head_dim': 16, 'state': 8}
        """
        Batch = tuple(Batch)
        state_dtype = jnp.promote_types(dtype, jnp.float32)
        return Mamba2Cache(
            state=hax.zeros((*Batch, config.Heads, config.HeadDim, config.State), state_dtype),
            window=hax.zeros((*Batch, config.Window, config.ConvChannels), dtype),
            segment_id=hax.zeros(Batch, jnp.int32),
        )
