"""An EAGLE-3 head for the demo model in plain PyTorch, its loss over several steps, and its export.

Y. Li et al., "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time
Test", arXiv 2503.01840. Parameters have the names of published heads, so the export is a copy.

Positions: with a text t, the head reads at position q the embedding of token q + 1 and a feature of
position q. It says token q + 2. A feature is what `fc` makes of the model's own hidden states at q,
or, where the model has not computed q yet, what has left the head's layer at q - 1.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_model import Attention, Mlp, Model, Norm, Shape
from safetensors.torch import save_file
from torch import Tensor, nn

TAPS = (1, 2, 4)  # what the second and third layer read, and what leaves the last
STEP_WEIGHT = 0.8  # of a step in the loss, as a part of that of the step before


class HeadLayer(nn.Module):
    """The one layer."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        # It projects embedding and feature together, to the sizes of the model's.
        self.self_attn = Attention(s, 2 * s.hidden)
        self.mlp = Mlp(s)
        self.input_layernorm = Norm(s.hidden, s.eps)
        self.hidden_norm = Norm(s.hidden, s.eps)
        self.post_attention_layernorm = Norm(s.hidden, s.eps)


class Head(nn.Module):
    """The head; it shares the model's embedding.

    Parameters
    ----------
    model
        The model that it is trained for; its embedding and last norm are where the head's begin.
    tokens
        int64 [D], ascending: the tokens that it says, by their ids in the model's vocabulary.
    """

    def __init__(self, model: Model, tokens: Tensor) -> None:
        super().__init__()
        s = model.s
        self.s, self.tokens = s, tokens
        self.fc = nn.Linear(len(TAPS) * s.hidden, s.hidden, bias=False)
        self.midlayer = HeadLayer(s)
        self.norm = Norm(s.hidden, s.eps)
        self.lm_head = nn.Linear(s.hidden, len(tokens), bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=p.shape[1] ** -0.5)
                if "o_proj" in name or "down_proj" in name:
                    p.data.mul_(0.2)
        with torch.no_grad():
            self.norm.weight.copy_(model.norm.weight)
            self.lm_head.weight.copy_(model.embed_tokens.weight[tokens])

    def step(
        self, embedded: Tensor, feature: Tensor, past: Past, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What leaves the layer at each position, and scores of the token behind the next."""
        layer = self.midlayer
        both = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(feature)), -1)
        attended = past.attend(*layer.self_attn.project(both, cos, sin))
        x = feature + layer.self_attn.o_proj(attended)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return x, self.lm_head(self.norm(x))


class Past:
    """Keys and values of the steps before: what a position sees of them.

    In step k a position q was guessed from position q - k, the last that the model had computed. So
    it sees positions up to q - k as step 0 has them, and of each later step the one that lies
    between: position q - k + j of step j.

    Parameters
    ----------
    visible
        bool [B, L, L]: whether a position (first) sees another of its document in step 0.
    """

    def __init__(self, visible: Tensor) -> None:
        self._visible = visible
        self._steps: list[tuple[Tensor, Tensor]] = []

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention [B, L, heads * D] of the next step."""
        self._steps.append((k, v))
        (first_k, first_v), *later = self._steps
        batch, heads, length, dim = q.shape
        behind = len(later)
        q = q * dim**-0.5
        scores = q @ first_k.mT
        # Position q sees no further than q - k.
        visible = _moved(self._visible, behind, 1)
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        shifted = [
            tuple(_moved(each, behind - at, 2) for each in step) for at, step in enumerate(later, 1)
        ]
        own = [(q * each).sum(-1, keepdim=True) for each, _ in shifted]
        weights = torch.cat((scores, *own), -1).softmax(-1)
        out = weights[..., :length] @ first_v
        for at, (_, values) in enumerate(shifted):
            out = out + weights[..., length + at : length + at + 1] * values
        return out.transpose(1, 2).reshape(batch, length, heads * dim)


def _moved(x: Tensor, by: int, dim: int) -> Tensor:
    """What stood ``by`` places before, along ``dim``; zeros where there is nothing."""
    if not by:
        return x
    kept = x.narrow(dim, 0, x.shape[dim] - by)
    return torch.cat((torch.zeros_like(x.narrow(dim, 0, by)), kept), dim)


def taps(model: Model, ids: Tensor, positions: Tensor, documents: Tensor) -> tuple[Tensor, Tensor]:
    """Hidden states [B, L, 3 H] that a head reads, and the model's last ones [B, L, H]."""
    length = ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    mask = ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]
    cos, sin = model.cos[positions][:, None], model.sin[positions][:, None]
    states = [model.embed_tokens(ids)]
    for layer in model.layers:
        states.append(layer(states[-1], cos, sin, mask))
    return torch.cat([states[at] for at in TAPS], -1), model.norm(states[-1])


