"""The first meeting of a length: a turn over a prefix of an unseen length, and over it again.

Engines prepare for shapes that they meet first. In each round the prefix has a length that no
input had before; then another text of the same length takes the same turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pairs

import infercore as ic
from infercore.measuring import parts

if TYPE_CHECKING:
    import argparse

UNSEEN, SEEN = "unseen length", "the same again"
FIRST = 67  # no power of two, nor near one
STEP = 5


def measure(path: str, options: argparse.Namespace) -> list[pairs.Row]:
    """Milliseconds of cold and warm turns, unseen and seen."""
    found: dict[str, dict[str, list[float]]] = {
        kind: {UNSEEN: [], SEEN: []} for kind in ("cold", "warm")
    }
    with (
        ic.load_model(path) as model,
        model.new_context(n_ctx=1024, n_threads=options.threads) as context,
    ):
        ids = parts.ids_of(model.tokenizer, 900)
        context.decode(ids[: options.suffix])  # the suffix's length is known
        context.decode_one(ids[0])
        for i in range(options.rounds):
            n = FIRST + STEP * i
            for j, name in enumerate((UNSEEN, SEEN)):
                prefix = ids[7 * i + j : 7 * i + j + n]
                suffix = ids[500 + i + j : 500 + i + j + options.suffix]
                cold = parts.prefill_s(context, prefix)
                warm = parts.ms(lambda s=suffix: context.decode(s))
                found["cold"][name].append(cold * 1e3)
                found["warm"][name].append(warm)
    rows = []
    for kind, values in found.items():
        what = "prefix" if kind == "cold" else f"{options.suffix} tokens after it"
        rows += pairs.rows_of(values, model=pairs.name_of(path), figure=what, unit="ms")
    return rows


def main() -> None:
    parser = pairs.parser(__doc__, rounds=9)
    parser.add_argument("models", nargs="+", help="GGUF files and OpenVINO folders")
    parser.add_argument("--suffix", type=int, default=32)
    options = parser.parse_args()
    rows = [row for path in options.models for row in measure(path, options)]
    pairs.finish("lengths", rows, options)


if __name__ == "__main__":
    main()
