"""scan, fold and map as functions, against Haliax's own and against Python loops."""

import functools as ft

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from haliax.util import is_named_array

from stackax import fold, layer_index, per_layer, scan, shared
from stackax import map as stackax_map
from tests.reference.programs import run_together, take
from tests.zoo import platform_warnings_ignored

Height, Width, Depth = hax.make_axes(height=4, width=3, depth=2)
HWD = hax.random.uniform(jr.key(0), (Height, Width, Depth))


def assert_same(actual, expected):
    """Equal trees: structure, axes in order, dtypes, and values to a unit of rounding."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-6)


# Haliax's semantics: the same call gives the same thing. One row per call.


def sum_and_select(acc, x):
    return acc + jnp.sum(x.array), x.take(Width, 2)


def running_sum(acc, x):
    return acc + x, acc * x


PLAIN = jr.normal(jr.key(1), (Height.size, 5))
SAME_AS_HALIAX = {
    "first axis": lambda m: m.scan(sum_and_select, Height)(0.0, HWD),
    "last axis": lambda m: m.scan(sum_and_select, Depth)(0.0, HWD),
    "axis by name": lambda m: m.scan(sum_and_select, "height")(0.0, HWD),
    "reversed": lambda m: m.scan(running_sum, "height", reverse=True)(
        hax.zeros((Width, Depth)), HWD
    ),
    "unrolled": lambda m: m.scan(running_sum, "height", unroll=2)(hax.zeros((Width, Depth)), HWD),
    "remat": lambda m: m.scan(running_sum, "height", remat=True)(hax.zeros((Width, Depth)), HWD),
    "plain arrays": lambda m: m.scan(running_sum, Height)(jnp.zeros(5), PLAIN),
    "plain arrays, axis by name": lambda m: m.scan(running_sum, "height")(jnp.zeros(5), PLAIN),
    "a mixture": lambda m: m.scan(
        lambda c, a, b: (c + jnp.sum(a.array) * b, {"b": b, "a": a}), Height
    )(jnp.zeros(5), HWD, PLAIN),
    "keyword arguments": lambda m: m.scan(lambda c, x, *, y: (c + x * y, y), Height)(
        hax.zeros((Width, Depth)), HWD, y=HWD["depth", 0]
    ),
    "scalars are shared": lambda m: m.scan(lambda c, z, x: (c + z * x, x * z), Height)(
        hax.zeros((Width, Depth)), 4.0, HWD
    ),
    "the carry is not sliced": lambda m: m.scan(running_sum, Height)(
        jnp.arange(4.0), jnp.ones((4, 4))
    ),
    "a named carry with the axis is not sliced": lambda m: m.fold(lambda c, x: c + x, Height)(
        hax.arange(Height) * 1.0, hax.ones(Height)
    ),
    "arrays without the axis are shared": lambda m: m.fold(lambda c, x, y: c + x * y, Height)(
        hax.zeros(Width), hax.ones((Height, Width)), hax.arange(Width) * 2.0
    ),
    "only named arrays scanned": lambda m: m.scan(
        lambda c, x, p: (c + jnp.sum(p), x), Height, is_scanned=is_named_array
    )(0.0, HWD, PLAIN),
    "nothing but named arrays scanned, by a bool": lambda m: m.fold(
        lambda c, x: c + x, Height, is_scanned=True
    )(hax.zeros((Width, Depth)), HWD),
    "fold": lambda m: m.fold(lambda c, x: c + x, Depth)(hax.zeros((Height, Width)), HWD),
    "fold by name": lambda m: m.fold(lambda c, x: c + x, "depth")(hax.zeros((Height, Width)), HWD),
    "a carry that is a tree": lambda m: m.fold(
        lambda c, x: {"sum": c["sum"] + x, "n": c["n"] + 1}, "height"
    )({"sum": hax.zeros((Width, Depth)), "n": jnp.asarray(0)}, HWD),
    "map": lambda m: m.map(lambda x: x.sum(Width), Height)(HWD),
    "map of plain arrays": lambda m: m.map(lambda x: x * 2, Height)(PLAIN),
    "map to a tree": lambda m: m.map(lambda x: (x, {"s": x.sum(Width)}), Height)(HWD),
    "map reversed keeps the order": lambda m: m.map(lambda x: x * 2, Height, reverse=True)(HWD),
    "a module as an argument": lambda m: m.fold(lambda c, norm: norm(c + 1.0), Height)(
        hax.arange(Width) * 1.0, hax.vmap(hax.nn.LayerNorm.init, Height)(Width)
    ),
}


class _Ours:
    scan, fold, map = staticmethod(scan), staticmethod(fold), staticmethod(stackax_map)


@ft.cache
def both_libraries():
    """Every row under both libraries, compiled as one program."""
    calls = {
        (library, name): ft.partial(call, library)
        for library in (_Ours, hax)
        for name, call in SAME_AS_HALIAX.items()
    }
    return run_together(calls)


@pytest.mark.parametrize("call", SAME_AS_HALIAX)
def test_the_same_call_gives_what_haliax_gives(call):
    results = both_libraries()
    assert_same(take(results, (_Ours, call)), take(results, (hax, call)))


# Beyond Haliax


def test_scan_equals_a_python_loop():
    carry, outs = jnp.zeros(5), []
    for i in range(Height.size):
        outs.append(carry * PLAIN[i])
        carry = carry + PLAIN[i]
    assert_same(scan(running_sum, Height)(jnp.zeros(5), PLAIN), (carry, jnp.stack(outs)))


def test_a_reversed_scan_runs_backwards_and_stacks_its_outputs_in_order():
    carry, outs = jnp.zeros(5), {}
    for i in reversed(range(Height.size)):
        outs[i] = carry * PLAIN[i]
        carry = carry + PLAIN[i]
    expected = carry, jnp.stack([outs[i] for i in range(Height.size)])
    assert_same(scan(running_sum, Height, reverse=True)(jnp.zeros(5), PLAIN), expected)


def test_outputs_get_the_scanned_axis_in_front():
    _, out = scan(lambda c, x: (c, {"named": x, "plain": x.array[0]}), Depth)(0, HWD)
    assert out["named"].axes == (Depth, Height, Width)
    assert out["plain"].shape == (Depth.size, Width.size)


def test_outputs_that_are_no_arrays_are_kept_out_of_the_loop():
    _, out = scan(lambda c, x: (c, {"x": x, "none": None}), Height)(0.0, HWD)
    assert out["none"] is None


def test_per_layer_and_shared_override_what_an_array_looks_like():
    square = jnp.arange(16.0).reshape(4, 4)
    loop = fold(lambda c, a, b: c + jnp.sum(a) * jnp.sum(b[0]), Height)
    expected = sum(jnp.sum(square[i]) * jnp.sum(square[0]) for i in range(4))
    np.testing.assert_allclose(loop(0.0, per_layer(square), shared(square)), expected)


def test_one_key_is_split_over_the_steps_unless_shared():
    draw = lambda c, key: (c, jr.normal(key, ()))  # noqa: E731
    _, split = scan(draw, Height)(0, jr.key(7))
    np.testing.assert_array_equal(split, jax.vmap(jr.normal)(jr.split(jr.key(7), Height.size)))
    _, same = scan(draw, Height)(0, shared(jr.key(7)))
    np.testing.assert_array_equal(same, jnp.full(Height.size, jr.normal(jr.key(7), ())))


@pytest.mark.parametrize("reverse", [False, True])
def test_the_layer_index_counts_layers_not_steps(reverse):
    carry = jnp.zeros((), jnp.int32)
    _, index = scan(lambda c, i: (c + i, i), Height, reverse=reverse)(carry, layer_index())
    np.testing.assert_array_equal(index, np.arange(Height.size))
    assert index.dtype == jnp.int32


def test_plain_arrays_are_sliced_without_a_warning():
    """Warnings are errors here: the functions follow Haliax's rule, which their callers know."""
    fold(lambda c, x: c + x, Height)(jnp.zeros(5), PLAIN)


