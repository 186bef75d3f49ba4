"""Labels and scores through the whole engine, against transformers on the same weights."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from src import LLM, SamplingParams
from src.core.errors import (
    ConfigError,
    DeadlineExceededError,
    GenerationError,
    InvalidRequestError,
    ModelLoadError,
    PromptTooLongError,
)
from src.core.plan import StepPlan
from src.engine.client import AsyncEngine
from src.engine.execution.pooling import RowPooling, Vectors
from src.engine.requests import embedding_run, task_runs
from src.engine.requests.pairs import PairBuilder
from src.engine.requests.prompts import TextTokens
from src.engine.scheduling.replay import read_lines, replay
from src.text import Tokenizer as Backend
from tests.engine.test_embeddings import ROUNDED
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.classifiers import (
    DECODER_STEMS,
    FAMILIES,
    TOKEN,
    load_classifier_reference,
    make_classifier,
    reference_logits,
)
from tests.support.encoders import make_encoder, save_encoder_tokenizer, save_modules
from tests.support.engines import (
    assert_idle,
    greedy,
    random_prompts,
    small_config,
    until_idle,
)

pytestmark = pytest.mark.anyio

TOLERANCE = 1e-4


def check(got: Any, want: torch.Tensor) -> None:
    made = torch.from_numpy(np.asarray(got, np.float64).copy())
    torch.testing.assert_close(made, want, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cross-encoder: BERT with one label, which tells the kinds of tokens apart."""
    return make_classifier(tmp_path_factory.mktemp("ranker") / "tiny", "bert", labels=1)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("decoder") / "tiny", "qwen3")


@pytest.fixture
async def engine_of_ranker(ranker: Path) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine.open(small_config(ranker)) as engine:
        yield engine


@pytest.mark.parametrize("name", FAMILIES)
async def test_labels_of_texts_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    directory = make_classifier(tmp_path, name)
    reference = load_classifier_reference(directory)
    prompts = random_prompts(20, longest=60, seed=5)
    async with AsyncEngine.open(small_config(directory)) as engine:
        assert engine.model_info.tasks == ("classify",)
        raw = await engine.classify(prompts, use_activation=False)
        made = await engine.classify(prompts)
        alone = await engine.encode(prompts[:1], task="classify")
        assert_idle(engine)
    for prompt, numbers, result in zip(prompts, raw, made, strict=True):
        want = reference_logits(reference, prompt)
        check(numbers.probs, want)
        check(result.probs, want.softmax(-1))
        assert result.labels == ("kind 0", "kind 1", "kind 2")
        assert result.label == f"kind {int(want.argmax())}"
        assert result.prompt_tokens == len(prompt)
    assert alone[0].shape == (3,)
    check(alone[0].values, reference_logits(reference, prompts[0]).softmax(-1))


# transformers has no class for tokens of Gemma 3.
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma3"])
async def test_labels_of_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    directory = make_classifier(tmp_path, name, TOKEN)
    reference = load_classifier_reference(directory, TOKEN)
    prompts = random_prompts(20, longest=60, seed=6)
    is_decoder = name in DECODER_STEMS
    changes = {"scheduler__max_num_batched_tokens": 7} if is_decoder else {}
    async with AsyncEngine.open(small_config(directory, **changes)) as engine:
        assert engine.model_info.tasks == ("token_classify",)
        raw = await engine.encode(prompts, task="token_classify", use_activation=False)
        made = await engine.encode(prompts, task="token_classify")
        with pytest.raises(InvalidRequestError, match=r"does not classify: .* token_classify"):
            await engine.classify(prompts)
        assert_idle(engine)
    for prompt, numbers, result in zip(prompts, raw, made, strict=True):
        want = reference_logits(reference, prompt)
        assert result.shape == (len(prompt), 3)
        check(numbers.values, want)
        check(result.values, want.softmax(-1))


