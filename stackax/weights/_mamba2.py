"""Mamba-2: the checkpoints of state-spaces/mamba and those of transformers.

Their tensors differ in the name of the embedding alone; their configs differ in every name.
"""

import math
from typing import Any

import numpy as np

from ..lm import Decoder
from ..mamba2 import Mamba2Config
from ._keys import Keys, number, spelled
from ._table import LAYER, Row

TRANSFORMERS = "transformers"
MAMBA_SSM = "mamba_ssm"

EMBEDDING = {
    TRANSFORMERS: "backbone.embeddings.weight",
    MAMBA_SSM: "backbone.embedding.weight",
}
HEAD = "lm_head.weight"


def _taps_last(weight: np.ndarray) -> np.ndarray:
    return weight.T[:, None, :]  # (tap, channels) as torch's depthwise (channels, 1, tap)


def _taps_first(weight: np.ndarray) -> np.ndarray:
    return weight[:, 0, :].T


def _flat(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1)  # (heads, head_dim), where a skip is per channel


def rows(layout: str) -> tuple[Row, ...]:
    """The table of keys.

    Args:
        layout: "transformers" or "mamba_ssm".

    Returns:
        Its rows.
    """
    layer = f"backbone.layers.{LAYER}."

    def mixer(decoder: Decoder) -> Any:
        return decoder.stack.stacked.mixer

    return (
        Row(EMBEDDING[layout], lambda d: d.embedding.weight),
        Row(layer + "norm.weight", lambda d: d.stack.stacked.norm.weight),
        Row(layer + "mixer.in_proj.weight", lambda d: mixer(d).in_proj.weight),
        Row(layer + "mixer.in_proj.bias", lambda d: mixer(d).in_proj.bias),
        Row(
            layer + "mixer.conv1d.weight",
            lambda d: mixer(d).conv_weight,
            theirs=_taps_last,
            ours=_taps_first,
        ),
        Row(layer + "mixer.conv1d.bias", lambda d: mixer(d).conv_bias),
        Row(layer + "mixer.dt_bias", lambda d: mixer(d).dt_bias),
        Row(layer + "mixer.A_log", lambda d: mixer(d).A_log),
        Row(layer + "mixer.D", lambda d: mixer(d).D, theirs=_flat),
        Row(layer + "mixer.norm.weight", lambda d: mixer(d).norm_weight),
        Row(layer + "mixer.out_proj.weight", lambda d: mixer(d).out_proj.weight),
        Row(layer + "mixer.out_proj.bias", lambda d: mixer(d).out_proj.bias),
        Row("backbone.norm_f.weight", lambda d: d.norm.weight),
        Row(HEAD, lambda d: None if d.head is None else d.head.weight),
    )


def layout_of(config: dict[str, Any]) -> str | None:
    """Which of the two layouts a checkpoint's config is of, or None where it is of neither.

    Args:
        config: What its `config.json` says.

    Returns:
        "transformers", "mamba_ssm" or None.

    Example:
        >>> from stackax.weights._mamba2 import layout_of
        >>> layout_of({"model_type": "mamba2"}), layout_of({"d_model": 8, "n_layer": 2})
        ('transformers', 'mamba_ssm')
    """
    if config.get("model_type") == "mamba2":
        return TRANSFORMERS
    return MAMBA_SSM if {"d_model", "n_layer"} <= config.keys() else None


def read_config(
    config: dict[str, Any], layout: str, *, embedding_rows: int, has_head: bool
) -> Mamba2Config:
    """The sizes that a checkpoint's config stands for.

    Args:
        config: What its `config.json` says.
        layout: "transformers" or "mamba_ssm".
        embedding_rows: Rows of the embedding's table in the checkpoint.
        has_head: Whether the checkpoint has a head of its own.

    Returns:
        The sizes.

    Raises:
        ValueError: if a key is missing, unknown, or asks for what Mamba-2 here has not.
    """
    keys = Keys(config)
    read = _from_transformers if layout == TRANSFORMERS else _from_mamba_ssm
    fields = read(keys, has_head)
    keys.check_all_taken()
    if embedding_rows != fields["vocab_size"]:
        fields.setdefault("vocab_rows", embedding_rows)
    return Mamba2Config(**fields)


