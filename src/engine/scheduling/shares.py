"""Shares of tenants: who is served next, and who gives way, while several have requests.

Every tenant has a weight. Its share of rows, of memory and of the prompt tokens of each step is its
weight over the weights of all tenants that have unfinished requests. What one does not use is the
others'.

- **Prompt tokens** are shared out by deficit round robin (Shreedhar and Varghese, "Efficient Fair
  Queueing Using Deficit Round-Robin", 1996). A chunk ends at any token, so a lane's quantum is its
  share of the step, and only steps with fewer tokens than weights leave a credit for the next one.
- **Tokens of pooled requests**, where a step bounds them, are shared out as well. If there are
  fewer than lanes, those go first that have waited longest for some.
- **Rows and memory**: who is below its share gets them from who is above, if need be by preemption.
  Who is preempted is still at its share afterwards, or just below by less than one row, so it
  cannot take the row back: nobody goes in circles.
- **The oldest of the tenants' first running requests** is never preempted for another tenant, so
  one request always gets on, and everything ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from src.engine.scheduling.admission import URGENT, SchedulerLimits
from src.engine.scheduling.plan_builder import Grant, PlanBuilder, SchedulerStats
from src.engine.scheduling.planning import StepPlanner
from src.engine.scheduling.request_state import Phase, RequestState
from src.engine.scheduling.row_allocator import RowAllocator, first_of_tenants
from src.engine.scheduling.waiting import Lane, WaitingQueue

# Admissions of other lanes that a lane without a row lets pass, as a multiple of `max_bypasses`,
# before all wait until its first request fits.
_PATIENCE: Final = 2


class _Use:
    """What the running requests of a lane have: rows, and blocks (shared ones count for each)."""

    __slots__ = ("blocks", "rows")

    def __init__(self) -> None:
        self.rows = 0
        self.blocks = 0


class SharingPlanner:
    """Fills steps for several tenants; the parameters are those of the planner of one."""

    def __init__(
        self,
        planner: StepPlanner,
        limits: SchedulerLimits,
        allocator: RowAllocator,
        waiting: WaitingQueue,
        stats: SchedulerStats,
    ) -> None:
        self._planner = planner
        self._limits = limits
        self._allocator = allocator
        self._waiting = waiting
        self._stats = stats
        # Every running row has a token of the budget in each step.
        self._most_rows = min(limits.max_num_seqs, limits.max_num_batched_tokens)
        # Of the step that is being planned: each lane's use, the weights of all lanes, and the
        # lanes below their share whose first request is to have the next room.
        self._use: dict[str, _Use] = {}
        self._weights = 1
        self._claims: dict[str, None] = {}
        self._blocking: Lane | None = None
        # Lanes with pooled requests, in the order of their next turns.
        self._pooled_turns: dict[str, None] = {}

    # Room for those below their share.

    def make_room(self) -> None:
        """Preempt for the first request of each lane that is below its share, as far as it waits.

        Call it before anything of the step is planned. Preempted rows and blocks come back behind
        their fence; until then no lane at its share or above admits anything.
        """
        allocator, lanes = self._allocator, self._waiting.lanes
        self._claims = {}
        self._weights = sum(lane.weight for lane in lanes.values())
        self._use = {name: _Use() for name in lanes}
        coming_rows = coming_blocks = 0
        for state in allocator.running:
            num_blocks = _num_blocks(state)
            self._use[state.lane].rows += 1
            self._use[state.lane].blocks += num_blocks
            if state.is_exhausted:
                coming_rows += 1
                coming_blocks += num_blocks
        self._blocking = None
        if not len(self._waiting):
            return
        self._waiting.bring_back()
        self._blocking = blocking = self._find_blocking()
        live = len(allocator.running) - coming_rows
        coming_rows += len(allocator.leaving)
        coming_blocks += sum(map(_num_blocks, allocator.leaving))
        reserve = sum(map(allocator.lookahead, allocator.running))
        room = _Room(
            min(allocator.rows.num_free + coming_rows, self._most_rows - live),
            allocator.pool.num_free + coming_blocks - reserve,
        )
        for lane in lanes.values():
            if lane.num_waiting and blocking in (None, lane) and self._is_below(lane):
                self._claim(lane, room, reserve)

    def _claim(self, lane: Lane, room: _Room, reserve: int) -> None:
        """Reserve room for a lane's first request, or make it, if its share allows that."""
        allocator = self._allocator
        state = lane.peek(0)
        if state is None or not allocator.adapters.admits(state.request.adapter):
            return
        needed = allocator.needed(state)
        victims: list[RequestState] = []
        fits = allocator.fits(state, allocator.cached_prefix(state), reserve)
        if not fits and needed > room.blocks:
            blocks = self._use[lane.name].blocks + needed
            if blocks * self._weights > lane.weight * self._limits.num_blocks:
                return
            victims = self._memory_victims(lane, needed - room.blocks)
            if not victims:
                return
        if room.rows + len(victims) < 1:
            victim = self._row_victim(lane)
            if victim is None:
                return
            victims = [victim]
        for victim in victims:
            room.rows += 1
            room.blocks += _num_blocks(victim)
            self._yield(victim)
        room.rows -= 1
        room.blocks -= needed
        self._claims[lane.name] = None

    def _yield(self, victim: RequestState) -> None:
        use = self._use[victim.lane]
        use.rows -= 1
        use.blocks -= _num_blocks(victim)
        self._stats.yields += 1
        self._planner.preempt(victim)

    def _is_below(self, lane: Lane) -> bool:
        """Whether a lane may have one more row within its share. One row is in every share."""
        rows = self._use[lane.name].rows + 1
        return rows * self._weights <= max(self._weights, lane.weight * self._most_rows)

    def _row_victim(self, needy: Lane) -> RequestState | None:
        """A running request of the lane that has most rows for its weight, above its share."""

        def is_above(lane: Lane) -> bool:
            rows = self._use[lane.name].rows
            return rows * self._weights > max(self._weights, lane.weight * self._most_rows)

        return min(
            self._candidates(needy, is_above),
            key=lambda state: self._order(state, self._use[state.lane].rows),
            default=None,
        )

    def _memory_victims(self, needy: Lane, missing: int) -> list[RequestState]:
        """Running requests of lanes above their share that hold ``missing`` blocks together.

        None, if all that is above the shares is less. A lane gives up no more than it has above.
        """
        excess = {
            lane.name: self._use[lane.name].blocks
            - lane.weight * self._limits.num_blocks // self._weights
            for lane in self._waiting.lanes.values()
        }
        found = []
        while missing > 0:
            victim = min(
                (
                    state
                    for state in self._candidates(needy, lambda lane: excess[lane.name] > 0)
                    if state not in found
                ),
                key=lambda state: self._order(state, excess[state.lane]),
                default=None,
            )
            if victim is None:
                return []
            found.append(victim)
            missing -= _num_blocks(victim)
            excess[victim.lane] -= _num_blocks(victim)
        return found

    def _candidates(self, needy: Lane, is_above: Callable[[Lane], bool]) -> Iterable[RequestState]:
        lanes, running = self._waiting.lanes, self._allocator.running
        first = first_of_tenants(running) if running else None
        return (
            state
            for state in running
            if not state.is_exhausted
            and state is not first
            and state.lane not in (needy.name, URGENT)
            and is_above(lanes[state.lane])
        )

    def _order(self, state: RequestState, taken: int) -> tuple[float, int, int, int]:
        """Who is preempted first: who has most, least importance, least to recompute, came last."""
        weight = self._waiting.lanes[state.lane].weight
        return -taken / weight, -state.rank[0], state.certain, -state.rank[1]

    # The step.

    def fill(self, builder: PlanBuilder, prefills: list[RequestState]) -> None:
        """Plan prompts within the shares: those of running requests and of waiting ones."""
        of_lane: dict[str, list[RequestState]] = {}
        for state in prefills:
            of_lane.setdefault(state.lane, []).append(state)
        lanes = sorted(self._waiting.lanes.values(), key=lambda lane: lane.name != URGENT)
        grants = self._grants(builder, lanes, of_lane)
        before = builder.num_tokens
        # Running requests first: a step in which one is short of memory admits nobody.
        for lane in lanes:
            if lane.name in of_lane:
                others = builder.set_apart(grants[lane.name])
                self._planner.plan_chunks(of_lane[lane.name], builder)
                grants[lane.name] = builder.rejoin(others)
        if not builder.short:
            partial = {name for name in of_lane if not grants[name].tokens}
            live = sum([not state.is_exhausted for state in self._allocator.running])
            self._admit(builder, lanes, grants, partial, max(0, self._most_rows - live))
        self._use_rest(builder, prefills)
        if builder.num_tokens > before:
            self._end_turns(builder, lanes)

    def _use_rest(self, builder: PlanBuilder, prefills: list[RequestState]) -> None:
        """Give running requests what of the budget nobody has used."""
        if not builder.budget:
            return
        rest = [
            state
            for state in prefills
            if state.phase is Phase.RUNNING
            and state.last_step != builder.step_id
            # Who might be short of memory gets on only in a step that has admitted nobody.
            and (state.launched < state.capacity or not builder.installs)
        ]
        self._planner.plan_chunks(rest, builder)
        builder.top_up()

    def _grants(
        self, builder: PlanBuilder, lanes: list[Lane], of_lane: dict[str, list[RequestState]]
    ) -> dict[str, Grant]:
        """Prompt tokens that each lane may have in this step, those of waiting requests included.

        Whoever asks for less than its share leaves the rest to the others.
        """
        has_room = self._allocator.rows.num_free > 0 and self._allocator.pool.num_free > 0
        wanted, pooled = {}, {}
        for lane in lanes:
            running = of_lane.get(lane.name, ())
            wanted[lane.name] = sum([state.target - state.launched for state in running])
            pooled[lane.name] = sum(
                [state.target - state.launched for state in running if state.request.pooling]
            )
            if has_room and self._may_admit(lane, {}):
                wanted[lane.name] += lane.num_tokens - lane.num_predicted_tokens
                pooled[lane.name] += lane.num_pooled_tokens
        tokens = self._share_out(builder.budget, lanes, wanted)
        if builder.pooled_budget < builder.budget:
            pooled = self._share_out_pooled(builder.pooled_budget, pooled, tokens)
        else:
            pooled = tokens
        return {name: Grant(tokens[name], pooled[name]) for name in tokens}

    def _share_out_pooled(
        self, left: int, wanted: dict[str, int], most: dict[str, int]
    ) -> dict[str, int]:
        """Share out a step's tokens of pooled requests, within ``most`` of each lane."""
        grants, lanes = dict.fromkeys(wanted, 0), self._waiting.lanes
        # Who begins to ask, or asks again, has its turn behind the others.
        turns = [name for name in self._pooled_turns if wanted.get(name)]
        turns += [name for name in wanted if wanted[name] and name not in self._pooled_turns]
        self._pooled_turns = dict.fromkeys(turns)
        wanted = {name: min(wanted[name], most[name]) for name in turns}
        turns = [name for name in turns if wanted[name]]
        if wanted.get(URGENT):
            turns.remove(URGENT)
            grants[URGENT] = min(wanted[URGENT], left)
            left -= grants[URGENT]
        weights = sum(lanes[name].weight for name in turns)
        if left >= weights:
            turns.sort(key=lambda name: wanted[name] / lanes[name].weight)
        for name in turns:
            weight = lanes[name].weight
            grants[name] = min(wanted[name], left, max(1, left * weight // weights))
            left -= grants[name]
            weights -= weight
        return grants

    def _share_out(self, left: int, lanes: list[Lane], wanted: dict[str, int]) -> dict[str, int]:
        """Share out a step's prompt tokens; see `_grants`."""
        grants = dict.fromkeys(wanted, 0)
        if lanes[0].name == URGENT:
            grants[URGENT] = min(wanted[URGENT], left)
            left -= grants[URGENT]
            lanes = lanes[1:]
        asking = [lane for lane in lanes if wanted[lane.name]]
        weights = sum(lane.weight for lane in asking)
        if left < weights:
            for lane in sorted(asking, key=lambda lane: lane.name not in self._claims):
                if not left:
                    break
                # A turn goes on over as many steps as it takes.
                lane.credit = min(lane.credit or lane.weight, wanted[lane.name])
                grants[lane.name] = min(lane.credit, left)
                left -= grants[lane.name]
            return grants
        for lane in sorted(asking, key=lambda lane: wanted[lane.name] / lane.weight):
            lane.credit = 0
            grants[lane.name] = min(wanted[lane.name], left * lane.weight // weights)
            left -= grants[lane.name]
            weights -= lane.weight
        return grants

    def _admit(
        self,
        builder: PlanBuilder,
        lanes: list[Lane],
        grants: dict[str, Grant],
        partial: set[str],
        num_rows: int,
    ) -> None:
        """Admit waiting requests, ``num_rows`` at most, within what the lanes have left.

        Lanes that are to have the next room come first. Lanes in ``partial`` have running requests
        whose prompts wait already.
        """
        admitted: dict[str, int] = {}
        misfits: list[Lane] = []
        kept = [grants[lane.name] for lane in lanes if lane.name not in partial]
        reserved, pooled = sum(grant.tokens for grant in kept), sum(grant.pooled for grant in kept)
        for lane in sorted(lanes, key=lambda lane: lane.name not in self._claims):
            if lane.name in partial:
                continue
            reserved -= grants[lane.name].tokens
            pooled -= grants[lane.name].pooled
            # What lanes before this one have left over is there for those after them.
            room = Grant(builder.budget - reserved, builder.pooled_budget - pooled)
            others = builder.set_apart(room)
            first, before = None, self._stats.admissions
            if self._may_admit(lane, admitted):
                first = self._planner.admit(lane, builder, num_rows - sum(admitted.values()))
            if builder.halves_pooled:
                builder.top_up(lane.name)
            builder.rejoin(others)
            if self._stats.admissions > before:
                admitted[lane.name] = self._stats.admissions - before
                self._use[lane.name].rows += admitted[lane.name]
                lane.passed = 0
            elif first is not None and not self._use[lane.name].rows:
                misfits.append(lane)
        for lane in misfits:
            lane.passed += sum(admitted.values())

    def _may_admit(self, lane: Lane, admitted: dict[str, int]) -> bool:
        """Whether a lane's first request may have the next room, or it is for another lane."""
        if not lane.num_waiting or self._blocking not in (None, lane):
            return False
        return self._is_below(lane) or all(name in admitted for name in self._claims)

    def _find_blocking(self) -> Lane | None:
        """The lane that everybody waits for, because too many have passed its first request."""
        most = _PATIENCE * self._limits.max_bypasses
        passed = [
            (head.rank[1], lane)
            for lane in self._waiting.lanes.values()
            if lane.passed > most and (head := lane.peek(0)) is not None
        ]
        return min(passed, key=lambda pair: pair[0])[1] if passed else None

    def _end_turns(self, builder: PlanBuilder, lanes: list[Lane]) -> None:
        """Put the lanes that had their turn behind those that had none."""
        served: dict[str, int] = {}
        for state, step in zip(builder.states, builder.rows, strict=True):
            if step.num_tokens > 1 or step.start < state.prompt_len:
                served[state.lane] = served.get(state.lane, 0) + step.num_tokens
            if state.request.pooling and state.lane in self._pooled_turns:
                del self._pooled_turns[state.lane]
                self._pooled_turns[state.lane] = None
        for lane in lanes:
            if lane.name in served:
                lane.credit = max(0, lane.credit - served[lane.name])
                if not lane.credit:
                    self._waiting.end_turn(lane)


class _Room:
    """Rows and blocks that are free, or on their way back, and not yet promised to anybody."""

    __slots__ = ("blocks", "rows")

    def __init__(self, rows: int, blocks: int) -> None:
        self.rows = rows
        self.blocks = blocks


def _num_blocks(state: RequestState) -> int:
    return sum(map(len, state.held_blocks()))
