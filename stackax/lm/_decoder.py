"""A decoder-only language model: embedding, a stack of blocks, norm, head."""

import functools as ft
from collections.abc import Callable

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
from haliax import NamedArray
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from .._axes import POSITION, forbid_axes, require_axes
from .._policy.policy import RematSpec, as_policy
from .._stack.stacked import Stacked
from ..transformer import TransformerBlock, TransformerConfig
from ..transformer._norm import rms_norm


class Decoder(eqx.Module):
    """A decoder-only transformer, from tokens to logits.

    Its layers are one `stackax.Stacked` of `TransformerBlock`, so the program does not grow with
    the depth, and a checkpoint policy says what the backward pass keeps of each layer.

    With a tied head (`config.tied_head`) the embedding's table also makes the logits and `head`
    is None.
    """

    embedding: hax.nn.Embedding
    stack: Stacked
    norm: hax.nn.RmsNorm
    head: hax.nn.Linear | None
    config: TransformerConfig = eqx.field(static=True)
    dtype: jnp.dtype = eqx.field(static=True)

    @staticmethod
    def init(
        config: TransformerConfig,
        *,
        key: PRNGKeyArray,
        gradient_checkpointing: RematSpec = False,
        dtype: DTypeLike = jnp.float32,
    ) -> "Decoder":
        """Draws the weights of the whole model.

        Args:
            config: The sizes.
            key: A PRNG key.
            gradient_checkpointing: What the backward pass keeps of each layer: whatever
                `stackax.Stacked.init` takes, a `ScanCheckpointPolicy` or the name of one.
            dtype: The dtype of the residual stream and of what the blocks compute. Weights,
                norms' statistics, softmaxes and logits stay in float32.

        Returns:
            The model, with weights in float32.

        Raises:
            ValueError: if `dtype` is not a floating-point type, or there is no such policy.

        Example:
            >>> import jax
            >>> from stackax.lm import Decoder
            >>> from stackax.transformer import TransformerConfig
            >>> config = TransformerConfig(layers=2, width=16, heads=2, vocab_size=256, seq_len=8)
            >>> decoder = Decoder.init(config, key=jax.random.key(0))
            >>> decoder.embedding.weight.shape
            {'vocab': 256, 'embed': 16}
        """
        dtype = jnp.dtype(dtype)
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(f"dtype={dtype} is not a floating-point type: give 'bfloat16'")
        policy = as_policy(gradient_checkpointing, "gradient_checkpointing")
        keys = jr.split(key, 3)
        is_traced = isinstance(keys, Tracer)  # then whoever traces compiles it
        draw = _draw if is_traced else _compiled_draw(jax.default_backend())
        return draw(config, keys, policy, dtype)

    def __call__(self, tokens: NamedArray, positions: NamedArray | None = None) -> NamedArray:
        """The logits of the token that follows each position.

        Args:
            tokens: Integers below the size of `Vocab`, with an axis "position" of any size and
                any batch axes.
            positions: The position of each entry for the rotary embedding. None means 0, 1, ...

        Returns:
            Logits in float32, with the axes of `tokens`, then `Vocab`.

        Raises:
            TypeError: if `tokens` is not a NamedArray of integers.
            ValueError: if `tokens` has no axis "position", or an axis that the model makes.

        Example:
            >>> import equinox as eqx
            >>> import haliax as hax
            >>> import jax
            >>> from stackax.lm import Decoder
            >>> from stackax.transformer import TransformerConfig
            >>> config = TransformerConfig(layers=2, width=16, heads=2, vocab_size=256, seq_len=8)
            >>> decoder = Decoder.init(config, key=jax.random.key(0))
            >>> eqx.filter_jit(decoder)(hax.zeros({"batch": 4, "position": 8}, dtype=int)).shape
            {'batch': 4, 'position': 8, 'vocab': 256}
        """
        return self.unembed(self.hidden(tokens, positions))

    def hidden(self, tokens: NamedArray, positions: NamedArray | None = None) -> NamedArray:
        """The normalised residual stream after the last layer, which `unembed` reads.

        Args:
            tokens: As in `__call__`.
            positions: As in `__call__`.

        Returns:
            An array with the axes of `tokens`, then `Embed`, in the model's `dtype`.

        Raises:
            TypeError: if `tokens` is not a NamedArray of integers.
            ValueError: if `tokens` has no axis "position", or an axis that the model makes.

        Example:
            >>> import haliax as hax
            >>> import jax
            >>> from stackax.lm import Decoder
            >>> from stackax.transformer import TransformerConfig
            >>> config = TransformerConfig(layers=2, width=16, heads=2, vocab_size=256, seq_len=8)
            >>> decoder = Decoder.init(config, key=jax.random.key(0))
            >>> jax.eval_shape(decoder.hidden, hax.zeros({"position": 8}, dtype=int)).shape
            {'position': 8, 'embed': 16}
        """
        require_axes("tokens", tokens, POSITION)
        forbid_axes("tokens", tokens, self.config.Embed, self.config.Vocab)
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"tokens must be integers, not {tokens.dtype}")
        x = self.embedding(tokens).astype(self.dtype)
        return self.norm(self.stack.fold(x, positions))

    def unembed(self, hidden: NamedArray) -> NamedArray:
        """The logits of normalised features, by the head or the embedding's table.

        Args:
            hidden: An array with `Embed` and any other axes but `Vocab`.

        Returns:
            Logits in float32, with the other axes of `hidden`, then `Vocab`.

        Raises:
            TypeError: if `hidden` is not a NamedArray.
            ValueError: if `hidden` has no `Embed` or has `Vocab`.

        Example:
            >>> import haliax as hax
            >>> import jax
            >>> from stackax.lm import Decoder
            >>> from stackax.transformer import TransformerConfig
            >>> config = TransformerConfig(layers=2, width=16, heads=2, vocab_size=256, seq_len=8)
            >>> decoder = Decoder.init(config, key=jax.random.key(0))
            >>> jax.eval_shape(decoder.unembed, hax.zeros((config.Pos, config.Embed))).shape
            {'position': 8, 'vocab': 256}
        """
        Embed, Vocab = self.config.Embed, self.config.Vocab
        require_axes("hidden", hidden, Embed)
        forbid_axes("hidden", hidden, Vocab)
        table = self.embedding.weight if self.head is None else self.head.weight
        return hax.dot(
            hidden, table.astype(hidden.dtype), axis=Embed, preferred_element_type=jnp.float32
        )


