"""Every setting, its type and its default. ``docs/configuration.md`` explains each."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from src.core.sampling_params import (
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_N,
    MAX_STOP_STRING_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

MIB = 1024 * 1024
GIB = 1024 * MIB

# What tensors' sizes and the operating system's calls can hold.
INT32_MAX = 2**31 - 1

Positive = Annotated[int, Meta(ge=1, le=INT32_MAX)]
NonNegative = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Seconds = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


class Secret:
    """A text that is shown nowhere: neither in logs nor in error messages nor in dumps.

    JSON encoders refuse it, and only :meth:`reveal` gives it away.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """The text itself."""
        return self._text

    def __repr__(self) -> str:
        return "Secret(...)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the sections: frozen, and an unknown key is an error."""


class ModelSection(Section, frozen=True, kw_only=True):
    """Which checkpoint is served and how its weights are held."""

    path: str = "configs/demo"
    revision: str | None = None
    served_model_name: tuple[str, ...] = ()
    # What computes it; auto: a native family where there is one, else transformers.
    implementation: Literal["auto", "native", "transformers"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: Positive | None = None
    quantization: Literal["int8", "int4"] | None = None  # of weights, at load, on CPU
    # weights of a row that share a scale, of int4
    quantization_group_size: Annotated[int, Meta(ge=32, le=1024, multiple_of=32)] = 32
    # Whether quantized projections round inputs to 8 bits; None: in bfloat16, where that gains.
    quantize_activations: bool | None = None
    # Whether logits are the same bits in any batch, chunking and state of the cache; on CPU.
    deterministic: bool = False
    seed: NonNegative = 0


class DeviceSection(Section, frozen=True, kw_only=True):
    """Where the model runs."""

    type: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: Annotated[int, Meta(ge=0, le=1024)] = 0  # 0: as many as CPUs
    # What serves rows with several query tokens on a GPU; "auto": the first that is there and able.
    attention: Literal["auto", "triton", "flash_attention_3", "torch_varlen"] = "auto"


class CacheSection(Section, frozen=True, kw_only=True):
    """Paged KV memory."""

    block_size: Positive | None = None  # tokens; None: 16 on CPU, 64 on CUDA
    # None: memory_fraction of what is free
    memory_bytes: Annotated[int, Meta(ge=1, le=2**50)] | None = None
    memory_fraction: Fraction | None = None  # None: 0.25 of free host memory, 0.9 of a GPU's
    num_blocks: Positive | None = None  # overrides both
    enable_prefix_caching: bool = True


class SchedulerSection(Section, frozen=True, kw_only=True):
    """Batching, budgets and the waiting queue."""

    policy: Literal["fcfs", "priority"] = "fcfs"
    pipeline_depth: Annotated[int, Meta(ge=1, le=2)] = 2
    # Whether a step is planned shortly before the one that runs ends. None: on the CPU.
    plan_late: bool | None = None
    max_num_seqs: Positive = 64
    max_num_batched_tokens: Positive = 2048
    # Of prompts, in a step in which rows decode. None: 256 on the CPU, any number on CUDA.
    max_mixed_prefill_tokens: Positive | None = None
    max_waiting_requests: Positive = 2048
    max_waiting_tokens: Positive = 8_388_608
    # How often smaller requests may overtake a head-of-line request that does not fit.
    max_bypasses: NonNegative = 64


class CompileSection(Section, frozen=True, kw_only=True):
    """Compiled code and its artifacts."""

    enforce_eager: bool = False  # True: as startup = "off" and cuda_graphs = "off"
    # Whether the first requests wait for the compiler, are served eagerly until it is done, or all
    # are served eagerly.
    startup: Literal["background", "wait", "off"] = "background"
    # Of a GPU's steps: those of few users once it is known which code serves and the rest while
    # nobody asks for anything, or all at once then, or none.
    cuda_graphs: Literal["background", "wait", "off"] = "background"
    # Of a step with prompts in it, that is captured between its attention calls; 0: none are.
    cuda_graph_max_tokens: Annotated[int, Meta(ge=0, le=65_536)] = 512

    @property
    def is_on(self) -> bool:
        """Whether anything is compiled at all."""
        return not self.enforce_eager and self.startup != "off"

    @property
    def captures(self) -> bool:
        """Whether steps are captured where the device can do that."""
        return not self.enforce_eager and self.cuda_graphs != "off"


class StructuredOutputSection(Section, frozen=True, kw_only=True):
    """Bounds of what a client may constrain its output with."""

    max_bytes: Positive = 256 * 1024  # of a schema, regular expression, grammar or choice
    max_depth: Positive = 64  # of brackets in a schema
    max_choices: Positive = 4096
    compile_seconds: Seconds = 5.0
    compile_memory_bytes: Annotated[int, Meta(ge=64 * MIB, le=2**50)] = GIB
    cached_grammars: NonNegative = 64  # that are kept compiled


class LimitsSection(Section, frozen=True, kw_only=True):
    """How much a client may ask for of what costs by its size; never more than holds anyway."""

    max_n: Annotated[int, Meta(ge=1, le=MAX_N)] = MAX_N
    max_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] = MAX_LOGPROBS
    max_stop_strings: Annotated[int, Meta(ge=0, le=MAX_STOP_STRINGS)] = MAX_STOP_STRINGS
    max_stop_string_chars: Annotated[int, Meta(ge=1, le=MAX_STOP_STRING_CHARS)] = (
        MAX_STOP_STRING_CHARS
    )
    max_stop_token_ids: Annotated[int, Meta(ge=0, le=MAX_STOP_TOKEN_IDS)] = MAX_STOP_TOKEN_IDS
    max_bad_words: Annotated[int, Meta(ge=0, le=MAX_BAD_WORDS)] = MAX_BAD_WORDS
    max_logit_bias: Annotated[int, Meta(ge=0, le=MAX_LOGIT_BIAS)] = MAX_LOGIT_BIAS


