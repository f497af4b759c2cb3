import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from stackax.lm import load_checkpoint, read_about, save_checkpoint, set_checkpoint_aside

TREE = {
    "w": jnp.arange(6.0).reshape(2, 3).T,  # not contiguous in memory on every backend
    "half": jnp.array([1.5, -2.25], jnp.bfloat16),
    "step": jnp.int32(7),
    "name": "a leaf that is not an array",
    "list": [jnp.array([True, False]), None],
}


def test_arrays_come_back_bitwise_with_their_shapes_and_dtypes(tmp_path):
    save_checkpoint(tmp_path, TREE, about={})
    like = jax.tree.map(lambda x: jnp.zeros_like(x) if isinstance(x, jax.Array) else x, TREE)
    loaded = load_checkpoint(tmp_path, like)
    assert jax.tree.structure(loaded) == jax.tree.structure(TREE)
    for ours, theirs in zip(*map(jax.tree.leaves, (loaded, TREE)), strict=True):
        if isinstance(theirs, jax.Array):
            assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_array_equal(ours, theirs)


def test_shapes_are_enough_to_load(tmp_path):
    save_checkpoint(tmp_path, {"w": jnp.arange(3)}, about={})
    loaded = load_checkpoint(tmp_path, jax.eval_shape(lambda: {"w": jnp.zeros(3, jnp.int32)}))
    assert loaded["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "like, needle",
    [
        ({"w": jnp.zeros(4)}, r"\['w'\] is float32\[3\], but float32\[4\] is needed"),
        ({"w": jnp.zeros(3, jnp.int32)}, r"but int32\[3\] is needed"),
        ({"w": jnp.zeros(3), "b": jnp.zeros(1)}, r"lacks 1 arrays, the first is \['b'\]"),
        ({}, r"has 1 arrays too many, the first is \['w'\]"),
    ],
)
def test_arrays_that_do_not_fit_raise_by_name(tmp_path, like, needle):
    save_checkpoint(tmp_path, {"w": jnp.zeros(3)}, about={})
    with pytest.raises(ValueError, match=needle):
        load_checkpoint(tmp_path, like)


def test_a_save_that_fails_leaves_the_old_checkpoint_and_no_draft(tmp_path, monkeypatch):
    save_checkpoint(tmp_path, {"w": jnp.zeros(3)}, about={"step": 1})

    def full_disk(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        save_checkpoint(tmp_path, {"w": jnp.ones(3)}, about={"step": 2})
    assert read_about(tmp_path) == {"step": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.safetensors"]


def test_a_torn_or_foreign_file_raises_and_names_it(tmp_path):
    file = tmp_path / "checkpoint.safetensors"
    save_checkpoint(tmp_path, {"w": jnp.zeros(300)}, about={})
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match="is not a complete checkpoint"):
        load_checkpoint(tmp_path, {"w": jnp.zeros(300)})
    safetensors.numpy.save_file({"w": np.zeros(3)}, file)
    with pytest.raises(ValueError, match="was not written by stackax"):
        read_about(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint in"):
        read_about(tmp_path / "elsewhere")


def test_a_checkpoint_set_aside_can_be_put_back(tmp_path):
    save_checkpoint(tmp_path, {}, about={"step": 1})
    previous = set_checkpoint_aside(tmp_path)
    save_checkpoint(tmp_path, {}, about={"step": 2})
    os.replace(previous, tmp_path / "checkpoint.safetensors")
    assert read_about(tmp_path) == {"step": 1}
    assert json.dumps(read_about(tmp_path)) == '{"step": 1}'
