"""A program in the documented style, in which type checkers find nothing."""

from __future__ import annotations

import asyncio
import sys

import numpy as np

import infercore as ic
from infercore.serve import ServeConfig, create_app


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def program(path: str) -> list[str]:
    """Use most of the interface once."""
    texts = []
    with ic.load_model(path, n_gpu_layers=0, use_mmap=True) as model:
        plan = model.plan_memory(n_ctx=512, type_k="f16")
        texts.append(f"{plan.total_bytes} of {model.info.n_params}")
        with model.new_session(n_ctx=512, n_threads=2, overflow="shift") as session:
            status = session.ensure_prefix("You are a careful reviewer.\n")
            session.prefill_suffix(ic.SuffixInput(text="Review this: ...", mode="append"))
            for chunk in session.decode(max_tokens=16, temperature=0, stop=["\n\n"], logprobs=2):
                texts.append(chunk.text)
                if chunk.finish_reason == "length" and chunk.usage is not None:
                    texts.append(str(chunk.usage.completion_tokens + status.reused_tokens))
            messages = [ic.Message(role="user", content="Hi")]
            with session.fork() as twin:
                answer = "".join(c.text for c in twin.chat(messages, max_tokens=8, seed=1))
            came = session.run_tools(messages, [add], max_rounds=2, max_tokens=8)
            texts += [answer, *(str(message.content) for message in came)]
            texts.append(session.generate("And: ", max_tokens=8, stop="."))
            texts += [one.text for one in session.sample_many(2, max_tokens=4, seed=5)]
        with model.new_context(ic.ContextConfig(n_ctx=64)) as context:
            context.decode(model.tokenizer.encode("one two"))
            best = int(np.argmax(context.logits()))
            context.decode_one(best)
        with model.new_pool(n_parallel=2, n_ctx=256, batching="auto") as pool:
            shared = pool.open_session(overflow="truncate", namespace="a")
            texts.append(shared.generate("Once", max_tokens=4, top_k=1))
            texts.append(repr(pool.stats()))
            application = create_app({"model": pool}, ServeConfig(max_tokens=64))
            texts.append(str(callable(application)))
    return texts


async def awaited(path: str) -> str:
    """Use the asynchronous interface."""
    async with ic.aopen_session(path, n_ctx=256, n_gpu_layers=0) as session:
        await session.ensure_prefix("Once upon a time")
        text = "".join([chunk.text async for chunk in session.decode(max_tokens=4)])
        return text + await session.generate(" and then", max_tokens=4)


if __name__ == "__main__":
    sys.exit("\n".join([*program(sys.argv[1]), asyncio.run(awaited(sys.argv[1]))]))
