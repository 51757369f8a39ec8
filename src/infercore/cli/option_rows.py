"""What the help says of each field of the configs, and how it is typed."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from infercore.values.config import POOLING_TYPES, PRECISIONS, ROPE_SCALING_TYPES

if TYPE_CHECKING:
    from collections.abc import Mapping


@attrs.frozen
class Row:
    """The help of one field, other names of its option, and what it accepts."""

    help: str
    also: tuple[str, ...] = ()
    choices: tuple[object, ...] = ()
    metavar: str | None = None
    param_type: str = ""
    multiple: bool = False


MODEL: Mapping[str, Row] = MappingProxyType({
    "device": Row("A device of the backend; see infercore backends --devices.", metavar="NAME"),
    "n_gpu_layers": Row("Layers on the GPU; -1 = all.", also=("--gpu-layers",), metavar="N"),
    "main_gpu": Row("Number of the GPU that takes what is not split.", metavar="N"),
    "split_mode": Row("How a model is split over GPUs.", choices=("none", "layer", "row")),
    "tensor_split": Row("Each GPU's share.", metavar="X,Y,...", param_type="numbers"),
    "use_mmap": Row("Map the file into memory."),
    "use_mlock": Row("Keep the weights from being swapped out."),
    "check_tensors": Row("Check the weights while loading."),
    "check_in_child": Row("Try the file in a child process; by default one not seen before."),
})  # fmt: skip

CONTEXT: Mapping[str, Row] = MappingProxyType({
    "n_ctx": Row("Window in tokens; 0 = as trained. Default: at most 4096.", metavar="N"),
    "n_threads": Row("Threads for single tokens.", also=("-t", "--threads"), metavar="N"),
    "n_threads_batch": Row("Threads for prefill.", also=("--threads-batch",), metavar="N"),
    "n_batch": Row("Most tokens of one engine call.", metavar="N"),
    "n_ubatch": Row("Most tokens of one compute step.", metavar="N"),
    "n_seq_max": Row("Number of sequences.", metavar="N"),
    "type_k": Row(
        "Number format of the keys in the KV cache; infercore inspect lists the model's.",
        metavar="TYPE", param_type="kv_type",
    ),
    "type_v": Row(
        "Number format of the values in the KV cache; infercore inspect lists the model's.",
        metavar="TYPE", param_type="kv_type",
    ),
    "flash_attn": Row("Flash attention.", choices=("auto", "on", "off")),
    "precision": Row("Arithmetic; default: the engine's own.", choices=PRECISIONS),
    "swa_full": Row("Keep the whole window in sliding-window layers."),
    "kv_unified": Row("One cache for all sequences."),
    "offload_kqv": Row("Keep the KV cache on the GPU."),
    "op_offload": Row("Compute on the GPU what is not held there."),
    "on_oom": Row("When memory does not suffice.", choices=("raise", "shrink")),
    "n_ctx_min": Row("The smallest window that --on-oom shrink goes down to.", metavar="N"),
    "pooling_type": Row("Pooling of embeddings.", choices=POOLING_TYPES),
    "rope_scaling_type": Row("Scaling of positions.", choices=ROPE_SCALING_TYPES),
    "rope_freq_base": Row("Base frequency of RoPE.", metavar="X"),
    "rope_freq_scale": Row("Frequency factor of RoPE.", metavar="X"),
    "yarn_ext_factor": Row("YaRN: share of extrapolation.", metavar="X"),
    "yarn_attn_factor": Row("YaRN: scale of attention.", metavar="X"),
    "yarn_beta_fast": Row("YaRN: low correction dimension.", metavar="X"),
    "yarn_beta_slow": Row("YaRN: high correction dimension.", metavar="X"),
    "yarn_orig_ctx": Row("YaRN: the window before scaling.", metavar="N"),
})  # fmt: skip

SAMPLING: Mapping[str, Row] = MappingProxyType({
    "temperature": Row("0 takes the likeliest token.", metavar="X"),
    "top_k": Row("Keep the K likeliest tokens; 0 = off.", metavar="K"),
    "top_p": Row("Keep the likeliest tokens up to this sum; 1 = off.", metavar="P"),
    "min_p": Row("Drop tokens below this share of the likeliest; 0 = off.", metavar="P"),
    "typical_p": Row("Keep typical tokens up to this sum; 1 = off.", metavar="P"),
    "top_n_sigma": Row("Keep logits within N deviations of the best; -1 = off.", metavar="N"),
    "xtc_probability": Row("How often the likeliest tokens are left out.", metavar="P"),
    "xtc_threshold": Row("From which probability on they are.", metavar="P"),
    "dynatemp_range": Row("Range of the dynamic temperature; 0 = off.", metavar="X"),
    "dynatemp_exponent": Row("Exponent of the dynamic temperature.", metavar="X"),
    "mirostat": Row("Mirostat.", choices=(0, 1, 2)),
    "mirostat_tau": Row("Mirostat: target surprise.", metavar="X"),
    "mirostat_eta": Row("Mirostat: learning rate.", metavar="X"),
    "repeat_penalty": Row("Penalty of repeated tokens; 1 = off.", metavar="X"),
    "frequency_penalty": Row("Penalty for each repetition; 0 = off.", metavar="X"),
    "presence_penalty": Row("Penalty of tokens that are there; 0 = off.", metavar="X"),
    "penalty_last_n": Row("Tokens that penalties look back; -1 = all.", metavar="N"),
    "dry_multiplier": Row("DRY: strength; 0 = off.", metavar="X"),
    "dry_base": Row("DRY: base.", metavar="X"),
    "dry_allowed_length": Row("DRY: repetitions up to this length are free.", metavar="N"),
    "dry_penalty_last_n": Row("DRY: tokens to look back; -1 = all.", metavar="N"),
    "dry_sequence_breakers": Row(
        "DRY: a text that ends a repetition; repeatable.", metavar="TEXT", multiple=True
    ),
    "logit_bias": Row(
        "Add AMOUNT to a token's logit; repeatable.",
        metavar="ID=AMOUNT", param_type="bias", multiple=True,
    ),
    "seed": Row("Makes a random text repeatable; default: drawn anew.", metavar="N"),
    "min_keep": Row("Fewest candidates that filters leave.", metavar="N"),
    "ignore_eos": Row("Never choose an end-of-generation token."),
    "no_repeat_ngram_size": Row("Let no N tokens in a row come twice; 0 = off.", metavar="N"),
    "implementation": Row("Who samples.", choices=("auto", "native", "portable")),
})  # fmt: skip
