"""Policies by name: Haliax's aliases, and MaxText's presets over its vocabulary of names.

A preset's names are a vocabulary: a block need not carry all of them (a gated MLP has `mlpwi_0`
and `mlpwi_1`, a plain one has `mlpwi`), but a block that carries none is refused.
"""

from collections.abc import Mapping
from typing import Any

QKV = ("query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj")
MLP_IN = ("mlpwi", "mlpwi_0", "mlpwi_1")
MLP_OUT = ("mlpwo",)
OUT = ("out_proj",)
CONTEXT = ("context",)

# name: what ScanCheckpointPolicy is made with. The documentation's table is tested against this.
ALIASES: Mapping[str, Mapping[str, Any]] = {
    "full": dict(simple=True),
    "recompute": dict(simple=True),
    "none": dict(disable=True),
    "save_all": dict(save_inputs=True, save_block_internals=True),
    "offload": dict(save_carries="offload"),
    "nested": dict(nested=True),
}

# name: (saved on the device, offloaded to the host)
PRESETS: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "minimal": (QKV + OUT + MLP_IN + MLP_OUT, ()),
    "minimal_with_context": (QKV + CONTEXT + OUT + MLP_IN + MLP_OUT, ()),
    "save_dot_except_mlp": (QKV + OUT, ()),
    "save_dot_with_context_except_mlp": (QKV + CONTEXT + OUT, ()),
    "save_dot_except_mlpwi": (QKV + OUT + MLP_OUT, ()),
    "save_qkv_proj": (QKV, ()),
    "save_out_proj": (OUT, ()),
    "qkv_proj_offloaded": ((), QKV),
    "minimal_offloaded": ((), QKV + OUT + MLP_IN + MLP_OUT),
}


def fields_of(name: str) -> Mapping[str, Any] | None:
    """The fields that the alias or preset `name` stands for, or None if there is no such name."""
    if name in PRESETS:
        saved, offloaded = PRESETS[name]
        return dict(
            save_block_internals=saved, offload_block_internals=offloaded, match_names="any"
        )
    return ALIASES.get(name)


def known_names() -> list[str]:
    """Every alias and preset, in the order of the documentation."""
    return [*ALIASES, *PRESETS]
