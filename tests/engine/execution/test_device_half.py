"""What lies between a plan of integers and the kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from src.core.config import GIB, CacheSection
from src.core.errors import ConfigError
from src.core.plan import BlockAppend, RowInstall, RowStep, StepPlan
from src.engine.devices import transfer
from src.engine.execution import row_state
from src.engine.execution.inputs import build_inputs, decode_rows, is_decode, padding_inputs
from src.engine.execution.kv_cache import _budget, allocate_kv_cache, free_memory, plan_kv_cache
from src.engine.execution.row_state import POISON, RowState
from src.models import keys_and_values

CPU = torch.device("cpu")
LAYERS = [keys_and_values(2, 8, torch.float32, None)] * 3
BYTES_PER_TOKEN = 3 * 2 * 2 * 8 * 4


def rows() -> RowState:
    return RowState(max_num_seqs=4, max_model_len=20, block_size=4, device=CPU)


@pytest.mark.parametrize("has_host", [True, False])
def test_no_write_reaches_into_another_row(has_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_host:
        monkeypatch.setattr(transfer, "host_view", lambda tensor: None)
    state = rows()
    state.install(RowInstall(1, 1, 1, [7] * 20, 20, [[1, 2, 3, 4, 5]]))
    state.flush()
    before = state.tokens.clone(), state.block_tables.clone()
    too_much: list[Any] = [
        lambda: state.install(RowInstall(0, 1, 0, [9] * 21, 21, [[6]])),
        lambda: state.install(RowInstall(0, 1, 0, [9], 1, [[6] * 6])),
        lambda: state.append_blocks(BlockAppend(0, 0, 4, [6, 6])),
    ]
    for write in too_much:
        with pytest.raises(ValueError, match="row 0 has room"):
            write()
    state.flush()
    assert torch.equal(state.tokens[1:], before[0][1:])
    assert torch.equal(state.block_tables[:, 1:], before[1][:, 1:])


@pytest.mark.parametrize("groups", [1, 2])
def test_a_steps_writes_reach_a_device_in_one_upload(
    groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a device whose memory the host has not: there it is as where the host has it."""
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 20, "block_size": 4}
    settings |= {"device": CPU, "page_blocks": (1, 2)[:groups]}
    direct = RowState(**settings)
    monkeypatch.setattr(transfer, "host_view", lambda tensor: None)
    staged = RowState(**settings)
    uploads = []

    def count(*given: Any) -> torch.Tensor:
        uploads.append(given)
        return transfer.upload(*given)

    monkeypatch.setattr(row_state, "upload", count)

    def install(row: int, token_ids: list[int], blocks: list[int]) -> RowInstall:
        tables = [[block + 3 * group for block in blocks] for group in range(groups)]
        return RowInstall(row, 1, row, token_ids, len(token_ids), tables)

    steps: list[tuple[list[RowInstall], list[BlockAppend]]] = [
        ([install(0, [5, 6, 7, 8, 9], [1, 2]), install(2, [4] * 20, [0, 3, 4, 5, 6])], []),
        # Others, and one in a row that had more; a row that is installed twice keeps the last.
        (
            [install(2, [9], [7]), install(1, [1, 2], [8]), install(1, [3], [9])],
            [BlockAppend(0, groups - 1, 2, [10, 11]), BlockAppend(2, 0, 1, [12])],
        ),
        ([], []),
        ([], [BlockAppend(1, 0, 1, [13])]),
    ]
    for installs, appends in steps:
        uploads.clear()
        for rows in (direct, staged):
            for each in installs:
                rows.install(each)
            for append in appends:
                rows.append_blocks(append)
            rows.flush()
        assert len(uploads) == (1 if installs or appends else 0)
        assert torch.equal(direct.tokens, staged.tokens)
        assert torch.equal(direct.block_tables, staged.block_tables)


