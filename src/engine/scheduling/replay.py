"""The plan log: all calls of a scheduler as JSON lines, and their replay without a device.

Lines are in the order of the calls. Each is an array that begins with the kind of call::

    ["limits", version, {...}]                          the scheduler was built
    ["add", key, priority, max_tokens, min_tokens, prompt_logprobs, salt, [token, ...],
            adapter, tenant, pooling, has_grammar, task, call, media]
    ["finish", key, reason]                             a request was ended from outside
    ["expire", [key, ...]]                              deadlines passed
    ["plan", step_id, installs, block_appends, rows, state_loads, state_saves, adapters]
                                                        a step was planned
    ["nothing"]                                         there was nothing to launch
    ["commit", step_id, [[token, ...], ...], rests]     a result came back, tokens of each row
    ["reset"]                                           the prefix cache was emptied
    ["cut", why]                                        the log ends before the engine did

Installs are ``[row, generation, key, number of tokens, prompt_len, block_ids]``, with one list of
block ids per group of layers. Block appends are ``[row, group, index, block_ids]``. Rows are
``[row, generation, start, num_tokens, samples]``, and with drafts, of the row or of steps before,
``[..., drafts, slack, limit]``; ``samples`` is 2 where a pooled row ends. Copies of recurrent
states are ``[row, slot]``.
A request's adapter is ``[key, number of its content]`` or null, and a plan has
``[row, key, slot]`` for each install with one. Its call is the key of the first of the texts that
were asked for together, or null. Its media are ``[[block, number of their key], ...]``.

Rests are ``[index of the row in its plan, steps without drafts]``.

A token need not be the real token id. It is an integer for which equal prefixes stay equal, and
`END_TOKEN` stands for a token that ended its request. The log has no times: a deadline is a line at
the place where it was noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, TypeAlias

import msgspec

from src.core.adapter import NO_ADAPTER, Adapter
from src.core.outputs import FinishReason
from src.core.plan import RowResult, RowStep, StepPlan, StepResult
from src.core.request import Pooling, Request
from src.core.sampling_params import SamplingParams
from src.core.task import Task
from src.engine.kv.block_pool import InvariantError
from src.engine.scheduling.admission import SchedulerLimits
from src.engine.scheduling.plan_builder import SchedulerStats
from src.engine.scheduling.scheduler import Scheduler

VERSION: Final = 6
# Logs from this version on are replayed: what they lack has a default.
OLDEST_VERSION: Final = 2
END_TOKEN: Final = -1


class _Line(msgspec.Struct, frozen=True, array_like=True):
    """One line of the log; the module's docstring has the fields of each kind."""


class LimitsLine(_Line, frozen=True, tag="limits"):
    """A scheduler was built."""

    version: int
    limits: SchedulerLimits


class AddLine(_Line, frozen=True, tag="add"):
    """A request was queued."""

    key: int
    priority: int
    max_tokens: int
    min_tokens: int
    prompt_logprobs: int | None
    salt: int
    token_ids: list[int]
    adapter: tuple[int, int] | None = None
    tenant: str = ""
    pooling: Pooling | None = None
    has_grammar: bool = False
    # Logs up to version 4 have none: there were no tasks beside text and vectors.
    task: Task | None = None
    # Logs up to version 5 have neither: texts waited in order of arrival, and media had no names.
    call: int | None = None
    media: list[tuple[int, int]] = []
    # Logs that lack it are of engines whose rows all had drafts from their first token on.
    has_prediction: bool = False


class FinishLine(_Line, frozen=True, tag="finish"):
    """A request was ended from outside."""

    key: int
    reason: FinishReason


class ExpireLine(_Line, frozen=True, tag="expire"):
    """The deadlines of these requests had passed."""

    keys: list[int]