@pytest.mark.parametrize(("budget", "depth"), [(7, 1), (7, 2), (60, 2)])
async def test_a_decoder_classifies_in_chunks_and_cached(
    decoder: Path, budget: int, depth: int
) -> None:
    reference, prompts = load_classifier_reference(decoder), random_prompts(30, longest=60, seed=3)
    config = small_config(
        decoder,
        scheduler__max_num_batched_tokens=budget,
        scheduler__pipeline_depth=depth,
        cache__num_blocks=60,
    )
    async with AsyncEngine.open(config) as engine:
        first = await engine.classify(prompts, use_activation=False)
        again = await engine.classify(prompts[::-1], use_activation=False)
        assert_idle(engine)
    for prompt, one, other in zip(prompts, first, again[::-1], strict=True):
        want = reference_logits(reference, prompt)
        check(one.probs, want)
        check(other.probs, want)
    # Those that were the last are the first now.
    assert again[0].cached_tokens


@pytest.mark.parametrize("pooled", ["token_embed", "token_classify"])
@pytest.mark.parametrize("depth", [1, 2])
async def test_every_token_has_its_own_result_in_chunks(
    tmp_path: Path, pooled: Any, depth: int
) -> None:
    is_label = pooled == "token_classify"
    directory = make_classifier(tmp_path, "llama", TOKEN) if is_label else tmp_path
    if not is_label:
        make_checkpoint(tmp_path, "llama", tokenizer=True)
    reference = (
        load_classifier_reference(directory, TOKEN) if is_label else load_reference(directory)
    )
    prompts = random_prompts(24, longest=60, seed=8)
    config = small_config(
        directory,
        scheduler__max_num_batched_tokens=11,
        scheduler__pipeline_depth=depth,
        cache__num_blocks=40,
    )
    async with AsyncEngine.open(config) as engine:
        made = await engine.encode(prompts, task=pooled, use_activation=False)
        again = await engine.encode(prompts, task=pooled, use_activation=False)
        assert_idle(engine)
    for prompt, one, other in zip(prompts, made, again, strict=True):
        with torch.inference_mode():
            want = (
                reference_logits(reference, prompt)
                if is_label
                else reference.model(torch.tensor([prompt])).last_hidden_state[0].double()
            )
        check(one.values, want)
        check(other.values, want)
        assert one.cached_tokens == other.cached_tokens == 0


def pair_of(directory: Path, pair: tuple[str, str]) -> tuple[list[int], list[int]]:
    found = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(*pair)
    return found.ids, found.type_ids


WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "small", "engine", "pulls", "12")


def sentences(count: int, longest: int, seed: int = 0) -> list[str]:
    source = random.Random(seed)
    return [
        " ".join(source.choice(WORDS) for _ in range(source.randint(1, longest)))
        for _ in range(count)
    ]


@pytest.mark.parametrize("name", ["bert", "distilbert", "roberta", "xlm-roberta"])
async def test_scores_of_pairs_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    # Positions of RoBERTa pass over padding, whose id no token has.
    directory = make_classifier(tmp_path, name, labels=1, pad_token_id=0)
    reference = load_classifier_reference(directory)
    query, documents = "a small brown engine", sentences(20, 12)
    pairs = [(query, document) for document in documents]
    async with AsyncEngine.open(small_config(directory)) as engine:
        assert engine.model_info.tasks == ("classify", "score")
        raw = await engine.score(pairs, use_activation=False)
        made = await engine.score(pairs)
        swapped = await engine.score([(d, q) for q, d in pairs], use_activation=False)
        assert_idle(engine)
    for number, pair in enumerate(pairs):
        ids, types = pair_of(directory, pair)
        assert any(types)
        want = reference_logits(reference, ids, types if name != "distilbert" else None)
        check([raw[number].score], want)
        check([made[number].score], want.sigmoid())
        assert raw[number].prompt_tokens == len(ids)
        other, kinds = pair_of(directory, pair[::-1])
        want = reference_logits(reference, other, kinds if name != "distilbert" else None)
        check([swapped[number].score], want)


