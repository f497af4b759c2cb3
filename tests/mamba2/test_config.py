import dataclasses
import json
import math

import pytest
from haliax import Axis

from stackax.mamba2 import Mamba2Config

SIZES = dict(layers=2, width=32, head_dim=16, vocab_size=50)
CONFIG = Mamba2Config(**SIZES, state=8, groups=2, vocab_rows=64)


def test_sizes_make_the_axes_of_the_paper():
    assert CONFIG.Heads == Axis("heads", 4) and CONFIG.Inner == Axis("inner", 64)
    assert CONFIG.ConvChannels == Axis("conv_channels", 64 + 2 * 2 * 8)
    assert CONFIG.InProj == Axis("in_proj", 2 * 64 + 2 * 2 * 8 + 4)
    assert (CONFIG.Tap, CONFIG.Window) == (Axis("tap", 4), Axis("window", 3))
    assert (CONFIG.Vocab, CONFIG.VocabRows) == (Axis("vocab", 50), Axis("vocab", 64))
    assert Mamba2Config(**SIZES, heads=5).Inner.size == 80


def test_equal_sizes_are_equal_configs_also_by_way_of_json():
    said = json.loads(json.dumps(dataclasses.asdict(CONFIG)))
    assert Mamba2Config(**said) == CONFIG and hash(Mamba2Config(**said)) == hash(CONFIG)


@pytest.mark.parametrize(
    "wrong, needle",
    [
        (dict(width=0), "width=0 must be at least 1"),
        (dict(head_dim=24), "head_dim=24 does not divide twice width=32: .* head_dim=8"),
        (dict(groups=3), "groups=3 does not divide the 4 heads: give groups=1"),
        (dict(vocab_rows=49), "vocab_rows=49 is below vocab_size=50"),
        (dict(dt_limit=(1.0, 0.5)), r"dt_limit=\(1.0, 0.5\) must be two numbers"),
        (dict(dt_range=(0.0, 0.1)), "the low end of dt_range is 0.0"),
        (dict(A_range=(1.0, math.inf)), "the high end of A_range is inf"),
        (dict(norm_eps=0.0), "norm_eps=0.0 must be a positive finite number"),
        (dict(skip="none"), "skip='none' must be one of"),
        (dict(residual_dtype="bfloat16"), "residual_dtype='bfloat16' must be one of"),
        (dict(chunk_size=0), "chunk_size=0 must be at least 1"),
    ],
)
def test_sizes_that_make_no_model_raise_by_name(wrong, needle):
    with pytest.raises(ValueError, match=needle):
        Mamba2Config(**SIZES | wrong)


def test_a_fraction_of_a_size_raises():
    with pytest.raises(TypeError, match="state=1.5 is of type float: give a whole number"):
        Mamba2Config(**SIZES, state=1.5)
