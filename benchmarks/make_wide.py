"""Write a storyteller that costs as a model of 0.1 billion parameters, as GGUF and OpenVINO IR.

It says what the storyteller of the pack says: what is added (twelve layers, and feed-forward
networks fifty times as wide) is computed and adds nothing, for its last matrices are zeros. So
guesses of the pack's draft model are as often right as on the storyteller itself, and a step costs
what it costs on a model of use. All matrices are in q8_0.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np

import infercore_models

NAME = "storyteller-wide"
N_LAYER, N_FF, OWN_FF = 16, 16_384, 320
Q8_0 = gguf.GGMLQuantizationType.Q8_0
BLOCK, BLOCK_BYTES = gguf.GGML_QUANT_SIZES[Q8_0]
SIZES = {"llama.block_count": N_LAYER, "llama.feed_forward_length": N_FF}
LEFT_OUT = ("GGUF.", "general.architecture", "general.file_type")
BESIDE = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json")


def write_gguf(path: Path) -> None:
    """Write the storyteller's tensors and keys, each tensor as wide as it is here."""
    source = gguf.GGUFReader(str(infercore_models.path("storyteller", "gguf-f32")))
    writer = gguf.GGUFWriter(path, "llama")
    for key, field in source.fields.items():
        if not key.startswith(LEFT_OUT):
            kind, inner = field.types[0], field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, SIZES.get(key, field.contents()), kind, inner)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    own = {tensor.name: np.array(tensor.data) for tensor in source.tensors}
    rng = np.random.default_rng(0)
    for name in [name for name in own if not name.startswith("blk.")]:
        add(writer, name, own[name], own[name].shape, rng)
    for i in range(N_LAYER):
        for of_first in [name for name in own if name.startswith("blk.0.")]:
            name = of_first.replace("blk.0.", f"blk.{i}.")
            add(writer, name, own.get(name), own[of_first].shape, rng)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add(writer: gguf.GGUFWriter, name: str, own: Any, shape: Any, rng: Any) -> None:
    """Add the storyteller's tensor, if it has this layer, and beside it what adds nothing.

    The last matrices have random codes with zeros as their scales: engines keep equal constants
    once.
    """
    wide = tuple(N_FF if n == OWN_FF else n for n in shape)
    if len(shape) == 1:
        writer.add_tensor(name, np.ones(shape, np.float32) if own is None else own)
        return
    made = rng.standard_normal(wide, np.float32) * 0.02
    n_own = 0 if own is None else own.shape[1]
    if own is not None:
        made[tuple(slice(n) for n in own.shape)] = own
    codes = gguf.quants.quantize(made, Q8_0)
    if "ffn_down" in name or "attn_output" in name:
        blocks = codes.reshape(len(made), -1, BLOCK_BYTES)
        blocks[:, n_own // BLOCK :, :2] = 0
    writer.add_tensor(name, codes, raw_dtype=Q8_0)


def write_ir(source: Path, target: Path) -> None:
    """Turn the GGUF into an IR, with the storyteller's tokenizer beside it."""
    import openvino_genai  # noqa: PLC0415  (only for this format)

    openvino_genai.LLMPipeline(str(source), "CPU", enable_save_ov_model=True)
    target.mkdir(exist_ok=True)
    for file in source.parent.glob("openvino_*"):
        shutil.move(str(file), target / file.name)
    for name in BESIDE:
        shutil.copy(infercore_models.path("storyteller", "openvino") / name, target)
    config = json.loads((target / "config.json").read_text(encoding="utf-8"))
    config |= {"num_hidden_layers": N_LAYER, "intermediate_size": N_FF}
    (target / "config.json").write_text(json.dumps(config), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    file = options.folder / f"{NAME}-q8_0.gguf"
    write_gguf(file)
    print(file)
    write_ir(file, options.folder / f"{NAME}-ir")
    print(options.folder / f"{NAME}-ir")


if __name__ == "__main__":
    main()
