import dataclasses

import pytest

from stackax.transformer import TransformerConfig

SIZES = dict(layers=3, width=48, heads=6, vocab_size=11, seq_len=7)


def test_unset_sizes_follow_the_others_through_replace():
    config = TransformerConfig(**SIZES)
    assert (config.KVHeads.size, config.HeadDim.size, config.Mlp.size) == (6, 8, 128)
    wider = dataclasses.replace(config, width=96, heads=3)
    assert (wider.KVHeads.size, wider.HeadDim.size, wider.Mlp.size) == (3, 32, 256)


def test_given_sizes_win_over_derived_ones():
    config = TransformerConfig(**SIZES, kv_heads=2, head_dim=10, mlp_width=5)
    assert (config.KVHeads.size, config.HeadDim.size, config.Mlp.size) == (2, 10, 5)


def test_equal_configs_have_equal_hashes():
    assert hash(TransformerConfig(**SIZES)) == hash(TransformerConfig(**SIZES))


@pytest.mark.parametrize(
    "wrong, needle",
    [
        (dict(layers=0), "layers=0 must be at least 1"),
        (dict(kv_heads=0), "kv_heads=0 must be at least 1"),
        (dict(heads=5), "heads=5 does not divide width=48"),
        (dict(heads=16), "give heads=12 or width=64"),
        (dict(width=45, heads=3), "give width=48"),
        (dict(kv_heads=4), "kv_heads=4 does not divide heads=6: give kv_heads=3"),
        (dict(head_dim=7), "head_dim=7 is odd"),
        (dict(rope_theta=0.0), "rope_theta=0.0 must be a positive"),
        (dict(norm_eps=float("nan")), "norm_eps=nan must be a positive"),
    ],
)
def test_sizes_that_do_not_fit_raise_and_say_what_does(wrong, needle):
    with pytest.raises(ValueError, match=needle):
        TransformerConfig(**SIZES | wrong)


def test_what_an_error_tells_to_give_is_accepted():
    for wrong, right in [(dict(heads=16), dict(heads=12)), (dict(heads=16), dict(width=64))]:
        with pytest.raises(ValueError):
            TransformerConfig(**SIZES | wrong)
        TransformerConfig(**SIZES | wrong | right)


@pytest.mark.parametrize("value", [2.0, "2", True])
def test_a_size_that_is_not_an_int_raises(value):
    with pytest.raises(TypeError, match="width=.* give a whole number"):
        TransformerConfig(**SIZES | dict(width=value))
