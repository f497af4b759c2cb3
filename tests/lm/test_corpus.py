import numpy as np
import pytest

from stackax.lm import FILE_START, corpus_of, read_corpus


def texts_in(part):
    return [bytes(text) for text in bytes(part).split(bytes([FILE_START]))[1:]]


def test_many_texts_are_split_by_whole_texts():
    texts = [f"text number {i}".encode() for i in range(100)]
    corpus = corpus_of(texts)
    train, validation = texts_in(corpus.train), texts_in(corpus.validation)
    assert validation == texts[19::20]
    assert sorted(train + validation) == sorted(texts) and corpus.files == 100


def test_few_texts_are_split_at_one_place():
    texts = [bytes([65 + i]) * 99 for i in range(4)]
    corpus = corpus_of(texts)
    whole = b"".join(bytes([FILE_START]) + text for text in texts)
    assert bytes(corpus.train) + bytes(corpus.validation) == whole
    assert corpus.validation.size == 400 // 20


def test_a_text_given_twice_is_not_in_both_parts():
    texts = [b"the same"] * 50 + [f"text {i}".encode() for i in range(90)]
    corpus = corpus_of(texts)
    assert corpus.files == 91
    assert not set(texts_in(corpus.train)) & set(texts_in(corpus.validation))


def test_the_standard_library_is_found_and_is_the_same_every_time():
    first, second = read_corpus(), read_corpus()
    assert first.fingerprint == second.fingerprint
    assert first.train.size > 3e6 and first.files > 200
    assert 0.02 < first.validation.size / first.train.size < 0.1
    assert b"import" in bytes(first.validation)
    assert not set(texts_in(first.train)) & set(texts_in(first.validation))


def test_folders_are_read_in_order_without_hidden_or_binary_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name, content in {
        "b/2.txt": b"zwei \xc3\xa4",
        "1.md": b"one",
        "image.png": b"\x89PNG\x00",
        "latin.txt": b"\xe4",
        "empty": b"",
        ".git/config": b"hidden",
    }.items():
        (tmp_path / name).write_bytes(content)
    corpus = read_corpus([tmp_path])
    whole = bytes(corpus.train) + bytes(corpus.validation)
    assert whole == b"\0one\0zwei \xc3\xa4" and corpus.files == 2
    assert read_corpus([tmp_path / "latin.txt", tmp_path / "1.md"]).files == 2


def test_what_holds_no_text_raises_and_says_where(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere does not exist"):
        read_corpus([tmp_path / "nowhere"])
    with pytest.raises(FileNotFoundError, match="holds no text"):
        read_corpus([tmp_path])
    with pytest.raises(ValueError, match="has 0 bytes: give at least 2"):
        corpus_of([])


def test_fingerprints_tell_texts_and_splits_apart():
    prints = {corpus_of(t).fingerprint for t in ([b"ab" * 9], [b"ab" * 8], [b"ab" * 8 + b"ac"])}
    assert len(prints) == 3
    assert corpus_of([b"ab"]).train.dtype == np.uint8
