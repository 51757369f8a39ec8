"""Cache identity: hashes of text and tokens, segments and the manifest."""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import InvalidInputError, ManifestMismatchError
from infercore.values import checks

if TYPE_CHECKING:
    from collections.abc import Iterable

IDENTITY_FIELDS = (
    "profile_id",
    "backend",
    "backend_version",
    "model_digest",
    "tokenizer_digest",
    "prompt_format",
    "prompt_template_digest",
    "runtime_digest",
    "add_bos",
    "adapters",
)


# Options that leave the values in the KV cache as they are. What an engine reports beyond these
# is taken to change them, options of its own included.
_NOT_KV_OPTIONS = frozenset(
    {
        "adapters",  # an identity field of their own
        "embeddings",
        "kv_unified",
        "n_batch",
        "n_ctx",
        "n_seq_max",
        "n_threads",
        "n_threads_batch",
        "n_ubatch",
        "no_perf",
        "num_streams",
        "on_oom",
        "n_ctx_min",
        "op_offload",
        "pooling_type",
        "backend_options",
        "defrag_thold",
    }
)


def kv_options(effective: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a context's ``effective`` options that change KV values, as plain types."""
    names = sorted(set(effective) - _NOT_KV_OPTIONS)
    return {name: _plain(effective[name]) for name in names}


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, type(None))) else str(value)


def hash_text(text: str) -> str:
    """Return the SHA-256 hex digest of the UTF-8 bytes of ``text``."""
    return hash_bytes(text.encode())


def hash_bytes(data: bytes) -> str:
    """Return the SHA-256 hex digest of ``data``."""
    return hashlib.sha256(data).hexdigest()


def hash_token_ids(tokens: Iterable[int]) -> str:
    """Return the SHA-256 hex digest over each id as an unsigned 64-bit little-endian integer.

    Negative ids wrap (two's complement). ``[]`` gives the digest of no bytes. Raises
    `InvalidInputError` for values that are not integers.
    """
    given = checks.items("tokens", tokens, "integers")
    if set(map(type, given)) - {int}:  # NumPy's integers are fine, and slower to tell
        for token in given:
            if not checks.is_integer(token):
                raise checks.refuse("tokens", token, "integers")
    ids = array("Q", (int(token) & 0xFFFF_FFFF_FFFF_FFFF for token in given))
    if ids.itemsize != 8:  # noqa: PLR2004  pragma: no cover  (no such platform is supported)
        raise AssertionError("array('Q') is not 64 bits wide here")
    import sys  # noqa: PLC0415

    if sys.byteorder == "big":  # pragma: no cover
        ids.byteswap()
    return hashlib.sha256(ids.tobytes()).hexdigest()


def hash_json(value: object) -> str:
    """Return the SHA-256 hex digest of ``value`` as canonical JSON (sorted keys, no blanks)."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hash_text(text)


@attrs.frozen(kw_only=True)
class ManifestSegment:
    """A stretch of the context: its name, kind, byte and token ranges (half-open) and hashes.

    ``cache_class`` is the caller's own label for how long such text lives, as given in
    `PrefixInput` or `SuffixInput`. It is not part of the identity.
    """

    name: str = attrs.field(validator=checks.text())
    kind: str = attrs.field(validator=checks.one_of("stable", "volatile", optional=False))
    byte_start: int = attrs.field(validator=checks.integer(0, optional=False))
    byte_end: int = attrs.field(validator=checks.integer(0, optional=False))
    token_start: int = attrs.field(validator=checks.integer(0, optional=False))
    token_end: int = attrs.field(validator=checks.integer(0, optional=False))
    byte_hash: str | None = attrs.field(default=None, validator=checks.text(optional=True))
    token_hash: str | None = attrs.field(default=None, validator=checks.text(optional=True))
    cache_class: str | None = attrs.field(default=None, validator=checks.text(optional=True))


def _adapter_names(value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    names = checks.items("adapters", value, "a sequence of str, or None")
    return tuple(checks.check_text("adapters", name) for name in names)


def _segments(value: Any) -> tuple[ManifestSegment, ...]:
    return tuple(map(_segment, checks.items("segments", value, "a sequence of segments")))


def _segment(item: Any) -> ManifestSegment:
    if isinstance(item, ManifestSegment):
        return item
    if not isinstance(item, Mapping):
        raise checks.refuse("segments", item, "ManifestSegment objects, or their fields")
    try:
        return ManifestSegment(**item)
    except TypeError as error:
        raise checks.refuse("segments", item, "the fields of a ManifestSegment") from error


def _text() -> Any:
    return attrs.field(default=None, validator=checks.text(optional=True))


@attrs.frozen(kw_only=True)
class ContextManifest:
    """The identity under which resident tokens may be reused.

    A caller states some of the identity fields (None = not stated); a session computes all of them.
    Hashes and segments describe the text and are not part of the identity: an edited prefix still
    reuses the tokens it has in common with the old one.
    """

    profile_id: str | None = _text()
    backend: str | None = _text()
    backend_version: str | None = _text()
    model_digest: str | None = _text()
    tokenizer_digest: str | None = _text()
    prompt_format: str | None = _text()
    prompt_template_digest: str | None = _text()
    runtime_digest: str | None = _text()
    add_bos: bool | None = attrs.field(default=None, validator=checks.boolean())
    adapters: tuple[str, ...] | None = attrs.field(default=None, converter=_adapter_names)
    stable_byte_hash: str | None = _text()
    stable_token_hash: str | None = _text()
    volatile_byte_hash: str | None = _text()
    volatile_token_hash: str | None = _text()
    segments: tuple[ManifestSegment, ...] = attrs.field(default=(), converter=_segments)

    @property
    def digest(self) -> str:
        """SHA-256 hex over the identity fields alone."""
        return hash_json({name: getattr(self, name) for name in IDENTITY_FIELDS})

    def mismatch(
        self, stated: ContextManifest, *, strict: bool = False
    ) -> ManifestMismatchError | None:
        """Return the error for the first identity field of ``stated`` that differs, if any.

        Fields that are None in ``stated`` are not compared, unless ``strict``.
        """
        for name in IDENTITY_FIELDS:
            expected = getattr(stated, name)
            actual = getattr(self, name)
            if (strict or expected is not None) and expected != actual:
                return ManifestMismatchError(field=name, expected=expected, actual=actual)
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the manifest as plain JSON types."""
        result: dict[str, Any] = json.loads(json.dumps(attrs.asdict(self)))
        return result

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ContextManifest:
        """Return the manifest that `to_dict` wrote; raises `InvalidInputError` for other data."""
        try:
            return cls(**data)
        except (TypeError, ValueError) as error:
            raise InvalidInputError(
                f"not a manifest: {error}", field="manifest", value=data, allowed="to_dict output"
            ) from error
