"""The options mirror the configs, so that what is learned in one place holds in the other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click
import pytest

from infercore.cli.app import main
from infercore.cli.options import CONTEXT, MODEL, POOL, SAMPLING, Bias, KeyValue, Numbers, given
from infercore.cli.serve import _pool_fields as serve_pool_fields
from infercore.values.config import ContextConfig, DecodeConfig, ModelConfig, SamplingConfig
from infercore.values.pool import PoolConfig, pool_config

if TYPE_CHECKING:
    from collections.abc import Iterator

NOT_OPTIONS = {
    "backend_options", "progress", "adapters",  # --option, the bar, --lora
    "embeddings", "attention_type", "no_perf", "defrag_thold",  # nothing a command could show
    "context", "isolate", "reader_timeout",  # its own options; those of the server
}  # fmt: skip


def names(cls: type) -> set[str]:
    return {field.name for field in attrs.fields(cls)}


@pytest.mark.parametrize(
    ("cls", "rows"),
    [
        (ModelConfig, MODEL),
        (ContextConfig, CONTEXT),
        (SamplingConfig, SAMPLING),
        (PoolConfig, POOL),
    ],
)
def test_each_field_has_an_option(cls, rows) -> None:
    assert set(rows) == names(cls) - NOT_OPTIONS


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_flags_are_named_as_the_fields(command) -> None:
    flags = {flag for option in main.commands[command].params for flag in option.opts}
    fields = names(SamplingConfig) | names(ModelConfig) | names(ContextConfig)
    fields -= NOT_OPTIONS | {"n_seq_max", "pooling_type"}
    fields |= names(DecodeConfig) & {"max_tokens", "stop", "special_text", "logprobs"}
    assert {"--" + field.replace("_", "-") for field in fields} - flags == set()


def test_every_command_prints_json_but_those_that_the_page_names() -> None:
    def without(commands: dict[str, click.Command], above: str = "") -> Iterator[str]:
        for name, command in commands.items():
            if not any("--json" in option.opts for option in command.params):
                yield above + name
            if isinstance(command, click.Group):
                yield from without(command.commands, f"{name} ")

    page = Path(__file__).parents[2] / "docs" / "reference" / "command-line.md"
    if not page.is_file():
        pytest.skip("the documentation is not beside these tests")
    row = next(line for line in page.read_text("utf-8").splitlines() if "| `--json` |" in line)
    exceptions = re.findall(r"`([^`]+)`", row.partition("; not with ")[2])
    assert sorted(exceptions) == sorted(without(main.commands))


def test_serve_takes_the_fields_of_a_pool() -> None:
    flags = {flag for option in main.commands["serve"].params for flag in option.opts}
    fields = names(PoolConfig) - {"context"}
    assert {"--" + field.replace("_", "-") for field in fields} - flags == set()


def test_a_server_has_defaults_of_its_own_and_none_that_clash() -> None:
    def fields(*flags: str) -> PoolConfig:
        options = main.commands["serve"].make_context("serve", [*flags, "m.gguf"]).params
        asked = serve_pool_fields("m.gguf", options)
        del asked["backend"]
        return pool_config(None, asked)

    usual = fields()
    assert (usual.cache_bytes, usual.batching, usual.n_step_tokens) == (2**30, "always", None)
    assert usual.context.flash_attn == "auto"
    assert usual.max_step_ms == 450
    given = fields("--n-step-tokens", "32")
    assert (given.n_step_tokens, given.max_step_ms) == (32, None)
    assert fields("--batching", "auto", "--cache-bytes", "0").cache_bytes == 0
    assert fields("--flash-attn", "off").context.flash_attn == "off"
    assert fields("--precision", "accurate").context.flash_attn is None
    alike = fields("--batch-invariant")
    assert (alike.batching, alike.n_step_tokens, alike.context.flash_attn) == ("auto", None, None)


def test_defaults_that_help_shows_are_those_of_the_config() -> None:
    shown = {
        option.name: option.help
        for option in main.commands["generate"].params
        if isinstance(option, click.Option)
    }
    config = SamplingConfig()
    assert f"[default: {config.temperature} or the model's]" in shown["temperature"]
    assert f"[default: {config.top_k} or the model's]" in shown["top_k"]


def test_values_reach_the_config() -> None:
    options = {"mirostat": "2", "logit_bias": ((3, 1.5),), "seed": None, "top_p": 0.5}
    assert given(SamplingConfig, options) == {
        "mirostat": 2, "logit_bias": {3: 1.5}, "top_p": 0.5,
    }  # fmt: skip
    fields = given(ContextConfig, {"lora": ("a",), "lora_scaled": (("b", 0.5),), "n_ctx": 64})
    assert [(a.path, a.scale) for a in fields["adapters"]] == [("a", 1.0), ("b", 0.5)]


@pytest.mark.parametrize(
    ("given_text", "value"),
    [("a=1", 1), ("a=x=y", "x=y"), ('a={"b": true}', {"b": True}), ("a=", ""), ("a=1.5", 1.5)],
)
def test_key_value(given_text, value) -> None:
    assert KeyValue()(given_text) == ("a", value)


@pytest.mark.parametrize(
    ("kind", "text"), [(KeyValue(), "a"), (KeyValue(), "=a"), (Bias(), "a=1"), (Numbers(), "1,b")]
)
def test_values_that_cannot_be_read(kind, text) -> None:
    with pytest.raises(click.BadParameter):
        kind(text)


def test_refused_value_names_its_option() -> None:
    with pytest.raises(click.BadParameter) as refused:
        given(SamplingConfig, {"top_p": 2.0})
    assert refused.value.param_hint == "'--top-p'"


def test_help_is_in_sections(run) -> None:
    text = run("generate", "--help").stdout
    places = [text.index(f"\n{part}:") for part in ("Options", "Model", "Context", "Sampling")]
    assert places == sorted(places)
