"""Asks for calls with ``tool_choice="required"`` and random schemas, and counts the valid ones.

    python tools/required_calls.py [--backend NAME] [--cases N] [--seed S] [--model NAME]

Each case has one to three tools whose parameters are drawn, and a chat template in one of the forms
of calls. A call counts as valid where it is the only one, its tool is among those offered, and its
arguments pass their schema. The exit status is 0 where all calls were valid.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from random import Random
from typing import TYPE_CHECKING, Any

import jsonschema

import infercore as ic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

FORMATS = {"llamacpp": "gguf-f32", "openvino": "openvino"}
LOOP = "{%- for c in m.tool_calls or [] -%}"
ARGUMENTS = "c.function.arguments"
PYTHON = (
    "{{ c.function.name }}({% for k, v in c.function.arguments.items() %}"
    "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %})"
)
TAGGED = (
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
    "</function>"
)
BRACED = (
    "{%- macro v(x) -%}{%- if x is string -%}<|q|>{{ x }}<|q|>"
    "{%- elif x is boolean -%}{{ 'true' if x else 'false' }}{%- elif x is mapping -%}{{ '{' }}"
    "{%- for k, w in x.items() -%}{{ ',' if not loop.first }}{{ k }}:{{ v(w) }}{%- endfor -%}"
    "{{ '}' }}{%- elif x is iterable -%}[{%- for w in x -%}{{ ',' if not loop.first }}{{ v(w) }}"
    "{%- endfor -%}]{%- else -%}{{ x }}{%- endif -%}{%- endmacro -%}"
)
NESTED = (
    "{%- macro n(x) -%}{%- if x is mapping -%}{%- for k, w in x.items() -%}"
    "]![<{{ k }}>{{ n(w) }}]![</{{ k }}>{%- endfor -%}"
    "{%- elif x is iterable and x is not string -%}{%- for w in x -%}"
    "]![<item>{{ n(w) }}]![</item>{%- endfor -%}{%- else -%}{{ x }}{%- endif -%}{%- endmacro -%}"
)
WRITTEN = {
    "json": LOOP + "<tool_call>\n{{ c.function | tojson }}\n</tool_call>{%- endfor -%}",
    "list": "{%- if m.tool_calls %}[CALLS][" + LOOP + "{{ c.function | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}]{% endif -%}",
    "named": LOOP + "[CALL]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
    "{%- endfor -%}",
    "tagged": LOOP + "<tool_call>\n" + TAGGED + "\n</tool_call>{%- endfor -%}",
    "nested": NESTED + LOOP + ']![<invoke name="{{ c.function.name }}">'
    "{{ n(c.function.arguments) }}]![</invoke>\n{%- endfor -%}",
    "braced": BRACED
    + LOOP
    + "<|call>call:{{ c.function.name }}{{ v(c.function.arguments) }}<call|>"
    "{%- endfor -%}",
    "python": "{%- if m.tool_calls %}<|calls|>[" + LOOP + PYTHON + "{{ ', ' if not loop.last }}"
    "{% endfor %}]<|/calls|>{% endif -%}",
}
HEAD = (
    "{%- for t in tools or [] %}{{ t.function.name }}: {{ t.function.description }}\n{% endfor -%}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
)
TAIL = "<|im_end|>\n{% endfor -%}{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
BY_ITSELF = ("json", "list", "named")  # forms that hold whatever JSON can
NAMES = ("city", "days", "a", "b", "units", "when", "note", "größe", "item_1", "to")


def template(form: str) -> str:
    """Return a chat template that writes calls in this form."""
    return HEAD + WRITTEN[form] + TAIL


def value_schema(rng: Random, form: str, depth: int = 0) -> dict[str, Any]:
    """Return the schema of one value; deeper ones where the form can hold them."""
    kinds = ["string", "integer", "number", "boolean", "enum"]
    kinds += ["array", "object"] if depth < 2 else []  # noqa: PLR2004  (deep enough)
    kinds += ["either", "pattern", "null"] if form in BY_ITSELF else []
    kind = rng.choice(kinds)
    least = rng.randint(0, 2)
    low = rng.randint(-99, 50)
    schemas: dict[str, Callable[[], dict[str, Any]]] = {
        "string": lambda: {"type": "string", "maxLength": rng.randint(0, 12)},
        "enum": lambda: {"type": "string", "enum": rng.sample(["red", "old mill", "ä", "x-1"], 3)},
        "array": lambda: {
            "type": "array",
            "items": value_schema(rng, form, depth + 1),
            "minItems": least,
            "maxItems": least + 2,
        },
        "object": lambda: object_schema(rng, form, depth + 1),
        "either": lambda: {"anyOf": [value_schema(rng, form, depth + 1) for _ in range(2)]},
        "pattern": lambda: {"type": "string", "pattern": "^[a-z]{1,4}-[0-9]{2}$"},
    }
    if kind in schemas:
        return schemas[kind]()
    if kind == "integer":
        return {"type": kind, "minimum": low, "maximum": low + rng.randint(0, 200)}
    if kind == "number":  # by their names: a grammar bounds no digits, and the limit would cut them
        return {"type": kind, "enum": [low, low + 0.5, -1.25]}
    return {"type": kind}


def object_schema(rng: Random, form: str, depth: int = 0) -> dict[str, Any]:
    """Return the schema of an object; some of its properties may be left out."""
    names = rng.sample(NAMES, rng.randint(0 if depth == 0 else 1, 3))
    rows = {name: value_schema(rng, form, depth) for name in names}
    needed = [name for name in names if rng.random() < 0.7]  # noqa: PLR2004  (most)
    return {
        "type": "object",
        "properties": rows,
        "required": needed,
        "additionalProperties": False,
    }


def tools(rng: Random, form: str) -> list[dict[str, Any]]:
    """Return one to three tools."""
    names = rng.sample(["weather", "add", "look_up", "send.mail", "now"], rng.randint(1, 3))
    names = [name.replace(".", "_") if form == "python" else name for name in names]
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "Does it.",
                "parameters": object_schema(rng, form),
            },
        }
        for name in names
    ]


def outcomes(session: ic.Session, cases: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield each case's form and "valid", "cut" (at the limit of tokens) or what is wrong."""
    forms = sorted(WRITTEN)
    for number in range(cases):
        rng = Random(f"{seed}/{number}")
        form = forms[number % len(forms)]
        offered = tools(rng, form)
        chunks = session.chat(
            [{"role": "user", "content": rng.choice(["Go.", "What is 2 plus 3?", "Mira 🌙"])}],
            tools=offered,
            tool_choice="required",
            chat_template=template(form),
            max_tokens=300,
            seed=rng.randrange(2**32),
            temperature=rng.choice([0.0, 0.8, 1.5]),
        )
        yield form, judged(list(chunks), offered)


