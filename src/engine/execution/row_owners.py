"""Tracks which request owns which row, and writes plans into the rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from src.core.plan import RowInstall, StepPlan
from src.core.step_message import DeviceRequest, StepMessage
from src.engine.execution.held_adapters import HeldAdapters
from src.engine.execution.row_checks import check_install
from src.engine.execution.row_state import RowState
from src.engine.grammar.row_grammars import RowGrammars
from src.engine.sampling import Sampler
from src.engine.sampling.prompt_logprobs import still_unscored


class RowOwners:
    """Applies step messages to the rows: tokens, blocks, sampling parameters, grammars.

    Call it on the device thread only: for every step first `meet`, then `apply`. The token buffer,
    the sampler and the grammars know rows only; this class knows their requests.

    Parameters
    ----------
    vocab_size
        The model's; token ids are checked against it.
    adapters
        Brings adapters into their slots.

    Attributes
    ----------
    unscored
        Row -> the request that still waits for log-probabilities of its prompt, or ``None``.
    pooled
        Row -> its request, if that is pooled, or ``None``.
    on_leave
        Called with the newest row of a request that has ended, while its tokens are in that row.
    """

    def __init__(
        self,
        rows: RowState,
        sampler: Sampler,
        grammars: RowGrammars,
        vocab_size: int,
        adapters: HeldAdapters,
    ) -> None:
        self._rows = rows
        self._sampler = sampler
        self._grammars = grammars
        self._vocab_size = vocab_size
        self._adapters = adapters
        self.unscored: list[DeviceRequest | None] = [None] * rows.padding_row
        self.pooled: list[DeviceRequest | None] = [None] * rows.padding_row
        self.on_leave: Callable[[int, DeviceRequest], None] | None = None
        # Key -> request that was admitted and has not ended.
        self._known: dict[int, DeviceRequest] = {}
        # Row -> key of the request that was last installed in it. Key -> all rows that the request
        # was installed in, the newest last.
        self._owners: list[int | None] = [None] * rows.padding_row
        self._rows_of: dict[int, list[int]] = {}

    @property
    def num_known(self) -> int:
        """Requests that were admitted and have not ended."""
        return len(self._known)

    def meet(self, message: StepMessage) -> None:
        """Add the requests that the message admits, and forget those that ended."""
        for request in message.admitted:
            self._known[request.key] = request
        self.forget(message.ended)

    def request_of(self, row: int) -> DeviceRequest | None:
        """The request that was last installed in a row, if it has not ended."""
        key = self._owners[row]
        return None if key is None else self._known.get(key)

    def apply(self, plan: StepPlan) -> list[tuple[int, str]]:
        """Write a plan into the rows.

        Returns (key, reason) of each request that could not be installed. Its row is cleared.
        """
        refused = []
        for install in plan.installs:
            try:
                self._install(install)
            # A bad request must not fail the other requests of the step.
            except Exception as error:
                self._clear(install)
                refused.append((install.request_key, f"{type(error).__name__}: {error}"))
        for append in plan.block_appends:
            self._rows.append_blocks(append)
        self._grammars.begin()
        return refused

    def forget(self, ended: Sequence[int]) -> None:
        """Forget ended requests, and vacate their rows. No later step names these owners."""
        for key in ended:
            request = self._known.pop(key, None)
            self._grammars.forget(key)
            rows = self._rows_of.pop(key, [])
            for row in rows:
                if self._owners[row] == key:
                    # A row that it had before a preemption has the same text, or less of it.
                    is_newest = row == rows[-1]
                    if is_newest and self.on_leave is not None and request is not None:
                        self.on_leave(row, request)
                    self._owners[row] = None
                    self.unscored[row] = None
                    self.pooled[row] = None
                    self._sampler.vacate(row)
                    # They may be as large as the client's prompt is long.
                    self._rows.own_inputs.clear(row)

    def neutralize(self, plan: StepPlan) -> None:
        """Make the rows of a failed step harmless, since the next step in flight may name them."""
        for install in plan.installs:
            request = self._known[install.request_key]
            self.unscored[install.row] = still_unscored(request, install)
            self.pooled[install.row] = None if request.pooling is None else request
            self._sampler.state.neutralize(install.row)
            self._adapters.bring(install)
        self._rows.neutralize(plan)

    def _install(self, install: RowInstall) -> None:
        request = self._known[install.request_key]
        self._owners[install.row] = install.request_key
        rows = self._rows_of.setdefault(install.request_key, [])
        if install.row in rows:
            rows.remove(install.row)
        rows.append(install.row)
        check_install(install, request.params, self._vocab_size, self._rows.max_model_len)
        self.unscored[install.row] = still_unscored(request, install)
        self.pooled[install.row] = None if request.pooling is None else request
        self._adapters.bring(install)
        self._rows.install(install)
        self._rows.own_inputs.install(install.row, request.step_inputs)
        self._sampler.state.install(install.row, request, install.prompt_len)
        self._grammars.install(install.row, request, install.token_ids[install.prompt_len :])

    def _clear(self, install: RowInstall) -> None:
        """Make a row harmless whose request could not be installed, since steps still name it."""
        self.unscored[install.row] = None
        self.pooled[install.row] = None
        self._rows.install_harmless(install)
        self._rows.own_inputs.clear(install.row)
        self._sampler.state.neutralize(install.row)
        self._grammars.vacate(install.row)