def write_config(config: Mamba2Config, layout: str) -> dict[str, Any]:
    """What `config.json` has to say for a model of these sizes.

    Args:
        config: The sizes.
        layout: "transformers" or "mamba_ssm".

    Returns:
        Its keys and values.

    Raises:
        ValueError: if the layout has no word for what the sizes ask for.
    """
    return _to_transformers(config) if layout == TRANSFORMERS else _to_mamba_ssm(config)


# What transformers writes into every config, and what it writes and never reads: its model norms
# after the gate whatever `norm_before_gate` says, as the released weights need.
_ABOUT_NO_VALUE = (
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "chunk_size",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "intermediate_size",
    "model_type",
    "norm_before_gate",
    "pad_token_id",
    "rescale_prenorm_residual",
    "time_step_rank",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)


def _from_transformers(keys: Keys, has_head: bool) -> dict[str, Any]:
    width, head_dim = keys.take("hidden_size", 4096), keys.take("head_dim", 64)
    heads, expand = keys.take("num_heads", 128), keys.take("expand", 2)
    if int(expand * width) != heads * head_dim:
        raise ValueError(
            f"the config says expand={expand} times hidden_size={width}, which is not "
            f"num_heads={heads} of head_dim={head_dim}"
        )
    keys.require("hidden_act", "silu", "swish")
    keys.require("rms_norm", True)
    low, high = keys.take("time_step_limit", (0.0, math.inf))
    fields = {
        "width": width,
        "heads": heads,
        "head_dim": head_dim,
        "layers": keys.take("num_hidden_layers", 64),
        "state": keys.take("state_size", 128),
        "groups": keys.take("n_groups", 8),
        "conv_width": keys.take("conv_kernel", 4),
        "vocab_size": keys.take("vocab_size", 32768),
        "norm_eps": keys.take("layer_norm_epsilon", 1e-5),
        "proj_bias": keys.take("use_bias", False),
        "conv_bias": keys.take("use_conv_bias", True),
        "dt_limit": (number(low), number(high)),
        "dt_range": (keys.take("time_step_min", 1e-3), keys.take("time_step_max", 0.1)),
        "dt_floor": keys.take("time_step_floor", 1e-4),
        "tied_head": keys.take("tie_word_embeddings", not has_head),
        "residual_dtype": "float32" if keys.take("residual_in_fp32", True) else None,
    }
    keys.ignore(*_ABOUT_NO_VALUE)
    return fields


def _to_transformers(config: Mamba2Config) -> dict[str, Any]:
    if config.Inner.size % config.width:
        raise ValueError(
            f"{config.Heads.size} heads of head_dim={config.head_dim} are no multiple of "
            f"width={config.width}, which transformers needs"
        )
    if config.norm_before_gate:
        raise ValueError("norm_before_gate=True cannot be said in the layout of transformers")
    if config.skip != "head":
        raise ValueError(f"skip={config.skip!r} cannot be said in the layout of transformers")
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "chunk_size": 256,
        "conv_kernel": config.conv_width,
        "expand": config.Inner.size // config.width,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.width,
        "layer_norm_epsilon": config.norm_eps,
        "model_type": "mamba2",
        "n_groups": config.groups,
        "num_heads": config.Heads.size,
        "num_hidden_layers": config.layers,
        "residual_in_fp32": config.residual_dtype == "float32",
        "state_size": config.state,
        "tie_word_embeddings": config.tied_head,
        "time_step_floor": config.dt_floor,
        "time_step_limit": [spelled(bound) for bound in config.dt_limit],
        "time_step_max": config.dt_range[1],
        "time_step_min": config.dt_range[0],
        "use_bias": config.proj_bias,
        "use_conv_bias": config.conv_bias,
        # There, padding are tokens like others.
        "vocab_size": config.VocabRows.size,
    }


