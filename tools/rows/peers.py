"""Rows of what the tests of peers ask for."""

from __future__ import annotations

import asyncio
import json
import pickle
import tempfile
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

import infercore as ic
import infercore_models
from rows.bench import STORY, Section, greedy, ids_of, raises, text_of

if TYPE_CHECKING:
    from rows.bench import Bench

CONTEXTS = Section("What peers test: contexts")
ENDS = Section("What peers test: decoding and its ends")
SAMPLING = Section("What peers test: sampling and constraints")
CACHE = Section("What peers test: sessions, caches, many at once")
CHAT = Section("What peers test: chats and tools")
TOKENS = Section("What peers test: tokenizer and embeddings")
MODELS = Section("What peers test: models and adapters")
TEMPLATE = (
    "{%- for t in tools or [] %}{{ t.function | tojson }}\n{% endfor -%}"
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
    "{% endfor -%}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif -%}"
)
SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"days": 3}}\n</tool_call>'
USER = [{"role": "user", "content": "Weather?"}]


def says(text: str) -> dict[str, Any]:
    """Options by which the model writes exactly ``text``."""
    return {"response_format": {"type": "choice", "choices": [text]}, "max_tokens": 200}


# -- contexts ----------------------------------------------------------------------------------


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
    import gguf

    row = np.linspace(-1, 1, b.model.info.n_embd, dtype=np.float32)
    context = b.context()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vector.gguf"
        writer = gguf.GGUFWriter(path, "controlvector")
        writer.add_string("controlvector.model_hint", "llama")
        writer.add_uint32("controlvector.layer_count", 1)
        writer.add_tensor("direction.2", row)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
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


# -- decoding and its ends ---------------------------------------------------------------------


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


# -- sampling and constraints ------------------------------------------------------------------


def _limits(fields: dict[str, Any], top: int) -> Any:
    """Assert that what is drawn is among the ``top`` likeliest, and not always the first."""

    def check(b: Bench) -> None:
        context = b.context()
        context.decode(b.tokens[:1])  # nearly anything may begin a text
        likeliest = np.argsort(context.logits())[::-1][:top].tolist()
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 3.0}
        drawn = set()
        for seed in range(40):
            sampler = b.model.new_sampler(**{**off, "seed": seed, **fields})
            drawn.add(sampler.sample(context))
        assert drawn <= set(likeliest)
        assert len(drawn) > 1

    return check


for _name, _fields, _top in (
    ("top_k", {"top_k": 3}, 3),
    ("top_p", {"top_p": 0.99, "temperature": 1.5}, 200),
    ("min_p", {"min_p": 0.05}, 60),
    ("typical_p", {"typical_p": 0.99}, 1024),
    ("top_n_sigma", {"top_n_sigma": 2.0}, 60),
    ("xtc", {"xtc_probability": 1.0, "xtc_threshold": 0.001, "top_k": 40}, 40),
    ("dynatemp", {"dynatemp_range": 2.0, "top_k": 5}, 5),
    ("mirostat 1", {"mirostat": 1, "mirostat_tau": 9.0}, 1024),
    ("mirostat 2", {"mirostat": 2, "mirostat_tau": 9.0}, 1024),
):
    SAMPLING.row(f"{_name} (llama.cpp, ion7-core, mullama)", "`SamplingConfig`")(
        _limits(_fields, _top)
    )


@SAMPLING.row("adaptive_p (ion7-core, llama.cpp)", "`SamplingConfig.adaptive_p_target`")
def _(b: Bench) -> None:
    loose = {"top_k": 0, "top_p": 1.0, "min_p": 0.02, "temperature": 2.0, "seed": 1}
    means = []
    for target in (0.1, 0.9):
        session = b.session("The")
        chunks = greedy(session, adaptive_p_target=target, logprobs=0, max_tokens=60, **loose)
        found = [one.logprob for chunk in chunks for one in chunk.logprobs or ()]
        means.append(np.exp(found).mean())
    assert means[0] < means[1] - 0.1


