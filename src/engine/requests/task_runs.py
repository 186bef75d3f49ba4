"""Runs of texts that ask for labels, for scores, or for a result of each token."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeGuard

from src.core.errors import InvalidRequestError, RequestError
from src.core.outputs import Classification, Delta, Embedding, Encoding, Score
from src.core.scoring import LabelRecipe, ResultActivation
from src.core.task import Task
from src.engine.requests.embedder import Embedder, Text
from src.engine.requests.embedding_run import (
    IDS_PER_CHAR,
    EmbeddingOptions,
    EmbeddingRun,
    named_error,
)
from src.engine.requests.pairs import LastQuery, PairBuilder, check_doc_tokens
from src.engine.requests.text_work import INLINE_CHARS

if TYPE_CHECKING:
    from src.engine.scheduling.waiting import Reservation

_CUT: Final = "truncate_prompt_tokens"
_SMALLEST: Final = 1e-12  # a vector's length, so that zeros stay zeros
# Pairs whose cosines are computed before others get the event loop: about a millisecond.
_COSINES_AT_ONCE: Final = 32
# Pairs whose texts are numbered together: some hundred microseconds.
_PAIRS_AT_ONCE: Final = 64
# A pair takes as long as tokenizing so many characters.
_CHARS_OF_PAIR: Final = 6
# Characters that are hashed in the time of tokenizing one.
_HASHED_PER_CHAR: Final = 1024
# Is no text of any pair.
_NO_TEXTS: Final = (object(), object())
# Numbers of tokens' results that are changed at a time: what is computed in float64 stays small.
_BLOCK: Final = 65_536


ENCODING_TASKS: Final[tuple[Task, ...]] = ("embed", "classify", "token_embed", "token_classify")
"""Tasks whose results are arrays."""
# Numbers of texts under way whose every token has a result: 64 MiB.
_MOST_VALUES: Final = 2**24


def _window_of(whole: int, longest: int, size: int) -> int:
    """How many texts may be under way, so that their results take little memory."""
    return max(1, min(whole, _MOST_VALUES // max(1, longest * size)))


class LabelRun(EmbeddingRun):
    """Classifies texts, or their tokens.

    Parameters
    ----------
    recipe
        What the model's head says.
    uses_activation
        Whether results are probabilities, and not the head's own numbers.
    truncate, adds_special_tokens, options
        See `EmbeddingRun`.
    """

    task: ClassVar[Task] = "classify"

    def __init__(
        self,
        recipe: LabelRecipe,
        uses_activation: bool,
        truncate: int | None,
        adds_special_tokens: bool,
        options: EmbeddingOptions,
    ) -> None:
        super().__init__(None, truncate, adds_special_tokens, None, None, options)
        self._labels = recipe.labels
        self._activation: ResultActivation = recipe.activation if uses_activation else "none"

    def _is_rendered(self, text: Any) -> bool:
        return isinstance(text, list | tuple) and bool(text) and isinstance(text[0], Mapping)

    async def _rendered(self, embedder: Embedder, text: Any, tenant: str) -> array[int]:
        ids = await embedder.tokens_of_chat(text, truncate=self._truncate, tenant=tenant)
        return array("i", ids)

    def _values(self, num_tokens: int) -> int:
        return len(self._labels)

    def _made(self, numbers: bytes, last: Delta) -> Any:
        return Classification(
            request_id=self.request_id,
            labels=self._labels,
            numbers=activated(numbers, len(self._labels), self._activation),
            raw=numbers,
            prompt_tokens=last.usage.prompt_tokens,
            cached_tokens=last.usage.cached_tokens,
        )


class TokenLabelRun(LabelRun):
    """Classifies each token of texts."""

    task: ClassVar[Task] = "token_classify"
    _longest = 0

    def _window(self) -> int:
        return _window_of(super()._window(), self._longest, len(self._labels))

    def _values(self, num_tokens: int) -> int:
        self._longest = max(self._longest, num_tokens)
        return num_tokens * len(self._labels)

    def _made(self, numbers: bytes, last: Delta) -> Any:
        size = len(self._labels)
        return _encoding(self.request_id, activated(numbers, size, self._activation), size, last)


class TokenVectorRun(EmbeddingRun):
    """Makes a vector of each token of texts."""

    task: ClassVar[Task] = "token_embed"
    _longest = 0

    def _window(self) -> int:
        assert self._embedder is not None
        return _window_of(super()._window(), self._longest, self._embedder.recipe.token_size)

    def _values(self, num_tokens: int) -> int:
        assert self._embedder is not None
        self._longest = max(self._longest, num_tokens)
        return num_tokens * self._embedder.recipe.token_size

    def _pooling(self) -> Any:
        return "all"

    def _made(self, numbers: bytes, last: Delta) -> Any:
        assert self._embedder is not None
        recipe = self._embedder.recipe
        if recipe.normalizes if self._normalizes is None else self._normalizes:
            numbers = _in_blocks(numbers, recipe.token_size, _normalized)
        return _encoding(self.request_id, numbers, recipe.token_size, last)


class PairRun(EmbeddingRun):
    """Scores pairs of texts, each as one text that was made of both.

    Parameters
    ----------
    pairs
        Makes one text of both.
    uses_activation
        Whether a score is what the model's files make of the head's number.
    max_tokens_per_doc
        See `PairBuilder.tokens`.
    truncate, adds_special_tokens, options
        See `EmbeddingRun`.
    """

    task: ClassVar[Task] = "score"
    field: ClassVar[str] = "pairs"

    def __init__(
        self,
        pairs: PairBuilder,
        uses_activation: bool,
        max_tokens_per_doc: int | None,
        truncate: int | None,
        adds_special_tokens: bool,
        options: EmbeddingOptions,
    ) -> None:
        super().__init__(None, truncate, adds_special_tokens, None, None, options)
        self._pairs = pairs
        self._activation: ResultActivation = pairs.recipe.activation if uses_activation else "none"
        self._max_tokens_per_doc = max_tokens_per_doc
        self._kinds: list[bytes] = []
        self._last_query = LastQuery()

    def _check(self, embedder: Embedder) -> None:
        self._pairs.check(self._truncate, self._max_tokens_per_doc)

    def _chars(self, text: Any, before: Any = None) -> int:
        if not _is_pair(text):
            return super()._chars(text)  # refused in its turn
        # A query with many documents is tokenized once. Its tokens are copied for each of them.
        is_known = _is_pair(before) and before[0] == text[0]
        is_text = isinstance(text[0], str)
        copied = min(len(text[0]), self._pairs.recipe.max_tokens) if is_text else 0
        own = sum(super(PairRun, self)._chars(each) for each in text[1 if is_known else 0 :])
        return own + copied // IDS_PER_CHAR

    def _is_rendered(self, text: Any) -> bool:
        return self._pairs.is_templated

    async def _rendered(self, embedder: Embedder, text: Any, tenant: str) -> array[int]:
        query, document = checked_pair(text)
        made = await self._pairs.templated(
            query,
            document,
            truncate=self._truncate,
            max_tokens_per_doc=self._max_tokens_per_doc,
            tenant=tenant,
        )
        self._kinds.append(b"")
        return array("i", made.ids)

    def _tokens(self, embedder: Embedder, text: Any) -> list[int]:
        query, document = checked_pair(text)
        made = self._pairs.tokens(
            query,
            document,
            adds_special_tokens=self._adds,
            truncate=self._truncate,
            max_tokens_per_doc=self._max_tokens_per_doc,
            last=self._last_query,
        )
        # Of texts that have no kinds, nothing is kept.
        self._kinds.append(made.types if made.types.strip(b"\0") else b"")
        return made.ids

    def _values(self, num_tokens: int) -> int:
        return 1

    def _pooling(self) -> Any:
        return self._pairs.recipe.pooling

    def _types(self, index: int) -> bytes:
        return self._kinds[index]

    def _made(self, numbers: bytes, last: Delta) -> Any:
        (score,) = memoryview(activated(numbers, 1, self._activation)).cast("f")
        (raw,) = memoryview(numbers).cast("f")
        return Score(
            request_id=self.request_id,
            score=score,
            raw=raw,
            prompt_tokens=last.usage.prompt_tokens,
            cached_tokens=last.usage.cached_tokens,
        )


class CosineRun(EmbeddingRun):
    """Scores pairs of texts by the cosine of their vectors; equal texts have one vector.

    Parameters
    ----------
    prompts
        What is put before queries, and before documents.
    max_tokens_per_doc
        Tokens of the second text that are kept.
    truncate, adds_special_tokens, options
        See `EmbeddingRun`.
    """

    task: ClassVar[Task] = "score"
    field: ClassVar[str] = "pairs"

    def __init__(
        self,
        prompts: tuple[str, str],
        max_tokens_per_doc: int | None,
        truncate: int | None,
        adds_special_tokens: bool,
        options: EmbeddingOptions,
    ) -> None:
        super().__init__(None, truncate, adds_special_tokens, None, None, options)
        self._prompts = prompts
        self._max_tokens_per_doc = max_tokens_per_doc
        # Whether a text has another vector as a query than as a document.
        self._has_sides = max_tokens_per_doc is not None or prompts[0] != prompts[1]
        # The different texts, and what each is known by -> its number.
        self._texts: list[Any] = []
        self._numbers: dict[Any, int] = {}
        # For each pair the numbers of its texts; for each text a pair that it is of.
        self._places: list[tuple[int, int]] = []
        self._first_pair: list[int] = []
        self._documents: set[int] = set()
        # The pair before: one query often stands with many documents.
        self._before: Sequence[Any] = _NO_TEXTS
        self._num_read = 0

    def _check(self, embedder: Embedder) -> None:
        super()._check(embedder)
        check_doc_tokens(self._max_tokens_per_doc, embedder.recipe.max_tokens)
        self._prompt_chars = max(map(len, self._prompts))

    async def _read(
        self, embedder: Embedder, reservation: Reservation, texts: Sequence[Any], tenant: str
    ) -> None:
        """Find the different texts of the pairs, and read these."""
        while (start := len(self._places)) < len(texts):
            some, size = _some_pairs(texts, start)
            await embedder.beside(tenant, size, self._add, some)
            if len(self._places) < start + len(some):
                raise named_error(_no_pair(), self.field, len(self._places))
            await asyncio.sleep(0)
            self._check_wanted()
        self._numbers.clear()
        different, self._texts = self._texts, []
        self._num_texts = len(different)
        await super()._read(embedder, reservation, different, tenant)

    def _add(self, pairs: Sequence[Any]) -> None:
        """Number the texts of pairs, up to the first that is none. A thread may call it."""
        for pair in pairs:
            if not _is_pair(pair):
                return
            first, second = (self._number(text, place) for place, text in enumerate(pair))
            self._places.append((first, second))
            self._documents.add(second)
            self._before = pair

    def _number(self, text: Any, place: int) -> int:
        if text is self._before[place]:
            return self._places[-1][place]
        key = (place if self._has_sides else 0, _key(text))
        number = self._numbers.setdefault(key, len(self._texts))
        if number == len(self._texts):
            self._texts.append(text)
            self._first_pair.append(len(self._places))
        return number

    def _tokens(self, embedder: Embedder, text: Text) -> list[int]:
        number, limit = self._num_read, self._max_tokens_per_doc
        self._num_read += 1
        keeps, is_document = self._truncate, number in self._documents
        is_limit = False
        if limit is not None and is_document and (keeps in (None, -1) or limit < keeps):
            keeps, is_limit = limit, True
        try:
            return embedder.tokens(
                text,
                adds_special_tokens=self._adds,
                truncate=keeps,
                prompt=self._prompts[is_document],
            )
        except RequestError as error:
            side = "document" if is_document else "query"
            error.rename("prompt", side)
            if error.param == "input":
                error.param = side
            if is_limit and error.param == _CUT:
                error.param = "max_tokens_per_doc"
                error.message = error.message.replace(_CUT, error.param)
                error.args = (error.message,)
            raise

    def _asks(self) -> Task:
        # Vectors, whatever is made of them.
        return "embed"

    def _named(self, error: RequestError, index: int) -> RequestError:
        pair = self._first_pair[index]
        return named_error(error, self.field, pair if len(self._places) > 1 else None)

    async def scores(self, embeddings: Sequence[Embedding]) -> list[Score]:
        """For each pair, the cosine of its vectors. Others get the event loop meanwhile."""
        import numpy as np

        made: list[Score] = []
        for place, (one, other) in enumerate(self._places):
            if place % _COSINES_AT_ONCE == _COSINES_AT_ONCE - 1:
                await asyncio.sleep(0)
            first, second = (
                np.frombuffer(embeddings[number].numbers, np.float32).astype(np.float64)
                for number in (one, other)
            )
            lengths = [max(float(np.linalg.norm(each)), _SMALLEST) for each in (first, second)]
            cosine = float(first @ second) / (lengths[0] * lengths[1])
            made.append(
                Score(
                    request_id=self.request_id,
                    score=cosine,
                    raw=cosine,
                    prompt_tokens=embeddings[one].prompt_tokens + embeddings[other].prompt_tokens,
                    cached_tokens=embeddings[one].cached_tokens + embeddings[other].cached_tokens,
                )
            )
        return made


def checked_pair(pair: object) -> tuple[Any, Any]:
    """A pair of texts.

    Raises
    ------
    InvalidRequestError
        It is no pair.
    """
    if not _is_pair(pair):
        raise _no_pair()
    first, second = pair
    return first, second


def _no_pair() -> InvalidRequestError:
    return InvalidRequestError("each pair must be two texts", param="pairs")


def _some_pairs(pairs: Sequence[Any], start: int) -> tuple[Sequence[Any], int]:
    """The pairs from ``start`` on whose texts are numbered together, and how long that takes.

    The time is in characters that are tokenized.
    """
    time = 0
    some: list[Any] = []
    before: Sequence[Any] = _NO_TEXTS
    for index in range(start, min(start + _PAIRS_AT_ONCE, len(pairs))):
        some.append(pair := pairs[index])
        time += _CHARS_OF_PAIR
        # What is no pair is refused in its turn.
        if _is_pair(pair):
            others = (one for one, other in zip(pair, before, strict=True) if one is not other)
            time += sum(map(_time_of_key, others))
            before = pair
        if time >= INLINE_CHARS:
            break
    return some, time


def _time_of_key(text: Any) -> int:
    if isinstance(text, list | tuple):
        return len(text) // IDS_PER_CHAR
    return len(text) // _HASHED_PER_CHAR if isinstance(text, str) else 0


def _key(text: Any) -> Any:
    """What equal texts have in common; what is no text is like no other: it will be refused."""
    if isinstance(text, str):
        return text
    if isinstance(text, list | tuple) and set(map(type, text)) == {int}:
        with contextlib.suppress(OverflowError):
            return array("i", text).tobytes()
    return object()


def _is_pair(given: Any) -> TypeGuard[Sequence[Any]]:
    is_list = isinstance(given, Sequence) and not isinstance(given, str | bytes | Mapping)
    return is_list and len(given) == 2


def activated(numbers: bytes, size: int, activation: ResultActivation) -> bytes:
    """Results [n, size] from the head's numbers; both float32 in this machine's byte order."""
    if activation == "none":
        return numbers
    return _in_blocks(numbers, size, _ACTIVATIONS[activation])


def _in_blocks(numbers: bytes, size: int, change: Callable[[Any], Any]) -> bytes:
    """What ``change`` makes of rows of ``size`` numbers, a block of rows at a time in float64."""
    import numpy as np

    rows = np.frombuffer(numbers, np.float32).reshape(-1, size)
    made = np.empty_like(rows)
    block = max(1, _BLOCK // size)
    for start in range(0, len(rows), block):
        made[start : start + block] = change(rows[start : start + block].astype(np.float64))
    return made.tobytes()


def _tanh(values: Any) -> Any:
    import numpy as np

    return np.tanh(values)


def _sigmoid(values: Any) -> Any:
    import numpy as np

    # Without an overflow, and without 1 less almost 1 where the result is next to 0.
    small = np.exp(-np.abs(values))
    return np.where(values < 0, small, 1.0) / (1.0 + small)


def _softmax(values: Any) -> Any:
    import numpy as np

    values = np.exp(values - values.max(axis=1, keepdims=True))
    return values / values.sum(axis=1, keepdims=True)


def _normalized(values: Any) -> Any:
    import numpy as np

    return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), _SMALLEST)


_ACTIVATIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "tanh": _tanh,
    "sigmoid": _sigmoid,
    "softmax": _softmax,
}


def encoding_of(made: Embedding | Classification) -> Encoding:
    """The same as an array."""
    return Encoding(
        request_id=made.request_id,
        numbers=made.numbers,
        shape=(len(made.numbers) // 4,),
        prompt_tokens=made.prompt_tokens,
        cached_tokens=made.cached_tokens,
    )


def _encoding(request_id: str, numbers: bytes, size: int, last: Delta) -> Encoding:
    return Encoding(
        request_id=request_id,
        numbers=numbers,
        shape=(len(numbers) // (4 * size), size),
        prompt_tokens=last.usage.prompt_tokens,
        cached_tokens=last.usage.cached_tokens,
    )