def _draw(config, keys, policy, dtype) -> Decoder:
    Embed, Vocab = config.Embed, config.Vocab
    embedding_key, stack_key, head_key = keys
    stack = Stacked.init(config.Layers, TransformerBlock, gradient_checkpointing=policy)
    head = None
    if not config.tied_head:
        head = hax.nn.Linear.init(Embed, Vocab, key=head_key, use_bias=False)
    return Decoder(
        # Haliax draws a table of standard deviation 1 / width; logits of a tied head need
        # 1 / sqrt(width), as any projection of normalised features does.
        embedding=hax.nn.Embedding.init(
            Vocab, Embed, key=embedding_key, init_scale=Embed.size**0.5
        ),
        stack=stack(config, key=stack_key),
        norm=rms_norm(config),
        head=head,
        config=config,
        dtype=dtype,
    )


@ft.cache
def _compiled_draw(backend: str) -> Callable[..., Decoder]:
    """`_draw` in one program, which runs once, so that the time to compile it is what counts.

    On a CPU, random draws compile for 18 s at XLA's own level of optimisation and for 3 s at
    level 1, and then run as fast (0.16 s of 0.13 s for 4 million).
    """
    options = {"xla_backend_optimization_level": 1} if backend == "cpu" else None
    return jax.jit(_draw, static_argnums=(0, 2, 3), compiler_options=options)
