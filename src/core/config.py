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
from src.core.task import Task

MIB = 1024 * 1024
GIB = 1024 * MIB

# The largest integer that tensor sizes and system calls can hold.
INT32_MAX = 2**31 - 1

_DEFAULT_SLOTS = 8

Positive = Annotated[int, Meta(ge=1, le=INT32_MAX)]
NonNegative = Annotated[int, Meta(ge=0, le=INT32_MAX)]
Seconds = Annotated[float, Meta(gt=0)]
Fraction = Annotated[float, Meta(gt=0, le=1)]


class Secret:
    """A text that never appears in logs, error messages or dumps.

    JSON encoders refuse it. Only `reveal` returns it.
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
    """Base class of the sections: frozen, and an unknown key is an error."""


class ModelSection(Section, frozen=True, kw_only=True):
    """The checkpoint, and the format of its weights."""

    path: str = "configs/demo"
    revision: str | None = None
    served_model_name: tuple[str, ...] = ()
    # What requests may ask for; auto: what the checkpoint's files say.
    tasks: Literal["auto"] | Annotated[tuple[Task, ...], Meta(min_length=1)] = "auto"
    # What computes it; auto: a native family where there is one, else transformers.
    implementation: Literal["auto", "native", "transformers"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    max_model_len: Positive | None = None
    quantization: Literal["int8", "int4"] | None = None  # of weights, at load
    # int4: weights of a row that share a scale
    quantization_group_size: Annotated[int, Meta(ge=32, le=1024, multiple_of=32)] = 32
    # Whether quantized projections round inputs to 8 bits; None: in bfloat16, where it is faster.
    quantize_activations: bool | None = None
    # Whether logits are the same bits for any batch, chunking and prefix cache; CPU only.
    deterministic: bool = False
    cut_vectors: bool = False  # whether vectors may be shortened though no file says so
    seed: NonNegative = 0


class DeviceSection(Section, frozen=True, kw_only=True):
    """Where the model runs."""

    type: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: Annotated[int, Meta(ge=0, le=1024)] = 0  # 0: as many as CPUs
    # Attention backend for rows with several query tokens on a GPU; "auto": the first usable one.
    attention: Literal["auto", "triton", "flash_attention_3", "torch_varlen"] = "auto"


class CacheSection(Section, frozen=True, kw_only=True):
    """Paged KV memory."""

    # What keys and values are kept in; "auto": the model's dtype. "fp8_e4m3" is "fp8".
    dtype: Literal["auto", "fp8", "fp8_e4m3", "int8"] = "auto"
    block_size: Positive | None = None  # tokens; None: 16 on CPU, 64 on CUDA
    # None: memory_fraction of the free memory
    memory_bytes: Annotated[int, Meta(ge=1, le=2**50)] | None = None
    memory_fraction: Fraction | None = None  # None: 0.25 of free host memory, 0.9 of a GPU's
    num_blocks: Positive | None = None  # overrides both
    enable_prefix_caching: bool = True
    # Whether clients with different API keys read each other's cached prefixes.
    share_prefixes: bool = False


class LoraSection(Section, frozen=True, kw_only=True):
    """Adapters that requests may name."""

    adapters: dict[str, str] = {}  # name -> directory, loaded at the start
    # Adapters in use at the same time. None: 8 if there are adapters or directories, else none.
    slots: Annotated[int, Meta(ge=1, le=1024)] | None = None
    max_rank: Annotated[int, Meta(ge=1, le=512)] = 32
    max_adapters: Positive = 256  # loaded at the same time
    host_memory_bytes: Annotated[int, Meta(ge=1, le=2**50)] = 4 * GIB  # of all loaded ones
    # Where adapters may be loaded from while requests are served; none: nowhere.
    directories: tuple[str, ...] = ()

    @property
    def num_slots(self) -> int:
        """Slots for adapters; 0: none are served."""
        return self.slots or (_DEFAULT_SLOTS if self.adapters or self.directories else 0)


class SchedulerSection(Section, frozen=True, kw_only=True):
    """Batching, budgets and the waiting queue."""

    policy: Literal["fcfs", "priority"] = "fcfs"
    pipeline_depth: Annotated[int, Meta(ge=1, le=2)] = 2
    # Whether a step is planned shortly before the running step ends. None: yes on the CPU.
    plan_late: bool | None = None
    max_num_seqs: Positive = 64
    max_num_batched_tokens: Positive = 2048
    # Prompt tokens in a step with decoding rows. None: 256 on the CPU, no limit on CUDA.
    max_mixed_prefill_tokens: Positive | None = None
    # Those of them that are of requests for vectors. None: all of them.
    max_mixed_pooled_tokens: Positive | None = None
    max_waiting_requests: Positive = 2048
    max_waiting_tokens: Positive = 8_388_608
    # How often later requests may overtake the first waiting request while it does not fit.
    max_bypasses: NonNegative = 64
    # Owner of API keys -> weight of its share of steps, rows and memory; 1 for all others.
    tenant_weights: dict[str, Annotated[int, Meta(ge=1, le=1000)]] = {}
    # Owners whose requests of a priority below 0 go before those of all others.
    priority_tenants: tuple[str, ...] = ()


class SpeculationSection(Section, frozen=True, kw_only=True):
    """``[speculation]``: guesses of next tokens, which one step verifies (docs/speculation.md)."""

    # What guesses. "auto": on the CPU "suffix" where it can be served, and "mtp"; on a GPU nothing.
    # "off": nothing. "suffix": they go on as where the end of the row's tokens stood before.
    # "ngram": the same with the bounds below. "draft": a small model of the same vocabulary does.
    # "medusa", "eagle3": heads on the model do. "mtp": a layer that the model's checkpoint brings.
    method: Literal["auto", "off", "suffix", "ngram", "draft", "medusa", "eagle3", "mtp"] = "auto"
    model: str | None = None  # directory or hub id of the draft model, or of heads
    num_speculative_tokens: Annotated[int, Meta(ge=1, le=64)] = 16  # most of a row in a step
    prompt_lookup_min: Annotated[int, Meta(ge=1, le=64)] = 2  # tokens of an n-gram
    prompt_lookup_max: Annotated[int, Meta(ge=1, le=64)] = 5
    # Memory for the last outputs, from which "suffix" guesses too; 0: none are kept.
    shared_history_bytes: Annotated[int, Meta(ge=0, le=1 << 34)] = 0


class CompileSection(Section, frozen=True, kw_only=True):
    """Compiled code and its artifacts."""

    enforce_eager: bool = False  # True: like startup = "off" and cuda_graphs = "off"
    # "wait": the first requests wait for the compiler. "background": they are served eagerly until
    # it is done. "off": all requests are served eagerly.
    startup: Literal["background", "wait", "off"] = "background"
    # When CUDA graphs are captured, once it is decided which code is used. "background": those of
    # small batches at once and the rest while idle. "wait": all at once. "off": never.
    cuda_graphs: Literal["background", "wait", "off"] = "background"
    # The most tokens of a step with prompts that is captured between its attention calls; 0: none.
    cuda_graph_max_tokens: Annotated[int, Meta(ge=0, le=65_536)] = 512

    @property
    def is_on(self) -> bool:
        """Whether anything is compiled."""
        return not self.enforce_eager and self.startup != "off"

    @property
    def captures(self) -> bool:
        """Whether steps are captured if the device supports it."""
        return not self.enforce_eager and self.cuda_graphs != "off"


class StructuredOutputSection(Section, frozen=True, kw_only=True):
    """Bounds of structured output that clients ask for."""

    max_bytes: Positive = 256 * 1024  # of a schema, regular expression, grammar or choice
    max_depth: Positive = 64  # of brackets in a schema
    max_choices: Positive = 4096
    compile_seconds: Seconds = 5.0
    compile_memory_bytes: Annotated[int, Meta(ge=64 * MIB, le=2**50)] = GIB
    cached_grammars: NonNegative = 64  # compiled grammars that are kept


class LimitsSection(Section, frozen=True, kw_only=True):
    """An operator's limits on request fields; they cannot exceed the built-in limits."""

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
    """How chats are rendered and their answers parsed."""

    # "auto", "none", or a name of src/text/tool_calls/syntaxes.py and src/text/reasoning.py, or of
    # a plugin. Checked when plugins have been loaded.
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    # Whether a whole call in reasoning that is never closed is one; "auto": where the chat template
    # writes calls so.
    calls_in_reasoning: Literal["auto", "on", "off"] = "auto"
    # Whether tool arguments are streamed before they are complete although no grammar checks them.
    stream_tool_arguments: bool = False
    # Where a text replaces images and documents, which are refused otherwise.
    media_placeholders: Literal["none", "messages", "all"] = "messages"
    # A file with a chat template in place of the checkpoint's own.
    template: str | None = None
    # What requests may contain: neither, chat_template_kwargs only, or also a chat_template.
    request_templates: Literal["none", "kwargs", "all"] = "kwargs"


