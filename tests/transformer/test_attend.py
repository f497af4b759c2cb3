import functools as ft

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from haliax import Axis

from stackax.transformer import attend
from tests.reference import transformer as reference

Pos, Heads, HeadDim, Batch = hax.make_axes(position=6, heads=4, head_dim=8, batch=2)
AXES = dict(Pos="position", Heads="heads", KVHeads="kv_heads", HeadDim="head_dim")
run = eqx.filter_jit(ft.partial(attend, **AXES))


def inputs(kv_heads, *batch, KeyPos=Pos):
    KVHeads, rng = Axis("kv_heads", kv_heads), np.random.default_rng(0)

    def normal(*axes):
        return hax.named(rng.normal(size=[a.size for a in axes]).astype(np.float32), axes)

    query = normal(*batch, Pos, Heads, HeadDim)
    return query, *(normal(*batch, KeyPos, KVHeads, HeadDim) for _ in range(2))


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("is_causal", [True, False])
def test_it_agrees_with_float64_numpy(kv_heads, is_causal):
    arrays = inputs(kv_heads)
    expected = reference.attend(*(x.array for x in arrays), is_causal=is_causal)
    ours = run(*arrays, is_causal=is_causal)
    np.testing.assert_allclose(ours.array, expected, atol=1e-6)


def test_the_scale_is_the_one_that_was_given():
    arrays = inputs(2)
    expected = reference.attend(*(x.array for x in arrays), is_causal=True, scale=0.1)
    np.testing.assert_allclose(run(*arrays, is_causal=True, scale=0.1).array, expected, atol=1e-6)


def test_grouped_heads_equal_repeated_ones_also_in_gradients():
    query, key, value = inputs(2)

    def repeated(x):
        return hax.repeat(x, 2, "kv_heads")

    def loss(grouped, query, key, value):
        if not grouped:
            key, value = repeated(key), repeated(value)
        return hax.sum(hax.sin(attend(query, key, value, **AXES, is_causal=True))).scalar()

    for x, y in zip(
        *(
            jax.tree.leaves(
                jax.jit(jax.grad(ft.partial(loss, grouped), (0, 1, 2)))(query, key, value)
            )
            for grouped in (True, False)
        ),
        strict=True,
    ):
        np.testing.assert_allclose(x, y, atol=1e-6)


def test_without_causality_keys_may_have_other_positions():
    arrays = inputs(2, KeyPos=Axis("position", 9))
    expected = reference.attend(*(x.array for x in arrays), is_causal=False)
    np.testing.assert_allclose(run(*arrays, is_causal=False).array, expected, atol=1e-6)


def test_any_batch_axes_in_any_order_equal_a_loop_over_them():
    Beam = Axis("beam", 3)
    query, key, value = inputs(2, Batch, Beam)

    @eqx.filter_jit
    def reordered(query, key, value):
        query = query.rearrange(("head_dim", "beam", "position", "batch", "heads"))
        key = key.rearrange(("beam", "kv_heads", "position", "head_dim", "batch"))
        return attend(query, key, value, **AXES, is_causal=True)

    out = reordered(query, key, value)
    assert [a.name for a in out.axes] == ["head_dim", "beam", "position", "batch", "heads"]
    out = np.transpose(out.array, (3, 1, 2, 4, 0))
    for b, e in np.ndindex(2, 3):
        one = (x.array[b, e] for x in (query, key, value))
        expected = reference.attend(*one, is_causal=True)
        np.testing.assert_allclose(out[b, e], expected, atol=1e-6)


def test_bfloat16_softmax_runs_in_float32():
    arrays = [x.astype(jnp.bfloat16) for x in inputs(2)]
    out = run(*arrays, is_causal=True)
    expected = reference.attend(*(x.array for x in arrays), is_causal=True)
    assert out.dtype == jnp.bfloat16
    # Two roundings to 8 bits, of the weights and of the result, on values of order one.
    np.testing.assert_allclose(out.array.astype(jnp.float32), expected, atol=2e-2)


@pytest.mark.parametrize(
    "change, needle",
    [
        (lambda q, k, v: (q, k["position", :4], v["position", :4]), "as many positions"),
        (lambda q, k, v: (q, k["position", :4], v), "size 4 in key, but 6 in value"),
        (lambda q, k, v: (q["heads", :3], k, v), "not a multiple of the 2"),
        (lambda q, k, v: (q["head_dim", :4], k, v), "size 4 in query, but 8 in key"),
        (lambda q, k, v: (q, k.astype(jnp.bfloat16), v), "dtype bfloat16"),
        (lambda q, k, v: (q, k.broadcast_axis(Batch), v), "query has not"),
        (lambda q, k, v: (q.broadcast_axis(Batch), k, v), "needs axis 'batch'"),
        (lambda q, k, v: (q.rename({"heads": "h"}), k, v), "needs axis 'heads'"),
    ],
)
def test_arrays_that_do_not_fit_raise_by_name(change, needle):
    with pytest.raises(ValueError, match=needle):
        attend(*change(*inputs(2)), **AXES, is_causal=True)