def losses(head: Head, model: Model, batch: dict[str, Tensor], steps: int) -> list[Losses]:
    """Of each step, as in serving: it goes on from what the step before has left.

    Parameters
    ----------
    batch
        Rows [B, L] of ``ids``, ``positions``, ``documents`` (-1: nothing) and ``weights`` of each
        token as one that is to be said.
    """
    ids, positions, documents = (batch[name] for name in ("ids", "positions", "documents"))
    with torch.no_grad():
        states, hidden = taps(model, ids, positions, documents)
        told = F.linear(hidden, model.embed_tokens.weight)
        chances = told.softmax(-1)[..., head.tokens]
        likeliest = told.argmax(-1)
        embedded = model.embed_tokens(_back(ids, 1))
    length = ids.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    visible = (documents[:, :, None] == documents[:, None, :]) & causal
    past = Past(visible)
    cos, sin = model.cos[positions][:, None], model.sin[positions][:, None]
    feature = head.fc(states)
    found = []
    for step in range(steps):
        left, scores = head.step(embedded, feature, past, cos, sin)
        # The model's own distribution of token q + 2 stands at q + 1. The whole chain lies in one
        # document, and begins at q - step.
        counts = _back(batch["weights"], 2) * (_back(documents, 2) == documents)
        if step:
            counts = counts * (_moved(documents + 1, step, 1) == documents + 1)
        counts = counts * (documents >= 0)
        chosen = counts > 0
        wanted = _back(chances, 1)[chosen]
        each = -(wanted * scores[chosen].log_softmax(-1)).sum(-1)
        right = head.tokens[scores[chosen].argmax(-1)] == _back(likeliest, 1)[chosen]
        found.append(Losses(each, counts[chosen], right))
        feature = _moved(left, 1, 1)
    return found


class Losses:
    """Cross entropy of each position that counts, its weight, and whether the head was right."""

    def __init__(self, each: Tensor, weights: Tensor, right: Tensor) -> None:
        self.each, self.weights, self.right = each, weights, right

    def mean(self) -> Tensor:
        """The weighted mean."""
        return (self.each * self.weights).sum() / self.weights.sum().clamp(min=1e-6)

    def hits(self) -> float:
        """The part of positions of full weight where both find the same token likeliest."""
        full = self.right[self.weights == 1]
        return float(full.float().mean()) if len(full) else 0.0


def _back(x: Tensor, by: int) -> Tensor:
    """What stands ``by`` places behind, along the rows; zeros where there is nothing."""
    return torch.cat((x[:, by:], torch.zeros_like(x[:, :by])), 1)


def export(head: Head, folder: Path) -> None:
    """Write the head as published ones are: bfloat16, ``d2t`` and ``t2d``, no embedding."""
    s = head.s
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": s.vocab,
        "draft_vocab_size": len(head.tokens),
        "hidden_size": s.hidden,
        "intermediate_size": s.inner,
        "num_hidden_layers": 1,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": s.positions,
        "rms_norm_eps": s.eps,
        "rope_theta": s.theta,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS)},
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    tensors = {
        name: value.detach().to(torch.bfloat16).contiguous()
        for name, value in head.state_dict().items()
    }
    known = torch.zeros(s.vocab, dtype=torch.bool)
    known[head.tokens] = True
    tensors |= {"d2t": head.tokens - torch.arange(len(head.tokens)), "t2d": known}
    weights = folder / "model.safetensors"
    save_file(tensors, str(weights), metadata={"format": "pt"})
    weights.chmod(0o644)
