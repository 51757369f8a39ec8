"""What each field of a config means: what docs, ``help()`` and the command line say of it.

A text is a phrase without a capital and a full stop, so that it can stand in a table; names of
fields and values stand in backticks.
"""

from __future__ import annotations

import inspect
import re
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    F = TypeVar("F", bound=Callable[..., object])

MODEL = {
    "n_gpu_layers": "number of layers to put on the GPU; -1 = all",
    "split_mode": "how several GPUs share the model: not at all, by layers, or by rows",
    "main_gpu": 'index of the main GPU, which holds everything with `split_mode="none"`',
    "tensor_split": "each GPU's share of the model",
    "device": "name of a device, as listed by `backends(devices=True)`",
    "use_mmap": "map the file into memory instead of reading it; replace such a file by renaming, never in place",
    "use_mlock": "lock the weights in RAM so that they are never swapped out",
    "check_tensors": "look for invalid values while loading",
    "check_in_child": "try the file in a child process first; by default, only files that were not seen before",
    "progress": "called with the fraction loaded, 0.0 to 1.0; return False to cancel",
    "backend_options": "options specific to one engine",
}

ADAPTER = {
    "path": "the LoRA adapter: a file, or a folder written by PEFT",
    "scale": "strength of the adapter",
}

CONTEXT = {
    "n_ctx": 'context window in tokens; by default, the model\'s trained window or 4,096, whichever is smaller; 0 = the trained window, "fit" = the largest that fits in memory',
    "n_batch": "maximum number of tokens in one engine call",
    "n_ubatch": "maximum number of tokens in one compute step",
    "n_seq_max": "number of sequences",
    "n_threads": "threads for generating",
    "n_threads_batch": "threads for reading the prompt",
    "rope_scaling_type": "how positions beyond the trained window are scaled",
    "rope_freq_base": "base frequency of RoPE; 0 = the model's own",
    "rope_freq_scale": "frequency factor of RoPE; 0 = the model's own",
    "yarn_ext_factor": "YaRN: extrapolation mix; -1 = the model's own",
    "yarn_attn_factor": "YaRN: attention factor; -1 = the model's own",
    "yarn_beta_fast": "YaRN: low correction dimension; -1 = the model's own",
    "yarn_beta_slow": "YaRN: high correction dimension; -1 = the model's own",
    "yarn_orig_ctx": "YaRN: the trained window in tokens; 0 = the model's own",
    "defrag_thold": "no longer supported by any engine: only None is accepted",
    "pooling_type": "how the token vectors of a text are combined into one",
    "attention_type": "causal (language models) or non-causal (encoders)",
    "flash_attn": "flash attention",
    "precision": 'arithmetic: "default" = the engine\'s own, "accurate" = its most exact, "fast" = less exact where that is faster',
    "type_k": "number format of the keys in the KV cache",
    "type_v": "number format of the values in the KV cache; a quantised one needs flash attention",
    "embeddings": "compute embeddings",
    "offload_kqv": "keep the KV cache and attention on the GPU",
    "op_offload": "run large operations on the GPU even for layers kept in RAM",
    "swa_full": "keep the whole cache of sliding-window layers",
    "kv_unified": "one cache for all sequences, instead of an equal part each",
    "no_perf": "do not measure times",
    "adapters": "LoRA adapters to start with",
    "on_oom": "when memory runs out: raise an error, or try smaller contexts",
    "n_ctx_min": 'smallest window that `on_oom="shrink"` may choose, in tokens',
    "backend_options": "options specific to one engine",
}

SESSION = {
    "profile_id": "a label you choose; part of the session's identity",
    "prompt_format": "a label you choose; part of the session's identity",
    "add_bos": "put a BOS token in front; None = what the tokenizer does by default",
    "overflow": 'when the window is full: raise an error, drop the oldest part of the prompt ("truncate"), or drop the oldest text while generating too ("shift")',
}

