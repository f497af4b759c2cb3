"""What a Mamba-2 model costs to train, to prefill and to decode, against mamba2-jax.

Width 512, 4 layers, 16 heads of 64, state 128, vocabulary 1024, float32, batch 1; the same weights
in both. Programs run in turn in one process; ratios are of medians, and above 1 we are better,
but for those named x_over_y, which are what they say. The peer runs at its default chunk, 256, and
for _vs_best_chunk at whichever of 64, 128 and 256 decodes fastest.

logits_difference             largest difference of the two models' logits after 64 tokens
prefill_speedup               reading 2048 tokens into a cache
train_speedup                 a training step at T=1024, ours keeping in_proj and ssd of a layer
policy_temp_ratio             temporary bytes of the same
train_temp_ratio              temporary bytes, ours keeping only each layer's input
decode_speedup                32 greedy tokens, each in one compiled loop
decode_speedup_vs_best_chunk  the same
decode_4096_over_64           time per token after 4096 tokens over that after 64
cached_speedup_4096           a token with our cache over one of the peer without, after 4096
decode_speedup_vs_torch       over transformers on torch, where both are installed
temp_ratio_24                 as train_temp_ratio, of 24 layers of width 256
compile_ratio_24              tracing and compiling the training step of 24 layers
compile_24_over_4             that of ours, 24 layers over 4
host_loop_over_compiled       decoding with the loop in Python over decoding in a compiled loop
dynamic_mask_over_static      prefill with the triangle made at run time, row by row, over ours
"""

import dataclasses
import os
from importlib.util import find_spec
from unittest import mock

# Or torch's idle threads spin beside XLA's, which looks as if it were several times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from mamba2_peer import Model, decode_loop, ours, peer  # noqa: E402
from report import run  # noqa: E402
from turns import compile_seconds, compiled, median_seconds, temp_bytes  # noqa: E402

from stackax import ScanCheckpointPolicy  # noqa: E402
from stackax.mamba2 import Mamba2Config, _chunks  # noqa: E402
from stackax.mamba2._segment_decays import segment_decays  # noqa: E402

CONFIG = Mamba2Config(layers=4, width=512, head_dim=64, state=128, vocab_size=1024)
DEEP = dataclasses.replace(CONFIG, layers=24, width=256)
DEFAULT_CHUNK = 256
CHUNKS = (64, 128, 256)
POLICY = ScanCheckpointPolicy(save_block_internals=("in_proj", "ssd"))
TOKENS = 32


def measure(rounds: int = 5) -> dict[str, float]:
    """All figures."""
    jax.config.update("jax_enable_compilation_cache", False)
    mine, theirs = ours(CONFIG), {chunk: peer(CONFIG, chunk) for chunk in CHUNKS}
    return {
        "logits_difference": logits_difference(mine, theirs[DEFAULT_CHUNK]),
        **of_prefill(mine, theirs[DEFAULT_CHUNK], rounds),
        **of_training(theirs[DEFAULT_CHUNK], rounds),
        **of_decoding(mine, theirs, rounds),
        **of_depth(),
    }


def tokens(length: int) -> jax.Array:
    """Random tokens, (1, length)."""
    drawn = np.random.default_rng(length).integers(0, CONFIG.vocab_size, (1, length))
    return jnp.asarray(drawn, jnp.int32)


def logits_difference(mine: Model, theirs: Model) -> float:
    """The largest difference of the logits after 64 tokens."""
    with jax.default_matmul_precision("highest"):
        both = [jax.jit(model.logits)(model.arrays, tokens(64)) for model in (mine, theirs)]
    return float(jnp.max(jnp.abs(both[0] - both[1])))


def of_prefill(mine: Model, theirs: Model, rounds: int) -> dict[str, float]:
    """Reading a prompt."""
    x = tokens(2048)
    programs = {"ours": compiled(mine.prefill, mine.arrays, x)}
    with mock.patch.object(_chunks, "segment_decays", _row_by_row):
        dynamic = compiled(lambda *args: mine.prefill(*args), mine.arrays, x)
    peer_program = compiled(theirs.prefill, theirs.arrays, x)
    seconds = median_seconds(
        {
            "ours": lambda: programs["ours"](mine.arrays, x),
            "dynamic": lambda: dynamic(mine.arrays, x),
            "peer": lambda: peer_program(theirs.arrays, x),
        },
        rounds,
    )
    return {
        "prefill_speedup": seconds["peer"] / seconds["ours"],
        "dynamic_mask_over_static": seconds["dynamic"] / seconds["ours"],
    }


def _row_by_row(a):
    """`segment_decays` with a triangle that is made at run time, one row after another."""
    until = jnp.cumsum(a, axis=-1)

    def row(index):
        segments = jax.lax.dynamic_index_in_dim(until, index, -1) - until
        return jnp.exp(jnp.where(jnp.arange(a.shape[-1]) <= index, segments, -jnp.inf))

    rows = jax.lax.map(row, jnp.arange(a.shape[-1]))
    return segment_decays(a)._replace(between=jnp.moveaxis(rows, 0, -2))


