"""Routing against that of the models which transformers has."""

from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    GptOssConfig,
    Lfm2MoeConfig,
    MixtralConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeTopKRouter
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from src.ops import Routing, route

TOKENS, EXPERTS, CHOSEN, HIDDEN = 50, 16, 4, 24


def randomised(module: torch.nn.Module) -> Any:
    random = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.copy_(torch.randn(tensor.shape, generator=random) * 0.5)
    return module


def hidden_states() -> torch.Tensor:
    return torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(4))


def same_choice(
    got: tuple[torch.Tensor, torch.Tensor], weights: torch.Tensor, ids: torch.Tensor
) -> None:
    assert got[0].dtype == torch.float32
    assert got[1].dtype == torch.int64
    dense = (torch.zeros(TOKENS, EXPERTS).scatter(1, i, w) for w, i in (got, (weights, ids)))
    torch.testing.assert_close(*dense, rtol=1e-6, atol=1e-7)


def test_mixtral() -> None:
    config = MixtralConfig(
        hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN
    )
    logits, weights, ids = randomised(MixtralTopKRouter(config))(hidden_states())
    same_choice(route(logits, Routing(chosen=CHOSEN)), weights, ids)


@pytest.mark.parametrize("renormalize", [True, False])
def test_qwen3_moe(renormalize: bool) -> None:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        norm_topk_prob=renormalize,
    )
    logits, weights, ids = randomised(Qwen3MoeTopKRouter(config))(hidden_states())
    same_choice(route(logits, Routing(chosen=CHOSEN, renormalize=renormalize)), weights, ids)


def test_gpt_oss() -> None:
    config = GptOssConfig(hidden_size=HIDDEN, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN)
    logits, weights, ids = randomised(GptOssTopKRouter(config))(hidden_states())
    routing = Routing(chosen=CHOSEN, scoring="softmax_of_chosen")
    same_choice(route(logits, routing), weights, ids)


@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize(("groups", "chosen_groups"), [(1, 1), (4, 2)])
def test_deepseek_v3(groups: int, chosen_groups: int, renormalize: bool) -> None:
    config = DeepseekV3Config(
        hidden_size=HIDDEN,
        moe_intermediate_size=8,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        n_group=groups,
        topk_group=chosen_groups,
        norm_topk_prob=renormalize,
        routed_scaling_factor=2.5,
    )
    router = randomised(DeepseekV3TopkRouter(config))
    logits, weights, ids = router(hidden_states())
    routing = Routing(
        chosen=CHOSEN,
        scoring="sigmoid",
        renormalize=renormalize,
        scale=2.5,
        groups=groups,
        chosen_groups=chosen_groups,
    )
    same_choice(route(logits, routing, router.e_score_correction_bias), weights, ids)


@pytest.mark.parametrize("is_biased", [True, False])
def test_lfm2_moe(is_biased: bool) -> None:
    config = Lfm2MoeConfig(
        hidden_size=HIDDEN,
        num_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        routed_scaling_factor=2.5,
        use_expert_bias=is_biased,
    )
    router = randomised(Lfm2MoeTopKRouter(config))
    # So that a token's scores are next to nothing, as is what is added to their sum.
    with torch.no_grad():
        router.weight.copy_(-router.weight.abs())
    bias = torch.randn(EXPERTS, generator=torch.Generator().manual_seed(5))
    logits, weights, ids = router(2.0 * hidden_states().abs(), bias)
    assert bool((weights.sum(-1) < 2.4).any())
    assert bool((weights.sum(-1) > 2.48).any())
    routing = Routing(chosen=CHOSEN, scoring="sigmoid", added=1e-6, scale=2.5)
    same_choice(route(logits, routing, bias if is_biased else None), weights, ids)


@pytest.mark.parametrize("method", ["greedy", "group_limited_greedy"])
def test_deepseek_v2(method: str) -> None:
    config = DeepseekV2Config(
        hidden_size=HIDDEN,
        num_attention_heads=2,
        moe_intermediate_size=8,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=CHOSEN,
        n_group=8,
        topk_group=3,
        topk_method=method,
        routed_scaling_factor=1.5,
    )
    logits, weights, ids = randomised(DeepseekV2TopkRouter(config))(hidden_states())
    groups = {} if method == "greedy" else {"groups": 8, "chosen_groups": 3, "ranked_by": 1}
    routing = Routing(chosen=CHOSEN, renormalize=False, scale=1.5, **groups)
    same_choice(route(logits, routing), weights, ids)


@pytest.mark.parametrize("is_biased", [False, True])
def test_sigmoids_that_are_equal_choose_by_their_logits(is_biased: bool) -> None:
    """In float32 a sigmoid is 1 from 17 on, and 0 below -104; Llama 4 chooses by logits."""
    random = torch.Generator().manual_seed(5)
    places = torch.stack([torch.randperm(EXPERTS, generator=random) for _ in range(TOKENS)])
    routing = Routing(chosen=CHOSEN, scoring="sigmoid", renormalize=False)
    for logits in (20.0 + places, -120.0 - places):
        weights, ids = route(logits, routing)
        expected = logits.topk(CHOSEN, dim=-1)
        assert torch.equal(ids, expected.indices)
        assert torch.equal(weights, expected.values.sigmoid())
        assert weights.unique().numel() == 1
    if is_biased:
        # A bias is added to scores, so there it is the scores that choose.
        bias = torch.arange(EXPERTS, dtype=torch.float32)
        _, ids = route(20.0 + places.float(), routing, bias)
        assert torch.equal(
            ids, torch.arange(EXPERTS - 1, EXPERTS - 1 - CHOSEN, -1).expand(TOKENS, -1)
        )


def test_logits_in_bfloat16_are_refused() -> None:
    with pytest.raises(ValueError, match="float32"):
        route(torch.zeros(2, 4, dtype=torch.bfloat16), Routing(chosen=2))


def test_a_token_chooses_alike_in_any_company() -> None:
    logits = torch.randn(64, 128, generator=torch.Generator().manual_seed(5))
    routing = Routing(chosen=8)
    weights, ids = route(logits, routing)
    for token in range(0, 64, 9):
        alone = route(logits[token : token + 1], routing)
        assert torch.equal(alone[0][0], weights[token])
        assert torch.equal(alone[1][0], ids[token])


@pytest.mark.parametrize("groups", [1, 4])
def test_the_choice_is_the_same_when_it_is_compiled(groups: int) -> None:
    """By loops then, not by `topk`: without ties there is one answer."""
    logits = torch.randn(40, 16, generator=torch.Generator().manual_seed(6))
    routing = Routing(chosen=4, scoring="sigmoid", groups=groups, chosen_groups=(groups + 1) // 2)
    with torch.no_grad():
        tokens = {"logits": {0: torch.export.Dim.DYNAMIC}}
        program = torch.export.export(Chosen(routing), (logits[:8],), dynamic_shapes=tokens)
    assert "topk" not in str(program.graph)
    weights, ids = program.module()(logits)
    expected = route(logits, routing)
    assert torch.equal(ids, expected[1])
    assert torch.equal(weights, expected[0])


class Chosen(torch.nn.Module):
    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self.routing = routing

    def forward(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return route(logits, self.routing)
