"""Where an engine's memory goes, as plain data and as a table.

The log of a start, `/health` and `python -m src plan` show the same report.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from src.core.config import GIB, MIB


class WeightPart(msgspec.Struct, frozen=True):
    """One part of a model's weights: its number of parameters, and the bytes that they take.

    A tied head has no parameters of its own.
    """

    name: str
    parameters: int
    bytes: int


class KVGroupReport(msgspec.Struct, frozen=True):
    """Layers that share block tables.

    Attributes
    ----------
    groups
        How many groups are like this one.
    layers
        Layers of each.
    kind
        What they keep, for example ``keys and values``.
    window
        Tokens that are kept of a sequence; null is all.
    bytes_per_token
        Bytes that a token takes in each of these groups.
    """

    groups: int
    layers: int
    kind: str
    window: int | None
    bytes_per_token: int


class KVReport(msgspec.Struct, frozen=True):
    """The pool of keys and values.

    Attributes
    ----------
    dtype
        What keys and values are kept in: the model's dtype, ``int8`` or ``fp8``.
    requests_at_once
        Requests of ``max_model_len`` tokens that it holds.
    lasts
        ``step``: its tokens see later ones, so nothing is kept from one step to the next.
    """

    dtype: str
    groups: tuple[KVGroupReport, ...]
    block_size: int
    num_blocks: int
    bytes: int
    max_model_len: int
    requests_at_once: float
    lasts: Literal["sequence", "step"] = "sequence"


class MemoryReport(msgspec.Struct, frozen=True):
    """Bytes on the device of one engine, or of one rank.

    Attributes
    ----------
    tables
        Bytes of tables that are computed for the model, such as RoPE's.
    step
        Bytes of the largest step; 0 on the CPU, where they are not set aside.
    graphs
        Bytes of captured steps.
    kv
        Null if no KV memory fits.
    free
        Free bytes beside all of these, at the moment when KV memory was sized.
    history
        Bytes that are kept of outputs (`speculation.shared_history_bytes`).
    """

    device: str
    weights: tuple[WeightPart, ...]
    tables: int
    step: int
    graphs: int
    kv: KVReport | None
    free: int
    history: int = 0

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(part.bytes for part in self.weights)

    @property
    def num_parameters(self) -> int:
        """Number of all parameters."""
        return sum(part.parameters for part in self.weights)

    @property
    def total(self) -> int:
        """Bytes of everything."""
        kv = 0 if self.kv is None else self.kv.bytes
        return self.weight_bytes + self.tables + self.step + self.graphs + self.history + kv


def size(count: float) -> str:
    """Bytes for a reader: `512 B`, `1.5 MiB`, `14.96 GiB`."""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (1024, "KiB")):
        if abs(count) >= unit:
            return f"{count / unit:.{2 if unit == GIB else 1}f} {name}"
    return f"{count:.0f} B"


def amount(count: float) -> str:
    """A large number for a reader: `950`, `7.24 M`, `8.03 B`."""
    for unit, name in ((1e9, " B"), (1e6, " M"), (1e3, " K")):
        if count >= unit:
            return f"{count / unit:.2f}{name}"
    return f"{count:.0f}"


def memory_lines(report: MemoryReport) -> list[str]:
    """Lines of a table: what takes how many bytes, and what is left."""
    rows = [
        (part.name, size(part.bytes), f"{amount(part.parameters)} parameters")
        for part in report.weights
    ]
    rows.append(("all weights", size(report.weight_bytes), _per_parameter(report)))
    for name, count, note in (
        ("tables", report.tables, "computed for the model"),
        ("largest step", report.step, "beside weights and KV memory"),
        ("graphs", report.graphs, "captured steps"),
        ("shared history", report.history, "outputs that drafts are taken from"),
    ):
        if count:
            rows.append((name, size(count), note))
    if report.kv is not None:
        rows += _kv_rows(report.kv)
    rows.append(("left free", size(report.free), report.device))
    width = max(len(name) for name, *_ in rows)
    return [f"  {name:<{width}} {taken:>11}  {note}".rstrip() for name, taken, note in rows]


def _kv_rows(kv: KVReport) -> list[tuple[str, str, str]]:
    told = "; ".join(
        (f"{group.groups} x " if group.groups > 1 else "")
        + f"{group.layers} layers, {group.kind} of {size(group.bytes_per_token)} per token"
        + ("" if group.window is None else f", the last {group.window}")
        for group in kv.groups
    )
    holds = (
        f"{kv.num_blocks} blocks of {kv.block_size} tokens: "
        f"{kv.requests_at_once:.1f} requests of {kv.max_model_len} tokens"
    )
    if kv.lasts == "step":
        # Nothing is kept from one step to the next.
        return [("step's KV", size(kv.bytes), "one after the other, by all layers"), ("", "", told)]
    return [("KV memory", size(kv.bytes), holds), ("", "", told)]


def _per_parameter(report: MemoryReport) -> str:
    each = report.weight_bytes / max(1, report.num_parameters)
    return f"{amount(report.num_parameters)} parameters, {each:.2f} bytes each"
