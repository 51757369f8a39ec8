"""Facts about people as JSON that is sure to fit a schema.

Shows: `response_format` takes a JSON schema, and only tokens that keep the text within it can come.
``x-guidance`` lets the JSON have the blanks that models write it with. The system message stays
warm from one question to the next. A wrong schema is refused before anything is decoded.

The pack's model would say more of each person than is asked for; the schema keeps it from that.

Prints a row for each person, made from the parsed JSON, and how the text ended; then the refusal.

    python examples/structured_extraction.py [MODEL]     needs: pip install ".[constraints]"
"""

from __future__ import annotations

import json
import sys
from typing import Any

import infercore as ic
from default_model import default_model

NAMES = ("Mira", "Anton", "Nadia", "Felix")
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"enum": list(NAMES)},
        "kind": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "kind", "age"],
    "additionalProperties": False,
    "x-guidance": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False},
}


def main() -> None:
    """Ask about each person, and print a table."""
    path = sys.argv[1] if len(sys.argv) > 1 else default_model()
    with ic.load_model(path) as model, model.new_session(n_ctx=1024) as session:
        print("  ".join(PERSON["required"]), " ended by")
        for name in NAMES:
            messages = [
                {"role": "system", "content": "You are a storyteller."},
                {"role": "user", "content": f"Describe {name} as JSON."},
            ]
            answer = session.chat(messages, response_format=PERSON, max_tokens=120, temperature=0)
            chunks = list(answer)
            person = json.loads("".join(chunk.text for chunk in chunks))
            print(*person.values(), chunks[-1].finish_reason, sep="  ")
        try:
            session.chat(messages, response_format={"properties": {"age": {"type": "number?"}}})
        except ic.GrammarError as error:
            print(f"refused: {error}".splitlines()[0])


if __name__ == "__main__":
    main()
