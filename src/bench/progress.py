"""A progress bar that shows the rate of answers and the number of failures."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

from src.bench.answers import Answer


class Progress:
    """A bar on standard error, or nothing; can be passed as ``on_answer``."""

    def __init__(self, total: int, *, shown: bool, unit: str = " requests") -> None:
        self._bar: tqdm[Any] = tqdm(total=total, disable=not shown, unit=unit, smoothing=0.1)
        self._failed = 0
        self._tokens = 0

    def __call__(self, answer: Answer) -> None:
        """Count one more answer."""
        self._failed += not answer.success
        self._tokens += answer.output_tokens
        shown = {"tokens": self._tokens} | ({"failed": self._failed} if self._failed else {})
        self._bar.set_postfix(shown, refresh=False)
        self._bar.update()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()