def test_one_step_is_enough():
    One = hax.Axis("height", 1)
    total, outs = scan(running_sum, One)(jnp.zeros(5), PLAIN[:1])
    assert_same((total, outs), (PLAIN[0], jnp.zeros((1, 5))))


def test_no_step_leaves_the_carry_and_gives_empty_outputs():
    None_ = hax.Axis("height", 0)
    total, outs = scan(running_sum, None_)(jnp.ones(5), jnp.zeros((0, 5)))
    np.testing.assert_array_equal(total, np.ones(5))
    assert outs.shape == (0, 5)


def test_a_scan_inside_a_scan_over_another_axis():
    inner = lambda c, x: fold(lambda c, x: c + jnp.sum(x.array), Width)(c, x)  # noqa: E731
    total = fold(inner, Height)(jnp.zeros(()), HWD)
    np.testing.assert_allclose(total, jnp.sum(HWD.array), rtol=1e-6)


@pytest.mark.parametrize("outer", [True, "nested", "offload"])
@pytest.mark.parametrize("inner", [True, "nested", "offload"])
def test_loops_under_policies_nest_within_each_other(inner, outer):
    """Both loops run over axes of one name, so that each must know its own carry."""
    weights = hax.named(jnp.linspace(0.5, 1.5, 6).reshape(3, 2), ("layers", "two"))

    def loss(x, inner, outer):
        sin = fold(lambda c, w: jnp.sin(c * w), hax.Axis("layers", 2), remat=inner)
        step = lambda c, w: sin(c, per_layer(w.array))  # noqa: E731
        return fold(step, "layers", remat=outer)(x, weights)

    with platform_warnings_ignored():
        gradient = jax.jit(jax.grad(lambda x: loss(x, inner, outer)))(0.3)
    np.testing.assert_allclose(gradient, jax.grad(lambda x: loss(x, False, False))(0.3), rtol=1e-6)


