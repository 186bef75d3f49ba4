"""The compose file mounts what exists, and Prometheus, Grafana and Jaeger find each other.

`nox -s deployment` holds it against the compose specification.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from src.core.settings import CHECKOUT, load_config
from tests.deployment import dockerfile
from tests.observability.dashboard import PATH as DASHBOARD

FOLDER = CHECKOUT / "configs" / "observability"
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
PROVISIONING = CHECKOUT / "configs" / "grafana" / "provisioning"


def filled_in(text: str) -> str:
    """With the defaults of its variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def mounts(service: str) -> dict[str, str]:
    """Place in the container -> what is mounted there."""
    parts = [filled_in(volume).split(":") for volume in SERVICES[service].get("volumes", ())]
    return {part[1]: part[0] for part in parts}


@pytest.mark.parametrize("service", SERVICES)
def test_what_is_mounted_exists(service: str) -> None:
    for source in mounts(service).values():
        if source.startswith("."):
            assert (FOLDER / source).exists(), source
        else:
            assert source in COMPOSE["volumes"]


@pytest.mark.parametrize("service", SERVICES)
def test_versions_are_pinned_and_ports_stay_on_this_machine(service: str) -> None:
    described = SERVICES[service]
    if "build" in described:
        assert (FOLDER / described["build"]["context"] / "Dockerfile").samefile(dockerfile.PATH)
        named = {
            each.text.partition("=")[0] for each in dockerfile.instructions() if each.name == "ARG"
        }
        assert set(described["build"]["args"]) <= named
    else:
        assert re.search(r":v?\d+\.\d+\.\d+$", described["image"])
    for port in described["ports"]:
        assert port.startswith("127.0.0.1:"), port
    assert set(described.get("depends_on", ())) <= SERVICES.keys()


def test_the_server_serves_the_demo_model_and_keeps_its_cache() -> None:
    service = SERVICES["slipstream"]
    config = load_config(CHECKOUT / filled_in(service["environment"]["SLIPSTREAM_CONFIG"]))
    assert config.model.served_model_name == ("demo",)
    assert mounts("slipstream").keys() == {"/models", dockerfile.only("VOLUME").text}
    assert (FOLDER / mounts("slipstream")["/models"] / "config.json").is_file()
    seconds = int(service["stop_grace_period"].removesuffix("s"))
    assert seconds >= config.http.shutdown_timeout + 20
    # Another model: the configuration that the first lines of the file name.
    (named,) = re.findall(r"SLIPSTREAM_CONFIG=(\S+)", (FOLDER / "compose.yaml").read_text())
    assert load_config(CHECKOUT / named).model.path == "/models"


def test_prometheus_scrapes_the_server() -> None:
    config = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    targets = [
        target
        for job in config["scrape_configs"]
        for static in job["static_configs"]
        for target in static["targets"]
    ]
    assert targets == [f"slipstream:{dockerfile.only('EXPOSE').text}"]
    assert "slipstream" in SERVICES
    file = next(
        word.partition("=")[2]
        for word in SERVICES["prometheus"]["command"]
        if word.startswith("--config.file=")
    )
    assert (FOLDER / mounts("prometheus")[file]).name == "prometheus.yml"


def test_grafana_finds_its_sources_and_dashboards() -> None:
    placed = mounts("grafana")
    assert (FOLDER / placed["/etc/grafana/provisioning"]).samefile(PROVISIONING)
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "slipstream.yaml").read_text())[
        "providers"
    ]
    dashboards = FOLDER / placed[provider["options"]["path"]]
    assert DASHBOARD.parent.samefile(dashboards)
    home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{DASHBOARD.name}"
    sources = yaml.safe_load((PROVISIONING / "datasources" / "slipstream.yaml").read_text())[
        "datasources"
    ]
    assert {urlsplit(source["url"]).hostname for source in sources} <= SERVICES.keys()
    uids = {source["uid"] for source in sources}
    for source in sources:
        for link in source.get("jsonData", {}).get("exemplarTraceIdDestinations", ()):
            assert link["datasourceUid"] in uids


def test_traces_go_where_jaeger_listens() -> None:
    endpoint = urlsplit(SERVICES["slipstream"]["environment"]["OTEL_EXPORTER_OTLP_ENDPOINT"])
    assert endpoint.hostname == "jaeger"
    published = {port.rpartition(":")[2] for port in SERVICES["jaeger"]["ports"]}
    assert str(endpoint.port) in published
