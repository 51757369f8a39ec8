"""What each call takes as keywords; written by ``tools/build_fields.py``, not by hand."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Mapping, Sequence

    from infercore.session.base import Overflow
    from infercore.session.chatting import Reasoning
    from infercore.values.config import (
        AdapterSpec,
        ContextConfig,
        KnownKVType,
        KVType,
        PoolingType,
        SamplingConfig,
        SpeculativeConfig,
    )


class ModelOnlyFields(TypedDict, total=False):
    """Those of a model, for calls that open more than it."""

    n_gpu_layers: int | None
    """Number of layers to put on the GPU; -1 = all."""
    split_mode: Literal["none", "layer", "row"] | None
    """How several GPUs share the model: not at all, by layers, or by rows."""
    main_gpu: int | None
    """Index of the main GPU, which holds everything with ``split_mode="none"``."""
    tensor_split: Sequence[float] | None
    """Each GPU's share of the model."""
    device: str | None
    """Name of a device, as listed by ``backends(devices=True)``."""
    use_mmap: bool | None
    """Map the file into memory instead of reading it; replace such a file by renaming, never in place."""
    use_mlock: bool | None
    """Lock the weights in RAM so that they are never swapped out."""
    check_tensors: bool | None
    """Look for invalid values while loading."""
    check_in_child: bool | None
    """Try the file in a child process first; by default, only files that were not seen before."""
    progress: Callable[[float], object] | None
    """Called with the fraction loaded, 0.0 to 1.0; return False to cancel."""


class ModelFields(ModelOnlyFields, total=False):
    """For `load_model`."""

    backend_options: Mapping[str, Any] | None
    """Options specific to one engine."""


class AnyContextFields(TypedDict, total=False):
    """Those that every context takes."""

    n_threads: int | None
    """Threads for generating."""
    n_threads_batch: int | None
    """Threads for reading the prompt."""
    rope_scaling_type: Literal["none", "linear", "yarn", "longrope"] | None
    """How positions beyond the trained window are scaled."""
    rope_freq_base: float | None
    """Base frequency of RoPE; 0 = the model's own."""
    rope_freq_scale: float | None
    """Frequency factor of RoPE; 0 = the model's own."""
    yarn_ext_factor: float | None
    """YaRN: extrapolation mix; -1 = the model's own."""
    yarn_attn_factor: float | None
    """YaRN: attention factor; -1 = the model's own."""
    yarn_beta_fast: float | None
    """YaRN: low correction dimension; -1 = the model's own."""
    yarn_beta_slow: float | None
    """YaRN: high correction dimension; -1 = the model's own."""
    yarn_orig_ctx: int | None
    """YaRN: the trained window in tokens; 0 = the model's own."""
    defrag_thold: None
    """No longer supported by any engine: only None is accepted."""
    attention_type: Literal["causal", "non-causal"] | None
    """Causal (language models) or non-causal (encoders)."""
    flash_attn: Literal["auto", "on", "off"] | None
    """Flash attention."""
    precision: Literal["default", "accurate", "fast"] | None
    """Arithmetic: "default" = the engine's own, "accurate" = its most exact, "fast" = less exact where that is faster."""
    type_k: KnownKVType | KVType | None
    """Number format of the keys in the KV cache."""
    type_v: KnownKVType | KVType | None
    """Number format of the values in the KV cache; a quantised one needs flash attention."""
    offload_kqv: bool | None
    """Keep the KV cache and attention on the GPU."""
    op_offload: bool | None
    """Run large operations on the GPU even for layers kept in RAM."""
    swa_full: bool | None
    """Keep the whole cache of sliding-window layers."""
    no_perf: bool | None
    """Do not measure times."""
    adapters: Sequence[AdapterSpec] | None
    """LoRA adapters to start with."""
    backend_options: Mapping[str, Any] | None
    """Options specific to one engine."""


class EmbedFields(AnyContextFields, ModelOnlyFields, total=False):
    """For `embed` and `rerank`."""


class PoolContextFields(AnyContextFields, total=False):
    """Those that the context of a pool takes."""

    n_ctx: int | Literal["fit"] | None
    """Context window in tokens; by default, the model's trained window or 4,096, whichever is smaller; 0 = the trained window, "fit" = the largest that fits in memory."""
    n_batch: int | None
    """Maximum number of tokens in one engine call."""
    n_ubatch: int | None
    """Maximum number of tokens in one compute step."""
    embeddings: bool | None
    """Compute embeddings."""
    kv_unified: bool | None
    """One cache for all sequences, instead of an equal part each."""
    on_oom: Literal["raise", "shrink"]
    """When memory runs out: raise an error, or try smaller contexts."""
    n_ctx_min: int
    """Smallest window that ``on_oom="shrink"`` may choose, in tokens."""


