"""The demo on the real engines."""

from __future__ import annotations

import json

import pack
from infercore.cli import demo


def test_second_turn_reuses_the_prefix(run, backend_name, pack_path) -> None:
    result = run("demo", "--backend", backend_name, "--json", "--max-tokens", "32")
    assert result.exit_code == 0, result.stderr
    ((cold, warm),) = (told["turns"] for told in json.loads(result.stdout)["runs"])
    n_prefix = cold["prefilled_tokens"] - warm["prefilled_tokens"]
    assert cold["reused_tokens"] == 0
    assert warm["reused_tokens"] >= n_prefix - 1 > 500
    assert cold["text"].startswith(" Tom, who never went anywhere without a grey goose.")
    assert warm["text"].startswith(" Greta, who never went anywhere without a black dog.")


def test_engines_tell_the_same_story(run) -> None:
    for name in pack.FORMATS:
        pack.need_backend(name)
    pack.need_pack()
    names = [part for name in pack.FORMATS for part in ("--backend", name)]
    result = run("demo", *names, "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["same_text"] is True


def test_texts_fill_the_window_with_room_to_spare(model) -> None:
    assert 500 < len(model.tokenizer.encode(demo.PREFIX)) < 620
    for suffix in demo.TURNS.values():
        n_prompt = len(model.tokenizer.encode(demo.PREFIX + suffix))
        assert n_prompt + demo.MAX_TOKENS <= demo.N_CTX
