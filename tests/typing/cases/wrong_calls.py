"""Calls that type checkers must report: each line that ends in ``# wrong``, and no other."""

from __future__ import annotations

import infercore as ic
from infercore.serve import ServeConfig, create_app

ic.load_model("m", n_gpu_layer=3)  # wrong
ic.load_model("m", n_ctx=4096)  # wrong
ic.load_model("m", split_mode="rows")  # wrong
ic.load_model("m", use_mmap="yes")  # wrong
ic.load_model("m", progress=5)  # wrong

model = ic.load_model("m")
model.new_context(n_ctx="many")  # wrong
model.new_context(n_ctx="fits")  # wrong
model.new_context(type_k="q9")  # wrong
model.new_context(flash_attn=True)  # wrong
model.new_context(overflow="shift")  # wrong
model.new_session(n_ctx="many")  # wrong
model.new_session(n_thread=2)  # wrong
model.new_session(n_gpu_layers=2)  # wrong
model.new_session(overflow="shrink")  # wrong
model.new_session(add_bos="no")  # wrong
model.new_sampler(temperatur=0.0)  # wrong
model.new_sampler(mirostat=3)  # wrong
model.new_pool(n_seq_max=4)  # wrong
model.new_pool(batching="sometimes")  # wrong
model.new_pool(n_parallel="8")  # wrong
model.plan_memory(n_context=512)  # wrong

ic.open_session("m", n_ctxt=512)  # wrong
ic.open_session("m", temperature=0.0)  # wrong
ic.aopen_session("m", n_ctx=1.5)  # wrong
ic.open_pool("m", pooling_type="mean")  # wrong
ic.open_pool("m", n_paralel=2)  # wrong
ic.aopen_pool("m", cache_bytes="1G")  # wrong
ic.aopen_context(model, n_batch="all")  # wrong
ic.plan_memory("m", n_ctx=[512])  # wrong
ic.embed(model, ["a"], pooling="max")  # wrong
ic.embed(model, ["a"], n_ctx=512)  # wrong
ic.rerank(model, "q", ["d"], topn=1)  # wrong
ic.backends(device=True)  # wrong
ic.get_backend(5)  # wrong
ic.get_backend("llamacpp").load_model("m", n_gpu_layer=3)  # wrong
ic.set_observer("print")  # wrong

ic.ContextConfig(type_k="q9")  # wrong
ic.ContextConfig(rope_scaling_type="yarn2")  # wrong
ic.ModelConfig(n_gpu_layers="all")  # wrong
ic.DecodeConfig(max_token=3)  # wrong
ic.DecodeConfig(sampling="models")  # wrong
ic.SamplingConfig(implementation="gpu")  # wrong
ic.SpeculativeConfig(kind="lookup")  # wrong
ic.PoolConfig(batching=True)  # wrong
ic.SuffixInput(text="", mode="insert")  # wrong
ic.PrefixInput(text="", on_mismatch="warm")  # wrong

session = model.new_session()
session.decode(max_token=3)  # wrong
session.decode(temperature="hot")  # wrong
session.decode(stop=5)  # wrong
session.decode(stop_tokens="</s>")  # wrong
session.decode(speculative="always")  # wrong
session.decode(n_ctx=512)  # wrong
session.generate("a", max_tokens="3")  # wrong
session.generate(5)  # wrong
session.chat([], reasoning="hidden")  # wrong
session.chat([], tool_choices="none")  # wrong
session.chat("hello")  # wrong
session.sample_many(2, seeds=1)  # wrong
session.infill("a", "b", top_q=1)  # wrong
session.run_tools([], [], tools=[])  # wrong
session.ensure_prefix(["a"])  # wrong
session.ensure_prefix("a", timeout="1s")  # wrong
session.prefill_suffix("a", time_out=1.0)  # wrong
session.beam_search(2, max_token=4)  # wrong
session.beam_search("2", max_tokens=4)  # wrong
session.evict("0", 4)  # wrong
session.fork(n_ctx=512)  # wrong
session.restore(b"state")  # wrong
session.save(5)  # wrong
session.chat([{"role": "user", "content": "a"}], tool_choice=5)  # wrong
session.run_tools([], [print], max_round=2)  # wrong

pool = ic.open_pool("m")
pool.open_session(n_ctx=512)  # wrong
pool.open_session(overflow="drop")  # wrong
pool.embed(["a"], pooling="none")  # wrong
pool.open_session("a", "b")  # wrong

create_app(model)  # wrong
create_app({"a": pool}, max_tokens="8")  # wrong
create_app({"a": pool}, max_token=8)  # wrong
create_app({"a": 5})  # wrong
ServeConfig(api_keys="secret", max_tokens="8")  # wrong

context = model.new_context()
context.decode("text")  # wrong
context.decode([1], logits="some")  # wrong
context.decode_spans([(0, [1], "some")])  # wrong
context.decode_one("a")  # wrong
context.seq_copy("0", 1)  # wrong
context.set_threads("2")  # wrong
model.tokenizer.encode(5)  # wrong
model.tokenizer.decode("text")  # wrong
model.tokenizer.apply_chat_template("hello")  # wrong

for chunk in session.decode():
    text = chunk.texts  # wrong
    stops = chunk.finish_reason == "lenght"  # wrong


async def later() -> None:
    """The same calls, awaited."""
    async with ic.aopen_session("m") as waiting:
        waiting.decode(max_token=3)  # wrong
        waiting.chat([], reasoning="hidden")  # wrong
        await waiting.generate("a", top_k=0.5)  # wrong
        await waiting.run_tools([], [], max_round=2)  # wrong
        await waiting.sample_many(2, seeds=1)  # wrong
        waiting.infill("a", "b", top_q=1)  # wrong
    ic.aopen_pool("m", n_paralel=2)  # wrong
    async with ic.aopen_pool("m") as crowd:
        crowd.open_session(overflow="drop")  # wrong
    async with ic.aopen_context(model) as held:
        await held.decode("text")  # wrong
