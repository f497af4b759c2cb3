"""Law: Stacked and BlockSeq give the same results, gradients, warnings and errors.

Every kind of argument that a block can be given is a row of one of the two tables; both containers
run every row. The reference is the Python loop over what each layer ought to receive.
"""

import contextlib
import dataclasses
import functools as ft
import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from haliax.util import is_named_array

from stackax import BlockSeq, Stacked, layer_index, per_layer, shared
from tests.reference.programs import plain, relative_error, run_together, take
from tests.zoo import CONTAINERS, layers

N, WIDTH = 3, 4
Layers = layers(N)
Width = hax.Axis("width", WIDTH)


class Probe(eqx.Module):
    """Adds to the carry whatever it can read from the argument `extra`, bent by its weight."""

    weight: jax.Array

    def __call__(self, x, extra=None, *, flag=True, mode="plus", **more):
        read = sum((_read(leaf) for leaf in jax.tree.leaves((extra, more))), start=jnp.zeros(()))
        sign = {"plus": 1.0, "minus": -1.0}[mode] if flag else 0.5
        return jnp.sin(x * self.weight) + x + sign * read

    def scanned(self, x, *args, **kwargs):
        y = self(x, *args, **kwargs)
        return y, {"y": y * y, "named": hax.named(y, "width")}


def _read(leaf):
    """A scalar from an array of any kind, a key or a number."""
    leaf = jnp.asarray(leaf) if not isinstance(leaf, jax.Array) else leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jnp.sum(jax.vmap(lambda key: jr.normal(key, (2,)))(leaf.reshape(-1)))
    return jnp.sum(leaf.astype(jnp.float32) * (1 + jnp.arange(leaf.size)).reshape(leaf.shape))


def blocks() -> list[Probe]:
    return [Probe(w) for w in jr.normal(jr.key(0), (N,))]


def container_of(container):
    return container.from_layers(blocks(), Layers=Layers)


