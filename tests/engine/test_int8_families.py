"""Every family with its projections rounded to int8, against transformers on the rounded matrices.

`docs/quantization.md` says what is rounded. A row has one scale, so rows that are fused at load are
rounded as they are apart.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from src import AsyncEngine, SamplingParams
from src.ops.projections.rounding import quantize
from tests.support.checkpoints import load_reference, make_checkpoint
from tests.support.engines import assert_idle, greedy, random_prompts, small_config
from tests.support.families import SHORT_SIGHTED, families

# In float32; the rest of the model is exact.
TOLERANCE = 1e-4
NEW_TOKENS = 6
PARAMS = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, prompt_logprobs=0)
# Families with matrices that others do not have: of recurrences, of latents, beside experts.
QUICK = ("deepseekv2", "deepseekv3", "granite_moehybrid", "qwen3next", "qwen2_moe", "phi3")
# Rows are multiples of 32.
SIZES: dict[str, dict[str, Any]] = {
    "deepseekv3": {"moe_intermediate_size": 64},
    "granite_moehybrid": {"shared_intermediate_size": 64},
    "qwen3next": {"shared_expert_intermediate_size": 64},
}
# Names of linear layers that keep their weights: routers, gates of shared experts, and the
# projection that latent attention applies in two ways.
EXACT = {"gate", "router", "layer", "shared_expert_gate", "kv_b_proj"}


def round_matrices(model: Any) -> None:
    """What `model.quantization = "int8"` does; a head that is tied is no longer tied."""
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.rpartition(".")[2] not in EXACT:
            rounded = quantize(module.weight.detach(), "int8", 32).dequantized()
            module.weight = torch.nn.Parameter(rounded, requires_grad=False)


@torch.inference_mode()
def scores(model: Any, prompt: list[int]) -> list[float]:
    """Log-probabilities of the prompt's tokens but the first."""
    rows = torch.log_softmax(model(torch.tensor([prompt])).logits[0].float(), dim=-1)
    return [float(rows[i, token]) for i, token in enumerate(prompt[1:])]


@pytest.mark.anyio
@pytest.mark.parametrize("name", families(unmarked=QUICK, mark=pytest.mark.compilers))
async def test_every_family_in_int8(name: str, tmp_path: Path) -> None:
    settings = {**SHORT_SIGHTED[name], **SIZES.get(name, {})}
    directory = make_checkpoint(tmp_path, name, tokenizer=True, **settings)
    model, prompts = load_reference(directory), random_prompts(4, longest=30, seed=7)
    exact = [scores(model, prompt) for prompt in prompts]
    round_matrices(model)
    config = small_config(
        directory,
        compile__enforce_eager=True,
        model__quantization="int8",
        scheduler__max_num_batched_tokens=8,
    )
    async with AsyncEngine.open(config) as engine:
        results = await asyncio.gather(*(engine.generate(prompt, PARAMS) for prompt in prompts))
        assert_idle(engine)
    effects = []
    for prompt, before, result in zip(prompts, exact, results, strict=True):
        wanted = scores(model, prompt)
        scored = [entry.logprob for entry in (result.prompt_logprobs or [])[1:] if entry]
        assert scored == pytest.approx(wanted, abs=TOLERANCE)
        effects += [abs(one - other) for one, other in zip(wanted, before, strict=True)]
        assert result.token_ids == greedy(model, prompt, NEW_TOKENS)
    # Rounding is not nothing: else equality would show nothing.
    assert max(effects) > 10 * TOLERANCE
