"""MaxText's presets against the table of their names."""

import pytest

from stackax import ScanCheckpointPolicy

QKV = {"query_proj", "key_proj", "value_proj", "kv_proj", "qkv_proj"}
WIDE = QKV | {"out_proj", "mlpwi", "mlpwi_0", "mlpwi_1", "mlpwo"}

# name: (saved on the device, offloaded)
PRESETS = {
    "minimal": (WIDE, set()),
    "minimal_with_context": (WIDE | {"context"}, set()),
    "save_dot_except_mlp": (QKV | {"out_proj"}, set()),
    "save_dot_with_context_except_mlp": (QKV | {"out_proj", "context"}, set()),
    "save_dot_except_mlpwi": (QKV | {"out_proj", "mlpwo"}, set()),
    "save_qkv_proj": (QKV, set()),
    "save_out_proj": ({"out_proj"}, set()),
    "qkv_proj_offloaded": (set(), QKV),
    "minimal_offloaded": (set(), WIDE),
}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_saves_and_offloads_maxtexts_names(preset):
    policy = ScanCheckpointPolicy.from_bool_or_str(preset)
    saved, offloaded = PRESETS[preset]
    assert set(policy.save_block_internals or ()) == saved
    assert set(policy.offload_block_internals) == offloaded
    assert policy.match_names == "any"


def test_full_keeps_nothing_but_the_layers_input():
    policy = ScanCheckpointPolicy.from_bool_or_str("full")
    assert not policy.save_block_internals and not policy.offload_block_internals
    assert not policy.disable


def test_custom_sorts_names_by_where_they_are_kept():
    policy = ScanCheckpointPolicy.custom(
        {"query_proj": "device", "mlpwo": "offload", "context": "remat", "out_proj": "device"}
    )
    assert set(policy.save_block_internals) == {"query_proj", "out_proj"}
    assert set(policy.offload_block_internals) == {"mlpwo"}


def test_custom_without_a_kept_name_is_simple_remat():
    policy = ScanCheckpointPolicy.custom({"context": "remat"})
    assert not policy.save_block_internals and not policy.offload_block_internals
    assert not policy.disable
