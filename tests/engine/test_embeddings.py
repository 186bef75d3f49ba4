"""Vectors through the whole engine, against transformers on the same weights."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from src import LLM, SamplingParams
from src.core.errors import (
    ConfigError,
    DeadlineExceededError,
    GenerationError,
    InvalidRequestError,
    ModelLoadError,
    PromptTooLongError,
    RequestAbortedError,
)
from src.core.plan import StepPlan
from src.engine.client import AsyncEngine
from src.engine.execution.pooling import RowPooling, Vectors
from src.engine.scheduling.replay import AddLine, PlanLine, read_lines, replay
from tests.architectures.tiny import make_tiny_encoder
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.encoders import (
    load_encoder_reference,
    make_encoder,
    save_dense,
    save_encoder_tokenizer,
    save_modules,
)
from tests.support.engines import (
    assert_idle,
    greedy,
    random_prompts,
    small_config,
    until_idle,
)

pytestmark = pytest.mark.anyio

TOLERANCE = 1e-4
LEAST_COSINE = 1 - 1e-5
MEAN = {"pooling_mode": "mean"}
CLS = {"pooling_mode": "cls"}


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = make_encoder(tmp_path_factory.mktemp("encoder") / "tiny", "bert")
    save_encoder_tokenizer(directory)
    save_modules(directory, pooling=MEAN, max_seq_length=100, prompts={"query": "query: "})
    return directory


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("decoder") / "tiny", "qwen3", tokenizer=True)


@torch.inference_mode()
def states(reference: Any, tokens: list[int]) -> torch.Tensor:
    return reference(torch.tensor([tokens])).last_hidden_state[0].double()


def check(got: list[float], want: torch.Tensor) -> None:
    vector = torch.tensor(got, dtype=torch.float64)
    torch.testing.assert_close(vector, want, rtol=TOLERANCE, atol=TOLERANCE)
    assert torch.nn.functional.cosine_similarity(vector, want, dim=0) > LEAST_COSINE


def unit(vector: torch.Tensor) -> torch.Tensor:
    return vector / vector.norm()


@pytest.mark.parametrize("depth", [1, 2])
async def test_vectors_of_an_encoder_are_the_means_that_transformers_gives(
    encoder: Path, depth: int
) -> None:
    reference = load_encoder_reference(encoder)
    prompts = random_prompts(40, longest=60, seed=5)
    config = small_config(
        encoder, scheduler__pipeline_depth=depth, scheduler__max_num_batched_tokens=130
    )
    async with AsyncEngine.open(config) as engine:
        together = await engine.embed(prompts)
        alone = [(await engine.embed([prompt]))[0] for prompt in prompts[:5]]
        assert_idle(engine)
    for prompt, embedding in zip(prompts, together, strict=True):
        check(embedding.vector, unit(states(reference, prompt).mean(0)))
        assert embedding.prompt_tokens == len(prompt)
    for first, second in zip(alone, together[:5], strict=True):
        assert first.vector == pytest.approx(second.vector, abs=1e-5)


@pytest.mark.parametrize("name", ["roberta", "distilbert"])
async def test_raw_vectors_of_the_first_token(tmp_path: Path, name: str) -> None:
    directory = make_encoder(tmp_path, name)
    save_encoder_tokenizer(directory)
    save_modules(directory, pooling=CLS, normalizes=False)
    reference, prompts = load_encoder_reference(directory), random_prompts(9, longest=50)
    async with AsyncEngine.open(small_config(directory)) as engine:
        for prompt, embedding in zip(prompts, await engine.embed(prompts), strict=True):
            check(embedding.vector, states(reference, prompt)[0])


@pytest.mark.parametrize("pooling", ["first", "last", "mean"])
@pytest.mark.parametrize(("budget", "drafts"), [(7, "off"), (256, "off"), (60, "suffix")])
async def test_a_decoder_embeds_in_chunks_beside_streams_of_text(
    decoder: Path, tmp_path: Path, pooling: str, budget: int, drafts: str
) -> None:
    shutil.copytree(decoder, tmp_path, dirs_exist_ok=True)
    if pooling != "last":
        save_modules(tmp_path, pooling=CLS if pooling == "first" else MEAN, normalizes=False)
    whole = load_reference(decoder)
    prompts, asked = random_prompts(20, longest=60, seed=3), random_prompts(6, longest=20, seed=4)
    params = SamplingParams(temperature=0, max_tokens=12)
    config = small_config(
        tmp_path, scheduler__max_num_batched_tokens=budget, speculation__method=drafts
    )
    async with AsyncEngine.open(config) as engine:
        texts = asyncio.gather(*(engine.generate(prompt, params) for prompt in asked))
        first = await engine.embed(prompts)
        # Their prefixes are cached by now.
        second = await engine.embed(prompts)
        results = await texts
        assert_idle(engine)
    for prompt, result in zip(asked, results, strict=True):
        assert result.token_ids == greedy(whole, prompt, 12)
    for prompt, one, other in zip(prompts, first, second, strict=True):
        hidden = states(whole.model, prompt)
        want = {"first": hidden[0], "last": hidden[-1], "mean": hidden.mean(0)}[pooling]
        check(one.vector, want)
        check(other.vector, want)
    long = [index for index, prompt in enumerate(prompts) if len(prompt) > 8]
    assert all((second[index].cached_tokens > 0) == (pooling == "last") for index in long)


async def test_a_text_may_be_as_long_as_the_context(encoder: Path, tmp_path: Path) -> None:
    directory = make_encoder(tmp_path, "bert")
    save_encoder_tokenizer(directory)
    prompt = random.Random(1).choices(range(3, 320), k=130)
    async with AsyncEngine.open(small_config(directory)) as engine:
        (embedding,) = await engine.embed([prompt])
        check(embedding.vector, states(load_encoder_reference(directory), prompt).mean(0))
        with pytest.raises(PromptTooLongError, match=r"131 tokens.* up to 130"):
            await engine.embed([[*prompt, 5]])


async def test_what_is_cut_keeps_the_first_tokens_and_the_special_ones(encoder: Path) -> None:
    text = "the quick brown fox jumps over the lazy dog " * 20
    async with AsyncEngine.open(small_config(encoder)) as engine:
        whole = await engine.tokenize("fox " * 3)
        assert (whole[0], whole[-1]) == (1, 2)
        with pytest.raises(PromptTooLongError, match=r"input has \d+ tokens.* up to 100"):
            await engine.embed([text])
        for keeps, count in ((-1, 100), (100, 100), (10, 10), (3, 3)):
            (cut,) = await engine.embed([text], truncate=keeps)
            own = engine.tokenizer.encode(text, False)[: count - 2]
            (same,) = await engine.embed([[1, *own, 2]])
            assert cut.prompt_tokens == count
            assert cut.vector == pytest.approx(same.vector, abs=1e-5)
        (plain,) = await engine.embed([text], truncate=10, add_special_tokens=False)
        (same,) = await engine.embed([engine.tokenizer.encode(text, False)[:10]])
        assert plain.vector == pytest.approx(same.vector, abs=1e-5)


async def test_a_prompt_of_the_checkpoint_is_put_before_a_text(encoder: Path) -> None:
    async with AsyncEngine.open(small_config(encoder)) as engine:
        (named,) = await engine.embed(["fox"], prompt_name="query")
        (written,) = await engine.embed(["query: fox"])
        (plain,) = await engine.embed(["fox"])
        assert named.vector == pytest.approx(written.vector, abs=1e-5)
        assert named.vector != pytest.approx(plain.vector, abs=1e-3)
        with pytest.raises(InvalidRequestError, match=r"prompt_name must be .*\(query\)"):
            await engine.embed(["fox"], prompt_name="passage")


@pytest.mark.parametrize(
    ("texts", "options", "message"),
    [
        ([], {}, "input must not be an empty list"),
        (["fox", ""], {}, r"input\[1\]: input must not be empty"),
        ([[]], {}, "input must not be empty"),
        ([[3], [320]], {}, r"input\[1\]: input token ids must be from 0 to 319, got 320"),
        (["fox"], {"dimensions": 32}, "dimensions must be 64: this model does not say"),
        (["fox"], {"truncate": 101}, "truncate_prompt_tokens must be -1 or from 1 to 100"),
        (["fox"], {"priority": 2**63}, "priority must be"),
        (["fox"], {"priority": None}, "priority: expected Integral"),
        (["fox"], {"cache_salt": 5}, "cache_salt: expected str"),
    ],
)
async def test_bad_texts_and_options_are_named(
    engine_of_encoder: AsyncEngine, texts: list[Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await engine_of_encoder.embed(texts, **options)
    assert_idle(engine_of_encoder)


async def test_an_unknown_option_is_a_type_error(engine_of_encoder: AsyncEngine) -> None:
    options: dict[str, Any] = {"chat": None}
    with pytest.raises(TypeError, match="embed has no option 'chat'; there are request_id, "):
        await engine_of_encoder.embed(["fox"], **options)


@pytest.fixture
async def engine_of_encoder(encoder: Path) -> AsyncIterator[AsyncEngine]:
    async with AsyncEngine.open(small_config(encoder)) as engine:
        yield engine


async def test_vectors_are_cut_before_they_are_normalized(tmp_path: Path) -> None:
    fields = {"matryoshka_dimensions": [16, 32]}
    directory = make_encoder(tmp_path, "bert", config_fields=fields)
    save_encoder_tokenizer(directory)
    save_modules(directory, pooling=MEAN)
    mean = states(load_encoder_reference(directory), [5, 6, 7]).mean(0)
    async with AsyncEngine.open(small_config(directory)) as engine:
        (cut,) = await engine.embed([[5, 6, 7]], dimensions=16)
        check(cut.vector, unit(mean[:16]))
        with pytest.raises(InvalidRequestError, match="one of 16, 32"):
            await engine.embed([[5, 6, 7]], dimensions=17)


@pytest.mark.parametrize("name", ["encoder", "decoder"])
async def test_projections_behind_the_pooling(
    encoder: Path, decoder: Path, tmp_path: Path, name: str
) -> None:
    shutil.copytree(encoder if name == "encoder" else decoder, tmp_path, dirs_exist_ok=True)
    save_modules(tmp_path, pooling=MEAN, behind=["Dense", "Dense", "Normalize"])
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "is_matryoshka": True}))
    tanh = "torch.nn.modules.activation.Tanh"
    wide = save_dense(tmp_path / "2_Dense", 64, 160, activation=tanh)
    last = save_dense(tmp_path / "3_Dense", 160, 96, bias=False)
    encodes = name == "encoder"
    reference = load_encoder_reference(tmp_path) if encodes else load_reference(tmp_path).model
    prompts = random_prompts(12, longest=50, seed=2)
    async with AsyncEngine.open(small_config(tmp_path)) as engine:
        made = await engine.embed(prompts)
        # Tokens are not projected, and have as many numbers as a hidden state.
        of_tokens = await engine.encode(prompts, task="token_embed", use_activation=False)
        scaled = await engine.encode(prompts, task="token_embed")
        cut = await engine.embed(prompts, dimensions=80)
        assert engine.model_info.embedding is not None
        assert engine.model_info.embedding.size == 96
        with pytest.raises(InvalidRequestError, match="up to 96"):
            await engine.embed(prompts, dimensions=97)
    weight, bias = (each.double() for each in wide.values())
    for prompt, embedding, short in zip(prompts, made, cut, strict=True):
        inner = (weight @ states(reference, prompt).mean(0) + bias).tanh()
        want = last["linear.weight"].double() @ inner
        check(embedding.vector, unit(want))
        check(short.vector, unit(want[:80]))
    for prompt, raw, whole in zip(prompts, of_tokens, scaled, strict=True):
        wanted = states(reference, prompt)
        assert raw.shape == whole.shape == tuple(wanted.shape)
        for got, state in zip(raw.values.tolist(), wanted, strict=True):
            check(got, state)
        for got, state in zip(whole.values.tolist(), wanted, strict=True):
            check(got, unit(state))


async def test_a_decoder_without_the_weights_of_its_projection_gives_no_vectors(
    decoder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(decoder, tmp_path, dirs_exist_ok=True)
    save_modules(tmp_path, pooling=MEAN, behind=["Dense"])
    save_dense(tmp_path / "2_Dense", 64, 32)
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    async with AsyncEngine.open(small_config(tmp_path)) as engine:
        assert engine.model_info.tasks == ("generate",)
    assert caplog.text.count("gives no vectors: ") == 1


async def test_an_encoder_says_that_it_does_not_generate(engine_of_encoder: AsyncEngine) -> None:
    with pytest.raises(InvalidRequestError, match="what it can do is embed"):
        await engine_of_encoder.generate("fox")


async def test_a_decoder_whose_module_is_not_known_generates_all_the_same(
    decoder: Path, encoder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    package, kinds = "sentence_transformers.models", ("Transformer", "Pooling", "CNN")
    modules = [
        {"idx": index, "name": kind, "path": kind if index else "", "type": f"{package}.{kind}"}
        for index, kind in enumerate(kinds)
    ]
    for saved, name in ((decoder, "decoder"), (encoder, "encoder")):
        shutil.copytree(saved, tmp_path / name)
        save_modules(tmp_path / name, pooling=MEAN, modules=modules)
    prompt = random_prompts(1, longest=20)[0]
    async with AsyncEngine.open(small_config(tmp_path / "decoder")) as engine:
        assert engine.model_info.tasks == ("generate",)
        result = await engine.generate(prompt, SamplingParams(temperature=0, max_tokens=6))
        assert result.token_ids == greedy(load_reference(decoder), prompt, 6)
        with pytest.raises(InvalidRequestError, match="does not embed"):
            await engine.embed([prompt])
    assert "gives no vectors: " in caplog.text
    assert "models.CNN" in caplog.text
    with pytest.raises(ModelLoadError, match=r"models\.CNN"):
        async with AsyncEngine.open(small_config(tmp_path / "encoder")):
            pass


async def test_a_budget_that_is_shorter_than_a_text_refuses_the_start(encoder: Path) -> None:
    config = small_config(encoder, scheduler__max_num_batched_tokens=100)
    with pytest.raises(ConfigError, match=r"= 100 is less than the model's context of 130 tokens"):
        async with AsyncEngine.open(config):
            pass


ROUNDED = {
    "bfloat16": {"model__dtype": "bfloat16"},
    "int8": {"model__dtype": "float32", "model__quantization": "int8"},
    "int8 in bfloat16": {"model__dtype": "bfloat16", "model__quantization": "int8"},
}
# Least cosine to the vectors of the float32 checkpoint, in this order; docs/tasks.md has them.
LEAST_COSINES = {
    "bert": (0.9998, 0.9995, 0.999),
    "modernbert": (0.9998, 0.9998, 0.9995),
    "gemma3_text": (0.9998, 0.9995, 0.999),
    "qwen3": (0.999, 0.998, 0.997),
}


def least_cosine(name: str, kind: str) -> float:
    return LEAST_COSINES[name][list(ROUNDED).index(kind)]


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("name", ["encoder", "decoder"])
async def test_vectors_of_rounded_weights_point_where_those_of_the_checkpoint_do(
    encoder: Path, decoder: Path, name: str, kind: str
) -> None:
    path = encoder if name == "encoder" else decoder
    least = least_cosine("bert" if name == "encoder" else "qwen3", kind)
    prompts = random_prompts(20, longest=60, seed=6)
    async with AsyncEngine.open(small_config(path, **ROUNDED[kind])) as engine:
        made = await engine.embed(prompts)
    encodes = load_encoder_reference(path) if name == "encoder" else None
    reference = encodes or load_reference(path).model
    hidden = [states(reference, prompt) for prompt in prompts]
    wanted = torch.stack([unit(each.mean(0)) if encodes else each[-1] for each in hidden])
    for index, embedding in enumerate(made):
        vector = torch.tensor(embedding.vector, dtype=torch.float64)
        cosines = torch.nn.functional.cosine_similarity(vector[None], wanted)
        assert cosines[index] > least
        assert int(cosines.argmax()) == index
        torch.testing.assert_close(vector.norm(), wanted[index].norm(), rtol=0.01, atol=0)


@pytest.mark.parametrize("name", ["encoder", "decoder"])
async def test_nobody_gets_the_vector_of_another(name: str, encoder: Path, decoder: Path) -> None:
    """Hundreds of vectors and texts, with cancels, errors and deadlines between them.

    What is left is what it was.
    """
    path, encodes = (encoder, True) if name == "encoder" else (decoder, False)
    reference = load_encoder_reference(path) if encodes else load_reference(path)
    prompts = random_prompts(60, longest=30, seed=11)
    wanted = [
        unit(states(reference, prompt).mean(0)) if encodes else states(reference.model, prompt)[-1]
        for prompt in prompts
    ]
    source = random.Random(3)
    params = SamplingParams(temperature=0, max_tokens=6)
    tight = {"cache__num_blocks": 60, "scheduler__max_num_batched_tokens": 40}
    changes = {"scheduler__max_num_batched_tokens": 130} if encodes else tight
    late = 0
    async with AsyncEngine.open(small_config(path, **changes)) as engine:

        async def one(index: int) -> None:
            nonlocal late
            which = index % len(prompts)
            prompt, others = prompts[which], prompts[:which][-3:]
            if index % 3 == 0 and not encodes:
                result = await engine.generate(prompt, params)
                assert result.token_ids == greedy(reference, prompt, 6)
                return
            if index % 7 == 0:
                with pytest.raises(InvalidRequestError, match=r"^input\[1\]: "):
                    await engine.embed([prompt, [320]])
                return
            timeout = 0.02 * source.random() if index % 5 == 0 else None
            try:
                made = await engine.embed([*others, prompt], priority=index % 2, timeout=timeout)
            except DeadlineExceededError:
                assert timeout is not None
                late += 1
                return
            for embedding, want in zip(made, wanted[which - len(others) :], strict=False):
                check(embedding.vector, want)

        tasks = [asyncio.create_task(one(index)) for index in range(240)]
        for task in source.sample(tasks, 40):
            await asyncio.sleep(0.002)
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        for result in ended:
            if result is not None and not isinstance(result, asyncio.CancelledError):
                raise result
        await until_idle(engine)
    assert late


@pytest.mark.parametrize("name", ["encoder", "decoder"])
async def test_a_vector_among_63_others_is_that_of_its_text_alone(
    name: str, encoder: Path, decoder: Path, tmp_path: Path
) -> None:
    path, log = encoder if name == "encoder" else decoder, tmp_path / "plans.jsonl"
    prompts = random_prompts(64, longest=30, seed=14)
    config = small_config(
        path,
        model__deterministic=True,
        observability__plan_log=str(log),
        scheduler__max_num_seqs=64,
    )
    async with AsyncEngine.open(config) as engine:
        alone = [(await engine.embed([prompt]))[0].vector for prompt in prompts]
        # As the texts come, and in another order, where each has another row.
        made = [each.vector for each in await engine.embed(prompts)]
        turned = [each.vector for each in await engine.embed(prompts[::-1])]
        assert_idle(engine)
    assert made == alone
    assert turned[::-1] == alone
    with log.open() as text:
        plans = [line for line in read_lines(text) if isinstance(line, PlanLine)]
    assert [len(plan.rows) for plan in plans if len(plan.rows) > 1] == [64, 64]
    reference = load_encoder_reference(path) if name == "encoder" else load_reference(path).model
    for prompt, vector in zip(prompts, made, strict=True):
        want = states(reference, prompt)
        check(vector, unit(want.mean(0)) if name == "encoder" else want[-1])


async def test_tenants_share_an_encoder_whose_texts_are_longer_than_their_shares(
    encoder: Path,
) -> None:
    reference, prompts = load_encoder_reference(encoder), random_prompts(24, longest=90, seed=8)
    config = small_config(encoder, scheduler__max_num_batched_tokens=130)
    async with AsyncEngine.open(config) as engine:
        made = await asyncio.gather(
            *(
                engine.embed([prompt], tenant=f"tenant {index % 4}")
                for index, prompt in enumerate(prompts)
            )
        )
        assert_idle(engine)
    for prompt, (embedding,) in zip(prompts, made, strict=True):
        check(embedding.vector, unit(states(reference, prompt).mean(0)))


async def test_a_plan_log_with_vectors_is_replayed(encoder: Path, tmp_path: Path) -> None:
    log = tmp_path / "plans.jsonl"
    config = small_config(
        encoder, observability__plan_log=str(log), scheduler__max_num_batched_tokens=130
    )
    async with AsyncEngine.open(config) as engine:
        await engine.embed(random_prompts(20, longest=60))
    with log.open() as lines:
        report = replay(read_lines(lines))
    assert report.difference is None
    assert report.stats.admissions == 20


async def test_a_lone_query_waits_a_step_behind_calls_of_many_texts(
    encoder: Path, tmp_path: Path
) -> None:
    """In steps, as the plan log has them."""
    log = tmp_path / "plans.jsonl"
    config = small_config(
        encoder, observability__plan_log=str(log), scheduler__max_num_batched_tokens=130
    )
    async with AsyncEngine.open(config) as engine:
        calls = [asyncio.create_task(engine.embed([[5 + n] * 60] * 70)) for n in range(4)]
        while engine.stats.num_waiting < 150:
            await asyncio.sleep(0)
        await engine.embed([[9] * 10])
        assert not any(call.done() for call in calls)
        await asyncio.gather(*calls)
    with log.open() as text:
        lines = list(read_lines(text))
    adds = [line for line in lines if isinstance(line, AddLine)]
    (alone,) = [line for line in adds if line.call is None]
    assert {line.call for line in adds if line is not alone} == {
        min(line.key for line in adds if line.token_ids[0] == first)
        for first in {line.token_ids[0] for line in adds if line is not alone}
    }
    behind = [line for line in lines[lines.index(alone) :] if isinstance(line, PlanLine)]
    waited = next(
        at for at, plan in enumerate(behind) if alone.key in [each[2] for each in plan.installs]
    )
    assert waited <= 1
    assert replay(lines).difference is None


async def test_a_vector_that_is_no_number_is_an_error_of_its_own(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = RowPooling.pool

    def broken(self: RowPooling, plan: StepPlan, hidden: torch.Tensor) -> Vectors | None:
        made = pool(self, plan, hidden)
        if made is not None:
            for row, vector in zip(made.rows, made.values, strict=True):
                if any(step.row == row and step.num_tokens == 7 for step in plan.rows):
                    vector[3] = torch.inf
        return made

    monkeypatch.setattr(RowPooling, "pool", broken)
    async with AsyncEngine.open(small_config(encoder)) as engine:
        bad = asyncio.create_task(engine.embed([[5] * 6, [5] * 7, *[[5] * 8] * 300]))
        good = await engine.embed([[5] * 6])
        with pytest.raises(GenerationError, match=r"^input\[1\]: .*no valid vector") as raised:
            await bad
        assert (raised.value.param, raised.value.code) == ("input", "invalid_vector")
        assert good[0].prompt_tokens == 6
        with pytest.raises(GenerationError, match=r"^the model gave no valid vector"):
            await engine.embed([[5] * 7])
        await until_idle(engine)
        # Texts behind the bad one were dropped.
        assert engine.metrics.value("vllm:prompt_tokens_total") < 150 * 8


async def test_an_abort_ends_all_texts_of_a_request(engine_of_encoder: AsyncEngine) -> None:
    texts = random_prompts(300, longest=60)
    task = asyncio.create_task(engine_of_encoder.embed(texts, request_id="mine"))
    while not engine_of_encoder.abort("mine"):
        await asyncio.sleep(0)
    with pytest.raises(RequestAbortedError):
        await task
    await until_idle(engine_of_encoder)


async def test_one_call_takes_little_of_the_queue(encoder: Path) -> None:
    """More texts than the queue holds, and room for others meanwhile."""
    prompts = random_prompts(300, longest=20)
    async with AsyncEngine.open(
        small_config(encoder, scheduler__max_waiting_requests=100)
    ) as engine:
        many = asyncio.create_task(engine.embed(prompts))
        while not engine.stats.num_waiting:
            await asyncio.sleep(0)
        (alone,) = await engine.embed([prompts[250]])
        assert not many.done()
        made = await many
        assert_idle(engine)
    assert [each.prompt_tokens for each in made] == [len(prompt) for prompt in prompts]
    assert made[250].vector == pytest.approx(alone.vector, abs=1e-5)


async def test_a_decoder_cuts_the_longest_texts_where_it_is_asked_to(decoder: Path) -> None:
    text = "the quick brown fox " * 2000
    async with AsyncEngine.open(small_config(decoder)) as engine:
        (cut,) = await engine.embed([text], truncate=-1)
        assert cut.prompt_tokens == 256


@pytest.mark.parametrize("texts", ["fox", b"fox", [5, 6], [b"fox"], [None], 7])
async def test_texts_of_a_wrong_type_are_refused(
    engine_of_encoder: AsyncEngine, texts: Any
) -> None:
    with pytest.raises(InvalidRequestError, match="input must be"):
        await engine_of_encoder.embed(texts)


def test_the_synchronous_front_embeds_more_texts_than_the_queue_holds(encoder: Path) -> None:
    prompts = random_prompts(30, longest=20)
    with LLM(small_config(encoder, scheduler__max_waiting_requests=8)) as llm:
        many = llm.embed(prompts)
        (one,) = llm.embed(prompts[7])
    assert [each.prompt_tokens for each in many] == [len(prompt) for prompt in prompts]
    assert one.vector == pytest.approx(many[7].vector, abs=1e-5)


def test_the_synchronous_front_holds_few_tokens_at_a_time(
    encoder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [*random_prompts(20, longest=20), [5] * 90, *random_prompts(20, longest=20, seed=9)]
    held: list[int] = []
    embed = AsyncEngine.embed

    async def noted(self: AsyncEngine, texts: list[Any], **options: Any) -> Any:
        held.append(sum(map(len, texts)))
        return await embed(self, texts, **options)

    monkeypatch.setattr(AsyncEngine, "embed", noted)
    with LLM(small_config(encoder, scheduler__max_waiting_tokens=60)) as llm:
        made = llm.embed(prompts)
        assert llm.embed([]) == []
    assert [each.prompt_tokens for each in made] == [len(prompt) for prompt in prompts]
    assert sum(held) == sum(map(len, prompts))
    assert [count for count in held if count > 60] == [90]


async def test_queries_and_documents_have_the_prompts_of_the_checkpoint(
    encoder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As sentence-transformers' `encode_query` and `encode_document`, without the default."""
    caplog.set_level("INFO")
    pairs = [("fox", "the lazy dog"), ("dog", "dog"), ("fox", "dog")]
    cases: list[tuple[dict[str, str], str, str]] = [
        ({"query": "query: ", "passage": "passage: ", "corpus": "no "}, "query: ", "passage: "),
        ({"query": "q: ", "document": "doc: ", "passage": "no "}, "q: ", "doc: "),
        ({"query": "q: ", "other": "none: "}, "q: ", ""),
        ({"other": "none: "}, "", ""),
    ]
    for number, (prompts, before, behind) in enumerate(cases):
        directory = tmp_path / f"{number}"
        shutil.copytree(encoder, directory)
        save_modules(directory, pooling=MEAN, prompts=prompts)
        own = directory / "config_sentence_transformers.json"
        told = json.loads(own.read_text()) | {"default_prompt_name": list(prompts)[-1]}
        own.write_text(json.dumps(told))
        reference = load_encoder_reference(directory)
        caplog.clear()
        async with AsyncEngine.open(small_config(directory)) as engine:
            made = await engine.score(pairs)
            encode = engine.tokenizer.encode
        for text in filter(None, (before, behind)):
            assert repr(text) in caplog.text
        for (query, document), score in zip(pairs, made, strict=True):
            ids = encode(before + query), encode(behind + document)
            one, other = (states(reference, each).mean(0) for each in ids)
            want = float(torch.nn.functional.cosine_similarity(one, other, dim=0))
            assert score.score == score.raw == pytest.approx(want, abs=TOLERANCE)
            assert score.prompt_tokens == sum(map(len, ids))