class ChatSection(Section, frozen=True, kw_only=True):
    """How chats are rendered, and their answers read."""

    tool_call_parser: Literal[
        "auto", "none", "hermes", "llama3_json", "pythonic", "mistral", "json"
    ] = "auto"
    reasoning_parser: Literal["auto", "none", "think", "deepseek_r1", "mistral"] = "auto"
    # Whether arguments are shown before they are whole where no grammar makes sure of them.
    stream_tool_arguments: bool = False
    # What requests may bring: nothing, chat_template_kwargs, or a chat_template too.
    request_templates: Literal["none", "kwargs", "all"] = "kwargs"


class HttpSection(Section, frozen=True, kw_only=True):
    """The HTTP server's limits."""

    max_body_bytes: Positive = 8 * MIB
    body_timeout: Seconds = 30.0  # for a request's body to arrive
    # Of a body: objects, lists and keys of objects; and values in lists and objects. What they cost
    # to build is paid on the event loop.
    max_json_nodes: Positive = 65_536
    max_json_values: Positive = 524_288
    max_prompts_per_request: Positive = 128
    max_logprobs_per_answer: Positive = 4_194_304  # of all its positions, choices and prompts
    write_timeout: Seconds = 120.0  # for a reader to take anything, before it is given up
    ready_wait: Annotated[float, Meta(ge=0)] = 30.0  # seconds a request waits for the model to load
    # Until an answer begins: a stream's with its first token, others when they are whole.
    first_byte_timeout: Seconds | None = None
    request_timeout: Seconds | None = None  # None: no deadline unless the client sets one
    shutdown_timeout: Seconds = 30.0
    # What /v1/responses keeps for a next turn; 0 keeps nothing.
    max_stored_responses: NonNegative = 1024
    max_stored_response_bytes: NonNegative = 64 * MIB
    strict_fields: bool = False  # refuse fields that nobody has heard of
    # What opens everything but the probes; without any the server is open to all.
    api_keys: tuple[Secret, ...] = ()
    api_key_file: str | None = None
    # What opens /debug; without either of the two there is nothing.
    admin_key: Secret | None = None
    admin_key_file: str | None = None
    public_metrics: bool = False  # whether /metrics is as open as the probes
    # Origins whose web pages may ask a browser to send requests here; "*" is all of them.
    cors_origins: tuple[str, ...] = ()


class ObservabilitySection(Section, frozen=True, kw_only=True):
    """Logs and the step timeline."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    stats_interval: Annotated[float, Meta(ge=0)] = 10.0  # seconds; 0: no periodic line
    log_requests: bool = False  # one line per completion
    legacy_metrics: bool = False  # what vLLM renamed, under its old names too
    # Seconds that work may be pending without a step that completes; 0: for ever.
    stall_seconds: Annotated[float, Meta(ge=0)] = 60.0
    # Where spans are sent by OTLP; the OTEL_... variables say it too, and win.
    otlp_endpoint: str | None = None
    trace_steps: Annotated[float, Meta(ge=0, le=1)] = 0.05  # share of the steps with a span
    trace_token_events: NonNegative = 0  # an event per so many deliveries of tokens; 0: none
    trace_content_chars: NonNegative = 0  # of each prompt and output in spans; 0: none
    timeline_steps: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096  # steps that are kept
    timeline_requests: Annotated[int, Meta(ge=0, le=100_000)] = 1024  # ended completions
    plan_log: str | None = None  # a file; None: plans are not written down


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration."""

    model: ModelSection = ModelSection()
    device: DeviceSection = DeviceSection()
    cache: CacheSection = CacheSection()
    scheduler: SchedulerSection = SchedulerSection()
    compile: CompileSection = CompileSection()
    structured_output: StructuredOutputSection = StructuredOutputSection()
    limits: LimitsSection = LimitsSection()
    chat: ChatSection = ChatSection()
    http: HttpSection = HttpSection()
    observability: ObservabilitySection = ObservabilitySection()
