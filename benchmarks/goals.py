"""What the figures have to keep, and whether they do."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import attrs

from infercore.measuring.stats import number

if TYPE_CHECKING:
    from collections.abc import Sequence


def rows_of(told: dict[str, dict[str, Any]], *names: str) -> list[dict[str, Any]]:
    """Return the rows of the results with these names, as far as there are any."""
    return [row for name in names if name in told for row in told[name]["rows"]]


@attrs.frozen
class Goal:
    """A bound on one figure: which file, model, figure and contender, and what it has to keep."""

    says: str
    part: str
    figure: str
    by: str
    bound: float
    at_least: bool = False
    model: str = ".*"

    def line(self, told: dict[str, dict[str, Any]]) -> str:
        """A line of the table of goals, for each row that matches."""
        found = [
            row
            for row in rows_of(told, self.part)
            if re.fullmatch(self.figure, row["figure"])
            and re.fullmatch(self.model, row["model"])
            and row["by"] == self.by
        ]
        return "\n".join(self._cells(row) for row in found)

    def _cells(self, row: dict[str, Any]) -> str:
        value = row["value"]
        kept = value["median"] >= self.bound if self.at_least else value["median"] <= self.bound
        sign = ">=" if self.at_least else "<="
        between = f" ({number(value['low'])} to {number(value['high'])})" if value["n"] > 1 else ""
        unit = f" {row['unit']}" if row["unit"] else ""
        measured = f"{number(value['median'])}{between}{unit}"
        verdict = "met" if kept else "**missed**"
        bound = f"{sign} {number(self.bound)}{unit}"
        return f"| {self.says} | {row['model']} | `{self.by}` | {bound} | {measured} | {verdict} |"


SPREAD = "warm-prefix-ir-spread"
PREFILL = r"prefill .*, ratio"
OF_COMES = " / LLMPipeline as it comes"
COMES, ACCURATE = f"infercore{OF_COMES}", "infercore, accurate / LLMPipeline, alike"
UNSEEN = "unseen length / the same again"
DECODE, WARM = r"decode .*, ratio", r"warm, 2048 .*, ratio"
MORE = r"a token, more than by hand"
EIGHT, OWNER = r"8 sessions.*, ratio", "the pool's thread"
SERVE = "infercore serve"
POOL, ALONE, BETTER = "sessions of a pool", "one session alone", "the better by hand"
PIPELINE = "ContinuousBatchingPipeline"
ALIKE, CHAT = "infercore / LLMPipeline, alike", "infercore / create_chat_completion"
GOALS = (
    Goal("decode", "throughput-gguf", DECODE, "infercore / ctypes loop", 0.97, True),
    Goal("decode", "throughput-gguf", DECODE, "infercore / Llama.generate", 1.0, True),
    Goal("decode", "throughput-gguf", DECODE, "infercore / Llama.create_completion", 1.0, True),
    Goal(
        "decode, a session",
        "throughput-gguf",
        DECODE,
        "infercore session / ctypes loop",
        0.97,
        True,
    ),
    Goal("decode", "throughput-bench", DECODE, "infercore / Llama.generate", 0.99, True),
    Goal("decode", "throughput-bench", DECODE, "infercore / llama-bench", 0.99, True),
    Goal("decode", "throughput-bench", DECODE, "infercore bench / llama-bench", 0.99, True),
    Goal("decode, 1B", "throughput-1b", DECODE, "infercore / ctypes loop", 0.97, True),
    Goal("decode, 1B", "throughput-1b", DECODE, "infercore / Llama.generate", 1.0, True),
    Goal("a token's time over the ctypes loop's", "layer", MORE, "infercore", 15.0),
    Goal("prefill, by default", "throughput-ir", PREFILL, COMES, 0.97, True),
    Goal("decode, by default", "throughput-ir", DECODE, COMES, 0.97, True),
    Goal("decode, a session", "throughput-ir", DECODE, f"infercore session{OF_COMES}", 0.97, True),
    Goal("prefill, accurate", "throughput-ir", PREFILL, ACCURATE, 1.0, True),
    Goal("decode, accurate", "throughput-ir", DECODE, ACCURATE, 1.0, True),
    Goal("prefill, 1B, by default", "as-it-comes-1b", PREFILL, COMES, 0.97, True),
    Goal("decode, 1B, by default", "as-it-comes-1b", DECODE, COMES, 0.97, True),
    Goal("prefill, 1B, accurate", "as-it-comes-1b", PREFILL, ACCURATE, 1.0, True),
    Goal("decode, 1B, accurate", "as-it-comes-1b", DECODE, ACCURATE, 1.0, True),
    Goal("fork of 2,000 tokens", "as-it-comes-fork", r"fork .*", "into a new context", 20.0),
    Goal("a warm turn, 2,048 + 32 tokens", "as-it-comes-warm", WARM, COMES, 0.8),
    Goal("a warm turn, other lengths", "as-it-comes-warm-spread", WARM, COMES, 0.8),
    Goal("a prefix of an unseen length", "as-it-comes-lengths", r".*, ratio", UNSEEN, 1.15),
    Goal("decode, 1B", "throughput-1b", DECODE, ALIKE, 0.98, True),
    Goal("a warm turn, 2,048 + 32 tokens", "warm-prefix-ir", WARM, ALIKE, 1 / 1.5),
    Goal("a warm turn, other lengths", SPREAD, WARM, ALIKE, 1 / 1.5),
    Goal("agent loop, hybrid", "agent-loop-hybrid", r"edited .* all, ratio", CHAT, 1 / 5),
    Goal("agent loop, dense", "agent-loop", r"edited .* all, ratio", CHAT, 1 / 5),
    Goal("fork of 2,000 tokens", "state", r"fork .*", "into a free sequence", 20.0),
    Goal("fork of 2,000 tokens", "state", r"fork .*", "into a new context", 20.0),
    Goal("import", "import-time", r"import time", "infercore", 150.0),
    Goal("8 sessions", "pool-together", EIGHT, f"{POOL} / {ALONE}", 4.5, True, r".*-ir"),
    Goal("8 sessions", "pool-together", EIGHT, f"{POOL} / {PIPELINE}", 0.95, True),
    Goal("16 sessions", "pool-together-16", r"16 .*, ratio", f"{POOL} / {PIPELINE}", 1.2, True),
    Goal("8 sessions", "pool-together", EIGHT, f"{POOL} / {ALONE}", 2.3, True, r".*q4_0.*"),
    Goal("8 sessions", "pool-together", EIGHT, f"{POOL} / {ALONE}", 2.5, True, r".*f16.*"),
    Goal("8 sessions", "pool-together", EIGHT, f"{POOL} / {BETTER}", 0.95, True, r".*q8_0.*"),
    Goal("8 sessions", "pool-server", EIGHT, f"{POOL} / llama-server", 0.95, True),
    Goal("8 sessions", "pool-batched-bench", EIGHT, f"{POOL} / llama-batched-bench", 0.95, True),
    Goal("HTTP, first token", "serving-added", r"first token.*", "added by HTTP", 3.0),
    Goal("HTTP, a later piece", "serving-added", r"a later piece", "added by HTTP", 0.2),
    Goal("8 clients", "serving-server", r"8 clients.*", f"{SERVE} / llama-server", 1.0, True),
    Goal(
        "8 clients, the same kernels",
        "serving-server-sound",
        r"8 clients.*",
        f"{SERVE} / llama-server",
        1.0,
        True,
    ),
    Goal("a warm turn", "serving-server", r"first.*, ratio", f"{SERVE} / llama-server", 1.0),
    Goal("8 clients", "serving-python", r"8 clients.*", f"{SERVE} / llama_cpp.server", 3.0, True),
    Goal("2 to 6 sessions", "pool-few", r".*, ratio", "auto / turns", 0.97, True),
    Goal("eight agents", "pool-agents", r".*, ratio", f"{POOL} / Llama", 1 / 3),
    Goal("eight agents", "pool-agents", r".*, ratio", f"{POOL} / LLMPipeline", 1 / 3),
    Goal("a resident prefix", "pool-resident", r".*, ratio", "resident / cold", 0.05),
    Goal("lost cells", "pool-moved", r".*, ratio", "moved out and back / evaluated again", 0.1),
    Goal("a long prompt, p99 of gaps", "pool-gap", r".*", "p99 gap / median gap before", 2.5),
    Goal("a long prompt, its first token", "pool-gap", r".*", "its first token / alone", 3.0),
    Goal("Python a generated token", "pool-python", r"a generated .*", OWNER, 15.0),
    Goal("Python a prompt token", "pool-python", r"a prompt token", OWNER, 1.5),
    Goal("interleaved tokens", "pool-books", r".*", "the slowest", 1.0),
    Goal("a token's time over the ctypes loop's", "pool-layer", MORE, "infercore", 2.5),
    Goal("a session", "pool-layer", MORE, "infercore session", 10.0),
)


def tell(part: str, rows: Sequence[Any]) -> None:
    """Print the goals that ``rows``, the figures of ``part``, have to keep."""
    told = {part: {"rows": [attrs.asdict(row) for row in rows]}}
    for goal in GOALS:
        line = goal.line(told)
        if line:
            print(line)