def judged(chunks: Sequence[ic.StreamChunk], offered: Sequence[dict[str, Any]]) -> str:
    """Return "valid", "cut", or what is wrong."""
    text = "".join(chunk.text for chunk in chunks)
    calls = [call for chunk in chunks for call in chunk.tool_calls]
    if chunks[-1].finish_reason in {"length", "context"} and not calls:
        return "cut"
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in offered}
    if len(calls) != 1 or text.strip() or chunks[-1].finish_reason != "tool_calls":
        return f"{chunks[-1].finish_reason}: {text!r} beside {len(calls)} calls of {schemas}"
    call = calls[0]
    arguments = json.loads(json.dumps(call.arguments, allow_nan=False))
    try:
        jsonschema.validate(arguments, schemas[call.name])
    except (jsonschema.ValidationError, KeyError) as error:
        return f"{call}: {error}"
    return "valid"


def main() -> int:
    """Print how many calls were valid, by form."""
    import infercore_models  # noqa: PLC0415  (the test brings its own model)

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", default="llamacpp", choices=sorted(FORMATS))
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="storyteller")
    given = parser.parse_args()
    path = infercore_models.path(given.model, FORMATS[given.backend])
    found: Counter[str] = Counter()
    by_form: Counter[str] = Counter()
    with ic.open_session(path, backend=given.backend) as session:
        for number, (form, outcome) in enumerate(outcomes(session, given.cases, given.seed)):
            kind = outcome if outcome in {"valid", "cut"} else "wrong"
            found[kind] += 1
            by_form[form] += kind == "valid"
            if kind == "wrong":
                print(f"case {number} ({form}): {outcome}")
    print(
        f"{given.backend}: {found['valid']} of {given.cases} valid, {found['cut']} cut, "
        f"{found['wrong']} wrong; {dict(sorted(by_form.items()))}"
    )
    return int(found["valid"] != given.cases)


if __name__ == "__main__":
    sys.exit(main())
