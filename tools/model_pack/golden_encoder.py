"""Computes what every engine has to reproduce of the encoder: ids, token rows and embeddings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, BertModel

TEXTS = (
    "Mira the baker took a loaf of bread out of the oven.",
    "The baker Mira baked bread.",
    "A young dragon had a cough and could not breathe fire.",
    "Under the stone bridge lived a river troll.",
    "The Café Lumière, where soup is free on rainy days!",
    "Hello",
    "Once upon a time there was a clockmaker named Anton, who lived near the market town. Anton "
    "was very curious, and even the birds knew it. One evening a letter came under the door.",
)


def write(folder: Path, target: Path) -> None:
    """Write the golden file: of each text its ids, the rows of its tokens and their mean."""
    model = BertModel.from_pretrained(
        folder, add_pooling_layer=False, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    arrays: dict[str, Any] = {"texts": np.array(TEXTS)}
    for number, text in enumerate(TEXTS):
        ids = tokenizer(text)["input_ids"]
        with torch.inference_mode():
            rows = model(input_ids=torch.tensor([ids])).last_hidden_state[0].numpy()
        arrays[f"tokens_{number}"] = np.array(ids, dtype=np.int32)
        arrays[f"rows_{number}"] = rows
    np.savez_compressed(target, **arrays)