CARRY = jnp.linspace(0.1, 0.9, WIDTH)
MATRIX = jr.normal(jr.key(2), (N, WIDTH))
SQUARE = jr.normal(jr.key(3), (N, N))
NAMED = hax.named(MATRIX, (Layers, Width))
KEY = jr.key(5)
KEYS = jr.split(KEY, N)
MARKS = ("per_layer", "shared")


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to give an argument.

    Attributes:
        give: the keyword arguments given to the container; `extra` is the argument looked at.
        receive: the keyword arguments that layer i ought to receive.
        warns: whether the container says that it sliced an unmarked plain array.
    """

    give: dict[str, Any]
    receive: Callable[[int], dict[str, Any]]
    warns: bool = False


def extra(give, receive, **options) -> Kind:
    return Kind({"extra": give}, lambda i: {"extra": receive(i)}, **options)


KINDS = {
    "no argument": Kind({}, lambda i: {}),
    "none": extra(None, lambda i: None),
    "per layer by name": extra(NAMED, lambda i: NAMED["layers", i]),
    "per layer by name, layers last": extra(
        hax.named(MATRIX.T, (Width, Layers)), lambda i: NAMED["layers", i]
    ),
    "shared by lack of the name": extra(
        hax.named(MATRIX[0], (Width,)), lambda i: hax.named(MATRIX[0], (Width,))
    ),
    "named of no axes": extra(hax.named(jnp.asarray(2.0), ()), lambda i: jnp.asarray(2.0)),
    "named and marked shared": extra(shared(NAMED), lambda i: NAMED),
    "named and marked per layer": extra(per_layer(NAMED), lambda i: NAMED["layers", i]),
    "plain and marked per layer": extra(per_layer(MATRIX), lambda i: MATRIX[i]),
    "square and marked shared": extra(shared(SQUARE), lambda i: SQUARE),
    "unmarked plain": extra(MATRIX, lambda i: MATRIX[i], warns=True),
    "unmarked numpy": extra(np.asarray(MATRIX), lambda i: MATRIX[i], warns=True),
    "unmarked vector": extra(MATRIX[:, 0], lambda i: MATRIX[i, 0], warns=True),
    "marked numpy": extra(per_layer(np.asarray(MATRIX)), lambda i: MATRIX[i]),
    "a whole tree marked per layer": extra(
        per_layer({"a": MATRIX, "b": (SQUARE, NAMED)}),
        lambda i: {"a": MATRIX[i], "b": (SQUARE[i], NAMED["layers", i])},
    ),
    "a whole tree marked shared": extra(
        shared({"a": MATRIX, "b": (SQUARE, NAMED)}), lambda i: {"a": MATRIX, "b": (SQUARE, NAMED)}
    ),
    "marks inside a tree": extra(
        {"a": per_layer(MATRIX), "b": [shared(SQUARE), NAMED], "c": 2.0},
        lambda i: {"a": MATRIX[i], "b": [SQUARE, NAMED["layers", i]], "c": 2.0},
    ),
    "one key": extra(KEY, lambda i: KEYS[i]),
    "a key per layer": extra(KEYS, lambda i: KEYS[i]),
    "one key marked shared": extra(shared(KEY), lambda i: KEY),
    "keys marked shared": extra(shared(KEYS), lambda i: KEYS),
    "keys marked per layer": extra(per_layer(KEYS), lambda i: KEYS[i]),
    "keys of two axes": extra(jr.split(KEY, (N, 2)), lambda i: jr.split(KEY, (N, 2))[i]),
    "keys in a dict": extra({"k": KEY}, lambda i: {"k": KEYS[i]}),
    "legacy keys per layer": extra(
        jax.random.key_data(KEYS), lambda i: jax.random.key_data(KEYS[i]), warns=True
    ),
    "legacy keys marked per layer": extra(
        per_layer(jax.random.key_data(KEYS)), lambda i: jax.random.key_data(KEYS[i])
    ),
    "one legacy key marked shared": extra(
        shared(jax.random.key_data(KEY)), lambda i: jax.random.key_data(KEY)
    ),
    "array of no axes": extra(jnp.asarray(1.5), lambda i: jnp.asarray(1.5)),
    "numpy array of no axes": extra(np.asarray(1.5), lambda i: np.asarray(1.5)),
    "python float": extra(1.5, lambda i: 1.5),
    "python int": extra(2, lambda i: 2),
    "static flag": Kind({"flag": False}, lambda i: {"flag": False}),
    "static word": Kind({"mode": "minus"}, lambda i: {"mode": "minus"}),
    "layer index": extra(layer_index(), lambda i: jnp.asarray(i, jnp.int32)),
    "layer index in a tree": extra({"i": [layer_index(), 1.0]}, lambda i: {"i": [i, 1.0]}),
    "two arguments": Kind(
        {"extra": NAMED, "other": shared(SQUARE)},
        lambda i: {"extra": NAMED["layers", i], "other": SQUARE},
    ),
}


def received(block, x, extra=None, *, flag=True, mode="plus", **more):
    """A step whose output is what the layer was given, NamedArrays without their names."""
    given = (extra, more, flag, len(mode))
    return x, jax.tree.map(lambda leaf: getattr(leaf, "array", leaf), given, is_leaf=is_named_array)


def numbers(tree):
    """The leaves of a tree as NumPy arrays, typed keys as integers."""
    return [np.asarray(leaf) for leaf in jax.tree.leaves(plain(jax.tree.map(jnp.asarray, tree)))]


@ft.cache
def all_received(backwards: bool):
    """What the layers receive of every kind of argument, from both containers."""

    def program(container, kind):
        def run(x):
            with unmarked_ignored():
                stack = container_of(container)
                return stack.scan_via(received, reverse=backwards)(x, **kind.give)[1]

        return run

    return run_together(
        {(name, c): program(c, kind) for name, kind in KINDS.items() for c in CONTAINERS}, CARRY
    )


@contextlib.contextmanager
def unmarked_ignored():
    """Silences the warning that an unmarked array is sliced, where it is not the point."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*extra.*per_layer", category=UserWarning)
        yield


@pytest.mark.parametrize("backwards", [False, True], ids=["forwards", "backwards"])
@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_layer_receives_exactly_its_part_of_every_kind_of_argument(
    kind, container, backwards
):
    actual = numbers(take(all_received(backwards), (kind, container)))
    for i in range(N):
        expected = numbers(received(None, None, **KINDS[kind].receive(i))[1])
        for a, b in zip(actual, expected, strict=True):
            assert a[i].shape == b.shape and a.dtype == b.dtype
            np.testing.assert_array_equal(a[i], b)


