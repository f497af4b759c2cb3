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
# # The weights don't fit: how do they arrive in time?
#
# A model that is too large for one device is sharded: each of eight devices holds an eighth of
# every layer's weights, or the weights lie in the host's memory. A layer that runs needs all of
# its weights, on the device. Fetched when the layer starts, they keep it waiting; fetched all at
# once, they fill the memory that sharding was to save. Between the two there is one good moment:
# while the layer before runs. This notebook shows that moment in the program, and who is live when.

# %%
# %matplotlib inline
import re

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from stackax import Stacked, stream

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
jax.set_mesh(mesh)
print(mesh.size, "devices on one mesh axis,", mesh.axis_names)

# %% [markdown]
# ## A stack in shards
#
# Any block will do. This one has two matrices of equal size; both are split over the eight devices
# along the axis after the layers'. The layers' own axis is never split: a loop takes one layer
# after the other.


# %%
class MLP(eqx.Module):
    up: jax.Array
    down: jax.Array

    def __init__(self, embed, hidden, *, key):
        up, down = jax.random.split(key)
        self.up = jax.random.normal(up, (embed, hidden)) / embed**0.5
        self.down = jax.random.normal(down, (hidden, embed)) / hidden**0.5

    def __call__(self, x):
        return x + jnp.tanh(x @ self.up) @ self.down


EMBED, HIDDEN, BATCH = 128, 512, 8
LAYER_BYTES = 2 * EMBED * HIDDEN * 4
in_shards = PartitionSpec(None, "data")


def make(layers):
    make = Stacked.init(hax.Axis("layers", layers), MLP)
    return make(EMBED, HIDDEN, key=jax.random.key(0))


whole = make(5)
sharded = jax.device_put(whole, NamedSharding(mesh, in_shards))
x = jax.random.normal(jax.random.key(1), (BATCH, EMBED))
print(
    "a device holds",
    sharded.stacked.up.addressable_shards[0].data.shape,
    "of",
    whole.stacked.up.shape,
)

# %% [markdown]
# ## One argument
#
# `stream=` says where the weights come from. Results and gradients are those of the whole stack;
# the gradients come out in the weights' shards.


# %%
def loss(stack, x, **options):
    return jnp.sum(jnp.sin(stack.fold(x, remat=True, **options)))


def largest_difference(a, b):
    pairs = zip(jax.tree.leaves(jax.device_get(a)), jax.tree.leaves(jax.device_get(b)), strict=True)
    return max(float(abs(x - y).max() / abs(y).max()) for x, y in pairs)


from_shards = stream.from_shards("data", in_shards)
streamed_gradient = jax.jit(lambda s, x: jax.grad(loss)(s, x, stream=from_shards))
gradients = streamed_gradient(sharded, x)
difference = largest_difference(gradients, jax.jit(jax.grad(loss))(whole, x))
assert difference < 1e-5
print(f"largest relative difference: {difference:.1e}")
print("a device's part of the gradients:", gradients.stacked.up.addressable_shards[0].data.shape)

# %% [markdown]
# ## Who is live when
#
# The loop carries the weights of the layer that is to run next. A forward pass of N layers fetches
# N times, and the backward pass N times more, in reverse order: nothing that was fetched is kept
# for it. The last layer of each pass has nothing to fetch.


# %%
def live_spans(layers):
    """For each fetch: the layer, when it starts, when the layer runs, and when the room is free."""
    forward = [(i, i, i + 1, i + 2) for i in range(layers)]
    start = layers + 1
    backward = [(layers - 1 - i, start + i, start + i + 1, start + i + 2) for i in range(layers)]
    return forward + backward


def draw(layers):
    _, (top, bottom) = plt.subplots(
        2, 1, figsize=(9, 4.5), sharex=True, height_ratios=(3, 1), layout="constrained"
    )
    spans = live_spans(layers)
    for layer, fetch, run, free in spans:
        top.barh(layer, run - fetch, left=fetch, color="#9ec5e8", edgecolor="white")
        top.barh(layer, free - run, left=run, color="#c4553b", edgecolor="white")
    top.barh(0, 0, color="#9ec5e8", label="being fetched")
    top.barh(0, 0, color="#c4553b", label="running")
    top.legend(loc="lower center", frameon=False)
    top.set_ylabel("layer")
    end = max(free for *_, free in spans)
    live = [sum(fetch <= t < free for _, fetch, _, free in spans) for t in range(end)]
    bottom.step(range(end + 1), [*live, live[-1]], where="post", color="#333333")
    bottom.set(
        ylim=(0, 3),
        yticks=(0, 1, 2),
        xticks=range(0, end + 1, 2),
        ylabel="layers live",
        xlabel="time, in layers",
    )
    top.set_title("forward, then backward: two layers' weights, whatever the depth", loc="left")
    plt.show()
    assert max(live) == 2