class PlanLine(_Line, frozen=True, tag="plan"):
    """A step was planned."""

    step_id: int
    installs: list[tuple[int, int, int, int, int, list[list[int]]]]
    block_appends: list[tuple[int, int, int, list[int]]]
    rows: list[list[int]]
    state_loads: list[tuple[int, int]] = []
    state_saves: list[tuple[int, int]] = []
    adapters: list[tuple[int, int, int]] = []


class NothingLine(_Line, frozen=True, tag="nothing"):
    """There was nothing to launch."""


class CommitLine(_Line, frozen=True, tag="commit"):
    """A result was committed; ``token_ids`` are the tokens of each row of the plan."""

    step_id: int
    token_ids: list[list[int]]
    rests: list[tuple[int, int]] = []


class ResetLine(_Line, frozen=True, tag="reset"):
    """The prefix cache was emptied."""


class CutLine(_Line, frozen=True, tag="cut"):
    """The log ends here, though the engine went on."""

    why: str


Line: TypeAlias = (
    LimitsLine
    | AddLine
    | FinishLine
    | ExpireLine
    | PlanLine
    | NothingLine
    | CommitLine
    | ResetLine
    | CutLine
)
_decoder: Final[msgspec.json.Decoder[Line]] = msgspec.json.Decoder(Line)


class ReplayError(ValueError):
    """The input is not a plan log."""


class Difference(msgspec.Struct, frozen=True):
    """The first line where a replay differs from the log: its number from 1, and both texts."""

    line: int
    recorded: str
    replayed: str


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a replay.

    Attributes
    ----------
    num_lines, num_plans
        Lines and plans that were replayed.
    stats
        The scheduler's counters at the end.
    difference
        The first difference, where the replay stops; ``None`` if there is none.
    cut
        Why the log ends before the engine did; ``None`` if it is complete.
    """

    num_lines: int
    num_plans: int
    stats: SchedulerStats
    difference: Difference | None
    cut: str | None


def plan_line(plan: StepPlan) -> PlanLine:
    """The log line of a plan. Tokens are counted, not listed."""
    return PlanLine(
        plan.step_id,
        [
            (i.row, i.generation, i.request_key, len(i.token_ids), i.prompt_len, i.block_ids)
            for i in plan.installs
        ],
        [(a.row, a.group, a.index, a.block_ids) for a in plan.block_appends],
        [_row_line(r) for r in plan.rows],
        [(copy.row, copy.slot) for copy in plan.state_loads],
        [(copy.row, copy.slot) for copy in plan.state_saves],
        [(i.row, i.adapter, i.adapter_slot) for i in plan.installs if i.adapter != NO_ADAPTER],
    )


def _row_line(step: RowStep) -> list[int]:
    line = [
        step.row,
        step.generation,
        step.start,
        step.num_tokens,
        2 if step.pools else int(step.samples),
    ]
    return [*line, step.drafts, step.slack, step.limit] if step.drafts or step.slack else line


def read_lines(lines: Iterable[str | bytes]) -> Iterator[Line]:
    """Decode the lines of a log.

    Raises
    ------
    ReplayError
        A line is not valid; the message has its number.
    """
    for number, line in enumerate(lines, 1):
        try:
            yield _decoder.decode(line)
        except msgspec.DecodeError as error:
            raise ReplayError(f"line {number} is not a plan log's: {error}") from None


def replay(lines: Iterable[Line]) -> ReplayReport:
    """Repeat the recorded calls on a new scheduler, and compare every plan.

    Raises
    ------
    ReplayError
        The log does not begin with a scheduler's limits, or is of another version.
    """
    source = iter(lines)
    first = next(source, None)
    if not isinstance(first, LimitsLine):
        raise ReplayError("a plan log begins with a scheduler's limits")
    if not OLDEST_VERSION <= first.version <= VERSION:
        raise ReplayError(
            f"the log is of version {first.version}, expected {OLDEST_VERSION} to {VERSION}"
        )
    replayed = _Replay(first.limits)
    number, cut, difference = 1, None, None
    for number, line in enumerate(source, 2):
        if isinstance(line, CutLine):
            cut = line.why
            break
        answer = replayed.apply(line)
        if answer is not None:
            recorded = msgspec.json.encode(line).decode()
            difference = Difference(number, recorded, answer)
            break
    return ReplayReport(
        num_lines=number,
        num_plans=replayed.num_plans,
        stats=replayed.scheduler.stats,
        difference=difference,
        cut=cut,
    )


class _Replay:
    """A scheduler and its plans in flight."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.scheduler = Scheduler(limits)
        self.num_plans = 0
        self._plans: dict[int, StepPlan] = {}

    def apply(self, line: Line) -> str | None:
        """Repeat the call of a line. Returns what happened instead, or ``None`` if it agrees."""
        try:
            return self._apply(line)
        except (InvariantError, ValueError, KeyError) as error:
            return f"{type(error).__name__}: {error}"

    def _apply(self, line: Line) -> str | None:
        scheduler = self.scheduler
        if isinstance(line, PlanLine | NothingLine):
            return self._plan(line)
        if isinstance(line, CommitLine):
            scheduler.commit(self._result(line))
        elif isinstance(line, AddLine):
            # There was room, or it took the place of another: that is not in the log.
            scheduler.add(_request(line), succeeds=True)
        elif isinstance(line, ResetLine):
            scheduler.reset_prefix_cache()
        elif isinstance(line, FinishLine):
            return self._finish([line.key], line.reason)
        elif isinstance(line, ExpireLine):
            return self._finish(line.keys, FinishReason.DEADLINE)
        else:
            return "a scheduler has its limits already"
        return None

    def _finish(self, keys: list[int], reason: FinishReason) -> str | None:
        for key in keys:
            if self.scheduler.finish(key, reason) is None:
                return f"request {key} has ended already"
        return None

    def _plan(self, recorded: PlanLine | NothingLine) -> str | None:
        plan = self.scheduler.schedule()
        planned = NothingLine() if plan is None else plan_line(plan)
        if planned != recorded:
            return msgspec.json.encode(planned).decode()
        if plan is not None:
            self._plans[plan.step_id] = plan
            self.num_plans += 1
        return None

    def _result(self, line: CommitLine) -> StepResult:
        plan = self._plans.pop(line.step_id)
        rests = dict(line.rests)
        pairs = enumerate(zip(plan.rows, line.token_ids, strict=True))
        return StepResult(
            line.step_id,
            [
                RowResult(row.row, row.generation, ids, rests=rests.get(index, 0))
                for index, (row, ids) in pairs
            ],
        )


