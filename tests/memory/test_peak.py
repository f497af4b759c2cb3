"""The estimated peak against the compiler's, and against bytes counted by hand."""

import haliax as hax
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

import stackax
from stackax import ScanCheckpointPolicy
from stackax.memory._peak import Peak, estimate_peak
from stackax.transformer import TransformerBlock, TransformerConfig
from tests.reference.programs import temp_bytes
from tests.zoo import platform_warnings_ignored

MATRIX = jax.ShapeDtypeStruct((128, 128), jnp.float32)
MATRIX_BYTES = 128 * 128 * 4


def peak_of(f, *args) -> Peak:
    return estimate_peak(jax.make_jaxpr(f)(*args))


def compiled_bytes(f, *args) -> int:
    return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes


def gelu_block(weights, x):
    return x + jax.nn.gelu(x @ weights[0]) @ weights[1]


def scan_loss(remat: bool):
    body = lambda x, w: (gelu_block(w, x), None)  # noqa: E731
    body = jax.checkpoint(body, prevent_cse=False) if remat else body
    return lambda weights, x: jax.lax.scan(body, x, weights)[0].sum()


def scan_arguments(layers: int, rows: int):
    shapes = ((layers, 64, 256), (layers, 256, 64), (rows, 64))
    into, out, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    return (into, out), x


def transformer(layers: int, batch: int, remat):
    config = TransformerConfig(
        layers=layers, width=32, heads=2, kv_heads=1, vocab_size=8, seq_len=64
    )
    init = stackax.Stacked.init(config.Layers, TransformerBlock, gradient_checkpointing=remat)
    stack = jax.eval_shape(lambda: init(config, key=jr.key(0)))
    axes = (hax.Axis("batch", batch), config.Pos, config.Embed)
    x = jax.ShapeDtypeStruct(tuple(axis.size for axis in axes), jnp.float32)
    return lambda stack, x: stack.fold(hax.named(x, axes)).array.sum(), (stack, x)


# How near the estimate comes


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("layers, rows", [(4, 512), (17, 64)])
def test_the_estimate_for_a_scan_is_near_the_compilers_figure(layers, rows, remat):
    step, args = jax.value_and_grad(scan_loss(remat)), scan_arguments(layers, rows)
    assert_near(peak_of(step, *args), temp_bytes(scan_loss(remat), *args))


@pytest.mark.parametrize(
    "remat",
    [
        False,
        True,
        "minimal",
        "save_qkv_proj",
        ScanCheckpointPolicy(nested=(4, 2)),
        ScanCheckpointPolicy(slots=3),
    ],
    ids=str,
)
def test_the_estimate_for_a_transformer_is_near_the_compilers_figure(remat):
    with platform_warnings_ignored():
        loss, args = transformer(12, 4, remat)
        assert_near(peak_of(jax.value_and_grad(loss), *args), temp_bytes(loss, *args))


def assert_near(peak: Peak, compiled: int) -> None:
    assert 0.85 <= peak.temp_bytes / compiled <= 1.15
    assert peak.low_bytes <= compiled <= peak.high_bytes


# What is counted


def test_of_a_chain_of_products_two_are_alive_at_once():
    def chain(x):
        for _ in range(6):
            x = x @ x
        return jnp.tanh(x)

    # One of the two is where the output will be.
    assert peak_of(chain, MATRIX).temp_bytes == MATRIX_BYTES == compiled_bytes(chain, MATRIX)


def test_elementwise_operations_need_no_memory_of_their_own():
    def fused(x):
        return jnp.tanh(2 * (x @ x) + 1).sum()

    assert peak_of(fused, MATRIX).temp_bytes <= 2 * MATRIX_BYTES


def test_what_nothing_reads_costs_nothing():
    def wasteful(x):
        _ = (x @ x) @ x
        return x.sum()

    assert peak_of(wasteful, MATRIX).temp_bytes < MATRIX_BYTES


def test_a_value_lives_until_its_last_reader():
    def kept(x):
        y = x @ x
        z = y
        for _ in range(4):
            z = z @ z
        return y @ z

    assert peak_of(kept, MATRIX).temp_bytes == 2 * MATRIX_BYTES == compiled_bytes(kept, MATRIX)


