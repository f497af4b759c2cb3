"""The sizes of a transformer, and the axes that they make."""

import dataclasses
import math

from haliax import Axis

from .._axes import EMBED, LAYERS, POSITION, VOCAB
from .._sizes import check_positive, check_size

MLP_MULTIPLE = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """The sizes of a decoder-only transformer; its properties are the axes.

    Two configs with the same sizes are equal and have the same hash, so a config can be a static
    argument of a jitted function.

    Args:
        layers: Number of blocks in the stack.
        width: Size of the residual stream.
        heads: Number of query heads.
        kv_heads: Number of key and value heads, each serving `heads // kv_heads` query heads.
            None means as many as `heads` (multi-head attention); 1 is multi-query attention.
        head_dim: Size of one head, even because rotary embedding turns pairs of features.
            None means `width // heads`.
        mlp_width: Hidden size of the gated MLP. None means 8/3 of `width`, rounded up to a
            multiple of 32, which gives the gated MLP about the parameters of a plain one of
            4 times the width.
        vocab_size: Number of token values.
        seq_len: Number of positions that the model is trained on. A block itself takes any.
        rope_theta: Base of the rotary embedding's wavelengths.
        norm_eps: Added to the mean square under the root in every norm.
        tied_head: True where the embedding's table also makes the logits, False where a head of
            its own does.

    Raises:
        TypeError: if a size is not an int.
        ValueError: if a size is below 1, `head_dim` is odd or, where it is not given, `width` is
            not an even multiple of `heads`, `heads` is not a multiple of `kv_heads`, or
            `rope_theta` or `norm_eps` is not a positive finite number.

    Example:
        >>> from stackax.transformer import TransformerConfig
        >>> config = TransformerConfig(
        ...     layers=2, width=64, heads=4, kv_heads=2, vocab_size=256, seq_len=128
        ... )
        >>> config.Embed, config.KVHeads, config.HeadDim
        (Axis(name='embed', size=64), Axis(name='kv_heads', size=2), Axis(name='head_dim', size=16))
    """

    layers: int
    width: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    mlp_width: int | None = None
    vocab_size: int
    seq_len: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    tied_head: bool = True

    def __post_init__(self):
        for name in ("layers", "width", "heads", "vocab_size", "seq_len"):
            check_size(name, getattr(self, name))
        for name in ("kv_heads", "head_dim", "mlp_width"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        for name in ("rope_theta", "norm_eps"):
            check_positive(name, getattr(self, name))
        _check_heads(self)

    @property
    def Layers(self) -> Axis:
        """One entry per block of the stack."""
        return Axis(LAYERS, self.layers)

    @property
    def Pos(self) -> Axis:
        """Positions of a training sequence."""
        return Axis(POSITION, self.seq_len)

    @property
    def Embed(self) -> Axis:
        """Features of the residual stream."""
        return Axis(EMBED, self.width)

    @property
    def Heads(self) -> Axis:
        """Query heads."""
        return Axis("heads", self.heads)

    @property
    def KVHeads(self) -> Axis:
        """Key and value heads."""
        return Axis("kv_heads", self.heads if self.kv_heads is None else self.kv_heads)

    @property
    def HeadDim(self) -> Axis:
        """Features of one head."""
        return Axis(
            "head_dim", self.width // self.heads if self.head_dim is None else self.head_dim
        )

    @property
    def Mlp(self) -> Axis:
        """Hidden features of the gated MLP."""
        if self.mlp_width is not None:
            return Axis("mlp", self.mlp_width)
        return Axis("mlp", MLP_MULTIPLE * math.ceil(8 * self.width / 3 / MLP_MULTIPLE))

    @property
    def Vocab(self) -> Axis:
        """Token values."""
        return Axis(VOCAB, self.vocab_size)


def _check_heads(config: TransformerConfig) -> None:
    if config.head_dim is None and config.width % (2 * config.heads):
        raise ValueError(_uneven_heads(config))
    if config.HeadDim.size % 2:
        raise ValueError(
            f"head_dim={config.head_dim} is odd, but rotary embedding turns pairs of features: "
            f"give head_dim={config.HeadDim.size + 1}"
        )
    if config.heads % config.KVHeads.size:
        raise ValueError(
            f"kv_heads={config.kv_heads} does not divide heads={config.heads}: "
            f"give kv_heads={_nearest_divisor(config.heads, config.KVHeads.size)}"
        )


def _uneven_heads(config: TransformerConfig) -> str:
    width, heads = config.width, config.heads
    wider = f"width={2 * heads * math.ceil(width / (2 * heads))}"
    fewer = f"heads={_nearest_divisor(width // 2, heads)} or " if width % 2 == 0 else ""
    return (
        f"heads={heads} does not divide width={width} into heads of an even number of features, "
        f"which rotary embedding needs: give {fewer}{wider}"
    )


def _nearest_divisor(number: int, wish: int) -> int:
    divisors = (d for d in range(1, number + 1) if number % d == 0)
    return min(divisors, key=lambda d: abs(d - wish))
