import functools as ft
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from stackax.mamba2 import ssd, ssd_step
from stackax.mamba2._resets import find_resets
from stackax.mamba2._segment_decays import segment_decays
from tests.reference import ssd as reference

H, P = 8, 2

# T, groups, state: every size of each once or more, and tails of every kind.
SHAPES = [(1, 1, 16), (3, 2, 64), (64, 8, 128), (100, 2, 16), (257, 2, 128), (1024, 8, 16)]


def inputs(T, G, N, *, seed=0, scale=1.0):
    """Float32 inputs of one sequence, by the names of `weigh`'s arguments."""
    rng = np.random.default_rng([seed, T, G, N])
    drawn = dict(
        x=rng.normal(size=(T, H, P)),
        dt=scale * rng.normal(size=(T, H)),
        A=-rng.uniform(0.5, 4, size=H),
        B=rng.normal(size=(T, G, N)) / N**0.25,
        C=rng.normal(size=(T, G, N)) / N**0.25,
        D=rng.normal(size=(H, P)),
        state=rng.normal(size=(H, P, N)),
        dt_bias=rng.normal(size=H) - 2,
    )
    return {name: x.astype(np.float32) for name, x in drawn.items()}


def flags(T, *, resets, padding, seed=0):
    """A mask and segment ids; all real, and one document, where they are not asked for."""
    rng = np.random.default_rng([seed, T])
    mask, ids = np.ones(T, bool), np.full(T, 3)
    if resets:
        ids = np.cumsum(rng.uniform(size=T) < 0.1)
    if padding:
        mask[: T // 4], mask[T - T // 5 :] = False, False
        mask &= rng.uniform(size=T) < 0.9
        ids[~mask] = -7
    return mask, ids


@ft.cache
def compiled(limit=(0.0, math.inf), **knobs):
    """Outputs, state and all gradients of `ssd` for cotangents (dy, dstate)."""

    def run(args, mask, ids):
        args = dict(args)
        rest = dict(D=args.pop("D"), dt_bias=args.pop("dt_bias"), initial_state=args.pop("state"))
        flags = dict(mask=mask, segment_ids=ids)
        return ssd(**args, **rest, **flags, dt_softplus=True, dt_limit=limit, **knobs)

    @jax.jit
    def both(args, mask, ids, cotangents):
        out, pull = jax.vjp(lambda args: run(args, mask, ids), args)
        return out, pull(cotangents)[0]

    return both


def expected(args, mask, ids, cotangents, limit=(0.0, math.inf)):
    """The same by the float64 recurrence."""
    args = {name: np.asarray(x, np.float64) for name, x in args.items()}
    dy, dstate = (np.asarray(c, np.float64) for c in cotangents)
    bias, raw = args.pop("dt_bias"), args["dt"]
    args["dt"], slope = reference.discretise(raw, bias=bias, limit=limit, mask=mask)
    resets = reference.find_resets(ids, mask)
    y, state, _ = reference.ssd(**args, resets=resets)
    grads = reference.ssd_gradients(**args, dy=dy, dstate=dstate, resets=resets)
    grads["dt"] = grads["dt"] * slope
    grads["dt_bias"] = grads["dt"].sum(0)
    return (y, state), grads


def cotangents(args, mask, seed=1):
    rng = np.random.default_rng(seed)
    dy = rng.normal(size=args["x"].shape) * mask[:, None, None]
    return dy.astype(np.float32), rng.normal(size=args["state"].shape).astype(np.float32)


def relative(ours, theirs):
    """The norm of the difference over the norm."""
    theirs = np.asarray(theirs, np.float64)
    norm = np.linalg.norm(theirs)
    return np.linalg.norm(np.asarray(ours, np.float64) - theirs) / (norm if norm else 1.0)


def errors(ours, theirs, mask):
    """The relative errors of outputs, at real tokens, and of gradients."""
    (y, state), grads = ours
    (y_, state_), grads_ = theirs
    out = [relative(np.asarray(y)[mask], y_[mask]), relative(state, state_)]
    return max(out), max(relative(grads[name], grads_[name]) for name in grads)


@pytest.mark.parametrize("T, G, N", SHAPES)
def test_it_equals_the_recurrence_forward_and_in_all_gradients(T, G, N):
    args, run = inputs(T, G, N), compiled()
    for initial, resets, padding in [(0, 0, 0), (1, 0, 0), (0, 1, 1), (1, 1, 0), (1, 0, 1)]:
        given = dict(args, state=args["state"] * initial)
        mask, ids = flags(T, resets=resets, padding=padding)
        cts = cotangents(given, mask)
        error = errors(run(given, mask, ids, cts), expected(given, mask, ids, cts), mask)
        assert max(error) < 1e-5, (initial, resets, padding)


REGIMES = {
    "tiny": lambda rng, size: rng.uniform(-14, -9, size),
    "usual": lambda rng, size: rng.uniform(-7, -2, size),
    "large": lambda rng, size: rng.uniform(0, 3, size),
    "huge": lambda rng, size: rng.uniform(20, 100, size),
    "mixed": lambda rng, size: rng.choice([-12.0, -5.0, 1.0, 60.0], size),
}


@pytest.mark.parametrize("regime", REGIMES)
def test_float32_errors_stay_small_in_every_regime_of_the_step(regime):
    T = 257
    args = inputs(T, 2, 128)
    args["dt"] = REGIMES[regime](np.random.default_rng(0), (T, H)).astype(np.float32)
    args["dt_bias"] = np.zeros(H, np.float32)
    args["A"] = -np.linspace(1, 16, H, dtype=np.float32)
    mask, ids = flags(T, resets=False, padding=False)
    cts = cotangents(args, mask)
    out, grad = errors(compiled()(args, mask, ids, cts), expected(args, mask, ids, cts), mask)
    assert out < 1e-6
    assert grad < 5e-6


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dt, A", [(100.0, -100.0), (1e-30, -1e-3), (100.0, -1e-3), (0.0, -100.0)])
def test_no_step_or_rate_makes_a_nan(dtype, dt, A):
    T = 100
    args = inputs(T, 2, 16)
    args["dt"] = np.where(np.arange(T)[:, None] % 7 == 3, np.float32(dt), args["dt"])
    args["A"] = np.full(H, A, np.float32)
    narrow = {name: jnp.asarray(args[name], dtype) for name in ("x", "dt", "B", "C")}
    mask, ids = flags(T, resets=True, padding=True)
    dy, dstate = cotangents(args, mask)
    out = compiled()(args | narrow, mask, ids, (jnp.asarray(dy, dtype), dstate))
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(out))


