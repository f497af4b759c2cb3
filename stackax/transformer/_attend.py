"""Scaled dot-product attention over named axes, as a function without weights."""

import functools as ft

import haliax as hax
import jax
from haliax import Axis, NamedArray

from .._axes import axis_name, require_axes


def attend(
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    *,
    Pos: Axis | str,
    Heads: Axis | str,
    KVHeads: Axis | str,
    HeadDim: Axis | str,
    is_causal: bool,
    scale: float | None = None,
) -> NamedArray:
    r"""Mixes the values of each head by the softmax of its scaled query-key products.

    \(\mathrm{out}_{p h} = \sum_s \mathrm{softmax}_s(c\, q_{p h} \cdot k_{s g(h)})\, v_{s g(h)}\),
    where query head \(h\) uses key and value head \(g(h) = \lfloor h / (H / K) \rfloor\).

    It is `jax.nn.dot_product_attention`, so the softmax runs in float32 whatever the dtype. There
    is no mask argument: with `is_causal`, padding at the end of a sequence never reaches the
    positions before it.

    Args:
        query: Queries with `Pos`, `Heads`, `HeadDim` and any batch axes.
        key: Keys with `Pos`, `KVHeads`, `HeadDim` and the batch axes of `query`. Without
            `is_causal`, its `Pos` may have another size than the queries'.
        value: Values with the axes of `key`.
        Pos: The positions.
        Heads: The query heads, a multiple of `KVHeads` in size.
        KVHeads: The key and value heads.
        HeadDim: The features of one head.
        is_causal: True where position p may only look at positions up to p, False where it may
            look at all of them.
        scale: The factor \(c\). None means one over the square root of the size of `HeadDim`.

    Returns:
        An array with the axes, their order and the dtype of `query`.

    Raises:
        TypeError: if an argument is not a NamedArray.
        ValueError: if an axis is missing or has the wrong size, the batch axes differ, the
            query heads are not a multiple of the key heads, the dtypes differ, or `is_causal` is
            asked for with unequal numbers of positions.

    Example:
        >>> import haliax as hax
        >>> from stackax.transformer import attend
        >>> q = hax.ones({"position": 5, "heads": 4, "head_dim": 8})
        >>> kv = hax.ones({"position": 5, "kv_heads": 2, "head_dim": 8})
        >>> axes = dict(Pos="position", Heads="heads", KVHeads="kv_heads", HeadDim="head_dim")
        >>> attend(q, kv, kv, **axes, is_causal=True).shape
        {'position': 5, 'heads': 4, 'head_dim': 8}

    References:
        Vaswani et al., Attention Is All You Need, https://arxiv.org/abs/1706.03762, equation 1;
        Ainslie et al., GQA, https://arxiv.org/abs/2305.13245.
    """
    names = [axis_name(axis) for axis in (Pos, Heads, HeadDim)]
    kv_names = [axis_name(axis) for axis in (Pos, KVHeads, HeadDim)]
    require_axes("query", query, Pos, Heads, HeadDim)
    Batch = [axis for axis in query.axes if axis.name not in names]
    _check_keys("key", key, query, Batch, kv_names)
    _check_keys("value", value, query, Batch, kv_names)
    _check_sizes(query, key, value, names, kv_names, is_causal)

    # One batch axis is the function's own; the others are mapped, so that none is ever merged
    # with another (a merged axis could not stay sharded).
    run = ft.partial(jax.nn.dot_product_attention, is_causal=is_causal, scale=scale)
    for _ in Batch[1:]:
        run = jax.vmap(run)
    out_axes = query.resolve_axis((*(axis.name for axis in Batch), *names))
    operands = [query.rearrange(out_axes).array]
    for x in (key, value):
        operands.append(x.rearrange((*(axis.name for axis in Batch), *kv_names)).array)
    return hax.named(run(*operands), out_axes).rearrange(query.axes)


def _check_keys(name, x, query, Batch, kv_names) -> None:
    require_axes(name, x, *kv_names, *Batch)
    extra = [a.name for a in x.axes if a.name not in kv_names and a not in Batch]
    if extra:
        raise ValueError(
            f"{name} has the axes {extra}, which query has not: give both the same batch axes"
        )
    if x.dtype != query.dtype:
        raise ValueError(f"{name} has dtype {x.dtype}, but query has {query.dtype}: cast one")


def _check_sizes(query, key, value, names, kv_names, is_causal) -> None:
    pos, heads, head_dim = names
    for name in kv_names:
        if key.axis_size(name) != value.axis_size(name):
            raise ValueError(
                f"axis {name!r} has size {key.axis_size(name)} in key, but "
                f"{value.axis_size(name)} in value"
            )
    if query.axis_size(head_dim) != key.axis_size(head_dim):
        raise ValueError(
            f"axis {head_dim!r} has size {query.axis_size(head_dim)} in query, but "
            f"{key.axis_size(head_dim)} in key"
        )
    if query.axis_size(heads) % key.axis_size(kv_names[1]):
        raise ValueError(
            f"query has {query.axis_size(heads)} heads on axis {heads!r}, which is not a multiple "
            f"of the {key.axis_size(kv_names[1])} of key on axis {kv_names[1]!r}"
        )
    if is_causal and query.axis_size(pos) != key.axis_size(pos):
        raise ValueError(
            f"is_causal=True needs as many positions in query ({query.axis_size(pos)}) as in key "
            f"({key.axis_size(pos)}): with unequal numbers it is not said which ones align"
        )