async def test_a_pair_that_is_too_long_is_cut_as_transformers_does(ranker: Path) -> None:
    from transformers import AutoTokenizer

    reference, tokenizer = load_classifier_reference(ranker), AutoTokenizer.from_pretrained(ranker)
    texts = sentences(6, 40, seed=2)
    pairs = [(texts[i], texts[j]) for i in range(6) for j in range(6)]
    async with AsyncEngine.open(small_config(ranker)) as engine:
        for keeps in (20, 41, 130):
            made = await engine.score(pairs, truncate=keeps, use_activation=False)
            for (query, document), result in zip(pairs, made, strict=True):
                given = tokenizer(query, document, truncation="longest_first", max_length=keeps)
                ids = given["input_ids"]
                types = tokenizer.backend_tokenizer.encode(query, document).type_ids
                assert result.prompt_tokens == len(ids)
                if len(types) == len(ids):
                    check([result.score], reference_logits(reference, ids, types))
                else:
                    kinds = given["token_type_ids"]
                    check([result.score], reference_logits(reference, ids, kinds))
        with pytest.raises(PromptTooLongError, match=r"both texts together have \d+ tokens"):
            await engine.score([("fox " * 200, "fox")])
        (cut,) = await engine.score([("fox", "fox " * 40)], max_tokens_per_doc=3)
        whole = engine.tokenizer.encode("fox", False)
        assert cut.prompt_tokens == len(whole) + 3 + 3


@pytest.mark.parametrize("options", [{"truncate": 30}, {"max_tokens_per_doc": 9}, {}])
async def test_a_query_is_tokenized_once_for_all_its_documents(
    engine_of_ranker: AsyncEngine, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """A tokenizer without a bound of characters for a token, so that no text is cut before."""
    engine, encode = engine_of_ranker, Backend.encode
    monkeypatch.setitem(vars(engine.tokenizer), "max_token_chars", sys.maxsize)
    query = "the quick fox " * (20_000 if "truncate" in options else 5)
    documents, texts = sentences(12, 12), []

    def noted(self: Backend, text: str, add_special_tokens: bool = True) -> list[int]:
        texts.append(text)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Backend, "encode", noted)
    made = await engine.score([(query, document) for document in documents], **options)
    # Or as much of it as may be kept.
    (begun,) = [text for text in texts if query.startswith(text)]
    assert len(begun) <= min(len(query), 3000)
    assert sum(map(len, texts)) == len(begun) + sum(map(len, documents))
    monkeypatch.setattr(Backend, "encode", encode)
    for document, score in zip(documents, made, strict=True):
        (alone,) = await engine.score([(query, document)], **options)
        assert score.prompt_tokens == alone.prompt_tokens
        assert score.score == pytest.approx(alone.score, abs=1e-5)


