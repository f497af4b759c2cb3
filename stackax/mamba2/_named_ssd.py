"""State space duality over named axes: `ssd` with its axes sorted."""

import math
from typing import Any

import haliax as hax
from haliax import Axis, NamedArray

from .._axes import axis_name, require_axes
from ._discretise import DtLimit
from ._ssd import ssd


def named_ssd(
    x: NamedArray,
    dt: NamedArray,
    A: NamedArray,
    B: NamedArray,
    C: NamedArray,
    *,
    Pos: Axis | str,
    Heads: Axis | str,
    HeadDim: Axis | str,
    Groups: Axis | str,
    State: Axis | str,
    D: NamedArray | None = None,
    dt_bias: NamedArray | None = None,
    dt_softplus: bool = False,
    dt_limit: DtLimit = (0.0, math.inf),
    initial_state: NamedArray | None = None,
    mask: NamedArray | None = None,
    segment_ids: NamedArray | None = None,
    previous_segment_id: NamedArray | None = None,
    chunk_size: int | None = None,
    chunks_per_block: int | None = None,
) -> tuple[NamedArray, NamedArray]:
    """`ssd` for arrays whose axes have names, in any order.

    Args:
        x: Inputs with `Pos`, `Heads`, `HeadDim` and any batch axes.
        dt: Time steps with `Pos`, `Heads` and the batch axes.
        A: Negative rates of decay with `Heads`.
        B: How inputs enter the state, with `Pos`, `Groups`, `State` and the batch axes.
        C: How outputs read it, with the axes of `B`.
        Pos: The tokens.
        Heads: The heads.
        HeadDim: The features of one head.
        Groups: The groups of `B` and `C`.
        State: The entries of the state.
        D: The skip with `Heads`, and `HeadDim` where it is per channel.
        dt_bias: With `Heads`.
        dt_softplus: As in `ssd`.
        dt_limit: As in `ssd`.
        initial_state: With the batch axes, `Heads`, `HeadDim` and `State`.
        mask: True at real tokens, with the batch axes and `Pos`.
        segment_ids: With the batch axes and `Pos`.
        previous_segment_id: With the batch axes.
        chunk_size: As in `ssd`.
        chunks_per_block: As in `ssd`.

    Returns:
        The outputs with the axes of `x` in their order, and the state behind the last token with
        the batch axes, `Heads`, `HeadDim` and `State`.

    Raises:
        TypeError: if an argument is not a NamedArray, or of the wrong kind of dtype.
        ValueError: if an axis is missing, or as in `ssd`.

    Example:
        >>> import haliax as hax
        >>> from stackax.mamba2 import named_ssd
        >>> Pos, Heads = hax.Axis("position", 5), hax.Axis("heads", 4)
        >>> x, dt = hax.ones((Pos, Heads, hax.Axis("head_dim", 8))), hax.ones((Pos, Heads))
        >>> B = C = hax.ones((Pos, hax.Axis("groups", 2), hax.Axis("state", 16)))
        >>> axes = dict(Pos=Pos, Heads=Heads, HeadDim="head_dim", Groups="groups", State="state")
        >>> y, state = named_ssd(x, dt, -hax.ones(Heads), B, C, **axes)
        >>> state.shape
        {'heads': 4, 'head_dim': 8, 'state': 16}
    """
    pos, heads, head_dim, groups, entries = map(axis_name, (Pos, Heads, HeadDim, Groups, State))
    require_axes("x", x, Pos, Heads, HeadDim)
    require_axes("B", B, Pos, Groups, State)
    batch = [axis for axis in x.axes if axis.name not in (pos, heads, head_dim)]

    def plain(name, array, *axes) -> Any:
        if array is None:
            return None
        require_axes(name, array, *axes)
        _forbid_others(name, array, axes)
        return array.rearrange(tuple(map(axis_name, axes))).array

    has_channels = D is not None and D.has_axis(head_dim)
    y, state = ssd(
        plain("x", x, *batch, pos, heads, head_dim),
        plain("dt", dt, *batch, pos, heads),
        plain("A", A, heads),
        plain("B", B, *batch, pos, groups, entries),
        plain("C", C, *batch, pos, groups, entries),
        D=plain("D", D, heads, *([head_dim] if has_channels else [])),
        dt_bias=plain("dt_bias", dt_bias, heads),
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        initial_state=plain("initial_state", initial_state, *batch, heads, head_dim, entries),
        mask=plain("mask", mask, *batch, pos),
        segment_ids=plain("segment_ids", segment_ids, *batch, pos),
        previous_segment_id=plain("previous_segment_id", previous_segment_id, *batch),
        chunk_size=chunk_size,
        chunks_per_block=chunks_per_block,
    )
    Pos, Heads, HeadDim = (x.resolve_axis(name) for name in (pos, heads, head_dim))
    out = hax.named(y, (*batch, Pos, Heads, HeadDim)).rearrange(x.axes)
    return out, hax.named(state, (*batch, Heads, HeadDim, B.resolve_axis(entries)))


def _forbid_others(name, array, axes) -> None:
    known = [axis_name(axis) for axis in axes]
    extra = [axis.name for axis in array.axes if axis.name not in known]
    if extra:
        raise ValueError(f"{name} has the axes {extra} beside {known}: reduce or rename them")
