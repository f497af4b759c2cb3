"""A Mamba-2 model in float64 NumPy, token by token, from the weights of a decoder.

Shapes of one sequence: T tokens, E features of the residual stream.
"""

import numpy as np

from tests.reference import ssd as formulas
from tests.reference.transformer import rms_norm


def wide(named):
    return np.asarray(named.array, np.float64)


def mixer(mixer, x, ids=None):
    """A `Mamba2Mixer` with its weights, on normalised x of shape (T, E), all tokens real."""
    config = mixer.config
    H, P, G, N = config.Heads.size, config.head_dim, config.groups, config.state
    ids = np.zeros(len(x), int) if ids is None else ids
    projected = linear(mixer.in_proj, x)
    z, xBC, dt = np.split(projected, [H * P, 2 * H * P + 2 * G * N], axis=-1)
    bias = 0 if mixer.conv_bias is None else wide(mixer.conv_bias)
    window = np.zeros((config.conv_width - 1, xBC.shape[1]))
    xBC, _ = formulas.conv(xBC, wide(mixer.conv_weight), bias, window=window, ids=ids)
    xBC = xBC / (1 + np.exp(-xBC))
    xs, B, C = np.split(xBC, [H * P, H * P + G * N], axis=-1)
    dt, _ = formulas.discretise(dt, bias=wide(mixer.dt_bias), limit=config.dt_limit)
    y, _, _ = formulas.ssd(
        xs.reshape(-1, H, P),
        dt,
        -np.exp(wide(mixer.A_log)),
        B.reshape(-1, G, N),
        C.reshape(-1, G, N),
        D=np.broadcast_to(wide(mixer.D).reshape(H, -1), (H, P)),
        state=np.zeros((H, P, N)),
        resets=formulas.find_resets(ids, np.ones(len(x), bool)),
    )
    normed = formulas.gated_rms_norm(
        y.reshape(-1, H * P),
        z,
        wide(mixer.norm_weight),
        groups=G,
        eps=config.norm_eps,
        norm_before_gate=config.norm_before_gate,
    )
    return linear(mixer.out_proj, normed)


def linear(linear, x):
    bias = 0 if linear.bias is None else wide(linear.bias)
    return x @ wide(linear.weight).T + bias


def block(block, x, ids=None):
    """A `Mamba2Block` on the residual stream x of shape (T, E)."""
    normed = rms_norm(x, wide(block.norm.weight), block.norm.eps)
    return x + mixer(block.mixer, normed, ids)


def logits(decoder, tokens, ids=None):
    """A decoder on tokens of shape (T,)."""
    table = wide(decoder.embedding.weight)
    x = table[np.asarray(tokens)]
    for each in decoder.stack.unstacked():
        x = block(each, x, ids)
    x = rms_norm(x, wide(decoder.norm.weight), decoder.norm.eps)
    head = table if decoder.head is None else wide(decoder.head.weight)
    return (x @ head.T)[:, : decoder.config.vocab_size]