def test_bfloat16_costs_what_its_roundings_do():
    args = inputs(100, 2, 16)
    mask, ids = flags(100, resets=False, padding=False)
    cts = cotangents(args, mask)
    names = ("x", "dt", "B", "C")
    narrow = args | {name: jnp.asarray(args[name], jnp.bfloat16) for name in names}
    rounded = args | {name: np.asarray(narrow[name], np.float32) for name in names}
    dy = (jnp.asarray(cts[0], jnp.bfloat16), cts[1])
    ours = compiled()(narrow, mask, ids, dy)
    theirs = expected(rounded, mask, ids, (np.asarray(dy[0], np.float32), cts[1]))
    assert ours[0][0].dtype == jnp.bfloat16
    assert ours[0][1].dtype == jnp.float32
    # Rounding to 8 bits is off by 1.7e-3 in the root mean square. A result has two to four
    # roundings that add up: of weights, of what enters the state, of the state that is read, and
    # of the result itself.
    out, grad = errors(ours, theirs, mask)
    assert out < 5e-3
    assert grad < 8e-3


def test_a_reset_is_exact_in_value_and_gradient():
    T, at = 100, 37
    args = inputs(T, 2, 16)
    ids = np.where(np.arange(T) < at, 5, 2)
    mask = np.ones(T, bool)
    dy, dstate = cotangents(args, mask)
    dy[:at] = 0
    (y, state), grads = compiled()(args, mask, ids, (dy, dstate))
    # The second document alone, whatever the first one holds.
    other = inputs(T, 2, 16, seed=9)
    noisy = {
        name: np.concatenate([other[name][:at], args[name][at:]]) for name in ("x", "dt", "B", "C")
    }
    (y_, state_), _ = compiled()(args | noisy | {"state": other["state"]}, mask, ids, (dy, dstate))
    np.testing.assert_array_equal(y[at:], y_[at:])
    np.testing.assert_array_equal(state, state_)
    for name in ("x", "dt", "B", "C"):
        assert not np.asarray(grads[name])[:at].any(), name
    assert not np.asarray(grads["state"]).any()


