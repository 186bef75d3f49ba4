"""The queries of the Grafana dashboard, as a test can run them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from src.core.settings import CHECKOUT

PATH = CHECKOUT / "configs" / "grafana" / "dashboards" / "slipstream.json"


@dataclass(frozen=True)
class Query:
    """One query of one panel."""

    panel: str
    expression: str
    legend: str

    def filled_in(self, model_name: str, interval: str) -> str:
        """With the dashboard's variables replaced, for every instance."""
        values = {"$model_name": model_name, "$instance": ".*", "$__rate_interval": interval}
        text = self.expression
        for variable, value in values.items():
            text = text.replace(variable, value)
        return text

    @property
    def selectors(self) -> list[tuple[str, dict[str, str]]]:
        """(sample name, label -> wanted value) of every series that it reads."""
        found = re.findall(r"([a-zA-Z_:][a-zA-Z0-9_:]*)\{([^}]*)\}", self.expression)
        return [(name, dict(re.findall(r'(\w+)=~?"([^"]*)"', labels))) for name, labels in found]

    @property
    def grouping(self) -> set[str]:
        """Labels that it groups by or shows in its legend."""
        groups = re.findall(r"by \(([^)]*)\)", self.expression)
        named = {label.strip() for group in groups for label in group.split(",")}
        return named | set(re.findall(r"\{\{(\w+)\}\}", self.legend))


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana reads it."""
    document: dict[str, Any] = json.loads(PATH.read_text())
    return document


def queries() -> list[Query]:
    """Every query of every panel."""
    return [
        Query(panel["title"], target["expr"], target["legendFormat"])
        for panel in dashboard()["panels"]
        for target in panel.get("targets", ())
    ]
