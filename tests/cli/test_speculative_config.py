"""vLLM's ``--speculative-config`` becomes settings, or is refused by name."""

from __future__ import annotations

import argparse

import pytest

from src.cli.options import add_command, config_of
from src.cli.speculative_config import speculative_settings
from src.core.config import Config
from src.core.errors import ConfigError


def configured(*words: str) -> Config:
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers(), "serve", "", None)
    return config_of(parser.parse_args(["serve", *words]))


def test_vllms_ngram_becomes_settings() -> None:
    text = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'
    section = configured("--speculative-config", text).speculation
    assert (section.method, section.num_speculative_tokens) == ("ngram", 5)
    assert (section.prompt_lookup_min, section.prompt_lookup_max) == (4, 4)
    section = configured("--speculative-config", '{"method": "suffix"}').speculation
    assert (section.method, section.num_speculative_tokens) == ("suffix", 16)


@pytest.mark.parametrize(
    ("method", "ours"), [("draft_model", "draft"), ("medusa", "medusa"), ("eagle3", "eagle3")]
)
def test_vllms_models_become_settings(method: str, ours: str) -> None:
    text = f'{{"method": "{method}", "model": "some/where", "num_speculative_tokens": 3}}'
    section = configured("--speculative-config", text).speculation
    assert (section.method, section.model) == (ours, "some/where")
    assert section.num_speculative_tokens == 3


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "glm4_moe_mtp", "qwen3_next_mtp"])
def test_layers_of_the_checkpoint_have_no_path(method: str) -> None:
    section = configured("--speculative-config", f'{{"method": "{method}"}}').speculation
    assert (section.method, section.model) == ("mtp", None)


def test_set_goes_before_it() -> None:
    words = ("--set", "speculation.num_speculative_tokens=3")
    text = '{"method": "ngram", "num_speculative_tokens": 5}'
    section = configured(*words, "--speculative-config", text).speculation
    assert (section.method, section.num_speculative_tokens) == ("ngram", 3)


@pytest.mark.parametrize(
    "text", ['{"method": "ngram"}', '{"method": "[ngram]"}', '{"model": "[ngram]"}']
)
def test_a_match_has_vllms_length_unless_one_is_given(text: str) -> None:
    section = configured("--speculative-config", text).speculation
    assert (section.method, section.model) == ("ngram", None)
    assert (section.prompt_lookup_min, section.prompt_lookup_max) == (5, 5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "expected a JSON object"),
        ("{", "expected a JSON object"),
        ('{"method": {}}', "method must be a plain value, got an object"),
        ('{"method": "suffix", "model": ["a"]}', "model must be a plain value, got an array"),
        ('{"draft_load_config": {}}', "'draft_load_config' has no meaning here"),
        ('{"attention_backends": [1]}', "'attention_backends' has no meaning here"),
        ('{"model": "a/draft"}', "method must be named, expected ngram or"),
        ("{}", "method must be named"),
        ('{"num_speculative_tokens": 3}', "method must be named"),
        ('{"method": "mimo_mtp"}', "method = 'mimo_mtp' is not built"),
        ('{"method": "ngram_gpu"}', "method = 'ngram_gpu' is not built"),
        ('{"draft_tensor_parallel_size": 2}', "'draft_tensor_parallel_size' has no meaning here"),
        ('{"method": "suffix", "suffix_decoding_max_tree_depth": 8}', "suffix_decoding_max_tree"),
        ('{"method": "eagle"}', "method = 'eagle' is not built, expected ngram or suffix or"),
        ('{"method": "oracle"}', "method = 'oracle' is no method"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        speculative_settings(text)


def test_values_have_the_settings_bounds() -> None:
    with pytest.raises(ConfigError, match=r"speculation\.num_speculative_tokens"):
        configured("--speculative-config", '{"method": "suffix", "num_speculative_tokens": 0}')
