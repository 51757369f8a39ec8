"""Saving, restoring and forking what a session holds, beside `Llama.save_state`."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pairs
import rivals

import infercore as ic
from infercore.measuring import parts

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

MIB = 2**20


def saving(path: str, model: ic.Model, options: argparse.Namespace) -> list[pairs.Row]:
    n, fields = options.tokens, {"n_ctx": options.tokens + 128, "n_threads": options.threads}
    with model.new_session(**fields) as session, tempfile.TemporaryDirectory() as folder:
        session.ensure_prefix(parts.text_of(model.tokenizer, n))
        held, snapshot = session.explain_context().resident_tokens, session.snapshot()
        file = Path(folder) / "session.kv"
        saves: dict[str, Callable[[], float]] = {
            "Session.snapshot": lambda: parts.ms(session.snapshot),
            "Session.save, a file": lambda: parts.ms(lambda: session.save(file)),
        }
        loads: dict[str, Callable[[], float]] = {
            "Session.restore": lambda: parts.ms(lambda: session.restore(snapshot)),
            "Session.load, a file": lambda: parts.ms(lambda: session.load(file)),
        }
        notes = {"Session.snapshot": f"{len(snapshot.data) / MIB:.1f} MiB"}
        if not os.path.isdir(path):
            gpu = options.n_gpu_layers
            rival = rivals.llama(
                path, n_ctx=fields["n_ctx"], n_threads=options.threads, n_gpu_layers=gpu
            )
            rival.eval(parts.ids_of(model.tokenizer, held))
            state = rival.save_state()
            saves["Llama.save_state"] = lambda: parts.ms(rival.save_state)
            loads["Llama.load_state"] = lambda: parts.ms(lambda: rival.load_state(state))
            size = state.llama_state_size + state.scores.nbytes
            notes["Llama.save_state"] = f"{size / MIB:.1f} MiB"
        common: dict[str, Any] = {"model": pairs.name_of(path), "unit": "ms"}
        common |= {"rounds": options.rounds}
        figure = f"save {held} tokens"
        rows = pairs.compare(saves, figure=figure, notes=notes, own=list(saves)[:2], **common)
        figure = f"restore {held} tokens"
        return rows + pairs.compare(loads, figure=figure, own=list(loads)[:2], **common)


def forking(path: str, model: ic.Model, options: argparse.Namespace) -> list[pairs.Row]:
    n, fields = options.tokens, {"n_threads": options.threads}
    text = parts.text_of(model.tokenizer, n)
    with (
        model.new_session(n_ctx=n + 1024, n_seq_max=2, kv_unified=True, **fields) as shared,
        model.new_session(n_ctx=n + 1024, **fields) as alone,
    ):
        for session in (shared, alone):
            session.ensure_prefix(text)
        held = shared.explain_context().resident_tokens
        return pairs.compare(
            {
                "into a free sequence": lambda: parts.fork_ms(shared),
                "into a new context": lambda: parts.fork_ms(alone),
            },
            model=pairs.name_of(path),
            figure=f"fork {held} tokens",
            unit="ms",
            rounds=options.rounds,
            own=(),
        )


def main() -> None:
    parser = pairs.parser(__doc__, rounds=9)
    parser.add_argument("models", nargs="+", help="GGUF files and OpenVINO folders")
    parser.add_argument("--tokens", type=int, default=2000, help="tokens held")
    options = parser.parse_args()
    rows = []
    for path in options.models:
        gpu = {} if os.path.isdir(path) else {"n_gpu_layers": options.n_gpu_layers}
        with ic.load_model(path, **gpu) as model:
            rows += saving(path, model, options) + forking(path, model, options)
    pairs.finish("state", rows, options)


if __name__ == "__main__":
    main()
