"""The Mamba-2 mixer: projections and a convolution around `ssd`."""

import math
from typing import Any

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import jax.random as jr
from haliax import Axis, NamedArray
from jaxtyping import Array, PRNGKeyArray

from .._axes import POSITION, forbid_axes, require_axes
from .._linear import project
from .._policy.names import checkpoint_name
from ._cache import Mamba2Cache
from ._config import Mamba2Config
from ._conv import causal_conv, causal_conv_step
from ._gated_norm import gated_rms_norm
from ._projection import draw_linear
from ._ssd import ssd, ssd_step


class Mamba2Mixer(eqx.Module):
    r"""What a Mamba-2 layer does between norm and residual stream.

    With \(z\), \(xBC\) and \(dt\) from the projection in:
    \(xBC = \mathrm{silu}(\mathrm{conv}(xBC))\), then
    \(y = \mathrm{ssd}(x, \mathrm{softplus}(dt + b), A, B, C) + D x\) with
    \(A = -e^{A_{\log}}\), then \(\mathrm{norm}(y \cdot \mathrm{silu}(z))\), then the projection
    out. Decays and states are float32 whatever the dtype of the input.

    `__call__` is for whole sequences; `prefill` and `step` do the same piece by piece, with a
    `Mamba2Cache` between the pieces.

    Named for checkpoint policies: `in_proj` (the projection's output), `conv` (the
    convolution's), `ssd` (y), `gated_norm` and `out_proj`.

    Attributes:
        in_proj: From `Embed` to `InProj`.
        conv_weight: The convolution's taps: `Tap`, `ConvChannels`.
        conv_bias: Its bias: `ConvChannels`; or None.
        dt_bias: What is added to \(dt\) before its softplus: `Heads`.
        A_log: The logarithm of \(-A\): `Heads`.
        D: The skip: `Heads`, and `HeadDim` where `config.skip` is "channel".
        norm_weight: The factors of the gated norm: `Inner`.
        out_proj: From `Inner` to `Embed`.
        config: The sizes.

    References:
        Dao and Gu, Transformers are SSMs, https://arxiv.org/abs/2405.21060, section 7.
    """

    in_proj: hax.nn.Linear
    conv_weight: NamedArray
    conv_bias: NamedArray | None
    dt_bias: NamedArray
    A_log: NamedArray
    D: NamedArray
    norm_weight: NamedArray
    out_proj: hax.nn.Linear
    config: Mamba2Config = eqx.field(static=True)

    @staticmethod
    def init(config: Mamba2Config, *, key: PRNGKeyArray) -> "Mamba2Mixer":
        r"""Draws the weights of one layer's mixer, as the paper's code does.

        Projections and convolution are uniform between plus and minus one over the square root of
        their inputs, that of `out_proj` smaller by the square root of `layers`. \(-A\) is uniform
        in `A_range`; the step size \(dt\) that `dt_bias` makes by itself is log-uniform in
        `dt_range`, at least `dt_floor`; \(D\) is one.

        Args:
            config: The sizes.
            key: A PRNG key.

        Returns:
            The module, with weights in float32.

        Example:
            >>> import jax
            >>> from stackax.mamba2 import Mamba2Config, Mamba2Mixer
            >>> config = Mamba2Config(layers=1, width=32, head_dim=16, state=8, vocab_size=8)
            >>> Mamba2Mixer.init(config, key=jax.random.key(0)).conv_weight.shape
            {'tap': 4, 'conv_channels': 80}
        """
        in_key, conv_key, bias_key, dt_key, A_key, out_key = jr.split(key, 6)
        bound = config.conv_width**-0.5
        conv_axes, Channels = (config.Tap, config.ConvChannels), config.ConvChannels
        conv_bias = None
        if config.conv_bias:
            conv_bias = hax.random.uniform(bias_key, Channels, minval=-bound, maxval=bound)
        low, high = config.A_range
        skip_axes = (config.Heads, config.HeadDim) if config.skip == "channel" else (config.Heads,)
        return Mamba2Mixer(
            in_proj=draw_linear(config.Embed, config.InProj, use_bias=config.proj_bias, key=in_key),
            conv_weight=hax.random.uniform(conv_key, conv_axes, minval=-bound, maxval=bound),
            conv_bias=conv_bias,
            dt_bias=_draw_dt_bias(config, dt_key),
            A_log=hax.log(hax.random.uniform(A_key, config.Heads, minval=low, maxval=high)),
            D=hax.ones(skip_axes),
            norm_weight=hax.ones(config.Inner),
            out_proj=draw_linear(
                config.Inner,
                config.Embed,
                use_bias=config.proj_bias,
                scale=config.layers**-0.5,
                key=out_key,
            ),
            config=config,
        )

    def __call__(
        self,
        x: NamedArray,
        mask: NamedArray | None = None,
        segment_ids: NamedArray | None = None,
    ) -> NamedArray:
        """Lets each position read from itself and from those before it.

        Args:
            x: The normalised residual stream, with `Embed`, an axis "position" of any size, and
                any batch axes.
            mask: True at positions that are real, which are next to each other; False at padding
                on either side of them, which they don't see. With the axis "position" and, where
                sequences differ, batch axes. What comes out at padding means nothing.
            segment_ids: Integers, the document of each position where several are packed into a
                sequence; axes as those of `mask`. No position sees another document.

        Returns:
            What was read, with the axes, their order and the dtype of `x`.

        Raises:
            TypeError: if an argument is not a NamedArray.
            ValueError: if `x` lacks an axis, or `mask` or `segment_ids` has one that `x` has not.

        Example:
            >>> import haliax as hax
            >>> import jax
            >>> from stackax.mamba2 import Mamba2Config, Mamba2Mixer
            >>> config = Mamba2Config(layers=1, width=32, head_dim=16, state=8, vocab_size=8)
            >>> mixer = Mamba2Mixer.init(config, key=jax.random.key(0))
            >>> jax.eval_shape(mixer, hax.ones({"position": 4, "embed": 32})).shape
            {'position': 4, 'embed': 32}
        """
        axes = _sequence_axes(x, self.config)
        real, documents = _flags(axes, mask, segment_ids)
        where: dict[str, Any] = {"mask": real, "segment_ids": documents}
        z, xBC, dt = self._project_in(x, axes)
        xBC, _ = causal_conv(xBC, **self._convolution(), **where)
        xs, B, C = self._split_conv(checkpoint_name(xBC, "conv"))
        y, _ = ssd(xs, dt, self._A(xs), B, C, **self._steps(), **self._knobs(), **where)
        return self._project_out(y, z, axes).rearrange(x.axes)

    def prefill(
        self,
        x: NamedArray,
        cache: Mamba2Cache,
        mask: NamedArray | None = None,
        segment_ids: NamedArray | None = None,
    ) -> tuple[NamedArray, Mamba2Cache]:
        """Reads a piece of a sequence that goes on from what the cache remembers.

        Args:
            x: As in `__call__`; the piece may be of any length.
            cache: What the layer remembers of the positions before.
            mask: As in `__call__`. The cache is then that of the real positions alone.
            segment_ids: As in `__call__`; the cache tells whether the piece begins with the
                document that the one before ended with. None means that all of it is of that one.

        Returns:
            What was read, with the axes, their order and the dtype of `x`; and the cache.

        Raises:
            TypeError: if an argument is not a NamedArray.
            ValueError: if `x` lacks an axis, or `mask`, `segment_ids` or the cache has one that
                `x` has not.

        Example:
            >>> import haliax as hax
            >>> import jax
            >>> from stackax.mamba2 import Mamba2Cache, Mamba2Config, Mamba2Mixer
            >>> config = Mamba2Config(layers=1, width=32, head_dim=16, state=8, vocab_size=8)
            >>> mixer = Mamba2Mixer.init(config, key=jax.random.key(0))
            >>> x, cache = hax.ones({"position": 4, "embed": 32}), Mamba2Cache.init(config)
            >>> y, cache = jax.eval_shape(mixer.prefill, x, cache)
            >>> y.shape, cache.window.shape
            ({'position': 4, 'embed': 32}, {'window': 3, 'conv_channels': 80})
        """
        axes = _sequence_axes(x, self.config)
        state, window, segment_id = self._remembered(cache, axes[:-1])
        real, documents = _flags(axes, mask, segment_ids)
        where: dict[str, Any] = {"mask": real, "segment_ids": documents}
        if documents is not None:
            where["previous_segment_id"] = segment_id
            segment_id = _last_document(documents, real, segment_id)
        z, xBC, dt = self._project_in(x, axes)
        xBC, window = causal_conv(xBC, **self._convolution(), initial_window=window, **where)
        xs, B, C = self._split_conv(xBC)
        knobs = self._knobs() | {"initial_state": state}
        y, state = ssd(xs, dt, self._A(xs), B, C, **self._steps(), **knobs, **where)
        out = self._project_out(y, z, axes).rearrange(x.axes)
        return out, _updated(cache, state, window, segment_id, axes[:-1])

    def step(self, x: NamedArray, cache: Mamba2Cache) -> tuple[NamedArray, Mamba2Cache]:
        """Reads one position that goes on from what the cache remembers.

        Args:
            x: The normalised residual stream at the position, with `Embed` and any batch axes.
            cache: What the layer remembers of the positions before.

        Returns:
            What was read, with the axes, their order and the dtype of `x`; and the cache.

        Raises:
            TypeError: if `x` is not a NamedArray.
            ValueError: if `x` lacks `Embed`, or has other batch axes than the cache.

        Example:
            >>> import haliax as hax
            >>> import jax
            >>> from stackax.mamba2 import Mamba2Cache, Mamba2Config, Mamba2Mixer
            >>> config = Mamba2Config(layers=1, width=32, head_dim=16, state=8, vocab_size=8)
            >>> mixer = Mamba2Mixer.init(config, key=jax.random.key(0))
            >>> y, cache = mixer.step(hax.ones({"embed": 32}), Mamba2Cache.init(config))
            >>> y.shape
            {'embed': 32}
        """
        require_axes("x", x, self.config.Embed)
        Batch = _batch_axes(x, self.config)
        state, window, segment_id = self._remembered(cache, Batch)
        z, xBC, dt = self._project_in(x, Batch)
        xBC, window = causal_conv_step(xBC, window, **self._convolution())
        xs, B, C = self._split_conv(xBC)
        y, state = ssd_step(xs, dt, self._A(xs), B, C, state, **self._steps())
        out = self._project_out(y, z, Batch).rearrange(x.axes)
        return out, _updated(cache, state, window, segment_id, Batch)

    def _project_in(self, x: NamedArray, axes: tuple[Axis, ...]) -> tuple[Array, Array, Array]:
        """The gate, what the convolution sees, and dt, each of shape (*axes, features)."""
        config = self.config
        projected = project(self.in_proj, x).rearrange((*axes, config.InProj)).array
        inner, conv_end = config.Inner.size, config.Inner.size + config.ConvChannels.size
        projected = checkpoint_name(projected, "in_proj")
        return (
            projected[..., :inner],
            projected[..., inner:conv_end],
            projected[..., conv_end:],
        )

    def _split_conv(self, xBC: Array) -> tuple[Array, Array, Array]:
        """x of shape (..., heads, head_dim), then B and C of shape (..., groups, state)."""
        config = self.config
        inner, width = config.Inner.size, config.groups * config.state
        lead = xBC.shape[:-1]
        return (
            xBC[..., :inner].reshape(*lead, config.Heads.size, config.head_dim),
            xBC[..., inner : inner + width].reshape(*lead, config.groups, config.state),
            xBC[..., inner + width :].reshape(*lead, config.groups, config.state),
        )

    def _project_out(self, y: Array, z: Array, axes: tuple[Axis, ...]) -> NamedArray:
        config = self.config
        y = checkpoint_name(y, "ssd").reshape(z.shape)
        normed = gated_rms_norm(
            y,
            z,
            self.norm_weight.array,
            groups=config.groups,
            eps=config.norm_eps,
            norm_before_gate=config.norm_before_gate,
        )
        normed = checkpoint_name(normed.astype(z.dtype), "gated_norm")
        out = project(self.out_proj, hax.named(normed, (*axes, config.Inner)))
        return checkpoint_name(out, "out_proj")

    def _convolution(self) -> dict[str, Any]:
        bias = None if self.conv_bias is None else self.conv_bias.array
        return {"weight": self.conv_weight.array, "bias": bias, "activation": "silu"}

    def _A(self, xs: Array) -> Array:
        return -jnp.exp(self.A_log.array.astype(jnp.promote_types(xs.dtype, jnp.float32)))

    def _steps(self) -> dict[str, Any]:
        return {
            "D": self.D.array,
            "dt_bias": self.dt_bias.array,
            "dt_softplus": True,
            "dt_limit": self.config.dt_limit,
        }

    def _knobs(self) -> dict[str, Any]:
        return {
            "chunk_size": self.config.chunk_size,
            "chunks_per_block": self.config.chunks_per_block,
        }

    def _remembered(
        self, cache: Mamba2Cache, Batch: tuple[Axis, ...]
    ) -> tuple[Array, Array, Array]:
        """The cache's arrays, with the batch axes in the order of the input's."""
        config = self.config
        wanted = {
            "state": (*Batch, config.Heads, config.HeadDim, config.State),
            "window": (*Batch, config.Window, config.ConvChannels),
            "segment_id": Batch,
        }
        for name, axes in wanted.items():
            require_axes(f"cache.{name}", getattr(cache, name), *axes)
            if len(getattr(cache, name).axes) != len(axes):
                raise ValueError(
                    f"cache.{name} has the axes {getattr(cache, name).axes}, but x has the batch "
                    f"axes {Batch}: make the cache with Mamba2Cache.init(config, {Batch})"
                )
        state, window, segment_id = (
            getattr(cache, name).rearrange(axes).array for name, axes in wanted.items()
        )
        return state, window, segment_id