def of_training(theirs: Model, rounds: int) -> dict[str, float]:
    """A training step."""
    x = tokens(1024)
    policies = {"policy": POLICY, "full": True}
    models = {"peer": theirs, **{name: ours(CONFIG, remat=p) for name, p in policies.items()}}
    programs = {n: compiled(jax.value_and_grad(m.loss), m.arrays, x) for n, m in models.items()}
    temp = {n: p.memory_analysis().temp_size_in_bytes for n, p in programs.items()}
    runs = {n: lambda n=n: programs[n](models[n].arrays, x) for n in ("peer", "policy")}
    seconds = median_seconds(runs, rounds)
    return {
        "train_speedup": seconds["peer"] / seconds["policy"],
        "policy_temp_ratio": temp["peer"] / temp["policy"],
        "train_temp_ratio": temp["peer"] / temp["full"],
    }


def of_decoding(mine: Model, theirs: dict[int, Model], rounds: int) -> dict[str, float]:
    """Tokens one by one."""
    loops = {chunk: _decoding(model, 64) for chunk, model in theirs.items()}
    long = compiled(theirs[DEFAULT_CHUNK].logits, theirs[DEFAULT_CHUNK].arrays, tokens(4096))
    runs = {
        "ours": _decoding(mine, 64),
        "at 4096": _decoding(mine, 4096),
        "host loop": _host_loop(mine, 64),
        **{f"peer {chunk}": loop for chunk, loop in loops.items()},
        "uncached": lambda: long(theirs[DEFAULT_CHUNK].arrays, tokens(4096)),
    }
    if find_spec("torch") and find_spec("transformers"):
        runs["torch"] = _torch_decoding()
    seconds = median_seconds(runs, rounds)
    best = min(seconds[f"peer {chunk}"] for chunk in theirs)
    figures = {
        "decode_speedup": seconds[f"peer {DEFAULT_CHUNK}"] / seconds["ours"],
        "decode_speedup_vs_best_chunk": best / seconds["ours"],
        "decode_4096_over_64": seconds["at 4096"] / seconds["ours"],
        "cached_speedup_4096": seconds["uncached"] / (seconds["at 4096"] / TOKENS),
        "host_loop_over_compiled": seconds["host loop"] / seconds["ours"],
    }
    if "torch" in seconds:
        figures["decode_speedup_vs_torch"] = seconds["torch"] / seconds["ours"]
    return figures


def _decoding(model: Model, position: int):
    """Decodes after so many tokens, in a compiled loop."""
    logits, cache = jax.jit(model.prefill)(model.arrays, tokens(position))
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    program = compiled(decode_loop(model, TOKENS), model.arrays, token, cache)
    return lambda: program(model.arrays, token, cache)


def _host_loop(model: Model, position: int):
    """Decodes likewise with the loop in Python, which reads every token."""
    logits, first = jax.jit(model.prefill)(model.arrays, tokens(position))
    start = jnp.argmax(logits, axis=-1).astype(jnp.int32)

    def step(arrays, token, cache):
        logits, cache = model.step(arrays, token, cache)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), cache

    program = compiled(step, model.arrays, start, first)

    def decode():
        token, cache = start, first
        for _ in range(TOKENS):
            token, cache = program(model.arrays, token, cache)
            token = jnp.asarray([int(token[0])], jnp.int32)
        return token

    return decode


def _torch_decoding():
    """The same sizes in transformers, whose loop is in Python, with random weights."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        vocab_size=CONFIG.vocab_size,
        hidden_size=CONFIG.width,
        num_hidden_layers=CONFIG.layers,
        num_heads=CONFIG.Heads.size,
        head_dim=CONFIG.head_dim,
        state_size=CONFIG.state,
        n_groups=1,
        chunk_size=DEFAULT_CHUNK,
    )
    model = transformers.Mamba2ForCausalLM(config).eval()
    with torch.no_grad():
        prompt = torch.as_tensor(np.array(tokens(64)), dtype=torch.long)
        first = model(prompt, use_cache=True)

    def decode():
        # The cache goes on from one run to the next: a step costs the same wherever it is.
        token = first.logits[:, -1:].argmax(-1)
        with torch.no_grad():
            for _ in range(TOKENS):
                out = model(token, cache_params=first.cache_params, use_cache=True)
                token = out.logits[:, -1:].argmax(-1)
        return token.numpy()

    return decode


def of_depth() -> dict[str, float]:
    """What 24 layers cost."""
    x = tokens(1024)
    shallow = dataclasses.replace(DEEP, layers=4)
    models = {
        "peer": peer(DEEP, DEFAULT_CHUNK, abstract=True),
        "ours": ours(DEEP, remat=True, abstract=True),
        "shallow": ours(shallow, remat=True, abstract=True),
    }
    steps = {n: (jax.value_and_grad(m.loss), m.arrays, x) for n, m in models.items()}
    seconds = compile_seconds(steps)
    temp = {n: temp_bytes(*steps[n]) for n in ("peer", "ours")}
    return {
        "temp_ratio_24": temp["peer"] / temp["ours"],
        "compile_ratio_24": seconds["peer"] / seconds["ours"],
        "compile_24_over_4": seconds["ours"] / seconds["shallow"],
    }


if __name__ == "__main__":
    run(__doc__, measure)
