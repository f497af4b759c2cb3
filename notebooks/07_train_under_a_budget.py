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
# # How do I train a language model in 40 MiB?
#
# A step of training holds the weights, their gradients, the optimizer's state, and what the
# backward pass keeps of the forward pass. The model decides the first three; the last is yours to
# decide, and is usually the largest. Here the budget comes first. The bill is looked at before
# anything is compiled, a policy is planned for what the optimizer leaves, and the compiler confirms
# that the step that runs is within it. 40 MiB, so that it takes two CPU cores a minute; the lines
# are the same for 80 GB.

# %%
# %matplotlib inline
import dataclasses
import tempfile

import equinox as eqx
import haliax as hax
import jax
import matplotlib.pyplot as plt
import numpy as np

from stackax.lm import (
    TrainingConfig,
    TrainState,
    generate,
    load_state,
    next_token_loss,
    read_corpus,
    save_state,
    train,
    train_step,
    training_windows,
    validation_loss,
)
from stackax.memory import explain, measure, parse_bytes, plan, show_bytes
from stackax.plot import plot_front, plot_residuals
from stackax.transformer import TransformerConfig

BUDGET = parse_bytes("40 MiB")

# %% [markdown]
# ## Text that is there already
#
# `read_corpus()` reads the sources of Python's standard library, which are on every machine with
# Python, and keeps every 20th file from training. `read_corpus(["folder"])` reads text of yours.

# %%
corpus = read_corpus()
print(f"{corpus.files} files: {corpus.train.size / 1e6:.1f} MB to train on,", end=" ")
print(f"{corpus.validation.size / 1e6:.1f} MB to validate on")

# %% [markdown]
# ## The model, as shapes
#
# Nothing is allocated yet. `TrainState` is all that training changes: the decoder, the optimizer's
# state and the step's number.

# %%
config = TransformerConfig(layers=4, width=128, heads=4, vocab_size=256, seq_len=64)
training = TrainingConfig(steps=200, batch=16, learning_rate=4e-3)


def shapes_of(config, training, policy=False):
    return eqx.filter_eval_shape(TrainState.init, config, training, gradient_checkpointing=policy)


