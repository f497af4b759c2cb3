"""The sizes of a Mamba-2 model, and the axes that they make."""

import dataclasses
import math

from haliax import Axis

from .._axes import EMBED, LAYERS, POSITION, VOCAB
from .._sizes import check_positive, check_size

_SIZES = ("layers", "width", "vocab_size", "seq_len", "head_dim", "state", "groups", "conv_width")
_SIZES_OR_NONE = ("heads", "vocab_rows", "chunk_size", "chunks_per_block")
_CHOICES = {"skip": ("head", "channel"), "residual_dtype": (None, "float32")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mamba2Config:
    r"""The sizes of a Mamba-2 model; its properties are the axes.

    Two configs with the same sizes are equal and have the same hash, so a config can be a static
    argument of a jitted function. Letters are the paper's: \(A\) is the decay rate of a head,
    \(dt\) the step size of a head at a position, \(B\) and \(C\) what writes to and reads from the
    state, \(D\) the skip.

    Args:
        layers: Number of blocks in the stack.
        width: Size of the residual stream.
        heads: Number of heads. None means `2 * width // head_dim`, the paper's expansion by 2.
        head_dim: Features of one head.
        state: Size of the state of each feature of a head.
        groups: Number of groups of heads; the heads of a group share \(B\) and \(C\), and the
            gated norm takes each group's mean square by itself.
        conv_width: Number of positions that the convolution sees, itself included.
        vocab_size: Number of token values.
        vocab_rows: Number of rows of the embedding's table, where it is padded beyond
            `vocab_size`; the rows beyond are no tokens and make no logits. None means no padding.
        seq_len: Number of positions that the model is trained on. A block itself takes any.
        norm_eps: Added to the mean square under the root in every norm.
        norm_before_gate: True where the gated norm comes before its gate, False where it norms
            what the gate has passed, as in the released models.
        skip: Whether \(D\) has one entry per "head" or per "channel" of a head.
        proj_bias: Whether the projections in and out have biases.
        conv_bias: Whether the convolution has one.
        dt_limit: Bounds that \(dt\) is clipped to, always, after its softplus.
        A_range: Bounds between which \(-A\) is drawn at first, uniformly.
        dt_range: Bounds between which the bias of \(dt\) is drawn at first, uniformly in the
            logarithm of the step size that it makes.
        dt_floor: The least step size at first.
        tied_head: True where the embedding's table also makes the logits, False where a head of
            its own does.
        residual_dtype: "float32" keeps the residual stream in float32 whatever the blocks compute
            in; None keeps it in what they compute in.
        chunk_size: Positions of one chunk of the scan over positions: how fast it runs, never
            what it computes. None means the measured default.
        chunks_per_block: Chunks that the scan works on at a time, likewise.

    Raises:
        TypeError: if a size is not an int.
        ValueError: if a size is below 1, `width` is no multiple of `head_dim` where `heads` is not
            given, `heads` is no multiple of `groups`, `vocab_rows` is below `vocab_size`, a range
            is empty or out of bounds, or a choice is none of those named.

    Example:
        >>> from stackax.mamba2 import Mamba2Config
        >>> config = Mamba2Config(layers=2, width=64, head_dim=16, vocab_size=256)
        >>> config.Heads, config.State, config.ConvChannels.size
        (Axis(name='heads', size=8), Axis(name='state', size=128), 384)
    """

    layers: int
    width: int
    heads: int | None = None
    head_dim: int = 64
    state: int = 128
    groups: int = 1
    conv_width: int = 4
    vocab_size: int
    vocab_rows: int | None = None
    seq_len: int = 2048
    norm_eps: float = 1e-5
    norm_before_gate: bool = False
    skip: str = "head"
    proj_bias: bool = False
    conv_bias: bool = True
    dt_limit: tuple[float, float] = (0.0, math.inf)
    A_range: tuple[float, float] = (1.0, 16.0)
    dt_range: tuple[float, float] = (1e-3, 1e-1)
    dt_floor: float = 1e-4
    tied_head: bool = True
    residual_dtype: str | None = None
    chunk_size: int | None = None
    chunks_per_block: int | None = None

    def __post_init__(self):
        for name in _SIZES:
            check_size(name, getattr(self, name))
        for name in _SIZES_OR_NONE:
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {allowed}")
        for name in ("dt_limit", "A_range", "dt_range"):  # JSON has lists in the place of tuples
            object.__setattr__(self, name, _checked_range(name, getattr(self, name)))
        _check_positives(self)
        _check_heads(self)
        if self.VocabRows.size < self.vocab_size:
            raise ValueError(
                f"vocab_rows={self.vocab_rows} is below vocab_size={self.vocab_size}: every token "
                "needs a row"
            )

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
    def Vocab(self) -> Axis:
        """Token values."""
        return Axis(VOCAB, self.vocab_size)

    @property
    def VocabRows(self) -> Axis:
        """Rows of the embedding's table: token values, then padding."""
        return Axis(VOCAB, self.vocab_size if self.vocab_rows is None else self.vocab_rows)

    @property
    def Heads(self) -> Axis:
        """Heads."""
        return Axis("heads", 2 * self.width // self.head_dim if self.heads is None else self.heads)

    @property
    def HeadDim(self) -> Axis:
        """Features of one head."""
        return Axis("head_dim", self.head_dim)

    @property
    def Groups(self) -> Axis:
        """Groups of heads that share B and C."""
        return Axis("groups", self.groups)

    @property
    def State(self) -> Axis:
        """The state of each feature of a head."""
        return Axis("state", self.state)

    @property
    def Inner(self) -> Axis:
        """Features of all heads."""
        return Axis("inner", self.Heads.size * self.head_dim)

    @property
    def ConvChannels(self) -> Axis:
        """What the convolution sees: x of all heads, then B and C of all groups."""
        return Axis("conv_channels", self.Inner.size + 2 * self.groups * self.state)

    @property
    def Tap(self) -> Axis:
        """Positions that the convolution sees, the oldest first."""
        return Axis("tap", self.conv_width)

    @property
    def Window(self) -> Axis:
        """Positions before the present one that the convolution sees."""
        return Axis("window", self.conv_width - 1)

    @property
    def InProj(self) -> Axis:
        """What the projection in makes: the gate z, then x, B and C, then dt of each head."""
        return Axis("in_proj", self.Inner.size + self.ConvChannels.size + self.Heads.size)


def _checked_range(name: str, bounds) -> tuple[float, float]:
    if isinstance(bounds, str) or len(bounds) != 2 or not 0 <= bounds[0] <= bounds[1]:
        raise ValueError(f"{name}={bounds!r} must be two numbers, 0 <= low <= high")
    return float(bounds[0]), float(bounds[1])


def _check_positives(config: Mamba2Config) -> None:
    check_positive("norm_eps", config.norm_eps)
    check_positive("dt_floor", config.dt_floor)
    for name in ("A_range", "dt_range"):
        for end, value in zip(("low", "high"), getattr(config, name), strict=True):
            if not 0 < value < math.inf:
                raise ValueError(
                    f"the {end} end of {name} is {value}, but must be a positive finite number"
                )


def _check_heads(config: Mamba2Config) -> None:
    if config.heads is None and 2 * config.width % config.head_dim:
        raise ValueError(
            f"head_dim={config.head_dim} does not divide twice width={config.width}: give heads, "
            f"or head_dim={math.gcd(2 * config.width, config.head_dim)}"
        )
    if config.Heads.size % config.groups:
        raise ValueError(
            f"groups={config.groups} does not divide the {config.Heads.size} heads: "
            f"give groups={math.gcd(config.Heads.size, config.groups)}"
        )
