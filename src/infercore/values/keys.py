"""Files of API keys."""

from __future__ import annotations

from infercore.errors import InvalidInputError


def keys_in(text: str, path: str) -> tuple[str, ...]:
    """Return the keys in the ``text`` of a file: one a line, without comments (``#``).

    The mark of byte order that some editors begin a file with is no part of its first line.

    Raises `InvalidInputError` where there is none: a server without keys is open to everybody.
    """
    lines = (line.strip() for line in text.removeprefix("\ufeff").splitlines())
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise InvalidInputError(
            f"{path} contains no keys; write one per line",
            field="api_key_file",
            value=path,
            allowed="a file with at least one key",
        )
    return keys
