"""A device made of dictionaries: it executes plans and distrusts every one of them.

It keeps its own tokens per row and, per block slot, the name of the prefix whose last position was
written there. A step is checked before it is executed: whatever a row attends to must hold exactly
its own prefix, so that a reuse race, a wrong prefix hit, a lost block or an early release shows at
the step that would have read garbage. Sampling is a function of the row's tokens alone, so
what a request must answer is known in advance (``expected_output``).

Where a plan allows drafts it verifies random ones, right and wrong, as many as it likes. It alone
knows where such a row ends while steps are in flight, as a device does.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque

import msgspec

from src.core.blocks import Chunk
from src.core.outputs import FinishReason, TokenLogprobs
from src.core.plan import NO_BLOCK, RowInstall, RowResult, RowStep, StepPlan, StepResult
from src.core.request import Request
from src.engine.scheduling.admission import SchedulerLimits

VOCAB = 7
END_TOKEN = 0


class DeviceFault(AssertionError):
    """The plan would have made a real device compute or overwrite the wrong thing."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise DeviceFault(message)


def next_name(name: int, token: int) -> int:
    return (name * 6364136223846793005 + token * 2 + 1442695040888963407) % 2**64


def prefix_names(tokens: list[int], salt: str) -> list[int]:
    """Per position, a name for the tokens up to it. The salt is part of it, so that a hit across
    salts is a wrong hit."""
    names = []
    name = int.from_bytes(hashlib.blake2b(salt.encode(), digest_size=8).digest())
    for token in tokens:
        name = next_name(name, token)
        names.append(name)
    return names


def sample(request: Request, tokens: list[int]) -> int:
    """The next token: a function of all tokens so far and the seed, like the real sampler."""
    name = prefix_names(tokens, "sample")[-1] ^ (request.seed * 0x9E3779B97F4A7C15)
    token = (name * 0xD1342543DE82EF95 % 2**64 >> 40) % VOCAB
    num_output = len(tokens) - len(request.prompt_token_ids)
    if token in request.end_token_ids and num_output < request.params.min_tokens:
        token += 1
    return token


def expected_output(request: Request) -> tuple[list[int], FinishReason]:
    """What a request answers when nobody interferes."""
    tokens = list(request.prompt_token_ids)
    for num_output in range(1, request.max_tokens + 1):
        tokens.append(sample(request, tokens))
        if tokens[-1] in request.end_token_ids and num_output > request.params.min_tokens:
            return tokens[len(request.prompt_token_ids) :], FinishReason.STOP
    return tokens[len(request.prompt_token_ids) :], FinishReason.LENGTH


def prompt_logprob(request: Request, position: int) -> TokenLogprobs:
    return TokenLogprobs(request.prompt_token_ids[position], -float(position), position, ())


class DeviceRow:
    def __init__(self, install: RowInstall, request: Request, whose: str) -> None:
        self.generation = install.generation
        self.request = request
        self.tokens = list(install.token_ids)
        self.tables = [list(table) for table in install.block_ids]
        self.names = prefix_names(
            self.tokens, repr((whose, request.cache_salt, request.media_keys))
        )
        # Name of the prefix that the running states follow: 0 for none, None for garbage.
        self.state: int | None = 0
        self.next_start: int | None = None  # any multiple of the block size after an install


