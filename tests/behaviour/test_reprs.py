"""Objects say in one line what they are, open and closed."""

from __future__ import annotations

import re

import infercore as ic
from infercore.locating import title


def test_objects_say_what_they_are(backend_name, pack_path):
    model = ic.load_model(pack_path, backend=backend_name)
    expected = rf"<Model {title(pack_path)} on {backend_name}, \w+ [\d.]+[KM], n_ctx_train \d+>"
    assert re.fullmatch(expected, repr(model))
    assert repr(model.tokenizer) == f"<Tokenizer of {model.tokenizer.n_vocab} tokens>"
    session = model.new_session(n_ctx=128)
    assert repr(session) == "<Session EMPTY 0/128 tokens>"
    n = session.ensure_prefix("Once upon a time").prefix_tokens
    assert repr(session) == f"<Session PREFIXED {n}/128 tokens>"
    assert repr(session.context) == f"<Context on {backend_name}, {n}/128 tokens, n_seq_max 1>"
    stream = session.decode(max_tokens=3, temperature=0)
    next(stream)
    assert re.fullmatch(r"<Generation \d/3 tokens>", repr(stream))
    list(stream)
    assert repr(stream) == "<Generation 3/3 tokens finished>"
    assert repr(session).startswith("<Session DECODED ")
    assert "Session DECODED" in session.explain_context()._repr_html_()
    context = session.context
    session.close()
    assert repr(session) == "<Session closed>"
    assert repr(context) == "<Context closed>"
    with model.new_pool(n_parallel=2, n_ctx=64) as pool:
        shared = pool.open_session()
        shared.ensure_prefix("Once")
        assert re.fullmatch(
            r"<SessionPool n_open 1, n_running 0, n_waiting 0, \d+/\d+ cells>", repr(pool)
        )
        assert repr(shared).startswith("<Session PREFIXED ")
        assert re.match(r"<Generation 0/3 tokens", repr(shared.decode(max_tokens=3)))
    assert repr(pool) == "<SessionPool closed>"
    sampler = model.new_sampler(temperature=0.5, seed=3)
    assert repr(sampler) == "<Sampler portable, temperature 0.5, seed 3>"
    sampler.close()
    assert repr(sampler) == "<Sampler closed>"
    model.close()
    assert repr(model) == "<Model closed>"


async def awaited(model):
    async with ic.aopen_session(model, n_ctx=64) as session:
        before = repr(session)
        stream = session.decode(max_tokens=2) if session.state != "EMPTY" else None
        assert stream is None
    return before, repr(session)


def test_awaited_sessions_too(model):
    import asyncio

    assert asyncio.run(awaited(model)) == (
        "<AsyncSession EMPTY 0/64 tokens>",
        "<AsyncSession closed>",
    )
