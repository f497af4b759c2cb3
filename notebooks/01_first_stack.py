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
# # How do I turn my block into N layers that compile once?
#
# You have an Equinox module that takes `x` to `x`, and run twelve of them in a Python loop. The
# program that JAX compiles then contains your block twelve times. Here the same twelve become one
# `Stacked`: the block is in the program once, however many layers there are, and values and
# gradients stay what they were. You need to know JAX and Equinox, and nothing else.

# %%
# %matplotlib inline
import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import optax
import safetensors.numpy

from stackax import (
    ScanCheckpointPolicy,
    Stacked,
    checkpoint_name,
    layer_index,
    per_layer,
    shared,
)

# %% [markdown]
# ## A block, and a loop over twelve
#
# A residual block of two linear layers. It is ordinary Equinox: nothing in it knows that it will be
# stacked.


# %%
class Block(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width, *, key):
        up_key, down_key = jax.random.split(key)
        self.up = eqx.nn.Linear(width, 4 * width, key=up_key)
        self.down = eqx.nn.Linear(4 * width, width, key=down_key)

    def __call__(self, x):
        hidden = jax.vmap(self.up)(x)
        return x + jax.vmap(self.down)(jax.nn.gelu(hidden))


WIDTH, DEPTH = 64, 12
key = jax.random.key(0)
x = jax.random.normal(jax.random.key(1), (256, WIDTH))
blocks = [Block(WIDTH, key=k) for k in jax.random.split(key, DEPTH)]


def loop(blocks, x):
    for block in blocks:
        x = block(x)
    return x


# %% [markdown]
# ## The same, stacked
#
# `Stacked` is one block whose every array has a first axis more, that of the layers. `fold(x)` is
# the loop above. `from_layers` stacks blocks that exist; `init` makes them from one key, which it
# splits. The axis has a name and a size, `haliax.Axis("layers", 12)`; that is all of Haliax that
# you need for now.

# %%
layers = Stacked.from_layers(blocks)
made = Stacked.init(hax.Axis("layers", DEPTH), Block)(WIDTH, key=key)
print(blocks[0].up.weight.shape, "in a block,", layers.stacked.up.weight.shape, "in the stack")


def largest_difference(a, b):
    """Of the arrays of two pytrees, relative to the largest number of each."""
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(float(jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y))) for x, y in pairs)


def loop_loss(blocks, x):
    return jnp.mean(loop(blocks, x) ** 2)


def stack_loss(layers, x):
    return jnp.mean(layers.fold(x) ** 2)


values = largest_difference(layers.fold(x), loop(blocks, x))
gradients = eqx.filter_jit(eqx.filter_grad(stack_loss))(layers, x)
expected = eqx.filter_jit(eqx.filter_grad(loop_loss))(blocks, x)
difference = largest_difference(list(gradients), expected)
assert values < 1e-5 and difference < 1e-4
assert largest_difference(made, layers) < 1e-6
print(f"relative differences: at most {values:.0e} of values, {difference:.0e} of gradients")

# %% [markdown]
# The gradient of a stack is a stack: `gradients[3]` is that of the fourth block.
#
# ## What it saves
#
# These are the lines of the program of the gradient, as it goes to the compiler. The loop's grow
# with the depth, and what the compiler has to work through with them; the stack's do not.


# %%
def program_lines(loss, layers):
    return len(jax.jit(jax.grad(loss)).lower(layers, x).as_text().splitlines())


DEPTHS = (4, 8, 16, 32, 64)
of_loop, of_stack = [], []
for depth in DEPTHS:
    deep = [blocks[i % DEPTH] for i in range(depth)]
    of_loop.append(program_lines(loop_loss, deep))
    of_stack.append(program_lines(stack_loss, Stacked.from_layers(deep)))
    print(f"{depth:3} layers: {of_loop[-1]:6} lines as a loop, {of_stack[-1]} as a stack")
assert len(set(of_stack)) == 1 and of_loop[-1] > 10 * of_loop[0]

# %%
plt.figure(figsize=(5, 2.8), layout="constrained")
plt.loglog(DEPTHS, of_loop, "o-", label="Python loop")
plt.loglog(DEPTHS, of_stack, "o-", label="Stacked")
for ticks, set_ticks in ((DEPTHS, plt.xticks), ((250, 500, 1000, 2000, 4000), plt.yticks)):
    set_ticks(ticks, labels=map(str, ticks))
