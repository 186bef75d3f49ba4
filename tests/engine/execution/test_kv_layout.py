"""Which layers share block tables, and where their keys and values lie."""

from __future__ import annotations

import pytest
import torch

from src.core.config import CacheSection
from src.core.errors import ConfigError
from src.core.plan import NO_BLOCK, BlockAppend, RowInstall, RowStep, StepPlan
from src.engine.execution.inputs import build_inputs, only_sampled
from src.engine.execution.kv_cache import KVCache, KVCachePlan, allocate_kv_cache, plan_kv_cache
from src.engine.execution.kv_groups import KVKind, lay_out
from src.engine.execution.row_state import RowState
from src.models import LayerKVSpec, keys_and_values
from src.models.layer_kv import KVTensor

CPU = torch.device("cpu")


def layers(*windows: int | None, heads: int = 2, wide: int = 2) -> list[LayerKVSpec]:
    """``wide`` heads where a layer sees everything."""
    return [
        keys_and_values(wide if window is None else heads, 8, torch.float32, window)
        for window in windows
    ]


def latents(size: int, window: int | None = None) -> LayerKVSpec:
    """Memory of a layer that keeps one vector per token."""
    return LayerKVSpec("latents", (KVTensor("latents", (size,), torch.float32),), window)


def keys_of(cache: KVCache) -> list[torch.Tensor]:
    """The keys of every layer."""
    return [tensors["keys"] for tensors in cache.layers]


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        ((None,) * 4, [(0, 1, 2, 3)]),
        ((8,) * 3, [(0, 1, 2)]),
        ((8, 8, None) * 2, [(0, 1), (3, 4), (2, 5)]),
        # Five to one: as many layers as the smaller class has.
        ((8, 8, 8, 8, 8, None) * 2, [(0, 1), (2, 3), (4, 6), (7, 8), (9, 10), (5, 11)]),
        # A last group with fewer layers; and classes of nearly one size, which are not cut.
        ((8, None, 8, None, 8), [(0, 2), (4,), (1, 3)]),
        ((8, None, 8, None, 8, None, 8), [(0, 2, 4, 6), (1, 3, 5)]),
        ((8, None, 16), [(0,), (1,), (2,)]),
    ],
)
def test_layers_that_see_the_same_are_cut_into_equal_groups(
    windows: tuple[int | None, ...], groups: list[tuple[int, ...]]
) -> None:
    layout = lay_out(layers(*windows), 16)
    assert [group.layers for group in layout.groups] == groups
    assert len(layout.slot_bytes) == max(map(len, groups))
    for number, group in enumerate(layout.groups):
        assert {windows[layer] for layer in group.layers} == {group.window}
        assert (group.kind is KVKind.FULL_ATTENTION) == (group.window is None)
        assert group.page_blocks == 1
        assert all(layout.group_of[layer] == number for layer in group.layers)
    assert layout.windows == tuple(group.window for group in layout.groups)


def test_one_group_has_the_memory_of_its_layers_and_no_more() -> None:
    each = [keys_and_values(heads, 8, torch.float32, None) for heads in (2, 3)]
    layout = lay_out(each, 4)
    assert layout.bytes_per_block == 2 * 4 * (2 + 3) * 8 * 4
    assert layout.token_bytes == (2 * (2 + 3) * 8 * 4,)
    cache = allocate_kv_cache(each, KVCachePlan(4, 5, layout.bytes_per_block), CPU)
    assert [tuple(keys.shape) for keys in keys_of(cache)] == [(5, 4, 2, 8), (5, 4, 3, 8)]
    assert sum(tensor.nbytes for tensor in cache.memory) == 5 * layout.bytes_per_block


def test_groups_are_the_same_memory() -> None:
    each = layers(8, None, 8, None, 8)
    plan = KVCachePlan(4, 6, lay_out(each, 4).bytes_per_block)
    cache = allocate_kv_cache(each, plan, CPU, poison=True)
    assert sum(tensor.nbytes for tensor in cache.memory) == plan.total_bytes
    for first, second in ((0, 4), (0, 1), (2, 3)):
        assert cache.layers[first]["keys"].data_ptr() == cache.layers[second]["keys"].data_ptr()
        assert cache.layers[first]["values"].data_ptr() == cache.layers[second]["values"].data_ptr()
    apart = {
        tensor.data_ptr()
        for layer in (0, 2)
        for tensor in (cache.layers[layer]["keys"], cache.layers[layer]["values"])
    }
    assert len(apart) == 4 == len(cache.memory)
    assert all(bool(keys.isnan().all()) for keys in keys_of(cache))


