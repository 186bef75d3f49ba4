"""Checks of plugins: which are installed, which are enabled, and whether these can be imported."""

from __future__ import annotations

from collections.abc import Iterator

from src.cli.doctor.finding import Finding
from src.core.config import Config
from src.core.errors import ConfigError
from src.core.plugins import enabled_plugins, installed_plugins, is_enabled, load_plugins


def installed(config: Config) -> Iterator[Finding]:
    """A finding for each installed plugin, and for each enabled one that is missing or broken."""
    enabled = config.plugins.enabled
    for plugin in installed_plugins():
        adds = f"{plugin.name} {plugin.version}, adds to: {', '.join(plugin.groups)}"
        if not is_enabled(plugin, enabled):
            yield Finding("plugin", "good", f"{adds}; not enabled, so never imported")
            continue
        try:
            for _ in load_plugins([plugin]):
                pass
        except ConfigError as error:
            yield Finding("plugin", "broken", str(error), "mend it, or leave it out of the setting")
        else:
            yield Finding("plugin", "good", f"{adds}; enabled")
    for name in enabled:
        try:
            enabled_plugins([name])
        except ConfigError as error:
            yield Finding("plugin", "broken", str(error), f"python -m pip install {name}")
