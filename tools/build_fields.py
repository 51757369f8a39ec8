"""Write ``src/infercore/values/fields.py``: what each call takes as keywords, for type checkers.

The names and types are those of the configs, the texts those of ``field_texts``; a test compares
the file with what this writes. Run it after a change of either: ``python tools/build_fields.py``.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import attrs

from infercore.embedding import DECIDED
from infercore.session.base import SessionOptions
from infercore.session.chatting import ChatRequest
from infercore.values.config import ContextConfig, DecodeConfig, ModelConfig, SamplingConfig
from infercore.values.field_texts import TEXTS
from infercore.values.pool import NOT_IN_A_POOL, PoolConfig

TARGET = Path(__file__).parents[1] / "src" / "infercore" / "values" / "fields.py"
OPTIONS = ("backend_options",)
HEAD = '''"""What each call takes as keywords; written by ``tools/build_fields.py``, not by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from infercore.session.base import Overflow
    from infercore.session.chatting import Reasoning
    from infercore.values.config import (
        AdapterSpec,
        ContextConfig,
        KnownKVType,
        KVType,
        PoolingType,
        SamplingConfig,
        SpeculativeConfig,
    )
'''


def fields_of(cls: type[Any], *, without: Any = (), only: Any = None) -> list[str]:
    """Return the lines of the fields of ``cls``."""
    texts = TEXTS[cls.__name__]
    lines = []
    for field in attrs.fields(cls):
        if field.name in texts and field.name not in without:
            if only is None or field.name in only:
                text = texts[field.name].replace("`", "``")
                lines += [f"    {field.name}: {taken(field)}", f'    """{sentence(text)}"""']
    return lines


def sentence(text: str) -> str:
    """Return ``text`` as a sentence that may stand in a docstring."""
    shown = text[0].upper() + text[1:] + "."
    return shown.replace("\\", "\\\\").replace('"""', "'''")


def taken(field: attrs.Attribute[Any]) -> str:
    """Return what ``field`` takes: what its converter does, or its own type."""
    if field.converter is None:
        return quoted(str(field.type))
    parameter = next(iter(inspect.signature(field.converter).parameters.values()))
    return quoted(str(parameter.annotation))


def quoted(annotation: str) -> str:
    """Return ``annotation`` with the quotes that the formatter writes."""
    return annotation.replace("'", '"')


def classes() -> list[tuple[str, str, str, list[str]]]:
    """Return name, bases, docstring and lines of each class, in an order that Python takes."""
    apart = tuple(NOT_IN_A_POOL)
    shared = [name for name in DECIDED if name not in apart]
    not_in_a_pool = fields_of(ContextConfig, only=apart)
    return [
        (
            "ModelOnlyFields",
            "TypedDict, total=False",
            "Those of a model, for calls that open more than it.",
            fields_of(ModelConfig, without=OPTIONS),
        ),
        (
            "ModelFields",
            "ModelOnlyFields, total=False",
            "For `load_model`.",
            fields_of(ModelConfig, only=OPTIONS),
        ),
        (
            "AnyContextFields",
            "TypedDict, total=False",
            "Those that every context takes.",
            fields_of(ContextConfig, without=DECIDED),
        ),
        (
            "EmbedFields",
            "AnyContextFields, ModelOnlyFields, total=False",
            "For `embed` and `rerank`.",
            [],
        ),
        (
            "PoolContextFields",
            "AnyContextFields, total=False",
            "Those that the context of a pool takes.",
            fields_of(ContextConfig, only=shared),
        ),
        (
            "ContextFields",
            "PoolContextFields, total=False",
            "For `Model.new_context`.",
            not_in_a_pool,
        ),
        (
            "SessionOptionFields",
            "TypedDict, total=False",
            "For `SessionPool.open_session`.",
            fields_of(SessionOptions),
        ),
        (
            "SessionFields",
            "ContextFields, SessionOptionFields, total=False",
            "For `Model.new_session`.",
            [],
        ),
        (
            "OpenSessionFields",
            "SessionFields, ModelOnlyFields, total=False",
            "For `open_session`.",
            [],
        ),
        (
            "PoolFields",
            "PoolContextFields, total=False",
            "For `Model.new_pool`.",
            fields_of(PoolConfig),
        ),
        ("OpenPoolFields", "PoolFields, ModelOnlyFields, total=False", "For `open_pool`.", []),
        ("PlanFields", "PoolFields, total=False", "For `Model.plan_memory`.", not_in_a_pool),
        (
            "OpenPlanFields",
            "PlanFields, ModelOnlyFields, total=False",
            "For `plan_memory` of a path.",
            [],
        ),
        (
            "SamplingFields",
            "TypedDict, total=False",
            "For `Model.new_sampler`.",
            fields_of(SamplingConfig),
        ),
        (
            "DecodeFields",
            "SamplingFields, total=False",
            "For `Session.decode` and what decodes.",
            fields_of(DecodeConfig),
        ),
        (
            "RunToolsFields",
            "DecodeFields, total=False",
            "For `Session.run_tools`.",
            fields_of(ChatRequest, without=("tools",)),
        ),
        (
            "ChatFields",
            "RunToolsFields, total=False",
            "For `Session.chat`.",
            fields_of(ChatRequest, only=("tools",)),
        ),
    ]


def module() -> str:
    """Return the module's text."""
    parts = [HEAD]
    for name, bases, text, lines in classes():
        body = [f"\n\nclass {name}({bases}):", f'    """{text}"""']
        parts.append("\n".join([*body, *(["", *lines] if lines else []), ""]))
    return "".join(parts)


if __name__ == "__main__":
    if "--check" in sys.argv[1:]:
        sys.exit(TARGET.read_text(encoding="utf-8") != module())
    TARGET.write_text(module(), encoding="utf-8")
