"""What a law is, and the decorator that makes a function one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from collections.abc import Callable

    from infercore.conformance.rig import Rig

RELEASES = ("1.0", "1.1", "1.2")
"""The versions of the suite that there were; a rig pins one of them."""
SUITE_VERSION = RELEASES[-1]

GROUPS = {
    "LIFE": "lifecycle",
    "TOK": "tokens",
    "DEC": "decode",
    "KV": "KV",
    "STATE": "state",
    "REUSE": "prefix reuse",
    "SEAM": "seam",
    "STREAM": "streaming",
    "CANCEL": "cancel",
    "OVER": "overflow",
    "BAD": "errors and bad input",
    "SAMP": "sampling",
    "CON": "constraints",
    "EMB": "embeddings",
    "ENC": "encoders",
    "LORA": "adapters",
    "THREAD": "threads",
    "POOL": "pools",
    "MEM": "memory",
    "CAP": "capabilities truth",
}
HINTS = {
    "LIFE": "`close` of your model and context, and what they share",
    "TOK": "your tokenizer: `encode`, `decode`, `token_bytes`, `is_eog`, `add_bos`, `pair_middle`",
    "DEC": "`decode`, `logits` and `n_past` of your context; then `decode_batch`, `decode_spans`",
    "KV": "`seq_remove`, `seq_copy`, `seq_shift`, `seq_divide`, and the positions that follow",
    "STATE": "`save_state`, `load_state`, `save_sequence`, `load_sequence`, and `runtime`",
    "REUSE": "`seq_remove`, and `n_past` after it; the core does the rest",
    "SEAM": "`encode` and `token_bytes` of your tokenizer; the core does the rest",
    "STREAM": "`token_bytes`, `is_eog` and `logits`; the core does the rest",
    "CANCEL": "`abort`, `clear_abort`, `set_abort_callback`, and `n_past` after them",
    "OVER": "`seq_remove` and `seq_shift`; the core does the rest",
    "BAD": "what your loader and `new_context` raise, naming path or option; `effective`",
    "SAMP": "`logits`; of your own sampler `new_sampler` and what it returns",
    "CON": "`token_bytes` and `is_eog` of your tokenizer; the core does the rest",
    "EMB": "`embedding`, `embeddings`, `set_embeddings`, `effective['pooling_type']`",
    "ENC": "`encode` of your encoder's context, `embedding`, `embeddings`",
    "LORA": "`set_adapters`, and `ContextConfig.adapters` in `new_context`",
    "THREAD": "what your contexts share, `set_threads`, `effective['n_threads']`",
    "POOL": "`decode_spans` or `decode_batch`, `seq_copy`, `seq_remove`; the core does the rest",
    "MEM": "`close`, `plan_memory`, and what is kept beyond a call",
    "CAP": "`capabilities`, `effective`, `info`, `tolerance`, and your descriptor",
}
"""For each group, where in a plugin to look first when one of its laws fails."""
TIERS = ("engine", "session", "process")


@attrs.frozen(kw_only=True)
class Law:
    """One law: ``check(rig)`` raises `LawError` where a backend breaks it.

    ``tier`` is "engine" (tokens, positions, logits), "session" (text, prefix, streams) or
    "process" (starts threads that race, or other processes). ``needs`` names a requirement (see
    ``infercore.conformance.requirements``); where a backend does not declare it, ``refusal``, or
    the requirement's own probe, must be refused. ``since`` is the version of the suite that the
    law came with: a rig that pins an older one is told of failures but does not fail. ``model``
    is what it is about: a "generator" of text, an "encoder", or "any".
    """

    id: str
    tier: str
    check: Callable[[Rig], None]
    needs: str | None = None
    refusal: Callable[[Any], object] | None = None
    since: str = "1.0"
    model: str = "generator"

    @property
    def group(self) -> str:
        """The group that the law belongs to."""
        return GROUPS[self.id.split("-", maxsplit=1)[0]]

    @property
    def text(self) -> str:
        """What the law says, in one line."""
        return " ".join((self.check.__doc__ or "").split("\n\n", maxsplit=1)[0].split())

    @property
    def name(self) -> str:
        """The function's name without ``check_``."""
        return self.check.__name__.removeprefix("check_")

    def newer_than(self, suite_version: str) -> bool:
        """Whether the law came after ``suite_version``."""
        return version(self.since) > version(suite_version)


def version(text: str) -> tuple[int, ...]:
    """Return ``text`` ("1.0") as numbers that compare."""
    return tuple(int(part) for part in text.split("."))


def law(
    identifier: str,
    *,
    tier: str = "engine",
    needs: str | None = None,
    refusal: Callable[[Any], object] | None = None,
    since: str = "1.0",
    model: str = "generator",
) -> Callable[[Callable[[Rig], None]], Callable[[Rig], None]]:
    """Mark a function ``check_<law>(rig)`` as the law ``identifier``."""

    def mark(check: Callable[[Rig], None]) -> Callable[[Rig], None]:
        check.__infercore_law__ = Law(  # type: ignore[attr-defined]
            id=identifier,
            tier=tier,
            check=check,
            needs=needs,
            refusal=refusal,
            since=since,
            model=model,
        )
        return check

    return mark
