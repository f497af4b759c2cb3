"""A decoder-only language model: embedding, a stack of blocks, norm, head."""

import functools as ft
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
from haliax import Axis, NamedArray
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import PRNGKeyArray

from .._axes import POSITION, forbid_axes, require_axes
from .._policy.policy import RematSpec, as_policy
from .._stack.stacked import Stacked
from ._family import DecoderNorm, ModelConfig, family_of
from ._layers_cache import add_layers, fold_with_cache


class Decoder(eqx.Module):
    """A decoder-only model, from tokens to logits: a transformer or a Mamba-2, as its config says.

    Its layers are one `stackax.Stacked` of the family's blocks, so the program does not grow with
    the depth, and a checkpoint policy says what the backward pass keeps of each layer.

    With a tied head (`config.tied_head`) the embedding's table also makes the logits and `head`
    is None.

    A Mamba-2 also reads a text piece by piece: `init_cache`, then `prefill` and `step`.

    Attributes:
        embedding: The table of `Vocab` (with padding, `VocabRows`) and `Embed`.
        stack: The layers, their arrays with `Layers` first.
        norm: The norm behind the last layer, over `Embed`.
        head: From `Embed` to `Vocab`; None where the embedding's table makes the logits.
        config: The sizes.
        dtype: What the blocks compute in.
    """

    embedding: hax.nn.Embedding
    stack: Stacked
    norm: DecoderNorm
    head: hax.nn.Linear | None
    config: ModelConfig = eqx.field(static=True)
    dtype: jnp.dtype = eqx.field(static=True)

    @staticmethod
    def init(
        config: ModelConfig,
        *,
        key: PRNGKeyArray,
        gradient_checkpointing: RematSpec = False,
        dtype: DTypeLike = jnp.float32,
    ) -> "Decoder":
        """Draws the weights of the whole model.

        Args:
            config: The sizes, a `TransformerConfig` or a `Mamba2Config`.
            key: A PRNG key.
            gradient_checkpointing: What the backward pass keeps of each layer: whatever
                `stackax.Stacked.init` takes, a `ScanCheckpointPolicy` or the name of one.
            dtype: The dtype of what the blocks compute and, unless the config has a
                `residual_dtype`, of the residual stream. Weights, norms' statistics, softmaxes,
                decays, states and logits stay in float32.

        Returns:
            The model, with weights in float32.

        Raises:
            TypeError: if `config` is of no known family.
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
        family_of(config)
        policy = as_policy(gradient_checkpointing, "gradient_checkpointing")
        keys = jr.split(key, 3)
        is_traced = isinstance(keys, Tracer)  # then whoever traces compiles it
        draw = _draw if is_traced else _compiled_draw(jax.default_backend())
        return draw(config, keys, policy, dtype)

    def __call__(
        self,
        tokens: NamedArray,
        positions: NamedArray | None = None,
        *,
        mask: NamedArray | None = None,
        segment_ids: NamedArray | None = None,
    ) -> NamedArray:
        """The logits of the token that follows each position.

        Args:
            tokens: Integers below the size of `Vocab`, with an axis "position" of any size and
                any batch axes.
            positions: Of a transformer only: the position of each entry for the rotary
                embedding, with the axis "position" and, where sequences differ, batch axes. None
                means 0, 1, ...
            mask: Of a Mamba-2 only: True at real tokens, which are next to each other; False at
                padding on either side of them, where the logits mean nothing. With the axis
                "position" and, where sequences differ, batch axes. None means all are real. (A
                transformer never sees padding at the end.)
            segment_ids: Of a Mamba-2 only: integers, the document of each token where several are
                packed into a sequence; axes as those of `mask`. No token sees another document.
                None means one document.

        Returns:
            Logits in float32, with the axes of `tokens`, then `Vocab`.

        Raises:
            TypeError: if `tokens` is not a NamedArray of integers, or an argument is given that
                the model's family has not.
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
        return self.unembed(self.hidden(tokens, positions, mask=mask, segment_ids=segment_ids))

    def hidden(
        self,
        tokens: NamedArray,
        positions: NamedArray | None = None,
        *,
        mask: NamedArray | None = None,
        segment_ids: NamedArray | None = None,
    ) -> NamedArray:
        """The normalised residual stream after the last layer, which `unembed` reads.

        Args:
            tokens: As in `__call__`.
            positions: As in `__call__`.
            mask: As in `__call__`.
            segment_ids: As in `__call__`.

        Returns:
            An array with the axes of `tokens`, then `Embed`, in the dtype of the residual stream.

        Raises:
            TypeError: if `tokens` is not a NamedArray of integers, or an argument is given that
                the model's family has not.
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
        more = self._given(positions=positions, mask=mask, segment_ids=segment_ids)
        return self.norm(self.stack.fold(self._embed(tokens), **more))

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
        wide = jnp.promote_types(hidden.dtype, jnp.float32)
        logits = hax.dot(
            hidden, table.astype(hidden.dtype), axis=Embed, preferred_element_type=wide
        )
        # Rows that pad the table are no tokens. Cut from the logits, not from the larger table.
        is_padded = logits.axis_size(Vocab.name) > Vocab.size
        return logits.slice({Vocab.name: 0}, {Vocab.name: Vocab}) if is_padded else logits

    def init_cache(self, Batch: Sequence[Axis] = ()) -> Any:
        """What a Mamba-2 remembers before the first token: the same size after any number.

        Args:
            Batch: The batch axes of the tokens to come, none for a single sequence.

        Returns:
            The family's cache for each layer, `stackax.mamba2.Mamba2Cache`, its arrays with
            `Layers` first.

        Raises:
            TypeError: if the model's family has no cache.

        Example:
            >>> import haliax as hax
            >>> import jax
            >>> from stackax.lm import Decoder
            >>> from stackax.mamba2 import Mamba2Config
            >>> config = Mamba2Config(layers=2, width=32, head_dim=16, state=8, vocab_size=256)
            >>> decoder = Decoder.init(config, key=jax.random.key(0))
            >>> decoder.init_cache([hax.Axis("batch", 3)]).state.shape
            {'layers': 2, 'batch': 3, 'heads': 4, 'head_dim': 16, 'state': 8}
        """
        cache = self._cache_class().init(self.config, Batch, dtype=self.dtype)
        return add_layers(cache, self.config.Layers)

    def prefill(
        self,
        tokens: NamedArray,
        cache: Any,
        *,
        mask: NamedArray | None = None,
        segment_ids: NamedArray | None = None,
    ) -> tuple[NamedArray, Any]:
        """Reads a piece of a text that goes on from what the cache remembers.

        A text in pieces, of any lengths, gives what it gives as a whole.

        Args:
            tokens: As in `__call__`.
            cache: From `init_cache`, or from the piece before.
            mask: As in `__call__`; the cache is then that of the real tokens alone.
            segment_ids: As in `__call__`; the cache tells whether the piece begins in the
                document that the one before ended in. None means that all of it is.

        Returns:
            The normalised residual stream, as `hidden` returns it, and the cache.

        Raises:
            TypeError: if `tokens` is not a NamedArray of integers, or the model's family has no
                cache.
            ValueError: if `tokens` has no axis "position", an axis that the model makes, or other
                batch axes than the cache.

        Example:
            >>> import equinox as eqx
            >>> import haliax as hax
            >>> import jax
            >>> from stackax.lm import Decoder
            >>> from stackax.mamba2 import Mamba2Config
            >>> config = Mamba2Config(layers=2, width=32, head_dim=16, state=8, vocab_size=256)
            >>> decoder = Decoder.init(config, key=jax.random.key(0))
            >>> tokens = hax.named([1, 2, 3], "position")
            >>> hidden, cache = eqx.filter_jit(decoder.prefill)(tokens, decoder.init_cache())
            >>> decoder.unembed(hidden["position", -1]).shape
            {'vocab': 256}
        """
        self._cache_class()
        require_axes("tokens", tokens, POSITION)
        more = self._given(mask=mask, segment_ids=segment_ids)
        # Old caches in, new ones out, each layer's by itself. In place, as `step` has it, XLA would
        # copy the whole cache in every layer, because a piece reads the old state in many places.
        prefill = self.stack.scan_via(lambda block, x, part: block.prefill(x, part, **more))
        x, cache = prefill(self._embed(tokens), cache)
        return self.norm(x), cache

    def step(self, tokens: NamedArray, cache: Any) -> tuple[NamedArray, Any]:
        """Reads one token of each sequence, which goes on from what the cache remembers.

        Args:
            tokens: Integers below the size of `Vocab`, with the batch axes of the cache and no
                axis "position".
            cache: From `init_cache`, `prefill` or `step`.

        Returns:
            The normalised residual stream, with the axes of `tokens`, then `Embed`; and the cache.

        Raises:
            TypeError: if `tokens` is not a NamedArray of integers, or the model's family has no
                cache.
            ValueError: if `tokens` has an axis "position", one that the model makes, or other
                batch axes than the cache.

        Example:
            >>> import equinox as eqx
            >>> import haliax as hax
            >>> import jax
            >>> from stackax.lm import Decoder
            >>> from stackax.mamba2 import Mamba2Config
            >>> config = Mamba2Config(layers=2, width=32, head_dim=16, state=8, vocab_size=256)
            >>> decoder = Decoder.init(config, key=jax.random.key(0))
            >>> token = hax.named(1, ())
            >>> hidden, cache = eqx.filter_jit(decoder.step)(token, decoder.init_cache())
            >>> decoder.unembed(hidden).shape
            {'vocab': 256}
        """
        self._cache_class()
        require_axes("tokens", tokens)
        forbid_axes("tokens", tokens, POSITION)
        call = lambda block, x, part: block.step(x, part)  # noqa: E731
        x, cache = fold_with_cache(self.stack, call, self._embed(tokens), cache)
        return self.norm(x), cache

    def _embed(self, tokens: NamedArray) -> NamedArray:
        forbid_axes("tokens", tokens, self.config.Embed, self.config.Vocab)
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise TypeError(f"tokens must be integers, not {tokens.dtype}")
        stream_dtype = family_of(self.config).stream_dtype(self.config, self.dtype)
        return self.embedding(tokens).astype(stream_dtype)

    def _given(self, **arguments: NamedArray | None) -> dict[str, Any]:
        """The arguments that are not None, if the family's blocks take them."""
        family = family_of(self.config)
        given = {name: value for name, value in arguments.items() if value is not None}
        for name in given:
            if name not in family.reads:
                raise TypeError(
                    f"{name} is given, but a {family.name} takes only {' and '.join(family.reads)} "
                    f"beside its tokens: leave {name} out"
                )
        return given

    def _cache_class(self) -> Any:
        family = family_of(self.config)
        if family.cache is None:
            raise TypeError(
                f"a {family.name} has no cache yet: call the model on whole sequences, or use "
                "generate"
            )
        return family.cache


def _draw(config, keys, policy, dtype) -> Decoder:
    family = family_of(config)
    embedding_key, stack_key, head_key = keys
    stack = Stacked.init(config.Layers, family.block, gradient_checkpointing=policy)
    table = family.embedding(config, embedding_key)
    return Decoder(
        embedding=hax.nn.Embedding(table, family.rows(config), config.Embed),
        stack=stack(config, **family.block_options(config, dtype), key=stack_key),
        norm=family.norm(config),
        head=None if config.tied_head else family.head(config, head_key),
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
