"""The rig of the reference backend, which every law must pass on."""

from __future__ import annotations

import atexit
import functools
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from infercore.conformance import safetensors_copy
from infercore.conformance.options import OPTIONS
from infercore.conformance.rig import Observation, Rig
from infercore.registry import default_registry
from infercore.testing import Faults, engine_of, load_reference_model
from infercore.testing.reference import pack_path, storyteller

REQUIRED = (
    "oracle", "observe", "adapter", "encoder", "kv_remove_any", "kv_copy_any", "kv_shift",
    "kv_divide", "multi_sequence", "state", "sequence_state", "logits_all", "embeddings",
    "live_threads", "lora", "native_sampler", "chat_template", "plan_memory",
    *(name for name in OPTIONS if name != "yarn"),
)  # fmt: skip
"""All that there is: what the reference lost would be refused by it in silence."""


class Counted(Faults):
    """Lets nothing fail, and counts the tokens that the engine is given to evaluate."""

    def __init__(self) -> None:
        super().__init__()
        self.evaluated = 0

    def run(self, name: str, method: Any, *args: Any, **kwargs: Any) -> Any:
        """Call an engine's method."""
        if name in ("decode", "decode_batch"):
            self.evaluated += len(args[0])
        elif name == "decode_one":
            self.evaluated += 1
        return super().run(name, method, *args, **kwargs)


def a_folder_of_weights_of_fewer_layers(folder: str) -> str:
    """Write the storyteller into ``folder`` with a config that asks for a layer more."""
    shutil.copytree(storyteller(), folder, dirs_exist_ok=True)
    file = Path(folder) / "config.json"
    config = json.loads(file.read_text(encoding="utf-8"))
    config["num_hidden_layers"] += 1
    file.unlink()
    file.write_text(json.dumps(config), encoding="utf-8")
    return folder


_SHAPE = {
    "hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 10,
    "intermediate_size": 40, "num_hidden_layers": 1,
}  # fmt: skip


def a_llama_of_one_layer(folder: str) -> str:
    """Write a llama of one layer into ``folder``, of heads that each have their own keys."""
    shutil.copytree(storyteller(), folder, dirs_exist_ok=True)
    where = Path(folder)
    config = {**json.loads((where / "config.json").read_text(encoding="utf-8")), **_SHAPE}
    width, inner, heads = 48, 40, 30
    layer = {
        "input_layernorm": (width,), "post_attention_layernorm": (width,),
        "self_attn.q_proj": (heads, width), "self_attn.k_proj": (heads, width),
        "self_attn.v_proj": (heads, width), "self_attn.o_proj": (width, heads),
        "mlp.gate_proj": (inner, width), "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], width),
        "model.norm.weight": (width,),
        **{f"model.layers.0.{name}.weight": shape for name, shape in layer.items()},
    }
    numbers, tensors = np.random.default_rng(7), {}
    for name, shape in shapes.items():
        weights = numbers.standard_normal(shape) * 0.3 + (1.0 if len(shape) == 1 else 0.0)
        tensors[name] = safetensors_copy.of(weights)
    (where / "config.json").unlink()
    (where / "config.json").write_text(json.dumps(config), encoding="utf-8")
    safetensors_copy.write(where / "model.safetensors", tensors)
    return folder


def rig() -> Rig:
    """Return the rig of the reference backend on the pack's storyteller."""
    counted = Counted()

    def observe(context: Any, seq_id: int) -> Observation:
        engine = engine_of(context)
        held = engine.sequences[seq_id].tokens.tolist()
        single, batch = (workers.n_threads for workers in engine.workers)
        return Observation(
            resident=len(held),
            evaluated=counted.evaluated,
            tokens=tuple(held),
            threads=(single, batch),
        )

    return Rig(
        backend="reference",
        open_model=lambda: load_reference_model(faults=counted),
        open_path=lambda path: load_reference_model(path, faults=counted),
        path=storyteller(),
        model_name="storyteller",
        adapter=pack_path("storyteller-lora"),
        adapter_name="storyteller-lora",
        encoder=pack_path("encoder"),
        encoder_name="encoder",
        tolerance=1e-3,
        exact={"precision": "accurate", "flash_attn": "off", "type_k": "f32", "type_v": "f32"},
        suite_version="1.2",
        observe=observe,
        require=REQUIRED,
        wrong_files=(a_folder_of_weights_of_fewer_layers,),
        others=(a_llama_of_one_layer,),
    )


_PLUGIN = """
from infercore import hookimpl
from infercore.testing import reference_backend

@hookimpl
def infercore_backend():
    return reference_backend()
"""


def announce() -> None:
    """Let this process and those that it starts find the reference among the backends."""
    is_there = any(record.name == "reference" for record in default_registry().records())
    if is_there and (not _site.cache_info().currsize or _site() in sys.path):
        return
    sys.path.append(_site())
    default_registry().refresh()


@functools.cache
def _site() -> str:
    """Write a distribution that announces the reference; return its folder."""
    site = Path(tempfile.mkdtemp(prefix="infercore-reference-"))
    atexit.register(shutil.rmtree, site, ignore_errors=True)
    about = site / "announced_reference-1.dist-info"
    about.mkdir()
    (site / "announced_reference.py").write_text(_PLUGIN)
    (about / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: announced-reference\nVersion: 1\n"
    )
    (about / "entry_points.txt").write_text(
        "[infercore.backends]\nreference = announced_reference\n"
    )
    return str(site)
