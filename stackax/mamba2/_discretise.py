"""From a raw time step to the one that is used, and to the logarithm of its decay."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

DtLimit = tuple[float, float]


def discretise(
    dt: Float[Array, "*batch H"],
    A: Float[Array, " H"],
    *,
    dt_bias: Float[Array, " H"] | None,
    dt_softplus: bool,
    dt_limit: DtLimit,
    mask: Bool[Array, " *batch"] | None,
    resets: Bool[Array, " *batch"] | None,
) -> tuple[Float[Array, "*batch H"], Float[Array, "*batch H"]]:
    r"""\(\Delta = \mathrm{clip}(\mathrm{softplus}(dt + b), lo, hi)\) and \(\Delta A\).

    Padding gets a step of 0, after the limits: it decays nothing and adds nothing. A reset gets a
    log-decay of minus infinity, whose exponential and the derivative of that are exactly 0.

    Args:
        dt: The raw steps of each head.
        A: The heads' negative decay rates.
        dt_bias: Added first.
        dt_softplus: Whether softplus follows.
        dt_limit: The least and the largest step.
        mask: True at real tokens.
        resets: True where the state before a token is dropped.

    Returns:
        Steps and log-decays, in the wider of float32 and the inputs' dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from stackax.mamba2._discretise import discretise
        >>> options = dict(dt_bias=None, dt_softplus=False, mask=None, resets=None)
        >>> dt, log_decay = discretise(
        ...     jnp.array([0.5, 3.0]), jnp.array([-1.0, -2.0]), dt_limit=(0.0, 1.0), **options
        ... )
        >>> dt.tolist(), log_decay.tolist()
        ([0.5, 1.0], [-0.5, -2.0])
    """
    wide = jnp.promote_types(jnp.promote_types(dt.dtype, A.dtype), jnp.float32)
    dt = dt.astype(wide)
    if dt_bias is not None:
        dt = dt + dt_bias.astype(wide)
    if dt_softplus:
        dt = jax.nn.softplus(dt)
    if dt_limit != (0.0, math.inf):
        dt = jnp.clip(dt, *dt_limit)
    if mask is not None:
        dt = jnp.where(mask[..., None], dt, 0.0)
    log_decay = dt * A.astype(wide)
    if resets is not None:
        log_decay = jnp.where(resets[..., None], -jnp.inf, log_decay)
    return dt, log_decay


def check_dt_limit(dt_limit: DtLimit) -> None:
    """Checks that limits are two numbers in order.

    Args:
        dt_limit: The least and the largest step.

    Raises:
        ValueError: if they are not.

    Example:
        >>> from stackax.mamba2._discretise import check_dt_limit
        >>> check_dt_limit((0.0, 0.1))
    """
    if len(dt_limit) != 2 or not 0 <= dt_limit[0] <= dt_limit[1]:
        raise ValueError(
            f"dt_limit={dt_limit} must be the least and the largest step, from 0 upwards: "
            f"give (0.0, math.inf) for no limits"
        )
