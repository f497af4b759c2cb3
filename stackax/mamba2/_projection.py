"""Linear layers that start as the paper's."""

import haliax as hax
from haliax import Axis
from jaxtyping import PRNGKeyArray


def draw_linear(
    In: Axis, Out: Axis, *, use_bias: bool, scale: float = 1.0, key: PRNGKeyArray
) -> hax.nn.Linear:
    r"""A linear layer, uniform between \(\pm s / \sqrt{\mathrm{In}}\), its bias zero.

    Args:
        In: The input axis.
        Out: The output axis.
        use_bias: Whether it has a bias.
        scale: The factor \(s\).
        key: A PRNG key.

    Returns:
        The layer, in float32.

    Example:
        >>> import haliax as hax
        >>> import jax
        >>> from stackax.mamba2._projection import draw_linear
        >>> In, Out = hax.make_axes(embed=8, inner=16)
        >>> draw_linear(In, Out, use_bias=False, key=jax.random.key(0)).weight.shape
        {'inner': 16, 'embed': 8}
    """
    bound = scale * In.size**-0.5
    weight = hax.random.uniform(key, (Out, In), minval=-bound, maxval=bound)
    return hax.nn.Linear(weight, hax.zeros(Out) if use_bias else None, In, Out)