class ContextFields(PoolContextFields, total=False):
    """For `Model.new_context`."""

    n_seq_max: int | None
    """Number of sequences."""
    pooling_type: PoolingType | None
    """How the token vectors of a text are combined into one."""


class SessionOptionFields(TypedDict, total=False):
    """For `SessionPool.open_session`."""

    profile_id: str | None
    """A label you choose; part of the session's identity."""
    prompt_format: str | None
    """A label you choose; part of the session's identity."""
    add_bos: bool | None
    """Put a BOS token in front; None = what the tokenizer does by default."""
    overflow: Overflow
    """When the window is full: raise an error, drop the oldest part of the prompt ("truncate"), or drop the oldest text while generating too ("shift")."""


class SessionFields(ContextFields, SessionOptionFields, total=False):
    """For `Model.new_session`."""


class OpenSessionFields(SessionFields, ModelOnlyFields, total=False):
    """For `open_session`."""


class PoolFields(PoolContextFields, total=False):
    """For `Model.new_pool`."""

    n_parallel: int
    """Number of sessions that run at the same time, in one engine call."""
    n_cells: int | None
    """Number of tokens that all sessions can hold together, at least ``n_ctx``; None = ``n_parallel * n_ctx``, or as many as fit in memory."""
    n_step_tokens: int | None
    """Maximum number of tokens in one engine call; None = chosen by measuring, so that a long prompt does not hold up the others."""
    max_step_ms: float | None
    """How long an engine call with a piece of a prompt beside sessions that generate is to take, in milliseconds, as far as earlier calls tell; None = near 2.5 times the call without the piece, at most 250."""
    max_waiting: int
    """Number of calls that may wait for a place; one more raises ``PoolFullError``."""
    batching: Literal["auto", "always", "never"]
    """Run several sessions in one call: always, never, or where that is faster here."""
    batch_invariant: bool
    """Each session computes exactly what it would compute alone; refused where the engine cannot guarantee that."""
    cache_bytes: int
    """RAM, in bytes, for sessions that give up their cells; 0 = none."""
    cache_dir: str | os.PathLike[str] | None
    """A folder for sessions that no longer fit in RAM; None = none."""
    cache_dir_bytes: int
    """Largest size of that folder in bytes; the files unused longest go first."""
    reader_timeout: float | None
    """Seconds after which a stream that nobody reads is cancelled; None = never."""
    isolate: bool
    """Run the engine in a separate process, restarted when it dies."""
    step_timeout: float
    """With ``isolate``: seconds that a step may take longer than expected."""
    load_timeout: float
    """With ``isolate``: seconds that loading may take."""
    max_restarts: int
    """How many times a failed engine is reopened within ``restart_window``."""
    restart_window: float
    """Seconds over which restarts are counted."""
    context: ContextConfig
    """The ``ContextConfig`` of one session, whose fields may also be given directly."""


class OpenPoolFields(PoolFields, ModelOnlyFields, total=False):
    """For `open_pool`."""


class PlanFields(PoolFields, total=False):
    """For `Model.plan_memory`."""

    n_seq_max: int | None
    """Number of sequences."""
    pooling_type: PoolingType | None
    """How the token vectors of a text are combined into one."""


class OpenPlanFields(PlanFields, ModelOnlyFields, total=False):
    """For `plan_memory` of a path."""


