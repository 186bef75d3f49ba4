"""Reads what sentence-transformers puts beside a checkpoint: how texts become vectors.

`modules.json` lists modules in order: the transformer, its pooling, perhaps projections and
normalizations. A module that is not known is refused, because leaving it out would give other
vectors.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from src.core.embedding import EmbeddingRecipe
from src.core.errors import ModelLoadError
from src.core.request import Pooling
from src.models.fields import read_json
from src.models.vector_modules import (
    Normalize,
    VectorModule,
    describe_dense,
    describe_layer_norm,
)

logger: Final = logging.getLogger(__name__)

MODULES_FILE: Final = "modules.json"
_OWN: Final = "config_sentence_transformers.json"
# The transformer's settings; of the names that older versions have used, the first file counts.
_TRANSFORMER_FILES: Final = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_xlm-roberta_config.json",
)
_POOLINGS: Final[dict[str, Pooling]] = {
    "cls": "first",
    "cls_token": "first",
    "mean": "mean",
    "mean_tokens": "mean",
    "lasttoken": "last",
    "last_token": "last",
}
_FLAG: Final = "pooling_mode_"
_FIRST: Final = ["Transformer", "Pooling"]
# Class of a module behind the pooling -> reads what it is; None: it changes nothing.
_BEHIND: Final[Mapping[str, Callable[[Path, int], VectorModule] | None]] = {
    "Dense": describe_dense,
    "Dropout": None,
    "LayerNorm": describe_layer_norm,
    "Normalize": lambda directory, size: Normalize(size),
}


class _Module(msgspec.Struct):
    """An entry of `modules.json`."""

    type: str
    path: str = ""


def read_recipe(path: Path, *, size: int, context: int, is_encoder: bool) -> EmbeddingRecipe:
    """How the texts of a checkpoint become vectors.

    Without `modules.json` an encoder's hidden states are averaged, and of a decoder's the last is
    taken; neither is normalized.

    Parameters
    ----------
    path
        Of the model's directory, or a GGUF file.
    size
        Numbers of a hidden state; modules behind the pooling may make more or fewer of them.
    context
        The model's context, in tokens.
    is_encoder
        Whether tokens see later ones.

    Raises
    ------
    ModelLoadError
        A file cannot be read, or a module or a setting is not supported; names it.
    """
    pooling: Pooling = "mean" if is_encoder else "last"
    source = path / MODULES_FILE
    if not source.is_file():
        sizes = _sizes(path / "config.json", size)
        return EmbeddingRecipe(
            pooling=pooling, size=size, token_size=size, max_tokens=context, sizes=sizes
        )
    own = _optional(path / _OWN)
    if _optional(path / "config.json").get("auto_map"):
        logger.warning(
            "%s asks for code from the checkpoint (auto_map), which is not run: vectors are those "
            "of the class that architectures names",
            path / "config.json",
        )
    prompts, name = own.get("prompts") or {}, own.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(one, str) for one in prompts.values()):
        raise ModelLoadError(f"{path / _OWN}: prompts must be an object of texts, got {prompts!r}")
    if name is not None and (not isinstance(name, str) or name not in prompts):
        raise ModelLoadError(
            f"{path / _OWN}: default_prompt_name must be one of {sorted(prompts)}, got {name!r}"
        )
    modules = _modules(source)
    behind, normalizes = _behind(path, modules, size)
    made = behind[-1].outputs if behind else size
    pooling, pools_prompt = _pooling(path / modules[1].path / "config.json", size)
    return EmbeddingRecipe(
        pooling=pooling,
        size=made,
        token_size=size,
        normalizes=normalizes,
        max_tokens=_longest(path / modules[0].path, context),
        prompts=prompts,
        default_prompt=name,
        pools_prompt=pools_prompt,
        sizes=_sizes(path / "config.json", made),
    )


def read_vector_modules(path: Path, *, size: int) -> tuple[VectorModule, ...]:
    """What makes vectors of pooled ones, before a normalization at the end.

    Parameters
    ----------
    path
        Of the model's directory, or a GGUF file.
    size
        Numbers of a hidden state.

    Raises
    ------
    ModelLoadError
        As of `read_recipe`.
    """
    source = path / MODULES_FILE
    return _behind(path, _modules(source), size)[0] if source.is_file() else ()


def module_kinds(path: Path) -> tuple[str, ...]:
    """The modules of a checkpoint, by the names of their classes; none without `modules.json`.

    Raises
    ------
    ModelLoadError
        As of `read_recipe`.
    """
    source = path / MODULES_FILE
    return tuple(_kind(one, source) for one in _modules(source)) if source.is_file() else ()


def _behind(path: Path, modules: list[_Module], size: int) -> tuple[tuple[VectorModule, ...], bool]:
    """The modules behind the pooling, and whether a normalization ends them."""
    source = path / MODULES_FILE
    kinds = [_kind(module, source) for module in modules]
    if kinds[:2] != _FIRST or not set(kinds[2:]) <= _BEHIND.keys():
        raise ModelLoadError(
            f"{source}: expected Transformer, Pooling and perhaps {', '.join(_BEHIND)}, got "
            f"{', '.join(kinds)}: another order, or another number, is not supported"
        )
    made: list[VectorModule] = []
    for module, kind in zip(modules[2:], kinds[2:], strict=True):
        describe = _BEHIND[kind]
        if describe is not None:
            made.append(describe(path / module.path, made[-1].outputs if made else size))
    normalizes = False
    # At the end it comes behind what requests cut off.
    while made and isinstance(made[-1], Normalize):
        normalizes = True
        made.pop()
    return tuple(made), normalizes


def _modules(source: Path) -> list[_Module]:
    try:
        modules = msgspec.json.decode(source.read_bytes(), type=list[_Module])
    except (OSError, msgspec.DecodeError) as error:
        raise ModelLoadError(f"{source} cannot be read: {error}") from error
    for module in modules:
        if Path(module.path).is_absolute() or ".." in Path(module.path).parts:
            raise ModelLoadError(f"{source}: path must be a directory beside it: {module.path!r}")
    return modules


def _kind(module: _Module, source: Path) -> str:
    """The class of a module, whatever package of sentence-transformers it is in by now."""
    package, _, name = module.type.rpartition(".")
    known = [*_FIRST, *_BEHIND]
    if package.partition(".")[0] != "sentence_transformers" or name not in known:
        raise ModelLoadError(
            f"{source}: the module {module.type!r} is not supported, and without it vectors would "
            f"be others; supported are {', '.join(known)} of sentence_transformers"
        )
    return name


def _longest(directory: Path, context: int) -> int:
    """Tokens that the transformer takes."""
    source = next(
        (directory / name for name in _TRANSFORMER_FILES if (directory / name).is_file()), None
    )
    settings = {} if source is None else read_json(source)
    if settings.get("do_lower_case"):
        raise ModelLoadError(
            f"{source}: do_lower_case = true is not supported; a tokenizer that lower-cases does "
            "it in tokenizer.json"
        )
    longest = settings.get("max_seq_length")
    if longest is None:
        return context
    if isinstance(longest, bool) or not isinstance(longest, int) or longest < 1:
        raise ModelLoadError(f"{source}: max_seq_length must be an integer over 0, got {longest!r}")
    return min(longest, context)


def _pooling(source: Path, size: int) -> tuple[Pooling, bool]:
    """Which hidden states make a vector, and whether those of prompts are among them."""
    settings = read_json(source)
    given = settings.get("pooling_mode")
    if given is None:
        names = [name for name, value in settings.items() if name.startswith(_FLAG) and value]
        given = [name.removeprefix(_FLAG) for name in names]
    modes = [given] if isinstance(given, str) else given
    # Anything may stand in a file, also what no dict can be asked for.
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in list(_POOLINGS):
        raise ModelLoadError(
            f"{source}: pooling must be one of {', '.join(_POOLINGS)}, got {given!r}"
        )
    pooling = _POOLINGS[modes[0]]
    pools_prompt = settings.get("include_prompt", True)
    if not isinstance(pools_prompt, bool):
        raise ModelLoadError(
            f"{source}: include_prompt must be true or false, got {pools_prompt!r}"
        )
    for name in ("word_embedding_dimension", "embedding_dimension"):
        if settings.get(name) not in (None, size):
            raise ModelLoadError(f"{source}: {name} must be {size}, got {settings[name]!r}")
    # The last token is never one of the prompt.
    return pooling, pools_prompt or pooling == "last"


def _sizes(source: Path, size: int) -> tuple[int, ...] | None:
    """To how many numbers a vector may be cut, see `EmbeddingRecipe`."""
    fields = _optional(source)
    sizes = fields.get("matryoshka_dimensions")
    if sizes is None:
        return () if fields.get("is_matryoshka") is True else None
    if not isinstance(sizes, list) or not all(
        type(one) is int and 0 < one <= size for one in sizes
    ):
        raise ModelLoadError(
            f"{source}: matryoshka_dimensions must be a list of integers from 1 to {size}, got "
            f"{sizes!r}"
        )
    return tuple(sizes)


def _optional(source: Path) -> Mapping[str, Any]:
    return read_json(source) if source.is_file() else {}
