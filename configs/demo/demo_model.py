"""The demo model in plain PyTorch, the Muon optimiser it is trained with, and the export.

The module and parameter names are those of `LlamaForCausalLM`, so the export is a plain copy. A
block written out here trains faster on a CPU than the general one, and knows packed rows.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """The sizes of the model."""

    vocab: int
    hidden: int = 192
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 32
    inner: int = 512
    positions: int = 1024
    theta: float = 10000.0
    eps: float = 1e-5


class Norm(nn.Module):
    """RMSNorm with a weight, as in Llama."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; ``width`` is that of its inputs."""

    def __init__(self, s: Shape, width: int) -> None:
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(width, s.heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(width, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(width, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.heads * s.head_dim, s.hidden, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, heads, L, D] of [B, L, W], one key for each query head."""
        s, (batch, length, _) = self.s, x.shape
        q = self.q_proj(x).view(batch, length, s.heads, s.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, s.kv_heads, s.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, s.kv_heads, s.head_dim).transpose(1, 2)
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        groups = s.heads // s.kv_heads
        return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.project(x, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(s.hidden, s.inner, bias=False)
        self.up_proj = nn.Linear(s.hidden, s.inner, bias=False)
        self.down_proj = nn.Linear(s.inner, s.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm block."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(s, s.hidden)
        self.mlp = Mlp(s)
        self.input_layernorm = Norm(s.hidden, s.eps)
        self.post_attention_layernorm = Norm(s.hidden, s.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Model(nn.Module):
    """The body; the output head is the embedding, applied by the caller where a loss is taken."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.s = s
        self.embed_tokens = nn.Embedding(s.vocab, s.hidden)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = Norm(s.hidden, s.eps)
        inverse = 1.0 / s.theta ** (torch.arange(0, s.head_dim, 2).float() / s.head_dim)
        angles = torch.outer(torch.arange(s.positions).float(), inverse).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self._start()

    def _start(self) -> None:
        """Small embeddings (they are the head too), and branches that begin near zero."""
        nn.init.normal_(self.embed_tokens.weight, std=0.05)
        for name, p in self.layers.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=p.shape[1] ** -0.5)
                if "o_proj" in name or "down_proj" in name:
                    p.data.mul_(0.2)

    def forward(self, ids: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
        """Hidden states of packed rows: a token sees earlier tokens of its own document only."""
        length = ids.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask = (documents[:, :, None] == documents[:, None, :]) & causal
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        x, mask = self.embed_tokens(ids), mask[:, None]
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return self.norm(x)


def _orthogonal(g: Tensor) -> Tensor:
    """The nearest half-orthogonal matrices of a stack, by five Newton-Schulz steps in float32."""
    x = g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        a = torch.bmm(x, x.mT)
        b = torch.baddbmm(a, a, a, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, b, x, beta=3.4445)
    return x


class Muon:
    """Momentum whose update is made orthogonal: clearly fewer steps than AdamW for the matrices."""

    def __init__(
        self, params: Iterable[nn.Parameter], momentum: float = 0.95, decay: float = 0.05
    ) -> None:
        self.groups: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
        for p in params:
            self.groups[p.shape].append(p)
        self.buffers = {shape: torch.zeros(len(ps), *shape) for shape, ps in self.groups.items()}
        self.momentum, self.decay = momentum, decay

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """One update of every matrix, those of one shape at once."""
        for shape, params in self.groups.items():
            grad = torch.stack([p.grad for p in params if p.grad is not None])
            buffer = self.buffers[shape].lerp_(grad, 1 - self.momentum)
            update = grad.lerp(buffer, self.momentum)
            tall = shape[0] > shape[1]
            update = _orthogonal(update.mT if tall else update)
            update = (update.mT if tall else update) * max(1.0, shape[0] / shape[1]) ** 0.5
            torch._foreach_mul_(params, 1 - lr * self.decay)
            torch._foreach_sub_(params, list(update.unbind()), alpha=lr)


def export(model: Model, folder: Path, *, bos: int, eos: int, pad: int) -> None:
    """Write the checkpoint as transformers would: config, generation config and float32 weights."""
    s = model.s
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.inner,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": s.positions,
        "rms_norm_eps": s.eps,
        "rope_theta": s.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": s.theta},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "use_cache": True,
        "dtype": "float32",
    }
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad, "do_sample": False}
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        (folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    state = {f"model.{k}": v.detach().clone().contiguous() for k, v in model.state_dict().items()}
    weights = folder / "model.safetensors"
    save_file(state, str(weights), metadata={"format": "pt"})
    weights.chmod(0o644)  # it is written for its owner only, and everyone is to read it