plt.minorticks_off()
plt.xlabel("layers")
plt.ylabel("lines of program")
plt.legend(frameon=False)
plt.show()

# %% [markdown]
# ## Arguments: one for all, or one for each
#
# Blocks take more than `x`. A loop has to be told which arguments each layer gets a slice of:
#
# | you pass | every layer gets |
# |---|---|
# | `shared(a)`, a number | all of it |
# | `per_layer(a)` | its own slice of the first axis |
# | a PRNG key | its own key, as `jax.random.split` makes them |
# | `layer_index()` | its own index |
#
# `scan_via(f)` runs `f(block, x, ...)` in the place of the block's own call, and stacks what `f`
# returns beside `x`; `fold_via` is the same without outputs.


# %%
def noisy(block, x, mask, rate, key, index):
    noise = rate * jax.random.normal(key, x.shape)
    return jnp.where(mask, block(x + noise), x), (index, jnp.mean(x**2))


mask = jnp.arange(256)[:, None] < 200
rates = jnp.linspace(0.0, 0.1, DEPTH)
noise_key = jax.random.key(2)

run = eqx.filter_jit(layers.scan_via(noisy))
y, (indices, sizes) = run(x, shared(mask), per_layer(rates), noise_key, layer_index())

by_hand, hand_sizes = x, []
for i, k in enumerate(jax.random.split(noise_key, DEPTH)):
    by_hand, (_, size) = noisy(blocks[i], by_hand, mask, rates[i], k, i)
    hand_sizes.append(float(size))
assert largest_difference(y, by_hand) < 1e-5
assert jnp.allclose(sizes, jnp.array(hand_sizes), rtol=1e-5)
print("layer ", *(f"{i:5d}" for i in indices))
print("mean x²", *(f"{size:5.2f}" for size in sizes))

# %% [markdown]
# What does not fit is an error before anything runs, not a layer that quietly gets another's slice.

# %%
try:
    run(x, shared(mask), per_layer(rates[1:]), noise_key, layer_index())
except ValueError as error:
    print(error)

# %% [markdown]
# ## Looking inside, and changing it
#
# A stack is indexed and sliced like a list, and is an Equinox module like any other:
# `jax.tree.map`, `eqx.tree_at` and `eqx.filter` work on all layers at once.

# %%
print(len(layers), "layers; the first is a", type(layers[0]).__name__)
print("every other layer:", layers[::2].stacked.up.weight.shape)

swapped = layers.set_layer(0, layers[-1])
assert largest_difference(swapped[0], blocks[-1]) == 0

halved = eqx.tree_at(lambda s: s.stacked.down.weight, layers, replace_fn=lambda w: w / 2)
norms = halved.vmap_via(lambda block: jnp.linalg.norm(block.down.weight))()
assert jnp.allclose(2 * norms, jnp.array([jnp.linalg.norm(b.down.weight) for b in blocks]))
print("norms of the halved weights:", *(f"{norm:.2f}" for norm in norms))

# %% [markdown]
# ## A first policy
#
# For the backward pass JAX keeps what each layer's derivatives read. A policy says what to keep
# instead; the rest is computed again, one layer at a time. To keep a value by name, give it one.
# The bytes are the compiler's: what the gradient needs beside its arguments and results.


# %%
def named(block, x):
    hidden = checkpoint_name(jax.vmap(block.up)(x), "hidden")
    return x + jax.vmap(block.down)(jax.nn.gelu(hidden))


def temporary_bytes(policy):
    def loss(layers, x):
        return jnp.mean(layers.fold_via(named, remat=policy)(x) ** 2)

    compiled = jax.jit(jax.grad(loss)).lower(layers, x).compile()
    assert largest_difference(compiled(layers, x), gradients) < 1e-4
    return compiled.memory_analysis().temp_size_in_bytes


POLICIES = {
    "False: keep everything": False,
    "keep the carries and 'hidden'": ScanCheckpointPolicy(save_block_internals=["hidden"]),
    "True: keep the carries": True,
    "'slots=3': keep three carries": "slots=3",
}
temporary = {label: temporary_bytes(policy) for label, policy in POLICIES.items()}
for label, size in temporary.items():
    print(f"{label:32}{size / 2**20:6.2f} MiB")
assert list(temporary.values()) == sorted(temporary.values(), reverse=True)

