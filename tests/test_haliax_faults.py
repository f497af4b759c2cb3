"""What `haliax.nn.Stacked` and `hax.scan` get wrong, and how each of it goes right here.

One section per fault, numbered as in the project's list of the peer's faults. Only our side is
asserted; `tests/laws/` says the same of every policy, block and length, where this says it of one.
"""

import contextlib

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from stackax import (
    BlockSeq,
    ScanCheckpointPolicy,
    Stacked,
    checkpoint_name,
    per_layer,
    scan,
    shared,
)
from stackax._policy import lower
from tests.laws.test_memory import HEAVY, MLP, compiled, temp
from tests.laws.test_recomputation import dots
from tests.policy import test_aliases
from tests.reference.programs import equations, host_shapes
from tests.reference.schedules import optimal_evaluations
from tests.zoo import (
    CONTAINERS,
    EMBED,
    KEEPS_BARRIERS,
    NAMED_MLP,
    PLAIN_MLP,
    NamedMlp,
    layers,
    platform_warnings_ignored,
)

Width = hax.Axis("width", 4)


class Sin(eqx.Module):
    """A block whose internals `sin` and `cos` are both residuals."""

    weight: hax.NamedArray

    @staticmethod
    def init(*, key):
        return Sin(hax.random.normal(key, Width))

    def __call__(self, x):
        y = checkpoint_name(hax.sin(x * self.weight), "sin")
        return x + checkpoint_name(hax.cos(y * x), "cos") * self.weight


def gradient_jaxpr(stack, x, **options):
    loss = lambda stack, x: jnp.sum(jax.tree.leaves(stack.fold(x, **options))[0])  # noqa: E731
    with platform_warnings_ignored():
        return eqx.filter_make_jaxpr(eqx.filter_grad(loss))(stack, x)[0]


def count(jaxpr, primitive: str) -> int:
    return sum(eqn.primitive.name == primitive for eqn in equations(jaxpr))


# 1, 2. Copies of the parameters


def test_the_default_keeps_no_second_copy_of_the_parameters():
    """Fault 1: the default stacked a second copy of all parameters."""
    assert temp(HEAVY, 16, False) == pytest.approx(temp(HEAVY, 16, "lax"), rel=0.01)


@pytest.mark.parametrize("policy", ["save_all", "offload"])
def test_saving_or_offloading_everything_keeps_no_second_copy_of_the_parameters(policy):
    """Fault 2: `"save_all"` copied the weights, `"offload"` copied them to the host."""
    assert temp(HEAVY, 16, policy) <= temp(HEAVY, 16, "lax") + 1.2 * HEAVY.layer_bytes


def test_save_inputs_alone_raises_because_inputs_are_alive_anyway():
    """Fault 2: `save_inputs=True` made the copy; here it says what to do instead."""
    with pytest.raises(ValueError, match="save_inputs"):
        ScanCheckpointPolicy(save_inputs=True)
    with pytest.raises(ValueError, match="save_inputs"):
        ScanCheckpointPolicy(save_inputs="offload")


def test_offload_never_sends_weights_to_the_host():
    """Fault 2."""
    stack, x = PLAIN_MLP.stack(3, "offload"), PLAIN_MLP.carry(jr.key(0))
    weights = {leaf.shape for leaf in jax.tree.leaves(stack)}
    weights |= {shape[1:] for shape in weights}
    hosted = host_shapes(gradient_jaxpr(stack, x))
    assert hosted and not hosted & (weights - {()})


# 3. Nesting


def test_nested_costs_less_memory_than_simple_remat_and_not_more():
    """Fault 3: with the outer loop unrolled, nesting cost four times what simple remat does."""
    assert temp(MLP, 64, "nested") < 0.75 * temp(MLP, 64, True)


def test_the_program_of_nested_does_not_grow_with_the_layers():
    """Fault 3."""
    lines = [len(compiled(MLP, n, "nested").as_text().splitlines()) for n in (17, 128)]
    assert lines[1] == pytest.approx(lines[0], rel=0.05)


def test_a_prime_number_of_layers_is_nested_like_any_other():
    """Fault 3: a prime silently became one block."""
    assert temp(MLP, 17, "nested") < temp(MLP, 17, True)


