"""Every client: what is installed for it, the file that exercises it, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass

from tests.clients.environments import Environment

# They agree about the versions of `openai` and of pydantic.
SDKS = Environment(
    "sdks",
    (
        "openai",
        "anthropic",
        "openai-agents",
        "langchain-openai",
        "pydantic-ai-slim[openai]",
        "pytest",
    ),
)
# It wants an older jiter than the newest `openai`.
INSTRUCTOR = Environment("instructor", ("instructor", "pytest"))
# It imports mcp wherever tools or responses are used, without requiring it.
LITELLM = Environment("litellm", ("litellm", "mcp", "pytest"))
COHERE = Environment("cohere", ("cohere", "pytest"))
# Its vectors come as arrays of numpy, which it does not require.
LANGCHAIN_HUGGINGFACE = Environment(
    "langchain-huggingface", ("langchain-huggingface", "numpy", "pytest")
)
LLAMA_INDEX = Environment(
    "llama-index",
    (
        "llama-index-core",
        "llama-index-embeddings-openai-like",
        "llama-index-embeddings-text-embeddings-inference",
        "llama-index-postprocessor-tei-rerank",
        "pytest",
    ),
)
# It reads the tokenizer with transformers, which does that without torch.
LM_EVAL = Environment("lm-eval", ("lm-eval[api]", "transformers"))
# It requires torch, of which the processor's build will do: pip finds a local one.
GUIDELLM = Environment("guidellm", ("guidellm", "torch==2.13.0"), local=True)
AIPERF = Environment("aiperf", ("aiperf",))
ROUTER = Environment("router", ("vllm-router==0.1.17",))
NODE = Environment(
    "node", ("openai", "ai", "@ai-sdk/openai-compatible", "zod", "@openai/codex"), npm=True
)


@dataclass(frozen=True)
class Client:
    """A client and its test.

    ``script`` is a file beside this one. A Python file runs under pytest in the environment itself,
    or in the project's where ``outside`` is set, with the environment's programs on PATH; a
    JavaScript file runs under Node's test runner. ``reads_vectors``: it needs the encoder's server
    too. ``seconds`` is the most it may take.
    """

    name: str
    environment: Environment
    script: str
    package: str
    outside: bool = False
    reads_vectors: bool = False
    seconds: float = 300.0


CLIENTS = (
    Client("openai", SDKS, "with_openai.py", "openai"),
    Client("openai-responses", SDKS, "with_openai_responses.py", "openai"),
    Client("anthropic", SDKS, "with_anthropic.py", "anthropic"),
    Client("langchain-openai", SDKS, "with_langchain.py", "langchain-openai"),
    Client("instructor", INSTRUCTOR, "with_instructor.py", "instructor"),
    Client("pydantic-ai", SDKS, "with_pydantic_ai.py", "pydantic-ai-slim"),
    Client("openai-agents", SDKS, "with_openai_agents.py", "openai-agents"),
    Client("litellm", LITELLM, "with_litellm.py", "litellm", reads_vectors=True),
    Client("cohere", COHERE, "with_cohere.py", "cohere", reads_vectors=True),
    Client(
        "llama-index",
        LLAMA_INDEX,
        "with_llama_index.py",
        "llama-index-core",
        reads_vectors=True,
    ),
    Client(
        "langchain-huggingface",
        LANGCHAIN_HUGGINGFACE,
        "with_langchain_huggingface.py",
        "langchain-huggingface",
        reads_vectors=True,
    ),
    Client("lm-eval", LM_EVAL, "with_lm_eval.py", "lm-eval", outside=True, seconds=600),
    Client("guidellm", GUIDELLM, "with_guidellm.py", "guidellm", outside=True),
    Client("aiperf", AIPERF, "with_aiperf.py", "aiperf", outside=True),
    Client("vllm-router", ROUTER, "with_vllm_router.py", "vllm-router", outside=True, seconds=600),
    Client("node-openai", NODE, "with_openai.mjs", "openai"),
    Client("node-ai-sdk", NODE, "with_ai_sdk.mjs", "ai"),
    Client("codex", NODE, "with_codex.py", "@openai/codex", outside=True, seconds=600),
)