def _adapter(named: tuple[int, int] | None) -> Adapter | None:
    """An adapter. Its digest is not in a log; equal ones have equal numbers there."""
    return None if named is None else Adapter(named[0], str(named[0]), named[1].to_bytes(8))


def _request(line: AddLine) -> Request:
    params: dict[str, Any] = {}
    if line.prompt_logprobs is not None:
        params["prompt_logprobs"] = line.prompt_logprobs
    return Request(
        key=line.key,
        prompt_token_ids=line.token_ids,
        params=SamplingParams(max_tokens=line.max_tokens, min_tokens=line.min_tokens, **params),
        max_tokens=line.max_tokens,
        end_token_ids=frozenset({END_TOKEN}),
        priority=line.priority,
        cache_salt=str(line.salt) if line.salt else "",
        adapter=_adapter(line.adapter),
        tenant=line.tenant,
        task=line.task or ("generate" if line.pooling is None else "embed"),
        pooling=line.pooling,
        call=line.call,
        # Keys are not in a log; equal ones have equal numbers there.
        media_keys={block: number.to_bytes(8) for block, number in line.media},
        # Of a grammar the scheduler knows only that there is one.
        grammar=True if line.has_grammar else None,
        # Its text is not in the log, and counts among no tokens there.
        prediction=b"" if line.has_prediction else None,
    )
