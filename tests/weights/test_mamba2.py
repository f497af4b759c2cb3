"""Mamba-2 checkpoints: parity with transformers, both layouts both ways, and nothing passed over.

The parity holds for one tiny model that transformers made: see `tests/fixtures/README.md`.
"""

import dataclasses
import functools as ft
import json
import math
import shutil
from pathlib import Path

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from stackax import ScanCheckpointPolicy
from stackax.lm import Decoder, generate
from stackax.mamba2 import Mamba2Config
from stackax.transformer import TransformerConfig
from stackax.weights import load_model, save_model
from tests.reference.weights import draw_like

FIXTURE = Path(__file__).parents[1] / "fixtures" / "mamba2"
REFERENCE = np.load(FIXTURE / "reference.npz")
SAID = json.loads((FIXTURE / "config.json").read_text())
# As transformers 4 wrote it: infinity as it is, the dtype by another name, and two keys that it
# never read.
LEGACY = {key: value for key, value in SAID.items() if key != "dtype"} | {
    "norm_before_gate": True,
    "rms_norm": True,
    "time_step_limit": [0.0, math.inf],
    "torch_dtype": "float32",
    "transformers_version": "4.44.0",
}
AXES = ("batch", "position")
CONFIG = Mamba2Config(
    layers=2, width=8, heads=4, head_dim=4, state=3, groups=2, conv_width=3, vocab_size=13
)


def tensors_in(folder):
    return safetensors.numpy.load_file(folder / "model.safetensors")


def write(folder, said, tensors):
    (folder / "config.json").write_text(json.dumps(said))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")


def arrays(decoder):
    return jax.tree_util.tree_flatten_with_path(eqx.filter(decoder, eqx.is_array))[0]


def assert_same(ours, theirs):
    assert ours.config == theirs.config
    for (path, a), (_, b) in zip(arrays(ours), arrays(theirs), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=jax.tree_util.keystr(path))


@pytest.mark.parametrize("said", [SAID, LEGACY], ids=["transformers 5", "transformers 4"])
def test_logits_and_greedy_text_are_those_of_transformers(said, tmp_path):
    shutil.copyfile(FIXTURE / "model.safetensors", tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(said))
    decoder = load_model(tmp_path)
    with jax.default_matmul_precision("highest"):
        logits = eqx.filter_jit(decoder)(hax.named(REFERENCE["tokens"], AXES))
        prompt = hax.named(REFERENCE["greedy_prompt"], AXES)
        text = generate(decoder, prompt, new_tokens=16, temperature=0.0)
    np.testing.assert_allclose(logits.array, REFERENCE["logits"], atol=1e-4)
    np.testing.assert_array_equal(text.array[:, 9:], REFERENCE["greedy"])


def test_saving_the_model_of_transformers_gives_its_tensors_and_what_its_config_says(tmp_path):
    save_model(tmp_path, load_model(FIXTURE))
    ours, theirs = tensors_in(tmp_path), tensors_in(FIXTURE)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)
    said = json.loads((tmp_path / "config.json").read_text())
    differs = {key for key, value in said.items() if SAID.get(key) != value}
    assert differs == {"chunk_size"}, "which is how fast it runs, not what it computes"


VARIANTS = {
    "tied": CONFIG,
    "untied": dataclasses.replace(CONFIG, tied_head=False),
    "padded": dataclasses.replace(CONFIG, vocab_rows=16),
    "padded, untied": dataclasses.replace(CONFIG, vocab_rows=16, tied_head=False),
    "biases": dataclasses.replace(CONFIG, proj_bias=True),
    "no bias": dataclasses.replace(CONFIG, conv_bias=False),
    "limits, float32 stream": dataclasses.replace(
        CONFIG, dt_limit=(0.01, 0.5), residual_dtype="float32"
    ),
    "skip per channel": dataclasses.replace(CONFIG, skip="channel", norm_before_gate=True),
}


def drawn(config):
    return draw_like(ft.partial(Decoder.init, config, key=jr.key(0)))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", ["transformers", "mamba_ssm"])
