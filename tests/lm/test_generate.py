import haliax as hax
import jax.random as jr
import numpy as np
import pytest

from stackax.lm import generate


def greedy_loop(decoder, logits_of, prompt, count):
    """Continues one token at a time, each by a call on the last `seq_len` tokens."""
    tokens, size = list(prompt), decoder.config.seq_len
    for _ in range(count):
        window = tokens[-size:]
        # Padded at the end, which a causal model does not see, and repeated, so that the one
        # program of all tests serves.
        padded = window + [0] * (size - len(window))
        rows = hax.named(np.array([padded] * 4, np.int32), ("batch", "position"))
        logits = logits_of(decoder, rows).array[0]
        tokens.append(int(np.argmax(logits[len(window) - 1])))
    return tokens


@pytest.mark.parametrize("length", [1, 9])
def test_greedy_text_equals_a_loop_of_calls_across_the_end_of_the_window(
    decoder, logits_of, length
):
    prompts = np.random.default_rng(length).integers(0, 256, (2, length))
    ours = generate(
        decoder, hax.named(prompts, ("batch", "position")), new_tokens=9, temperature=0.0
    )
    assert ours.shape == {"batch": 2, "position": length + 9}
    for prompt, text in zip(prompts.tolist(), ours.array.tolist(), strict=True):
        assert text == greedy_loop(decoder, logits_of, prompt, 9)


def test_a_key_decides_the_text(decoder):
    prompt = hax.named(np.array([1]), "position")
    texts = [
        generate(decoder, prompt, new_tokens=20, top_k=5, key=jr.key(seed)).array.tolist()
        for seed in (0, 0, 1)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0][:1] == [1] and len(set(texts[0])) > 2


@pytest.mark.parametrize(
    "prompt, how, needle",
    [
        (np.zeros(0, int), dict(new_tokens=1, temperature=0.0), "prompt is empty"),
        (np.zeros(1, int), dict(new_tokens=0, temperature=0.0), "new_tokens=0"),
        (np.zeros(1, int), dict(new_tokens=1), "give key="),
    ],
)
def test_what_cannot_be_generated_raises(decoder, prompt, how, needle):
    with pytest.raises(ValueError, match=needle):
        generate(decoder, hax.named(prompt, "position"), **how)


def test_a_prompt_that_is_not_of_integers_raises(decoder):
    with pytest.raises(TypeError, match="prompt must hold integers, not float32"):
        generate(decoder, hax.zeros({"position": 2}), new_tokens=1, temperature=0.0)
