"""The description of a model as plain frozen data, from which its program is written.

A family reads `config.json` into a `ModelConfig`; `decoder.write_decoder` turns that into a program
and its parameters. Differences between families are values here, not branches elsewhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from src.core.request import Pooling
from src.core.scoring import ResultActivation
from src.models.generation import GenerationDefaults
from src.models.layers.activations import Activation
from src.models.layers.attention import Temperature
from src.models.layers.classifier import DenseActivation
from src.models.layers.norms import NormSpec
from src.models.layers.rope import RopeConfig
from src.models.weights.methods import StoredFormats
from src.models.weights.parameters import Packing
from src.ops.projections.experts import ClampedSwiglu
from src.ops.projections.routing import TOO_SMALL_TO_SHOW, Scoring

MAX_HEAD_DIM = 256
MAX_LATENT_DIM = 576
HEAD_DIM_MULTIPLE = 8
DTYPE_NAMES = ("float32", "bfloat16", "float16")

# Names of a parameter's tensors in the checkpoint, within their layer and without `.weight` or
# `.bias`: one per part of a fused parameter, or a single one if the checkpoint has it fused.
Names: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionConfig:
    """The attention of one layer.

    Attributes
    ----------
    scale
        Factor of query-key products; None is ``head_dim ** -0.5``.
    window
        Tokens that a query sees, itself included; None is all.
    chunk
        A query sees only tokens of its own chunk of so many, counted from the sequence's first.
        None: no chunks.
    ahead
        Later tokens that a query sees, `ops.attention.spec.ALL_AHEAD` for all. None: no later one.
        Either all layers of a model see later tokens or none.
    cap
        Soft cap: scores become ``cap * tanh(score / cap)``. None: no cap.
    rope
        None: queries and keys are not rotated.
    rotary_dim
        Elements of a head that are rotated; None is all.
    interleaved
        Whether the checkpoint's rows of a head are rotated as pairs (2 i, 2 i + 1). They are
        reordered at load, since the layers rotate pairs (i, i + rotary_dim / 2).
    sections
        See `layers.attention.AttentionInSpec`. With any, requests bring `ROPE_POSITIONS`.
    sinks_name
        The tensor of attention sinks, one logit per query head; None: there are none.
    temperature
        A factor of queries that grows with their positions; None: there is none.
    rotated_norm
        Whether queries and keys of each head are normalized after rotation, without weights.
    has_gate
        Whether the output is multiplied by the sigmoid of a gate. Behind each head's rows of the
        projection of queries the checkpoint has as many rows of its gate.
    qk_norm
        How queries and keys are normalized: each head by itself (``head``: with one weight [D] for
        all heads; ``each_head``: with weights [heads, D]), all heads together, or not.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig | None
    scale: float | None = None
    window: int | None = None
    chunk: int | None = None
    ahead: int | None = None
    cap: float | None = None
    rotary_dim: int | None = None
    interleaved: bool = False
    sections: tuple[int, ...] = ()
    temperature: Temperature | None = None
    rotated_norm: bool = False
    has_gate: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["head", "each_head", "whole"] | None = None
    qkv_names: Names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    output_name: str = "self_attn.o_proj"
    sinks_name: str | None = None
    q_norm_name: str = "self_attn.q_norm"
    k_norm_name: str = "self_attn.k_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrenceConfig:
    """A recurrent state in attention's place.

    Attributes
    ----------
    kind
        ``delta``: the gated delta rule. ``mamba``: Mamba-2.
    key_heads
        Heads of queries and keys; of Mamba-2: groups of B and C.
    heads
        Heads of values.
    key_dim
        Elements of a query and of a key; of Mamba-2: its state's size.
    dim
        Elements of a value.
    taps
        Tokens that the convolution sees.
    name
        Name of the part in the checkpoint, within its layer.
    bias
        Whether both projections have biases.
    step_limits
        Bounds of a token's time step.
    """

    kind: Literal["delta", "mamba"]
    key_heads: int
    heads: int
    key_dim: int
    dim: int
    taps: int
    name: str
    bias: bool = False
    convolution_bias: bool = False
    step_limits: tuple[float, float] = (0.0, math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShortConvolutionConfig:
    """A gated convolution over a few tokens in attention's place (LFM2).

    Attributes
    ----------
    taps
        Tokens that the convolution sees, the token itself included.
    bias
        Whether both projections and the convolution have biases.
    """

    taps: int
    bias: bool = False
    in_name: str = "conv.in_proj"
    convolution_name: str = "conv.conv"
    output_name: str = "conv.out_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionConfig:
    """Latent attention of one layer: one vector per token is cached, whatever the number of heads.

    Attributes
    ----------
    nope_dim, rope_dim
        Elements of a head of queries and keys that are not rotated, and that are. The rotated ones
        come last.
    value_dim
        Elements of a head of values.
    rank
        Size of the latent from which keys and values are made.
    query_rank
        Size of the vector from which queries are made; None: they are made of the layer's input.
    scale
        Factor of query-key products.
    inner_norm
        Norm of latents, and of the vector from which queries are made.
    interleaved
        See `AttentionConfig`.
    down_bias
        Whether the projections to latents and to that vector have biases.
    query_names
        The projection of queries, or the two of them.
    """

    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rank: int
    query_rank: int | None
    rope: RopeConfig
    scale: float
    inner_norm: NormSpec
    interleaved: bool
    down_bias: bool = False
    output_bias: bool = False
    query_names: Names = ("self_attn.q_proj",)
    query_norm_name: str = "self_attn.q_a_layernorm"
    down_name: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm_name: str = "self_attn.kv_a_layernorm"
    up_name: str = "self_attn.kv_b_proj"
    output_name: str = "self_attn.o_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPConfig:
    """A gated MLP: ``down(activation(gate(x)) * up(x))``."""

    intermediate_size: int
    activation: Activation = "silu"
    bias: bool = False
    gate_up_names: Names = ("mlp.gate_proj", "mlp.up_proj")
    down_name: str = "mlp.down_proj"


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedExperts:
    """Names and form of tensors that hold all experts of a layer.

    Matrices are [experts, in, out]; packed ones are [experts, out, in]. The names of their biases
    [experts, out] end in ``_bias``.

    Attributes
    ----------
    interleaved
        Whether outputs of gate and up take turns. Otherwise all of the gate come first.
    packing
        The form of matrices that are packed; None: they are not.
    """

    gate_up: str = "mlp.experts.gate_up_proj"
    down: str = "mlp.experts.down_proj"
    interleaved: bool = False
    packing: Packing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """A mixture of gated MLPs, of which a router chooses some for each token.

    Attributes
    ----------
    intermediate_size
        Of each expert.
    renormalize
        Whether the weights of the chosen experts are scaled to sum up to 1.
    added_to_sum
        What is added to the sum by which they are divided.
    scoring, scale, groups, chosen_groups, groups_ranked_by
        See `ops.projections.routing.Routing`.
    activation
        How gate and up are joined.
    bias
        Whether gate, up and down have biases; for `StackedExperts` alone.
    router_bias
        Whether the router has one.
    weighs_inputs
        Whether an expert's weight is a factor of its input instead of its output.
    choice_bias_name
        The tensor that is added to scores for the choice alone; None: there is none.
    names
        Names of gate, up and down, where ``{}`` stands for the expert's number. Two names without a
        number are of fused tensors: [experts, 2 I, H] of gate and up, and [experts, H, I] of down.
        `StackedExperts` are tensors in another form.
    shared
        An MLP that computes every token; its output is added to that of the experts.
    shared_gate_name
        A projection to one number, whose sigmoid is a factor of the shared MLP's output. None: the
        output is added as it is.
    """

    num_experts: int
    num_chosen: int
    intermediate_size: int
    renormalize: bool
    added_to_sum: float = TOO_SMALL_TO_SHOW
    activation: Activation | ClampedSwiglu = "silu"
    bias: bool = False
    router_bias: bool = False
    weighs_inputs: bool = False
    scoring: Scoring = "softmax"
    scale: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    groups_ranked_by: int = 2
    router_name: str = "mlp.gate"
    choice_bias_name: str | None = None
    shared: MLPConfig | None = None
    shared_gate_name: str | None = None
    names: Names | StackedExperts = (
        "mlp.experts.{}.gate_proj",
        "mlp.experts.{}.up_proj",
        "mlp.experts.{}.down_proj",
    )


# What may be in attention's place.
MixingConfig: TypeAlias = (
    AttentionConfig | LatentAttentionConfig | RecurrenceConfig | ShortConvolutionConfig
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """One layer: attention and an MLP with optional norms, each added to the residual stream.

    ``..._norm`` normalizes a block's input, ``..._post_norm`` its output before it is added. The
    values are names of tensors; None: no norm.

    Attributes
    ----------
    parallel
        Whether the MLP reads what attention reads: the layer's input, normalized by
        ``attention_norm``. Then ``mlp_norm`` is not used.
    """

    attention: MixingConfig
    mlp: MLPConfig | ExpertsConfig
    attention_norm: str | None = "input_layernorm"
    attention_post_norm: str | None = None
    mlp_norm: str | None = "post_attention_layernorm"
    mlp_post_norm: str | None = None
    parallel: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorConfig:
    """A layer of the checkpoint behind the last, which predicts one token further.

    Attributes
    ----------
    layer
        It has the form of the model's own.
    layer_name, join_name, embedding_norm_name, hidden_norm_name, final_norm_name
        Names of tensors in the checkpoint: of the layer, of the matrix that joins an embedding and
        a hidden state, of the norms of both, and of the norm behind the layer.
    prefix
        What the names of all its tensors begin with.
    unread
        Beginnings of names of tensors that are not read, such as copies of the model's own.
    """

    layer: LayerConfig
    layer_name: str
    join_name: str
    embedding_norm_name: str
    hidden_norm_name: str
    final_norm_name: str
    prefix: str
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderNames:
    """Names of an encoder's tensors in the checkpoint, without `.weight` or `.bias`.

    Those of the embedding and of layers are in `ModelConfig`; the others are within their layer.
    """

    positions: str
    types: str | None
    embedding_norm: str
    qkv: Names
    output: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """An encoder in BERT's form: tokens see all others, and norms stand behind the sums.

    Attributes
    ----------
    position_rows
        Rows of the table of positions.
    first_position
        The row of a sequence's first token.
    token_types
        Kinds of tokens that the checkpoint tells apart. Every token has the first.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    activation: Activation
    eps: float
    position_rows: int
    first_position: int
    token_types: int
    names: EncoderNames


@dataclass(frozen=True, slots=True)
class DenseConfig:
    """A layer of a classifier's head.

    Attributes
    ----------
    name
        Of its tensors in the checkpoint, without `.weight` or `.bias`.
    outputs
        Its numbers.
    activation
        Of its numbers.
    bias
        Whether it has one.
    norm
        Name of the norm behind its activation; None: it has none.
    norm_bias
        Whether that norm has a bias.
    eps
        Of that norm.
    """

    name: str
    outputs: int
    activation: DenseActivation = "none"
    bias: bool = True
    norm: str | None = None
    norm_bias: bool = False
    eps: float = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassifierConfig:
    """A head that makes scores of labels in place of text.

    Attributes
    ----------
    labels
        Their names, in the order of its numbers.
    activation
        What makes results of its numbers.
    pooling
        Whose hidden states it reads; ``all``: those of each token.
    layers
        In order; the last one gives a number for each label.
    """

    labels: tuple[str, ...]
    activation: ResultActivation
    pooling: Pooling
    layers: tuple[DenseConfig, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder, or an encoder.

    Attributes
    ----------
    encoder
        What it is in place of a decoder's layers, which it has none of. Its RoPE is not used.
    classifier
        The head that it has in place of one for text.
    dtype
        The checkpoint's own. `registry.load_config` finds it out where `config.json` has none.
    max_position_embeddings
        Tokens that it was trained for.
    rope
        The RoPE of layers with full attention. The longest sequence follows from it.
    embedding_multiplier
        Factor of the embedding. The factor is rounded to the model's dtype first.
    residual_multiplier
        Factor of each block's output before it is added to the residual stream.
    unread
        Beginnings of the names of tensors that the checkpoint may have and that are not read.
    logit_cap
        Soft cap of the logits, see `AttentionConfig.cap`.
    embedding_norm_name
        A norm of the embedding, before the first layer; None: there is none.
    in_pairs
        Whether the file has rows of queries and keys as pairs, though the published model, for
        which adapters are made, has not.
    formats
        How a quantized checkpoint stores its matrices; None: plainly, or as the family says.
    takes_embeddings
        Whether requests may bring `EMBEDDINGS` for tokens in place of those of their ids.
    unread_layers
        How many layers the checkpoint may have behind the last, to predict further tokens. They are
        not read with the model.
    predictor
        The first of these layers, for who asks for it; None: it has none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    dtype: str | None
    norm: NormSpec
    layers: tuple[LayerConfig, ...]
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    logit_cap: float | None = None
    logit_multiplier: float = 1.0
    unread: tuple[str, ...] = ()
    unread_layers: int = 0
    predictor: PredictorConfig | None = None
    in_pairs: bool = False
    formats: StoredFormats | None = None
    embedding_name: str = "model.embed_tokens"
    embedding_norm_name: str | None = None
    layer_name: str = "model.layers.{}"
    final_norm_name: str = "model.norm"
    head_name: str = "lm_head"
    takes_embeddings: bool = False
    encoder: EncoderConfig | None = None
    classifier: ClassifierConfig | None = None
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)

    @property
    def looks_ahead(self) -> bool:
        """Whether tokens of its layers see later ones, so that it has no use for a head."""
        return any(getattr(layer.attention, "ahead", None) is not None for layer in self.layers)

    @property
    def takes_token_types(self) -> bool:
        """Whether requests bring the kinds of tokens: of two texts that are compared."""
        own = self.classifier
        has_types = self.encoder is not None and self.encoder.token_types > 1
        return has_types and own is not None and own.pooling != "all"

    @property
    def max_positions(self) -> int:
        """The longest sequence, in tokens, that the position encoding is made for."""
        return self.rope.context_length(self.max_position_embeddings)

    @property
    def position_limit(self) -> int:
        """The largest allowed `max_model_len`, in tokens."""
        if self.encoder is not None:
            # The table of positions ends there.
            return self.max_position_embeddings
        return self.rope.limit(self.max_position_embeddings)