# Errors


def two(c, x, y):
    return c, None


ERRORS = {
    "a plain argument of another size": (
        lambda: scan(two, Height)(0, jnp.zeros((4, 3)), jnp.zeros((3, 3))),
        ("y", "3", "4"),
    ),
    "a keyword argument of another size": (
        lambda: scan(two, Height)(0, jnp.zeros((4, 3)), y=jnp.zeros((3, 3))),
        ("y", "3", "4"),
    ),
    "a marked argument of another size": (
        lambda: scan(two, Height)(0, per_layer(jnp.zeros(5)), jnp.zeros((4, 3))),
        ("x", "5", "4"),
    ),
    "a named argument of another size": (
        lambda: scan(two, Height)(0, hax.zeros(Height.resize(7)), jnp.zeros((4, 3))),
        ("x", "height", "7", "4"),
    ),
    "an array inside a tree": (
        lambda: scan(two, Height)(0, {"deep": [jnp.zeros((3, 3))]}, jnp.zeros(4)),
        ("x", "deep", "3", "4"),
    ),
    "keys for another number of steps": (
        lambda: scan(two, Height)(0, jr.split(jr.key(0), 3), jnp.zeros(4)),
        ("x", "3", "4"),
    ),
    "an axis that no argument has": (
        lambda: scan(lambda c, x: (c, x), "heigth")(0, HWD),
        ("heigth",),
    ),
    "no pair": (lambda: scan(lambda c, x: c, Height)(0, HWD), ("pair",)),
    "unroll below one": (lambda: scan(running_sum, Height, unroll=0)(0.0, PLAIN), ("unroll",)),
    "an unknown policy": (lambda: scan(running_sum, Height, remat="ful")(0.0, PLAIN), ("'full'",)),
    "a map's argument of another size": (
        lambda: stackax_map(lambda x, y: x, Height)(HWD, jnp.zeros(3)),
        ("y", "3", "4"),
    ),
    "a fold's argument of another size": (
        lambda: fold(lambda c, weights: c, Height)(0, jnp.zeros(3)),
        ("weights", "3", "4"),
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_a_wrong_call_raises_value_error_in_the_callers_words(case):
    call, words = ERRORS[case]
    with pytest.raises(ValueError) as raised:
        call()
    assert all(word in str(raised.value) for word in words), raised.value


def test_a_field_of_a_module_is_named_by_its_path():
    class Foo(eqx.Module):
        my_array: jax.Array

    with pytest.raises(ValueError, match=r"foo.*\.my_array"):
        scan(lambda c, foo: (c, foo.my_array), Height)(0, Foo(jnp.zeros((3, 3))))


def test_a_carry_that_changes_its_axes_raises_and_shows_them():
    with pytest.raises((ValueError, TypeError)) as raised:
        fold(lambda c, x: hax.concatenate("width", [c, x]), Height)(
            hax.zeros((Width, Depth)), hax.zeros((Height, Width, Depth))
        )
    assert "carry" in str(raised.value) and "6" in str(raised.value)


def test_a_carry_whose_axes_change_places_raises_or_is_put_back():
    flip = lambda c, x: (c + x).rearrange((Depth, Width))  # noqa: E731
    try:
        out = fold(flip, Height)(hax.zeros((Width, Depth)), HWD)
    except (ValueError, TypeError) as error:
        assert "carry" in str(error)
    else:
        np.testing.assert_allclose(out.rearrange((Width, Depth)).array, HWD.sum(Height).array)