def test_a_model_saved_and_loaded_is_the_same(variant, layout, tmp_path):
    decoder = drawn(VARIANTS[variant])
    if layout == "transformers" and "skip" in variant:
        with pytest.raises(ValueError, match="cannot be said in the layout of transformers"):
            save_model(tmp_path, decoder, layout=layout)
        return
    save_model(tmp_path, decoder, layout=layout)
    loaded = load_model(tmp_path)
    if layout == "transformers" and "padded" in variant:
        # There, padding is a part of the vocabulary.
        assert loaded.config.vocab_size == 16 and loaded.config.vocab_rows is None
        loaded = dataclasses.replace(loaded, config=decoder.config)
    assert_same(loaded, decoder)


def test_the_layout_of_state_spaces_is_read_with_its_defaults(tmp_path):
    """Its released configs say no more than this; vocabulary and sizes are smaller here."""
    said = {
        "d_model": 64,
        "d_intermediate": 0,
        "n_layer": 1,
        "vocab_size": 21,
        "ssm_cfg": {"layer": "Mamba2"},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": True,
    }
    config = Mamba2Config(
        layers=1, width=64, vocab_size=21, vocab_rows=32, residual_dtype="float32", heads=2
    )
    decoder = drawn(config)
    save_model(tmp_path, decoder, layout="mamba_ssm")
    tensors = tensors_in(tmp_path)
    assert tensors["backbone.embedding.weight"].shape == (32, 64)
    assert tensors["backbone.layers.0.mixer.in_proj.weight"].shape == (2 * 128 + 2 * 128 + 2, 64)
    assert tensors["backbone.layers.0.mixer.conv1d.weight"].shape == (128 + 2 * 128, 1, 4)
    np.testing.assert_array_equal(tensors["lm_head.weight"], tensors["backbone.embedding.weight"])
    (tmp_path / "config.json").write_text(json.dumps(said))
    assert_same(load_model(tmp_path), decoder)


def test_shards_and_half_precision_are_read_into_float32(tmp_path):
    decoder = drawn(CONFIG)
    save_model(tmp_path, decoder)
    tensors = {k: v.astype(ml_dtypes.bfloat16) for k, v in tensors_in(tmp_path).items()}
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, inside in shards.items():
        part = {name: tensors[name] for name in inside}
        safetensors.numpy.save_file(part, tmp_path / shard)
    index = {name: shard for shard, inside in shards.items() for name in inside}
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": index}))
    loaded = load_model(tmp_path)
    for (_, ours), (_, theirs) in zip(arrays(loaded), arrays(decoder), strict=True):
        assert ours.dtype == jnp.float32
        np.testing.assert_allclose(ours, theirs, rtol=2**-8)
    path.write_text(json.dumps({"weight_map": index | {"more": "a.safetensors"}}))
    with pytest.raises(ValueError, match="lists tensors that no file has: more"):
        load_model(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="b.safetensors"):
        load_model(tmp_path)


def test_the_policy_and_the_dtype_are_those_asked_for(tmp_path):
    save_model(tmp_path, drawn(dataclasses.replace(CONFIG, residual_dtype="float32")))
    loaded = load_model(tmp_path, dtype="bfloat16", gradient_checkpointing="full")
    assert loaded.stack.gradient_checkpointing == ScanCheckpointPolicy.from_bool_or_str("full")
    assert loaded.dtype == loaded.stack.stacked.dtype == jnp.bfloat16


def without(tensors, name):
    return {key: value for key, value in tensors.items() if key != name}


