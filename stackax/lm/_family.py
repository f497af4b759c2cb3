"""What a decoder has to know of a family of models, in one table."""

import dataclasses
from collections.abc import Callable
from typing import Any

import haliax as hax
from haliax import Axis, NamedArray
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from ..mamba2 import Mamba2Block, Mamba2Cache, Mamba2Config
from ..mamba2 import RmsNorm as Mamba2Norm
from ..transformer import TransformerBlock, TransformerConfig
from ..transformer._norm import rms_norm

ModelConfig = TransformerConfig | Mamba2Config
DecoderNorm = hax.nn.RmsNorm | Mamba2Norm


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models: its blocks, and what stands before and after them.

    Attributes:
        name: What checkpoints call it.
        config: The class of its sizes.
        block: The class of its blocks, which are made by `init(config, key=...)`.
        block_options: Further arguments of that `init`, from the config and the dtype that the
            blocks compute in.
        reads: The arguments that its blocks take beside the residual stream.
        cache: The class of a layer's memory, or None where there is none yet.
        rows: The axis of the embedding's rows.
        stream_dtype: The dtype of the residual stream, from the same.
        norm: Makes the norm before the head.
        embedding: Draws the embedding's table.
        head: Draws a head that is not the table.
    """

    name: str
    config: type
    block: Any
    block_options: Callable[[Any, DTypeLike], dict[str, Any]]
    reads: tuple[str, ...]
    cache: Any
    rows: Callable[[Any], Axis]
    stream_dtype: Callable[[Any, DTypeLike], DTypeLike]
    norm: Callable[[Any], DecoderNorm]
    embedding: Callable[[Any, PRNGKeyArray], NamedArray]
    head: Callable[[Any, PRNGKeyArray], hax.nn.Linear]


def family_of(config: ModelConfig) -> Family:
    """The family that a config belongs to.

    Args:
        config: The sizes.

    Returns:
        The family.

    Raises:
        TypeError: if there is no such family.

    Example:
        >>> from stackax.lm._family import family_of
        >>> from stackax.mamba2 import Mamba2Config
        >>> family_of(Mamba2Config(layers=1, width=32, vocab_size=8)).name
        'mamba2'
    """
    for family in FAMILIES:
        if isinstance(config, family.config):
            return family
    known = " or a ".join(family.config.__name__ for family in FAMILIES)
    raise TypeError(f"config must be a {known}, not {config!r}")


def config_of_family(name: str, fields: dict[str, Any]) -> ModelConfig:
    """The config that a checkpoint tells of.

    Args:
        name: The name of the family.
        fields: The fields of its config.

    Returns:
        The config.

    Raises:
        ValueError: if there is no such family.

    Example:
        >>> from stackax.lm._family import config_of_family
        >>> fields = dict(layers=1, width=32, vocab_size=8)
        >>> config_of_family("mamba2", fields).width
        32
    """
    families = {family.name: family for family in FAMILIES}
    if name not in families:
        raise ValueError(f"there is no family {name!r} of models: it is one of {list(families)}")
    return families[name].config(**fields)


def _transformer_table(config: TransformerConfig, key: PRNGKeyArray) -> NamedArray:
    # Haliax draws a table of standard deviation 1 / width; logits of a tied head need
    # 1 / sqrt(width), as any projection of normalised features does.
    axes, scale = (config.Vocab, config.Embed), config.width**-0.5
    return hax.random.truncated_normal(key, axes, -3, 3) * scale


def _transformer_head(config: TransformerConfig, key: PRNGKeyArray) -> hax.nn.Linear:
    return hax.nn.Linear.init(config.Embed, config.Vocab, key=key, use_bias=False)


def _mamba2_table(config: Mamba2Config, key: PRNGKeyArray) -> NamedArray:
    return hax.random.normal(key, (config.VocabRows, config.Embed)) * 0.02


def _mamba2_head(config: Mamba2Config, key: PRNGKeyArray) -> hax.nn.Linear:
    axes, bound = (config.VocabRows, config.Embed), config.width**-0.5
    weight = hax.random.uniform(key, axes, minval=-bound, maxval=bound)
    return hax.nn.Linear(weight, None, config.Embed, config.VocabRows)


FAMILIES = (
    Family(
        name="transformer",
        config=TransformerConfig,
        block=TransformerBlock,
        block_options=lambda config, dtype: {},
        reads=("positions",),
        cache=None,
        rows=lambda config: config.Vocab,
        stream_dtype=lambda config, dtype: dtype,
        norm=rms_norm,
        embedding=_transformer_table,
        head=_transformer_head,
    ),
    Family(
        name="mamba2",
        config=Mamba2Config,
        block=Mamba2Block,
        block_options=lambda config, dtype: {"dtype": dtype if config.residual_dtype else None},
        reads=("mask", "segment_ids"),
        cache=Mamba2Cache,
        rows=lambda config: config.VocabRows,
        stream_dtype=lambda config, dtype: config.residual_dtype or dtype,
        norm=Mamba2Norm.init,
        embedding=_mamba2_table,
        head=_mamba2_head,
    ),
)
