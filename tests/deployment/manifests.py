"""The manifests of configs/kubernetes, as a cluster gets them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from src.core.settings import CHECKOUT

FOLDER = CHECKOUT / "configs" / "kubernetes"
Document = dict[str, Any]


def read(path: Path) -> Document:
    """The one document of a file."""
    (document,) = yaml.safe_load_all(path.read_text())
    assert isinstance(document, dict)
    return document


def base() -> dict[str, Document]:
    """What the base applies, by kind, as it is written."""
    names = read(FOLDER / "base" / "kustomization.yaml")["resources"]
    documents = [read(FOLDER / "base" / name) for name in names]
    return {document["kind"]: document for document in documents}


def gpu() -> dict[str, Document]:
    """The same with the patches of the overlay for a GPU."""
    documents = copy.deepcopy(base())
    for patch in read(FOLDER / "gpu" / "kustomization.yaml")["patches"]:
        change = read(FOLDER / "gpu" / patch["path"])
        documents[change["kind"]] = merged(documents[change["kind"]], change)
    return documents


def merged(one: Any, other: Any) -> Any:
    """A strategic merge patch, as far as the overlays use it: lists of named objects by name."""
    if isinstance(one, dict) and isinstance(other, dict):
        return {
            key: merged(one[key], other[key])
            if key in one and key in other
            else one.get(key, other.get(key))
            for key in (*one, *(key for key in other if key not in one))
        }
    if isinstance(one, list) and isinstance(other, list):
        if not all(isinstance(item, dict) and "name" in item for item in (*one, *other)):
            return other
        names = {item["name"]: item for item in one}
        for item in other:
            names[item["name"]] = merged(names.get(item["name"], {}), item)
        return list(names.values())
    return other


def pod(documents: dict[str, Document]) -> Document:
    """The deployment's pod."""
    spec: Document = documents["Deployment"]["spec"]["template"]["spec"]
    return spec


def container(documents: dict[str, Document]) -> Document:
    """Its one container."""
    (found,) = pod(documents)["containers"]
    assert isinstance(found, dict)
    return found


def probes(documents: dict[str, Document]) -> Iterator[tuple[str, Document]]:
    """Its probes by name."""
    for name, value in container(documents).items():
        if name.endswith("Probe"):
            yield name, value