BIAS = "backbone.layers.1.mixer.conv1d.bias"
TABLE = "backbone.embeddings.weight"
FAULTS = {
    "a missing tensor": ({}, lambda t: without(t, BIAS), f"no tensor '{BIAS}'"),
    "a layer too many": (
        {"num_hidden_layers": 1},
        lambda t: t,
        "9 tensors that the model has no place for: backbone.layers.1.mixer.A_log",
    ),
    "an unknown tensor": (
        {},
        lambda t: t | {"backbone.extra": t[BIAS]},
        "no place for: backbone.extra",
    ),
    "a transposed tensor": (
        {},
        lambda t: t | {"backbone.layers.0.mixer.out_proj.weight": np.zeros((64, 32), "f4")},
        r"out_proj.weight has shape \(64, 32\), but the config makes it \(32, 64\)",
    ),
    "a tied head of its own": (
        {},
        lambda t: t | {"lm_head.weight": 2 * t[TABLE]},
        "lm_head.weight differs from backbone.embeddings.weight",
    ),
    "no head": ({"tie_word_embeddings": False}, lambda t: t, "no tensor 'lm_head.weight'"),
    "an unknown key": ({"logit_scale": 2}, lambda t: t, "logit_scale=2, of which"),
    "another activation": ({"hidden_act": "gelu"}, lambda t: t, "hidden_act='gelu', but only"),
    "heads that do not fit": ({"num_heads": 5}, lambda t: t, "not num_heads=5 of head_dim=16"),
    "another family": ({"model_type": "mamba"}, lambda t: t, "model_type='mamba': only"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_does_not_fit_or_is_not_known_raises(fault, tmp_path):
    changes, change, needle = FAULTS[fault]
    write(tmp_path, SAID | changes, change(tensors_in(FIXTURE)))
    with pytest.raises(ValueError, match=needle):
        load_model(tmp_path)


def test_a_tied_head_that_is_shipped_all_the_same_is_read(tmp_path):
    tensors = tensors_in(FIXTURE)
    write(tmp_path, SAID, tensors | {"lm_head.weight": tensors[TABLE]})
    assert load_model(tmp_path).head is None


@pytest.mark.parametrize(
    "change, needle",
    [
        (dict(attn_layer_idx=[1]), r"attn_layer_idx=\[1\], but only \[\] can be read"),
        (dict(d_intermediate=64), "d_intermediate=64"),
        (dict(rms_norm=False), "rms_norm=False"),
        (dict(ssm_cfg={}), "ssm_cfg.layer='Mamba1', but only 'Mamba2'"),
        (dict(ssm_cfg={"layer": "Mamba2", "d_ssm": 8}), "ssm_cfg.d_ssm=8"),
        (
            dict(ssm_cfg={"layer": "Mamba2", "headdim": 4, "sharp": True}),
            "ssm_cfg.sharp=True, of which",
        ),
        (dict(ssm_cfg={"layer": "Mamba2", "headdim": 7}), "ssm_cfg.headdim=7"),
    ],
)
def test_what_the_layout_of_state_spaces_may_ask_for_and_mamba2_has_not_raises(
    change, needle, tmp_path
):
    save_model(tmp_path, drawn(CONFIG), layout="mamba_ssm")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(ValueError, match=needle):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "change, needle",
    [
        (dict(norm_before_gate=True), "norm_before_gate=True cannot be said"),
        (dict(head_dim=3), "4 heads of head_dim=3 are no multiple of width=8"),
    ],
)
def test_what_a_layout_has_no_word_for_raises(change, needle, tmp_path):
    decoder = drawn(dataclasses.replace(CONFIG, **change))
    with pytest.raises(ValueError, match=needle):
        save_model(tmp_path, decoder)


def test_an_empty_folder_and_one_of_torch_say_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="no config.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(SAID))
    with pytest.raises(FileNotFoundError, match="neither model.safetensors nor"):
        load_model(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="pytorch_model.bin is a pickle of torch"):
        load_model(tmp_path)


def test_models_and_layouts_that_cannot_be_saved_raise(tmp_path):
    config = TransformerConfig(layers=1, width=4, heads=1, vocab_size=8, seq_len=4)
    transformer = jax.eval_shape(ft.partial(Decoder.init, config, key=jr.key(0)))
    with pytest.raises(TypeError, match="only a Mamba-2 can be saved"):
        save_model(tmp_path, transformer)
    with pytest.raises(ValueError, match="layout='torch' must be one of"):
        save_model(tmp_path, drawn(CONFIG), layout="torch")
