# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # So many bytes are left: what is the least recomputation that fits?
#
# A device has a fixed memory. Whatever a step does not need to fit into it, it should not
# recompute. `plan` turns the budget into a policy: it weighs every subset of the block's names and
# the loops that keep only some of the carries, and takes the one that recomputes least among those
# that fit.

# %%
# %matplotlib inline
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp

from stackax import Stacked
from stackax.memory import explain, measure, plan, show_bytes
from stackax.plot import plot_front
from stackax.testing import assert_recomputes, assert_saves
from stackax.transformer import TransformerBlock, TransformerConfig

# %%
config = TransformerConfig(layers=12, width=128, heads=4, vocab_size=256, seq_len=128)
make = Stacked.init(config.Layers, TransformerBlock)
stack = make(config, key=jax.random.key(0))
x = hax.random.normal(jax.random.key(1), (hax.Axis("batch", 8), config.Pos, config.Embed))


def loss(stack, x):
    return jnp.mean(jnp.square(stack.fold(x).array))


# %% [markdown]
# ## Between the two ends
#
# No remat is one end of the scale, full remat the other.

# %%
for policy in ("none", "full"):
    report = explain(loss, stack, x, argnums=0, remat=policy)
    print(
        f"{policy}: peak {show_bytes(report.peak_bytes)}, "
        f"{report.forward_evaluations:.2f} forward passes"
    )

# %% [markdown]
# 80 MiB is somewhere between them. The peak is that of the arguments (weights among them), the
# gradients and the temporary memory. What else must fit is yours to take off: Adam's state, for
# example, is twice the weights.

# %%
chosen = plan(loss, stack, x, argnums=0, budget_bytes="80 MiB")
chosen

# %% [markdown]
# The table is the *front*: the choices that no other beats in both bytes and recomputation. In the
# picture the budget is the dashed line, and the ring is the lowest point to the left of it.

# %%
plot_front(chosen)

# %% [markdown]
# ## From an estimate to a promise
#
# Everything above came from traces, in seconds and without compiling. An estimate is no promise, so
# `verify=True` compiles the choice, reads the compiler's own figure, and tries the next until that
# fits.

# %%
verified = plan(loss, stack, x, argnums=0, budget_bytes="80 MiB", verify=True)
print(verified.reason)

# %%
plot_front(verified)

# %% [markdown]
# ## Using it
#
# The policy is a value: give it to the stack, and the numbers of the step do not change.

# %%
planned = stack.with_policy(verified.policy)
plain = stack.with_policy("none")
step = jax.value_and_grad(loss)
(value, gradients), (expected, expected_gradients) = (
    jax.jit(step)(planned, x),
    jax.jit(step)(plain, x),
)
largest = max(
    float(jnp.max(jnp.abs(a - b)))
    for a, b in zip(jax.tree.leaves(gradients), jax.tree.leaves(expected_gradients), strict=True)
)
print(f"loss {value:.6f} and {expected:.6f}; gradients differ by at most {largest:.1e}")

# %% [markdown]
# `measure` asks the compiler about both, and times them (`figures.seconds`). Time them on the
# machine that will train, when nothing else runs on it.

# %%
for name, each in (("none", plain), ("planned", planned)):
    figures = measure(step, each, x)
    print(f"{name}: compiled peak {show_bytes(figures.peak_bytes)}")

# %% [markdown]
# ## A budget that nothing fits
#
# is an answer too: which policy comes nearest, and what it needs.

# %%
print(plan(loss, stack, x, argnums=0, budget_bytes="20 MiB").reason)

# %% [markdown]
# ## A stack that fits no machine here
#
# Shapes are enough. Here are the layers of a model of 8 billion weights, a batch of two sequences
# of 4096, and an accelerator of 80 GB, of which weights and gradients take most.

# %%
large = TransformerConfig(
    layers=32, width=4096, heads=32, kv_heads=8, mlp_width=14336, vocab_size=1, seq_len=4096
)
make_large = Stacked.init(large.Layers, TransformerBlock)
large_stack = eqx.filter_eval_shape(lambda: make_large(large, key=jax.random.key(0)))
large_x = eqx.filter_eval_shape(
    lambda: hax.zeros((hax.Axis("batch", 2), large.Pos, large.Embed), dtype=jnp.bfloat16)
)
for policy in ("none", "full"):
    report = explain(loss, large_stack, large_x, argnums=0, remat=policy)
    print(f"{policy}: {show_bytes(report.kept_bytes)} kept, peak {show_bytes(report.peak_bytes)}")

# %%
print(plan(loss, large_stack, large_x, argnums=0, budget_bytes="80 GB").reason)

# %% [markdown]
# ## Holding on to it
#
# A budget is part of what a model promises, so test it: what is kept, and how much is computed
# again. The plan's own figures are a good bound.

# %%
kept = dict.fromkeys(verified.policy.saved_names)  # None: of any size
assert_saves(loss, planned, x, kept)
assert_recomputes(
    loss, planned, x, [], max_forward_evaluations=1.01 * verified.chosen.forward_evaluations
)

# %% [markdown]
# ## What to remember
#
# - `plan(loss, stack, x, argnums=0, budget_bytes="80 MiB")` takes seconds: no compiling, no
#   memory, any sizes.
# - `verify=True` makes the estimate a promise, for the price of compiling a choice or two.
# - The optimizer's state is not in the step: take it off the budget.
# - A budget that nothing fits is a result; `fits` says so, and the reason names the least.
# - `python -m stackax tradeoffs --budget 80MiB` does the same for a stack of given sizes.
