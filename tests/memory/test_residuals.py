"""What `explain` lists is what `jax.vjp` keeps: to the byte, and with the right label on it."""

import functools as ft
import inspect

import equinox as eqx
import flax.linen
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

from stackax import ScanCheckpointPolicy, Stacked, checkpoint_name, stream
from stackax.memory import explain
from stackax.memory._bytes import bytes_of
from tests import zoo

LAYERS, ROWS, WIDTH = 5, 3, 4
X = jnp.ones((ROWS, WIDTH))
WEIGHTS = jnp.ones((LAYERS, WIDTH, WIDTH))
CARRY_BYTES, WEIGHT_BYTES = 4 * ROWS * WIDTH, 4 * WIDTH * WIDTH


def bytes_of_vjp(f, *args) -> int:
    """The bytes of the arrays in `jax.vjp`'s pullback, all arrays differentiated."""
    arrays, static = eqx.partition(args, lambda x: hasattr(x, "shape"))

    def pullback(arrays):
        def run(arrays):
            out = f(*eqx.combine(arrays, static))
            return [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.inexact)]

        return jax.vjp(run, arrays)[1]

    return sum(bytes_of(leaf) for leaf in jax.tree.leaves(jax.eval_shape(pullback, arrays)))


def via(stack, x):
    """A fold as the laws run it, with an argument for each layer, a shared one and a closure."""
    return zoo.via(stack, x, scans=False)


POLICIES = {p.name: p for p in zoo.policies(5) if p.fits(zoo.VOCABULARY)}


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("container", zoo.CONTAINERS)
def test_rows_add_up_to_the_residuals_of_vjp(policy, container):
    stack = zoo.VOCABULARY.stack(5, policy.spec, container)
    x = zoo.inputs(zoo.VOCABULARY, 5)
    with zoo.platform_warnings_ignored():
        report = explain(via, stack, x)
        assert sum(r.bytes for r in report.residuals) == report.residual_bytes
        assert report.residual_bytes == bytes_of_vjp(via, stack, x)


def lax_scan(weights, x):
    def body(x, w):
        hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
        return x + hidden * hidden, hidden.sum()

    return jax.lax.scan(body, x, weights)


def lax_remat_scan(weights, x):
    def body(x, w):
        return x + jnp.sin(x @ w), None

    return jax.lax.scan(jax.checkpoint(body), x, weights)[0]


def haliax_fold(stack, x):
    return stack.fold(x)


def flax_apply(parameters, x):
    return DENSE.apply(parameters, x)


def branches(weights, x):
    return jax.lax.cond(x.sum() > 0, lambda: jnp.sin(x @ weights[0]), lambda: x)


def own_derivative(weights, x):
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (2 * x, x), lambda x, ct: (ct * x,))
    return double(jnp.sin(x @ weights[0]))


def jitted_twice(weights, x):
    return jax.jit(jax.jit(lambda x, w: jnp.tanh(x @ w)))(x, weights[0])


def integers_and_keys(table, tokens, key):
    return table[tokens] * jr.bernoulli(key, 0.5, (3, 1))


class Wave(eqx.Module):
    weight: hax.NamedArray

    @staticmethod
    def init(Embed, *, key):
        return Wave(hax.random.normal(key, (Embed, Embed.alias("out"))))

    def __call__(self, x):
        return x + hax.sin(x.dot(self.weight, axis="embed").rename({"out": "embed"}))


