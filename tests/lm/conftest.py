"""One small model for all tests and examples here, so that they share compiled programs."""

import equinox as eqx
import haliax as hax
import jax.random as jr
import numpy as np
import pytest

from stackax.lm import Decoder, next_token_loss
from stackax.transformer import TransformerConfig

CONFIG = TransformerConfig(layers=2, width=16, heads=2, vocab_size=256, seq_len=8)


@pytest.fixture(scope="session")
def decoder():
    """A model with a wide spread of logits, or greedy choices would be close calls."""
    decoder = Decoder.init(CONFIG, key=jr.key(0))
    return eqx.tree_at(lambda d: d.norm.weight.array, decoder, replace_fn=lambda w: 3 * w)


@pytest.fixture(scope="session")
def windows():
    """As a training step sees them: one token more than the model's sequences."""
    values = np.random.default_rng(0).integers(0, 256, (4, 9)).astype(np.int32)
    return hax.named(values, ("batch", "position"))


@pytest.fixture(scope="session")
def logits_of():
    return eqx.filter_jit(lambda decoder, tokens: decoder(tokens))


@pytest.fixture(scope="session")
def loss_and_gradient():
    @eqx.filter_jit
    def run(decoder, windows, chunk=None):
        return eqx.filter_value_and_grad(next_token_loss)(decoder, windows, chunk=chunk)

    return run