def test_segments_need_not_divide_the_layers():
    """Fault 3: 17 layers in 4 segments raised."""
    stack, x = PLAIN_MLP.stack(17), PLAIN_MLP.carry(jr.key(0))
    policy = ScanCheckpointPolicy(nested=4)
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(stack.fold(x, remat=policy))))(x)
    assert jaxpr.out_avals[0].shape == x.shape


@pytest.mark.parametrize("nested", [0, 1, -3])
def test_an_impossible_number_of_segments_raises_when_the_policy_is_made(nested):
    """Fault 3: `nested=0` divided by zero."""
    with pytest.raises(ValueError, match="nested"):
        ScanCheckpointPolicy(nested=nested)


def test_names_together_with_nesting_raise_instead_of_being_dropped():
    """Fault 3: the inner policy was dropped."""
    for field in ("save_block_internals", "offload_block_internals"):
        with pytest.raises(ValueError, match="nested"):
            ScanCheckpointPolicy(nested=True, **{field: ["sin"]})


def test_nested_with_offload_sends_every_kept_carry_to_the_host():
    """Fault 3: the long-lived outer carries stayed on the device, the short-lived ones went."""
    policy = ScanCheckpointPolicy(nested=True, save_carries="offload")
    stack, x = PLAIN_MLP.stack(9, policy), PLAIN_MLP.carry(jr.key(0))
    jaxpr = gradient_jaxpr(stack, x)
    kept = {shape for shape in host_shapes(jaxpr) if len(shape) == 3 and shape[0] > 1}
    assert kept == {(3, *x.shape)}  # 3 slots keep 9 layers within 27 evaluations
    assert optimal_evaluations(9, 3) <= 27 < optimal_evaluations(9, 2)
    on_device = [
        var.aval
        for eqn in equations(jaxpr)
        for var in eqn.outvars
        if getattr(var.aval, "shape", ()) in kept and "<host>" not in str(var.aval)
    ]
    assert not on_device


# 4. BlockSeq


def test_a_block_seq_obeys_its_policy():
    """Fault 4: a BlockSeq's gradient had no remat equation."""
    x = PLAIN_MLP.carry(jr.key(0))
    jaxpr = gradient_jaxpr(PLAIN_MLP.stack(3, True, BlockSeq), x)
    assert count(jaxpr, "tanh") == 6
    assert count(gradient_jaxpr(PLAIN_MLP.stack(3, False, BlockSeq), x), "tanh") == 3


def test_a_block_seqs_via_methods_slice_per_layer_arguments():
    """Fault 4."""
    seq = PLAIN_MLP.stack(3, container=BlockSeq)
    scale = per_layer(jnp.asarray([1.0, 10.0, 100.0]))
    assert seq.fold_via(lambda block, x, scale: x + scale)(0.0, scale) == 111.0
    _, seen = seq.scan_via(lambda block, x, scale: (x, scale))(0.0, scale)
    np.testing.assert_array_equal(seen, [1, 10, 100])
    np.testing.assert_array_equal(seq.vmap_via(lambda block, scale: scale)(scale), [1, 10, 100])


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("mark", [per_layer, lambda x: x], ids=["marked", "unmarked"])
def test_a_per_layer_argument_that_is_too_short_raises(container, mark):
    """Fault 4: the last element served twice."""
    with pytest.raises(ValueError, match="scale"):
        PLAIN_MLP.stack(4, container=container).fold(PLAIN_MLP.carry(jr.key(0)), mark(jnp.ones(3)))


@pytest.mark.parametrize("container", CONTAINERS)
def test_three_keys_for_four_layers_raise(container):
    """Fault 4: two layers were identical."""
    with pytest.raises(ValueError, match="key"):
        container.init(layers(4), NamedMlp)(key=jr.split(jr.key(0), 3))


# 5. CSE


@pytest.mark.skipif(not KEEPS_BARRIERS, reason="this compiler drops barriers; a warning says so")
def test_an_unrolled_loop_under_remat_computes_again():
    """Fault 5: the compiler undid the remat of an unrolled loop."""
    assert dots(3, True, unroll=True) - dots(3, False, unroll=True) == 2 * 3