class HttpSection(Section, frozen=True, kw_only=True):
    """The HTTP server's limits."""

    max_body_bytes: Positive = 8 * MIB
    body_timeout: Seconds = 30.0  # for a request's body to arrive
    # Limits of a JSON body: nodes are objects, lists and keys of objects; values are those in lists
    # and objects. Building them takes time on the event loop.
    max_json_nodes: Positive = 65_536
    max_json_values: Positive = 524_288
    max_prompts_per_request: Positive = 128
    max_embedding_inputs: Positive = 2048  # texts of one request for vectors
    max_embedding_values: Positive = 2**23  # numbers in one answer of a task
    # Of all answers with vectors together, from their requests on until they are sent.
    max_held_vector_bytes: Positive = 256 * MIB
    max_logprobs_per_answer: Positive = 4_194_304  # over all positions, choices and prompts
    write_timeout: Seconds = 120.0  # for a reader to take any data, before it is disconnected
    ready_wait: Annotated[float, Meta(ge=0)] = 30.0  # seconds a request waits for the model to load
    # Until an answer begins: a stream with its first token, others when they are complete.
    first_byte_timeout: Seconds | None = None
    request_timeout: Seconds | None = None  # None: no deadline unless the client sets one
    shutdown_timeout: Seconds = 30.0
    # What /v1/responses stores for later turns; 0 stores nothing.
    max_stored_responses: NonNegative = 1024
    max_stored_response_bytes: NonNegative = 64 * MIB
    # Background responses of one owner of API keys at the same time, where there are several.
    max_background_per_owner: Positive = 256
    strict_fields: bool = False  # refuse unknown fields
    # Keys for everything except the probes, each as KEY or "KEY OWNER". Without any key the server
    # is open to all.
    api_keys: tuple[Secret, ...] = ()
    api_key_file: str | None = None
    # Key for /debug. Without either of the two there are no debug endpoints.
    admin_key: Secret | None = None
    admin_key_file: str | None = None
    public_metrics: bool = False  # whether /metrics needs no key, like the probes
    playground: bool = True  # whether browsers get a page at /, to chat and to watch the engine
    # Origins whose web pages may send requests here from a browser; "*" is all.
    cors_origins: tuple[str, ...] = ()
    # Names, besides localhost, under which a server without API keys answers; "*" is all.
    allowed_hosts: tuple[str, ...] = ()