def test_where_tokens_differ_in_size_a_block_has_room_for_several_of_the_smaller_ones() -> None:
    each = layers(8, None, heads=2, wide=3)
    layout = lay_out(each, 4)
    assert layout.page_blocks == (3, 2)
    cache = allocate_kv_cache(each, KVCachePlan(4, 5, layout.bytes_per_block), CPU)
    assert [tuple(keys.shape) for keys in keys_of(cache)] == [(15, 4, 2, 8), (10, 4, 3, 8)]
    for block in range(5):
        starts = [
            keys[block * factor].data_ptr()
            for keys, factor in zip(keys_of(cache), layout.page_blocks, strict=True)
        ]
        assert starts[0] == starts[1]
    rows = RowState(
        max_num_seqs=2, max_model_len=20, block_size=4, device=CPU, page_blocks=layout.page_blocks
    )
    rows.install(RowInstall(1, 1, 0, [7] * 5, 5, [[NO_BLOCK, 4], [1, 2]]))
    rows.append_blocks(BlockAppend(1, 0, 2, [3]))
    assert rows.block_tables[0, 1].tolist()[1:] == [12, 9, -1, -1]
    assert rows.block_tables[0, 1, 0] < 0
    assert rows.block_tables[1, 1].tolist() == [2, 4, -1, -1, -1]


def test_a_layer_has_the_tensors_that_its_spec_names_and_no_others() -> None:
    each = [latents(24), keys_and_values(2, 8, torch.float32)]
    layout = lay_out(each, 4)
    assert layout.bytes_per_block == 4 * (24 + 2 * 16) * 4
    cache = allocate_kv_cache(each, KVCachePlan(4, 5, layout.bytes_per_block), CPU, poison=True)
    assert [list(tensors) for tensors in cache.layers] == [["latents"], ["keys", "values"]]
    assert cache.layers[0]["latents"].shape == (5, 4, 24)
    assert sum(tensor.nbytes for tensor in cache.memory) == 5 * layout.bytes_per_block
    assert all(bool(tensor.isnan().all()) for tensor in cache.named().values())


def test_tensors_of_different_numbers_share_a_slot() -> None:
    each = [latents(24, window=8), keys_and_values(2, 8, torch.float32)]
    layout = lay_out(each, 4)
    assert layout.page_blocks == (2, 3)
    assert layout.slot_bytes == ((4 * 48 * 4, 4 * 48 * 4),)
    cache = allocate_kv_cache(each, KVCachePlan(4, 5, layout.bytes_per_block), CPU)
    assert cache.layers[0]["latents"].data_ptr() == cache.layers[1]["keys"].data_ptr()
    assert sum(tensor.nbytes for tensor in cache.memory) == 5 * layout.bytes_per_block


def test_what_is_of_a_sequence_is_no_part_of_the_pool() -> None:
    state = LayerKVSpec("states", (KVTensor("states", (3, 5), torch.float32),), None, "sequence")
    layers = [state, keys_and_values(2, 8, torch.float32), state]
    layout = lay_out(layers, 4)
    assert layout.bytes_per_block == 2 * 4 * 2 * 8 * 4
    assert [group.layers for group in layout.groups] == [(1,)]
    cache = allocate_kv_cache(layers, KVCachePlan(4, 2, 60), CPU)
    assert cache.layers[0]["states"].shape == cache.layers[2]["states"].shape == (1, 3, 5)
    with pytest.raises(ValueError, match="of each token"):
        lay_out([state], 4)


def test_tensors_that_cannot_share_a_block_table_are_refused() -> None:
    odd = LayerKVSpec(
        "odd", tuple(KVTensor(name, (size,), torch.float32) for name, size in (("a", 1), ("b", 2)))
    )
    with pytest.raises(ValueError, match="cannot share memory"):
        lay_out([odd, keys_and_values(2, 8, torch.float32, 8)], 4)


