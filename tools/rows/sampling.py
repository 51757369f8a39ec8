"""Rows of what peers test of sampling and constraints."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

import infercore as ic
from rows.bench import SCHEMA, STORY, greedy, ids_of, raises, says, text_of
from rows.sections import (
    SAMPLING,
)

if TYPE_CHECKING:
    from rows.bench import Bench


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
