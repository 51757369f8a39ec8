"""A model that ranks: the pack's encoder with a head of random weights, as llama.cpp reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

RANK = 4  # of llama.cpp's enum of poolings


def write(encoder: Path, target: Path) -> Path:
    """Write the GGUF file ``target`` from that of an encoder."""
    reader = gguf.GGUFReader(encoder)
    writer = gguf.GGUFWriter(target, "bert")
    for key, entry in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        kind = entry.types[0]
        sub = entry.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        value = RANK if key == "bert.pooling_type" else entry.contents()
        writer.add_key_value(key, value, kind, sub_type=sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    random, n_embd = (
        np.random.default_rng(8),
        int(reader.fields["bert.embedding_length"].contents()),
    )
    for name, n_out in (("cls", n_embd), ("cls.output", 1)):
        weight = random.normal(0, 0.3, (n_out, n_embd)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", weight)
        writer.add_tensor(f"{name}.bias", np.zeros(n_out, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
