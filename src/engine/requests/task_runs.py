"""Runs of texts that ask for labels, for scores, or for a result of each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from src.core.errors import InvalidRequestError, RequestError
from src.core.outputs import Classification, Delta, Embedding, Encoding, Score
from src.core.scoring import LabelRecipe, ResultActivation
from src.core.task import Task
from src.engine.requests.embedder import Embedder, Text
from src.engine.requests.embedding_run import EmbeddingOptions, EmbeddingRun, named_error
from src.engine.requests.pairs import LastQuery, PairBuilder, check_doc_tokens
from src.engine.requests.prompts import Prompt

_CUT: Final = "truncate_prompt_tokens"
_SMALLEST: Final = 1e-12  # a vector's length, so that zeros stay zeros


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

    async def _tokens(self, embedder: Embedder, text: Text, tenant: str) -> list[int]:
        return await embedder.tokens_of_prompt(
            text, adds_special_tokens=self._adds, truncate=self._truncate, tenant=tenant
        )

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

    async def _tokens(self, embedder: Embedder, text: Text, tenant: str) -> list[int]:
        ids = await super()._tokens(embedder, text, tenant)
        self._longest = max(self._longest, len(ids))
        return ids

    def _window(self) -> int:
        return _window_of(super()._window(), self._longest, len(self._labels))

    def _values(self, num_tokens: int) -> int:
        return num_tokens * len(self._labels)

    def _made(self, numbers: bytes, last: Delta) -> Any:
        size = len(self._labels)
        return _encoding(self.request_id, activated(numbers, size, self._activation), size, last)


class TokenVectorRun(EmbeddingRun):
    """Makes a vector of each token of texts."""

    task: ClassVar[Task] = "token_embed"
    _longest = 0

    async def _tokens(self, embedder: Embedder, text: Text, tenant: str) -> list[int]:
        ids = await super()._tokens(embedder, text, tenant)
        self._longest = max(self._longest, len(ids))
        return ids

    def _window(self) -> int:
        assert self._embedder is not None
        return _window_of(super()._window(), self._longest, self._embedder.recipe.size)

    def _values(self, num_tokens: int) -> int:
        assert self._embedder is not None
        return num_tokens * self._embedder.recipe.size

    def _pooling(self) -> Any:
        return "all"

    def _made(self, numbers: bytes, last: Delta) -> Any:
        assert self._embedder is not None
        recipe = self._embedder.recipe
        if recipe.normalizes:
            import numpy as np

            vectors = np.frombuffer(numbers, np.float32).reshape(-1, recipe.size).astype(float)
            lengths = np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), _SMALLEST)
            numbers = (vectors / lengths).astype(np.float32).tobytes()
        return _encoding(self.request_id, numbers, recipe.size, last)


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

    async def _tokens(self, embedder: Embedder, text: Any, tenant: str) -> list[int]:
        query, document = checked_pair(text)
        made = await self._pairs.tokens(
            query,
            document,
            adds_special_tokens=self._adds,
            truncate=self._truncate,
            max_tokens_per_doc=self._max_tokens_per_doc,
            tenant=tenant,
            last=self._last_query,
        )
        # Of texts that have no kinds, nothing is kept.
        self._kinds.append(made.types if any(made.types) else b"")
        return made.ids

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
    pairs
        Of texts, or of lists of token ids.
    prompts
        What is put before queries, and before documents.
    max_tokens_per_doc
        Tokens of the second text that are kept.
    truncate, adds_special_tokens, options
        See `EmbeddingRun`.

    Attributes
    ----------
    texts
        The different texts.

    Raises
    ------
    InvalidRequestError
        One is no pair; names it.
    """

    task: ClassVar[Task] = "score"
    field: ClassVar[str] = "pairs"

    def __init__(
        self,
        pairs: Sequence[tuple[Prompt, Prompt]],
        prompts: tuple[str, str],
        max_tokens_per_doc: int | None,
        truncate: int | None,
        adds_special_tokens: bool,
        options: EmbeddingOptions,
    ) -> None:
        super().__init__(None, truncate, adds_special_tokens, None, None, options)
        if isinstance(pairs, str | bytes | Mapping) or not isinstance(pairs, Sequence):
            raise InvalidRequestError(
                f"pairs must be a list of pairs, got {type(pairs).__name__}", param="pairs"
            )
        self.texts: list[Any] = []
        self._prompts = prompts
        self._max_tokens_per_doc = max_tokens_per_doc
        # Whether a text has another vector as a query than as a document.
        has_sides = max_tokens_per_doc is not None or prompts[0] != prompts[1]
        # For each pair the numbers of its texts; for each text a pair that it is of.
        self._places: list[tuple[int, int]] = []
        self._first_pair: list[int] = []
        numbers: dict[Any, int] = {}
        for index, pair in enumerate(pairs):
            try:
                found = checked_pair(pair)
            except InvalidRequestError as error:
                raise named_error(error, self.field, index) from None
            both = []
            for place, text in enumerate(found):
                key = (place if has_sides else 0, type(text), str(text))
                number = numbers.setdefault(key, len(self.texts))
                if number == len(self.texts):
                    self.texts.append(text)
                    self._first_pair.append(index)
                both.append(number)
            self._places.append((both[0], both[1]))
        self._documents = {second for _, second in self._places}
        self._num_read = 0

    def _check(self, embedder: Embedder) -> None:
        super()._check(embedder)
        check_doc_tokens(self._max_tokens_per_doc, embedder.recipe.max_tokens)

    async def _tokens(self, embedder: Embedder, text: Text, tenant: str) -> list[int]:
        number, limit = self._num_read, self._max_tokens_per_doc
        self._num_read += 1
        keeps, is_document = self._truncate, number in self._documents
        is_limit = False
        if limit is not None and is_document and (keeps in (None, -1) or limit < keeps):
            keeps, is_limit = limit, True
        try:
            return await embedder.tokens(
                text,
                adds_special_tokens=self._adds,
                truncate=keeps,
                prompt=self._prompts[is_document],
                tenant=tenant,
            )
        except RequestError as error:
            if error.param in ("input", "prompt"):
                error.param = "document" if is_document else "query"
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

    def scores(self, embeddings: Sequence[Embedding]) -> list[Score]:
        """For each pair, the cosine of its vectors."""
        import numpy as np

        vectors = [
            np.frombuffer(each.numbers, np.float32).astype(np.float64) for each in embeddings
        ]
        lengths = [max(float(np.linalg.norm(each)), _SMALLEST) for each in vectors]
        scores = []
        for one, other in self._places:
            cosine = float(vectors[one] @ vectors[other]) / (lengths[one] * lengths[other])
            scores.append(
                Score(
                    request_id=self.request_id,
                    score=cosine,
                    raw=cosine,
                    prompt_tokens=embeddings[one].prompt_tokens + embeddings[other].prompt_tokens,
                    cached_tokens=embeddings[one].cached_tokens + embeddings[other].cached_tokens,
                )
            )
        return scores


def checked_pair(pair: object) -> tuple[Any, Any]:
    """A pair of texts.

    Raises
    ------
    InvalidRequestError
        It is no pair.
    """
    if isinstance(pair, str | bytes | Mapping) or not isinstance(pair, Sequence) or len(pair) != 2:
        raise InvalidRequestError("each pair must be two texts", param="pairs")
    first, second = pair
    return first, second


def activated(numbers: bytes, size: int, activation: ResultActivation) -> bytes:
    """Results [n, size] from the head's numbers; both float32 in this machine's byte order."""
    if activation == "none":
        return numbers
    import numpy as np

    values = np.frombuffer(numbers, np.float32).reshape(-1, size).astype(np.float64)
    if activation == "tanh":
        values = np.tanh(values)
    elif activation == "sigmoid":
        # Without an overflow, and without 1 less almost 1 where the result is next to 0.
        small = np.exp(-np.abs(values))
        values = np.where(values < 0, small, 1.0) / (1.0 + small)
    else:
        values = np.exp(values - values.max(axis=1, keepdims=True))
        values /= values.sum(axis=1, keepdims=True)
    return values.astype(np.float32).tobytes()


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
