"""Retrieval with a real model of vectors, all-MiniLM-L6-v2: ranks are those of the reference.

`nox -s real` runs this: its name keeps it from the quick suite. The variable MINILM names the
checkpoint's folder. The reference is sentence-transformers where that is installed, else
transformers with the pooling that the model's card describes.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

from src import LLM
from src.core.errors import PromptTooLongError
from tests.real.passages import headings, sentences
from tests.support.engines import small_config

FOLDER = Path(os.environ["MINILM"])
NUM_SENTENCES, NUM_QUERIES, TOP = 200, 50, 10
SIZE = 384
# The checkpoint's `max_seq_length`; longer texts are cut by the reference.
LONGEST = 256
TOLERANCE = 1e-4
LEAST_COSINE = 1 - 1e-5
# Cosines that are nearer to each other than this may change places.
NEAR = 1e-5
# dtype, quantization, least cosine to the float32 reference, least share of its top ten.
ROUNDED = (
    ("bfloat16", None, 0.9998, 0.97),
    ("float32", "int8", 0.998, 0.95),
    ("bfloat16", "int8", 0.996, 0.94),
)

Vectors: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Encode: TypeAlias = Callable[[Sequence[str]], Vectors]


@pytest.fixture(scope="module")
def reference() -> Encode:
    """From texts to their vectors, each of length 1."""
    if importlib.util.find_spec("sentence_transformers") is None:
        return _pooled_by_hand()
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(FOLDER), device="cpu")
    return lambda texts: model.encode(list(texts)).astype(np.float64)


def _pooled_by_hand() -> Encode:
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)

    @torch.inference_mode()
    def encode(texts: Sequence[str]) -> Vectors:
        made = []
        # One by one, so that nothing is padded.
        for text in texts:
            inputs = tokenizer(text, truncation=True, max_length=LONGEST, return_tensors="pt")
            mean = model(**inputs).last_hidden_state[0].double().mean(0)
            made.append((mean / mean.norm()).numpy())
        return np.stack(made)

    return encode


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return [*sentences(NUM_SENTENCES), *headings(NUM_QUERIES)]


@pytest.fixture(scope="module")
def wanted(reference: Encode, texts: list[str]) -> Vectors:
    """[NUM_SENTENCES + NUM_QUERIES, SIZE]."""
    return reference(texts)


def embedded(texts: Sequence[str], **changes: Any) -> Vectors:
    """The engine's vectors, all texts in one call."""
    with LLM(small_config(FOLDER, **changes)) as llm:
        return np.array([each.vector for each in llm.embed(list(texts))], np.float64)


def cosines(vectors: Vectors) -> Vectors:
    """Of queries and sentences, [NUM_QUERIES, NUM_SENTENCES]."""
    return vectors[NUM_SENTENCES:] @ vectors[:NUM_SENTENCES].T


def ranked(scores: Vectors) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The best sentences of each query, the best one first, [NUM_QUERIES, TOP]."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :TOP]


def check_ranks(theirs: Vectors, own: Vectors) -> None:
    """Each place of ours has a sentence that is as good to the reference as its own there."""
    best, found = ranked(theirs), ranked(own)
    assert all(len(set(row)) == TOP for row in found.tolist())
    want = np.take_along_axis(theirs, best, axis=1)
    np.testing.assert_allclose(np.take_along_axis(theirs, found, axis=1), want, rtol=0, atol=NEAR)


@pytest.fixture(scope="module")
def own(texts: list[str]) -> Vectors:
    return embedded(texts, model__dtype="float32")


def test_the_ten_best_sentences_are_those_of_the_reference(wanted: Vectors, own: Vectors) -> None:
    theirs = cosines(wanted)
    check_ranks(theirs, cosines(own))
    # It means something: hardly any order is open, and other queries have other answers.
    gaps = np.diff(np.sort(-theirs, axis=1)[:, : TOP + 1])
    assert (gaps.min(axis=1) > NEAR).mean() > 0.8
    assert len(set(ranked(theirs)[:, 0].tolist())) > NUM_QUERIES / 2


def test_ranks_of_other_vectors_are_noticed(wanted: Vectors) -> None:
    """Of the same texts, but that two sentences have changed places."""
    theirs = cosines(wanted)
    first = int(ranked(theirs)[0, 0])
    swapped = theirs.copy()
    swapped[:, [first, first - 1]] = theirs[:, [first - 1, first]]
    with pytest.raises(AssertionError):
        check_ranks(theirs, swapped)


def test_vectors_are_those_of_the_reference(wanted: Vectors, own: Vectors) -> None:
    assert own.shape == (NUM_SENTENCES + NUM_QUERIES, SIZE)
    np.testing.assert_allclose(own, wanted, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(np.linalg.norm(own, axis=1), 1, rtol=0, atol=1e-6)
    assert (own * wanted).sum(axis=1).min() > LEAST_COSINE


@pytest.mark.parametrize(("dtype", "quantization", "least", "share"), ROUNDED)
def test_rounding_costs_no_more_than_is_stated(
    texts: list[str],
    wanted: Vectors,
    dtype: str,
    quantization: str | None,
    least: float,
    share: float,
) -> None:
    made = embedded(texts, model__dtype=dtype, model__quantization=quantization)
    lengths = np.linalg.norm(made, axis=1)
    np.testing.assert_allclose(lengths, 1, rtol=0, atol=1e-6)
    cosine = (made * wanted).sum(axis=1).min()
    best = zip(ranked(cosines(wanted)).tolist(), ranked(cosines(made)).tolist(), strict=True)
    same = np.mean([len(set(theirs) & set(own)) / TOP for theirs, own in best])
    # Neither is better than it can be: it was rounded at all.
    assert least < cosine < LEAST_COSINE
    assert share <= same


def test_a_long_text_is_cut_where_the_reference_cuts_it(
    reference: Encode, texts: list[str]
) -> None:
    long = " ".join(texts)
    (want,) = reference([long])
    with LLM(small_config(FOLDER, model__dtype="float32")) as llm:
        (made,) = llm.embed([long], truncate=-1)
        with pytest.raises(PromptTooLongError, match=f"up to {LONGEST}"):
            llm.embed([long])
    assert made.prompt_tokens == LONGEST
    np.testing.assert_allclose(np.array(made.vector), want, rtol=0, atol=TOLERANCE)
