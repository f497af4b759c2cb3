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
# # Does the 4096th token cost more than the 64th?
#
# With attention it does: each new token reads all that came before, and a cache of keys and values
# grows by one entry a token. A Mamba-2 remembers a state of fixed size instead. Here a small one is
# trained on Python's own sources, and then its memory is looked at: how large it is, what a token
# costs early and late in a text, and what happens to it in batches of unequal prompts.

# %%
# %matplotlib inline
import statistics
import time

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from stackax import ScanCheckpointPolicy
from stackax.lm import (
    TrainingConfig,
    TrainState,
    generate,
    read_corpus,
    train,
    validation_loss,
)
from stackax.mamba2 import Mamba2Config

# %% [markdown]
# ## Train a small one
#
# The config is all that differs from training a transformer. The policy keeps two values of each
# layer for the backward pass, the outputs of the projection in and of the state space, and computes
# the rest again.

# %%
config = Mamba2Config(layers=3, width=128, head_dim=32, state=32, vocab_size=256, seq_len=128)
training = TrainingConfig(steps=160, batch=8, learning_rate=6e-3)
policy = ScanCheckpointPolicy(save_block_internals=["in_proj", "ssd"])

corpus = read_corpus()
state = TrainState.init(config, training, gradient_checkpointing=policy)
losses = [validation_loss(state.decoder, corpus)]
for state, loss in train(state, corpus, training):
    losses.append(float(loss))
decoder = state.decoder
print(f"{losses[0]:.2f} nats per byte before training, of text that it never sees")
print(f"{validation_loss(decoder, corpus):.2f} after {training.steps} steps")

# %%
plt.figure(figsize=(6, 2.5))
plt.plot(losses)
plt.xlabel("step")
plt.ylabel("nats per byte")
plt.show()

# %% [markdown]
# ## What it remembers
#
# For each layer: the state of each feature of each head, in float32, and the last three inputs of
# the convolution. A cache of keys and values of the same width, for comparison, holds two vectors a
# layer for each token.

# %%
cache = decoder.init_cache()
cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
print(cache.state.shape, cache.window.shape)
print(f"{cache_bytes:,} bytes after any number of tokens")
for tokens in (64, 4096):
    kv_bytes = 2 * config.layers * config.width * 4 * tokens
    print(f"{kv_bytes:,} bytes of keys and values after {tokens}")

# %% [markdown]
# ## What a token costs, early and late
#
# `prefill` reads a text into the cache, `step` adds a token to it. The loop below adds 64 tokens in
# one compiled program. It is *the same* program after 64 tokens and after 4096, because the cache
# has the same shape: its memory cannot differ, only its time could. Beside it, what a token costs
# without a cache, where all of the text is read again.


# %%
@eqx.filter_jit
def read(decoder, tokens):
    hidden, cache = decoder.prefill(tokens, decoder.init_cache())
    return decoder.unembed(hidden["position", -1]), cache


@eqx.filter_jit
def add_64(decoder, logits, cache):
    def add(carry, _):
        logits, cache = carry
        token = hax.argmax(logits, "vocab").astype(jnp.int32)
        hidden, cache = decoder.step(token, cache)
        return (decoder.unembed(hidden), cache), token.array

    return jax.lax.scan(add, (logits, cache), length=64)[1]


def seconds(run, *args):
    """The median of five runs, after one that compiles."""
    times = []
    for _ in range(6):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


text = hax.named(np.asarray(corpus.validation[:4096], np.int32), "position")
LENGTHS = (64, 256, 1024, 4096)
caches = {n: read(decoder, text["position", :n]) for n in LENGTHS}
cached = {n: seconds(add_64, decoder, *caches[n]) / 64 for n in LENGTHS}
uncached = {n: seconds(read, decoder, text["position", :n]) for n in LENGTHS}
for n in LENGTHS:
    print(f"after {n:4} tokens: {1e3 * cached[n]:.2f} ms with the cache", end=", ")
    print(f"{1e3 * uncached[n]:.1f} ms without")
print(f"the token after 4096 costs {cached[4096] / cached[64]:.2f} times that after 64")

# %%
plt.figure(figsize=(6, 3))
plt.loglog(LENGTHS, [1e3 * uncached[n] for n in LENGTHS], "o-", label="the whole text again")
plt.loglog(LENGTHS, [1e3 * cached[n] for n in LENGTHS], "o-", label="from the cache")
plt.xlabel("tokens before")
plt.ylabel("ms for one more")
plt.legend()
plt.show()

# %% [markdown]
# The loop updates the cache where it lies. Its scratch memory is of the size of one layer's weights
# and state, and would show a copy of the cache.

# %%
compiled = add_64.lower(decoder, *caches[64]).compile().compiled
print(f"{compiled.memory_analysis().temp_size_in_bytes:,} bytes of scratch memory")

# %% [markdown]
# ## However the text is cut up
#
# In pieces of any length, the text gives what it gives as a whole: the same last logits, up to the
# order of float32 sums. `generate` reads a long prompt that way where it is told to
# (`prefill_size=`), so that reading takes no more memory than a piece does.

# %%
pieces, memory = (0, 1, 3, 500, 1024), decoder.init_cache()
for start, end in zip(pieces, pieces[1:], strict=False):
    hidden, memory = eqx.filter_jit(decoder.prefill)(text["position", start:end], memory)
difference = jnp.abs(decoder.unembed(hidden["position", -1]).array - caches[1024][0].array).max()
print(f"largest difference of a logit: {difference:.1e}")

# %% [markdown]
# ## Prompts of unequal lengths, and an end for each
#
# A batch is padded on either side, and the mask says what is real. Padding reaches neither the
# states nor the convolutions, so every prompt is continued as it would be alone. With `stop`, a
# sequence that has written a space is complete and repeats it, and the loop ends when all are.

# %%
prompts = [b"import ", b"def __init__(self, ", b"    return "]
size = max(map(len, prompts))
padded = np.array([list(p.rjust(size)) for p in prompts])
is_real = np.array([[i >= size - len(p) for i in range(size)] for p in prompts])
batch = hax.named(padded, ("batch", "position"))
mask = hax.named(is_real, ("batch", "position"))
how = dict(new_tokens=32, temperature=0.0, stop=ord(" "))
texts = np.asarray(generate(decoder, batch, mask=mask, **how).array)
for prompt, text_of_row in zip(prompts, texts, strict=True):
    alone = generate(decoder, hax.named(np.array(list(prompt)), "position"), **how).array
    assert bytes(text_of_row[size:].tolist()) == bytes(alone[len(prompt) :].tolist())
    print(repr((prompt + bytes(text_of_row[size:].tolist())).decode(errors="replace").strip()))

# %% [markdown]
# ## What to remember
#
# - A Mamba-2's cache is of one size for ever: the token after 4096 costs what the token after 64
#   does, in time and in memory, and it is the same compiled program.
# - A config decides the family: `Mamba2Config` in the place of `TransformerConfig`, and training,
#   policies and `generate` are the same.
# - `prefill` and `step` may cut a text anywhere; padding goes in a `mask`, packed documents in
#   `segment_ids`.
# - For training, `ScanCheckpointPolicy(save_block_internals=["in_proj", "ssd"])` is the policy to
#   start from: it keeps the dear products and computes the cheap rest again.
