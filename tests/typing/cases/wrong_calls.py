"""Calls that type checkers must report: each line that ends in ``# wrong``, and no other."""

from __future__ import annotations

import infercore as ic

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

pool = ic.open_pool("m")
pool.open_session(n_ctx=512)  # wrong
pool.open_session(overflow="drop")  # wrong
pool.embed(["a"], pooling="none")  # wrong

for chunk in session.decode():
    text = chunk.texts  # wrong
    stops = chunk.finish_reason == "lenght"  # wrong


async def later() -> None:
    """The same calls, awaited."""
    async with ic.aopen_session("m") as waiting:
        waiting.decode(max_token=3)  # wrong
        waiting.chat([], reasoning="hidden")  # wrong
        await waiting.generate("a", top_k=0.5)  # wrong
