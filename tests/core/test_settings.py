from pathlib import Path
from typing import Any

import pytest

from src.core.config import Config
from src.core.errors import ConfigError
from src.core.settings import CHECKOUT, known_settings, load_config, locate_model


def write(directory: Path, text: str) -> Path:
    file = directory / "settings.toml"
    file.write_text(text)
    return file


def test_without_anything_the_bundled_model_is_served_from_any_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_config(environ={}).model.path == str(CHECKOUT / "configs" / "demo")


def test_environment_wins_over_the_file_and_overrides_over_both(tmp_path: Path) -> None:
    file = write(tmp_path, "[scheduler]\nmax_num_seqs = 1\nmax_bypasses = 1\npipeline_depth = 1")
    environ = {
        "SLIPSTREAM_CONFIG": str(file),
        "SLIPSTREAM_SCHEDULER__MAX_NUM_SEQS": "2",
        "SLIPSTREAM_SCHEDULER__MAX_BYPASSES": "2",
    }
    section = load_config(environ=environ, overrides=[("scheduler.max_bypasses", "3")]).scheduler
    assert (section.pipeline_depth, section.max_num_seqs, section.max_bypasses) == (1, 2, 3)


def test_an_empty_model_variable_counts_as_not_set() -> None:
    assert load_config(environ={"SLIPSTREAM_MODEL": ""}) == load_config(environ={})
    environ = {"SLIPSTREAM_MODEL": "", "SLIPSTREAM_MODEL__PATH": "some/model"}
    assert load_config(environ=environ).model.path == "some/model"


def test_memory_may_be_larger_than_other_integers() -> None:
    environ = {"SLIPSTREAM_CACHE__MEMORY_BYTES": str(2**40)}
    assert load_config(environ=environ).cache.memory_bytes == 2**40


def test_an_explicit_file_wins_over_the_environments(tmp_path: Path) -> None:
    file = write(tmp_path, "[model]\nseed = 5")
    assert load_config(file, environ={"SLIPSTREAM_CONFIG": "/nowhere"}).model.seed == 5


def test_every_setting_can_be_given_by_its_variable() -> None:
    examples = {
        "model.path": "some/model",
        "model.revision": "abc",
        "model.served_model_name": "a, b",
        "model.dtype": "float16",
        "model.tasks": "score, classify",
        "model.implementation": "native",
        "model.load_format": "dummy",
        "model.quantization": "int8",
        "model.quantization_group_size": "128",
        "model.quantize_activations": "true",
        "device.type": "cpu",
        "device.attention": "flash_attention_3",
        "cache.memory_fraction": "0.5",
        "cache.enable_prefix_caching": "false",
        "scheduler.policy": "priority",
        "scheduler.tenant_weights": '{"it": 2}',
        "scheduler.pipeline_depth": "1",
        "scheduler.plan_late": "true",
        "compile.enforce_eager": "true",
        "compile.startup": "wait",
        "compile.cuda_graphs": "wait",
        "chat.tool_call_parser": "hermes",
        "chat.reasoning_parser": "none",
        "chat.request_templates": "all",
        "chat.calls_in_reasoning": "off",
        "chat.media_placeholders": "all",
        "structured_output.compile_memory_bytes": "268435456",
        "cache.dtype": "int8",
        "limits.max_stop_strings": "3",
        "speculation.method": "ngram",
        "speculation.prompt_lookup_min": "3",
        "lora.adapters": '{"it": "/adapters/it"}',
        "http.ready_wait": "1.5",
        "http.request_timeout": "2.5",
        "http.shutdown_timeout": "2.5",
        "observability.trace_steps": "0.5",
        "observability.log_level": "debug",
        "observability.log_format": "json",
        "observability.stats_interval": "0",
    }
    for name, setting in known_settings().items():
        other = str(not setting.default).lower() if setting.type is bool else "17"
        text = examples.get(name, other)
        config = load_config(environ={setting.variable: text})
        value = getattr(getattr(config, setting.section), setting.key)
        assert value != setting.default, name
        assert type(value) is not str or value == text, name


