"""checkpoint_name, and the audit of the names in a policy against the names in a block.

No test here compiles anything: an audit is a matter of tracing.
"""

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from stackax import BlockSeq, ScanCheckpointPolicy, Stacked, checkpoint_name, fold
from tests.reference.programs import equations
from tests.zoo import ATTENTION, NAMED_MLP, PRESETS, Block, layers, platform_warnings_ignored

# What a compiler makes of a BlockSeq's remat is another law's business.
pytestmark = pytest.mark.filterwarnings("ignore:.*optimization barriers:UserWarning")

Width = hax.Axis("width", 4)


def trace_gradient(stack, carry, **options):
    """Traces the gradient of a fold, without compiling it."""
    loss = lambda stack, carry: jnp.sum(jax.tree.leaves(stack.fold(carry, **options))[0])  # noqa: E731
    return eqx.filter_make_jaxpr(eqx.filter_grad(loss))(stack, carry)[0]


def named_values(jaxpr) -> list[str]:
    return [e.params["name"] for e in equations(jaxpr) if e.primitive.name == "name"]


# checkpoint_name


def test_every_array_of_a_pytree_gets_the_name():
    tree = {"named": hax.zeros(Width), "plain": jnp.zeros(3), "text": "stays", "none": None}

    def name(named, plain):
        out = checkpoint_name({**tree, "named": named, "plain": plain}, "here")
        assert out["text"] == "stays" and out["none"] is None
        return out["named"], out["plain"]

    assert named_values(jax.make_jaxpr(name)(tree["named"], tree["plain"])) == ["here", "here"]


def test_naming_changes_no_value_and_keeps_the_axes():
    x = hax.random.normal(jr.key(0), (Width, Width.alias("other")))
    named = checkpoint_name({"x": x, "n": 3, "flag": True}, "here")
    assert named["x"].axes == x.axes and named["n"] == 3 and named["flag"] is True
    np.testing.assert_array_equal(named["x"].array, x.array)


def test_keys_and_integers_can_be_named():
    key, count = checkpoint_name((jr.key(0), jnp.arange(3)), "here")
    assert key == jr.key(0)
    np.testing.assert_array_equal(count, np.arange(3))


@pytest.mark.parametrize("name", ["", None, 3, ["a"]], ids=repr)
def test_a_name_that_is_not_a_word_raises(name):
    with pytest.raises((TypeError, ValueError), match="name"):
        checkpoint_name(jnp.zeros(2), name)


# Names that no block has


@pytest.mark.parametrize("container", [Stacked, BlockSeq])
@pytest.mark.parametrize("field", ["save_block_internals", "offload_block_internals"])
def test_a_name_that_no_block_has_raises_with_the_nearest(container, field):
    stack = NAMED_MLP.stack(3, ScanCheckpointPolicy(**{field: ["mlpwi_O"]}), container)
    with platform_warnings_ignored(), pytest.raises(ValueError, match="mlpwi_O") as raised:
        trace_gradient(stack, NAMED_MLP.carry(jr.key(0)))
    assert "did you mean 'mlpwi'" in str(raised.value)


def test_one_absent_name_among_present_ones_raises():
    stack = NAMED_MLP.stack(2, ScanCheckpointPolicy(save_block_internals=["mlpwi", "context"]))
    with pytest.raises(ValueError, match="context"):
        trace_gradient(stack, NAMED_MLP.carry(jr.key(0)))


def test_a_name_given_per_call_is_checked_too():
    policy = ScanCheckpointPolicy(save_block_internals=["mlpwl"])
    with pytest.raises(ValueError, match="mlpwl"):
        trace_gradient(NAMED_MLP.stack(2), NAMED_MLP.carry(jr.key(0)), remat=policy)


def test_fold_of_a_function_checks_names_too():
    def double(carry, w):
        return checkpoint_name(jnp.sin(carry * w.array), "sin")

    policy = ScanCheckpointPolicy(save_block_internals=["sine"])
    loop = fold(double, "layers", remat=policy)
    w = hax.ones(layers(3))
    with pytest.raises(ValueError, match="'sin'"):
        jax.make_jaxpr(jax.grad(lambda x: loop(x, w)))(1.0)


@pytest.mark.parametrize("container", [Stacked, BlockSeq])
def test_a_block_without_names_raises_for_a_preset(container):
    stack = Block("linear", eqx.nn.Linear, None, frozenset(), args=(4, 4)).stack(
        2, "minimal", container
    )
    with pytest.raises(ValueError, match="checkpoint_name"):
        trace_gradient(stack, jnp.ones(4))


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
@pytest.mark.parametrize("block", [NAMED_MLP, ATTENTION], ids=lambda block: block.name)
def test_a_preset_raises_only_where_none_of_its_names_occurs(preset, block):
    stack, carry = block.stack(2, preset.spec), block.carry(jr.key(0))
    with platform_warnings_ignored():
        if preset.fits(block):
            trace_gradient(stack, carry)
        else:
            with pytest.raises(ValueError, match="none"):
                trace_gradient(stack, carry)


@pytest.mark.parametrize("match_names, raises", [("all", True), ("any", False)])
def test_match_names_decides_whether_one_present_name_is_enough(match_names, raises):
    policy = ScanCheckpointPolicy(
        save_block_internals=["mlpwi", "context"], match_names=match_names
    )
    stack, carry = NAMED_MLP.stack(2, policy), NAMED_MLP.carry(jr.key(0))
    if raises:
        with pytest.raises(ValueError, match="context"):
            trace_gradient(stack, carry)
    else:
        trace_gradient(stack, carry)


