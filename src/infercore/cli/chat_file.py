"""A chat in one file: its messages and the session's state, so that it goes on warm.

The file is what `infercore.engine.blob` packs, with the session's snapshot as payload: header,
checksum, written whole or not at all.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from infercore.engine import atomic, blob
from infercore.errors import InvalidInputError, ModelNotFoundError, SnapshotError
from infercore.values.manifest import ContextManifest
from infercore.values.session import Snapshot

if TYPE_CHECKING:
    from infercore import Session

KIND = "chat"


@attrs.frozen(kw_only=True)
class Saved:
    """What a file holds: messages, the template that was given, and the session's state."""

    messages: list[dict[str, str]]
    template: str | None
    snapshot: Snapshot


def save(
    path: str, session: Session, messages: list[dict[str, str]], template: str | None
) -> Snapshot:
    """Write the chat to ``path``; return the state that was written.

    Raises OSError where it cannot be written; an older file stays then.
    """
    snapshot = session.snapshot()
    header = {
        "kind": KIND,
        "messages": messages,
        "template": template,
        "manifest": snapshot.manifest.to_dict(),
        "resident_tokens": snapshot.resident_tokens,
    }
    atomic.write_whole(path, blob.pack(header, snapshot.data), private=True)
    return snapshot


def read(path: str) -> Saved:
    """Return what `save` wrote.

    Raises `ModelNotFoundError` where there is no file, `SnapshotError` for another or a damaged
    one.
    """
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError as error:
        raise ModelNotFoundError(
            f"there is no saved chat at {path}; check the path", path=path
        ) from error
    header, payload, _ = blob.unpack(data)
    if header.get("kind") != KIND:
        raise SnapshotError(
            f"{path} holds a saved {header.get('kind')}, not a chat; give a file that /save wrote",
            reason="kind",
        )
    try:
        return _saved(header, bytes(payload))
    except (InvalidInputError, LookupError, TypeError, ValueError) as error:
        raise SnapshotError(
            f"the header of {path} is malformed ({error}); save the chat anew", reason="header"
        ) from error


def _saved(header: dict[str, Any], payload: bytes) -> Saved:
    messages = header["messages"]
    for message in messages:
        if set(message) != {"role", "content"} or not all(map(_is_text, message.values())):
            raise ValueError("a message is not a role and a text")
    template = header["template"]
    if template is not None and not _is_text(template):
        raise ValueError("the template is no text")
    return Saved(
        messages=list(messages),
        template=template,
        snapshot=Snapshot(
            manifest=ContextManifest.from_dict(header["manifest"]),
            data=payload,
            resident_tokens=int(header["resident_tokens"]),
        ),
    )


def _is_text(value: object) -> bool:
    return isinstance(value, str)
