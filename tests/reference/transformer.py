"""The transformer's formulas in float64 NumPy, on plain arrays, written out position by position.

Shapes: S positions, D features of the residual stream, H query heads, K key heads, d per head.
"""

import numpy as np


def rotary(x, positions, theta):
    """Turns x of shape (S, heads, d), one pair at a time."""
    out = np.array(x, dtype=np.float64)
    half = x.shape[-1] // 2
    for s, position in enumerate(positions):
        for i in range(half):
            angle = position * float(theta) ** (-2 * i / x.shape[-1])
            a, b = x[s, :, i], x[s, :, i + half]
            out[s, :, i] = a * np.cos(angle) - b * np.sin(angle)
            out[s, :, i + half] = a * np.sin(angle) + b * np.cos(angle)
    return out


def attend(query, key, value, *, is_causal, scale=None):
    """Attention of (S, H, d) queries over (T, K, d) keys and values, one query at a time."""
    query, key, value = (np.asarray(x, dtype=np.float64) for x in (query, key, value))
    group = query.shape[1] // key.shape[1]
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    out = np.zeros_like(query)
    for s in range(query.shape[0]):
        seen = s + 1 if is_causal else key.shape[0]
        for h in range(query.shape[1]):
            scores = scale * key[:seen, h // group] @ query[s, h]
            weights = np.exp(scores - scores.max())
            out[s, h] = weights / weights.sum() @ value[:seen, h // group]
    return out


def swiglu(gate, up):
    gate, up = np.asarray(gate, dtype=np.float64), np.asarray(up, dtype=np.float64)
    return gate / (1 + np.exp(-gate)) * up


def rms_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def block(block, x, config):
    """A `TransformerBlock` with its weights, on x of shape (S, D)."""

    def weight(linear):
        return np.asarray(linear.weight.array, dtype=np.float64)

    x = np.asarray(x, dtype=np.float64)
    norms = (block.attention_norm, block.mlp_norm)
    norm_weights = [np.asarray(norm.weight.array, dtype=np.float64) for norm in norms]
    normed = rms_norm(x, norm_weights[0], config.norm_eps)
    attention, mlp, positions = block.attention, block.mlp, np.arange(len(x))
    query, key, value = (
        np.einsum("sD,hdD->shd", normed, weight(linear))
        for linear in (attention.query_proj, attention.key_proj, attention.value_proj)
    )
    query = rotary(query, positions, config.rope_theta)
    key = rotary(key, positions, config.rope_theta)
    context = attend(query, key, value, is_causal=True)
    x = x + np.einsum("shd,Dhd->sD", context, weight(attention.out_proj))
    normed = rms_norm(x, norm_weights[1], config.norm_eps)
    gate, up = (normed @ weight(linear).T for linear in (mlp.gate_proj, mlp.up_proj))
    return x + swiglu(gate, up) @ weight(mlp.down_proj).T