def run_loop(kind: Kind, layer_list, x):
    outs = []
    for i, block in enumerate(layer_list):
        x, out = block.scanned(x, **kind.receive(i))
        outs.append(out)
    named = hax.stack(Layers, [out["named"] for out in outs])
    return x, {"y": jnp.stack([out["y"] for out in outs]), "named": named}


def run_container(kind: Kind, stack, x):
    return stack.scan_via(Probe.scanned)(x, **kind.give)


def differentiated(run, make=list):
    """Result and gradients of a loop over the blocks in the container that `make` makes."""

    def loss(weights, x):
        out = run(make([Probe(w) for w in weights]), x)
        return sum(jnp.sum(jnp.cos(leaf)) for leaf in jax.tree.leaves(out)), out

    return jax.grad(loss, argnums=(0, 1), has_aux=True)


WITH_GRADIENTS = ("two arguments", "one key", "marks inside a tree", "static word")


@ft.cache
def all_gradients():
    programs = {}
    for name in WITH_GRADIENTS:
        programs[name, "loop"] = differentiated(ft.partial(run_loop, KINDS[name]))
        for container in CONTAINERS:
            make = ft.partial(container.from_layers, Layers=Layers)
            run = ft.partial(run_container, KINDS[name])
            programs[name, container] = differentiated(run, make)
    weights = jnp.stack([block.weight for block in blocks()])
    return run_together(programs, weights, CARRY)


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("kind", WITH_GRADIENTS)
def test_results_and_gradients_are_those_of_a_python_loop(kind, container):
    results = all_gradients()
    actual, expected = take(results, (kind, container)), take(results, (kind, "loop"))
    assert relative_error(actual, expected) <= 1e-6


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("kind", KINDS)
def test_only_unmarked_plain_arrays_warn_and_the_argument_and_both_marks_are_named(kind, container):
    stack = container_of(container)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(lambda x: stack.fold_via(Probe.__call__)(x, **KINDS[kind].give), CARRY)
    assert bool(caught) == KINDS[kind].warns
    for warning in caught:
        assert issubclass(warning.category, UserWarning)
        assert all(word in str(warning.message) for word in ("extra", *MARKS))


@pytest.mark.parametrize("container", CONTAINERS)
def test_the_warning_points_at_the_line_of_the_caller(container):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(lambda x: container_of(container).fold(x, MATRIX), CARRY)
    assert [warning.filename for warning in caught] == [__file__]


# Arguments that are wrong


@dataclasses.dataclass(frozen=True)
class Wrong:
    """Arguments that ought to raise, the error, and the words that its message must have."""

    give: dict[str, Any]
    words: tuple[str, ...]
    error: type[Exception] = ValueError


