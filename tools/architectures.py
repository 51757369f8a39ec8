"""Compare small random models of many architectures with transformers, in both plugins.

    python tools/architectures.py make FOLDER [NAME ...]     # torch, optimum-intel, transformers
    python tools/architectures.py check FOLDER [NAME ...]    # the plugins alone

``make`` writes each model with its logits for 200 tokens: as OpenVINO exports, and as GGUF files
where ``--llama-cpp`` names the sources of llama.cpp. Architectures that the versions at hand cannot
write are named and left out. ``check`` prints how far the logits are off, and runs the laws that
CAP-47 runs on other models; it ends with an error where a law fails.
"""

# ruff: noqa: PLC0415  (what makes models is not needed where they are checked)

from __future__ import annotations

import argparse
import json
import shutil
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

import infercore as ic
import infercore_models
from infercore.conformance import registry, runner
from infercore.conformance.laws.otherwise import HELD, with_model
from infercore.conformance.report import FAIL

N_TOKENS, WINDOW = 200, 32
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
}
_OLD = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 1024}
_MIXED = ["sliding_attention", "full_attention"] * 2
_HEAD = {"head_dim": 16}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "arcee": {}, "biogpt": {}, "bloom": {"n_layer": 4, "n_head": 4, "seq_length": 1024},
    "codegen": {**_OLD, "rotary_dim": 8}, "cohere": {},
    "cohere2": {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    "exaone4": {"sliding_window": WINDOW, "layer_types": _MIXED},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma": _HEAD, "gemma2": {**_HEAD, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "gemma3_text": {**_HEAD, "sliding_window": WINDOW, "layer_types": _MIXED},
    "glm": _HEAD, "glm4": _HEAD, "gpt2": _OLD, "gpt_bigcode": _OLD,
    "gpt_neo": {"num_layers": 4, "num_heads": 4, "window_size": WINDOW,
                "attention_types": [[["global", "local"], 2]]},
    "gpt_neox": {"rotary_pct": 0.25},
    "gpt_oss": {**_HEAD, **_MOE, "sliding_window": WINDOW, "layer_types": _MIXED},
    "gptj": {**_OLD, "rotary_dim": 8}, "granite": {}, "granitemoe": _MOE,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 0,
                         "shared_intermediate_size": 128, "mamba_n_heads": 8, "mamba_d_head": 16,
                         "mamba_d_state": 8},
    "hunyuan_v1_dense": _HEAD,
    "lfm2": {"full_attn_idxs": [1, 3], "layer_types": ["conv", "full_attention"] * 2},
    "llama": {}, "llama4_text": {**_HEAD, "attention_chunk_size": WINDOW, "num_local_experts": 1},
    "mamba": {"state_size": 8}, "mistral": {"sliding_window": WINDOW},
    "mixtral": {**_MOE, "sliding_window": WINDOW},
    "mpt": {"d_model": 64, "n_layers": 4, "n_heads": 4, "max_seq_len": 1024},
    "nemotron": {}, "olmo": {}, "olmo2": {}, "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "persimmon": {}, "phi": {}, "phi3": {"sliding_window": WINDOW}, "phimoe": _MOE,
    "qwen2": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "qwen3": _HEAD,
    "qwen3_moe": {**_HEAD, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    "qwen3_next": {**_HEAD, "num_experts": 0, "linear_num_key_heads": 2,
                   "layer_types": ["linear_attention", "full_attention"] * 2,
                   "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                   "linear_value_head_dim": 16},
    "seed_oss": _HEAD, "smollm3": {}, "stablelm": {}, "starcoder2": {"sliding_window": WINDOW},
    "xglm": {"d_model": 64, "ffn_dim": 128, "num_layers": 4, "attention_heads": 4},
}  # fmt: skip


# -- making them -----------------------------------------------------------------------------------


def make(folder: Path, name: str, llama_cpp: Path | None) -> None:
    """Write one model, in the formats that can be had."""
    plain = folder / name / "hf"
    wanted: dict[Path, Any] = {
        plain: lambda: write_random(plain, name),
        folder / name / "openvino": lambda: write_openvino(plain, folder / name / "openvino"),
    }
    if llama_cpp is not None:
        gguf = folder / name / "model.gguf"
        wanted[gguf] = lambda: write_gguf(llama_cpp, plain, gguf)
    for target, write in wanted.items():
        if target.exists() or not (target == plain or plain.exists()):
            continue
        try:
            write()
        except Exception as error:  # noqa: BLE001  (whatever an exporter raises)
            shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
            print(
                f"{name}: no {target.name}: {type(error).__name__} {str(error)[:120]}", flush=True
            )


def write_random(folder: Path, name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    text = Path(infercore_models.path("storyteller", "hf")) / "config.json"
    n_vocab = json.loads(text.read_text())["vocab_size"]
    own = {"vocab_size": n_vocab, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(3)
    shape = AutoConfig.for_model(name, **{**SIZES, **own, **ARCHITECTURES[name]})
    model = AutoModelForCausalLM.from_config(shape).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:  # else all logits are nearly the same
                parameter.mul_(4.0)
    ids = np.random.default_rng(5).integers(3, n_vocab, N_TOKENS)
    with torch.no_grad():
        rows = model(torch.tensor(ids[None])).logits[0].float().numpy()
    model.save_pretrained(folder)
    np.savez(folder / "expected.npz", ids=ids, rows=rows)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(text.parent / file, folder)


def write_openvino(plain: Path, target: Path) -> None:
    import torch
    from optimum.exporters.openvino import export_from_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()
    task = "text-generation-with-past"
    export_from_model(model, target, task=task, stateful=True, preprocessors=[])
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(plain / file, target)


def write_gguf(llama_cpp: Path, plain: Path, target: Path) -> None:
    sys.path[:0] = [str(llama_cpp), f"{llama_cpp}/gguf-py"]
    import conversion
    import gguf
    import torch

    conversion.base.TextModel.get_vocab_base_pre = lambda *_: "gpt-2"
    config = json.loads((plain / "config.json").read_text())
    kind = conversion.get_model_class(config["architectures"][0])
    kind.set_vocab = lambda self: self._set_vocab_gpt2()
    with torch.inference_mode():
        kind(plain, gguf.LlamaFileType.ALL_F32, target, is_big_endian=False).write()


# -- checking them ---------------------------------------------------------------------------------


def check(folder: Path, name: str) -> bool:
    """Print what both plugins make of one model; whether no law failed."""
    forms = {"openvino": folder / name / "openvino", "llamacpp": folder / name / "model.gguf"}
    found = any(path.exists() for path in forms.values())
    if not found:
        print(f"{name}: no model in {folder}")
    for backend, path in forms.items():
        if not path.exists():
            continue
        try:
            with ic.load_model(path, backend=backend) as model:
                print(
                    f"{name:18} {backend:9} {told(model)}; {gap(model, folder / name)}", flush=True
                )
        except ic.ModelLoadError as error:
            print(f"{name:18} {backend:9} refused: {str(error)[:140]}", flush=True)
            continue
        found = held(str(path), backend) and found
    return found


def told(model: Any) -> str:
    kinds = model.capabilities
    many = "several sequences" if kinds.multi_sequence else "one sequence"
    return f"{many}, removes {kinds.kv_remove}, copies {kinds.kv_copy}, moves {kinds.kv_shift}"


def gap(model: Any, folder: Path) -> str:
    """Return how far the logits of the tokens are from those that transformers gave."""
    with np.load(folder / "hf" / "expected.npz") as expected:
        ids, rows = expected["ids"].tolist(), expected["rows"]
    fields = {"precision": "accurate", "flash_attn": "off", "n_ctx": 512}
    if {"f32"} < set(model.capabilities.kv_types):
        fields |= {"type_k": "f32", "type_v": "f32"}
    with model.new_context(**fields) as context:
        context.decode(ids, logits="all")
        off = float(np.abs(context.logits_all() - rows).max())
    return f"{off:.2g} off, of {rows.std():.2g}"


def held(path: str, backend: str) -> bool:
    """Run the laws of models that are built otherwise; print those that fail."""
    rig = with_model(import_module(f"infercore_{backend}.conformance").rig(), path)
    laws = [law for law in registry.laws() if law.id in HELD]
    outcomes = [(law, runner.run_law(law, rig, seed=5)) for law in laws]
    rig.close()
    failed = [f"    {law.id}: {found.reason}" for law, found in outcomes if found.outcome == FAIL]
    print("\n".join(failed), end="\n" if failed else "", flush=True)
    return not failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("make", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help="architectures; without any, all")
    parser.add_argument("--llama-cpp", type=Path, help="sources of llama.cpp, to write GGUF files")
    options = parser.parse_args()
    names = options.names or sorted(ARCHITECTURES)
    if options.what == "make":
        for name in names:
            make(options.folder, name, options.llama_cpp)
    else:
        failed = [name for name in names if not check(options.folder, name)]
        if failed:
            raise SystemExit(f"not all is well with: {', '.join(failed)}")


if __name__ == "__main__":
    main()