def test_the_log_says_what_a_token_takes(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "src.engine.execution.kv_cache"):
        plan_kv_cache(
            [latents(24)] * 3,
            CacheSection(block_size=4, num_blocks=10),
            device=CPU,
            max_num_seqs=2,
            max_model_len=40,
            max_model_len_is_fixed=True,
        )
    assert "1 x 3 layers, all tokens, latents of 288 bytes per token" in caplog.text


def test_inputs_have_tables_and_slots_for_each_group() -> None:
    rows = RowState(max_num_seqs=2, max_model_len=20, block_size=4, device=CPU, page_blocks=(1, 1))
    rows.install(RowInstall(0, 1, 0, [7] * 6, 6, [[5, 6], [NO_BLOCK, 1]]))
    rows.install(RowInstall(1, 1, 1, [8] * 2, 2, [[9], [3]]))
    steps = [RowStep(0, 1, 4, 2, True), RowStep(1, 1, 0, 2, False)]
    inputs = build_inputs(StepPlan(1, [], [], steps), rows, 5)
    assert [slots.tolist() for slots in inputs.slot_mappings_t] == [
        [24, 25, 36, 37, -1],
        [4, 5, 12, 13, -1],
    ]
    assert [tables.tolist() for tables in inputs.block_tables_b] == [
        [[5, 6], [9, -1]],
        [[-1, 1], [3, -1]],
    ]
    last = only_sampled(inputs, rows).last
    assert last is not None
    assert [tables.tolist() for tables in last.block_tables_b] == [[[5, 6]], [[-1, 1]]]
    assert [slots.tolist() for slots in last.slot_mappings_t] == [[-1], [-1]]
    for tables in (*inputs.block_tables_b, *last.block_tables_b):
        assert tables.stride(1) == 1


def plan(*windows: int | None, num_blocks: int, length: int) -> tuple[KVCachePlan, int]:
    return plan_kv_cache(
        layers(*windows),
        CacheSection(block_size=4, num_blocks=num_blocks),
        device=CPU,
        max_num_seqs=2,
        max_model_len=length,
        max_model_len_is_fixed=False,
    )


def test_windows_leave_room_for_longer_contexts() -> None:
    assert plan(None, None, num_blocks=10, length=1000)[1] == 40
    # Three blocks for a window of nine, at any length.
    assert plan(9, 9, num_blocks=3, length=1000)[1] == 1000
    assert plan(9, 9, num_blocks=2, length=1000)[1] == 8
    # One group of each kind: what the window leaves of the pool is the other's.
    assert plan(None, 9, num_blocks=10, length=1000)[1] == 28
    planned, length = plan(None, 9, 9, 9, num_blocks=20, length=1000)
    assert planned.windows == (None, 9, 9, 9)
    assert length == 4 * (20 - 9)
    assert planned.blocks_held(length) == 20
    with pytest.raises(ConfigError, match="does not fit KV memory of 0 tokens"):
        plan(None, 9, num_blocks=1, length=1000)


def test_the_default_has_room_for_whole_sequences() -> None:
    """What windows give back meanwhile is the prefix cache's."""
    planned, _ = plan_kv_cache(
        layers(9, 9),
        CacheSection(block_size=4),
        device=CPU,
        max_num_seqs=2,
        max_model_len=1000,
        max_model_len_is_fixed=True,
    )
    assert planned.num_blocks == 2 * 250 * len(planned.windows)


def test_a_part_of_the_layers_has_its_own_memory_of_the_same_pool() -> None:
    """As those of a draft model behind those of the model, some of them in the same groups."""
    both = (*layers(8, None, 8, None), *layers(None, None, 16, wide=1))
    cache = allocate_kv_cache(both, KVCachePlan(4, 6, 0), CPU)
    model, draft = cache.part(0, 4), cache.part(4, 3)
    assert [*model.layers, *draft.layers] == cache.layers
    assert len(model.layers) == 4
    assert model.layout.group_of == cache.layout.group_of[:4]
    assert draft.layout.group_of == cache.layout.group_of[4:]
    assert model.layout.page_blocks == draft.layout.page_blocks == cache.layout.page_blocks
    assert draft.memory is cache.memory


def test_layers_that_see_everything_share_block_tables_whatever_their_size() -> None:
    layout = lay_out((*layers(None, None), *layers(None, wide=1)), 16)
    assert [group.layers for group in layout.groups] == [(0, 1, 2)]