def test_a_scans_outputs_live_whole_from_its_start():
    def gathered(x):
        step = lambda c, _: (c @ c, c)  # noqa: E731
        _, outputs = jax.lax.scan(step, x, length=10)
        return (outputs**2).sum()

    temp = peak_of(gathered, MATRIX).temp_bytes
    assert 11 * MATRIX_BYTES <= temp <= 14 * MATRIX_BYTES


def test_a_layer_more_adds_its_residuals():
    grow = [
        peak_of(jax.value_and_grad(scan_loss(True)), *scan_arguments(n, 512)).temp_bytes
        for n in (20, 21)
    ]
    assert grow[1] - grow[0] == 512 * 64 * 4  # the carry


def test_outputs_are_not_temporary():
    peak = peak_of(lambda x: x @ x, MATRIX)
    assert peak.temp_bytes == 0
    assert peak.output_bytes == peak.argument_bytes == MATRIX_BYTES


def test_values_on_the_host_are_not_counted():
    def args(remat):
        loss, args = transformer(8, 4, remat)
        return jax.value_and_grad(loss), *args

    with platform_warnings_ignored():
        offloaded = peak_of(*args(ScanCheckpointPolicy(offload_block_internals=["mlpwi_0"])))
        saved = peak_of(*args(ScanCheckpointPolicy(save_block_internals=["mlpwi_0"])))
    kept = 8 * 4 * 64 * 96 * 4
    assert offloaded.temp_bytes <= saved.temp_bytes - 0.8 * kept


# What is reported beside


def test_the_timeline_reaches_the_peak_inside_a_loop():
    peak = peak_of(jax.value_and_grad(scan_loss(True)), *scan_arguments(8, 512))
    assert max(moment.live_bytes for moment in peak.timeline) <= peak.temp_bytes
    highest = max(peak.timeline, key=lambda moment: moment.live_bytes)
    assert "body" in highest.where
    assert 0 < peak.working_bytes < peak.temp_bytes


def test_without_a_loop_there_is_no_working_set():
    assert peak_of(lambda x: (x @ x).sum(), MATRIX).working_bytes == 0


# It takes any program


@jax.custom_vjp
def custom(x):
    return jnp.sin(x @ x)


custom.defvjp(lambda x: (custom(x), x), lambda x, ct: (ct @ x,))

PROGRAMS = {
    "cond": lambda x: jax.lax.cond(x.sum() > 0, lambda x: x @ x, lambda x: x.T, x).sum(),
    "switch": lambda x: jax.lax.switch(
        jnp.int32(x.sum()), [lambda x: x @ x, jnp.sin, lambda x: x.T], x
    ).sum(),
    "while": lambda x: jax.lax.while_loop(
        lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] @ c[1]), (0, x)
    )[1].sum(),
    "custom_vjp": lambda x: custom(x).sum(),
    "jit": lambda x: jax.jit(lambda x: jax.jit(jnp.tanh)(x) @ x)(x).sum(),
    "remat": lambda x: jax.checkpoint(lambda x: jnp.sin(x @ x))(x).sum(),
    "sort": lambda x: jnp.sort(x).cumsum().sum(),
    "random": lambda x: (x + jr.normal(jr.key(0), x.shape)).sum(),
    "gather": lambda x: x[jnp.array([3, 1, 2])].sum(),
    "convolution": lambda x: jnp.convolve(x[0], x[1]).sum(),
    "linear algebra": lambda x: jnp.linalg.qr(x)[0].sum(),
    "one step": lambda x: jax.lax.scan(lambda c, s: (c @ c, s * 2), x, x[None])[0].sum(),
    "no steps": lambda x: jax.lax.scan(lambda c, s: (c @ c, s * 2), x, x[:0])[0].sum(),
    "unrolled": lambda x: jax.lax.scan(lambda c, s: (c @ c, s), x, x, unroll=True)[1].sum(),
    "nested scans": lambda x: jax.lax.scan(
        lambda c, _: (jax.lax.scan(lambda d, _: (d @ d, None), c, length=3)[0], None), x, length=4
    )[0].sum(),
    "nothing": lambda x: x.sum() * 0,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_kind_of_program_has_an_estimate(name):
    f = PROGRAMS[name]
    peaks = [peak_of(f, MATRIX)]
    if name != "while":  # which has no reverse mode
        peaks.append(peak_of(jax.value_and_grad(f), MATRIX))
    for peak in peaks:
        assert 0 <= peak.low_bytes <= peak.temp_bytes <= peak.high_bytes
