"""``python -m src bench calibrate``: measures the cost of steps, for ``bench simulate``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from src.cli.debug_client import DebugClient
from src.cli.options import Commands, config_of
from src.cli.options import add_command as add
from src.core.config import Config
from src.core.errors import ConfigError
from src.core.views import PoolView, TimelineView

if TYPE_CHECKING:
    from src.bench.simulate.calibration import Calibration

DEFAULT_OUTPUT: Final = "step-cost.json"
_MS: Final = 1000.0
_US: Final = 1e6


def add_command(commands: Commands) -> None:
    """Declare the command."""
    parser = add(
        commands,
        "calibrate",
        "Fit the price of a step: of an engine that is driven here, or of a server's last steps.",
        run,
    )
    parser.add_argument(
        "--duration", type=float, default=20.0, metavar="S", help="seconds to drive (default: 20)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    parser.add_argument(
        "--embed-share", type=float, default=0.0, metavar="S",
        help="share of the requests that are texts to embed, 0 to 1; all of them of a model that "
        "does not generate (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--url",
        help="take the timeline of this server instead, whose settings --config and --set repeat",
    )
    parser.add_argument("--key", help="its admin key (default: that of the settings)")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path(DEFAULT_OUTPUT), metavar="FILE",
        help=f"where it goes (default: {DEFAULT_OUTPUT})",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from src.bench.simulate.calibration import save

    config = config_of(arguments)
    if arguments.url is None:
        config = _without_drafts(config)
    if not arguments.duration > 0:
        raise ConfigError(f"--duration must be over 0, got {arguments.duration:g}")
    if not 0 <= arguments.embed_share <= 1:
        raise ConfigError(f"--embed-share must be from 0 to 1, got {arguments.embed_share:g}")
    if arguments.url is None:
        found = asyncio.run(_driven(config, arguments))
    else:
        found = _of_server(arguments.url, arguments.key, config)
    save(found, arguments.output)
    print("\n".join(price_lines(found)))
    print(f"\n{arguments.output}: for `python -m src bench simulate --calibration`")
    return 0


def price_lines(found: Calibration) -> list[str]:
    """The fitted costs as text."""
    cost = found.cost
    lines = [
        f"{found.model}: {cost.num_steps} steps, whose device time the price misses by "
        f"{100 * cost.error:.1f} % in the median",
        f"{'':<16}{'ms per step':>12}  and us per",
    ]
    names = ("device", "plan", "commit", "publish", "handover")
    for name in names:
        price = getattr(cost, name)
        units = [
            f"{unit.replace('_', ' ').rstrip('s')} {_US * value:.3g}"
            for unit, value in msgspec.structs.asdict(price).items()
            if unit != "step" and value
        ]
        lines.append(f"{name:<16}{_MS * price.step:>12.3f}  {', '.join(units)}".rstrip())
    lines.append(f"{'dispatch':<16}{_MS * cost.dispatch:>12.3f}")
    lines.append(f"{'submit':<16}{_MS * cost.submit:>12.3f}  (per request)")
    return lines


def _without_drafts(config: Config) -> Config:
    """The settings of the engine that is driven here, whose steps have no drafts.

    Raises
    ------
    ConfigError
        They name who drafts.
    """
    section = config.speculation
    if section.method not in ("auto", "off"):
        raise ConfigError(
            f"speculation.method = {section.method}: bench calibrate prices steps without drafts, "
            "because bench simulate knows nothing of them: leave it out, or set it to off"
        )
    return msgspec.structs.replace(
        config, speculation=msgspec.structs.replace(section, method="off")
    )


async def _driven(config: Config, arguments: argparse.Namespace) -> Calibration:
    from src.bench.engine_client import fastest_kernels, measured_config
    from src.bench.simulate.calibration import TIMELINE_STEPS, calibrate_engine
    from src.engine.client import AsyncEngine

    config = measured_config(config, num_requests=config.scheduler.max_num_seqs)
    section = msgspec.structs.replace(config.observability, timeline_steps=TIMELINE_STEPS)
    async with AsyncEngine.open(msgspec.structs.replace(config, observability=section)) as engine:
        await fastest_kernels(engine)
        return await calibrate_engine(
            engine, arguments.duration, arguments.seed, arguments.embed_share
        )


class _Model(msgspec.Struct):
    id: str
    max_model_len: int


class _Models(msgspec.Struct):
    data: list[_Model]


def _of_server(url: str, key: str | None, config: Config) -> Calibration:
    from src.bench.simulate.calibration import calibration_of
    from src.http.server.keys import admin_key

    with contextlib.closing(DebugClient(url, key or admin_key(config.http))) as client:
        view = client.decode("/debug/timeline?format=records", TimelineView)
        pool = client.decode("/debug/pool?cells=1", PoolView)
        model = client.decode("/v1/models", _Models).data[0]
    # The server does not report a device that it chose itself, so only the setting is used.
    device_type = "cuda" if config.device.type == "cuda" else "cpu"
    return calibration_of(
        *(view, pool, config),
        model=model.id,
        max_model_len=model.max_model_len,
        device_type=device_type,
        source=url,
    )