def test_an_unrolled_loop_under_remat_asks_for_a_barrier():
    """Fault 5, where a compiler drops the barrier too: it is asked for, and a warning says so."""
    stack, x = PLAIN_MLP.stack(3, True), PLAIN_MLP.carry(jr.key(0))
    lower._warn_once.cache_clear()
    says_so = contextlib.nullcontext() if KEEPS_BARRIERS else pytest.warns(UserWarning)
    with says_so:
        gradient = jax.grad(lambda x: jnp.sum(stack.fold(x, unroll=True)))
        jaxpr = jax.make_jaxpr(gradient)(x)
    remats = [eqn for eqn in equations(jaxpr) if "prevent_cse" in eqn.params]
    assert remats and all(eqn.params["prevent_cse"] for eqn in remats)


# 6. Policies


@pytest.mark.parametrize("names", ["sin", ["sin"], {"sin"}, ("sin",)], ids=repr)
def test_one_name_in_any_collection_keeps_the_value_of_that_name(names):
    """Fault 6: a string became its letters, a set was silently ignored."""
    stack = Stacked.init(layers(3), Sin)(key=jr.key(0))
    x = hax.ones(Width)
    kept = gradient_jaxpr(stack, x, remat=ScanCheckpointPolicy(save_block_internals=names))
    assert count(kept, "sin") == count(gradient_jaxpr(stack, x, remat=True), "sin") - 1


def test_an_unknown_name_raises():
    """Fault 6: it was silently ignored."""
    stack = Stacked.init(layers(3), Sin)(key=jr.key(0))
    with pytest.raises(ValueError, match="did you mean 'sin'"):
        gradient_jaxpr(
            stack, hax.ones(Width), remat=ScanCheckpointPolicy(save_block_internals=["sine"])
        )


@pytest.mark.parametrize(
    "fields",
    [dict(save_block_internals=["sin"]), dict(offload_block_internals=["sin"])],
    ids=str,
)
def test_simple_refuses_the_fields_that_it_would_ignore(fields):
    """Fault 6: `simple=True` ignored every other field."""
    with pytest.raises(ValueError, match="simple"):
        ScanCheckpointPolicy(simple=True, **fields)


def test_disable_and_nested_contradict_each_other():
    """Fault 6: `disable=True` with `nested` still recomputed."""
    with pytest.raises(ValueError, match="disable"):
        ScanCheckpointPolicy(disable=True, nested=True)


@pytest.mark.parametrize("alias", ["full", "recompute"])
def test_aliases_that_change_nothing_are_the_same_policy(alias):
    """Fault 6: three ways to say one thing; here they compare equal, and the docs say so."""
    assert ScanCheckpointPolicy.from_bool_or_str(alias) == ScanCheckpointPolicy(simple=True)
    assert "save_carries" in (ScanCheckpointPolicy.__doc__ or "")


def test_a_policy_can_be_hashed():
    """Fault 6."""
    policy = ScanCheckpointPolicy(save_block_internals=["b", "a"], offload_block_internals=["c"])
    assert isinstance(hash(policy), int)


# 7. Arguments


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_square_mask_is_sliced_with_a_warning_and_shared_when_marked(container):
    """Fault 7: a (4, 4) mask with 4 layers was silently sliced."""
    stack, mask = PLAIN_MLP.stack(4, container=container), jnp.ones((4, 4))
    shapes = []
    seen = lambda block, x, mask: shapes.append(mask.shape) or x  # noqa: E731
    with pytest.warns(UserWarning, match=r"(?s)mask.*per_layer.*shared"):
        stack.fold_via(seen)(0.0, mask)
    stack.fold_via(seen)(0.0, shared(mask))
    assert shapes[0] == (4,) and shapes[-1] == (4, 4)


@pytest.mark.parametrize("container", CONTAINERS)
def test_a_named_argument_with_the_layers_name_and_another_size_raises(container):
    """Fault 7: it was passed whole."""
    stack = PLAIN_MLP.stack(4, container=container)
    with pytest.raises(ValueError, match=r"(?s)mask.*layers"):
        stack.fold_via(lambda block, x, mask: x)(0.0, hax.ones(layers(5)))


@pytest.mark.parametrize("container", CONTAINERS)
def test_one_dropout_key_gives_every_layer_another_mask(container):
    """Fault 7: all layers shared the key, and their masks."""
    stack = PLAIN_MLP.stack(3, container=container)
    draw = lambda block, x, key: (x, jr.normal(key, (8,)))  # noqa: E731
    _, noise = stack.scan_via(draw)(0.0, jr.key(0))
    assert len({tuple(row) for row in np.asarray(noise)}) == 3


# 8. The surface