async def test_the_loop_sees_no_more_of_a_long_text_than_is_kept(
    engine_of_ranker: AsyncEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, seen = PairBuilder._text, []
    monkeypatch.setitem(vars(engine_of_ranker.tokenizer), "max_token_chars", sys.maxsize)

    def noted(self: PairBuilder, text: str, keeps: int | None) -> TextTokens:
        found = made(self, text, keeps)
        seen.append(found)
        return found

    monkeypatch.setattr(PairBuilder, "_text", noted)
    await engine_of_ranker.score([("fox " * 5000, "engine " * 5000)], truncate=20)
    assert [len(found.ids) for found in seen] == [20, 20]
    # Of a tokenizer whose tokens have no longest spelling, the beginning of a text says enough.
    assert all(not found.is_whole and found.total < 2000 for found in seen)
    with pytest.raises(PromptTooLongError, match="both texts together have at least"):
        await engine_of_ranker.score([("fox", "engine " * 5000)])


@pytest.mark.parametrize(
    ("pairs", "options", "message"),
    [
        ([], {}, "pairs must not be an empty list"),
        ("fox", {}, "pairs must be a list"),
        ([("a", "b"), ("a",)], {}, r"pairs\[1\]: each pair must be two texts"),
        (["ab", "cd"], {}, r"pairs\[0\]: each pair must be two texts"),
        ([("a", "b"), ("a", "")], {}, r"pairs\[1\]: the document must not be empty"),
        ([("", "b")], {}, "^the query must not be empty"),
        ([([5], "b")], {}, "the query must be text, got list"),
        ([("a", "b")], {"truncate": 131}, "truncate_prompt_tokens must be -1 or from 1 to 130"),
        ([("a", "b")], {"max_tokens_per_doc": 0}, "max_tokens_per_doc must be from 1 to 130"),
        ([("a", "b")], {"priority": None}, "priority: expected Integral"),
    ],
)
async def test_bad_pairs_and_options_are_named(
    engine_of_ranker: AsyncEngine, pairs: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await engine_of_ranker.score(pairs, **options)
    assert_idle(engine_of_ranker)


async def test_what_a_model_cannot_do_is_refused_and_says_what_it_can(
    engine_of_ranker: AsyncEngine,
) -> None:
    engine = engine_of_ranker
    expected = "what it can do is classify, score"
    with pytest.raises(InvalidRequestError, match=f"does not generate text: {expected}"):
        await engine.generate("fox")
    with pytest.raises(InvalidRequestError, match=f"does not embed: {expected}"):
        await engine.embed(["fox"])
    with pytest.raises(InvalidRequestError, match=f"does not embed tokens: {expected}"):
        await engine.encode(["fox"], task="token_embed")
    wrong: Any = "plugin"
    with pytest.raises(InvalidRequestError, match="task must be one of embed, classify"):
        await engine.encode(["fox"], task=wrong)
    with pytest.raises(InvalidRequestError, match=r"input\[1\]: input must not be empty"):
        await engine.classify(["fox", ""])
    unknown: dict[str, Any] = {"chat": None}
    with pytest.raises(TypeError, match="classify has no option 'chat'"):
        await engine.classify(["fox"], **unknown)


SIGMOID = "torch.nn.modules.activation.Sigmoid"
IDENTITY = "torch.nn.modules.linear.Identity"


@pytest.mark.parametrize(
    ("fields", "own", "labels", "function"),
    [
        ({}, None, 1, torch.sigmoid),
        ({}, None, 3, lambda x: x.softmax(-1)),
        ({"problem_type": "multi_label_classification"}, None, 3, torch.sigmoid),
        ({"problem_type": "regression"}, None, 1, lambda x: x),
        ({"sentence_transformers": {"activation_fn": IDENTITY}}, None, 1, lambda x: x),
        ({"sbert_ce_default_activation_function": IDENTITY}, None, 1, lambda x: x),
        ({"sbert_ce_default_activation_function": IDENTITY}, SIGMOID, 1, torch.sigmoid),
        ({}, "torch.nn.modules.activation.Tanh", 1, torch.tanh),
    ],
)
async def test_the_activation_that_files_name_is_used(
    tmp_path: Path, fields: dict[str, Any], own: str | None, labels: int, function: Any
) -> None:
    directory = make_classifier(tmp_path, "bert", labels=labels, config_fields=fields)
    if own is not None:
        settings = {"activation_fn": own, "model_type": "CrossEncoder"}
        (directory / "config_sentence_transformers.json").write_text(json.dumps(settings))
    want = reference_logits(load_classifier_reference(directory), [5, 6, 7])
    async with AsyncEngine.open(small_config(directory)) as engine:
        (made,) = await engine.classify([[5, 6, 7]])
        check(made.probs, function(want))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"problem_type": "ranking"}, "problem_type must be one of regression"),
        ({"id2label": {"0": "a", "2": "b"}}, "id2label must be an object with a name"),
        ({"id2label": ["a"]}, "id2label must be an object with a name"),
        ({"sentence_transformers": {"activation_fn": "mine.Own"}}, "must be with one of Identity"),
        ({"auto_map": {"AutoModel": "own.Model"}}, "may give other scores; remote code is refused"),
    ],
)
async def test_what_a_checkpoint_asks_for_that_is_not_known_is_refused(
    tmp_path: Path, fields: dict[str, Any], message: str
) -> None:
    directory = make_classifier(tmp_path, "bert", config_fields=fields)
    with pytest.raises(ModelLoadError, match=message):
        async with AsyncEngine.open(small_config(directory)):
            pass


