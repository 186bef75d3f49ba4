"""What a model can be asked for: what its files say, or a list in the configuration."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec

from src.core.embedding import EmbeddingRecipe
from src.core.errors import ConfigError, ModelLoadError
from src.core.gguf import is_gguf
from src.core.scoring import LabelRecipe, ScoreTokens, ScoringRecipe
from src.core.task import TASKS, Task
from src.models.config_file import read_config_file
from src.models.cross_encoders import (
    has_modules,
    read_activation,
    read_instruction,
    read_score_tokens,
)
from src.models.sentence_transformers import read_recipe, read_vector_modules
from src.models.served import ServedModel
from src.models.vector_modules import VectorModules, load_vector_modules
from src.text import Tokenizer

logger: Final = logging.getLogger(__name__)

Recipe = TypeVar("Recipe", EmbeddingRecipe, LabelRecipe, ScoringRecipe)

_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
# Template of the kind of model: before the query, between it and the document, and behind that.
# Qwen3-Reranker's model card (Zhang et al. 2025) has this one, with this default instruction.
BUILT_IN: Final[Mapping[str, tuple[str, str, str]]] = {
    "qwen3": (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
        'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        f"<|im_start|>user\n<Instruct>: {_INSTRUCTION}\n<Query>: ",
        "\n<Document>: ",
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    )
}
_ROLES: Final = ("query", "document")


@dataclass
class ModelTasks:
    """What a model does, and how.

    Attributes
    ----------
    tasks
        In the order of `TASKS`.
    embedding
        How texts become vectors; None: they do not.
    labels
        What its head says of texts or tokens; None: it has no such head.
    scoring
        How two texts get a score; None: they do not.
    modules
        What is computed of pooled vectors; None: nothing.
    """

    tasks: tuple[Task, ...]
    embedding: EmbeddingRecipe | None = None
    labels: LabelRecipe | None = None
    scoring: ScoringRecipe | None = None
    modules: VectorModules | None = None

    def within(self, context: int) -> ModelTasks:
        """The same for a context that is shorter, since memory holds no longer one."""

        def cut(recipe: Recipe | None) -> Recipe | None:
            if recipe is None:
                return None
            most = min(recipe.max_tokens, context)
            return msgspec.structs.replace(recipe, max_tokens=most)

        recipes = (cut(self.embedding), cut(self.labels), cut(self.scoring))
        return ModelTasks(self.tasks, *recipes, self.modules)


def find_tasks(
    path: Path,
    model: ServedModel,
    tokenizer: Tokenizer,
    wish: Literal["auto"] | tuple[Task, ...],
    *,
    context: int,
    is_encoder: bool,
    cut_vectors: bool = False,
    is_dummy: bool = False,
) -> ModelTasks:
    """What a loaded model does.

    Parameters
    ----------
    path
        Of the model's directory, or a GGUF file.
    wish
        ``auto``: what its files say.
    context
        The model's context, in tokens.
    is_encoder
        Whether tokens see later ones.
    cut_vectors
        Whether vectors may be cut although the files do not say so.
    is_dummy
        Whether weights are made up and no file is read.

    Raises
    ------
    ConfigError
        A task is asked for that the model cannot do; the message names those that it can.
    ModelLoadError
        A file cannot be read, or asks for something that is not supported.
    """
    finder = _Finder(path, model, tokenizer, context, is_encoder, cut_vectors, is_dummy)
    found = finder.of_classifier() if model.classifier is not None else finder.of_body(wish)
    if wish == "auto":
        return found
    if missing := [task for task in wish if task not in found.tasks]:
        reason = f": {finder.why_no_score}" if "score" in missing and finder.why_no_score else ""
        raise ConfigError(
            f"model.tasks: the model cannot {missing[0]}{reason}; what it can do is "
            f"{', '.join(found.tasks)}"
        )
    found.tasks = tuple(task for task in TASKS if task in wish)
    return found


def may_generate(model: ServedModel, wish: Literal["auto"] | tuple[Task, ...]) -> bool:
    """Whether "generate" is among the tasks of a model, or of its outline, with such a ``wish``."""
    if model.classifier is not None or (wish != "auto" and "generate" not in wish):
        return False
    return all(layer.lasts != "step" for layer in model.kv_cache_spec())


@dataclass
class _Finder:
    path: Path
    model: ServedModel
    tokenizer: Tokenizer
    context: int
    is_encoder: bool
    cut_vectors: bool
    is_dummy: bool
    why_no_score: str = field(default="", init=False)
    modules: VectorModules | None = field(default=None, init=False)

    def of_classifier(self) -> ModelTasks:
        own = self.model.classifier
        assert own is not None
        activation = read_activation(self.path) or own.activation
        recipe = LabelRecipe(
            labels=own.labels,
            activation=activation,
            pooling=own.pooling,
            max_tokens=self.context,
        )
        if own.pooling == "all":
            return ModelTasks(("token_classify",), labels=recipe)
        if len(own.labels) != 1:
            self.why_no_score = f"a score needs a model with one label, this has {len(own.labels)}"
            return ModelTasks(("classify",), labels=recipe)
        scoring = ScoringRecipe(
            joins="tokenizer",
            activation=activation,
            pooling=own.pooling,
            max_tokens=self.context,
        )
        if not self.is_encoder:
            scoring = self._templated(scoring) or scoring
        return ModelTasks(("classify", "score"), labels=recipe, scoring=scoring)

    def of_body(self, wish: Literal["auto"] | tuple[Task, ...]) -> ModelTasks:
        generates = not self.is_encoder
        tokens = read_score_tokens(self.path, self.model.spec.vocab_size) if generates else None
        embedding = None if tokens is not None else self._embedding()
        tasks: list[Task] = ["generate"] if generates else []
        if embedding is not None:
            tasks += ["embed", "token_embed"]
        scoring = None
        asks = wish != "auto" and "score" in wish
        if embedding is not None and (not generates or has_modules(self.path)):
            scoring = ScoringRecipe(
                joins="apart",
                activation="none",
                pooling=embedding.pooling,
                max_tokens=embedding.max_tokens,
            )
        elif tokens is not None or (generates and asks):
            scoring = self._by_logits(tokens)
        if scoring is not None:
            tasks.append("score")
        found = tuple(t for t in TASKS if t in tasks)
        return ModelTasks(found, embedding, scoring=scoring, modules=self.modules)

    def _embedding(self) -> EmbeddingRecipe | None:
        """How texts become vectors; None if only text can be generated."""
        size = self.model.spec.hidden_size
        try:
            recipe = read_recipe(
                self.path, size=size, context=self.context, is_encoder=self.is_encoder
            )
            self.modules = load_vector_modules(
                read_vector_modules(self.path, size=size),
                self.model.spec.device,
                is_dummy=self.is_dummy,
            )
        except ModelLoadError as error:
            if self.is_encoder:
                raise
            logger.warning("the model generates, and gives no vectors: %s", error)
            return None
        if self.cut_vectors and recipe.sizes is None:
            recipe = msgspec.structs.replace(recipe, sizes=())
        return recipe

    def _by_logits(self, tokens: ScoreTokens | None) -> ScoringRecipe | None:
        """Scores by the logits of "yes" and "no"."""
        if tokens is None:
            true_id, false_id = (self.tokenizer.token_to_id(word) for word in ("yes", "no"))
            if true_id is None or false_id is None:
                self.why_no_score = 'its tokenizer has no tokens "yes" and "no"'
                return None
            tokens = ScoreTokens(true_id, false_id)
        recipe = ScoringRecipe(
            joins="tokenizer",
            activation=read_activation(self.path) or "sigmoid",
            pooling="last",
            max_tokens=self.context,
            tokens=tokens,
        )
        found = self._templated(recipe)
        if found is None:
            self.why_no_score = (
                "it needs a chat template with the roles query and document (chat.template)"
            )
        return found

    def _templated(self, recipe: ScoringRecipe) -> ScoringRecipe | None:
        """The same with the template that makes one text of both, if there is one."""
        if self.tokenizer.has_chat_template and any(
            _names_roles(source) for source in self.tokenizer.chat_template.sources.values()
        ):
            return msgspec.structs.replace(
                recipe, joins="template", instruction=read_instruction(self.path)
            )
        raw = {} if is_gguf(self.path) else read_config_file(self.path)
        built_in = BUILT_IN.get(str(raw.get("model_type")))
        if built_in is None or self.tokenizer.token_to_id("<|im_start|>") is None:
            return None
        instruction = read_instruction(self.path)
        if instruction is not None:
            built_in = (built_in[0].replace(_INSTRUCTION, instruction), *built_in[1:])
        return msgspec.structs.replace(recipe, joins="built_in", built_in=built_in)


def _names_roles(source: str) -> bool:
    """Whether a template tells messages of a query and of a document apart."""
    return all(re.search(rf"""["']{role}["']""", source) for role in _ROLES)


def describe_scoring(recipe: ScoringRecipe, embedding: EmbeddingRecipe | None = None) -> str:
    """One line for the log: what makes one text of two, or what stands before each."""
    joined = {
        "tokenizer": "both texts are joined by the tokenizer, as a pair",
        "template": "both texts are put into the chat template, as query and document",
        "built_in": "both texts are put into the template built in for this kind of model",
        "apart": "each text has a vector, and the score is their cosine",
    }
    by = ""
    if recipe.tokens is not None:
        ids = f"{recipe.tokens.true_id}"
        if recipe.tokens.false_id is not None:
            ids += f" less {recipe.tokens.false_id}"
        by = f"; the score is the logit of token {ids}"
    if recipe.joins == "apart" and embedding is not None:
        before = {"query": embedding.query_prompt, "document": embedding.document_prompt}
        given = [f"the {side} {text!r}" for side, text in before.items() if text]
        if given:
            by = f"; put before {' and '.join(given)}"
    return f"scores: {joined[recipe.joins]}{by}"
