"""Manifests, compose file and Prometheus' rules against the schemas that their projects publish.

Not collected with the other tests: `nox -s deployment` installs packages that carry the schemas.
`kubernetes-validate` has those of Kubernetes' API, `cloudcoil-models-prometheus-operator` that of
PodMonitor from its custom resource definition, and `compose-spec` parses compose files strictly.
Nothing published on a package index has a schema of kustomization files or of prometheus-adapter's
values: `test_kustomizations_have_known_fields` knows the fields that are used, by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.prometheus_operator.v1 import PodMonitor
from compose_spec import PyCompose
from pydantic import BaseModel

from tests.deployment.manifests import FOLDER, base, container, gpu, pod, read
from tests.deployment.test_compose import COMPOSE, filled_in

# The oldest that has every field used (preStop's sleep), and the newest that the package knows.
VERSIONS = ("1.30", "1.37")
CUSTOM = {"PodMonitor"}

DOCUMENTS = [
    pytest.param(document, id=f"{variant}-{kind}")
    for variant, documents in (("base", base()), ("gpu", gpu()))
    for kind, document in documents.items()
    if kind not in CUSTOM
]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_manifest_is_what_kubernetes_publishes(document: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_schemas_would_find_a_mistake(version: str) -> None:
    """Or the tests above say nothing."""
    for spoil in (
        lambda document: container(document).update(livenesProbe={}),
        lambda document: container(document)["livenessProbe"].update(periodSeconds="10s"),
        lambda document: pod(document).update(terminationGracePeriod=60),
        lambda document: document["Deployment"].update(apiVersion="extensions/v1beta1"),
    ):
        documents = copy.deepcopy(base())
        spoil(documents)
        with pytest.raises(
            (kubernetes_validate.ValidationError, kubernetes_validate.SchemaNotFoundError)
        ):
            kubernetes_validate.validate(documents["Deployment"], version, strict=True)


def unknown_fields(given: Any, model: Any, path: str = "") -> Iterator[str]:
    """Fields that the model does not have: pydantic drops them without a word."""
    if isinstance(given, dict) and isinstance(model, BaseModel):
        known = {field.alias or name: name for name, field in type(model).model_fields.items()}
        for key, value in given.items():
            if key in known:
                yield from unknown_fields(value, getattr(model, known[key]), f"{path}.{key}")
            elif key not in (model.model_extra or {}):
                yield f"{path}.{key}"
    elif isinstance(given, list) and isinstance(model, list):
        for index, pair in enumerate(zip(given, model, strict=True)):
            yield from unknown_fields(*pair, f"{path}[{index}]")


def test_the_monitor_is_what_the_operator_publishes() -> None:
    document = base()["PodMonitor"]
    model = PodMonitor.model_validate(document)
    assert list(unknown_fields(document, model)) == []
    assert (model.api_version, model.kind) == (document["apiVersion"], document["kind"])


def test_the_monitor_s_schema_would_find_a_mistake() -> None:
    wrong = copy.deepcopy(base()["PodMonitor"])
    wrong["spec"]["podMetricsEndpoints"][0]["interval"] = "five seconds"
    with pytest.raises(ValueError, match="interval"):
        PodMonitor.model_validate(wrong)
    wrong = copy.deepcopy(base()["PodMonitor"])
    wrong["spec"]["podMetricsEndpoints"][0]["scrapeTimeOut"] = "4s"
    found = list(unknown_fields(wrong, PodMonitor.model_validate(wrong)))
    assert found == [".spec.podMetricsEndpoints[0].scrapeTimeOut"]


def test_the_compose_file_is_what_the_specification_says() -> None:
    # The parser takes no variables, which compose fills in before.
    compose = PyCompose.from_yaml(filled_in(yaml.safe_dump(COMPOSE)))
    compose.validate()
    assert set(compose.service_names()) == COMPOSE["services"].keys()


@pytest.mark.parametrize(
    ("correct", "wrong"),
    [("ports:", "prots:"), ("127.0.0.1:3000:3000", "127.0.0.1:300000:3000"), ("50s", "soon")],
)
def test_the_specification_would_find_a_mistake(correct: str, wrong: str) -> None:
    text = filled_in(yaml.safe_dump(COMPOSE))
    assert correct in text
    with pytest.raises(ValueError, match="services"):
        PyCompose.from_yaml(text.replace(correct, wrong))


def test_kustomizations_have_known_fields() -> None:
    """As https://kubectl.docs.kubernetes.io/references/kustomize/kustomization has them."""
    known = {
        *("apiVersion", "kind", "resources", "configMapGenerator", "images", "patches"),
    }
    for variant in ("base", "gpu"):
        document = read(FOLDER / variant / "kustomization.yaml")
        assert document.keys() <= known
        assert document["apiVersion"] == "kustomize.config.k8s.io/v1beta1"
        assert document["kind"] == "Kustomization"
        for image in document["images"]:
            assert image.keys() <= {"name", "newName", "newTag", "digest"}
        for generator in document.get("configMapGenerator", ()):
            assert generator.keys() <= {"name", "files", "literals", "envs"}
        for patch in document.get("patches", ()):
            assert patch.keys() <= {"path", "patch", "target"}