@pytest.mark.parametrize(
    ("text", "expected"), [("a,b", ("a", "b")), ('["x", "y"]', ("x", "y")), ("one", ("one",))]
)
def test_lists_are_separated_by_commas_or_json(text: str, expected: tuple[str, ...]) -> None:
    config = load_config(environ={"SLIPSTREAM_MODEL__SERVED_MODEL_NAME": text})
    assert config.model.served_model_name == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("score", ("score",)),
        ("embed, token_embed", ("embed", "token_embed")),
        ('["classify"]', ("classify",)),
        ("auto", "auto"),
        ("none", "auto"),
        ("", "auto"),
    ],
)
def test_tasks_are_a_word_or_a_list(text: str, expected: Any) -> None:
    config = load_config(environ={"SLIPSTREAM_MODEL__TASKS": text})
    assert config.model.tasks == expected


@pytest.mark.parametrize("text", ["rank", "score,rank", "[]", "[1]"])
def test_other_tasks_are_refused_and_those_that_there_are_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match=r"expected 'auto', or a list of generate, embed, "):
        load_config(environ={"SLIPSTREAM_MODEL__TASKS": text})


def test_a_file_has_tasks_as_a_word_or_a_list(tmp_path: Path) -> None:
    for given, expected in (('"auto"', "auto"), ('["score"]', ("score",))):
        file = write(tmp_path, f"[model]\ntasks = {given}")
        assert load_config(file).model.tasks == expected
    with pytest.raises(ConfigError, match="expected 'auto', or a list of"):
        load_config(write(tmp_path, '[model]\ntasks = "score"'))


@pytest.mark.parametrize("text", ["", "none", "None", "null"])
def test_a_setting_with_a_default_of_none_can_be_unset(text: str, tmp_path: Path) -> None:
    file = write(tmp_path, '[model]\nmax_model_len = 64\nserved_model_name = ["a"]')
    environ = {"SLIPSTREAM_CONFIG": str(file), "SLIPSTREAM_MODEL__MAX_MODEL_LEN": text}
    environ["SLIPSTREAM_MODEL__SERVED_MODEL_NAME"] = text
    model = load_config(environ=environ).model
    assert (model.max_model_len, model.served_model_name) == (None, ())


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"SLIPSTREAM_SCHEDULER__MAX_NUM_SEQ": "1"}, ["SLIPSTREAM_SCHEDULER__MAX_NUM_SEQS?"]),
        ({"SLIPSTREAM_MODL": "x"}, ["SLIPSTREAM_MODL", "SLIPSTREAM_MODEL?"]),
        ({"SLIPSTREAM_SCHEDULER__MAX_NUM_SEQS": "0"}, ["MAX_NUM_SEQS='0'", ">= 1"]),
        ({"SLIPSTREAM_SCHEDULER__MAX_NUM_SEQS": "many"}, ["'many'", "expected `int`"]),
        ({"SLIPSTREAM_CACHE__MEMORY_FRACTION": "1.5"}, ["'1.5'", "<= 1"]),
        ({"SLIPSTREAM_MODEL__DTYPE": "int8"}, ["'int8'", "auto, float32, bfloat16, float16"]),
        ({"SLIPSTREAM_COMPILE__ENFORCE_EAGER": "perhaps"}, ["'perhaps'", "`bool`"]),
        ({"SLIPSTREAM_MODEL__SERVED_MODEL_NAME": "[1"}, ["not a JSON list"]),
        ({"SLIPSTREAM_MODEL": "a", "SLIPSTREAM_MODEL__PATH": "b"}, ["disagree"]),
        ({"SLIPSTREAM_SCHEDULER__MAX_NUM_SEQS": str(10**30)}, ["MAX_NUM_SEQS='1000"]),
        ({"SLIPSTREAM_SCHEDULER__MAX_NUM_SEQS": str(2**31)}, ["<= 2147483647"]),
        ({"SLIPSTREAM_CACHE__MEMORY_BYTES": str(2**60)}, ["<= 1125899906842624"]),
        ({"SLIPSTREAM_DEVICE__NUM_THREADS": "1025"}, ["<= 1024"]),
        ({"SLIPSTREAM_MODEL": "~nobody-of-that-name/x"}, ["~nobody-of-that-name/x: nobody's home"]),
        ({"SLIPSTREAM_CONFIG": "~nobody-of-that-name/x"}, ["nobody's home"]),
        ({"SLIPSTREAM_MODEL__PATH": " "}, ["model.path is empty"]),
        ({"SLIPSTREAM_CONFIG": "/no/such.toml"}, ["/no/such.toml", "No such file"]),
    ],
)
def test_errors_of_the_environment_name_variable_value_and_expectation(
    environ: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ=environ)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[schedulr]\nx = 1", ["unknown section [schedulr]", "did you mean scheduler?"]),
        ("[scheduler]\nmax_seqs = 1", ["scheduler.max_seqs", "did you mean scheduler."]),
        ("scheduler = 1", ["must be a table"]),
        ("[scheduler]\nmax_num_seqs = '4'", ["scheduler.max_num_seqs='4'", "expected `int`"]),
        ("[scheduler", ["not valid TOML"]),
    ],
)
def test_errors_of_the_file_name_it_and_the_key(
    text: str, parts: list[str], tmp_path: Path
) -> None:
    file = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, environ={})
    assert str(file) in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_an_unknown_override_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"did you mean cache\.num_blocks\?"):
        load_config(environ={}, overrides=[("cache.num_block", "1")])


