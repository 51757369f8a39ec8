"""Tokens taken out of the middle, gaps filled, snapshots as bytes, segments with their hashes."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import infercore as ic

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PROMPT = "Once upon a time there was a baker named Mira"


def text_of(stream: Any) -> str:
    return "".join(chunk.text for chunk in stream)


# -- evict -----------------------------------------------------------------------------------------


def test_what_follows_moves_up(session: Any, story: str) -> None:
    session.ensure_prefix(story[:300])
    session.prefill_suffix(story[300:600])
    before = session.context.tokens()
    n_prefix = session.explain_context().prefix_tokens
    evaluated = session.context.perf().prefill_tokens
    status = session.evict(20, 60)
    assert session.context.tokens() == before[:20] + before[60:]
    assert session.context.perf().prefill_tokens == evaluated
    assert (status.dropped_tokens, status.prefilled_tokens) == (40, 0)
    assert status.reused_tokens == status.resident_tokens == len(before) - 40
    assert status.prefix_tokens == n_prefix - 40
    report = session.explain_context()
    assert report.cuts == (20,)
    assert report.stable_token_hash == ic.hash_token_ids(
        (before[:20] + before[60:])[: n_prefix - 40]
    )
    assert len(text_of(session.decode(max_tokens=8, temperature=0))) > 0
    session.prefill_suffix(ic.SuffixInput(text=" And", mode="append"))
    assert session.explain_context().cuts == (20,)
    session.ensure_prefix(story[:300])
    report = session.explain_context()
    assert report.cuts == ()
    assert session.context.tokens()[: report.prefix_tokens] == session.model.tokenizer.encode(
        story[:300]
    )


def test_a_suffix_and_what_was_generated(session: Any) -> None:
    session.ensure_prefix(PROMPT)
    session.prefill_suffix(", who lived near the stone bridge.")
    text_of(session.decode(max_tokens=10, temperature=0))
    report = session.explain_context()
    n, n_generated = report.resident_tokens, report.generated_tokens
    session.evict(n - 4, n - 1)
    report = session.explain_context()
    assert (report.resident_tokens, report.generated_tokens) == (n - 3, n_generated - 3)
    assert report.prefix_tokens + report.suffix_tokens + report.generated_tokens == n - 3
    session.evict(report.prefix_tokens - 2, report.prefix_tokens + 2)
    after = session.explain_context()
    assert after.prefix_tokens == report.prefix_tokens - 2
    assert after.suffix_tokens == report.suffix_tokens - 2
    assert text_of(session.decode(max_tokens=4, temperature=0))


def test_in_a_pool_what_follows_moves_up_too(
    model: Any, exact: dict[str, Any], new_session: Callable[..., Any], story: str
) -> None:
    ids = model.tokenizer.encode(story)[:40]
    alone = new_session()
    with model.new_pool(n_ctx=256, n_parallel=2, **exact) as pool, pool.open_session() as session:
        found = []
        for each in (alone, session):
            each.ensure_prefix(ids[:30])
            each.prefill_suffix(ids[30:])
            statuses = [each.evict(5, 11), each.evict(30, 32)]
            text = text_of(each.decode(max_tokens=12, temperature=0))
            statuses.append(each.evict(31, 44))  # to the end
            counts = [
                (s.dropped_tokens, s.prefilled_tokens, s.reused_tokens, s.prefix_tokens)
                for s in statuses
            ]
            text += text_of(each.decode(max_tokens=4, temperature=0))
            found.append((text, counts, each.explain_context().cuts))
        assert found[0] == found[1]
        n_more = 3  # the last one anew, twice, and the one that was chosen last
        assert pool.stats().prompt_tokens == len(ids) + n_more
        with pool.open_session() as other:  # nobody else is given what was moved
            cold = ids[:5] + ids[11:]
            other.ensure_prefix(cold)
            new = new_session()
            new.ensure_prefix(cold)
            texts = [text_of(each.decode(max_tokens=12, temperature=0)) for each in (other, new)]
            assert texts[0] == texts[1]


def test_in_a_pool_what_is_shared_is_evaluated_anew(
    model: Any, exact: dict[str, Any], new_session: Callable[..., Any], story: str
) -> None:
    ids = model.tokenizer.encode(story)[:40]
    with model.new_pool(n_ctx=256, n_parallel=4, **exact) as pool, pool.open_session() as session:
        session.ensure_prefix(ids)
        with session.fork() as fork:
            status = fork.evict(2, 4)
            assert status.resident_tokens == len(ids) - 2
            if fork.explain_context().cuts:  # the fork's cells are its own
                assert status.prefilled_tokens == 0
            else:
                assert status.prefilled_tokens >= len(ids) - 4
                alone = new_session()
                alone.ensure_prefix(ids[:2] + ids[4:])
                wanted = text_of(alone.decode(max_tokens=12, temperature=0))
                assert text_of(fork.decode(max_tokens=12, temperature=0)) == wanted
        alone = new_session()
        alone.ensure_prefix(ids)
        wanted = text_of(alone.decode(max_tokens=12, temperature=0))
        assert text_of(session.decode(max_tokens=12, temperature=0)) == wanted


# -- infill ----------------------------------------------------------------------------------------


MARKS = {1000: "<PRE>", 1002: "<SUF>", 1015: "<MID>"}  # take the places of words of five bytes


def with_marks(source: Path, folder: Path) -> Path:
    """Write a copy of the storyteller whose vocabulary has the marks around a gap."""
    if source.is_dir():
        folder = Path(shutil.copytree(source, folder / "marked"))
        path = folder / "tokenizer.json"
        description = json.loads(path.read_text(encoding="utf-8"))
        vocabulary = description["model"]["vocab"]
        names = {token: piece for piece, token in vocabulary.items()}
        for token, mark in MARKS.items():
            piece = names[token]
            del vocabulary[piece]
            vocabulary[mark] = token
            merges = description["model"]["merges"]
            description["model"]["merges"] = [m for m in merges if "".join(m) != piece]
            added = {"id": token, "content": mark, "special": True}
            plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            description["added_tokens"].append({**plain, **added})
        path.write_text(json.dumps(description), encoding="utf-8")
        return folder
    gguf = pytest.importorskip("gguf")
    path = Path(shutil.copy(source, folder / "marked.gguf"))
    path.chmod(0o600)
    reader = gguf.GGUFReader(str(path), "r+")
    tokens, kinds = (reader.fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    for token, mark in MARKS.items():
        tokens.parts[tokens.data[token]][:] = list(mark.encode())
        kinds.parts[kinds.data[token]][:] = gguf.TokenType.CONTROL
    del reader, tokens, kinds
    return path


@pytest.fixture(scope="module")
def marked(pack_path: Path, backend_name: str, tmp_path_factory: Any) -> Iterator[Any]:
    path = with_marks(pack_path, tmp_path_factory.mktemp("fim"))
    with ic.load_model(path, backend=backend_name) as loaded:
        yield loaded


def test_a_gap_is_put_between_its_marks(marked: Any, exact: dict[str, Any]) -> None:
    tokenizer = marked.tokenizer
    assert tokenizer.fim == ic.FimTokens(prefix=1000, suffix=1002, middle=1015)
    before = tokenizer.encode("Once upon", add_special=False)
    after = tokenizer.encode(" baker.", add_special=False)
    wanted = [tokenizer.bos, 1000, *before, 1002, *after, 1015]
    with marked.new_session(n_ctx=128, **exact) as session:
        chunks = list(session.infill("Once upon", " baker.", max_tokens=4, temperature=0))
        assert session.context.tokens()[: len(wanted)] == wanted
        assert session.explain_context().prefix_tokens == 2 + len(before)
        usage = list(session.infill("Once upon", " miller.", max_tokens=1))[-1].usage
        assert usage is not None
        assert usage.cached_tokens >= 2 + len(before)
    with marked.new_session(n_ctx=128, **exact) as plain:
        plain.ensure_prefix(wanted)
        assert text_of(plain.decode(max_tokens=4, temperature=0)) == text_of(chunks) != ""

    async def main() -> str:
        async with ic.aopen_session(marked, n_ctx=128, **exact) as other:
            stream = other.infill("Once upon", " baker.", max_tokens=4, temperature=0)
            return "".join([chunk.text async for chunk in stream])

    assert asyncio.run(main()) == text_of(chunks)


def test_marks_in_the_texts_around_a_gap_are_text(marked: Any) -> None:
    with marked.new_session(n_ctx=128) as session:
        text_of(session.infill("a <SUF> b", "<MID>", max_tokens=1))
        held = session.context.tokens()
    assert [held.count(mark) for mark in MARKS] == [1, 1, 1]
    assert held[1] == 1000


def test_a_refusal_names_the_backend(session: Any, backend_name: str) -> None:
    user = [{"role": "user", "content": "Hi"}]
    for call in (
        lambda: session.infill("a", "b"),
        lambda: session.chat(user, reasoning_budget=5),
        lambda: session.chat(user, reasoning="off"),
    ):
        with pytest.raises(ic.UnsupportedFeatureError) as caught:
            call()
        assert caught.value.backend == backend_name


# -- snapshots and segments ------------------------------------------------------------------------


def test_a_gap_in_a_closed_session_is_refused_as_such(session: Any) -> None:
    """Also where the vocabulary has no marks for one."""
    session.close()
    with pytest.raises(ic.SessionClosedError):
        session.infill("a", "b")


def test_a_snapshot_as_bytes_is_the_file(
    session: Any, new_session: Callable[..., Any], tmp_path: Path
) -> None:
    session.ensure_prefix(ic.PrefixInput(text=PROMPT, cache_class="core"))
    session.prefill_suffix(ic.SuffixInput(text=", who", cache_class="turn"))
    snapshot = session.snapshot()
    wanted = text_of(session.decode(max_tokens=8, temperature=0))
    data = snapshot.to_bytes()
    again = ic.Snapshot.from_bytes(data)
    assert (again.manifest, again.resident_tokens) == (snapshot.manifest, snapshot.resident_tokens)
    other = new_session()
    other.restore(again)
    assert [one.cache_class for one in other.explain_context().manifest.segments] == [
        "core",
        "turn",
    ]
    assert text_of(other.decode(max_tokens=8, temperature=0)) == wanted
    session.save(tmp_path / "saved")
    assert ic.Snapshot.from_bytes((tmp_path / "saved").read_bytes()).resident_tokens > 0
    for wrong in (b"", data[:-1], data[:40], b"x" * 100, data[:-9] + b"\0" + data[-8:]):
        with pytest.raises(ic.SnapshotError):
            ic.Snapshot.from_bytes(wrong)
    with pytest.raises(ic.InvalidInputError):
        ic.Snapshot.from_bytes("text")  # type: ignore[arg-type]


def test_segments_have_the_hashes_of_their_tokens(session: Any) -> None:
    session.ensure_prefix(ic.PrefixInput(text=PROMPT, cache_class="core"))
    session.prefill_suffix(ic.SuffixInput(text=", who", cache_class="turn"))
    text_of(session.decode(max_tokens=5, temperature=0))
    tokens = session.context.tokens()
    segments = session.explain_context().manifest.segments
    assert [one.name for one in segments] == ["prefix", "suffix", "generated"]
    assert [one.cache_class for one in segments] == ["core", "turn", None]
    for one in segments:
        assert one.token_hash == ic.hash_token_ids(tokens[one.token_start : one.token_end])
    session.prefill_suffix("!")
    assert session.explain_context().manifest.segments[1].cache_class is None


def test_an_interrupted_evict_can_be_saved(
    new_session: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the cache and the parts of the session: its snapshot could not be restored."""
    session = new_session(n_ctx=256)
    session.ensure_prefix("Once upon a time there was a dog. ")
    greedy = ic.SamplingConfig(temperature=0, ignore_eos=True)
    list(session.decode(max_tokens=3, sampling=greedy))
    before = session.context.tokens()
    for name in ("hold", "shift_out"):
        own = getattr(session.resident, name)

        def broken(*args: Any, own: Any = own, **fields: Any) -> None:
            own(*args, **fields)
            raise KeyboardInterrupt

        monkeypatch.setattr(session.resident, name, broken)
    with pytest.raises(KeyboardInterrupt):
        session.evict(2, 6)
    monkeypatch.undo()
    session.restore(session.snapshot())
    list(session.decode(max_tokens=1, sampling=greedy))
    assert session.context.tokens()[: len(before)] == before