# %% [markdown]
# The gradients are the same each time; the `assert` in `temporary_bytes` says so. With `True` what
# is left is a carry a layer and one layer's own internals. A name that no block has is an error, so
# a policy can't lose its effect in silence:

# %%
try:
    layers.fold_via(named, remat=ScanCheckpointPolicy(save_block_internals=["hiden"]))(x)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Training it
#
# Nothing is new here: a filtered gradient and an optax optimizer. `with_policy` gives the stack a
# policy of its own. Beside it the Python loop is trained on the same data, to the same losses.

# %%
optimizer = optax.adam(1e-3)
target = jnp.sin(x @ jax.random.normal(jax.random.key(3), (WIDTH, WIDTH)) / WIDTH**0.5)


def train(model, run, steps):
    @eqx.filter_jit
    def step(model, state):
        def loss(model):
            return jnp.mean((run(model, x) - target) ** 2)

        value, gradient = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(gradient, state)
        return eqx.apply_updates(model, updates), state, value

    state, losses = optimizer.init(eqx.filter(model, eqx.is_inexact_array)), []
    for _ in range(steps):
        model, state, value = step(model, state)
        losses.append(float(value))
    return model, losses


trained, losses = train(layers.with_policy("full"), Stacked.fold, steps=60)
_, loop_losses = train(blocks, loop, steps=60)
assert losses[-1] < losses[0] / 5
assert jnp.allclose(jnp.array(losses), jnp.array(loop_losses), rtol=1e-2)
for i in (0, 19, 39, 59):
    print(f"step {i + 1:2}: loss {losses[i]:.4f}, of the Python loop {loop_losses[i]:.4f}")

# %% [markdown]
# ## Saving
#
# `to_state_dict` has one entry for each array of each layer, named as PyTorch names those of a
# `Sequential`, so a checkpoint does not depend on how the layers are run. The file is safetensors'
# business.

# %%
arrays = {name: jax.device_get(a) for name, a in trained.to_state_dict("layers").items()}
file = safetensors.numpy.save(arrays)
loaded = layers.from_state_dict(safetensors.numpy.load(file), "layers")
assert largest_difference(loaded, trained) == 0
print(len(arrays), "arrays:", ", ".join(list(arrays)[:4]), "...")

# %% [markdown]
# ## Named axes, and when they are worth it
#
# A Haliax `NamedArray` is an array whose axes are called by name: `hax.named(a, ("batch",
# "embed"))`. Operations say which axis they mean, not which number it has, and arrays line up by
# name. A stack reads from the names what the marks above said: an argument with the layers' axis
# is sliced along it, wherever it stands, and one without is passed whole.
#
# They are worth it where there are many axes to confuse (batch, position, heads, features), where
# many arguments are per layer, or where a mesh shards axes by name; the blocks of
# `stackax.transformer` and `stackax.mamba2` use them for that. They are not worth rewriting a block
# for: plain arrays are stacked just as well, and a block may hold both.


# %%
def scaled(block, x, rate, gain):
    return x + rate.array * (block(x * gain.array) - x)


rate = hax.named(rates, "layers")  # has the layers' axis: each layer gets a number
gain = hax.named(jnp.linspace(0.5, 1.5, WIDTH), "embed")  # has not: every layer gets all of it
y = layers.fold_via(scaled)(x, rate, gain)

by_hand = x
for i, block in enumerate(blocks):
    by_hand = by_hand + rates[i] * (block(by_hand * gain.array) - by_hand)
assert largest_difference(y, by_hand) < 1e-5
print(rate.shape, "is sliced,", gain.shape, "is passed whole")

# %% [markdown]
# ## What to remember
#
# - `Stacked.init(Axis("layers", N), Block)(..., key=key)` makes N layers, `Stacked.from_layers`
#   stacks those you have, and `fold(x)` is `for layer in layers: x = layer(x)`.
# - The program has your block once: it is as long for 64 layers as for 4.
# - Mark an argument `shared` or `per_layer`; a key is split; `layer_index()` is the layer's number.
#   `scan_via` and `fold_via` run a function of yours in the place of the block's own call.
# - `layers[i]`, `layers[a:b]` and `set_layer` take it apart; it is an Equinox module like any
#   other.
# - `remat=True` is the first policy to try. Values with a `checkpoint_name` can be kept by name:
#   `02_choose_a_policy` says which are worth it.
# - Named axes are there where you want them, and not needed.