async def test_tasks_are_those_of_the_configuration(tmp_path: Path, ranker: Path) -> None:
    tasks = ("score",)
    async with AsyncEngine.open(small_config(ranker, model__tasks=tasks)) as engine:
        assert engine.model_info.tasks == ("score",)
        with pytest.raises(InvalidRequestError, match=r"does not classify: .* is score$"):
            await engine.classify(["fox"])
    config = small_config(ranker, model__tasks=("embed",))
    with pytest.raises(ConfigError, match="cannot embed; what it can do is classify, score"):
        async with AsyncEngine.open(config):
            pass
    directory = make_classifier(tmp_path, "bert", labels=2)
    config = small_config(directory, model__tasks=("score",))
    with pytest.raises(ConfigError, match=r"cannot score: a score needs .* one label, this has 2"):
        async with AsyncEngine.open(config):
            pass


async def test_a_model_that_embeds_scores_by_the_cosine(tmp_path: Path) -> None:
    directory = make_encoder(tmp_path, "bert")
    save_encoder_tokenizer(directory)
    save_modules(directory, pooling={"pooling_mode": "mean"}, normalizes=False)
    pairs = [("a small fox", text) for text in sentences(12, 10)]
    async with AsyncEngine.open(small_config(directory)) as engine:
        assert engine.model_info.tasks == ("embed", "score", "token_embed")
        made = await engine.score(pairs)
        texts = [text for pair in pairs for text in pair]
        vectors = [np.asarray(each.vector) for each in await engine.embed(texts)]
        computed = engine.metrics.value("vllm:prompt_tokens_total")
        await engine.score([("fox", "fox")] * 50)
        one = len(engine.tokenizer.encode("fox"))
        assert engine.metrics.value("vllm:prompt_tokens_total") == computed + one
        with pytest.raises(InvalidRequestError, match=r"pairs\[1\]: input must not be empty"):
            await engine.score([("fox", "a"), ("fox", "")])
    for number, result in enumerate(made):
        one, other = vectors[2 * number : 2 * number + 2]
        cosine = float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
        assert result.score == pytest.approx(cosine, abs=1e-5)


async def test_nobody_gets_the_labels_of_another(decoder: Path) -> None:
    """Hundreds of texts, with cancels, errors and deadlines between them."""
    reference, prompts = load_classifier_reference(decoder), random_prompts(60, longest=30, seed=11)
    wanted = [reference_logits(reference, prompt) for prompt in prompts]
    source, late = random.Random(3), 0
    config = small_config(decoder, cache__num_blocks=60, scheduler__max_num_batched_tokens=40)
    async with AsyncEngine.open(config) as engine:

        async def one(index: int) -> None:
            nonlocal late
            which = index % len(prompts)
            prompt, others = prompts[which], prompts[:which][-3:]
            if index % 7 == 0:
                with pytest.raises(InvalidRequestError, match=r"^input\[1\]: "):
                    await engine.classify([prompt, [320]])
                return
            timeout = 0.02 * source.random() if index % 5 == 0 else None
            try:
                made = await engine.classify(
                    [*others, prompt], use_activation=False, timeout=timeout
                )
            except DeadlineExceededError:
                late += 1
                return
            for result, want in zip(made, wanted[which - len(others) :], strict=False):
                check(result.probs, want)

        tasks = [asyncio.create_task(one(index)) for index in range(200)]
        for task in source.sample(tasks, 40):
            await asyncio.sleep(0.002)
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if result is not None and not isinstance(result, asyncio.CancelledError):
                raise result
        await until_idle(engine)
    assert late