def test_a_block_seq_of_unlike_blocks_is_asked_for_the_names_of_all():
    """One kind of block has the one name, another kind the other: together they have both."""

    class Sin(eqx.Module):
        def __call__(self, x):
            return checkpoint_name(jnp.sin(x), "sin") ** 2

    class Cos(eqx.Module):
        def __call__(self, x):
            return checkpoint_name(jnp.cos(x), "cos") ** 2

    seq = BlockSeq.from_layers([Sin(), Cos()])
    policy = ScanCheckpointPolicy(save_block_internals=["sin", "cos"])
    jax.make_jaxpr(jax.grad(lambda x: seq.fold(x, remat=policy)))(1.0)
    with pytest.raises(ValueError, match="tan"):
        wrong = ScanCheckpointPolicy(save_block_internals=["sin", "tan"])
        jax.make_jaxpr(jax.grad(lambda x: seq.fold(x, remat=wrong)))(1.0)


# Names that are never residuals


class Idle(eqx.Module):
    """`sum` is read by an addition only, so no derivative needs it; `sin` is squared."""

    weight: jax.Array

    def __call__(self, x):
        squared = checkpoint_name(jnp.sin(x * self.weight), "sin") ** 2
        return x + checkpoint_name(squared + x, "sum")


def idle_stack(container, policy):
    layer_list = [Idle(jnp.full((), w)) for w in (0.5, 0.7, 0.9)]
    return container.from_layers(layer_list).with_policy(policy)


@pytest.mark.parametrize("container", [Stacked, BlockSeq])
@pytest.mark.parametrize("field", ["save_block_internals", "offload_block_internals"])
def test_a_name_that_no_derivative_needs_warns(container, field):
    stack = idle_stack(container, ScanCheckpointPolicy(**{field: ["sum"]}))
    with platform_warnings_ignored(), pytest.warns(UserWarning, match="sum"):
        trace_gradient(stack, jnp.ones(4))


def test_only_the_idle_name_is_warned_of():
    stack = idle_stack(Stacked, ScanCheckpointPolicy(save_block_internals=["sin", "sum"]))
    with pytest.warns(UserWarning, match="sum") as caught:
        trace_gradient(stack, jnp.ones(4))
    assert not any("'sin'" in str(warning.message) for warning in caught)


def test_a_needed_name_does_not_warn():
    trace_gradient(
        idle_stack(Stacked, ScanCheckpointPolicy(save_block_internals=["sin"])), jnp.ones(4)
    )


# Names in places that are easy to overlook


class Inside(eqx.Module):
    """Names its internals inside a jit, a custom_vjp's forward rule, a scan or a cond."""

    weight: jax.Array
    where: str = eqx.field(static=True)

    def __call__(self, x):
        return x + _INSIDE[self.where](x * self.weight)


def _named_sin(x):
    return checkpoint_name(jnp.sin(x), "inside") ** 2


@jax.custom_vjp
def _custom_sin(x):
    return jnp.sin(x) ** 2


def _custom_sin_forward(x):
    sin = checkpoint_name(jnp.sin(x), "inside")
    return sin**2, (sin, x)


def _custom_sin_backward(residuals, cotangent):
    sin, x = residuals
    return (2 * sin * jnp.cos(x) * cotangent,)


_custom_sin.defvjp(_custom_sin_forward, _custom_sin_backward)


def _scanned_sin(x):
    return jax.lax.scan(lambda c, _: (_named_sin(c), None), x, None, length=2)[0]


_INSIDE = {
    "jit": jax.jit(_named_sin),
    "custom_vjp": _custom_sin,
    "scan": _scanned_sin,
    "cond": lambda x: jax.lax.cond(True, _named_sin, lambda x: x, x),
    "checkpoint": jax.checkpoint(_named_sin),
}


@pytest.mark.parametrize("where", ["jit", "custom_vjp", "scan", "cond"])
@pytest.mark.parametrize("container", [Stacked, BlockSeq])
def test_a_name_is_found_inside(where, container):
    stack = container.from_layers([Inside(jnp.full((), w), where) for w in (0.5, 0.7)])
    trace_gradient(
        stack.with_policy(ScanCheckpointPolicy(save_block_internals=["inside"])), jnp.ones(4)
    )
    with pytest.raises(ValueError, match="'inside'"):
        trace_gradient(
            stack.with_policy(ScanCheckpointPolicy(save_block_internals=["insid"])), jnp.ones(4)
        )


@pytest.mark.parametrize("where", ["jit", "custom_vjp"])
def test_a_name_found_inside_is_really_kept(where):
    """The sine is computed in the forward pass and not again in the backward pass."""
    stack = Stacked.from_layers([Inside(jnp.full((), w), where) for w in (0.5, 0.7, 0.9)])

    def sines(policy):
        jaxpr = trace_gradient(stack.with_policy(policy), jnp.ones(4))
        return sum(e.primitive.name == "sin" for e in equations(jaxpr))

    kept = sines(ScanCheckpointPolicy(save_block_internals=["inside"]))
    assert kept == sines(True) - 1
