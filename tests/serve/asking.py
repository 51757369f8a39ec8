"""What the tests of the server ask for."""

from __future__ import annotations

CHAT = "/v1/chat/completions"
ASK = {
    "model": "tale",
    "messages": [{"role": "user", "content": "Tell me of Mira."}],
    "temperature": 0,
    "max_tokens": 8,
}
LONG = {**ASK, "max_tokens": 400, "ignore_eos": True}