draw(8)

# %% [markdown]
# ## Asking the compiler
#
# That was the plan. The compiler's own figures say whether the program keeps it: temporary bytes in
# layers of weights, for shallow and deep stacks. In training one layer's gradients are whole before
# they are reduced to shards, which makes three.


# %%
def shapes(layers):
    def shard(a, spec):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec))

    stack = jax.tree.map(lambda a: shard(a, in_shards), jax.eval_shape(lambda: make(layers)))
    return stack, shard(x, PartitionSpec("data"))


def compiled(step, layers, **options):
    return jax.jit(lambda s, x: step(s, x, **options)).lower(*shapes(layers)).compile()


def forward(stack, x, **options):
    return stack.fold(x, remat=True, **options)


print("layers   forward   training")
for layers in (8, 16, 32):
    temps = [
        compiled(step, layers, stream=from_shards).memory_analysis().temp_size_in_bytes
        for step in (forward, jax.grad(loss))
    ]
    print(f"{layers:6d} {temps[0] / LAYER_BYTES:9.2f} {temps[1] / LAYER_BYTES:10.2f}")
    assert temps[0] < 2.1 * LAYER_BYTES and temps[1] < 3.2 * LAYER_BYTES

# %% [markdown]
# ## In the loop's body
#
# These are the gathers and the products of one trip of the forward loop, with what each reads.
# Without a stream, a product reads what the same trip has gathered, so it has to wait for it.


# %%
def show_body(program):
    text = program.as_text()
    name = re.search(r"body=%?([\w.\-]+)", text)[1]
    body = text[text.index(f"%{name} (") :].split("\n}")[0]
    gathered = {}
    for line in body.splitlines():
        found = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = .*? ([\w\-]+)\((.*)", line)
        if not found:
            continue
        if found[2] == "all-gather":
            gathered[found[1]] = f"gather {len(gathered) + 1}"
            print(gathered[found[1]])
        elif found[2] != "tuple":
            reads = [
                gathered[name] for name in re.findall(r"%([\w.\-]+)", found[3]) if name in gathered
            ]
            if reads:
                print("    something reads", ", ".join(reads))
        else:
            last = re.findall(r"%([\w.\-]+)", found[3])
            handed = [name for key, name in gathered.items() if key in last]
            print("    handed to the next trip:", ", ".join(handed) or "none")


print("without a stream")
show_body(compiled(forward, 9))
print("\nwith a stream")
show_body(compiled(forward, 9, stream=from_shards))

# %% [markdown]
# A trip with a stream runs two layers (where the compiler can be told to keep the order), because
# what a loop carries has one buffer, and a layer that still reads it can't be overwritten. The
# first layer's successor is gathered into a second buffer; the second layer's into the first one,
# which is free by then, and that is what is handed on. Nothing is copied.

# %% [markdown]
# ## Out of the host's memory
#
# The same loop, another source. Here the weights are moved to the host, and the program's own types
# say so; a gradient goes back to where its weight is. On a CPU the two memories are one, so nothing
# is saved, but the program is the one that an accelerator runs.

# %%
on_host = jax.device_put(whole, jax.memory.Space.Host)
from_host = stream.from_host()
host_gradients = jax.jit(lambda s, x: jax.grad(loss)(s, x, stream=from_host))(on_host, x)
print("weights: ", jax.typeof(on_host.stacked.up))
print("gradient:", host_gradients.stacked.up.sharding.memory_kind)
assert largest_difference(host_gradients, gradients) < 1e-5

# %% [markdown]
# ## What goes together
#
# Policies about carries work as ever. One that keeps a layer's internals does not: the internals
# would keep the weights.

# %%
for remat in (True, "nested", "slots=2"):
    g = jax.jit(
        jax.grad(lambda s, x, r=remat: jnp.sum(jnp.sin(s.fold(x, remat=r, stream=from_shards))))
    )(sharded, x)
    print(f"{remat!s:8} {largest_difference(g, gradients):.1e}")
try:
    jax.grad(lambda s: jnp.sum(s.fold(x, remat="none", stream=from_shards)))(sharded)
except ValueError as error:
    print("none:   ", error)

# %% [markdown]
# ## What to remember
#
# - `stack.fold(x, remat=True, stream=stream.from_shards("data", layout))` gathers each layer while
#   the one before it runs, in both directions; `stream.from_host()` fetches from the host.
# - Two layers' weights are live, whatever the depth; in training one layer's gradients besides.
# - N gathers forward, 2N in a training step. Fewer slots mean more: what is computed again is
#   fetched again.
# - The layout is yours to give: a program can't see how its arguments are sharded.
