"""The manifests agree with each other, with the image, and with what the server does.

`nox -s deployment` holds them against the published schemas.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest

from src.core.settings import CHECKOUT, load_config
from src.http.endpoints import ENDPOINTS
from tests.deployment import dockerfile
from tests.deployment.manifests import FOLDER, base, container, gpu, pod, probes, read

VARIANTS = {"base": base, "gpu": gpu}
METRICS = (CHECKOUT / "docs" / "observability.md").read_text()
OPEN_TO_ALL = {"/health", "/live", "/ready", "/ping"}


@pytest.fixture(params=VARIANTS)
def documents(request: pytest.FixtureRequest) -> dict[str, Any]:
    return VARIANTS[request.param]()


def test_probes_are_those_of_the_page(documents: dict[str, Any]) -> None:
    paths = {name: probe["httpGet"]["path"] for name, probe in probes(documents)}
    # docs/deploying.md: "Use `/ready` as the readiness probe, and as the startup probe".
    assert paths == {
        "startupProbe": "/ready",
        "readinessProbe": "/ready",
        "livenessProbe": "/health",
    }
    assert set(paths.values()) <= OPEN_TO_ALL & {entry.path for entry in ENDPOINTS}
    (port,) = container(documents)["ports"]
    assert str(port["containerPort"]) == dockerfile.only("EXPOSE").text
    assert {probe["httpGet"]["port"] for _, probe in probes(documents)} == {port["name"]}


def test_a_pod_has_the_time_to_drain(documents: dict[str, Any]) -> None:
    config = load_config(FOLDER / "base" / "slipstream.toml")
    before = container(documents)["lifecycle"]["preStop"]["sleep"]["seconds"]
    readiness = dict(probes(documents))["readinessProbe"]
    assert before > readiness["periodSeconds"] * readiness["failureThreshold"]
    # docs/deploying.md: "20 seconds more than `http.shutdown_timeout`".
    wanted = before + config.http.shutdown_timeout + 20
    assert pod(documents)["terminationGracePeriodSeconds"] == wanted


def test_names_and_labels_meet(documents: dict[str, Any]) -> None:
    deployment = documents["Deployment"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert documents["Service"]["spec"]["selector"].items() <= labels.items()
    monitor = documents["PodMonitor"]["spec"]
    assert monitor["selector"]["matchLabels"].items() <= labels.items()
    ports = {port["name"] for port in container(documents)["ports"]}
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports
    assert {port["targetPort"] for port in documents["Service"]["spec"]["ports"]} <= ports
    target = documents["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert (target["apiVersion"], target["kind"], target["name"]) == (
        *(deployment["apiVersion"], deployment["kind"]),
        deployment["metadata"]["name"],
    )
    assert "replicas" not in deployment["spec"], "it would fight the autoscaler"


def test_the_adapter_makes_the_autoscaler_s_metrics_of_ours() -> None:
    (rule,) = read(FOLDER / "prometheus-adapter.yaml")["rules"]["custom"]
    series = re.compile(re.findall(r'__name__=~"([^"]+)"', rule["seriesQuery"])[0])
    ours = [name for name in re.findall(r"`([a-z_]+:[a-z_]+)`", METRICS) if series.search(name)]
    assert sorted(ours) == ["vllm:num_requests_running", "vllm:num_requests_waiting"]
    for name in ours:
        row = re.search(rf"^\| `{name}` \| (\w+) \|", METRICS, re.MULTILINE)
        assert row is not None
        assert row[1] == "gauge", "an average of a counter says nothing"
    shown = re.sub(r"\$\{(\d)\}", r"\\\1", rule["name"]["as"])
    made = {re.sub(rule["name"]["matches"], shown, name) for name in ours}
    metrics = base()["HorizontalPodAutoscaler"]["spec"]["metrics"]
    assert {entry["pods"]["metric"]["name"] for entry in metrics} == made
    # The metrics API names resources by words of DNS labels.
    assert all(re.fullmatch(r"[a-z_]+", name) for name in made)


def test_the_autoscaler_asks_for_less_than_a_pod_holds() -> None:
    """At the limit no pod would ever be over its target, and the queue would be all that counts."""
    config = load_config(FOLDER / "base" / "slipstream.toml")
    targets = {
        entry["pods"]["metric"]["name"]: int(entry["pods"]["target"]["averageValue"])
        for entry in base()["HorizontalPodAutoscaler"]["spec"]["metrics"]
    }
    assert 0 < targets["vllm_num_requests_running"] < config.scheduler.max_num_seqs
    assert 0 < targets["vllm_num_requests_waiting"] < config.scheduler.max_waiting_requests


def test_settings_are_settings_and_their_files_are_mounted(documents: dict[str, Any]) -> None:
    path = FOLDER / "base" / "slipstream.toml"
    config = load_config(path)
    assert config.http.public_metrics, "or the PodMonitor needs a key"
    mounts = {mount["name"]: mount for mount in container(documents)["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in pod(documents)["volumes"]}
    assert mounts.keys() == volumes.keys()
    assert config.model.path == mounts["models"]["mountPath"]
    assert config.http.api_key_file is not None
    assert config.http.api_key_file.startswith(mounts["keys"]["mountPath"] + "/")
    variables = {entry["name"]: entry["value"] for entry in container(documents)["env"]}
    assert variables["SLIPSTREAM_CONFIG"] == f"{mounts['config']['mountPath']}/{path.name}"
    (generator,) = read(FOLDER / "base" / "kustomization.yaml")["configMapGenerator"]
    assert generator["name"] == volumes["config"]["configMap"]["name"]
    assert generator["files"] == [path.name]
    assert tomllib.loads(path.read_text())["model"]["served_model_name"]


def test_it_runs_as_the_image_s_user_and_writes_where_it_may(documents: dict[str, Any]) -> None:
    security = pod(documents)["securityContext"]
    user, group = map(int, dockerfile.only("USER").text.split(":"))
    assert (security["runAsUser"], security["runAsGroup"]) == (user, group)
    assert security["fsGroup"] == group
    assert security["runAsNonRoot"]
    own = container(documents)["securityContext"]
    assert own["readOnlyRootFilesystem"]
    assert not own["allowPrivilegeEscalation"]
    writable = [
        mount["mountPath"]
        for mount in container(documents)["volumeMounts"]
        if not mount.get("readOnly")
    ]
    variables = dockerfile.environment()
    home = {entry["name"]: entry["value"] for entry in container(documents)["env"]}["HOME"]
    for path in (variables["SLIPSTREAM_CACHE_DIR"], variables["HF_HOME"], home, "/tmp"):
        assert any(f"{path}/".startswith(f"{place}/") for place in writable), path


def test_limits_are_what_is_asked_for(documents: dict[str, Any]) -> None:
    """So that no neighbour takes what the engine has sized itself for."""
    resources = container(documents)["resources"]
    assert resources["requests"] == resources["limits"]
    assert resources["limits"]["cpu"].isdigit(), "part of a CPU would be a whole thread"


def test_the_overlay_adds_a_gpu_and_nothing_else_changes() -> None:
    plain, other = base(), gpu()
    assert container(other)["resources"]["limits"]["nvidia.com/gpu"] == "1"
    same = {"Service", "HorizontalPodAutoscaler", "PodMonitor"}
    assert {kind: plain[kind] for kind in same} == {kind: other[kind] for kind in same}
    changed = {
        key for key in container(other) if container(other)[key] != container(plain).get(key)
    }
    assert changed == {"resources"}
    (image,) = read(FOLDER / "base" / "kustomization.yaml")["images"]
    assert image["name"] == container(plain)["image"]
    (image_of_gpu,) = read(FOLDER / "gpu" / "kustomization.yaml")["images"]
    assert image_of_gpu["name"] == image["newName"]
    assert image_of_gpu["newTag"] != image["newTag"]