@SAMPLING.row("penalties (llama.cpp, openvino-genai)", "`SamplingConfig.repeat_penalty`")
def _(b: Bench) -> None:
    context = b.context()
    context.decode(b.tokens[:1])
    best = int(context.logits().argmax())
    for fields in (
        {"repeat_penalty": 3.0, "penalty_last_n": -1},
        {"presence_penalty": 20.0},
        {"frequency_penalty": 20.0},
        {"dry_multiplier": 20.0},
    ):
        sampler = b.model.new_sampler(temperature=0, **fields)
        assert sampler.sample(context) == best
        sampler.reset()
        sampler.observe([900, 901, 902, best, 900, 901, 902])
        assert sampler.sample(context) != best


@SAMPLING.row("logit bias (llama-cpp-python)", "`SamplingConfig.logit_bias`")
def _(b: Bench) -> None:
    first = ids_of(greedy(b.session(), max_tokens=1))[0]
    assert ids_of(greedy(b.session(), max_tokens=1, logit_bias={7: 100.0})) == [7]
    assert ids_of(greedy(b.session(), max_tokens=1, logit_bias={first: -np.inf})) != [first]


@SAMPLING.row("`no_repeat_ngram_size` (transformers)", "`SamplingConfig.no_repeat_ngram_size`")
def _(b: Bench) -> None:
    found = ids_of(greedy(b.session(), max_tokens=60, no_repeat_ngram_size=2, ignore_eos=True))
    assert len({tuple(found[i : i + 2]) for i in range(59)}) == 59


@SAMPLING.row("temperature 0 is argmax (llama.cpp)", "`SamplingConfig.temperature`")
def _(b: Bench) -> None:
    context = b.held()
    for implementation in ("portable", "native"):
        if implementation == "portable" or b.model.capabilities.native_sampler:
            sampler = b.model.new_sampler(temperature=0, implementation=implementation)
            assert sampler.sample(context) == int(context.logits().argmax())


@SAMPLING.row("the engine's own sampler (llama-cpp-python)", "`SamplingConfig.implementation`")
def _(b: Bench) -> None:
    context = b.held()
    sampler = b.model.new_sampler(implementation="native", top_k=3, seed=1)
    likeliest = np.argsort(context.logits())[::-1][:3]
    assert sampler.sample(context) in likeliest
    assert sampler.seed == 1


@SAMPLING.row("clone and reset of a sampler (ion7-core)", "`Sampler.clone`, `Sampler.reset`")
def _(b: Bench) -> None:
    context = b.held()
    sampler = b.model.new_sampler(temperature=3.0, top_k=0, min_p=0.0, top_p=1.0, seed=3)
    first = [sampler.sample(context) for _ in range(5)]
    twin = sampler.clone()
    assert twin.sample(context) == sampler.sample(context)
    sampler.reset()
    assert [sampler.sample(context) for _ in range(5)] == first


@SAMPLING.row("processors that see ids (llama-cpp-python)", "`DecodeConfig.processors`")
def _(b: Bench) -> None:
    seen = []

    def only_seven(ids: Any, logits: Any) -> Any:
        seen.append(len(ids))
        logits[:] = -np.inf
        logits[7] = 0
        return logits

    assert ids_of(greedy(b.session(), max_tokens=3, processors=[only_seven])) == [7, 7, 7]
    n = len(b.model.tokenizer.encode(STORY))
    assert seen == [n, n + 1, n + 2]


@SAMPLING.row("JSON schema (llama-cpp-python, vLLM)", "`DecodeConfig.response_format`")
def _(b: Bench) -> None:
    wanted = {"type": "json_schema", "schema": SCHEMA}
    text = text_of(greedy(b.session(), max_tokens=60, response_format=wanted))
    assert 1 <= json.loads(text)["days"] <= 9


@SAMPLING.row("regex, choice (vLLM)", "`DecodeConfig.response_format`")
def _(b: Bench) -> None:
    import re

    pattern = {"type": "regex", "pattern": "[a-c]{3}[0-9]"}
    assert re.fullmatch("[a-c]{3}[0-9]", text_of(greedy(b.session(), response_format=pattern)))
    assert text_of(greedy(b.session(), **says(" an owl"))) == " an owl"