class ObservabilitySection(Section, frozen=True, kw_only=True):
    """Logs and the step timeline."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["text", "json"] = "text"
    stats_interval: Annotated[float, Meta(ge=0)] = 10.0  # seconds; 0: no periodic line
    log_requests: bool = False  # one line per completion
    legacy_metrics: bool = False  # metrics that vLLM renamed are also served under the old names
    # Seconds that work may be pending while no step completes; 0: forever.
    stall_seconds: Annotated[float, Meta(ge=0)] = 60.0
    # Where spans are sent by OTLP; the OTEL_... variables override it.
    otlp_endpoint: str | None = None
    trace_steps: Annotated[float, Meta(ge=0, le=1)] = 0.05  # share of the steps with a span
    trace_token_events: NonNegative = 0  # one event per this many deliveries of tokens; 0: none
    trace_content_chars: NonNegative = 0  # characters of each prompt and output in spans; 0: none
    timeline_steps: Annotated[int, Meta(ge=1, le=1_000_000)] = 4096  # steps that are kept
    timeline_requests: Annotated[int, Meta(ge=0, le=100_000)] = 1024  # ended completions
    plan_log: str | None = None  # a file; None: no plan log


class PluginsSection(Section, frozen=True, kw_only=True):
    """Packages outside the tree that add to the engine's tables."""

    enabled: tuple[str, ...] = ()  # names of installed packages; no other is ever imported


class Config(Section, frozen=True, kw_only=True):
    """The whole configuration."""

    model: ModelSection = ModelSection()
    device: DeviceSection = DeviceSection()
    cache: CacheSection = CacheSection()
    lora: LoraSection = LoraSection()
    scheduler: SchedulerSection = SchedulerSection()
    compile: CompileSection = CompileSection()
    speculation: SpeculationSection = SpeculationSection()
    structured_output: StructuredOutputSection = StructuredOutputSection()
    limits: LimitsSection = LimitsSection()
    chat: ChatSection = ChatSection()
    http: HttpSection = HttpSection()
    observability: ObservabilitySection = ObservabilitySection()
    plugins: PluginsSection = PluginsSection()