@pytest.mark.parametrize("container", CONTAINERS)
@pytest.mark.parametrize("index", [4, -5, 100])
def test_a_layer_beyond_the_last_raises(container, index):
    """Fault 8: `get_layer(N)` returned the last layer."""
    with pytest.raises(IndexError):
        PLAIN_MLP.stack(4, container=container).get_layer(index)


def test_a_stack_of_stacks_writes_the_outer_index_first():
    """Fault 8: the two indices were swapped."""
    inner = Stacked.init(hax.Axis("inner", 3), Sin)
    stack = Stacked.init(layers(2), lambda *, key: inner(key=key))(key=jr.key(0))
    state = stack.to_state_dict()
    assert "1.2.weight" in state and "2.1.weight" not in state
    np.testing.assert_array_equal(state["1.2.weight"], stack.stacked.stacked.weight.array[1, 2])


@pytest.mark.parametrize("container", CONTAINERS)
def test_loading_three_of_four_layers_raises(container):
    """Fault 8: it was accepted."""
    stack = NAMED_MLP.stack(4, container=container)
    state = {k: v for k, v in stack.to_state_dict().items() if not k.startswith("3.")}
    with pytest.raises((KeyError, ValueError), match="3"):
        stack.from_state_dict(state)


def test_an_eager_fold_compiles_once_for_all_calls():
    """Fault 8: every eager call compiled again. The caches of tracing say so without a log."""
    traces = []

    class Traced(eqx.Module):
        weight: jax.Array

        def __call__(self, x):
            traces.append(1)
            return x * self.weight

    stack = Stacked(Traced(jnp.ones(3)), layers(3), ScanCheckpointPolicy())
    stack.fold(jnp.ones(2))
    first = len(traces)
    stack.fold(jnp.ones(2))
    stack.fold(jnp.zeros(2))
    assert first >= 1 and len(traces) == first


# 9. Crashes, and errors in the library's words


@pytest.mark.parametrize("container", CONTAINERS)
def test_an_empty_stack_is_the_identity(container):
    """Fault 9."""
    stack = container.init(layers(0), NamedMlp)(key=jr.key(0))
    x = NAMED_MLP.carry(jr.key(0))
    np.testing.assert_array_equal(stack.fold(x).array, x.array)


@pytest.mark.parametrize("container", CONTAINERS)
def test_an_argument_without_axes_is_shared(container):
    """Fault 9: 0-d arrays crashed."""
    stack = PLAIN_MLP.stack(3, container=container)
    assert stack.fold_via(lambda block, x, y: x + y)(0.0, jnp.asarray(2.0)) == 6.0


def test_block_seqs_scan_stacks_plain_outputs():
    """Fault 9: plain-array outputs crashed."""
    seq = PLAIN_MLP.stack(3, container=BlockSeq)
    _, out = seq.scan_via(lambda block, x: (x + 1, jnp.ones(2) * x))(jnp.zeros(()))
    np.testing.assert_array_equal(out, [[0, 0], [1, 1], [2, 2]])


@pytest.mark.parametrize("container", CONTAINERS)
def test_an_equinox_class_can_be_stacked(container):
    """Fault 9: `Stacked.init(Layers, eqx.nn.Linear)` crashed."""
    stack = container.init(layers(3), eqx.nn.Linear)(EMBED, EMBED, key=jr.key(0))
    assert stack.fold(jnp.ones(EMBED)).shape == (EMBED,)


@pytest.mark.parametrize("container", CONTAINERS)
def test_errors_name_the_callers_argument(container):
    """Fault 9: they named internals."""
    stack = PLAIN_MLP.stack(3, container=container)
    with pytest.raises(ValueError, match="attention_mask"):
        stack.fold_via(lambda block, x, *, attention_mask: x)(
            0.0, attention_mask=per_layer(jnp.ones(4))
        )
    with pytest.raises(ValueError, match="weights"):
        scan(lambda carry, weights: (carry, None), layers(3))(0.0, jnp.ones(4))


# 10. Documentation


@pytest.mark.parametrize("word", ["full", "none", "save_all", "offload", "nested"])
def test_the_documentation_of_an_alias_is_what_the_code_does(word):
    """Fault 10: the table of aliases disagreed with the code; here a test reads the table."""
    test_aliases.test_an_alias_stands_for_its_fields(word)
    test_aliases.test_the_documentation_has_a_row_for_every_alias_with_its_fields(word)