@SAMPLING.row("GBNF (llama.cpp)", "`DecodeConfig.response_format`")
def _(b: Bench) -> None:
    grammar = {"type": "gbnf", "grammar": 'root ::= "yes" | "no"'}
    assert text_of(greedy(b.session(), response_format=grammar)) in ("yes", "no")
    wrong = {"type": "gbnf", "grammar": "root ::= ("}
    raises(ic.GrammarError, lambda: b.session().decode(response_format=wrong))


@SAMPLING.row("structural tags (openvino-genai, vLLM)", "`DecodeConfig.response_format`")
def _(b: Bench) -> None:
    free = text_of(greedy(b.session(), max_tokens=12))
    word = free.split()[2]
    shape = {"begin": word, "schema": SCHEMA, "end": "!"}
    wanted = {"type": "structural_tag", "structures": [shape]}
    text = text_of(greedy(b.session(), max_tokens=40, response_format=wanted))
    assert text.startswith(free[: free.index(word)] + word + '{"days":')


# -- sessions, caches, many at once ------------------------------------------------------------


@CACHE.row("sessions decoded in one engine call (vLLM)", "`open_pool`, `SessionPool`")
def _(b: Bench) -> None:
    alone = text_of(greedy(b.session()))
    pool = b.pool(n_parallel=3)
    sessions = [b.open(pool.open_session()) for _ in range(3)]
    for session in sessions:
        session.ensure_prefix(STORY)
    streams = [session.decode(temperature=0, max_tokens=8) for session in sessions]
    texts = ["", "", ""]
    for _ in range(20):
        for i, stream in enumerate(streams):
            chunk = next(stream, None)
            texts[i] += chunk.text if chunk else ""
    assert texts == [alone] * 3
    assert pool.stats().n_open == 3


@CACHE.row("a prefix is evaluated once for all (vLLM, SGLang)", "`PrefixStatus.shared_tokens`")
def _(b: Bench) -> None:
    pool = b.pool(n_parallel=2)
    first, second = b.open(pool.open_session()), b.open(pool.open_session())
    n = first.ensure_prefix(STORY).prefilled_tokens
    assert second.ensure_prefix(STORY).shared_tokens >= n - 1


@CACHE.row("namespaces share nothing (vLLM's cache salt)", "`SessionPool.open_session`")
def _(b: Bench) -> None:
    pool = b.pool(n_parallel=2)
    b.open(pool.open_session(namespace="a")).ensure_prefix(STORY)
    status = b.open(pool.open_session(namespace="b")).ensure_prefix(STORY)
    assert (status.shared_tokens, status.reused_tokens) == (0, 0)


def _moved_out(b: Bench, **cache: Any) -> None:
    fields = {**b.exact, "n_parallel": 1, "n_cells": 64, "n_ctx": 64, **cache}
    text = "the little dog and the baker " * 3
    with b.model.new_pool(**fields) as pool:
        one, two = pool.open_session(), pool.open_session()
        n = one.ensure_prefix(text).prefix_tokens
        two.ensure_prefix("tick tock " * 12)
        assert one.explain_context().held_tokens == 0
        assert one.ensure_prefix(text).restored_tokens >= n - 1


@CACHE.row("a cache in RAM keyed by prompt (llama-cpp-python)", "`PoolConfig.cache_bytes`")
def _(b: Bench) -> None:
    _moved_out(b, cache_bytes=2**26)


@CACHE.row("a cache on disk keyed by prompt (llama-cpp-python)", "`PoolConfig.cache_dir`")
def _(b: Bench) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _moved_out(b, cache_dir=folder)


@CACHE.row("batch of prompts equals one by one (openvino-genai)", "`SessionPool.open_session`")
def _(b: Bench) -> None:
    prompts = [STORY, "A short tale about", "The miller"]
    pool = b.pool(n_parallel=3)
    found = [""] * 3

    def run(i: int) -> None:
        with pool.open_session() as session:
            found[i] = session.generate(prompts[i], max_tokens=8, temperature=0)

    workers = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    alone = [b.session("").generate(one, max_tokens=8, temperature=0) for one in prompts]
    assert found == alone


