"""Rows of the session contract in Go."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import infercore as ic
from rows.bench import STORY, greedy, ids_of, raises, text_of
from rows.sections import (
    GO,
)

if TYPE_CHECKING:
    from rows.bench import Bench


@GO.row("`EnsurePrefix`: the rest alone is evaluated", "`Session.ensure_prefix`, `PrefixStatus`")
def _(b: Bench) -> None:
    session = b.session()
    before = session.context.perf().prefill_tokens
    status = session.ensure_prefix(STORY + " and a fox")
    assert status.reused_tokens + status.prefilled_tokens == status.prefix_tokens
    assert status.reused_tokens >= before - 1
    evaluated = session.context.perf()
    assert evaluated.prefill_tokens + evaluated.decode_tokens - before == status.prefilled_tokens


@GO.row("`PrefillSuffix`, `SuffixStatus`", "`Session.prefill_suffix`, `SuffixStatus`")
def _(b: Bench) -> None:
    session = b.session()
    n = session.explain_context().prefix_tokens
    session.prefill_suffix(", who lived alone")
    wanted = text_of(greedy(session))
    session.prefill_suffix(", and her cat")
    status = session.prefill_suffix(", who lived alone")
    assert status.prefix_tokens == n
    assert text_of(greedy(session)) == wanted
    assert text_of(greedy(b.session(STORY + ", who lived alone"))) == wanted


@GO.row("`Decode`: a stream of deltas and an end", "`Session.decode`, `StreamChunk`")
def _(b: Bench) -> None:
    chunks = greedy(b.session(), max_tokens=12)
    assert len(chunks) > 2
    assert [c.finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish_reason == "length"
    assert len(ids_of(chunks)) == 12


@GO.row("`Decode` with a deadline", "`DecodeConfig.timeout`")
def _(b: Bench) -> None:
    session = b.session()
    stream = session.decode(temperature=0, timeout=0.3, ignore_eos=True)
    waited = threading.Event()
    reasons = []
    for chunk in stream:
        waited.wait(0.02)
        reasons.append(chunk.finish_reason)
    assert reasons[-1] == "timeout"
    assert text_of(greedy(session))


@GO.row("`Decode` that is cancelled", "`Session.cancel`")
def _(b: Bench) -> None:
    session = b.session()
    found = []
    for chunk in session.decode(temperature=0, ignore_eos=True):
        found.append(chunk)
        session.cancel()
    assert found[-1].finish_reason == "cancelled"
    assert session.explain_context().generated_tokens == len(ids_of(found))


@GO.row("`ExplainContext`, `ContextReport`", "`Session.explain_context`, `ContextReport`")
def _(b: Bench) -> None:
    session = b.session()
    report = session.explain_context()
    assert report.resident_tokens == report.prefix_tokens == len(b.model.tokenizer.encode(STORY))
    assert report.available_tokens == 256 - report.resident_tokens
    session.close()
    assert session.explain_context().closed is True


@GO.row("`HashTokenIDs`", "`hash_token_ids`")
def _(b: Bench) -> None:
    assert ic.hash_token_ids([1, 2, 3]).startswith("e2e2033ae7e1")
    session = b.session()
    report = session.explain_context()
    assert report.stable_token_hash == ic.hash_token_ids(session.context.tokens())


@GO.row("`ErrContextOverflow` with its counts", "`ContextOverflowError`")
def _(b: Bench) -> None:
    session = b.session()
    n = session.explain_context().resident_tokens
    error = raises(ic.ContextOverflowError, lambda: session.prefill_suffix(" fox" * 400))
    assert (error.stage, error.n_ctx) == ("suffix", 256)
    assert error.resident_tokens + error.additional_tokens > 256
    assert session.explain_context().resident_tokens == n


@GO.row("`ErrSessionClosed`", "`SessionClosedError`")
def _(b: Bench) -> None:
    session = b.session()
    session.close()
    raises(ic.SessionClosedError, lambda: session.ensure_prefix(STORY))


@GO.row("`ErrUnsupportedFeature`", "`UnsupportedFeatureError`")
def _(b: Bench) -> None:
    session = b.session()
    error = raises(ic.UnsupportedFeatureError, lambda: session.infill("a", "b"))
    assert (error.feature, error.state_after) == ("infill", "unchanged")
    assert session.state == "PREFIXED"


@GO.row("`ErrSessionFatal`: evict and go on", "`SessionFatalError`")
def _(b: Bench) -> None:
    from infercore.testing import engine_of

    session = b.session()
    broken = engine_of(session.context)
    raising = RuntimeError("the engine is gone")

    def fail(*_: Any, **__: Any) -> None:
        raise raising

    for name in ("decode", "decode_one", "decode_batch", "decode_spans"):
        if hasattr(broken, name):
            setattr(broken, name, fail)
    first = raises(ic.SessionFatalError, lambda: session.prefill_suffix(" and a fox"))
    again = raises(ic.SessionFatalError, lambda: session.ensure_prefix(STORY))
    assert first.cause is again.cause is raising
    assert session.explain_context().fatal_cause


@GO.row("`ErrSessionUnavailable`, `SessionAvailable`", "`backends`, `BackendNotFoundError`")
def _(b: Bench) -> None:
    found = {info.name: info for info in ic.backends()}
    assert found[b.backend].available is True
    raises(ic.BackendNotFoundError, lambda: ic.load_model(b.path, backend="no-such-engine"))


@GO.row("`ErrManifestMismatch`", "`ManifestMismatchError`")
def _(b: Bench) -> None:
    session = b.session()
    other = ic.ContextManifest(model_digest="0" * 64)
    wrong = ic.SuffixInput(text=" and", manifest=other)
    assert raises(ic.ManifestMismatchError, lambda: session.prefill_suffix(wrong)).field
    status = session.ensure_prefix(ic.PrefixInput(text=STORY, manifest=other))
    assert status.reused_tokens == 0
    assert "model_digest" in str(status.reset_reason)


@GO.row("`ContextManifest`, `ManifestSegment`", "`ContextManifest`, `ManifestSegment.token_hash`")
def _(b: Bench) -> None:
    session = b.session("")
    session.ensure_prefix(ic.PrefixInput(text=STORY, cache_class="core"))
    session.prefill_suffix(", who")
    tokens = session.context.tokens()
    segments = session.explain_context().manifest.segments
    assert [one.name for one in segments] == ["prefix", "suffix"]
    assert segments[0].cache_class == "core"
    for one in segments:
        assert one.token_hash == ic.hash_token_ids(tokens[one.token_start : one.token_end])


@GO.row("`PromptFormat`, `PromptTemplateDigest`, `DisableBOS`", "`open_session`")
def _(b: Bench) -> None:
    session = b.session(add_bos=False, prompt_format="chatml", profile_id="reviewer")
    manifest = session.explain_context().manifest
    assert (manifest.prompt_format, manifest.profile_id) == ("chatml", "reviewer")
    assert manifest.add_bos is False
    assert session.context.tokens() == b.model.tokenizer.encode(STORY, add_special=False)


@GO.row("`Config.TensorSplit`", "`ModelConfig.tensor_split`")
def _(b: Bench) -> None:
    with ic.load_model(b.path, backend=b.backend, tensor_split=(0.5, 0.5)) as model:
        assert model.info.n_layer > 0


def _go_cache(kind: str) -> Any:
    def check(b: Bench) -> None:
        session = b.session(precision=None, flash_attn="auto", type_k=kind, type_v=kind)
        assert session.context.effective["type_v"] == kind
        assert ids_of(greedy(session))

    return check


for _kind in ("q8_0", "q4_0"):
    GO.row(f'`Config.KVCacheType = "{_kind}"`', "`ContextConfig.type_k`")(_go_cache(_kind))


@GO.row("`EmbedFunc`, `EmbedAvailable`", "`embed`, `Capabilities.embeddings`")
def _(b: Bench) -> None:
    assert b.model.capabilities.embeddings is True
    assert ic.embed(b.model, ["a fox"], pooling="last").shape == (1, b.model.info.n_embd)


@GO.row("`SessionFactory`: one session over every engine", "`Model.new_session`, `open_session`")
def _(b: Bench) -> None:
    assert isinstance(b.session(""), ic.Session)
    with ic.open_session(b.path, backend=b.backend, n_ctx=64) as session:
        assert isinstance(session, ic.Session)


@GO.row("`Session.Close`", "`Session.close`")
def _(b: Bench) -> None:
    session = b.session()
    session.close()
    session.close()
    assert session.closed is True
    assert session.state == "CLOSED"
