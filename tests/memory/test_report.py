"""A report can be read, printed, stored and used for models that fit no memory."""

import json
import sys

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import pytest

from stackax import checkpoint_name
from stackax.lm import Decoder, next_token_loss
from stackax.memory import explain, show_bytes
from stackax.transformer import TransformerConfig

N, WEIGHTS, X = 4, jnp.ones((4, 8, 8)), jnp.ones((2, 8))


def loss(weights, x):
    def layer(x, w):
        hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
        return x + hidden * hidden, None

    return jax.lax.scan(layer, x, weights)[0].sum()


@pytest.fixture(scope="module")
def report():
    return explain(loss, WEIGHTS, X)


def test_the_totals_are_sums_of_the_rows(report):
    own = [r for r in report.residuals if r.kind != "argument"]
    assert report.kept_bytes == sum(r.bytes for r in own) > 0
    assert report.residual_bytes == report.kept_bytes + WEIGHTS.nbytes
    assert report.gradient_bytes == WEIGHTS.nbytes + X.nbytes
    temp = report.peak.temp_bytes
    assert report.peak_bytes == report.gradient_bytes * 2 + jnp.float32(0).nbytes + temp
    assert report.peak.low_bytes <= temp <= report.peak.high_bytes


def test_it_can_be_stored_as_json(report):
    stored = json.loads(json.dumps(report.to_dict()))
    assert stored["residual_bytes"] == report.residual_bytes
    assert [row["name"] for row in stored["residuals"]] == [r.name for r in report.residuals]
    assert stored["peak"]["timeline"][0].keys() == {"where", "live_bytes"}


def test_it_prints_every_kept_value_with_its_bytes(report):
    text = str(report)
    assert repr(report) == text
    for r in report.residuals:
        if r.kind != "argument":
            assert r.label in text and show_bytes(r.bytes) in text
    assert show_bytes(report.peak_bytes) in text and "No waste found" in text


def test_a_notebook_gets_a_table_in_html(report):
    assert "hidden" in report._repr_mimebundle_((), ())["text/html"]


def test_a_dataframe_has_a_row_for_each_value(report):
    frame = report.to_dataframe()
    assert frame["bytes"].sum() == report.residual_bytes
    assert list(frame["name"].dropna()) == ["hidden"]


def test_without_pandas_it_says_what_to_install(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match="pip install pandas"):
        report.to_dataframe()


def test_names_are_those_of_the_function(report):
    assert report.names == {"hidden"} and report.recomputed_names == frozenset()
    assert explain(jax.checkpoint(loss), WEIGHTS, X).recomputed_names == {"hidden"}


def test_a_model_of_billions_of_parameters_is_explained_from_its_shapes():
    config = TransformerConfig(
        layers=32, width=4096, heads=32, kv_heads=8, vocab_size=128256, seq_len=4096
    )
    model = eqx.filter_eval_shape(lambda key: Decoder.init(config, key=key), jax.random.key(0))
    tokens = eqx.filter_eval_shape(lambda: hax.zeros({"batch": 1, "position": 4096}, dtype=int))
    report = explain(next_token_loss, model, tokens, remat="full", argnums=0)
    assert report.gradient_bytes == 4 * sum(x.size for x in jax.tree.leaves(model)) > 20 * 2**30
    (carry,) = [r for r in report.residuals if r.kind == "carry" and r.layers == (32,)]
    assert carry.bytes == 32 * 4095 * 4096 * 4