SAMPLING = {
    "temperature": "0 always picks the likeliest token; higher values vary more",
    "top_k": "keep the k likeliest tokens; 0 = off",
    "top_p": "keep the likeliest tokens up to this total probability; 1 = off",
    "min_p": "drop tokens less likely than this fraction of the likeliest; 0 = off",
    "typical_p": "keep the most typical tokens up to this total probability; 1 = off",
    "top_n_sigma": "keep logits within n standard deviations of the highest; -1 = off",
    "xtc_probability": "chance of dropping all likely tokens except the least likely of them; 0 = off",
    "xtc_threshold": "probability above which xtc counts a token as likely",
    "dynatemp_range": "how far the temperature moves with the entropy; 0 = off",
    "dynatemp_exponent": "exponent of the dynamic temperature",
    "mirostat": "version of mirostat; 0 = off",
    "mirostat_tau": "mirostat: target surprise",
    "mirostat_eta": "mirostat: learning rate",
    "adaptive_p_target": "adaptive-p: the probability that chosen tokens have on average; -1 = off",
    "adaptive_p_decay": "adaptive-p: how much of that average each step keeps, 0 to 0.99",
    "repeat_penalty": "divides the logits of recent tokens; 1 = off",
    "frequency_penalty": "subtracted from a token's logit for each time it has occurred; 0 = off",
    "presence_penalty": "subtracted once from the logit of each token that has occurred; 0 = off",
    "penalty_last_n": "how many tokens the penalties look back; -1 = the whole context, 0 = none",
    "dry_multiplier": "DRY: strength of the penalty on repeated sequences; 0 = off",
    "dry_base": "DRY: how fast the penalty grows with the length of a repetition",
    "dry_allowed_length": "DRY: repetitions up to this length are not penalized",
    "dry_penalty_last_n": "DRY: how many tokens to look back; -1 = the whole context",
    "dry_sequence_breakers": "DRY: texts that end a repetition",
    "logit_bias": "values added to the logits of these token ids; -inf, or less than float32 holds, forbids one",
    "seed": "makes random choices repeatable; by default, a seed is drawn and reported",
    "min_keep": "minimum number of tokens that typical, top_p, min_p and xtc keep",
    "ignore_eos": "never choose an end-of-generation token",
    "no_repeat_ngram_size": "never repeat n tokens in a row, prompt included; 0 = off",
    "implementation": "portable (NumPy), native (the engine's own) or auto, which is portable",
}

DECODE = {
    "max_tokens": "maximum number of tokens to generate; by default, until the window is full",
    "min_tokens": "only a finished `response_format` may end the text before this many tokens",
    "stop": "strings that end the text and are left out of it",
    "stop_tokens": "token ids that end the text",
    "include_stop": "keep the stop string at the end of the text",
    "sampling": 'a `SamplingConfig`, whose fields may also be given directly, or "model" for what the model\'s files recommend',
    "logprobs": "report this many of the likeliest tokens at each step, besides the chosen one",
    "prompt_logprobs": "evaluate the prompt again and report how likely each of its tokens was, besides this many of the likeliest",
    "processors": "objects with `apply(logits) -> logits`, or callables `f(input_ids, logits) -> logits`",
    "response_format": "a JSON schema, regex, choice, grammar or class that the text must follow",
    "special_text": "show control tokens as text",
    "speculative": 'guess tokens ahead: "auto" = where that pays, or a `SpeculativeConfig`',
    "timeout": "stop this many seconds after the call, including waiting",
}

CHAT = {
    "tools": 'the tools that the model may call: `{"type": "function", "function": {"name", "parameters"}}`',
    "tool_choice": '"auto", "none", "required", or the name of the tool to call',
    "reasoning": 'the model\'s thoughts: separate from the text ("parsed"), left in it ("text"), or "off"',
    "reasoning_budget": "maximum number of tokens in a thought, which is then closed",
    "chat_template": "a Jinja template to use in place of the model's own",
    "template_variables": "additional variables for the template",
    "parse_special": "read the text of control tokens in messages as those tokens",
}

PREFIX = {
    "text": "the text that stays the same from turn to turn",
    "tokens": "its token ids instead, used as they are",
    "manifest": "what you state about its identity",
    "parse_special": "read the text of control tokens as those tokens",
    "on_mismatch": "if the identity differs: start cold and report it, or raise `ManifestMismatchError`",
    "cache_class": "a label you choose; shown in the manifest's segment",
}