def _draw_dt_bias(config: Mamba2Config, key: PRNGKeyArray) -> NamedArray:
    low, high = (math.log(bound) for bound in config.dt_range)
    log_dt = hax.random.uniform(key, config.Heads, minval=low, maxval=high)
    dt = jnp.maximum(jnp.exp(log_dt.array), config.dt_floor)
    return hax.named(dt + jnp.log(-jnp.expm1(-dt)), config.Heads)  # the inverse of softplus


def _batch_axes(x: NamedArray, config: Mamba2Config) -> tuple[Axis, ...]:
    forbid_axes("x", x, config.InProj, config.Inner)
    return tuple(a for a in x.axes if a.name not in (POSITION, config.Embed.name))


def _sequence_axes(x: NamedArray, config: Mamba2Config) -> tuple[Axis, ...]:
    """The batch axes of `x`, then its positions."""
    require_axes("x", x, config.Embed, POSITION)
    return (*_batch_axes(x, config), x.resolve_axis(POSITION))


def _flags(
    axes: tuple[Axis, ...], mask: NamedArray | None, segment_ids: NamedArray | None
) -> tuple[Array | None, Array | None]:
    """Mask and segment ids as arrays over all of `axes`."""
    flags = []
    for name, given in (("mask", mask), ("segment_ids", segment_ids)):
        if given is not None:
            require_axes(name, given, axes[-1])
            extra = [a.name for a in given.axes if a not in axes]
            if extra:
                raise ValueError(f"{name} has the axes {extra}, which x has not: leave them out")
            given = given.broadcast_to(axes).rearrange(axes).array
        flags.append(given)
    return flags[0], flags[1]


def _last_document(documents: Array, real: Array | None, before: Array) -> Array:
    """The document of the last real position, or the one before where there is none."""
    if real is None:
        return documents[..., -1] if documents.shape[-1] else before
    last = jnp.max(jnp.where(real, jnp.arange(real.shape[-1]), -1), axis=-1, initial=-1)
    found = jnp.take_along_axis(documents, jnp.maximum(last, 0)[..., None], axis=-1)[..., 0]
    return jnp.where(last < 0, before, found)


def _updated(
    cache: Mamba2Cache, state: Array, window: Array, segment_id: Array, Batch: tuple[Axis, ...]
) -> Mamba2Cache:
    """The cache with new contents, in its own axes and dtypes."""

    def put(old: NamedArray, new: Array) -> NamedArray:
        rest = tuple(a for a in old.axes if a not in Batch)
        return hax.named(new.astype(old.dtype), (*Batch, *rest)).rearrange(old.axes)

    return Mamba2Cache(
        put(cache.state, state), put(cache.window, window), put(cache.segment_id, segment_id)
    )