def _from_mamba_ssm(keys: Keys, has_head: bool) -> dict[str, Any]:
    width, vocab_size = keys.take("d_model"), keys.take("vocab_size", 50277)
    rows = vocab_size + -vocab_size % keys.take("pad_vocab_size_multiple", 8)
    keys.require("d_intermediate", 0)
    keys.require("rms_norm", True)
    keys.require("norm_epsilon", 1e-5)
    keys.require("attn_layer_idx", [], None)
    keys.require("attn_cfg", {}, None)
    keys.ignore("fused_add_norm", "initializer_cfg")
    ssm = Keys(keys.take("ssm_cfg"), "ssm_cfg.")
    ssm.require("d_ssm", None)
    ssm.require("rmsnorm", True)
    if (layer := ssm.take("layer", "Mamba1")) != "Mamba2":
        raise ValueError(f"the config says ssm_cfg.layer={layer!r}, but only 'Mamba2' can be read")
    head_dim, expand = ssm.take("headdim", 64), ssm.take("expand", 2)
    if expand * width % head_dim:
        raise ValueError(
            f"the config says ssm_cfg.headdim={head_dim}, which does not divide "
            f"ssm_cfg.expand={expand} times d_model={width}"
        )
    low, high = ssm.take("dt_limit", (0.0, math.inf))
    fields = {
        "width": width,
        "heads": expand * width // head_dim,
        "head_dim": head_dim,
        "layers": keys.take("n_layer"),
        "state": ssm.take("d_state", 128),
        "groups": ssm.take("ngroups", 1),
        "conv_width": ssm.take("d_conv", 4),
        "vocab_size": vocab_size,
        "vocab_rows": rows if rows != vocab_size else None,
        "norm_before_gate": ssm.take("norm_before_gate", False),
        "skip": "channel" if ssm.take("D_has_hdim", False) else "head",
        "proj_bias": ssm.take("bias", False),
        "conv_bias": ssm.take("conv_bias", True),
        "dt_limit": (number(low), number(high)),
        "A_range": tuple(ssm.take("A_init_range", (1, 16))),
        "dt_range": (ssm.take("dt_min", 1e-3), ssm.take("dt_max", 0.1)),
        "dt_floor": ssm.take("dt_init_floor", 1e-4),
        "tied_head": keys.take("tie_embeddings", True),
        "residual_dtype": "float32" if keys.take("residual_in_fp32", True) else None,
    }
    ssm.ignore("chunk_size", "conv_init", "use_mem_eff_path")
    ssm.check_all_taken()
    return fields


def _to_mamba_ssm(config: Mamba2Config) -> dict[str, Any]:
    if config.Inner.size % config.width:
        raise ValueError(
            f"{config.Heads.size} heads of head_dim={config.head_dim} are no multiple of "
            f"width={config.width}, which mamba_ssm needs"
        )
    if config.norm_eps != 1e-5:
        raise ValueError(f"norm_eps={config.norm_eps} cannot be said in the layout of mamba_ssm")
    ssm = {
        "A_init_range": list(config.A_range),
        "D_has_hdim": config.skip == "channel",
        "bias": config.proj_bias,
        "conv_bias": config.conv_bias,
        "d_conv": config.conv_width,
        "d_state": config.state,
        "dt_init_floor": config.dt_floor,
        "dt_max": config.dt_range[1],
        "dt_min": config.dt_range[0],
        "expand": config.Inner.size // config.width,
        "headdim": config.head_dim,
        "layer": "Mamba2",
        "ngroups": config.groups,
        "norm_before_gate": config.norm_before_gate,
    }
    if config.dt_limit != (0.0, math.inf):  # the default; JSON has no word for infinity
        ssm["dt_limit"] = [spelled(bound) for bound in config.dt_limit]
    return {
        "attn_cfg": {},
        "attn_layer_idx": [],
        "d_intermediate": 0,
        "d_model": config.width,
        "fused_add_norm": True,
        "n_layer": config.layers,
        "pad_vocab_size_multiple": _padding_multiple(config),
        "residual_in_fp32": config.residual_dtype == "float32",
        "rms_norm": True,
        "ssm_cfg": ssm,
        "tie_embeddings": config.tied_head,
        "vocab_size": config.vocab_size,
    }


def _padding_multiple(config: Mamba2Config) -> int:
    """The power of two, or else the number of rows itself, that pads the vocabulary to its rows."""
    size, rows = config.vocab_size, config.VocabRows.size
    powers = (2**exponent for exponent in range(rows.bit_length()))
    return next((power for power in powers if size + -size % power == rows), rows)