@CACHE.row("a timeout of a call (contenox)", "`CallTimeoutError`")
def _(b: Bench) -> None:
    session = b.session("", n_ctx=4096, n_batch=16, n_ubatch=16)
    long = (b.tokens * 43)[:4000]
    error = raises(ic.CallTimeoutError, lambda: session.ensure_prefix(long, timeout=0.01))
    assert 0 <= error.resident_tokens < len(long)
    assert session.ensure_prefix(b.tokens).prefix_tokens == len(b.tokens)


@CACHE.row("tokens taken out of the middle (contenox)", "`Session.evict`, `ContextReport.cuts`")
def _(b: Bench) -> None:
    session = b.session()
    before = session.context.tokens()
    assert session.evict(4, 8).dropped_tokens == 4
    assert session.context.tokens() == [*before[:4], *before[8:]]
    assert ids_of(greedy(session))


@CACHE.row("fork (contenox, SGLang)", "`Session.fork`")
def _(b: Bench) -> None:
    session = b.session(n_seq_max=2, kv_unified=True)
    twin = b.open(session.fork())
    assert twin.prefill_suffix(" and a fox").prefilled_tokens > 0
    assert text_of(greedy(session)) == text_of(greedy(b.session()))
    assert ids_of(greedy(twin))


@CACHE.row("snapshot as a value, from bytes (contenox)", "`Snapshot.from_bytes`")
def _(b: Bench) -> None:
    session = b.session()
    data = session.snapshot().to_bytes()
    wanted = text_of(greedy(session))
    other = b.session("")
    other.restore(ic.Snapshot.from_bytes(data))
    assert text_of(greedy(other)) == wanted
    assert pickle.loads(pickle.dumps(session.snapshot())).resident_tokens > 0  # noqa: S301
    raises(ic.SnapshotError, lambda: ic.Snapshot.from_bytes(data[:-3]))


@CACHE.row("save and load a file (llama-cpp-python)", "`Session.save`, `Session.load`")
def _(b: Bench) -> None:
    session = b.session()
    with tempfile.TemporaryDirectory() as folder:
        session.save(Path(folder) / "state")
        other = b.session("")
        assert other.load(Path(folder) / "state").resident_tokens > 0
    assert text_of(greedy(other)) == text_of(greedy(session))


@CACHE.row("async sessions (mullama, vLLM)", "`aopen_session`, `AsyncSession`")
def _(b: Bench) -> None:
    async def main() -> str:
        async with ic.aopen_session(b.model, **b.exact, n_ctx=256) as session:
            await session.ensure_prefix(STORY)
            chunks = session.decode(temperature=0, max_tokens=8)
            return "".join([chunk.text async for chunk in chunks])

    assert asyncio.run(main()) == text_of(greedy(b.session()))


# -- chats -------------------------------------------------------------------------------------


def chat(b: Bench, **fields: Any) -> list[Any]:
    """Return the chunks of an answer."""
    return list(b.session("", n_ctx=512).chat(USER, **{"chat_template": TEMPLATE, **fields}))


@CHAT.row("tool calls apart from the text (llama-cpp-python)", "`Session.chat`, `ToolCall`")
def _(b: Bench) -> None:
    chunks = chat(b, tools=TOOLS, **says(f"So.\n{CALL}"))
    (call,) = [call for chunk in chunks for call in chunk.tool_calls]
    assert (call.name, dict(call.arguments)) == ("weather", {"days": 3})
    assert (text_of(chunks).strip(), chunks[-1].finish_reason) == ("So.", "tool_calls")


@CHAT.row("`tool_choice` (llama-cpp-python, vLLM)", "`Session.chat`")
def _(b: Bench) -> None:
    for choice in ("required", "weather"):
        chunks = chat(b, tools=TOOLS, tool_choice=choice, max_tokens=100, seed=1)
        (call,) = [call for chunk in chunks for call in chunk.tool_calls]
        assert 1 <= call.arguments["days"] <= 9
    chunks = chat(b, tools=TOOLS, tool_choice="none", **says(CALL))
    assert text_of(chunks) == CALL


@CHAT.row("a call that is none stays text (contenox)", "`Session.chat`")
def _(b: Bench) -> None:
    wrong = CALL.replace("3", '"x"')
    chunks = chat(b, tools=TOOLS, **says(wrong))
    assert (text_of(chunks), chunks[-1].finish_reason) == (wrong, "eos")


