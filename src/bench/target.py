"""The server to be measured: its addresses, its model, and a tokenizer for prompts."""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from src.bench.codecs import Codec, ServerCodec, TokenizerCodec, WordCodec
from src.bench.errors import BenchError, error_message
from src.bench.openai_client import Kind, key_headers
from src.text.tokenizer import Tokenizer

# vLLM's backend name -> what is asked for.
BACKENDS: Final[dict[str, Kind]] = {
    "openai": "completions",
    "vllm": "completions",
    "openai-chat": "chat",
    "vllm-chat": "chat",
    "openai-embeddings": "embeddings",
    "vllm-rerank": "rerank",
}
ENDPOINTS: Final[dict[Kind, str]] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
}
_SECONDS: Final = 30.0
_POLL: Final = 0.5


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """A server.

    ``root`` is the address before ``/v1``; ``url`` is the complete URL for requests.
    """

    root: str
    url: str
    kind: Kind
    headers: Mapping[str, str] = {}
    verify: bool = True

    def get(self, path: str) -> Any:
        """The JSON document at a path.

        Raises
        ------
        BenchError
            There is none.
        """
        try:
            return json.loads(self.text(path))
        except ValueError as error:
            raise BenchError(f"{self.root}{path}: {error}") from error

    def text(self, path: str) -> str:
        """The text at a path.

        Raises
        ------
        BenchError
            There is none.
        """
        headers = {**key_headers(), **self.headers}
        request = urllib.request.Request(self.root + path, headers=headers)
        context = None if self.verify else ssl._create_unverified_context()
        try:
            with urllib.request.urlopen(request, timeout=_SECONDS, context=context) as answer:
                body: bytes = answer.read()
                return body.decode()
        except urllib.error.HTTPError as error:
            reason = error_message(error.read())
            raise BenchError(f"{self.root}{path}: HTTP {error.code}: {reason}") from error
        except (OSError, ValueError) as error:
            raise BenchError(f"{self.root}{path}: {error}") from error

    def first_model(self) -> str:
        """The first model that the server lists.

        Raises
        ------
        BenchError
            It does not answer, or lists no model.
        """
        listed = self.get("/v1/models")
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise BenchError(f"{self.root}/v1/models names no model; name one by --model") from None


def target_of(
    backend: str,
    base_url: str | None,
    host: str,
    port: int,
    endpoint: str | None,
    headers: Mapping[str, str],
    *,
    verify: bool = True,
) -> Target:
    """The server that vLLM's options describe; a base URL may end with ``/v1`` or not.

    Raises
    ------
    BenchError
        The address is invalid.
    """
    shown_host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    base = (base_url or f"http://{shown_host}:{port}").rstrip("/")
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise BenchError(f"--base-url: expected http://HOST:PORT, got {base}")
    kind = BACKENDS[backend]
    path = endpoint or ENDPOINTS[kind]
    root = base.removesuffix("/v1")
    url = (root if path.startswith("/v1") else base) + path
    return Target(root=root, url=url, kind=kind, headers=headers, verify=verify)


def codec_of(target: Target, model: str, tokenizer: str | None) -> Codec:
    """The named tokenizer; else the model's, if ``model`` is a directory; else the server's.

    If none is available, words are used as tokens.

    Raises
    ------
    ModelLoadError
        The named tokenizer cannot be read.
    """
    if tokenizer is not None:
        return TokenizerCodec(_read_tokenizer(tokenizer), tokenizer)
    if Path(model).exists():
        return TokenizerCodec(_read_tokenizer(model), model)
    try:
        return ServerCodec(target.root, model, {**key_headers(), **target.headers}, target.verify)
    except BenchError:
        return WordCodec()


def wait_ready(target: Target, seconds: float) -> None:
    """Wait until the server lists its models.

    Raises
    ------
    BenchError
        It does not within ``seconds``.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            target.get("/v1/models")
            return
        except BenchError as error:
            if time.monotonic() > deadline:
                raise BenchError(f"not ready after {seconds:g} s: {error}") from error
        time.sleep(_POLL)


def _read_tokenizer(name: str) -> Tokenizer:
    path = Path(name).expanduser()
    if not (path / "tokenizer_config.json").is_file():
        # Imported here because it imports torch.
        from src.models.hub import resolve_model

        path = resolve_model(name, weights=False)
    return Tokenizer.from_directory(path)
