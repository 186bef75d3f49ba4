"""Reads settings from a TOML file, then the environment, then the command line.

Later sources win. Every key of `Config` may be set as ``section.key`` in the file and as
``SLIPSTREAM_SECTION__KEY`` in the environment. An unknown key is an error that names the nearest
known key, because a silently ignored setting is found much later.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import NoneType
from typing import Any, Final, get_args, get_origin, get_type_hints

import msgspec

from src.core.config import Config, Secret
from src.core.errors import ConfigError
from src.core.gguf import is_gguf
from src.core.task import TASKS

PREFIX: Final = "SLIPSTREAM_"
CONFIG_VARIABLE: Final = "SLIPSTREAM_CONFIG"
MODEL_VARIABLE: Final = "SLIPSTREAM_MODEL"
# Variables with the prefix that are not settings, and what they are.
OTHER_VARIABLES: Final[Mapping[str, str]] = {
    CONFIG_VARIABLE: "the TOML file to read",
    MODEL_VARIABLE: "short for SLIPSTREAM_MODEL__PATH",
    "SLIPSTREAM_CACHE_DIR": "where compiled artifacts are kept",
    "SLIPSTREAM_KERNEL_FLAGS": "further flags of the C++ compiler",
}

CHECKOUT: Final = Path(__file__).resolve().parents[2]


class Setting(msgspec.Struct, frozen=True):
    """One key: ``section.key``, its variable, its type (with bounds) and its default."""

    section: str
    key: str
    type: Any
    default: Any

    @property
    def name(self) -> str:
        """Its name in a TOML file, e.g. ``scheduler.max_num_seqs``."""
        return f"{self.section}.{self.key}"

    @property
    def is_secret(self) -> bool:
        """Whether its value must never be shown."""
        return Secret in get_args(self.type)

    @property
    def takes_word_or_list(self) -> bool:
        """Whether it is the word that is its default, or a list."""
        kinds = [get_args(kind)[0] if get_args(kind) else kind for kind in get_args(self.type)]
        return isinstance(self.default, str) and any(get_origin(kind) is tuple for kind in kinds)

    @property
    def variable(self) -> str:
        """Its name in the environment, e.g. ``SLIPSTREAM_SCHEDULER__MAX_NUM_SEQS``."""
        return f"{PREFIX}{self.section}__{self.key}".upper()


def known_settings() -> dict[str, Setting]:
    """Every setting by its name, in the order of their declaration."""
    found: dict[str, Setting] = {}
    for section in msgspec.structs.fields(Config):
        hints = get_type_hints(section.type, include_extras=True)
        for field in msgspec.structs.fields(section.type):
            default = field.default
            if field.default_factory is not msgspec.NODEFAULT:
                default = field.default_factory()
            setting = Setting(section.name, field.name, hints[field.name], default)
            found[setting.name] = setting
    return found


def load_config(
    path: str | Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Iterable[tuple[str, str]] = (),
) -> Config:
    """Gather the configuration.

    Parameters
    ----------
    path
        A TOML file; ``None`` is the one that ``SLIPSTREAM_CONFIG`` names, or none at all.
    environ
        ``None`` is the process's.
    overrides
        Pairs of ``section.key`` and a value as text; they win over everything.

    Raises
    ------
    ConfigError
        The message names the source, the key, its value and what was expected.
    """
    environ = os.environ if environ is None else environ
    known = known_settings()
    given = path if path is not None else environ.get(CONFIG_VARIABLE) or None
    file = None if given is None else _expand_home(given)
    values: dict[str, Any] = {}
    # Directory of the file for the paths that it names.
    beside: dict[str, Path] = {}
    if file is not None:
        values.update(_from_file(file, known))
        beside = dict.fromkeys(values, file.resolve().parent)
    for source in (_from_environment(environ, known), _from_overrides(overrides, known)):
        for name, value in source:
            values[name] = value
            beside.pop(name, None)
    config = _build(values)
    if not config.model.path.strip():
        raise ConfigError("model.path is empty; expected a directory, a GGUF file or a hub id")
    model_path = locate_model(config.model.path, beside.get("model.path"))
    speculation = config.speculation
    if speculation.model is not None:
        drafter = locate_model(speculation.model, beside.get("speculation.model"))
        speculation = msgspec.structs.replace(speculation, model=drafter)
    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, path=model_path),
        speculation=speculation,
    )


def locate_model(path: str, file_directory: Path | None = None) -> str:
    """The absolute form of ``path`` if it is a directory or a GGUF file, else ``path`` itself.

    A relative path is looked for in the working directory, beside the TOML file that names it, and
    in the checkout, so that the bundled model is found from anywhere. A path that is not found is
    returned unchanged, because it may be a hub id.

    Raises
    ------
    ConfigError
        It begins with the home directory of an unknown user.
    """
    expanded = _expand_home(path)
    for base in (Path.cwd(), file_directory, CHECKOUT):
        if base is None:
            continue
        found = base / expanded
        if found.is_dir():
            return str(found.resolve())
        if found.is_file() and is_gguf(found):
            # Not the target of a link: stores keep files under names that say nothing.
            return os.path.abspath(found)
    return str(expanded) if path.startswith("~") else path


def _expand_home(path: str | Path) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{path}: nobody's home directory is known by that name") from error


def _from_file(file: Path, known: Mapping[str, Setting]) -> Iterator[tuple[str, Any]]:
    try:
        with file.open("rb") as stream:
            document = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: not valid TOML: {error}") from error
    sections = {setting.section for setting in known.values()}
    for section, table in document.items():
        if section not in sections:
            raise _unknown(f"{file}: unknown section [{section}]", section, sections)
        if not isinstance(table, dict):
            raise ConfigError(f"{file}: {section} must be a table [{section}], got {table!r}")
        for key, value in table.items():
            name = f"{section}.{key}"
            if name not in known:
                raise _unknown(f"{file}: unknown key {name}", name, known)
            yield name, _convert(known[name], value, f"{file}: {name}")


def _from_environment(
    environ: Mapping[str, str], known: Mapping[str, Setting]
) -> Iterator[tuple[str, Any]]:
    by_variable = {setting.variable: setting for setting in known.values()}
    long_form = known["model.path"].variable
    # Compose files and unit files set a variable to an empty text to leave it out.
    short, long = environ.get(MODEL_VARIABLE) or None, environ.get(long_form)
    if short is not None and long is not None and short != long:
        raise ConfigError(
            f"{MODEL_VARIABLE}={short} and {long_form}={long} disagree; set one of them"
        )
    if short is not None:
        yield "model.path", short
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in OTHER_VARIABLES:
            continue
        if variable not in by_variable:
            raise _unknown(
                f"unknown environment variable {variable}",
                variable,
                (*by_variable, *OTHER_VARIABLES),
            )
        setting = by_variable[variable]
        yield setting.name, _parse(setting, text, variable)


def _from_overrides(
    overrides: Iterable[tuple[str, str]], known: Mapping[str, Setting]
) -> Iterator[tuple[str, Any]]:
    for name, text in overrides:
        if name not in known:
            raise _unknown(f"unknown setting {name}", name, known)
        yield name, _parse(known[name], text, name)


def _parse(setting: Setting, text: str, source: str) -> Any:
    """Parse a value: ``none`` unsets it. Tables are JSON; lists are, or are separated by commas."""
    is_list, is_table = isinstance(setting.default, tuple), isinstance(setting.default, dict)
    if setting.takes_word_or_list:
        is_list = text.strip().lower() not in ("", "none", "null", setting.default)
        if not is_list:
            return setting.default
    if text.strip().lower() in ("", "none", "null"):
        if is_list or is_table:
            return type(setting.default)()
        if NoneType in get_args(setting.type):
            return None
    value: Any = text
    if is_table or is_list:
        if is_table or text.lstrip().startswith("["):
            what = "JSON object" if is_table else "JSON list"
            try:
                value = msgspec.json.decode(text)
            except msgspec.DecodeError as error:
                if setting.is_secret:
                    raise ConfigError(f"{source}: not a {what}") from None
                raise ConfigError(f"{source}={text!r}: not a {what}: {error}") from error
        else:
            value = [part.strip() for part in text.split(",") if part.strip()]
    return _convert(setting, value, source, strict=False)


def _convert(setting: Setting, value: Any, source: str, *, strict: bool = True) -> Any:
    try:
        return msgspec.convert(value, setting.type, strict=strict, dec_hook=_conceal)
    except msgspec.ValidationError as error:
        if setting.is_secret:
            raise ConfigError(f"{source}: {_expected(setting, error)}") from None
        raise ConfigError(f"{source}={value!r}: {_expected(setting, error)}") from error


def _conceal(kind: type, value: Any) -> Any:
    assert kind is Secret
    if not isinstance(value, str):
        raise ValueError("expected a text")
    return Secret(value)


def _expected(setting: Setting, error: msgspec.ValidationError) -> str:
    if setting.takes_word_or_list:
        return f"expected {setting.default!r}, or a list of {', '.join(TASKS)}"
    kinds = get_args(setting.type)
    choices = [c for kind in kinds for c in (kind, *get_args(kind)) if isinstance(c, str)]
    if choices:
        return f"expected one of {', '.join(choices)}"
    text = str(error)
    return text[:1].lower() + text[1:]


def _build(values: Mapping[str, Any]) -> Config:
    sections: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        section, key = name.split(".")
        sections.setdefault(section, {})[key] = value
    default = Config()
    return Config(
        **{
            section: msgspec.structs.replace(getattr(default, section), **keys)
            for section, keys in sections.items()
        }
    )


def _unknown(problem: str, name: str, candidates: Iterable[str]) -> ConfigError:
    nearest = difflib.get_close_matches(name, candidates, n=1, cutoff=0.0)
    return ConfigError(f"{problem}; did you mean {nearest[0]}?")
