"""Mamba-2's formulas in float64 NumPy, token by token, with their derivatives by hand.

Shapes of one sequence: T tokens, H heads of P features, G groups, N entries of the state.
"""

import numpy as np


def softplus(x):
    return np.logaddexp(0, x)


def discretise(dt, *, bias=0.0, limit=(0.0, np.inf), mask=None):
    """The steps (T, H) from raw ones, through softplus and limits, and their derivative."""
    raw = np.asarray(dt, np.float64) + bias
    steps = np.clip(softplus(raw), *limit)
    slope = (steps == softplus(raw)) / (1 + np.exp(-raw))
    if mask is not None:
        steps, slope = steps * mask[:, None], slope * mask[:, None]
    return steps, slope


def ssd(x, dt, A, B, C, *, D, state, resets=None):
    """The recurrence with steps `dt` as they are used. Returns outputs, the last state, all states.

    Args:
        x: (T, H, P).
        dt: (T, H).
        A: (H,).
        B: (T, G, N).
        C: (T, G, N).
        D: (H, P).
        state: (H, P, N).
        resets: (T,), where the state is dropped first.
    """
    group = np.arange(x.shape[1]) // (x.shape[1] // B.shape[1])
    states, y = [np.array(state, np.float64)], np.zeros(x.shape)
    for t in range(len(x)):
        kept = 0.0 if resets is not None and resets[t] else np.exp(dt[t] * A)[:, None, None]
        added = dt[t][:, None, None] * x[t][:, :, None] * B[t][group][:, None, :]
        states.append(kept * states[-1] + added)
        y[t] = np.einsum("hpn,hn->hp", states[-1], C[t][group]) + D * x[t]
    return y, states[-1], states


def ssd_gradients(x, dt, A, B, C, *, D, state, dy, dstate, resets=None):
    """Cotangents of x, dt, A, B, C, D and state, by the recurrence run backwards."""
    group = np.arange(x.shape[1]) // (x.shape[1] // B.shape[1])
    _, _, states = ssd(x, dt, A, B, C, D=D, state=state, resets=resets)
    dx, ddt, dA = np.zeros(x.shape), np.zeros(dt.shape), np.zeros(A.shape)
    dB, dC, dh = np.zeros(B.shape), np.zeros(C.shape), np.array(dstate, np.float64)
    for t in reversed(range(len(x))):
        b, c = B[t][group], C[t][group]
        np.add.at(dC[t], group, np.einsum("hp,hpn->hn", dy[t], states[t + 1]))
        dh = dh + dy[t][:, :, None] * c[:, None, :]
        dx[t] = dt[t][:, None] * np.einsum("hpn,hn->hp", dh, b) + D * dy[t]
        np.add.at(dB[t], group, dt[t][:, None] * np.einsum("hpn,hp->hn", dh, x[t]))
        ddt[t] = np.einsum("hpn,hp,hn->h", dh, x[t], b)
        kept = np.zeros(len(A)) if resets is not None and resets[t] else np.exp(dt[t] * A)
        dlog = kept * np.einsum("hpn,hpn->h", dh, states[t])
        ddt[t] += dlog * A
        dA += dlog * dt[t]
        dh = kept[:, None, None] * dh
    dD = np.einsum("thp,thp->hp", dy, x)
    return dict(x=dx, dt=ddt, A=dA, B=dB, C=dC, D=dD, state=dh)


def find_resets(ids, mask, previous=None):
    """Where the id of a real token is not that of the real token before it."""
    resets = np.zeros(len(ids), bool)
    for t in np.flatnonzero(mask):
        resets[t] = previous is not None and ids[t] != previous
        previous = ids[t]
    return resets


def conv(x, weight, bias, *, window, ids, previous=None):
    """The convolution of real tokens x (T, C) before the activation, and the window behind them."""
    k = len(weight)
    previous = ids[0] if previous is None and len(ids) else previous
    seen = [(previous, row) for row in window]
    y = np.zeros(x.shape)
    for t, row in enumerate(x):
        seen.append((ids[t], row))
        taps = [r if i == ids[t] else 0 * r for i, r in seen[-k:]]
        y[t] = bias + sum(weight[j] * tap for j, tap in enumerate(taps))
    last = seen[-1][0] if seen else previous
    behind = [r if i == last else 0 * r for i, r in seen[len(seen) - (k - 1) :]]
    return y, np.array(behind).reshape(k - 1, x.shape[1])


def gated_rms_norm(y, gate, weight, *, groups, eps, norm_before_gate):
    opened = gate / (1 + np.exp(-gate))
    u = (y if norm_before_gate else y * opened).reshape(*y.shape[:-1], groups, -1)
    u = (u / np.sqrt((u**2).mean(-1, keepdims=True) + eps)).reshape(y.shape) * weight
    return u * opened if norm_before_gate else u