SUFFIX = {
    "text": "the text that changes from turn to turn",
    "tokens": "its token ids instead, used as they are",
    "manifest": "what you state about its identity",
    "mode": "replace the earlier suffix and what was generated, or add to the end",
    "boundary": "tokenize prefix and suffix as one text, or separately",
    "parse_special": "read the text of control tokens as those tokens",
    "cache_class": "a label you choose; shown in the manifest's segment",
}

SPECULATIVE = {
    "kind": "where guesses come from: the text so far, or a smaller model",
    "n_draft": "maximum number of tokens guessed at once",
    "n_gram": "prompt_lookup: longest run of tokens to look for",
    "draft_model": "draft_model: a loaded `Model` with the same vocabulary",
}

POOL = {
    "n_parallel": "number of sessions that run at the same time, in one engine call",
    "n_cells": "number of tokens that all sessions can hold together, at least `n_ctx`; None = `n_parallel * n_ctx`, or as many as fit in memory",
    "n_step_tokens": "maximum number of tokens in one engine call; None = chosen by measuring, so that a long prompt does not hold up the others",
    "max_step_ms": "how long an engine call with a piece of a prompt beside sessions that generate is to take, in milliseconds, as far as earlier calls tell; None = near 2.5 times the call without the piece, at most 250",
    "max_waiting": "number of calls that may wait for a place; one more raises `PoolFullError`",
    "batching": "run several sessions in one call: always, never, or where that is faster here",
    "batch_invariant": "each session computes exactly what it would compute alone; refused where the engine cannot guarantee that",
    "cache_bytes": "RAM, in bytes, for sessions that give up their cells; 0 = none",
    "cache_dir": "a folder for sessions that no longer fit in RAM; None = none",
    "cache_dir_bytes": "largest size of that folder in bytes; the files unused longest go first",
    "reader_timeout": "seconds after which a stream that nobody reads is cancelled; None = never",
    "isolate": "run the engine in a separate process, restarted when it dies",
    "step_timeout": "with `isolate`: seconds that a step may take longer than expected",
    "load_timeout": "with `isolate`: seconds that loading may take",
    "max_restarts": "how many times a failed engine is reopened within `restart_window`",
    "restart_window": "seconds over which restarts are counted",
    "context": "the `ContextConfig` of one session, whose fields may also be given directly",
}

TEXTS: Mapping[str, Mapping[str, str]] = MappingProxyType({
    "ModelConfig": MODEL,
    "AdapterSpec": ADAPTER,
    "ContextConfig": CONTEXT,
    "SessionOptions": SESSION,
    "SamplingConfig": SAMPLING,
    "DecodeConfig": DECODE,
    "ChatRequest": CHAT,
    "SpeculativeConfig": SPECULATIVE,
    "PoolConfig": POOL,
    "PrefixInput": PREFIX,
    "SuffixInput": SUFFIX,
})  # fmt: skip
"""The texts, by class."""

HEADING = "Keywords of "
"""How a list of fields begins in a docstring."""
_OPTION = re.compile(r'`([a-z]+(?:_[a-z]+)+)(?:="([a-z]+)")?`')
_NAMES = {"SessionOptions": "the session", "ChatRequest": "the chat"}


def sentence(cls: str, field: str) -> str:
    """Return the text of a field as a sentence, its fields named as options."""
    text = _OPTION.sub(_option, TEXTS[cls][field]).replace("`", "")
    return text[0].upper() + text[1:] + "."


def _option(found: re.Match[str]) -> str:
    name, value = found[1], found[2]
    return f"--{name.replace('_', '-')}" + (f" {value}" if value else "")


def lists_fields(*classes: str) -> Callable[[F], F]:
    """Return a decorator that ends a docstring with the fields of ``classes``."""

    def add(function: F) -> F:
        if function.__doc__:  # there is none under python -OO
            parts = [inspect.cleandoc(function.__doc__), *(_listed(cls) for cls in classes)]
            function.__doc__ = "\n\n".join(parts) + "\n"
        return function

    return add


def _listed(cls: str) -> str:
    rows = (f"  {name}: {text}" for name, text in TEXTS[cls].items())
    return "\n".join([f"{HEADING}{_NAMES.get(cls, cls)}:", *rows])