class SamplingFields(TypedDict, total=False):
    """For `Model.new_sampler`."""

    temperature: float
    """0 always picks the likeliest token; higher values vary more."""
    top_k: int
    """Keep the k likeliest tokens; 0 = off."""
    top_p: float
    """Keep the likeliest tokens up to this total probability; 1 = off."""
    min_p: float
    """Drop tokens less likely than this fraction of the likeliest; 0 = off."""
    typical_p: float
    """Keep the most typical tokens up to this total probability; 1 = off."""
    top_n_sigma: float
    """Keep logits within n standard deviations of the highest; -1 = off."""
    xtc_probability: float
    """Chance of dropping all likely tokens except the least likely of them; 0 = off."""
    xtc_threshold: float
    """Probability above which xtc counts a token as likely."""
    dynatemp_range: float
    """How far the temperature moves with the entropy; 0 = off."""
    dynatemp_exponent: float
    """Exponent of the dynamic temperature."""
    mirostat: Literal[0, 1, 2]
    """Version of mirostat; 0 = off."""
    mirostat_tau: float
    """Mirostat: target surprise."""
    mirostat_eta: float
    """Mirostat: learning rate."""
    adaptive_p_target: float
    """Adaptive-p: the probability that chosen tokens have on average; -1 = off."""
    adaptive_p_decay: float
    """Adaptive-p: how much of that average each step keeps, 0 to 0.99."""
    repeat_penalty: float
    """Divides the logits of recent tokens; 1 = off."""
    frequency_penalty: float
    """Subtracted from a token's logit for each time it has occurred; 0 = off."""
    presence_penalty: float
    """Subtracted once from the logit of each token that has occurred; 0 = off."""
    penalty_last_n: int
    """How many tokens the penalties look back; -1 = the whole context, 0 = none."""
    dry_multiplier: float
    """DRY: strength of the penalty on repeated sequences; 0 = off."""
    dry_base: float
    """DRY: how fast the penalty grows with the length of a repetition."""
    dry_allowed_length: int
    """DRY: repetitions up to this length are not penalized."""
    dry_penalty_last_n: int
    """DRY: how many tokens to look back; -1 = the whole context."""
    dry_sequence_breakers: Sequence[str]
    """DRY: texts that end a repetition."""
    logit_bias: Mapping[int, float] | None
    """Values added to the logits of these token ids; -inf, or less than float32 holds, forbids one."""
    seed: int | None
    """Makes random choices repeatable; by default, a seed is drawn and reported."""
    min_keep: int
    """Minimum number of tokens that typical, top_p, min_p and xtc keep."""
    ignore_eos: bool
    """Never choose an end-of-generation token."""
    no_repeat_ngram_size: int
    """Never repeat n tokens in a row, prompt included; 0 = off."""
    implementation: Literal["auto", "native", "portable"]
    """Portable (NumPy), native (the engine's own) or auto, which is portable."""


class DecodeFields(SamplingFields, total=False):
    """For `Session.decode` and what decodes."""

    max_tokens: int | None
    """Maximum number of tokens to generate; by default, until the window is full."""
    min_tokens: int
    """Only a finished ``response_format`` may end the text before this many tokens."""
    stop: str | Sequence[str] | None
    """Strings that end the text and are left out of it."""
    stop_tokens: Sequence[int] | None
    """Token ids that end the text."""
    include_stop: bool
    """Keep the stop string at the end of the text."""
    sampling: SamplingConfig | Literal["model"]
    """A ``SamplingConfig``, whose fields may also be given directly, or "model" for what the model's files recommend."""
    logprobs: int | None
    """Report this many of the likeliest tokens at each step, besides the chosen one."""
    prompt_logprobs: int | None
    """Evaluate the prompt again and report how likely each of its tokens was, besides this many of the likeliest."""
    processors: Sequence[Any] | None
    """Objects with ``apply(logits) -> logits``, or callables ``f(input_ids, logits) -> logits``."""
    response_format: Any
    """A JSON schema, regex, choice, grammar or class that the text must follow."""
    special_text: bool
    """Show control tokens as text."""
    speculative: SpeculativeConfig | Literal["auto"] | None
    """Guess tokens ahead: "auto" = where that pays, or a ``SpeculativeConfig``."""
    timeout: float | None
    """Stop this many seconds after the call, including waiting."""


class RunToolsFields(DecodeFields, total=False):
    """For `Session.run_tools`."""

    tool_choice: str | Mapping[str, Any]
    """"auto", "none", "required", or the name of the tool to call."""
    reasoning: Reasoning
    """The model's thoughts: separate from the text ("parsed"), left in it ("text"), or "off"."""
    reasoning_budget: int | None
    """Maximum number of tokens in a thought, which is then closed."""
    chat_template: str | None
    """A Jinja template to use in place of the model's own."""
    template_variables: Mapping[str, Any] | None
    """Additional variables for the template."""
    parse_special: bool
    """Read the text of control tokens in messages as those tokens."""


class ChatFields(RunToolsFields, total=False):
    """For `Session.chat`."""

    tools: Sequence[Mapping[str, Any]] | None
    """The tools that the model may call: ``{"type": "function", "function": {"name", "parameters"}}``."""
