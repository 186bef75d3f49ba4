"""Of planning, admission, rows and preemption."""

from tests.mutants.mutation import mutations_of, rewrites_of

_FOLDER = "tests/engine/scheduling"
_SCHEDULER_TESTS = (
    f"{_FOLDER}/test_scheduler.py",
    f"{_FOLDER}/test_siblings.py",
    f"{_FOLDER}/test_mixed_steps.py",
    f"{_FOLDER}/test_prefix_waits.py",
    f"{_FOLDER}/test_properties.py",
)
_ALLOCATOR_TESTS = ("tests/engine/kv/test_groups.py", *_SCHEDULER_TESTS)

MUTATIONS = (
    *mutations_of(
        "src/engine/scheduling/planning.py",
        (f"{_FOLDER}/test_mixed_steps.py",),
        (
            "text behind a flood of vectors waits for all of them",
            "                lane.set_aside(misfits + waits)\n                continue\n",
            "                return first\n",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/waiting.py",
        (f"{_FOLDER}/test_mixed_steps.py",),
        (
            "vectors that wait aside are forgotten",
            "            num_tokens -= len(state.token_ids)\n            self.insert(state)\n",
            "            num_tokens -= len(state.token_ids)\n",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/plan_builder.py",
        (f"{_FOLDER}/test_mixed_steps.py",),
        (
            "what vectors may have of a step does not get less",
            "            self.pooled_budget -= num_tokens\n",
            "            pass\n",
        ),
        (
            "a long text takes all that vectors may have of a step",
            "            room = -(-room // 2)\n",
            "            pass\n",
        ),
        (
            "what one tenant's vectors leave of its part is another's",
            "                or (pooled_of is not None and not _is_pooled_of(pooled_of, state))\n",
            "",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/shares.py",
        (f"{_FOLDER}/test_mixed_steps.py",),
        (
            "tenants do not share what vectors may have of a step",
            "            pooled = self._share_out_pooled(builder.pooled_budget, pooled, tokens)\n",
            "            pooled = tokens\n",
        ),
        (
            "a tenant's vectors stay first in turn",
            "                self._pooled_turns[state.lane] = None\n",
            "                self._pooled_turns = {state.lane: None, **self._pooled_turns}\n",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/scheduler.py",
        (f"{_FOLDER}/test_mixed_steps.py",),
        (
            "what vectors may have of a step does not grow with the rows that decode",
            "max(self.limits.max_mixed_pooled_tokens, decoding // 4)",
            "self.limits.max_mixed_pooled_tokens",
        ),
    ),
    *mutations_of(
        "src/ops/runtime/step.cpp",
        ("tests/engine/execution/test_own_inputs_in_one_call.py",),
        (
            "kinds of tokens are zeros in a step that is one call",
            "  if (own == nullptr) return;\n",
            "  return;\n",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/content_names.py",
        _SCHEDULER_TESTS,
        (
            "a sibling with another salt has the same digests",
            "            and sibling.request.cache_salt == request.cache_salt\n",
            "",
        ),
        (
            "a sibling with other media has the same digests",
            "            and sibling.request.media_keys == request.media_keys\n",
            "",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/scheduler.py",
        _SCHEDULER_TESTS,
        (
            "blocks count as computed as soon as they are launched",
            "state.committed += planned.num_tokens - planned.drafts",
            "state.committed = state.launched",
        ),
        (
            "a row decodes into a block that it does not have",
            "elif min(state.launched, state.limit - 2) < state.capacity or",
            "elif min(state.launched, state.limit - 2) <= state.capacity or",
        ),
        (
            "a row samples one token more than it may have",
            "if state.phase is not Phase.RUNNING or state.is_exhausted:",
            "if state.phase is not Phase.RUNNING or state.target > state.limit:",
        ),
        (
            "rows and blocks are given back before their fence",
            "        if state.last_step <= self._last_committed:\n",
            "        if True:\n",
        ),
        (
            "rows and blocks are given back at any fence",
            "if was_leaving and state.last_step == plan.step_id:",
            "if was_leaving:",
        ),
        (
            "deadlines of requests that ended by themselves are kept",
            "            self._deadlines.discard(state)\n        return state.event(row, reason)",
            "        return state.event(row, reason)",
        ),
        (
            "many decoding rows allow no more of prompts than few",
            "per_row = self.limits.prefill_tokens_per_decode * decoding",
            "per_row = self.limits.prefill_tokens_per_decode",
        ),
        (
            "the last token of a prompt counts as a decoding row",
            "decoding += state.launched >= state.prompt_len",
            "decoding += 1",
        ),
        (
            "nobody learns who was preempted",
            "        self._preempted.append(victim.key)\n",
            "",
        ),
        (
            "tokens of ended requests are not counted as discarded",
            "                self.stats.discarded_tokens += len(row.token_ids)\n",
            "                pass\n",
        ),
        (
            "priorities count where arrival decides",
            'request.priority if self.limits.policy == "priority" else 0',
            "request.priority",
        ),
        (
            "an ended request is in a failed step's list",
            "for state in self._states_of(plan) if state.phase is not Phase.ENDED]",
            "for state in self._states_of(plan)]",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/planning.py",
        _SCHEDULER_TESTS,
        (
            "somebody is admitted while a running row is short of memory",
            "        if not builder.short:\n            for lane",
            "        if True:\n            for lane",
        ),
        (
            "a victim is taken though blocks are on their way back",
            "spares = state.slack > 0 or allocator.blocks_are_coming()",
            "spares = state.slack > 0",
        ),
        (
            "one more than allowed goes past the first in line",
            "if first is not None and first.bypasses >= self.limits.max_bypasses:",
            "if first is not None and first.bypasses > self.limits.max_bypasses:",
        ),
        (
            "who does not fit and is not first in line is gone past for ever",
            "first = first or state",
            "first = state",
        ),
        (
            "who waits for a prefix may be gone past for ever",
            "if state.bypasses < self.limits.max_bypasses and allocator",
            "if allocator",
        ),
        (
            "blocks that newcomers will need are not reserved",
            "                reserve += allocator.lookahead(state)\n",
            "",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/row_allocator.py",
        _ALLOCATOR_TESTS,
        (
            "blocks are named in the prefix cache as far as they are launched",
            "full = state.committed // self.limits.block_size",
            "full = state.launched // self.limits.block_size",
        ),
        (
            "sequences of before a reset are named in the prefix cache",
            "if self.cache.enabled and state.cache_epoch == self.cache.epoch:",
            "if self.cache.enabled:",
        ),
        (
            "a window gives back what a step in flight reads",
            "self._first_seen(state.committed, window)",
            "self._first_seen(state.launched, window)",
        ),
        (
            "a window gives back its first position",
            "first_seen(position, window) // self.limits.block_size",
            "first_seen(position + 1, window) // self.limits.block_size",
        ),
        (
            "somebody who comes before the needy one is preempted",
            "if state.rank > needy.rank]",
            "if state is not needy]",
        ),
        (
            "victims are taken whatever their class",
            "key=lambda state: (-state.rank[0], state.certain, -state.rank[1]),",
            "key=lambda state: (state.certain, -state.rank[1]),",
        ),
        (
            "the victim with the most to recompute is taken",
            "key=lambda state: (-state.rank[0], state.certain, -state.rank[1]),",
            "key=lambda state: (-state.rank[0], -state.certain, -state.rank[1]),",
        ),
        (
            "of equal victims the earliest is taken",
            "key=lambda state: (-state.rank[0], state.certain, -state.rank[1]),",
            "key=lambda state: (-state.rank[0], state.certain, state.rank[1]),",
        ),
        (
            "cached blocks that nobody holds count as a saving",
            "return missing <= match.num_held(self.pool)",
            "return missing <= match.num_blocks",
        ),
        (
            "admission leaves no blocks for the next few tokens",
            "soon = min(len(state.token_ids) + self.limits.lookahead_tokens, state.max_kv_tokens)",
            "soon = min(len(state.token_ids), state.max_kv_tokens)",
        ),
        (
            "somebody is waited for who computes for nobody since a reset",
            "if state.phase is not Phase.RUNNING or state.cache_epoch != self.cache.epoch:",
            "if state.phase is not Phase.RUNNING:",
            "while a row computes known blocks it takes the whole budget of a step, so nobody is "
            "admitted who could have computed, since the reset, what comes before them",
        ),
        (
            "somebody is waited for who has left",
            "            self._in_progress.pop(state.in_progress, None)\n",
            "",
        ),
        (
            "a little of a step is waited for",
            "enough = max(block_size + 1, prefill_limit // 16)",
            "enough = 0",
        ),
        (
            "who wants scores of its prompt waits for a prefix",
            "if not self._in_progress or not state.may_read_cache or missing < enough:",
            "if not self._in_progress or missing < enough:",
        ),
        (
            "who wants scores of its prompt starts from cached blocks",
            "if not self.cache.enabled or not state.may_read_cache:",
            "if not self.cache.enabled:",
        ),
        (
            "running requests are kept in the order in which they got rows",
            "insort(self.running, state, key=_by_rank)",
            "self.running.append(state)",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/request_state.py",
        _SCHEDULER_TESTS,
        (
            "what a resumed request finds counts as cached for its first admission",
            "        if self.cached_tokens is None:\n            self.cached_tokens",
            "        if True:\n            self.cached_tokens",
        ),
        (
            "scores of a prompt that are computed again are kept twice",
            "self.prompt_logprobs.extend(entries[len(self.prompt_logprobs) - start :])",
            "self.prompt_logprobs.extend(entries)",
        ),
        (
            "a length is told as a stop token",
            "ended_by_token = bool(token_ids) and finish_reason is FinishReason.STOP",
            "ended_by_token = bool(token_ids) and finish_reason is not None",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/stop_rules.py",
        (f"{_FOLDER}/test_stop_rules.py",),
        (
            "an end token counts one token too early",
            "num_output > request.min_tokens_to_end",
            "num_output >= request.min_tokens_to_end",
        ),
        (
            "an output has one token too many",
            "num_output >= request.max_tokens",
            "num_output > request.max_tokens",
        ),
        (
            "an end token that is the last one is told as a length",
            "    if token_id in request.end_token_ids and",
            "    if num_output < request.max_tokens and token_id in request.end_token_ids and",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/admission.py",
        (f"{_FOLDER}/test_admission.py", *_SCHEDULER_TESTS),
        (
            "the KV of the last token is asked for",
            "needed = limits.blocks_held(total - 1)",
            "needed = limits.blocks_held(total)",
        ),
        (
            "the whole context of the model cannot be used",
            "if total > longest:",
            "if total >= longest:",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/waiting.py",
        (f"{_FOLDER}/test_admission.py", *_SCHEDULER_TESTS),
        (
            "ended requests surface in the queue",
            "            if state.phase is Phase.WAITING:\n                self._front",
            "            if True:\n                self._front",
        ),
        (
            "a deadline has passed a moment late",
            "self._heap[0][0] <= now",
            "self._heap[0][0] < now",
        ),
        (
            "an empty queue refuses a long request",
            "if (waiting := self.num_tokens + self.num_reserved) and (\n            waiting +",
            "if (waiting := self.num_tokens + self.num_reserved) >= 0 and (\n            waiting +",
        ),
        (
            "a queue takes one more than it may",
            "if len(self) + num_requests > self.max_requests:",
            "if len(self) + num_requests > self.max_requests + 1:",
        ),
        (
            "tokens of those who leave the queue are still counted",
            "        self.num_tokens += lane.count(state, -1)\n        self._count",
            "        lane.count(state, -1)\n        self._count",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/shares.py",
        (f"{_FOLDER}/test_shares.py",),
        (
            "a prediction asks for a part of a step",
            "lane.num_tokens - lane.num_predicted_tokens",
            "lane.num_tokens",
        ),
        (
            "a flood keeps all rows until its requests end",
            "        if room.rows + len(victims) < 1:\n",
            "        if False:\n",
        ),
        (
            "a tenant claims rows beyond its share",
            "return rows * self._weights <= max(self._weights, lane.weight * self._most_rows)",
            "return True",
        ),
        (
            "a tenant claims memory beyond its share",
            "if blocks * self._weights > lane.weight * self._limits.num_blocks:",
            "if False:",
        ),
        (
            "all tenants have equal shares of prompts",
            "left * lane.weight // weights)",
            "left // len(asking))",
        ),
        (
            "what a small request leaves of its share is lost",
            "        self._use_rest(builder, prefills)\n",
            "",
        ),
        (
            "whoever has had its turn has the next one too",
            "                    self._waiting.end_turn(lane)\n",
            "                    pass\n",
        ),
        (
            "a request that is too large for its share is passed for ever",
            "if lane.passed > most and",
            "if False and",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/waiting.py",
        (f"{_FOLDER}/test_shares.py",),
        (
            "predictions that wait no more are still taken off",
            "self.num_predicted_tokens += sign * predicted",
            "self.num_predicted_tokens += predicted",
        ),
        (
            "what passed a request that is given up counts for the next one",
            "            if index == 0:\n                self.passed = 0\n",
            "",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/row_allocator.py",
        (f"{_FOLDER}/test_shares.py",),
        (
            "a request waits for a prefix that another tenant computes",
            "if leader is None or leader.lane != state.lane:",
            "if leader is None:",
        ),
        (
            "a growing row takes memory from its own tenant only",
            "return held[state.lane] > held[needy.lane]",
            "return False",
        ),
        (
            "the least priority of all tenants makes a request the first of all",
            "return min(heads.values(), key=lambda state: (state.lane != URGENT, state.rank[1]))",
            "return running[0]",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/waiting.py",
        (f"{_FOLDER}/test_shares.py",),
        (
            "one tenant can fill the queue",
            "            self._check_share(num_tokens, num_requests, lane)\n",
            "            pass\n",
        ),
        (
            "slots of adapters go by place whosever they are",
            "return turns[state.lane], _by_place(state)",
            "return 0, _by_place(state)",
        ),
        (
            "lanes of tenants that have gone are kept",
            "            del self.lanes[state.lane]\n",
            "            pass\n",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/content_names.py",
        (f"{_FOLDER}/test_shares.py",),
        (
            "tenants read each other's cached prefixes",
            'tenant = "" if limits.share_prefixes else request.tenant',
            'tenant = ""',
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/plan_builder.py",
        _SCHEDULER_TESTS,
        (
            "a step is given more budget than is left",
            "self.budget = min(self.budget, budget)",
            "self.budget = budget",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/rows.py",
        (f"{_FOLDER}/test_rows.py",),
        (
            "rows in use are spread over the device",
            "row = heapq.heappop(self._free)",
            "row = self._free.pop()",
        ),
        (
            "a row may be given back twice",
            "if not self._taken[row] or self._generation[row] != generation:",
            "if self._generation[row] != generation:",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/pace.py",
        (f"{_FOLDER}/test_pace.py", "tests/engine/test_loop.py"),
        (
            "steps that came too late are planned as late again",
            "                self.missed()\n",
            "                pass\n",
        ),
        (
            "a step waits for somebody who would find no row",
            "        if not scheduler.has_free_row:\n            return 0.0\n",
            "",
        ),
        (
            "prompts and decodes have one forecast",
            "            return self._prefill\n",
            "            return self._decode\n",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/waiting.py",
        (f"{_FOLDER}/test_adapter_slots.py",),
        (
            "one of several that wait for an adapter ends, and the others wait anew",
            "            if adapter.key not in self._aside:\n                self._slots.give_up",
            "            if True:\n                self._slots.give_up",
        ),
        (
            "an adapter that nobody waits for any more closes another one",
            "                self._slots.give_up(adapter.key)\n",
            "                pass\n",
        ),
        (
            "who was brought back for a slot and ended keeps it from others",
            "            self._slots.changed = True\n        lane.discard(",
            "        lane.discard(",
        ),
        (
            "the newest of those who wait for an adapter is brought back",
            "(min(states, key=place) if len(lanes) > 1 else states[0], key)",
            "(states[-1], key)",
        ),
    ),
    *mutations_of(
        "src/engine/scheduling/adapter_slots.py",
        (f"{_FOLDER}/test_adapter_slots.py",),
        (
            "the adapter that was used last leaves first",
            "in self._closed), next(iter(self._idle)))",
            "in self._closed), next(reversed(self._idle)))",
        ),
        (
            "an adapter that is used again may leave",
            "        self._idle.pop(key, None)\n",
            "",
        ),
        (
            "one that waited for a slot has waited again once it lost it",
            "            self._waits_since.pop(key, None)\n            self.changed = True",
            "            self.changed = True",
        ),
    ),
    *rewrites_of(
        "src/engine/execution/state_memory.py",
        ("tests/engine/execution/test_state_memory.py",),
        (
            "a request that resumes goes on from the states of its row's last owner",
            "StateMemory.begin",
            "[A.row for A in B.installs if A.row not in C]",
            "[i.row for i in B.installs if i.row not in C and len(i.token_ids) == i.prompt_len]",
        ),
        (
            "only the first owner of a row begins with zeros",
            "StateMemory.begin",
            "[A.row for A in B.installs if A.row not in C]",
            "[i.row for i in B.installs if i.row not in C and i.generation == 1]",
        ),
    ),
    *rewrites_of(
        "src/engine/scheduling/places.py",
        (f"{_FOLDER}/test_places.py",),
        (
            "a lone query waits for a text that starts when it does",
            "Places._assign",
            "(state.rank[0], A, B, state.rank[1])",
            "(state.rank[0], A, False, state.rank[1])",
        ),
        (
            "a text of a call takes no longer than one that is alone",
            "_units",
            "1 if A else WEIGHT_ALONE",
            "1",
        ),
        (
            "time stands still while new calls come",
            "Places._flow",
            "self._entry = A",
            "pass",
        ),
        (
            "a call that queues one text at a time is a new one each time",
            "Places._flow",
            "self._now + _units(A)",
            "self._now",
        ),
        (
            "what ends while it waits has taken its time",
            "Places.discard",
            "A.finish -= _units(B)",
            "pass",
        ),
        (
            "calls that end while they wait keep their places",
            "Places.discard",
            "self._entry -= A.prompt_len",
            "pass",
        ),
        (
            "what ends while it waits takes off time that has passed",
            "Places.discard",
            "A >= B.since",
            "True",
        ),
        (
            "calls that end while they wait take off time that has passed",
            "Places.discard",
            "A >= self._entry_since",
            "True",
        ),
        (
            "what is admitted moves no time",
            "Places.admit",
            "self._now = max(self._now, A)",
            "pass",
        ),
        (
            "one goes before an older one of its flow",
            "Places._assign",
            "max(self._now, A.finish, A.last_start())",
            "max(self._now, A.finish)",
        ),
        (
            "those that had their turns are kept",
            "Places.admit",
            "self._flow(A).placed.pop(A.key, None)",
            "pass",
        ),
        (
            "calls that have ended are kept",
            "Places.leave",
            "if A: B",
            "",
        ),
    ),
    *rewrites_of(
        "src/engine/scheduling/waiting.py",
        (f"{_FOLDER}/test_places.py",),
        (
            "whoever waits behind one that ends never has a turn",
            "Lane.discard",
            "self._follow(A)",
            "pass",
        ),
        (
            "a follower waits behind those that start later",
            "Lane._follow",
            "while A is not None and self._put(A): B",
            "if A is not None: heapq.heappush(self._heap, (A.place, A))",
        ),
    ),
    *rewrites_of(
        "src/engine/telemetry/plan_log.py",
        ("tests/engine/telemetry/test_plan_log.py",),
        (
            "a plan log has no media",
            "_Writer._add",
            "self._numbered(A)",
            "[]",
        ),
        (
            "a plan log knows no calls",
            "_Writer._add",
            "request.call",
            "None",
        ),
    ),
    *rewrites_of(
        "src/engine/requests/embedding_run.py",
        (
            "tests/engine/test_embeddings.py"
            "::test_a_lone_query_waits_a_step_behind_calls_of_many_texts",
        ),
        (
            "texts of a call wait as if each were alone",
            "EmbeddingRun._submission",
            "if self._num_texts > 1: A",
            "",
        ),
    ),
)