@CHAT.row("thinking apart from text (ion7-core, contenox)", "`StreamChunk.reasoning`")
def _(b: Bench) -> None:
    thought = "{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}"
    template = TEMPLATE.replace("{%- for c in", thought + "{%- for c in")
    chunks = chat(b, chat_template=template, **says("<think>\nHm.\n</think>\n\nYes."))
    assert "".join(chunk.reasoning for chunk in chunks) == "Hm."
    assert text_of(chunks) == "Yes."


@CHAT.row("tools run in a chain (llm)", "`Session.run_tools`")
def _(b: Bench) -> None:
    def weather(days: Literal[1, 2]) -> str:
        """Say the weather."""
        return f"rain for {days} days"

    session = b.session("", n_ctx=512)
    messages = session.run_tools(
        USER, [weather], max_rounds=2, chat_template=TEMPLATE, tool_choice="required",
        max_tokens=100, temperature=0,
    )  # fmt: skip
    assert [one.role for one in messages][:2] == ["assistant", "tool"]
    assert "rain for" in str(messages[1].content)


@CHAT.row("a message with calls and results (contenox)", "`Message.tool_calls`")
def _(b: Bench) -> None:
    call = ic.ToolCall(id="1", name="weather", arguments={"days": 3})
    messages = [
        ic.Message(role="user", content="Weather?"),
        ic.Message(role="assistant", tool_calls=[call]),
        ic.Message(role="tool", content="rain", tool_call_id="1"),
    ]
    session = b.session("", n_ctx=512)
    list(session.chat(messages, chat_template=TEMPLATE, tools=TOOLS, max_tokens=2))
    text = b.model.tokenizer.decode(session.context.tokens())
    assert '"days": 3' in text
    assert "rain" in text


@CHAT.row("whole turns are left out (contenox)", "`StreamChunk.dropped_messages`")
def _(b: Bench) -> None:
    turns = [{"role": r, "content": "la " * 30} for r in ("user", "assistant") * 4] + USER
    session = b.session("", n_ctx=192, overflow="truncate")
    chunks = list(session.chat(turns, chat_template=TEMPLATE, max_tokens=4))
    assert chunks[0].dropped_messages[:2] == (0, 1)


@CHAT.row("parts of text; images are refused (llm)", "`UnsupportedFeatureError`")
def _(b: Bench) -> None:
    session = b.session("", n_ctx=512)
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    list(session.chat([{"role": "user", "content": parts}], chat_template=TEMPLATE, max_tokens=1))
    assert "one" in b.model.tokenizer.decode(session.context.tokens())
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    raises(ic.UnsupportedFeatureError, lambda: list(session.chat(image, chat_template=TEMPLATE)))


# -- tokenizer and embeddings ------------------------------------------------------------------


@TOKENS.row("text comes back; characters over tokens (mullama)", "`Tokenizer.decode`")
def _(b: Bench) -> None:
    tokenizer = b.model.tokenizer
    text = "Zoë said: 🦊 and 字!"
    assert tokenizer.decode(tokenizer.encode(text, add_special=False)).strip() == text


@TOKENS.row("special ids (ion7-core)", "`Tokenizer.bos`, `Tokenizer.eos`")
def _(b: Bench) -> None:
    tokenizer = b.model.tokenizer
    assert tokenizer.encode("a")[0] == tokenizer.bos
    assert tokenizer.is_control(tokenizer.bos) is True


@TOKENS.row("score and kind of every token, separators (ion7-core)", "`Tokenizer.token_kind`")
def _(b: Bench) -> None:
    tokenizer = b.model.tokenizer
    kinds = [tokenizer.token_kind(token) for token in range(tokenizer.n_vocab)]
    assert kinds[tokenizer.bos] == "control"
    assert kinds.count("normal") > 900
    assert tokenizer.token_score(7) is None  # this vocabulary has merges
    with ic.load_model(b.pack("encoder"), backend=b.backend) as model:
        assert model.tokenizer.sep == 3


