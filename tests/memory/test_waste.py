"""Each kind of waste is found where it is, with its bytes, and not where it isn't."""

import warnings
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

from stackax import BlockSeq, ScanCheckpointPolicy, Stacked, checkpoint_name
from stackax.memory import explain
from stackax.memory._bytes import bytes_of
from tests.zoo import platform_warnings_ignored

N, ROWS, WIDTH = 6, 8, 16
X = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
WEIGHTS = jax.ShapeDtypeStruct((N, WIDTH, WIDTH), jnp.float32)
SHARED = jax.ShapeDtypeStruct((ROWS, ROWS), jnp.float32)
Layers = hax.Axis("layers", N)


def scan(body, *, remat=None, unroll=1, length=N):
    """A sum over a hand-written scan of `body(x, w, shared)`."""

    def f(weights, x, shared):
        def step(x, w):
            out = body(x, w, shared)
            return out if isinstance(out, tuple) else (out, None)

        step = step if remat is None else remat(step)
        x, outputs = jax.lax.scan(step, x, weights, unroll=unroll, length=length)
        return x.sum() + sum(out.sum() for out in jax.tree.leaves(outputs))

    return f, WEIGHTS, X, SHARED


def affine(x, w, _):
    return x + x @ w


def affine_in_bfloat16(x, w, _):
    return x + (x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(x.dtype)


def normalised(x, w, _):
    return x + x @ (w / jnp.linalg.norm(w))


def with_mask(x, w, shared):
    return x + jnp.sin(shared @ (x @ w))


def carrying_mask(weights, x, shared):
    @jax.checkpoint
    def step(carry, w):
        x, shared = carry
        return (with_mask(x, w, shared), shared), None

    return jax.lax.scan(step, (x, shared), weights)[0][0].sum()


def returning_weights(x, w, _):
    return x + x @ w, checkpoint_name(w, "weight")


def sine(x, w, _):
    return x + jnp.sin(x @ w)


def returning_products(x, w, _):
    return x + x @ w, x @ w


def attention_like(x, w, _):
    scores = jnp.repeat(jnp.repeat(x @ w, 8, axis=0), 2, axis=1)
    return x + jnp.exp(scores).reshape(8, 8, -1).sum(0).reshape(ROWS, -1)[:, :WIDTH]


def named_attention_like(x, w, _):
    scores = jnp.repeat(jnp.repeat(x @ w, 8, axis=0), 2, axis=1)
    scores = jnp.exp(checkpoint_name(scores, "scores"))
    return x + scores.reshape(8, 8, -1).sum(0).reshape(ROWS, -1)[:, :WIDTH]


def nested_by_hand(rows):
    """A scan of rematerialised scans of rematerialised layers, in segments of 6."""

    def f(weights, x):
        layer = jax.checkpoint(lambda x, w: (jnp.sin(x @ w), None))

        @jax.checkpoint
        def segment(x, weights):
            return jax.lax.scan(layer, x, weights)[0], None

        return jax.lax.scan(segment, x, weights)[0].sum()

    weights = jax.ShapeDtypeStruct((N, 6, WIDTH, WIDTH), jnp.float32)
    return f, weights, jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)


class Named(eqx.Module):
    weight: hax.NamedArray

    @staticmethod
    def init(Embed, *, key):
        return Named(hax.random.normal(key, (Embed, Embed.alias("out"))))

    def __call__(self, x):
        hidden = x.dot(self.weight, axis="embed").rename({"out": "embed"})
        return checkpoint_name(x + hax.tanh(checkpoint_name(hidden, "hidden")), "sum")


Embed = hax.Axis("embed", WIDTH)
NAMED_X = hax.named(jnp.zeros((ROWS, WIDTH)), ("batch", "embed"))


def haliax_stack(policy, rows=ROWS):
    make = hax.nn.Stacked.init(Layers, Named, gradient_checkpointing=policy)
    x = hax.named(jnp.zeros((rows, WIDTH)), ("batch", "embed"))
    return make(Embed, key=jr.split(jr.key(0), N)), x


def our_stack(policy, container: Any = Stacked):
    return container.init(Layers, Named, gradient_checkpointing=policy)(
        Embed, key=jr.key(0)
    ), NAMED_X


def saving(*names):
    return lambda step: jax.checkpoint(
        step, policy=jax.checkpoint_policies.save_only_these_names(*names)
    )


def without_barrier(step):
    return jax.checkpoint(step, prevent_cse=False)


ALL_WEIGHTS = bytes_of(WEIGHTS)