class TestInputs:
    def test_a_mixed_step_is_gathered_from_the_rows(self) -> None:
        state = rows()
        state.install(RowInstall(2, 1, 10, [50, 51, 52, 53, 54], 5, [[7, 3]]))
        state.install(RowInstall(0, 1, 11, [60, 61], 2, [[5]]))
        # Row 0 has sampled a token that no host has seen yet.
        state.scatter_tokens(torch.tensor([0]), torch.tensor([2]), torch.tensor([99]))
        plan = StepPlan(1, [], [], [RowStep(2, 1, 1, 3, False), RowStep(0, 1, 2, 1, True)])
        inputs = build_inputs(plan, state)
        assert inputs.input_ids_t.tolist() == [51, 52, 53, 99]
        assert inputs.positions_t.tolist() == [1, 2, 3, 2]
        assert inputs.slot_mappings_t[0].tolist() == [29, 30, 31, 22]
        assert inputs.query_start_loc.tolist() == [0, 3, 4]
        assert inputs.seq_lens_b.tolist() == [4, 3]
        assert inputs.block_tables_b[0].tolist() == [[7], [5]]
        assert inputs.sample_index_s.tolist() == [3]
        assert (inputs.samplers.rows, inputs.samplers.positions) == ([0], [3])
        assert (inputs.max_query_len, inputs.max_seq_len) == (3, 4)

    def test_a_row_with_drafts_is_marked(self) -> None:
        state = rows()
        state.install(RowInstall(2, 1, 10, [50, 51, 52, 53, 54], 5, [[7, 3]]))
        state.install(RowInstall(0, 1, 11, [60, 61, 62], 3, [[5]]))
        steps = [RowStep(2, 1, 0, 5, True), RowStep(0, 1, 1, 2, True, drafts=1)]
        inputs = build_inputs(StepPlan(1, [], [], steps), state)
        assert inputs.verifies_b is not None
        assert inputs.verifies_b.tolist() == [0, 1]
        assert inputs.seq_lens_b.tolist() == [5, 3]
        assert build_inputs(StepPlan(1, [], [], steps[:1]), state).verifies_b is None

    def test_padding_follows_the_rows_and_is_of_none(self) -> None:
        state = rows()
        state.install(RowInstall(2, 1, 10, [50, 51, 52], 3, [[7]]))
        plan = StepPlan(1, [], [], [RowStep(2, 1, 0, 3, True)])
        bare, inputs = build_inputs(plan, state), build_inputs(plan, state, 8)
        assert inputs.input_ids_t.tolist() == [50, 51, 52, 0, 0, 0, 0, 0]
        assert inputs.slot_mappings_t[0].tolist() == [28, 29, 30, -1, -1, -1, -1, -1]
        assert inputs.positions_t.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
        for name in ("query_start_loc", "seq_lens_b", "sample_index_s"):
            assert getattr(inputs, name).tolist() == getattr(bare, name).tolist(), name

    def test_a_decode_step_is_told_everything_at_once(self) -> None:
        steps = [RowStep(2, 1, 9, 1, True), RowStep(0, 3, 4, 1, True)]
        plan = StepPlan(1, [], [], steps)
        assert is_decode(plan)
        packed = decode_rows(plan, 4, padding_row=8)
        assert packed[5:].reshape(3, 4).tolist() == [[2, 0, 8, 8], [9, 4, 0, 0], [10, 5, 0, 0]]
        lengths = packed[:5].view(np.int32)
        assert lengths[:5].tolist() == [0, 1, 2, 2, 2]
        assert lengths[5:9].tolist() == [10, 5, 0, 0]
        for other in (RowStep(1, 1, 0, 1, False), RowStep(1, 1, 0, 2, True)):
            assert not is_decode(StepPlan(1, [], [], [*steps, other]))

    def test_padding_is_of_an_idle_row_and_writes_nowhere(self) -> None:
        inputs = padding_inputs(8, rows())
        assert inputs.slot_mappings_t[0].tolist() == [-1] * 8
        assert inputs.query_start_loc.tolist() == [0, 0]
        assert inputs.seq_lens_b.tolist() == [0]
        assert inputs.block_tables_b[0].shape == (1, 5)
        assert inputs.samplers.rows == []


class TestRowState:
    def test_a_host_writes_what_a_device_is_sent(self, monkeypatch: pytest.MonkeyPatch) -> None:
        by_host = rows()
        monkeypatch.setattr(transfer, "host_view", lambda tensor: None)
        by_upload = rows()
        for state in (by_host, by_upload):
            state.install(RowInstall(1, 1, 10, list(range(100, 110)), 10, [[1, 2, 3]]))
            state.install(RowInstall(3, 1, 11, list(range(20)), 10, [[]]))
            state.append_blocks(BlockAppend(1, 0, 3, [4, 5]))
            state.append_blocks(BlockAppend(3, 0, 0, [6]))
            state.append_blocks(BlockAppend(3, 0, 1, []))
            state.install(RowInstall(1, 2, 12, [7], 1, [[8]]))
            state.flush()
        assert torch.equal(by_host.tokens, by_upload.tokens)
        assert torch.equal(by_host.block_tables, by_upload.block_tables)

    def test_a_new_owner_sees_nothing_of_the_former_one(self) -> None:
        state = rows()
        state.install(RowInstall(1, 1, 10, list(range(100, 110)), 10, [[1, 2, 3]]))
        state.append_blocks(BlockAppend(1, 0, 3, [4, 5]))
        assert state.block_tables[0, 1].tolist() == [1, 2, 3, 4, 5]
        state.install(RowInstall(1, 2, 11, [7], 1, [[9]]))
        assert state.tokens[1].tolist() == [7] + [POISON] * 19
        assert state.block_tables[0, 1].tolist() == [9] + [POISON] * 4

    def test_what_was_never_produced_fails_loudly(self) -> None:
        state = rows()
        state.install(RowInstall(1, 1, 10, [7], 1, [[9]]))
        plan = StepPlan(1, [], [], [RowStep(1, 1, 1, 1, True)])
        ids = build_inputs(plan, state).input_ids_t
        with pytest.raises((IndexError, RuntimeError)):
            torch.nn.functional.embedding(ids, torch.zeros(4, 2))


