"""Packages outside the tree that add to the engine's tables, by Python's entry points.

Nothing of a package is imported unless ``plugins.enabled`` names it. The name is the one that pip
installs, not one that a package may choose for its entries, so that no other package can be taken
for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, distributions
from typing import Any, Final

from src.core.errors import ConfigError

GROUPS: Final = (
    "slipstream.models",
    "slipstream.ops",
    "slipstream.logits_processors",
    "slipstream.tool_calls",
    "slipstream.reasoning",
)
"""The groups of entry points that are read."""


@dataclass(frozen=True)
class Plugin:
    """An installed package with entries in one of `GROUPS`.

    Attributes
    ----------
    name
        As its metadata has it.
    entries
        In the order of `GROUPS`, then by name.
    """

    name: str
    version: str
    entries: tuple[EntryPoint, ...]

    @property
    def groups(self) -> tuple[str, ...]:
        """What it adds to, without the common beginning: ``models``, ``ops``."""
        used = {entry.group for entry in self.entries}
        return tuple(group.removeprefix("slipstream.") for group in GROUPS if group in used)


@dataclass(frozen=True)
class Loaded:
    """One entry of a plugin, imported."""

    plugin: str
    entry: EntryPoint
    value: Any

    def refused(self, reason: str) -> ConfigError:
        """The error that ends a start because of this entry."""
        return _failed(self.plugin, self.entry, reason)


def installed_plugins() -> list[Plugin]:
    """Every installed plugin, by name; nothing of them is imported."""
    found: dict[str, Plugin] = {}
    for distribution in distributions():
        entries = [entry for entry in distribution.entry_points if entry.group in GROUPS]
        name = distribution.metadata["Name"]
        # The first on the path is the one that is imported.
        if entries and name and _normalized(name) not in found:
            entries.sort(key=lambda entry: (GROUPS.index(entry.group), entry.name))
            plugin = Plugin(name, distribution.version, tuple(entries))
            found[_normalized(name)] = plugin
    return [found[name] for name in sorted(found)]


def enabled_plugins(enabled: Sequence[str]) -> list[Plugin]:
    """The installed plugins that are named, in the order of the names.

    Raises
    ------
    ConfigError
        A name is no installed plugin's, or occurs twice.
    """
    if not enabled:
        return []
    known = {_normalized(plugin.name): plugin for plugin in installed_plugins()}
    chosen: dict[str, Plugin] = {}
    for name in enabled:
        plugin = known.get(_normalized(name))
        if plugin is None:
            installed = ", ".join(each.name for each in known.values()) or "none"
            raise ConfigError(
                f"plugins.enabled: no installed package {name!r} has entry points for this engine; "
                f"installed plugins: {installed}"
            )
        if plugin.name in chosen:
            raise ConfigError(f"plugins.enabled names {name!r} twice")
        chosen[plugin.name] = plugin
    return list(chosen.values())


def load_plugins(plugins: Iterable[Plugin]) -> Iterator[Loaded]:
    """Import the entries of plugins, one by one.

    Raises
    ------
    ConfigError
        An entry cannot be imported. The message has the names of plugin and entry.
    """
    for plugin in plugins:
        for entry in plugin.entries:
            try:
                value = entry.load()
            # Whatever its code raises, SystemExit too: the name has to be told.
            except (Exception, SystemExit) as error:
                reason = f"cannot be imported: {type(error).__name__}: {error}"
                raise _failed(plugin.name, entry, reason) from error
            yield Loaded(plugin.name, entry, value)


def is_enabled(plugin: Plugin, enabled: Sequence[str]) -> bool:
    """Whether ``plugins.enabled`` names the plugin."""
    return _normalized(plugin.name) in map(_normalized, enabled)


def _failed(plugin: str, entry: EntryPoint, reason: str) -> ConfigError:
    return ConfigError(f"plugin {plugin}, entry {entry.name} of {entry.group}: {reason}")


def _normalized(name: str) -> str:
    """A package's name as installers compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