@TOKENS.row("batch, pairs and truncation (openvino-genai)", "`Tokenizer.encode_many`")
def _(b: Bench) -> None:
    tokenizer = b.model.tokenizer
    assert tokenizer.encode_many([STORY, "a"]) == [tokenizer.encode(STORY), tokenizer.encode("a")]
    (cut,) = tokenizer.encode_many([STORY], max_tokens=5, truncation="right")
    assert cut == tokenizer.encode(STORY)[:5]
    with ic.load_model(b.pack("encoder"), backend=b.backend) as model:
        (pair,) = model.tokenizer.encode_many([("a", "b")])
        assert (pair[0], pair.count(3), pair[-1]) == (2, 2, 3)


@TOKENS.row("an embedding of each text (openvino-genai)", "`embed`")
def _(b: Bench) -> None:
    texts = infercore_models.golden_texts("encoder")[:3]
    found = ic.embed(b.pack("encoder"), [one.text for one in texts], backend=b.backend)
    for vector, one in zip(found, texts, strict=True):
        wanted = np.asarray(one.rows, dtype=np.float64).mean(0)
        assert vector @ wanted / np.linalg.norm(wanted) > 1 - 1e-3


@TOKENS.row("rerank (openvino-genai)", "`rerank`")
def _(b: Bench) -> None:
    documents = ["a baker and a fox", "the stone bridge", "an owl"]
    found = ic.rerank(b.pack("encoder"), "the stone bridge", documents, backend=b.backend, top_n=2)
    assert len(found) == 2
    assert found[0][1] >= found[1][1]


# -- models and adapters -----------------------------------------------------------------------


@MODELS.row("metadata and shape (ion7-core)", "`ModelInfo`")
def _(b: Bench) -> None:
    info = b.model.info
    assert (info.n_vocab, info.n_layer > 0, info.n_embd > 0) == (1024, True, True)
    assert info.n_params > 10_000
    assert info.architecture == "llama"


@MODELS.row("several adapters, scales, live (mullama)", "`Context.set_adapters`")
def _(b: Bench) -> None:
    spec = ic.AdapterSpec(path=str(infercore_models.path("storyteller-lora", "gguf-f32")))
    context = b.context()
    context.set_adapters([spec])
    context.decode(b.tokens)
    assert np.abs(context.logits() - b.last_row()).max() > 1e-2
    context.set_adapters([])
    context.eval(b.tokens, 0)
    assert np.abs(context.logits() - b.last_row()).max() <= context.tolerance


@MODELS.row("an adapter is part of the identity (contenox)", "`ContextManifest.adapters`")
def _(b: Bench) -> None:
    spec = ic.AdapterSpec(path=str(infercore_models.path("storyteller-lora", "gguf-f32")))
    with_it = b.session(adapters=[spec]).explain_context()
    assert with_it.manifest_digest != b.session().explain_context().manifest_digest


@MODELS.row("metadata overridden at load (mullama)", "`ModelConfig.backend_options`")
def _(b: Bench) -> None:
    options = {"kv_overrides": {"llama.rope.freq_base": 20000.0}}
    if b.backend != "llamacpp":
        error = raises(
            ic.InvalidInputError,
            lambda: ic.load_model(b.path, backend=b.backend, backend_options=options),
        )
        raise ic.UnsupportedFeatureError(feature="kv_overrides", backend=None, hint=str(error))
    with ic.load_model(b.path, backend=b.backend, backend_options=options) as model:
        assert model.info.metadata["llama.rope.freq_base"].startswith("20000")


@MODELS.row("a file that is cut, missing, foreign (llama-cpp-python)", "`ModelLoadError`")
def _(b: Bench) -> None:
    with tempfile.TemporaryDirectory() as folder:
        wrong = Path(folder) / "model.gguf"
        wrong.write_bytes(b"GGUF" + b"\0" * 50)
        raises(ic.ModelLoadError, lambda: ic.load_model(wrong, backend=b.backend))
        gone = Path(folder) / "no.gguf"
        raises(ic.ModelNotFoundError, lambda: ic.load_model(gone, backend=b.backend))


@MODELS.row("digest of a model's files (contenox)", "`Model.digest`")
def _(b: Bench) -> None:
    with ic.load_model(b.path, backend=b.backend) as again:
        assert again.digest == b.model.digest
    assert len(b.model.digest) == 64
