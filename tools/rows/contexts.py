"""Rows of the contexts of the seeds: ion7-core's, mullama's and llama.cpp's own."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np

import infercore as ic
from rows.bench import greedy, near, raises, text_of
from rows.sections import (
    CREATION,
    GO,
    ION7,
    MULLAMA,
)

if TYPE_CHECKING:
    from rows.bench import Bench


# -- ion7-core ------------------------------------------------------------------------------------


@ION7.row("`_ptr`, `Context:ptr`", "native_handle of `Context` and `Model`")
def _(b: Bench) -> None:
    context = b.held()
    assert context.native_handle is not None
    context.close()
    raises(ic.SessionClosedError, lambda: context.native_handle)


@ION7.row("`_model_ref`", "`Model` (a context keeps its own alive)")
def _(b: Bench) -> None:
    model = ic.load_model(b.path, backend=b.backend)
    context = b.open(model.new_context(**b.exact, n_ctx=256))
    model.close()
    context.decode(b.tokens)
    assert np.array_equal(context.logits(), b.last_row())


@ION7.row("`_mem`, `Context:memory`", "`Context.seq_remove` and its kin")
def _(b: Bench) -> None:
    context = b.held()
    assert context.seq_remove(0, 3)
    assert context.tokens() == b.tokens[:3]


@ION7.row("`_decode_batch`, `_batch_gc`", "`Context.decode_batch`")
@MULLAMA.row("`n_seq_max`: sequences in one call", "`Context.decode_batch`")
@CREATION.row("`n_seq_max`: several sequences", "`ContextConfig.n_seq_max`, `Context.decode_batch`")
def _(b: Bench) -> None:
    context = b.context(n_seq_max=2, kv_unified=True)
    context.decode_batch([(t, (s,), False) for s in (0, 1) for t in b.tokens[:-1]])
    context.decode_batch([(b.tokens[-1], (s,), True) for s in (0, 1)])
    assert all(near(context, context.logits(i), b.last_row()) for i in (0, 1))


@ION7.row("`_n_past`, `Context:n_past`", "`Context.n_past`, `Context.n_resident`")
def _(b: Bench) -> None:
    context = b.held()
    assert context.n_past() == context.n_resident() == len(b.tokens)
    context.seq_remove(0, 4)
    assert context.n_past() == context.n_resident() == 4


@ION7.row("`Context:set_n_past`", "`Context.eval` (a position is named where it is used)")
@MULLAMA.row("`eval`", "`Context.eval`")
def _(b: Bench) -> None:
    context = b.held()
    context.eval(b.tokens[4:], 4)
    assert context.tokens() == b.tokens
    assert near(context, context.logits(), b.last_row())
    raises(ic.InvalidPositionError, lambda: context.eval([5], len(b.tokens) + 1))
    assert context.tokens() == b.tokens


def _reads(name: str) -> Any:
    values = {"n_ctx": 192, "n_batch": 24, "n_ubatch": 12, "n_seq_max": 2, "n_threads": 1}

    def check(b: Bench) -> None:
        assert getattr(b.context(**{name: values[name]}), name) == values[name]

    return check


for _name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max"):
    ION7.row(f"`_{_name}`, `Context:{_name}`", f"`Context.{_name}`")(_reads(_name))
ION7.row("`Context:n_threads`", "`Context.n_threads`")(_reads("n_threads"))
MULLAMA.row("`n_ctx()`", "`Context.n_ctx`")(_reads("n_ctx"))
MULLAMA.row("`n_batch()`", "`Context.n_batch`")(_reads("n_batch"))


@ION7.row("`Context:n_ctx_seq`", "`Context.n_ctx_seq`")
def _(b: Bench) -> None:
    assert b.context(n_seq_max=2, kv_unified=False).n_ctx_seq == 128
    assert b.context(n_seq_max=2, kv_unified=True).n_ctx_seq == 256


@ION7.row("`Context:n_threads_batch`", "`Context.n_threads_batch`")
def _(b: Bench) -> None:
    assert b.context(n_threads=1, n_threads_batch=1).n_threads_batch == 1


@ION7.row("`Context:set_n_threads` on a live context", "`Context.set_threads`")
def _(b: Bench) -> None:
    context = b.held(n_threads=1, n_threads_batch=1)
    for n in (b.n_cores, 1):
        context.set_threads(n)
        assert (context.n_threads, context.n_threads_batch) == (n, n)
        context.eval(b.tokens[4:], 4)
        assert near(context, context.logits(), b.last_row())


@ION7.row("`Context:set_n_threads` with two numbers", "`Context.set_threads`")
def _(b: Bench) -> None:
    context = b.held(n_threads=1, n_threads_batch=1)
    context.set_threads(1, 2)
    assert (context.n_threads, context.n_threads_batch) == (1, 2)
    context.eval(b.tokens, 0)
    assert near(context, context.logits(), b.last_row())


@ION7.row("`_is_embed`, `Context:set_embeddings`", "`Context.set_embeddings`")
def _(b: Bench) -> None:
    context = b.context()
    context.set_embeddings(True)
    context.decode(b.tokens, logits="all")
    found = context.embeddings()
    assert found.shape == (len(b.tokens), b.model.info.n_embd)
    assert np.abs(found).max() > 0
    context.set_embeddings(False)
    context.eval(b.tokens, 0)
    raises(ic.OutputNotAvailableError, context.embeddings)


@ION7.row("`Model:embedding_context`", "`ContextConfig.embeddings`, `embed`")
def _(b: Bench) -> None:
    found = ic.embed(b.model, ["the baker", "the stone bridge"], pooling="mean")
    assert found.shape == (2, b.model.info.n_embd)
    assert np.allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    assert found[0] @ found[1] < 1 - 1e-4


@ION7.row("`Context.new`, `model:context`", "`Model.new_context`")
@MULLAMA.row("`Context::new`, `ContextBuilder::build`", "`Model.new_context`")
@CREATION.row("`llama_init_from_model`", "`Model.new_context`")
def _(b: Bench) -> None:
    golden = b.golden.prompts[1]
    context = b.held()
    assert int(context.logits().argmax()) == golden.greedy[0]
    assert np.abs(context.logits() - golden.logits[-1]).max() < 1e-3


@ION7.row("retries where memory is short", "`ContextConfig.on_oom`, `Context.attempts`")
def _(b: Bench) -> None:
    wide = {"n_ctx": 2**30, "n_ctx_min": 2**29, "on_oom": "shrink"}
    error = raises(ic.OutOfMemoryError, lambda: b.model.new_context(**wide))
    assert [one.n_ctx for one in error.attempts][-1] == 2**29
    assert len({(one.n_ctx, one.n_ubatch, one.type_k) for one in error.attempts}) > 2
    assert all(one.error for one in error.attempts)


@ION7.row("`Context:free`", "`Context.close`")
@CREATION.row("`llama_free`", "`Context.close`")
def _(b: Bench) -> None:
    context = b.held()
    context.close()
    context.close()
    assert context.closed is True
    raises(ic.SessionClosedError, lambda: context.decode([5]))
    gone = weakref.ref(b.model.new_context(n_ctx=32))
    gc.collect()
    assert gone() is None


@ION7.row("`Context:pooling_type`", "`Context.pooling_type`")
def _(b: Bench) -> None:
    assert b.context(pooling_type="last").pooling_type == "last"


@ION7.row(
    "`Context:set_causal_attn`", "`Context.set_causal_attention` (OpenVINO: in its stateful form)"
)
def _(b: Bench) -> None:
    context = b.context(**b.masked)
    context.set_causal_attention(False)
    context.decode(b.tokens)
    assert not near(context, context.logits(), b.last_row())
    context.set_causal_attention(True)
    context.eval(b.tokens, 0)
    assert near(context, context.logits(), b.last_row())


@ION7.row("`Context:set_warmup`, `Context:warmup`", "`Context.warmup`")
def _(b: Bench) -> None:
    context = b.context(n_seq_max=2, kv_unified=True)
    context.decode(b.tokens)
    before = context.perf()
    context.warmup()
    assert context.perf() == before
    assert context.tokens() == b.tokens
    context.decode_one(5)
    assert context.n_past() == len(b.tokens) + 1


@ION7.row("`Context:synchronize`", "`Context.synchronize`")
def _(b: Bench) -> None:
    context = b.held()
    context.synchronize()
    assert near(context, context.logits(), b.last_row())


@ION7.row("`Context:set_abort_callback`", "`Context.set_abort_callback`")
def _(b: Bench) -> None:
    context = b.context(n_batch=16, n_ubatch=16)
    context.set_abort_callback(lambda: True)
    error = raises(ic.DecodeAbortedError, lambda: context.decode([5] * 64))
    assert error.resident_tokens == context.n_past() < 64
    context.set_abort_callback(None)
    context.eval(b.tokens, 0)
    assert near(context, context.logits(), b.last_row())


# -- mullama --------------------------------------------------------------------------------------


@MULLAMA.row("one context a thread; not `Send`", "`SessionBusyError`")
def _(b: Bench) -> None:
    context = b.context(n_ctx=512, n_batch=16, n_ubatch=16)
    entered, found = threading.Event(), threading.Event()

    def wait() -> bool:
        entered.set()
        found.wait(10)
        return False

    context.set_abort_callback(wait)
    worker = threading.Thread(target=context.decode, args=([5] * 64,))
    worker.start()
    while worker.is_alive() and not entered.wait(0.02):
        pass
    assert entered.is_set()
    try:
        raises(ic.SessionBusyError, lambda: context.decode([5]))
    finally:
        found.set()
        worker.join()
    assert context.n_past() == 64  # in another thread than before, as this call is


@MULLAMA.row("`ContextError`: no memory", "`OutOfMemoryError`")
@CREATION.row("result NULL: no memory", "`OutOfMemoryError`")
def _(b: Bench) -> None:
    error = raises(ic.OutOfMemoryError, lambda: b.model.new_context(n_ctx=2**30))
    assert len(error.attempts) == 1


@MULLAMA.row("`InvalidInput`: a wrong combination", "`InvalidInputError`")
@CREATION.row("quantised V needs flash attention (else NULL)", "`InvalidInputError`")
def _(b: Bench) -> None:
    wrong = {"type_v": "q8_0", "flash_attn": "off"}
    assert raises(ic.InvalidInputError, lambda: b.context(**wrong)).field == "type_v"


@MULLAMA.row("`ContextParams`, `ContextBuilder`", "`ContextConfig`")
def _(b: Bench) -> None:
    config = ic.ContextConfig(n_ctx=100, n_batch=20, n_threads=1)
    with b.model.new_context(config) as context:
        assert (context.n_ctx, context.n_batch, context.n_threads) == (100, 20, 1)
    raises(ic.InvalidInputError, lambda: b.context(n_cxt=100))


@MULLAMA.row("memory factors", "`plan_memory`")
@CREATION.row("size of the cache from its shape", "`plan_memory`, `Model.plan_memory`")
def _(b: Bench) -> None:
    info = b.model.info
    width = info.n_embd // info.n_head * info.n_head_kv * info.n_layer

    def planned(kind: str) -> float:
        fields = {"n_ctx": 4096, "type_k": kind, "type_v": kind}
        plan = ic.plan_memory(b.path, backend=b.backend, **fields)
        assert plan == b.model.plan_memory(**fields)
        return plan.kv_bytes / (2 * 4096 * width)

    assert 4 <= planned("f32") < 4.1
    assert 2 <= planned("f16") < 2.05


@MULLAMA.row("`generate`", "`Session.generate`")
def _(b: Bench) -> None:
    prompt = b.golden.prompts[1]
    text = b.session("").generate(prompt.text, max_tokens=8, temperature=0)
    assert text == b.model.tokenizer.decode(prompt.greedy[:8])


@MULLAMA.row("`generate` from token ids", "`SuffixInput.tokens`")
def _(b: Bench) -> None:
    prompt = b.golden.prompts[1]
    text = b.session("").generate(list(prompt.tokens), max_tokens=8, temperature=0)
    assert text == b.model.tokenizer.decode(prompt.greedy[:8])


@MULLAMA.row("`generate_with_params`", "`DecodeConfig.sampling`, `SamplingConfig`")
def _(b: Bench) -> None:
    session = b.session("A short")

    def drawn(seed: int) -> str:
        session.ensure_prefix("A short")
        return text_of(greedy(session, max_tokens=16, temperature=1.5, top_k=0, seed=seed))

    assert drawn(1) == drawn(1)
    assert len({drawn(seed) for seed in range(4)}) > 1


@MULLAMA.row("`decode`, longer than a batch", "`Context.decode`")
@CREATION.row("`n_batch`, `n_ubatch`: longer input is cut", "`Context.decode`")
def _(b: Bench) -> None:
    context = b.context(n_batch=4, n_ubatch=2)
    context.decode(b.tokens)
    assert near(context, context.logits(), b.last_row())


@MULLAMA.row("`decode_single`", "`Context.decode_one`")
def _(b: Bench) -> None:
    context = b.context()
    for token in b.tokens:
        context.decode_one(token)
    assert near(context, context.logits(), b.last_row())


@MULLAMA.row("`clear_cache`", "`Context.clear`")
def _(b: Bench) -> None:
    context = b.held()
    context.clear()
    assert context.n_past() == context.n_resident() == 0
    context.decode(b.tokens)
    assert near(context, context.logits(), b.last_row())


@MULLAMA.row("`kv_cache_seq_rm`", "`Context.seq_remove`")
def _(b: Bench) -> None:
    context = b.held()
    context.decode([7, 8, 9])
    assert context.seq_remove(0, len(b.tokens) - 1)
    context.decode_one(b.tokens[-1])
    assert near(context, context.logits(), b.last_row())


@MULLAMA.row("`kv_cache_seq_cp`", "`Context.seq_copy`")
@CREATION.row("beam search: copies of a sequence", "`Context.seq_copy`")
def _(b: Bench) -> None:
    context = b.context(n_seq_max=2, kv_unified=True)
    context.decode(b.tokens[:-1])
    context.seq_copy(0, 1)
    context.decode_one(7)
    context.decode_one(b.tokens[-1], seq_id=1)
    assert near(context, context.logits(), b.last_row())


@MULLAMA.row("`kv_cache_seq_shift`", "`Context.seq_shift`")
def _(b: Bench) -> None:
    context = b.held()
    assert context.seq_remove(0, 0, 4)
    context.seq_shift(0, 4, -1, -4)
    assert context.n_past() == len(b.tokens) - 4
    assert context.tokens() == b.tokens[4:]
    context.decode_one(5)


@MULLAMA.row("`get_logits`", "`Context.logits_all`")
@MULLAMA.row("`get_logits_ith`", "`Context.logits`")
def _(b: Bench) -> None:
    context = b.context()
    context.decode(b.tokens, logits="all")
    rows = context.logits_all()
    assert rows.shape == (len(b.tokens), b.model.info.n_vocab)
    assert np.array_equal(rows[2], context.logits(2))
    assert near(context, rows[-1], b.last_row())


@MULLAMA.row("`AsyncContext`", "`aopen_context`, `AsyncContext`")
def _(b: Bench) -> None:

    async def main() -> Any:
        async with await ic.aopen_context(b.model, **b.exact, n_ctx=256) as context:
            await context.decode(b.tokens)
            return (await context.logits()).copy()

    found = asyncio.run(main())
    assert found.shape == (b.model.info.n_vocab,)
    assert np.array_equal(found, b.last_row())


@MULLAMA.row("example: tokenize", "`Tokenizer.encode`")
def _(b: Bench) -> None:
    assert b.model.tokenizer.encode(b.golden.prompts[1].text) == b.tokens


@MULLAMA.row("example: `build_chain`, `sample`, `accept`", "`Model.new_sampler`, `Sampler.sample`")
def _(b: Bench) -> None:
    context = b.held()
    sampler = b.model.new_sampler(temperature=0)
    assert sampler.sample(context) == b.golden.prompts[1].greedy[0]


@MULLAMA.row(
    "example: `token_is_eog`, `token_to_str`", "`Tokenizer.is_eog`, `Tokenizer.token_bytes`"
)
def _(b: Bench) -> None:
    tokenizer = b.model.tokenizer
    assert tokenizer.is_eog(tokenizer.eos) is True
    assert tokenizer.is_eog(b.tokens[-1]) is False
    pieces = b"".join(tokenizer.token_bytes(t) for t in b.tokens if not tokenizer.is_control(t))
    assert pieces.decode().strip() == b.golden.prompts[1].text.strip()


# -- context creation -----------------------------------------------------------------------------


@CREATION.row("shared weights, a state of its own each", "`Model.new_context`")
def _(b: Bench) -> None:
    one, other = b.context(), b.context()
    one.decode([5] * 20)
    other.decode(b.tokens)
    assert np.array_equal(other.logits(), b.last_row())
    assert one.tokens() == [5] * 20


@CREATION.row("recurrent models: several sequences, states apart", "`Capabilities.kv_remove`")
def _(b: Bench) -> None:
    with ic.load_model(b.pack("recurrent"), backend=b.backend) as model:
        fields = {**b.exact, "type_k": None, "type_v": None, "n_ctx": 128}
        fields = {name: value for name, value in fields.items() if value is not None}
        with (
            model.new_context(**fields, n_seq_max=2) as context,
            model.new_context(**fields) as one,
        ):
            context.decode(b.tokens, seq_id=0)
            context.decode([5] * 9, seq_id=1)
            context.decode_one(6, seq_id=0)
            one.decode([*b.tokens])
            one.decode_one(6)
            assert near(context, context.logits(), one.logits())


@CREATION.row("positions shifted, divided, kept", "`Context.seq_divide`, `Context.seq_keep`")
def _(b: Bench) -> None:
    context = b.context(n_seq_max=2, kv_unified=True)
    context.decode(b.tokens[:8])
    context.decode(b.tokens[:4], seq_id=1)
    context.seq_keep(0)
    assert (context.n_resident(0), context.n_resident(1)) == (8, 0)
    context.seq_divide(0, 0, -1, 2)
    assert context.seq_pos_max(0) == 3


@CREATION.row("graph scheduling over devices", "`ModelConfig.n_gpu_layers`")
@GO.row("`Config.NumGpuLayers`", "`ModelConfig.n_gpu_layers`")
def _(b: Bench) -> None:
    with ic.load_model(b.path, backend=b.backend, n_gpu_layers=0) as model:
        assert model.info.n_layer > 0
    if not b.model.capabilities.gpu_offload:
        ic.load_model(b.path, backend=b.backend, n_gpu_layers=1)
        raise AssertionError("layers went nowhere")


@CREATION.row("performance counters", "`Context.perf`, `Context.reset_perf`")
def _(b: Bench) -> None:
    context = b.held()
    context.decode_one(5)
    perf = context.perf()
    assert (perf.prefill_tokens, perf.decode_tokens) == (len(b.tokens), 1)
    assert perf.prefill_ms > 0
    context.reset_perf()
    assert context.perf().prefill_tokens == 0


@CREATION.row("result NULL: no model", "`SessionClosedError`")
def _(b: Bench) -> None:
    model = ic.load_model(b.path, backend=b.backend)
    model.close()
    raises(ic.SessionClosedError, lambda: model.new_context(n_ctx=64))


@CREATION.row("result NULL: n_batch and n_ubatch are 0", "`InvalidInputError`")
def _(b: Bench) -> None:
    assert raises(ic.InvalidInputError, lambda: b.context(n_batch=0)).field == "n_batch"
    assert raises(ic.InvalidInputError, lambda: b.context(n_ubatch=0)).field == "n_ubatch"


@CREATION.row("result NULL: n_seq_max above 256", "`InvalidInputError`")
def _(b: Bench) -> None:
    assert raises(ic.InvalidInputError, lambda: b.context(n_seq_max=257)).field == "n_seq_max"


@CREATION.row("result NULL: block size and head size", "`InvalidInputError`")
def _(b: Bench) -> None:
    head = b.model.info.n_embd // b.model.info.n_head
    fields = {"type_k": "q8_0", "type_v": "f16", "flash_attn": "on", "precision": None}
    if head % 32 == 0:  # the pack's heads fit: then it opens
        assert b.context(**fields).effective["type_k"] == "q8_0"
    else:
        assert raises(ic.InvalidInputError, lambda: b.context(**fields)).field == "type_k"