@pytest.mark.parametrize("knobs", [(8, 3), (7, 2), (512, 1)])
def test_chunk_sizes_are_knobs_and_nothing_more(knobs):
    T, (size, per_block) = 50, knobs
    args = inputs(T, 2, 16)
    mask, ids = flags(T, resets=True, padding=True)
    cts = cotangents(args, mask)
    run = compiled(chunk_size=size, chunks_per_block=per_block)
    error = errors(run(args, mask, ids, cts), expected(args, mask, ids, cts), mask)
    assert max(error) < 2e-6


def test_steps_are_clipped_to_the_limits_and_have_no_gradient_there():
    T, limit = 30, (0.05, 0.3)
    args = inputs(T, 2, 16)
    mask, ids = flags(T, resets=False, padding=True)
    cts = cotangents(args, mask)
    ours = compiled(limit)(args, mask, ids, cts)
    theirs = expected(args, mask, ids, cts, limit)
    assert max(errors(ours, theirs, mask)) < 2e-6
    clipped = theirs[1]["dt"] == 0
    assert 10 < clipped.sum() < clipped.size - 10
    assert not np.asarray(ours[1]["dt"])[clipped].any()


def test_what_padding_holds_reaches_nothing():
    T = 100
    args, other = inputs(T, 2, 16), inputs(T, 2, 16, seed=5)
    mask, ids = flags(T, resets=True, padding=True)
    cts = cotangents(args, mask)
    noisy = dict(args)
    for name in ("x", "dt", "B", "C"):
        where = mask.reshape(T, *[1] * (args[name].ndim - 1))
        noisy[name] = np.where(where, args[name], 100 * other[name])
    (y, state), grads = compiled()(args, mask, ids, cts)
    (y_, state_), grads_ = compiled()(noisy, mask, np.where(mask, ids, 99), cts)
    np.testing.assert_array_equal(np.asarray(y)[mask], np.asarray(y_)[mask])
    np.testing.assert_array_equal(state, state_)
    for name in ("A", "D", "dt_bias", "state"):
        np.testing.assert_array_equal(grads[name], grads_[name])


