"""What is said of each field stands once: keywords, help, docs and command line follow it."""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path

import attrs
import pytest

import infercore as ic
from infercore.session.base import SessionOptions
from infercore.session.chatting import ChatRequest
from infercore.values.field_texts import TEXTS, sentence

ROOT = Path(__file__).parents[2]
CLASSES = {cls.__name__: cls for cls in (SessionOptions, ChatRequest)}


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_every_field_has_a_text_and_no_other(name):
    cls = CLASSES.get(name) or getattr(ic, name)
    assert set(TEXTS[name]) == {field.name for field in attrs.fields(cls)} - {"messages"}


@pytest.mark.parametrize("name", sorted(TEXTS))
def test_a_text_is_a_phrase_without_a_full_stop(name):
    for text in TEXTS[name].values():
        assert text == text.strip()
        assert not text.endswith(".")


def test_the_keywords_are_those_of_the_configs():
    built = runpy.run_path(str(ROOT / "tools" / "build_fields.py"))
    written = built["TARGET"].read_text(encoding="utf-8")
    assert written == built["module"](), "run python tools/build_fields.py"


@pytest.mark.parametrize(
    ("call", "fields"),
    [
        (ic.load_model, ["n_gpu_layers", "check_in_child"]),
        (ic.open_session, ["n_ctx", "overflow", "use_mmap"]),
        (ic.open_pool, ["n_parallel", "n_ctx", "device"]),
        (ic.Model.new_session, ["n_ctx", "overflow"]),
        (ic.Session.decode, ["max_tokens", "temperature", "seed", "stop"]),
        (ic.Session.chat, ["tools", "reasoning", "max_tokens", "top_k"]),
        (ic.AsyncSession.generate, ["max_tokens", "min_p"]),
        (ic.SamplingConfig, ["temperature", "dry_base"]),
    ],
)
def test_help_lists_the_fields(call, fields):
    shown = inspect.getdoc(call)
    for field in fields:
        assert f"\n  {field}: " in shown


def test_an_option_is_named_as_the_command_line_does():
    assert "--on-oom shrink" in sentence("ContextConfig", "n_ctx_min")
    assert "`" not in sentence("DecodeConfig", "processors")


@pytest.mark.parametrize(
    ("cls", "field", "home"),
    [
        (ic.ModelConfig, "n_ctx", "give it to new_session"),
        (ic.ContextConfig, "n_gpu_layers", "give it to load_model"),
        (ic.ContextConfig, "temperature", "give it to decode"),
        (ic.DecodeConfig, "overflow", "give it to new_session"),
        (ic.ContextConfig, "n_ctxt", "did you mean 'n_ctx'"),
    ],
)
def test_a_field_of_another_call_is_sent_there(cls, field, home):
    from infercore.values import checks

    with pytest.raises(ic.InvalidInputError, match=home):
        checks.build(cls, None, {field: 1})