def test_variables_of_others_are_no_settings() -> None:
    environ = {"SLIPSTREAM_CACHE_DIR": "/some/where", "HOME": "/root", "SLIPSTREAMER": "x"}
    assert load_config(environ=environ).scheduler == Config().scheduler


def test_a_relative_model_is_found_here_then_beside_the_file_then_in_the_checkout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, beside = tmp_path / "here", tmp_path / "beside"
    for directory in (here / "both", beside / "both", beside / "only"):
        directory.mkdir(parents=True)
    monkeypatch.chdir(here)
    assert locate_model("both", beside) == str(here / "both")
    assert locate_model("only", beside) == str(beside / "only")
    (beside / "model.gguf").write_bytes(b"")
    assert locate_model("model.gguf", beside) == str(beside / "model.gguf")
    assert locate_model("configs/demo", beside) == str(CHECKOUT / "configs" / "demo")
    assert locate_model("some-org/some-model", beside) == "some-org/some-model"


def test_a_model_beside_the_file_is_not_looked_for_when_the_environment_names_it(
    tmp_path: Path,
) -> None:
    (tmp_path / "weights").mkdir()
    file = write(tmp_path, "[model]\npath = 'weights'")
    assert load_config(file, environ={}).model.path == str(tmp_path / "weights")
    environ = {"SLIPSTREAM_CONFIG": str(file), "SLIPSTREAM_MODEL": "weights"}
    assert load_config(environ=environ).model.path == "weights"


def test_a_drafter_is_found_as_a_model_is(tmp_path: Path) -> None:
    (tmp_path / "heads").mkdir()
    file = write(tmp_path, "[speculation]\nmethod = 'medusa'\nmodel = 'heads'")
    assert load_config(file, environ={}).speculation.model == str(tmp_path / "heads")
    # Not beside a file that does not name it.
    environ = {"SLIPSTREAM_SPECULATION__MODEL": "heads"}
    assert load_config(file, environ=environ).speculation.model == "heads"
    overrides = [("speculation.model", "configs/demo/eagle3")]
    found = load_config(file, environ=environ, overrides=overrides).speculation.model
    assert found == str(CHECKOUT / "configs" / "demo" / "eagle3")
    assert load_config(environ={}).speculation.model is None