async def test_a_cut_leaves_a_token_of_the_text(encoder: Path) -> None:
    async with AsyncEngine.open(small_config(encoder)) as engine:
        tokens = engine.tokenizer.encode("query: ", add_special_tokens=False)
        text = "the lazy dog jumps over the quick brown fox"
        whole = engine.tokenizer.encode(f"query: {text}", add_special_tokens=False)
        # The last one of the prompt alone may be one with the text's first.
        pairs = enumerate(zip(tokens, whole, strict=False))
        prompt = next((number for number, (a, b) in pairs if a != b), len(tokens))
        assert prompt >= len(tokens) - 1 > 0
        for truncate, asked in (
            (2, {}),
            (1, {}),
            (2 + prompt, {"prompt_name": "query"}),
            (1 + prompt, {"prompt_name": "query"}),
        ):
            with pytest.raises(InvalidRequestError, match="leaves no token of the text") as caught:
                await engine.embed([text], truncate=truncate, **asked)
            assert caught.value.param == "truncate_prompt_tokens"
        (made,) = await engine.embed([text], truncate=3 + prompt, prompt_name="query")
        assert made.prompt_tokens == 3 + prompt
        (made,) = await engine.embed([text], truncate=3)
        (bare,) = await engine.embed([text], truncate=1, add_special_tokens=False)
        assert (made.prompt_tokens, bare.prompt_tokens) == (3, 1)
        with pytest.raises(InvalidRequestError, match="not with token ids") as caught:
            await engine.embed([[5, 6]], prompt_name="query")
        assert caught.value.param == "prompt_name"
        assert_idle(engine)


@pytest.mark.parametrize("name", ["roberta", "camembert"])
async def test_a_text_with_a_token_that_has_no_position_is_refused(
    tmp_path: Path, name: str
) -> None:
    """Computed by us and by transformers; padding behind a text is refused alike."""
    if name == "roberta":
        make_encoder(tmp_path, name)
    else:
        make_tiny_encoder(tmp_path, name)
    config = json.loads((tmp_path / "config.json").read_text())
    padding = config["pad_token_id"]
    save_encoder_tokenizer(tmp_path)
    reference, good = load_encoder_reference(tmp_path), [7, 9, 11, 8]
    async with AsyncEngine.open(small_config(tmp_path, model__max_model_len=100)) as engine:
        assert engine.model_info.uncounted_id == padding
        pad = engine.tokenizer.id_to_token(padding)
        for text in ([7, padding, 9], [7, 9, padding], f"fox {pad} dog"):
            with pytest.raises(InvalidRequestError, match="has the padding token") as caught:
                await engine.embed([good, text])
            assert caught.value.param == "input"
            assert "input[1]" in caught.value.message
        (made,) = await engine.embed([good])
    check(made.vector, states(reference, good).mean(0))
