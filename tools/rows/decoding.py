"""Rows of what peers test of contexts, of decoding and of its ends."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import infercore as ic
import infercore_models
from rows.bench import STORY, greedy, ids_of, raises, text_of, write_gguf
from rows.sections import (
    CONTEXTS,
    ENDS,
)

if TYPE_CHECKING:
    from rows.bench import Bench


# -- contexts -------------------------------------------------------------------------------------


@CONTEXTS.row("size of a sequence's state, unmade (ion7-core)", "`Context.seq_state_size`")
def _(b: Bench) -> None:
    context = b.held()
    size = context.seq_state_size()
    assert 0 < size <= len(context.save_sequence())
    context.decode([5] * 40)
    assert context.seq_state_size() > size


@CONTEXTS.row("save and load a sequence into another (ion7-core)", "`Context.load_sequence`")
def _(b: Bench) -> None:
    context = b.context(n_seq_max=2, kv_unified=True)
    context.decode(b.tokens)
    context.load_sequence(1, context.save_sequence(0))
    assert context.tokens(1) == b.tokens
    context.decode_one(5, seq_id=1)
    other = b.held()
    other.decode_one(5)
    assert np.abs(context.logits() - other.logits()).max() <= 2 * context.tolerance + 1e-6


@CONTEXTS.row("a state that is cut is refused (llama-cpp-python)", "`Context.load_state`")
def _(b: Bench) -> None:
    context = b.held()
    data = context.save_state()
    raises(ic.SnapshotError, lambda: context.load_state(data[:-5]))
    context.load_state(data)
    assert context.tokens() == b.tokens


@CONTEXTS.row("a window from free memory (contenox)", '`ContextConfig.n_ctx` with "fit"')
def _(b: Bench) -> None:
    assert b.context(n_ctx="fit").n_ctx == b.model.info.n_ctx_train


@CONTEXTS.row("control vectors, set and cleared (ion7-core)", "`Context.set_control_vector`")
def _(b: Bench) -> None:
    context = b.context()
    vector = np.linspace(-1, 1, b.model.info.n_embd)
    context.set_control_vector({1: vector})
    context.decode(b.tokens)
    assert np.abs(context.logits() - b.last_row()).max() > 1e-2
    context.set_control_vector(None)
    context.eval(b.tokens, 0)
    assert np.array_equal(context.logits(), b.last_row())


@CONTEXTS.row("`--control-vector-scaled FILE` (llama.cpp)", "`Context.set_control_vector`")
def _(b: Bench) -> None:
    row = np.linspace(-1, 1, b.model.info.n_embd, dtype=np.float32)
    context = b.context()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vector.gguf"
        metadata = {
            "general.architecture": "controlvector",
            "controlvector.model_hint": "llama",
            "controlvector.layer_count": 1,
        }
        write_gguf(path, metadata, {"direction.2": row})
        context.set_control_vector([ic.AdapterSpec(path=path, scale=0.5)] * 2)
        path.write_bytes(path.read_bytes()[:-9])
        raises(ic.ModelFormatError, lambda: context.set_control_vector(path))
    context.decode(b.tokens)
    found = context.logits().copy()
    context.set_control_vector({2: row})
    context.eval(b.tokens, 0)
    assert np.abs(context.logits() - found).max() <= context.tolerance
    assert np.abs(found - b.last_row()).max() > 1e-2


@CONTEXTS.row("decode of given embeddings (ion7-core, vLLM)", "`Context.decode_spans`")
def _(b: Bench) -> None:
    from infercore.weight_files import safetensors

    folder = infercore_models.path("storyteller", "hf")
    table = safetensors.read(str(folder / "model.safetensors"))["model.embed_tokens.weight"]
    context = b.context()
    context.decode(b.tokens[:4])
    context.decode_spans([(0, table[b.tokens[4:]], "last")])
    assert context.n_past() == len(b.tokens)
    assert np.abs(context.logits() - b.last_row()).max() <= 2 * context.tolerance + 1e-6


@CONTEXTS.row("probabilities sum to 1 (ion7-core)", "`StreamChunk.logprobs`")
def _(b: Bench) -> None:
    n_vocab = b.model.info.n_vocab
    chunks = greedy(b.session(), max_tokens=2, logprobs=n_vocab - 24)
    for one in chunks[0].logprobs:
        assert 0.99 < np.exp([value for _, value in one.top]).sum() <= 1 + 1e-5


@CONTEXTS.row("an id outside the vocabulary (llama-cpp-python)", "`InvalidTokenError`")
def _(b: Bench) -> None:
    context = b.held()
    for wrong in (-1, b.model.info.n_vocab, 2**40):
        raises(ic.InvalidTokenError, lambda wrong=wrong: context.decode([5, wrong]))
    assert context.tokens() == b.tokens


# -- decoding and its ends ------------------------------------------------------------------------


@ENDS.row("greedy text is that of transformers (openvino-genai)", "`Session.generate`")
def _(b: Bench) -> None:
    prompt = b.golden.prompts[0]
    session = b.session(prompt.text)
    assert ids_of(greedy(session, max_tokens=24)) == list(prompt.greedy[:24])


@ENDS.row("stop strings over tokens never leak (llama-cpp-python)", "`DecodeConfig.stop`")
def _(b: Bench) -> None:
    whole = text_of(greedy(b.session(), max_tokens=24))
    stop = whole[7:12]
    cut = greedy(b.session(), max_tokens=24, stop=[stop])
    assert text_of(cut) == whole[: whole.index(stop)]
    assert cut[-1].finish_reason == "stop"


@ENDS.row("`include_stop_str_in_output` (openvino-genai, vLLM)", "`DecodeConfig.include_stop`")
def _(b: Bench) -> None:
    stop = text_of(greedy(b.session(), max_tokens=24))[7:12]
    bare = text_of(greedy(b.session(), max_tokens=24, stop=[stop]))
    kept = text_of(greedy(b.session(), max_tokens=24, stop=[stop], include_stop=True))
    assert len(stop) == 5
    assert kept == bare + stop


@ENDS.row("which stop was hit (openvino-genai)", "`StreamChunk.stopped_by`")
def _(b: Bench) -> None:
    chunks = greedy(b.session(), max_tokens=24)
    assert chunks[-1].stopped_by is None
    stop, token = text_of(chunks)[7:12], ids_of(chunks)[4]
    assert greedy(b.session(), max_tokens=24, stop=["zzz", stop])[-1].stopped_by == stop
    assert greedy(b.session(), max_tokens=24, stop_tokens=[token])[-1].stopped_by == token


@ENDS.row("`min_new_tokens` (openvino-genai)", "`DecodeConfig.min_tokens`")
def _(b: Bench) -> None:
    short = "A short tale about Oskar."
    n = len(ids_of(greedy(b.session(short), max_tokens=200)))
    longer = greedy(b.session(short), max_tokens=n + 9, min_tokens=n + 5)
    assert len(ids_of(longer)) >= n + 5


@ENDS.row("`ignore_eos` (llama.cpp, vLLM)", "`SamplingConfig.ignore_eos`")
def _(b: Bench) -> None:
    short = "A short tale about Oskar."
    n = len(ids_of(greedy(b.session(short), max_tokens=200)))
    assert len(ids_of(greedy(b.session(short), max_tokens=n + 3, ignore_eos=True))) == n + 3


@ENDS.row("log-probabilities of tokens (llama-cpp-python)", "`DecodeConfig.logprobs`")
def _(b: Bench) -> None:
    chunks = greedy(b.session(), logprobs=3)
    found = [one for chunk in chunks for one in chunk.logprobs or ()]
    assert [one.token for one in found] == ids_of(chunks)
    assert len(found) == 8
    assert all(len(one.top) == 3 and one.top[0][0] == one.token for one in found)
    assert all(one.logprob <= 0 for one in found)


@ENDS.row("log-probabilities of the prompt (vLLM)", "`DecodeConfig.prompt_logprobs`")
def _(b: Bench) -> None:
    chunks = greedy(b.session(), prompt_logprobs=1)
    tokens = b.model.tokenizer.encode(STORY)
    found = chunks[0].prompt_logprobs
    assert [one.token for one in found] == tokens[1:]
    context = b.context()
    context.decode(tokens, logits="all")
    row = context.logits(3).astype(np.float64)
    wanted = row[tokens[4]] - row.max() - np.log(np.exp(row - row.max()).sum())
    assert abs(found[3].logprob - wanted) < 1e-3


@ENDS.row("the window fills (llama-cpp-python)", '`StreamChunk.finish_reason` "context"')
def _(b: Bench) -> None:
    chunks = greedy(b.session(n_ctx=32), max_tokens=None, ignore_eos=True)
    assert chunks[-1].finish_reason == "context"


@ENDS.row("context shift (llama.cpp, llama-cpp-python)", '`open_session` with overflow="shift"')
def _(b: Bench) -> None:
    session = b.session(n_ctx=32, overflow="shift")
    chunks = greedy(session, max_tokens=60, ignore_eos=True)
    assert len(ids_of(chunks)) == 60
    assert sum(len(chunk.shifted_out) for chunk in chunks) > 0


@ENDS.row("beam search (transformers, openvino-genai)", "`Session.beam_search`, `Beam`")
def _(b: Bench) -> None:
    wanted = infercore_models.golden_beams("storyteller")[0]
    beams = b.session(wanted.text).beam_search(
        wanted.n_beams,
        max_tokens=wanted.max_tokens,
        length_penalty=wanted.length_penalty,
        early_stopping=wanted.early_stopping,
    )
    assert beams[0].tokens == wanted.beams[0].tokens


@ENDS.row("n samples of one prompt (vLLM)", "`Session.sample_many`, `Completion`")
def _(b: Bench) -> None:
    session = b.session("A short")
    many = session.sample_many(3, seed=4, max_tokens=10, temperature=1.5, top_k=0)
    alone = greedy(b.session("A short"), seed=5, max_tokens=10, temperature=1.5, top_k=0)
    assert [one.usage.seed for one in many] == [4, 5, 6]
    assert many[1].text == text_of(alone)


@ENDS.row("prompt lookup, draft models (transformers)", "`SpeculativeConfig`")
def _(b: Bench) -> None:
    plain = greedy(b.session(), max_tokens=32)
    for config in (
        ic.SpeculativeConfig(n_draft=4),
        ic.SpeculativeConfig(kind="draft_model", draft_model=b.model, n_draft=4),
    ):
        guessed = greedy(b.session(), max_tokens=32, speculative=config)
        assert ids_of(guessed) == ids_of(plain)
    assert guessed[-1].usage.accepted_tokens > 0


@ENDS.row("encoded inputs (openvino-genai)", "`PrefixInput.tokens`, `SuffixInput.tokens`")
def _(b: Bench) -> None:
    session = b.session("")
    session.ensure_prefix(b.tokens[:10])
    session.prefill_suffix(np.array(b.tokens[10:]))
    assert session.context.tokens() == b.tokens


@ENDS.row("time to first token, tokens a second (openvino-genai)", "`Usage`")
def _(b: Bench) -> None:
    usage = greedy(b.session(), max_tokens=12)[-1].usage
    assert usage.completion_tokens == 12
    assert usage.time_to_first_token_ms > 0
    assert usage.tokens_per_second > 0


@ENDS.row("times of tokenizing, sampling, grammars (openvino-genai)", "`PerfCounters`")
def _(b: Bench) -> None:
    session = b.session()
    choice = {"type": "choice", "choices": [" an owl", " a fox"]}
    greedy(session, response_format=choice)
    perf = session.context.perf()
    assert min(perf.tokenize_ms, perf.sample_ms, perf.grammar_ms) > 0