def bytes_of(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


shapes = shapes_of(config, training)
windows = training_windows(corpus, config.seq_len, training, step=0)
weights_bytes, adam_bytes = bytes_of(shapes.decoder), bytes_of(shapes.optimizer_state)
print(f"weights          {show_bytes(weights_bytes):>9}")
print(f"their gradients  {show_bytes(weights_bytes):>9}")
print(f"Adam's averages  {show_bytes(adam_bytes):>9}")

# %% [markdown]
# ## The bill
#
# A trace of the loss says what its backward pass would keep, where nothing is said: many times the
# weights, and more than the budget.

# %%
report = explain(next_token_loss, shapes.decoder, windows, argnums=0, remat="none")
print(f"kept for the backward pass  {show_bytes(report.kept_bytes):>9}")
print(f"peak of the gradient        {show_bytes(report.peak_bytes):>9}")
print(f"with Adam's averages        {show_bytes(report.peak_bytes + adam_bytes):>9}")
assert report.peak_bytes + adam_bytes > BUDGET

# %%
plot_residuals(report)

# %% [markdown]
# ## A policy for what is left
#
# `plan` knows the gradient: weights, gradients and temporary memory. The optimizer comes after it,
# so its state is taken off the budget first. `verify=True` has the compiler confirm the choice.

# %%
chosen = plan(
    next_token_loss,
    shapes.decoder,
    windows,
    argnums=0,
    budget_bytes=BUDGET - adam_bytes,
    verify=True,
)
assert chosen.fits and chosen.compiled_peak_bytes <= BUDGET - adam_bytes
print(chosen.reason)

# %%
plot_front(chosen)

# %% [markdown]
# ## The step that will run
#
# The promise is about the gradient; what runs is the whole step, with clipping and AdamW, whose
# state is updated where it lies. So the compiler is asked once more, about `train_step`, which is
# what `train` runs. Shapes still do.


# %%
def step(state, windows):
    return train_step(state, windows, training)


planned = shapes_of(config, training, chosen.policy)
figures = measure(jax.jit(step, donate_argnums=0), planned, windows)
print(f"weights and Adam's averages   {show_bytes(weights_bytes + adam_bytes):>9}")
print(f"gradients and all the rest    {show_bytes(figures.temp_bytes):>9}")
print(f"the step, as compiled         {show_bytes(figures.peak_bytes):>9} of {show_bytes(BUDGET)}")
assert figures.peak_bytes <= BUDGET

# %% [markdown]
# ## Training
#
# `train` yields the state after every step. Its buffers are reused by the next step, so keep only
# the last one, and save those you want to come back to.

# %%
SAVE_AT = 150
folder = tempfile.TemporaryDirectory()
state = TrainState.init(config, training, gradient_checkpointing=chosen.policy)
losses, before = [], validation_loss(state.decoder, corpus)
for state, loss in train(state, corpus, training):
    losses.append(float(loss))
    if len(losses) == SAVE_AT:
        save_state(folder.name, state, training)
after = validation_loss(state.decoder, corpus)
assert after < before - 2
print(f"on text that it never saw: {before:.2f} nats per byte before, {after:.2f} after")

# %%
plt.figure(figsize=(6, 2.8), layout="constrained")
plt.plot(range(1, training.steps + 1), losses, linewidth=1, label="each step's loss")
plt.plot([0, training.steps], [before, after], "ko", label="validation loss")
plt.xlabel("step")
plt.ylabel("nats per byte")
plt.ylim(bottom=0)
plt.legend(frameon=False)
plt.show()

# %% [markdown]
# ## What it writes
#
# 200 steps make no programmer. They are enough for lines, indents and the look of words.

# %%
prompt = hax.named(np.array(list(b"def ")), "position")
text = generate(state.decoder, prompt, new_tokens=200, temperature=0.7, key=jax.random.key(0))
print(bytes(text.array.tolist()).decode(errors="replace"))

# %% [markdown]
# ## Stopping and going on
#
# What a step sees depends on its number and the seed alone, so a run that goes on from a saved
# state has the losses of one that never stopped, to the last bit. The policy is not part of what is
# saved: it belongs to the machine, and another machine may plan another.

# %%
loaded, how = load_state(folder.name, gradient_checkpointing=chosen.policy)
assert how == training and int(loaded.step) == SAVE_AT
again = []
for loaded, loss in train(loaded, corpus, training):
    again.append(float(loss))
    if len(again) == 10:
        break
assert again == losses[SAVE_AT : SAVE_AT + 10]
print("the run:     ", *(f"{loss:.4f}" for loss in losses[SAVE_AT : SAVE_AT + 5]))
print("after a stop:", *(f"{loss:.4f}" for loss in again[:5]))
folder.cleanup()

# %% [markdown]
# ## What else the budget would hold
#
# The same question of other sizes, from traces alone: what a step needs if everything is kept, and
# if only the carries are. A size whose upper point is within the budget needs no policy. One whose
# lower point is beyond it needs less of something else. In between there is something to plan.


# %%
def peak_bytes(policy, layers=config.layers, batch=training.batch):
    """What a step of another size is estimated to need, with the optimizer's state."""
    model = dataclasses.replace(config, layers=layers)
    how = dataclasses.replace(training, batch=batch)
    state = shapes_of(model, how)
    windows = training_windows(corpus, model.seq_len, how, step=0)
    bill = explain(next_token_loss, state.decoder, windows, argnums=0, remat=policy)
    return bill.peak_bytes + bytes_of(state.optimizer_state)


SIZES = {"batch": range(4, 29, 4), "layers": range(1, 8)}
peaks = {
    (name, policy): [peak_bytes(policy, **{name: size}) for size in sizes]
    for name, sizes in SIZES.items()
    for policy in ("none", "full")
}


def largest(name, policy):
    fitting = [s for s, p in zip(SIZES[name], peaks[name, policy], strict=True) if p <= BUDGET]
    return max(fitting, default=0)


for name in SIZES:
    print(f"{name}: up to {largest(name, 'none')} with all kept,", end=" ")
    print(f"{largest(name, 'full')} with the carries kept")
    assert largest(name, "full") >= 2 * largest(name, "none") > 0

# %%
_, panels = plt.subplots(1, 2, figsize=(7, 2.8), sharey=True, layout="constrained")
for panel, (name, sizes) in zip(panels, SIZES.items(), strict=True):
    for policy, label in (("none", "all kept"), ("full", "carries kept")):
        panel.plot(sizes, [p / 2**20 for p in peaks[name, policy]], ".-", label=label)
    panel.axhline(BUDGET / 2**20, color="black", linestyle="dashed", linewidth=1, label="budget")
    panel.set(xlabel=name, xticks=sizes, ylim=(0, None))
panels[0].set_ylabel("peak of a step, MiB")
panels[0].legend(frameon=False)
plt.show()

# %% [markdown]
# ## What to remember
#
# - Start from the budget: `explain` on shapes tells what a step would need before anything is
#   allocated.
# - `plan` is about the gradient. Take the optimizer's state off the budget: for Adam, twice the
#   weights.
# - `verify=True` makes it a promise about the gradient; `measure` on `train_step`, with the state
#   donated, says what the whole step takes.
# - The policy changes bytes and time, not losses; it is not saved, and may be planned anew where a
#   run goes on.
# - If nothing fits, the plan says what comes nearest; a smaller batch, or less depth, is then the
#   answer.
# - `python -m stackax train` is this run from the command line: it prints the bill, and `--remat`
#   takes a policy by its name.