def test_batch_axes_equal_a_loop_over_them():
    T, G, N = 20, 2, 4
    rows = [inputs(T, G, N, seed=seed) for seed in range(6)]
    names = ("x", "dt", "B", "C", "state")
    batch = {
        name: np.stack([r[name] for r in rows]).reshape(2, 3, *rows[0][name].shape)
        for name in names
    }
    shared = {name: rows[0][name] for name in ("A", "D", "dt_bias")}
    masks = np.stack([flags(T, resets=False, padding=True, seed=s)[0] for s in range(6)])
    ids = np.stack([flags(T, resets=True, padding=False, seed=s)[1] for s in range(6)])

    @jax.jit
    def run(x, dt, B, C, state, mask, ids):
        rest = dict(D=shared["D"], dt_bias=shared["dt_bias"], dt_softplus=True)
        flags = dict(mask=mask, segment_ids=ids)
        return ssd(x, dt, shared["A"], B, C, initial_state=state, **rest, **flags, chunk_size=8)

    y, state = run(*batch.values(), masks.reshape(2, 3, T), ids.reshape(2, 3, T))
    mapped = jax.vmap(jax.vmap(run))(*batch.values(), masks.reshape(2, 3, T), ids.reshape(2, 3, T))
    for ours, theirs in zip((y, state), mapped, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    for b in range(6):
        one = run(
            *(batch[name].reshape(6, *batch[name].shape[2:])[b] for name in names), masks[b], ids[b]
        )
        np.testing.assert_allclose(y[b // 3, b % 3][masks[b]], one[0][masks[b]], atol=2e-6)
        np.testing.assert_allclose(state[b // 3, b % 3], one[1], atol=2e-6)


def test_forward_mode_agrees_with_reverse_mode():
    args = inputs(20, 2, 4)
    tangents = inputs(20, 2, 4, seed=3)

    def run(args):
        args = dict(args)
        rest = dict(D=args.pop("D"), dt_bias=args.pop("dt_bias"), initial_state=args.pop("state"))
        y, state = ssd(**args, **rest, dt_softplus=True, chunk_size=8)
        return jnp.sum(jnp.sin(y)) + jnp.sum(state)

    @jax.jit
    def both(args, tangents):
        forward = jax.jvp(run, (args,), (tangents,))[1]
        grads = jax.grad(run)(args)
        return forward, sum(jnp.vdot(grads[name], tangents[name]) for name in args)

    forward, reverse = both(args, tangents)
    np.testing.assert_allclose(forward, reverse, rtol=1e-5)


def test_the_backward_pass_is_linear_in_the_sequence_and_keeps_no_square():
    def temp_bytes(T):
        shapes = dict(x=(T, 4, 16), dt=(T, 4), A=(4,), B=(T, 1, 16), C=(T, 1, 16))
        given = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes.items()}
        loss = jax.grad(lambda a: ssd(**a, chunk_size=32, chunks_per_block=1)[0].sum())
        return jax.jit(loss).lower(given).compile().memory_analysis().temp_size_in_bytes

    short, long = temp_bytes(2048), temp_bytes(4096)
    assert long < 2.05 * short
    # Per token: a share of a state (4 x 16 x 16 / 32 numbers), the output, and cotangents and
    # blocked copies of the inputs; a square would add 4 x 32 numbers for the decays alone.
    inputs_per_token = 4 * (64 + 4 + 32)
    assert (long - short) / 2048 < 4 * 32 + 3 * inputs_per_token


def test_one_step_equals_one_token_of_the_whole():
    T, G, N = 5, 2, 16
    args = inputs(T, G, N)
    rest = dict(D=args["D"][:, 0], dt_bias=args["dt_bias"], dt_softplus=True, dt_limit=(0.01, 0.5))
    y, state = jax.jit(ft.partial(ssd, **rest))(
        args["x"], args["dt"], args["A"], args["B"], args["C"], initial_state=args["state"]
    )
    step = jax.jit(ft.partial(ssd_step, **rest))
    carried = jnp.asarray(args["state"])
    for t in range(T):
        token = (args[name][t] for name in ("x", "dt"))
        out, carried = step(*token, args["A"], args["B"][t], args["C"][t], carried)
        np.testing.assert_allclose(out, y[t], atol=2e-6)
    np.testing.assert_allclose(carried, state, atol=1e-6)


def test_an_idle_row_of_a_step_keeps_its_state():
    args = inputs(2, 2, 16)
    states = np.stack([args["state"], args["state"] + 1])
    _, after = jax.jit(ssd_step)(
        args["x"],
        args["dt"] + 3,
        args["A"],
        args["B"],
        args["C"],
        states,
        mask=np.array([True, False]),
    )
    assert (np.asarray(after[0]) != states[0]).all()
    np.testing.assert_array_equal(after[1], states[1])


WIDTH, PIECES = 6, 4


@ft.cache
def piece_of_ssd():
    def run(x, dt, A, B, C, D, dt_bias, state, mask, ids, previous):
        return ssd(
            x, dt, A, B, C, D=D, dt_bias=dt_bias, dt_softplus=True, initial_state=state,
            mask=mask, segment_ids=ids, previous_segment_id=previous, chunk_size=4,
        )  # fmt: skip

    return jax.jit(run)


@hypothesis.settings(deadline=None, max_examples=60, derandomize=True)
@hypothesis.given(
    lengths=st.lists(st.integers(0, WIDTH), min_size=PIECES, max_size=PIECES),
    lefts=st.lists(st.integers(0, WIDTH), min_size=PIECES, max_size=PIECES),
    seed=st.integers(0, 1000),
)
def test_any_split_into_padded_pieces_of_packed_documents_equals_one_pass(lengths, lefts, seed):
    G, N, T = 2, 4, sum(lengths)
    with jax.enable_x64(True):
        rng = np.random.default_rng(seed)
        args = {n: x.astype(np.float64) for n, x in inputs(T, G, N, seed=seed).items()}
        ids = np.cumsum(rng.uniform(size=T) < 0.2)
        steps, _ = reference.discretise(args["dt"], bias=args["dt_bias"])
        whole = {n: args[n] for n in ("x", "A", "B", "C", "D")}
        resets = reference.find_resets(ids, np.ones(T, bool), previous=0)
        y, state, _ = reference.ssd(**whole, dt=steps, state=args["state"], resets=resets)

        carried, previous, done, ours = args["state"], np.int64(0), 0, []
        for length, left in zip(lengths, lefts, strict=True):
            left = min(left, WIDTH - length)
            here = slice(left, left + length)
            real = np.zeros(WIDTH, bool)
            real[here] = True
            piece = {n: rng.normal(size=(WIDTH, *args[n].shape[1:])) for n in ("x", "dt", "B", "C")}
            for name, buffer in piece.items():
                buffer[here] = args[name][done : done + length]
            tags = np.full(WIDTH, -1)
            tags[here] = ids[done : done + length]
            out, carried = piece_of_ssd()(
                piece["x"], piece["dt"], args["A"], piece["B"], piece["C"], args["D"],
                args["dt_bias"], carried, real, tags, previous,
            )  # fmt: skip
            ours.append(np.asarray(out)[here])
            done += length
            previous = ids[done - 1] if done else previous
        np.testing.assert_allclose(np.concatenate(ours), y, rtol=0, atol=1e-10)
        np.testing.assert_allclose(carried, state, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [1, 2, 8, 24, 64, 97])
def test_decays_are_exponentials_of_the_sums_of_their_segments(size):
    a = -np.random.default_rng(0).uniform(size=(3, size)).astype(np.float32)
    decays = jax.jit(segment_decays)(a)
    exact = np.zeros((3, size, size))
    for i, s in np.ndindex(size, size):
        if s <= i:
            exact[:, i, s] = np.exp(a[:, s + 1 : i + 1].astype(np.float64).sum(-1))
    np.testing.assert_allclose(decays.between, exact, rtol=1e-5)
    np.testing.assert_allclose(decays.to_row, exact[:, :, 0] * np.exp(a[:, :1]), rtol=1e-5)
    np.testing.assert_allclose(decays.after_column, exact[:, -1], rtol=1e-5)
    np.testing.assert_allclose(decays.total, np.exp(a.astype(np.float64).sum(-1)), rtol=1e-5)


def test_a_segment_keeps_its_digits_beside_a_large_decay():
    a = np.full(64, -1e-3, np.float32)
    a[5], a[7] = -1e6, -np.inf
    decays = jax.jit(segment_decays)(a)
    np.testing.assert_allclose(decays.between[63, 10], np.exp(53 * -1e-3), rtol=1e-6)
    np.testing.assert_allclose(decays.between[4, 0], np.exp(4 * -1e-3), rtol=1e-6)
    assert decays.between[8, 4] == decays.to_row[63] == 0


def test_resets_are_between_real_tokens_whatever_stands_between_them():
    ids = jnp.array([9, 1, 9, 1, 1, 2, 9])
    mask = jnp.array([False, True, False, True, True, True, False])
    found = find_resets(ids, mask, None)
    assert found.tolist() == [False, False, False, False, False, True, False]
    continued = find_resets(ids, mask, jnp.array(7))
    assert continued.tolist() == [False, True, False, False, False, True, False]


@pytest.mark.parametrize(
    "change, error, needle",
    [
        (dict(dt=np.ones((5, 7), np.float32)), ValueError, "dt has shape .* H = 8 as in x"),
        (dict(B=np.ones((5, 3, 16), np.float32), C=np.ones((5, 3, 16), np.float32)), ValueError,
         "8 heads, which is not a multiple of the 3 groups"),
        (dict(C=np.ones((5, 2, 16), np.float16)), ValueError, "C has dtype float16, but x"),
        (dict(x=np.ones((5, H, P), np.int32)), TypeError, "x holds int32"),
        (dict(A=2.0), TypeError, "A must be an array of shape"),
        (dict(D=np.ones(3, np.float32)), ValueError, "D has shape"),
        (dict(dt_limit=(1.0, 0.5)), ValueError, "dt_limit"),
        (dict(chunk_size=0), ValueError, "chunk_size=0 must be at least 1"),
        (dict(chunks_per_block=0), ValueError, "chunks_per_block=0"),
        (dict(previous_segment_id=np.int32(3)), ValueError, "segment_ids is not"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_fit_raise_by_name(change, error, needle):
    args = {name: inputs(5, 2, 16)[name] for name in ("x", "dt", "A", "B", "C")}
    with pytest.raises(error, match=needle):
        ssd(**(args | change))
