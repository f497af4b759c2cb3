import equinox as eqx
import haliax as hax
import numpy as np
import pytest

from stackax.mamba2 import named_ssd, ssd

Batch, Pos, Heads, HeadDim, Groups, State = hax.make_axes(
    batch=2, position=5, heads=4, head_dim=3, groups=2, state=6
)
AXES = dict(Pos=Pos, Heads="heads", HeadDim=HeadDim, Groups="groups", State=State)


def inputs():
    rng = np.random.default_rng(0)

    def normal(*axes):
        return hax.named(rng.normal(size=[a.size for a in axes]).astype(np.float32), axes)

    return dict(
        x=normal(Batch, Pos, Heads, HeadDim),
        dt=normal(Batch, Pos, Heads),
        A=-hax.abs(normal(Heads)),
        B=normal(Batch, Pos, Groups, State),
        C=normal(Batch, Pos, Groups, State),
        D=normal(Heads, HeadDim),
        dt_bias=normal(Heads),
        initial_state=normal(Batch, Heads, HeadDim, State),
    )


def test_axes_in_any_order_give_what_plain_arrays_give():
    args = inputs()
    mask = hax.named(np.arange(10).reshape(2, 5) != 4, (Batch, Pos))
    flags = dict(mask=mask, segment_ids=hax.named(np.arange(10).reshape(2, 5) // 3, (Batch, Pos)))
    plain = {name: x.array for name, x in (args | flags).items()}
    y, state = eqx.filter_jit(ssd)(**plain, dt_softplus=True)
    mixed = {
        name: x.rearrange(tuple(reversed([a.name for a in x.axes])))
        for name, x in (args | flags).items()
    }
    y_, state_ = eqx.filter_jit(named_ssd)(**mixed, **AXES, dt_softplus=True)
    assert y_.axes == mixed["x"].axes
    assert [a.name for a in state_.axes][-3:] == ["heads", "head_dim", "state"]
    np.testing.assert_allclose(y_.rearrange((Batch, Pos, Heads, HeadDim)).array, y, atol=1e-6)
    wanted = (Batch, Heads, HeadDim, State)
    np.testing.assert_allclose(state_.rearrange(wanted).array, state, atol=1e-6)


@pytest.mark.parametrize(
    "change, needle",
    [
        (lambda a: a["dt"].rename({"heads": "h"}), "dt has the axes .* needs axis 'heads'"),
        (lambda a: a["dt"].broadcast_axis(hax.Axis("beam", 2)), "dt has the axes .'beam'."),
    ],
)
def test_axes_that_do_not_fit_raise_by_name(change, needle):
    args = inputs()
    with pytest.raises(ValueError, match=needle):
        named_ssd(**(args | {"dt": change(args)}), **AXES)