Embed, Layers, Batch = hax.make_axes(embed=WIDTH, layers=LAYERS, batch=ROWS)
DENSE = flax.linen.Sequential([flax.linen.Dense(8), flax.linen.relu, flax.linen.Dense(4)])
FUNCTIONS = {
    "lax_scan": lambda: (lax_scan, WEIGHTS, X),
    "lax_remat_scan": lambda: (lax_remat_scan, WEIGHTS, X),
    "branches": lambda: (branches, WEIGHTS, X),
    "own_derivative": lambda: (own_derivative, WEIGHTS, X),
    "jitted_twice": lambda: (jitted_twice, WEIGHTS, X),
    "integers_and_keys": lambda: (integers_and_keys, X, jnp.array([0, 2, 1]), jr.key(0)),
    "flax": lambda: (flax_apply, jax.eval_shape(DENSE.init, jr.key(0), X), X),
    "haliax": lambda: (
        haliax_fold,
        hax.nn.Stacked.init(Layers, Wave)(Embed, key=jr.split(jr.key(0), LAYERS)),
        hax.ones((Batch, Embed)),
    ),
    "equinox": lambda: (lambda mlp, x: jax.vmap(mlp)(x), eqx.nn.MLP(4, 2, 8, 2, key=jr.key(0)), X),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_others_add_up_too(name):
    f, *args = FUNCTIONS[name]()
    report = explain(f, *args)
    assert report.residual_bytes == bytes_of_vjp(f, *args) > 0


def test_a_row_says_what_is_kept_and_why():
    report = explain(lax_scan, WEIGHTS, X)
    rows = {r.label: r for r in report.residuals}
    first = inspect.getsourcelines(lax_scan)[1]

    hidden = rows["hidden"]
    assert hidden.kind == "computed"
    assert hidden.shape == (ROWS, WIDTH) and hidden.layers == (LAYERS,)
    assert hidden.bytes == LAYERS * hidden.bytes_per_layer == LAYERS * CARRY_BYTES
    assert hidden.depends_on == {"carry", "per-layer input"}
    assert hidden.extent == "per layer" and hidden.memory == "device"
    assert f"test_residuals.py:{first + 2}" in hidden.source

    carry = rows["carry"]
    assert carry.kind == "carry" and carry.depends_on == {"carry"}
    assert carry.layers == (LAYERS,)

    weights = rows["weights"]
    assert weights.kind == "argument" and weights.extent == "once"
    assert weights.bytes == LAYERS * WEIGHT_BYTES and weights.depends_on == {"arguments"}
    assert weights.why.startswith("dot_general needs it, at test_residuals.py")

    remat = {r.label: r for r in explain(lax_remat_scan, WEIGHTS, X).residuals}
    assert remat.keys() == {"weights", "carry"}
    assert remat["carry"].why == "its layer is run again"


def test_a_named_argument_has_its_axes_and_its_path():
    stack = Stacked.init(Layers, Wave)(Embed, key=jr.key(0))
    report = explain(stack, hax.ones((Batch, Embed)), remat=True)
    (weight,) = [r for r in report.residuals if r.kind == "argument"]
    assert weight.origin == "stack.stacked.weight"
    assert weight.axes == ("layers", "embed", "out")


def test_slots_are_carries_kept_as_often_as_there_are_slots():
    stack = Stacked.init(Layers, Wave)(Embed, key=jr.key(0))
    report = explain(stack, hax.ones((Batch, Embed)), remat=ScanCheckpointPolicy(slots=2))
    (carry,) = [r for r in report.residuals if r.kind == "carry"]
    assert carry.layers == (2,) and carry.bytes == 2 * CARRY_BYTES
    assert carry.why == "layers from it on are run again"


def test_what_goes_to_the_host_is_told_apart():
    stack = Stacked.init(Layers, Wave)(Embed, key=jr.key(0))
    with zoo.platform_warnings_ignored():
        report = explain(stack, hax.ones((Batch, Embed)), remat="offload")
    (carry,) = [r for r in report.residuals if r.kind == "carry"]
    assert carry.memory == "host"
    assert report.offloaded_bytes == LAYERS * CARRY_BYTES and report.kept_bytes == 0


def test_a_stack_that_streams_from_the_host_keeps_its_carries_alone():
    def loss(stack, x):
        return stack.fold(x, remat=True, stream=stream.from_host()).sum().scalar()

    stack = Stacked.init(Layers, Wave)(Embed, key=jr.key(0))
    stack = jax.device_put(stack, jax.memory.Space.Host)
    with zoo.platform_warnings_ignored():
        report = explain(loss, stack, hax.ones((Batch, Embed)), argnums=0)
    (carry,) = [r for r in report.residuals if r.kind == "carry"]
    assert carry.bytes == report.kept_bytes == LAYERS * CARRY_BYTES
    (weight,) = [r for r in report.residuals if r.kind == "argument"]
    assert weight.memory == "host"


def test_a_stack_in_a_stack_counts_both_loops():
    def nested(weights, x):
        def inner(x, w):
            return jnp.sin(x @ w), None

        return jax.lax.scan(lambda x, w: jax.lax.scan(inner, x, w), x, weights)[0]

    report = explain(nested, jnp.ones((2, 3, WIDTH, WIDTH)), X)
    cos = next(r for r in report.residuals if r.label == "cos")
    assert cos.layers == (2, 3) and cos.bytes == 6 * cos.bytes_per_layer == 6 * CARRY_BYTES


def test_shapes_do_where_there_are_no_arrays():
    shapes = jax.eval_shape(lambda: (WEIGHTS, X))
    assert explain(lax_scan, *shapes).to_dict() == explain(lax_scan, WEIGHTS, X).to_dict()


def test_argnums_decides_what_is_differentiated():
    x_only = explain(lax_scan, WEIGHTS, X, argnums=1)
    assert x_only.gradient_bytes == CARRY_BYTES
    assert explain(lax_scan, WEIGHTS, X, argnums=-1).to_dict() == x_only.to_dict()
    assert explain(lax_scan, WEIGHTS, X).gradient_bytes == CARRY_BYTES + LAYERS * WEIGHT_BYTES


BAD_CALLS = {
    "text": (lambda: explain(lax_scan, WEIGHTS, "x"), TypeError, "x is 'x', a str"),
    "object in a list": (lambda: explain(lax_scan, [object()], X), TypeError, r"weights\[0\]"),
    "not a function": (lambda: explain(3, X), TypeError, "a function or a stack of layers first"),
    "integers": (lambda: explain(lambda x: x + 1, jnp.arange(3)), TypeError, "nothing to differ"),
    "no derivative": (
        lambda: explain(lambda x: jax.lax.while_loop(lambda x: x[0] < 1, lambda x: x + 1, x), X[0]),
        TypeError,
        "can't differentiate",
    ),
    "no floating output": (lambda: explain(lambda x: x > 0, X), TypeError, "no floating-point"),
    "argnums": (lambda: explain(lax_scan, WEIGHTS, X, argnums=2), ValueError, "weights, x"),
    "remat without a stack": (
        lambda: explain(lax_scan, WEIGHTS, X, remat=True),
        ValueError,
        "no stack",
    ),
    "misspelt remat": (
        lambda: explain(lax_scan, WEIGHTS, X, remat="ful"),
        ValueError,
        "remat='ful': .* did you mean 'full'",
    ),
    "zero layers": (
        lambda: explain(Stacked.init(hax.Axis("layers", 0), Wave)(Embed, key=jr.key(0)), X),
        ValueError,
        "stack has zero layers",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_input_is_named(name):
    call, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        call()


def test_an_error_of_the_function_itself_passes_unchanged():
    def wrong(x):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        explain(wrong, X)


def test_a_bound_function_can_hold_what_is_no_array():
    report = explain(ft.partial(lambda mode, x: getattr(jnp, mode)(x), "sin"), X)
    assert [r.label for r in report.residuals] == ["cos"]