WRONG = {
    "named with the layers' name and another size": Wrong(
        {"extra": hax.ones((hax.Axis("layers", N + 1), Width))}, ("extra", "layers", "4", "3")
    ),
    "named too short": Wrong({"extra": hax.ones(hax.Axis("layers", N - 1))}, ("extra", "2", "3")),
    "named, marked per layer, without the axis": Wrong(
        {"extra": per_layer(hax.ones(Width))}, ("extra", "layers")
    ),
    "plain too short": Wrong({"extra": jnp.ones((N - 1, WIDTH))}, ("extra", "2", "3")),
    "plain too long": Wrong({"extra": jnp.ones((N + 1, WIDTH))}, ("extra", "4", "3")),
    "marked and too short": Wrong({"extra": per_layer(jnp.ones((N - 1,)))}, ("extra", "2", "3")),
    "marked and too long": Wrong({"extra": per_layer(jnp.ones((N + 1,)))}, ("extra", "4", "3")),
    "marked without a first axis": Wrong({"extra": per_layer(jnp.ones(()))}, ("extra",)),
    "a marked number": Wrong({"extra": per_layer(1.0)}, ("extra", "per_layer")),
    "a marked list of numbers": Wrong(
        {"extra": per_layer([1.0, 2.0, 3.0])}, ("extra", "per_layer")
    ),
    "too few keys": Wrong({"extra": jr.split(KEY, N - 1)}, ("extra", "2", "3")),
    "too many keys": Wrong({"extra": jr.split(KEY, N + 1)}, ("extra", "4", "3")),
    "one legacy key": Wrong({"extra": jax.random.key_data(KEY)}, ("extra", "2", "3")),
    "inside a tree": Wrong({"extra": {"deep": [jnp.ones(N + 1)]}}, ("extra", "deep", "4", "3")),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_argument_raises_before_any_block_runs_and_is_named(wrong, container):
    def never(block, x, extra):
        raise AssertionError("a block ran on a wrong argument")

    case = WRONG[wrong]
    with pytest.raises(case.error) as raised:
        container_of(container).fold_via(never)(CARRY, **case.give)
    assert all(word in str(raised.value) for word in case.words), raised.value


@pytest.mark.parametrize("wrong", WRONG)
def test_both_containers_word_an_error_alike(wrong):
    messages = set()
    for container in CONTAINERS:
        with pytest.raises(WRONG[wrong].error) as raised:
            container_of(container).fold_via(Probe.__call__)(CARRY, **WRONG[wrong].give)
        messages.add(str(raised.value).replace("BlockSeq", "Stacked"))
    assert len(messages) == 1


@pytest.mark.parametrize("method", ["fold", "scan", "fold_via", "scan_via", "vmap", "vmap_via"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_every_method_names_the_positional_argument_by_its_parameter(container, method):
    stack, wrong = container_of(container), per_layer(jnp.ones(N + 1))
    if method.endswith("_via"):
        run = getattr(stack, method)(Probe.__call__)
    else:
        run = getattr(stack, method)
    first = shared(CARRY) if method.startswith("vmap") else CARRY
    with pytest.raises(ValueError, match="extra"):
        run(first, wrong)


@pytest.mark.parametrize("container", CONTAINERS)
def test_an_argument_of_a_lambda_with_star_args_is_named_by_its_place(container):
    with pytest.raises(ValueError, match=r"rest\[1\]"):
        container_of(container).fold_via(lambda block, x, *rest: x)(
            CARRY, 1.0, per_layer(jnp.ones(N + 1))
        )


# Blocks, options and stacks that are wrong


def fold_with(fn):
    return lambda stack: stack.fold_via(fn)(CARRY)


def scan_with(fn):
    return lambda stack: stack.scan_via(fn)(CARRY)


WRONG_RETURNS = {
    "scan: no pair": (scan_with(lambda block, x: x), ValueError, ("pair",)),
    "scan: three things": (scan_with(lambda block, x: (x, x, x)), ValueError, ("pair",)),
    "scan: nothing": (scan_with(lambda block, x: None), ValueError, ("pair",)),
    "fold: another shape": (
        fold_with(lambda block, x: jnp.concatenate([x, x])),
        (ValueError, TypeError),
        ("carry",),
    ),
    "fold: another dtype": (
        fold_with(lambda block, x: x.astype(jnp.int32)),
        (ValueError, TypeError),
        ("carry",),
    ),
    "fold: a pair": (fold_with(lambda block, x: (x, x)), (ValueError, TypeError), ("carry",)),
    "fold: nothing": (fold_with(lambda block, x: None), (ValueError, TypeError), ("carry",)),
}


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("wrong", WRONG_RETURNS)
def test_a_block_that_returns_a_wrong_thing_raises_and_says_what_was_needed(wrong, container):
    run, error, words = WRONG_RETURNS[wrong]
    with pytest.raises(error) as raised:
        run(container_of(container))
    assert all(word in str(raised.value) for word in words)


@pytest.mark.parametrize("container", CONTAINERS)
def test_an_exception_raised_inside_a_block_comes_out_unchanged(container):
    class Refused(Exception):
        pass

    def refuse(block, x):
        raise Refused("by the block")

    with pytest.raises(Refused, match="by the block"):
        container_of(container).fold_via(refuse)(CARRY)


@pytest.mark.parametrize("unroll", [0, -1, 1.5, "2", (1,)], ids=repr)
@pytest.mark.parametrize("method", ["fold", "scan", "fold_via", "scan_via"])
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_wrong_unroll_raises_and_is_named(container, method, unroll):
    stack = container_of(container)
    with pytest.raises((ValueError, TypeError), match="unroll"):
        if method.endswith("_via"):
            getattr(stack, method)(Probe.__call__, unroll=unroll)(CARRY)
        else:
            getattr(stack, method)(CARRY, unroll=unroll)


@pytest.mark.parametrize("unroll", [1, 2, N, N + 2, True, False, None], ids=repr)
@pytest.mark.parametrize("container", CONTAINERS)
def test_a_right_unroll_is_accepted(container, unroll):
    stack = container_of(container)
    assert jax.eval_shape(lambda x: stack.fold(x, unroll=unroll), CARRY).shape == CARRY.shape


@pytest.mark.parametrize("remat", ["nestd", "pinned_host", 3, ["full"]], ids=repr)
@pytest.mark.parametrize("container", CONTAINERS)
def test_an_unknown_policy_raises_and_the_argument_is_named(container, remat):
    with pytest.raises((ValueError, TypeError), match="remat"):
        container_of(container).fold(CARRY, remat=remat)
    with pytest.raises((ValueError, TypeError), match="gradient_checkpointing"):
        container.init(Layers, Probe, gradient_checkpointing=remat)


# Empty stacks


@pytest.fixture(params=CONTAINERS)
def empty(request):
    """A stack of no layers, made as any other."""
    container = request.param
    return container.init(layers(0), EmptyProbe)(key=jr.key(0))


class EmptyProbe(eqx.Module):
    weight: jax.Array

    def __init__(self, *, key):
        self.weight = jr.normal(key, (WIDTH,))

    def __call__(self, x):
        return x * self.weight


def test_an_empty_stack_folds_to_its_first_carry(empty):
    np.testing.assert_array_equal(empty.fold(CARRY), CARRY)
    assert len(empty) == 0 and list(empty) == [] and len(empty.unstacked()) == 0


@pytest.mark.parametrize("remat", [False, True, "nested"], ids=str)
def test_the_gradient_of_an_empty_stack_is_that_of_the_identity(empty, remat):
    gradient = jax.grad(lambda x: jnp.sum(empty.fold(x, remat=remat) ** 2))(CARRY)
    np.testing.assert_allclose(gradient, 2 * CARRY, rtol=1e-6)


def test_an_empty_stack_scans_to_its_first_carry_or_says_that_fold_would():
    """An empty BlockSeq has no block that could tell what the outputs are."""
    stacked, seq = (c.init(layers(0), EmptyProbe)(key=jr.key(0)) for c in (Stacked, BlockSeq))
    carry, _ = stacked.scan_via(lambda block, x: (block(x), x))(CARRY)
    np.testing.assert_array_equal(carry, CARRY)
    with pytest.raises(ValueError, match="fold"):
        seq.scan_via(lambda block, x: (block(x), x))(CARRY)


def test_an_empty_stack_has_no_layer_to_get(empty):
    for index in (0, -1):
        with pytest.raises(IndexError):
            empty.get_layer(index)


def test_the_outputs_of_an_empty_stacked_have_no_layers():
    empty = Stacked.init(layers(0), EmptyProbe)(key=jr.key(0))
    _, outputs = empty.scan_via(lambda block, x: (block(x), hax.named(x, "width")))(CARRY)
    assert outputs.axes == (hax.Axis("layers", 0), Width)


# vmap


def test_vmap_runs_every_layer_on_its_own_argument():
    x = hax.named(MATRIX, (Layers, Width))
    expected = jnp.stack([block(MATRIX[i]) for i, block in enumerate(blocks())])
    for container in CONTAINERS:
        fn = lambda block, x: hax.named(block(x.array), "width")  # noqa: E731
        out = container_of(container).vmap_via(fn)(x)
        assert out.axes == (Layers, Width)
        np.testing.assert_allclose(out.array, expected, rtol=1e-6)


def test_vmap_gives_a_shared_argument_to_every_layer():
    expected = jnp.stack([block(CARRY) for block in blocks()])
    for container in CONTAINERS:
        np.testing.assert_allclose(container_of(container).vmap(shared(CARRY)), expected, rtol=1e-6)


def test_vmap_splits_one_key_over_the_layers():
    expected = jnp.stack([jr.normal(key) for key in KEYS])
    for container in CONTAINERS:
        out = container_of(container).vmap_via(lambda block, key: jr.normal(key))(KEY)
        np.testing.assert_allclose(out, expected, rtol=1e-6)


def test_vmap_knows_the_layers_index():
    for container in (Stacked, BlockSeq):
        out = container_of(container).vmap_via(lambda block, i: 10 * i)(layer_index())
        np.testing.assert_array_equal(out, 10 * np.arange(N))