async def test_scores_that_are_no_numbers_are_an_error_of_their_own(
    decoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = RowPooling.pool

    def broken(self: RowPooling, plan: StepPlan, hidden: torch.Tensor) -> Vectors | None:
        made = pool(self, plan, hidden)
        if made is not None:
            for row, vector in zip(made.rows, made.values, strict=True):
                if any(step.row == row and step.num_tokens == 7 for step in plan.rows):
                    vector.fill_(torch.nan)
        return made

    monkeypatch.setattr(RowPooling, "pool", broken)
    async with AsyncEngine.open(small_config(decoder)) as engine:
        bad = asyncio.create_task(engine.classify([[5] * 6, [9] * 7]))
        (good,) = await engine.classify([[6] * 6])
        with pytest.raises(GenerationError, match=r"^input\[1\]: .*no valid"):
            await bad
        assert good.prompt_tokens == 6
        assert_idle(engine)


async def test_a_plan_log_with_tasks_is_replayed(decoder: Path, tmp_path: Path) -> None:
    log = tmp_path / "plans.jsonl"
    config = small_config(
        decoder, observability__plan_log=str(log), scheduler__max_num_batched_tokens=20
    )
    async with AsyncEngine.open(config) as engine:
        await engine.classify(random_prompts(20, longest=60))
    lines = log.read_text().splitlines()
    added = [line for line in map(json.loads, lines) if line[0] == "add"]
    assert {line[-4] for line in added} == {"classify"}
    assert json.loads(lines[0])[1] == 6
    # A log of a version before, which had no tasks, and nothing behind them.
    older = [json.dumps(["limits", 4, json.loads(lines[0])[2]])]
    rest = [json.loads(line) for line in lines[1:]]
    older += [json.dumps(line[:-3] if line[0] == "add" else line) for line in rest]
    for kept in (lines, older):
        report = replay(read_lines(kept))
        assert report.difference is None
        assert report.stats.admissions == 20


# The most by which the numbers of a head differ from those of the float32 checkpoint, by norm: in
# bfloat16, with int8, with both. docs/tasks.md has them.
MOST_OF_LABELS = {
    "bert": (0.03, 0.04, 0.05),
    "modernbert": (0.03, 0.03, 0.04),
    "qwen3": (0.05, 0.08, 0.1),
    "gemma2": (0.1, 0.12, 0.2),
    "gemma3": (0.25, 0.25, 0.35),
}


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("name", MOST_OF_LABELS)
async def test_labels_of_rounded_weights_are_near(tmp_path: Path, name: str, kind: str) -> None:
    directory = make_classifier(tmp_path, name)
    changes, most = ROUNDED[kind], MOST_OF_LABELS[name][list(ROUNDED).index(kind)]
    reference, prompts = load_classifier_reference(directory), random_prompts(20, longest=60)
    async with AsyncEngine.open(small_config(directory, **changes)) as engine:
        made = await engine.classify(prompts, use_activation=False)
    got = torch.stack([torch.from_numpy(np.asarray(each.probs).copy()) for each in made]).double()
    want = torch.stack([reference_logits(reference, prompt) for prompt in prompts])
    assert (got - want).norm() < most * want.norm()
    assert (got.argmax(1) == want.argmax(1)).double().mean() > 0.9


def test_the_synchronous_front_has_all_tasks(ranker: Path, decoder: Path) -> None:
    pairs = [("fox", text) for text in sentences(20, 10)]
    with LLM(small_config(ranker, scheduler__max_waiting_requests=8)) as llm:
        scores = llm.score(pairs)
        (alone,) = llm.score([pairs[7]])
        (label,) = llm.classify("fox")
        assert len(llm.classify(["fox", "engine"])) == 2
    assert len(scores) == 20
    assert alone.score == pytest.approx(scores[7].score, abs=1e-5)
    assert label.labels == ("kind 0",)
    with LLM(small_config(decoder)) as llm:
        (made,) = llm.encode([5, 6, 7], task="classify")
        assert sum(made.values) == pytest.approx(1, abs=1e-6)


async def test_a_reward_is_of_the_whole_chat(tmp_path: Path) -> None:
    directory = make_classifier(tmp_path, "llama", labels=1)
    reference = load_classifier_reference(directory)
    chat = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "engine"}]
    async with AsyncEngine.open(small_config(directory)) as engine:
        (made,) = await engine.classify([chat], use_activation=False)
        text = "<|im_start|>user\nfox<|im_end|>\n<|im_start|>assistant\nengine<|im_end|>\n"
        ids = engine.tokenizer.encode(text, False)
        check(made.probs, reference_logits(reference, ids))
        # As of token ids, the first tokens are kept.
        (cut,) = await engine.classify([chat], use_activation=False, truncate=5)
        assert cut.prompt_tokens == 5
        check(cut.probs, reference_logits(reference, ids[:5]))


