"""Without `model.deterministic`: drafts do not change how the tokens of a row are rounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from src import AsyncEngine, SamplingParams
from tests.engine.speculation.adversary import Adversary
from tests.engine.speculation.test_exactness import answer, ask, config, speculating, texts
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_idle, random_prompts
from tests.support.probe import Probe

pytestmark = pytest.mark.anyio

# Prompts of one row, long enough for two splits of keys, and of four rows that compute together.
LENGTHS = {1: (3, 16, 17, 18, 250), 4: (3, 4, 5, 2, 5)}
# With 28 tokens and more, weights that are multiplied in float32 take another way on some CPUs.
# Here four rows and their drafts are fewer, and so are all prompts together.
MOST_TOKENS = {1: 1024, 4: 27}


# Heads of whole vectors, and several for each key head: attention has another path for one token of
# such a row than for many, in every dtype.
HEADS = {
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
CHANGES: dict[str, dict[str, Any]] = {
    "llama": HEADS,
    "gemma3": HEADS,
    # Behind a wrong draft a row computes the right ones again, for its recurrent states.
    "lfm2": {
        **HEADS,
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "full_attention", "full_attention"],
    },
    "deepseekv3": {},
}
# How each is computed: by mixers in Python, or in one call of the kernel library.
EAGER = {"compile__enforce_eager": True}
ONE_CALL = {"compile__enforce_eager": False, "compile__startup": "wait"}


@pytest.mark.parametrize(
    ("family", "dtype", "rows", "computed"),
    [
        *(
            (family, dtype, rows, EAGER)
            for family in ("llama", "gemma3")
            for dtype in ("bfloat16", "float16")
            for rows in (1, 4)
        ),
        # What several rows compute again may be more tokens than a step has elsewhere.
        *(("lfm2", dtype, 1, EAGER) for dtype in ("bfloat16", "float16")),
        pytest.param("llama", "bfloat16", 1, ONE_CALL, marks=pytest.mark.compilers),
        pytest.param("lfm2", "bfloat16", 1, ONE_CALL, marks=pytest.mark.compilers),
        pytest.param("deepseekv3", "bfloat16", 1, ONE_CALL, marks=pytest.mark.compilers),
    ],
)
async def test_drafts_do_not_change_a_bit(
    family: str,
    dtype: str,
    rows: int,
    computed: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where projections have one order of sums, which plain weights of 16 bits have."""
    changes = {"max_position_embeddings": 512, **CHANGES[family]}
    path = make_checkpoint(tmp_path, family, tokenizer=True, **changes)
    prompts = [random_prompts(1, longest=n, seed=n)[0] for n in LENGTHS[rows]]
    params = [
        SamplingParams(temperature=heat, seed=at, max_tokens=40, ignore_eos=True, logprobs=2)
        for at, heat in enumerate((0.0, 0.7, 1.0, 1.3, 0.0))
    ]
    asked = list(zip(prompts, params, strict=True))
    settings: dict[str, Any] = {
        "model__deterministic": False,
        "model__dtype": dtype,
        "scheduler__max_num_seqs": rows,
        "scheduler__max_num_batched_tokens": MOST_TOKENS[rows],
        "model__max_model_len": 512,
        "cache__num_blocks": 400,
        **computed,
    }
    async with AsyncEngine.open(config(path, **settings)) as engine:
        expected = await ask(engine, asked)
    adversary = Adversary(texts(asked, expected), seed=rows)
    settings |= speculating(monkeypatch, adversary)
    settings["speculation__num_speculative_tokens"] = 16
    async with AsyncEngine.open(config(path, **settings)) as engine:
        assert (Probe(engine).computer.code.step is not None) == (computed is ONE_CALL)
        drafted = await ask(engine, asked)
        _, accepted = engine.metrics.draft_counts
        assert accepted > 0
        assert_idle(engine)
    for got, wanted in zip(drafted, expected, strict=True):
        assert answer(got) == answer(wanted)
