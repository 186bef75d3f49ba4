"""What a classifier's head is made of, and how its program is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from src.core.errors import ModelLoadError
from src.core.scoring import ResultActivation
from src.models.builder import Name, ProgramBuilder
from src.models.config import ClassifierConfig, DenseConfig, ModelConfig
from src.models.fields import Fields
from src.models.layers import classifier as layers
from src.models.program import HIDDEN, LOGITS, StepTensor
from src.models.weights.parameters import Placement

_PROBLEMS: Mapping[str, ResultActivation] = {
    "regression": "none",
    "multi_label_classification": "sigmoid",
}
# Their class in torch -> what it does to scores.
_ACTIVATIONS: Mapping[str, ResultActivation] = {
    "Identity": "none",
    "Sigmoid": "sigmoid",
    "Softmax": "softmax",
    "Tanh": "tanh",
}
_MOST_LABELS = 2**16


class Head(NamedTuple):
    """A class of checkpoints whose model ends in scores of labels.

    Attributes
    ----------
    architecture
        As in `config.json`.
    body
        The architecture of the same model without this head; a family runs it.
    describe
        From the checkpoint's fields and the body's configuration to the head's.
    """

    architecture: str
    body: str
    describe: Callable[[Fields, ModelConfig], ClassifierConfig]


def with_head(config: ModelConfig, head: Head, fields: Fields) -> ModelConfig:
    """A body's configuration with the head that its checkpoint has.

    Raises
    ------
    ModelLoadError
        A field is missing or malformed; the message names it.
    """
    return replace(
        config,
        classifier=head.describe(fields, config),
        tie_word_embeddings=False,
        # Heads for text that checkpoints keep beside this one.
        unread=(*config.unread, "lm_head.", "cls."),
    )


def classifier(
    fields: Fields, layers_of: Callable[[int], Sequence[DenseConfig]], **differences: Any
) -> ClassifierConfig:
    """A head with the labels that `config.json` names.

    Parameters
    ----------
    layers_of
        From the number of labels to the head's layers.
    differences
        Other values of `ClassifierConfig`.
    """
    labels = labels_of(fields)
    return ClassifierConfig(
        labels=labels,
        activation=activation_of(fields, len(labels)),
        layers=tuple(layers_of(len(labels))),
        **differences,
    )


def labels_of(fields: Fields) -> tuple[str, ...]:
    """Names of the labels: `id2label`, or as many as `num_labels` says; as transformers, else 2.

    Raises
    ------
    ModelLoadError
        `id2label` does not name the labels from 0 on.
    """
    named = fields.raw("id2label")
    if named is None:
        count = fields.integer("num_labels", default=2)
        if count > _MOST_LABELS:
            raise fields.error("num_labels", f"at most {_MOST_LABELS}")
        return tuple(f"LABEL_{number}" for number in range(count))
    expected = "an object with a name for each label from 0 on"
    if not isinstance(named, dict) or not 1 <= len(named) <= _MOST_LABELS:
        raise fields.error("id2label", expected)
    try:
        by_number = {int(number): name for number, name in named.items()}
    except (TypeError, ValueError):
        raise fields.error("id2label", expected) from None
    names = [by_number.get(number) for number in range(len(named))]
    if not all(isinstance(name, str) for name in names):
        raise fields.error("id2label", expected)
    return tuple(str(name) for name in names)


def activation_of(fields: Fields, num_labels: int) -> ResultActivation:
    """What makes results of scores.

    It is what sentence-transformers has written into the file, or what `problem_type` asks for. By
    default one label has a sigmoid, and several a softmax.

    Raises
    ------
    ModelLoadError
        The file names another activation.
    """
    own = fields.raw("sentence_transformers")
    given = own.get("activation_fn") if isinstance(own, dict) else None
    name = "sentence_transformers"
    if given is None:
        name = "sbert_ce_default_activation_function"
        given = fields.raw(name)
    if given is not None:
        found = named_activation(given)
        if found is None:
            raise fields.error(name, f"with one of {', '.join(_ACTIVATIONS)} of torch.nn")
        return found
    problem = fields.raw("problem_type")
    known = (*_PROBLEMS, "single_label_classification", None)
    if problem not in list(known):
        raise fields.error("problem_type", f"one of {', '.join(map(str, known[:-1]))}")
    return _PROBLEMS.get(problem, "sigmoid" if num_labels == 1 else "softmax")


def named_activation(path: object) -> ResultActivation | None:
    """The activation of a class's dotted name, if it is a known one of torch; else None."""
    if not isinstance(path, str) or not path.startswith("torch.nn."):
        return None
    return _ACTIVATIONS.get(path.rpartition(".")[2])


def write_classifier(builder: ProgramBuilder, config: ModelConfig) -> None:
    """Write the head of a classifier.

    Raises
    ------
    ModelLoadError
        The group has several ranks.
    """
    own = config.classifier
    assert own is not None
    if builder.group.size > 1:
        raise ModelLoadError("classifiers are computed on one device")
    weights, inputs = [], config.hidden_size
    for number, dense in enumerate(own.layers):
        weights.append(_dense(builder, f"classifier.{number}.", dense, inputs))
        inputs = dense.outputs
    builder.head(
        layers.classify,
        layers.ClassifierSpec(
            tuple(layers.DenseSpec(each.activation, each.eps) for each in own.layers),
            builder.deterministic,
        ),
        tuple(weights),
        (HIDDEN,),
        (StepTensor(LOGITS, (inputs,), torch.float32),),
    )


def _dense(
    builder: ProgramBuilder, own: str, dense: DenseConfig, inputs: int
) -> layers.DenseWeights:
    def vector(name: str, tensor: str | None, fill: float) -> Name:
        if tensor is None:
            return None
        placements = (Placement(tensor),)
        return builder.parameter(
            f"{own}{name}", (dense.outputs,), "classifier", placements, fill=fill
        )

    weight: Name = builder.parameter(
        f"{own}weight",
        (dense.outputs, inputs),
        "classifier",
        (Placement(f"{dense.name}.weight"),),
    )
    norm = dense.norm
    return layers.DenseWeights(
        weight,
        vector("bias", f"{dense.name}.bias" if dense.bias else None, 0.0),
        vector("norm", None if norm is None else f"{norm}.weight", 1.0),
        vector("norm_bias", f"{norm}.bias" if norm is not None and dense.norm_bias else None, 0.0),
    )