# name: (what has the fault, its kind, its bytes, what hasn't)
FAULTS = {
    "haliax copies all weights": (
        haliax_stack(False),
        "weights copied",
        ALL_WEIGHTS,
        haliax_stack(True),
    ),
    "haliax copies them when it saves all": (
        haliax_stack("save_all"),
        "weights copied",
        ALL_WEIGHTS,
        our_stack("save_all"),
    ),
    "bfloat16 weights": (
        scan(affine_in_bfloat16),
        "weights cast per layer",
        ALL_WEIGHTS // 2,
        scan(affine_in_bfloat16, remat=jax.checkpoint),
    ),
    "weights normalised": (
        scan(normalised),
        "weights transformed per layer",
        ALL_WEIGHTS + N * 3 * 4,  # and three scalars of the norm
        scan(affine),
    ),
    "mask in the carry": (
        (carrying_mask, WEIGHTS, X, SHARED),
        "same value kept for every layer",
        N * bytes_of(SHARED),
        scan(with_mask, remat=jax.checkpoint),
    ),
    "weights returned": (
        scan(returning_weights),
        "scan output that is its input",
        ALL_WEIGHTS,
        scan(returning_products),
    ),
    "large value": (
        scan(attention_like),
        "large value without a name",
        N * 16 * bytes_of(X),
        scan(named_attention_like, remat=saving("scores")),
    ),
    "nested by hand, heavy weights": (
        nested_by_hand(rows=4),
        "nested remat that saves nothing",
        2 * 6 * WIDTH * WIDTH * 4 - (36 - 12) * 4 * WIDTH * 4,
        nested_by_hand(rows=32),
    ),
    "unrolled by hand": (
        scan(sine, remat=without_barrier, unroll=N),
        "remat undone",
        None,
        scan(sine, remat=without_barrier),
    ),
    "name that is never a residual": (
        our_stack(ScanCheckpointPolicy(save_block_internals=["hidden", "sum"])),
        "name without effect",
        0,
        our_stack(ScanCheckpointPolicy(save_block_internals=["hidden"])),
    ),
    "haliax's silent typo": (
        haliax_stack(hax.nn.ScanCheckpointPolicy(save_block_internals=["hiden"])),
        "name without effect",
        0,
        haliax_stack(hax.nn.ScanCheckpointPolicy(save_block_internals=["hidden"])),
    ),
    "haliax's nested, heavy weights": (
        haliax_stack("nested", rows=2),
        "nested remat that saves nothing",
        None,
        haliax_stack(True, rows=2),
    ),
}


def findings(call):
    with platform_warnings_ignored():
        return {finding.kind: finding for finding in explain(*call).findings}


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_found(name):
    faulty, kind, size, _ = FAULTS[name]
    finding = findings(faulty)[kind]
    assert finding.what and finding.fix
    if size is None:
        assert finding.bytes > 0
    else:
        assert finding.bytes == size


@pytest.mark.parametrize("name", FAULTS)
def test_without_the_fault_nothing_is_found(name):
    *_, kind, _, clean = FAULTS[name]
    assert kind not in findings(clean)


@pytest.mark.parametrize("policy", [True, "nested", "offload", ScanCheckpointPolicy(slots=2)])
def test_a_clean_stack_has_no_finding(policy):
    assert findings(our_stack(policy)) == {}


@pytest.mark.parametrize(
    "f",
    [
        lambda weights, x: jax.lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, weights[:0])[0],
        lambda weights, x: jax.lax.map(lambda w: jnp.tanh(x @ w), weights),
    ],
    ids=["no layers", "no carry"],
)
def test_a_loop_without_carries_has_no_finding(f):
    assert findings((f, WEIGHTS, X)) == {}


def test_the_line_of_the_cast_is_that_of_the_user():
    finding = findings(scan(affine_in_bfloat16))["weights cast per layer"]
    assert "test_waste.py" in finding.source and "affine_in_bfloat16" in finding.source


def test_a_typo_names_the_nearest_name():
    stack = haliax_stack(hax.nn.ScanCheckpointPolicy(save_block_internals=["hiden"]))
    assert "did you mean 'hidden'" in findings(stack)["name without effect"].what


def test_an_idle_name_is_a_finding_and_no_warning():
    stack = our_stack(ScanCheckpointPolicy(save_block_internals=["hidden", "sum"]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "name without effect" in {f.kind for f in explain(*stack).findings}


def test_blocks_in_a_python_loop_keep_their_barrier():
    kept_apart = "remat undone" not in findings(our_stack(True, BlockSeq))
    assert kept_apart == (tuple(map(int, jax.__version__.split(".")[:2])) >= (0, 12))
