"""``POST /v2/embed``, Cohere's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from src.core.errors import InvalidRequestError
from src.core.outputs import Embedding
from src.engine.client import AsyncEngine
from src.http.embeddings.inputs import given_texts, pooled_options, renaming
from src.http.embeddings.vectors import (
    held_numbers,
    json_base64,
    json_numbers,
    vector_size,
)
from src.http.generation.sampling import check_neutral
from src.http.protocol.cohere import (
    NEUTRAL_IN_COHERE,
    BilledUnits,
    CohereEmbedRequest,
    CohereMeta,
    EmbeddingType,
)
from src.http.server.call import Call
from src.http.server.fields import RequestDecoder
from src.http.server.state import adapter_name, served_name

_decode: Final = RequestDecoder(CohereEmbedRequest)
_encode: Final = msgspec.json.Encoder().encode

# What checkpoints call their prompts for Cohere's kinds of input.
_OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "search_query": ("query",),
    "search_document": ("document", "passage"),
    "classification": (),
    "clustering": (),
}
# Kinds that no prompt is put before, if the checkpoint has none of these names.
_PLAIN: Final = ("search_document",)
_BITS: Final = 8
# Of an error's field: our name, and Cohere's
_NAMES: Final = {
    "input": "texts",
    "dimensions": "output_dimension",
    "truncate_prompt_tokens": "max_tokens",
}


async def embed_for_cohere(call: Call) -> None:
    """The vectors of texts, in the forms that are asked for."""
    request = _decode(call)
    check_neutral(request, NEUTRAL_IN_COHERE)
    engine = await call.admitted_engine()
    name = served_name(engine, request.model)
    most = call.server.config.http.max_embedding_inputs
    texts = given_texts(request.texts, most, "texts")
    forms: Sequence[EmbeddingType] = request.embedding_types or ("float",)
    size = vector_size(engine, request.output_dimension)
    if size % _BITS and ("binary" in forms or "ubinary" in forms):
        raise InvalidRequestError(
            f"embedding_types: vectors of {size} numbers are not whole bytes as bits",
            param="embedding_types",
        )
    made = engine.embed(
        texts,
        dimensions=request.output_dimension,
        truncate=_kept(engine, request),
        prompt_name=_prompt_name(engine, request.input_type),
        admission=call.admission,
        **pooled_options(
            call,
            model=name,
            lora=adapter_name(engine, name),
            priority=request.priority,
            timeout=request.timeout,
        ),
    )
    # They are in the answer too.
    said, num_texts = _encode(texts), len(texts)
    del texts, request
    count = num_texts * size
    with (
        contextlib.closing(made),
        renaming(_NAMES),
        held_numbers(call, num_texts, count, others=len(said), field="texts"),
    ):
        embeddings = await made
        await call.answer_in_pieces(_pieces(call.id, said, embeddings, forms))


def _prompt_name(engine: AsyncEngine, input_type: str | None) -> str | None:
    """The checkpoint's prompt for a kind of input; ``None``: its default.

    Raises
    ------
    InvalidRequestError
        The checkpoint has prompts, and none for this kind.
    """
    recipe = engine.model_info.embedding
    if input_type is None or recipe is None:
        return None
    names = (input_type, *_OTHER_NAMES.get(input_type, ()))
    for name in names:
        if name in recipe.prompts:
            return name
    # A model without prompts takes every kind of input alike.
    if input_type in _OTHER_NAMES and (not recipe.prompts or input_type in _PLAIN):
        return None
    known = ", ".join(sorted(recipe.prompts)) or ", ".join(_OTHER_NAMES)
    raise InvalidRequestError(
        f"input_type must be one that the model has a prompt for ({known}), got "
        f"{input_type[:100]!r}",
        param="input_type",
    )


def _kept(engine: AsyncEngine, request: CohereEmbedRequest) -> int | None:
    """How many tokens of a text are kept; ``None``: a text that is too long is refused.

    Cohere cuts texts that are too long where nothing is said of it. Here one has to say so.
    """
    if request.truncate == "NONE" and request.max_tokens is not None:
        raise InvalidRequestError(
            "max_tokens may not be given with truncate = NONE: it says how many tokens are kept",
            param="max_tokens",
        )
    recipe = engine.model_info.embedding
    if request.max_tokens is not None and recipe is not None:
        return min(request.max_tokens, recipe.max_tokens)
    return -1 if request.truncate == "END" else None


def _pieces(
    request_id: str, texts: bytes, embeddings: list[Embedding], forms: Sequence[EmbeddingType]
) -> Iterator[bytes]:
    """The answer, each piece made when it is asked for."""
    yield b'{"id":%b,"response_type":"embeddings_by_type","embeddings":{' % _encode(request_id)
    for place, form in enumerate(dict.fromkeys(forms)):
        yield b'%b"%b":[' % (b"," if place else b"", form.encode())
        for index, embedding in enumerate(embeddings):
            if index:
                yield b","
            yield from _FORMS[form](embedding.numbers)
        yield b"]"
    meta = CohereMeta(
        billed_units=BilledUnits(input_tokens=sum(each.prompt_tokens for each in embeddings))
    )
    yield b'},"texts":%b,"meta":%b}' % (texts, _encode(meta))


def _bits(numbers: bytes) -> bytes:
    """A bit for each number, set where it is over 0; the first in the highest bit of a byte."""
    signs = "".join("1" if value > 0 else "0" for value in memoryview(numbers).cast("f"))
    return int(signs, 2).to_bytes(len(signs) // _BITS, "big")


def _unsigned(numbers: bytes) -> Iterator[bytes]:
    yield _encode(list(_bits(numbers)))


def _signed(numbers: bytes) -> Iterator[bytes]:
    yield _encode([byte - 128 for byte in _bits(numbers)])


_FORMS: Final[Mapping[str, Callable[[bytes], Iterator[bytes]]]] = {
    "float": json_numbers,
    "base64": json_base64,
    "binary": _signed,
    "ubinary": _unsigned,
}
