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
# # What should the backward pass keep?
#
# A stack of N layers can keep everything that its derivatives read, or next to nothing and compute
# it again, or something in between. Which values are worth their bytes? The usual answer is to try
# policies until one does not run out of memory. Here the bill comes first, before anything is
# compiled or allocated.

# %%
# %matplotlib inline
import json
import subprocess
import sys
from types import SimpleNamespace

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp

from stackax import ScanCheckpointPolicy, Stacked
from stackax.memory import explain, show_bytes
from stackax.plot import plot_residuals, plot_timeline, plot_tradeoffs
from stackax.testing import assert_recomputes, assert_saves
from stackax.transformer import TransformerBlock, TransformerConfig

# %% [markdown]
# ## A stack, as shapes
#
# `filter_eval_shape` makes the stack without its weights: the sizes below could be those of a model
# that fits no machine.

# %%
config = TransformerConfig(layers=24, width=512, heads=8, kv_heads=2, vocab_size=256, seq_len=512)
make = Stacked.init(config.Layers, TransformerBlock)
stack = eqx.filter_eval_shape(lambda: make(config, key=jax.random.key(0)))
x = eqx.filter_eval_shape(lambda: hax.zeros((hax.Axis("batch", 8), config.Pos, config.Embed)))


def loss(stack, x):
    return jnp.mean(jnp.square(stack.fold(x).array))


# %% [markdown]
# ## What is kept when nothing is said
#
# `explain` traces the step of `jax.value_and_grad` and lists each value that the backward pass
# keeps: its name if it has one, the line that makes it, its bytes, and who reads it.

# %%
report = explain(loss, stack, x, argnums=0, remat="none")
report

# %%
plot_residuals(report)

# %% [markdown]
# The two largest are made by the softmax of the attention, grow with the square of the sequence,
# and are cheap to compute again. The blue bars have a name: those are what a policy can ask for.
#
# ## What policies come to
#
# A policy is tried with `remat=`. Each row below is one trace.

# %%
POLICIES = ["none", "minimal_with_context", "minimal", "save_qkv_proj", "full", "slots=12"]
reports = {policy: explain(loss, stack, x, argnums=0, remat=policy) for policy in POLICIES}

print(f"{'policy':22}{'kept':>12}{'temporary':>12}{'forward passes':>16}")
for policy, bill in reports.items():
    kept, temp = show_bytes(bill.kept_bytes), show_bytes(bill.peak.temp_bytes)
    print(f"{policy:22}{kept:>12}{temp:>12}{bill.forward_evaluations:>16.2f}")

# %% [markdown]
# `minimal` keeps the outputs of the matrix products, so what is computed again is cheap: most of
# the memory is gone for a fraction of a forward pass. `full` keeps one value a layer, the carry,
# for most of one more forward pass. `slots=12` keeps half of the carries; below that it is the
# *working set* of a single layer that decides, and no policy makes it smaller.
#
# The timeline says so at a glance: with `full`, what is kept is a thin band, and the peak is one
# layer's own.

# %%
plot_timeline(reports["none"])

# %%
plot_timeline(reports["full"])

# %% [markdown]
# ## What they cost in time
#
# Bytes and operations are known from the trace; time has to be measured. `python -m stackax
# tradeoffs` compiles and runs a stack of given sizes under several policies, in turn in one
# process. (A smaller stack here, so that it takes a minute on two cores. On a CPU, memory traffic
# makes recomputation look cheaper than on an accelerator: measure on the machine that will train.)

# %%
command = [sys.executable, "-m", "stackax", "tradeoffs", "--json", "--layers", "6", "--policies"]
command += ["none", "minimal_with_context", "save_qkv_proj", "full", "slots=2"]
found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
rows = [SimpleNamespace(**row) for row in found["rows"]]
for row in rows:
    estimated, compiled = map(show_bytes, (row.estimated_temp_bytes, row.compiled_temp_bytes))
    print(f"{row.policy:22}{estimated:>12} estimated{compiled:>12} compiled", end="")
    print(f"{row.relative_time:8.2f} x the time of {found['time_is_relative_to']}")

# %%
plot_tradeoffs(rows)

# %% [markdown]
# ## A policy of one's own, and a test that holds it
#
# Presets are only names. Here the attention's output and the two inputs of the gated MLP are kept:
# outputs of matrix products, or of attention. What a block keeps changes silently
# when someone edits it, so say it in a test.

# %%
policy = ScanCheckpointPolicy(save_block_internals=["context", "mlpwi_0", "mlpwi_1"])
mine = stack.with_policy(policy)
positions = 8 * 512
expected = {
    "context": 24 * positions * 512 * 4,
    "mlpwi_0": 24 * positions * config.Mlp.size * 4,
    "mlpwi_1": 24 * positions * config.Mlp.size * 4,
}
assert_saves(loss, mine, x, expected, max_bytes="1.5 GiB")
assert_recomputes(loss, mine, x, ["query_proj", "out_proj"], max_forward_evaluations=1.3)
print(f"{explain(loss, mine, x, argnums=0).forward_evaluations:.2f} forward passes")

# %% [markdown]
# ## What to remember
#
# - `explain(loss, stack, x, remat=...)` costs a trace: look before you compile.
# - Name what is large and dear to compute (products of matrices), not what is large and cheap
#   (softmax, activations, norms).
# - `minimal_with_context` gives up little time for most of the memory, `full` most of the time it
#   can for nearly all; `slots=k` goes below `full` only while carries, not one layer's working set,
#   make the peak.
# - Put `assert_saves` into your test suite. A value that loses its name is then a failing test, not
#   a step that runs out of memory.
# - To have the policy chosen for a budget, see `03_fit_a_budget`.