class TestKVCache:
    def plan(self, *, fixed: bool = False, length: int = 100, **section: float) -> tuple[int, int]:
        plan, max_model_len = plan_kv_cache(
            LAYERS,
            msgspec.convert({"block_size": 4} | section, CacheSection),
            device=CPU,
            max_num_seqs=2,
            max_model_len=length,
            max_model_len_is_fixed=fixed,
        )
        assert plan.bytes_per_block == 4 * BYTES_PER_TOKEN
        assert plan.total_bytes == plan.num_blocks * plan.bytes_per_block
        return plan.num_blocks, max_model_len

    def test_the_default_is_no_more_than_all_rows_can_use(self) -> None:
        assert self.plan() == (50, 100)

    def test_what_was_asked_for_leaves_room_for_the_prefix_cache(self) -> None:
        assert self.plan(memory_bytes=1000 * 4 * BYTES_PER_TOKEN) == (1000, 100)
        assert self.plan(memory_fraction=0.1)[0] > 50
        assert self.plan(num_blocks=51, memory_bytes=1) == (51, 100)

    def test_what_something_else_will_take_is_left(self) -> None:
        section = CacheSection(memory_fraction=0.5, block_size=4)

        def blocks(reserved_bytes: int) -> int:
            plan, _ = plan_kv_cache(
                LAYERS,
                section,
                device=CPU,
                max_num_seqs=10**6,
                max_model_len=10**6,
                max_model_len_is_fixed=False,
                reserved_bytes=reserved_bytes,
            )
            return plan.num_blocks

        # Half of what is free, which other programs change meanwhile.
        without, left = blocks(0), blocks(int(0.8 * free_memory(CPU)))
        assert left == pytest.approx(0.2 * without, rel=0.2)

    def test_a_budget_in_bytes(self) -> None:
        assert self.plan(memory_bytes=30 * 4 * BYTES_PER_TOKEN + 1) == (30, 100)

    def test_a_context_that_does_not_fit_is_lowered_unless_it_was_asked_for(self) -> None:
        assert self.plan(num_blocks=10) == (10, 40)
        with pytest.raises(ConfigError, match=r"max_model_len = 100 does not fit .* 40 tokens"):
            self.plan(num_blocks=10, fixed=True)

    def test_a_budget_below_one_block_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="do not hold one block"):
            self.plan(memory_bytes=10)

    @pytest.mark.parametrize(("num_blocks", "warns"), [(1 << 30, True), (25, False)])
    def test_more_than_there_is_is_warned_of(
        self, caplog: pytest.LogCaptureFixture, num_blocks: int, warns: bool
    ) -> None:
        """It is taken as it is written to, so nothing else would tell in time."""
        with caplog.at_level("WARNING", logger="src.engine.execution.kv_cache"):
            self.plan(num_blocks=num_blocks)
        assert ("more than" in caplog.text) == warns

    def test_poison_shows_what_was_never_written(self) -> None:
        plan, _ = plan_kv_cache(
            LAYERS,
            CacheSection(num_blocks=3, block_size=4),
            device=CPU,
            max_num_seqs=1,
            max_model_len=12,
            max_model_len_is_fixed=True,
        )
        cache = allocate_kv_cache(LAYERS, plan, CPU, poison=True)
        assert [list(tensors) for tensors in cache.layers] == [["keys", "values"]] * 3
        assert cache.layers[0]["keys"].shape == (3, 4, 2, 8)
        assert all(bool(tensor.isnan().all()) for tensor in cache.named().values())

    def test_free_memory_is_no_more_than_the_machine_has(self) -> None:
        total = int(Path("/proc/meminfo").read_text().split()[1]) * 1024
        assert 0 < free_memory(CPU) < total

    @pytest.mark.parametrize(("free_gib", "budget_gib"), [(100, 90), (20, 18), (10, 9), (0, 0)])
    def test_the_default_on_a_gpu_is_most_of_what_steps_leave(
        self, free_gib: int, budget_gib: float
    ) -> None:
        assert _budget(CacheSection(), "cuda", free_gib * GIB) == budget_gib * GIB
        asked = CacheSection(memory_fraction=0.75)
        assert _budget(asked, "cuda", 4 * GIB) == _budget(asked, "cpu", 4 * GIB) == 3 * GIB
        assert _budget(CacheSection(), "cpu", 4 * GIB) == GIB