class FakeWorker:
    """Executes plans at launch; results are handed out in order, whenever the test asks."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self.limits = limits
        self.requests: dict[int, Request] = {}
        self.rows: dict[int, DeviceRow] = {}
        self.generations: dict[int, int] = {}
        # (block, slot) -> group, and name of the prefix that ends there
        self.memory: dict[tuple[int, int], tuple[int, int]] = {}
        # Snapshot slot -> name of the prefix that its states follow, None for garbage.
        self.snapshots: dict[int, int | None] = {}
        self.in_flight: deque[tuple[StepPlan, StepResult]] = deque()
        self.last_step_id = 0
        self.num_launched_tokens = 0
        self.num_drafted = self.num_accepted = 0
        self.random = random.Random(0)

    def launch(self, plan: StepPlan) -> None:
        require(plan.step_id == self.last_step_id + 1, f"step {plan.step_id} is out of turn")
        self.last_step_id = plan.step_id
        limits = self.limits
        require(1 <= plan.num_tokens <= limits.max_num_batched_tokens, "budget exceeded or unused")
        named = [step.row for step in plan.rows]
        require(len(set(named)) == len(named) <= limits.max_num_seqs, "a row is planned twice")
        require({i.row for i in plan.installs} <= set(named), "an installed row is not planned")
        require({a.row for a in plan.block_appends} <= set(named), "blocks for an unplanned row")
        for install in plan.installs:
            self._install(install)
        self._load_states(plan)
        for append in plan.block_appends:
            row = self.rows[append.row]
            table = row.tables[append.group]
            require(append.index <= len(table), "a gap in a block table")
            # Blocks that drafts did not need may have been given back.
            del table[append.index :]
            table.extend(append.block_ids)
            width = -(-limits.max_model_len // limits.block_size)
            require(len(table) <= width, "a block table is wider than the device's")
        for step in plan.rows:
            require(step.num_tokens >= 1, "an empty row step")
            require(0 <= step.drafts <= limits.drafts, "more drafts than there may be")
        exact = [self._resolve(step) for step in plan.rows]
        for step, drafts in exact:
            self._check_step(step, drafts)
        results = [self._execute(step, drafts) for step, drafts in exact]
        steps = [step for step, _ in exact if step.num_tokens]
        # A second look: nothing that this step wrote may have been under another of its rows.
        for step in steps:
            # Behind its row's end there is what was rejected.
            end = min(step.start + step.num_tokens, len(self.rows[step.row].tokens) - step.samples)
            self._check_prefix(step, self.rows[step.row], end)
        self._save_states(plan)
        plan = msgspec.structs.replace(plan, rows=steps)
        self.in_flight.append((plan, StepResult(plan.step_id, results)))
        self.num_launched_tokens += plan.num_tokens

    def next_result(self) -> StepResult:
        return self.in_flight.popleft()[1]

    def fail_next(self) -> StepPlan:
        """The oldest step has failed: nothing that it should have written is there.

        Nor is what steps behind it computed for the same rows, from what it left out. The others in
        flight must not have read any of it.
        """
        failed, _ = self.in_flight.popleft()
        lost = {(step.row, step.generation) for step in failed.rows}
        behind = [step for plan, _ in self.in_flight for step in plan.rows]
        wiped = [*failed.rows, *(step for step in behind if (step.row, step.generation) in lost)]
        for step in wiped:
            self._wipe(step)
        for plan in (failed, *(plan for plan, _ in self.in_flight)):
            for save in plan.state_saves:
                if (save.row, self.rows[save.row].generation) in lost:
                    self.snapshots[save.slot] = None
        for step in behind:
            if (step.row, step.generation) not in lost:
                self._check_prefix(step, self.rows[step.row], step.start + 1)
        return failed

    def _load_states(self, plan: StepPlan) -> None:
        """Installed rows begin with a snapshot, or with zeros."""
        installed = {install.row for install in plan.installs}
        loaded = [load.row for load in plan.state_loads]
        require(len(set(loaded)) == len(loaded), "a row's states are loaded twice")
        require(set(loaded) <= installed, "states of a row that goes on are overwritten")
        for load in plan.state_loads:
            require(load.slot in self.snapshots, "a snapshot that nobody has made is loaded")
            self.rows[load.row].state = self.snapshots[load.slot]

    def _save_states(self, plan: StepPlan) -> None:
        slots = [save.slot for save in plan.state_saves]
        rows = [save.row for save in plan.state_saves]
        require(len(set(slots)) == len(slots), "a slot is written twice")
        require(len(set(rows)) == len(rows), "a row's states are saved twice")
        require(set(rows) <= {step.row for step in plan.rows}, "states of a row that rests")
        in_flight = {save.slot for other, _ in self.in_flight for save in other.state_saves}
        require(in_flight.isdisjoint(slots), "a slot that a step in flight writes is taken")
        require(all(0 <= slot < (self.limits.num_snapshots or 0) for slot in slots), "no such slot")
        ends = {step.row: step.start + step.num_tokens for step in plan.rows}
        for save in plan.state_saves:
            require(ends[save.row] % self.limits.block_size == 0, "not at the end of a block")
            self.snapshots[save.slot] = self.rows[save.row].state

    def _wipe(self, step: RowStep) -> None:
        self.rows[step.row].state = None
        size = self.limits.block_size
        for position in range(step.start, step.start + step.num_tokens):
            for table in self.rows[step.row].tables:
                # What an earlier failure has wiped is gone already.
                self.memory.pop((table[position // size], position % size), None)

    def _rows_in_flight(self) -> dict[int, int]:
        return {step.row: step.generation for plan, _ in self.in_flight for step in plan.rows}

    def _install(self, install: RowInstall) -> None:
        require(0 <= install.row < self.limits.max_num_seqs, "no such row")
        require(install.row not in self._rows_in_flight(), "row reused before its fence")
        require(
            install.generation > self.generations.get(install.row, 0), "generation did not advance"
        )
        self.generations[install.row] = install.generation
        request = self.requests[install.request_key]
        prompt = request.prompt_token_ids
        require(install.prompt_len == len(prompt), "prompt_len changed")
        require(install.token_ids[: len(prompt)] == prompt, "the prompt changed")
        output = install.token_ids[len(prompt) :]
        require(output == expected_output(request)[0][: len(output)], "wrong output resumed")
        require(len(output) < request.max_tokens, "nothing left to do")
        self.rows[install.row] = DeviceRow(
            install, request, "" if self.limits.share_prefixes else request.tenant
        )

    def _resolve(self, step: RowStep) -> tuple[RowStep, list[int]]:
        """The step that is really computed, and its drafts; without tokens if there is none."""
        if not (step.drafts or step.slack):
            return step, []
        row = self.rows[step.row]
        known = len(row.tokens)
        require(step.samples, "drafts of a prompt")
        require(step.start <= known - 1 <= step.start + step.slack, "it does not begin there")
        limit = len(row.request.prompt_token_ids) + row.request.max_tokens
        require(step.limit == limit, "another limit")
        if known >= limit:
            return msgspec.structs.replace(step, num_tokens=0), []
        drafts: list[int] = []
        tokens = list(row.tokens)
        for _ in range(self.random.randint(0, min(step.drafts, limit - known - 1))):
            right = sample(row.request, tokens)
            drafts.append(right if self.random.random() < 0.7 else (right + 1) % VOCAB)
            tokens.append(drafts[-1])
        count = len(drafts)
        return RowStep(step.row, step.generation, known - 1, 1 + count, True, count), drafts

    def _check_step(self, step: RowStep, drafts: list[int]) -> None:
        row = self.rows[step.row]
        require(row.generation == step.generation, "a stale generation is planned")
        if not step.num_tokens:
            return
        if row.next_start is None:
            require(step.start % self.limits.block_size == 0, "a hit is not whole blocks")
        else:
            require(step.start == row.next_start, "positions skipped or computed twice")
        end = step.start + step.num_tokens
        known = len(row.tokens) + len(drafts)
        require(end <= known, "a token that does not exist is computed")
        is_pooled = row.request.pooling is not None
        require(step.samples == (end == known and not is_pooled), "samples is wrong")
        require(step.pools == (end == known and is_pooled), "pools is wrong")
        num_output = known - len(row.request.prompt_token_ids)
        require(num_output < row.request.max_tokens, "sampled beyond max_tokens")
        size = self.limits.block_size
        seen = [self._seen(group, step.start, end, row) for group in range(len(row.tables))]
        named = [block for blocks in seen for block in blocks]
        require(all(end <= len(t) * size for t in row.tables), "a block table is too short")
        require(len(set(named)) == len(named), "a block twice in a row's tables")
        require(all(0 <= b < self.limits.num_blocks for b in named), "no such block")
        self._check_prefix(step, row, step.start)
        if self.limits.num_snapshots is not None:
            expected = row.names[step.start - 1] if step.start else 0
            is_lost = row.state is None and row.next_start is not None  # its step has failed
            require(is_lost or row.state == expected, "the states are not those of its prefix")
        written = {b for t in row.tables for b in t[step.start // size : -(-end // size)]}
        for plan, _ in self.in_flight:
            for other in plan.rows:
                if (other.row, other.generation) != (step.row, step.generation):
                    held = self.rows[other.row]
                    for group in range(len(held.tables)):
                        read = self._seen(group, other.start, held.next_start or 0, held)
                        require(
                            written.isdisjoint(read),
                            "a block is written while a step in flight reads it",
                        )

    def _first_seen(self, group: int, start: int) -> int:
        """The first position that a query at ``start`` sees."""
        window = self.limits.windows[group]
        if isinstance(window, Chunk):
            return start - start % window.size
        return 0 if window is None else max(0, start - window + 1)

    def _seen(self, group: int, start: int, end: int, row: DeviceRow) -> list[int]:
        """The blocks that queries from ``start`` to ``end`` see or write."""
        size = self.limits.block_size
        return row.tables[group][self._first_seen(group, start) // size : -(-end // size)]

    def _check_prefix(self, step: RowStep, row: DeviceRow, end: int) -> None:
        """Every position before ``end`` that is seen must hold this row's own prefix."""
        size = self.limits.block_size
        names = row.names
        for group, table in enumerate(row.tables):
            for position in range(self._first_seen(group, step.start), end):
                block = table[position // size]
                require(block != NO_BLOCK, "a block that was given back is read")
                require(
                    self.memory.get((block, position % size)) == (group, names[position]),
                    f"row {step.row} position {position}: not the KV of its own prefix",
                )

    def _execute(self, step: RowStep, drafts: list[int]) -> RowResult:
        row = self.rows[step.row]
        request = row.request
        if not step.num_tokens:
            return RowResult(step.row, step.generation, [])
        size = self.limits.block_size
        names = list(row.names)
        for token in drafts:
            names.append(next_name(names[-1], token))
        end = step.start + step.num_tokens
        for position in range(step.start, end):
            for group, table in enumerate(row.tables):
                self.memory[table[position // size], position % size] = group, names[position]
        prompt_logprobs = None
        if request.params.prompt_logprobs is not None:
            last = min(end, len(request.prompt_token_ids) - 1)
            prompt_logprobs = [prompt_logprob(request, p) for p in range(step.start + 1, last + 1)]
        token_ids: list[int] = []
        if step.samples:
            for draft in [*drafts, None]:
                token_ids.append(sample(request, row.tokens))
                row.tokens.append(token_ids[-1])
                row.names.append(next_name(row.names[-1], token_ids[-1]))
                if token_ids[-1] != draft:
                    break
            end -= len(drafts) + 1 - len(token_ids)
            self.num_drafted += len(drafts)
            self.num_accepted += len(token_ids) - 1
        row.state = None if row.state is None else names[end - 1]
        row.next_start = end
        return RowResult(
            step.row,
            step.generation,
            token_ids,
            None,
            prompt_logprobs,
            drafted=len(drafts),
            rests=self.random.choice((0, 0, 0, 1, 4)) if drafts else 0,
        )