async def test_what_a_long_text_gets_is_finished_beside_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make_classifier(tmp_path, "bert", TOKEN)
    reference = load_classifier_reference(directory, TOKEN)
    made, threads = task_runs.activated, []

    def noted(*arguments: Any) -> bytes:
        threads.append(threading.current_thread())
        return made(*arguments)

    monkeypatch.setattr(task_runs, "activated", noted)
    monkeypatch.setattr(embedding_run, "_INLINE_NUMBERS", 3 * 12)
    # Blocks of rows, the last of which is not whole.
    monkeypatch.setattr(task_runs, "_BLOCK", 3 * 5)
    async with AsyncEngine.open(small_config(directory)) as engine:
        short, long = await engine.encode([[5] * 12, [6] * 13], task="token_classify")
    for tokens, result in (([5] * 12, short), ([6] * 13, long)):
        want = reference_logits(reference, tokens).softmax(-1)
        check(np.array(result.values).reshape(len(tokens), -1), want)
    assert [each is threading.current_thread() for each in threads] == [True, False]


async def test_text_streams_beside_vectors_of_tokens(tmp_path: Path) -> None:
    """Rows of both are preempted, since memory holds few of them."""
    directory = make_checkpoint(tmp_path, "qwen3", tokenizer=True)
    reference, params = load_reference(directory), SamplingParams(temperature=0, max_tokens=40)
    prompts, asked = random_prompts(30, longest=40, seed=2), random_prompts(12, longest=9, seed=3)
    config = small_config(directory, cache__num_blocks=40, scheduler__max_num_batched_tokens=9)
    async with AsyncEngine.open(config) as engine:
        assert engine.model_info.tasks == ("generate", "embed", "token_embed")
        texts = asyncio.gather(*(engine.generate(prompt, params) for prompt in asked))
        made = await engine.encode(prompts, task="token_embed")
        embedded = await engine.encode(prompts[:1], task="embed")
        results = await texts
        assert engine.stats.preemptions
        assert_idle(engine)
    check(np.asarray(made[0].values)[-1], torch.from_numpy(np.array(embedded[0].values)).double())
    for prompt, encoding in zip(prompts, made, strict=True):
        with torch.inference_mode():
            want = reference.model(torch.tensor([prompt])).last_hidden_state[0].double()
        check(encoding.values, want)
    for prompt, result in zip(asked, results, strict=True):
        assert result.token_ids == greedy(reference, prompt, 40)
