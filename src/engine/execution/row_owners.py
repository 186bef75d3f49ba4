"""Which request has which row, and what the rows are told of it."""

from __future__ import annotations

from collections.abc import Sequence

from src.core.plan import RowInstall, StepPlan
from src.core.step_message import DeviceRequest, StepMessage
from src.engine.execution.row_checks import check_install
from src.engine.execution.row_state import RowState
from src.engine.grammar.row_grammars import RowGrammars
from src.engine.sampling import Sampler
from src.engine.sampling.prompt_logprobs import still_unscored


class RowOwners:
    """Brings step messages into the rows: tokens, blocks, sampling parameters, grammars.

    Call it on the device thread only: for every step first :meth:`meet`, then :meth:`apply`. The
    token buffer, the sampler and the grammars know rows; this alone knows whose they are.

    Parameters
    ----------
    vocab_size
        Of the model, which tokens are checked against.

    Attributes
    ----------
    unscored
        Row -> the request that still waits for log-probabilities of its prompt, or ``None``.
    """

    def __init__(
        self, rows: RowState, sampler: Sampler, grammars: RowGrammars, vocab_size: int
    ) -> None:
        self._rows = rows
        self._sampler = sampler
        self._grammars = grammars
        self._vocab_size = vocab_size
        self.unscored: list[DeviceRequest | None] = [None] * rows.padding_row
        # Key -> request that has not ended.
        self._known: dict[int, DeviceRequest] = {}
        # Row -> key of its newest owner, and key -> the rows that it was installed in.
        self._owners: list[int | None] = [None] * rows.padding_row
        self._rows_of: dict[int, set[int]] = {}

    @property
    def num_known(self) -> int:
        """Requests that were admitted and have not ended."""
        return len(self._known)

    def meet(self, message: StepMessage) -> None:
        """Know those whom its plan installs for the first time, and no more those who ended."""
        for request in message.admitted:
            self._known[request.key] = request
        self.forget(message.ended)

    def apply(self, plan: StepPlan) -> list[tuple[int, str]]:
        """Write a plan into the rows.

        Returns who could not be installed, by key, and why; their rows ask for nothing.
        """
        refused = []
        for install in plan.installs:
            try:
                self._install(install)
            # Whatever it is about this request, the others of the step have no part in it.
            except Exception as error:
                self._clear(install)
                refused.append((install.request_key, f"{type(error).__name__}: {error}"))
        for append in plan.block_appends:
            self._rows.append_blocks(append)
        self._grammars.begin()
        return refused

    def forget(self, ended: Sequence[int]) -> None:
        """Keep nothing of these: no step that comes behind names the rows that they had."""
        for key in ended:
            self._known.pop(key, None)
            self._grammars.forget(key)
            for row in self._rows_of.pop(key, ()):
                if self._owners[row] == key:
                    self._owners[row] = None
                    self.unscored[row] = None
                    self._sampler.vacate(row)

    def neutralize(self, plan: StepPlan) -> None:
        """Make harmless what a failed step left in its rows, which steps behind it still name."""
        for install in plan.installs:
            request = self._known[install.request_key]
            self.unscored[install.row] = still_unscored(request, install)
            self._sampler.state.neutralize(install.row)
        self._rows.neutralize(plan)

    def _install(self, install: RowInstall) -> None:
        request = self._known[install.request_key]
        self._owners[install.row] = install.request_key
        self._rows_of.setdefault(install.request_key, set()).add(install.row)
        check_install(install, request.params, self._vocab_size, self._rows.max_model_len)
        self.unscored[install.row] = still_unscored(request, install)
        self._rows.install(install)
        self._sampler.state.install(install.row, request, install.prompt_len)
        self._grammars.install(install.row, request, install.token_ids[install.prompt_len :])

    def _clear(self, install: RowInstall) -> None:
        """Have a row ask for nothing: its owner could not be installed, and steps name it still."""
        self.unscored[install.row] = None
        self._rows.install_harmless(install)
        self._sampler.state.neutralize(install.row)
        self._grammars.vacate(install.row)
