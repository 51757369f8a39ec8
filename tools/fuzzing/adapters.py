"""LoRA adapters with damage, on a sound model: a typed error, or an adapter that runs."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import infercore as ic
from fuzzing import gguf
from fuzzing._bytes import damaged
from fuzzing._forked import loaded

if TYPE_CHECKING:
    from random import Random

LIMIT_S = 150.0
BATCH = 200
_NAMES = (b".lora_a", b".lora_b")


class Adapters:
    """Puts a changed adapter on a model and evaluates a text with both."""

    def __init__(self) -> None:

        sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
        from llamacpp import random_gguf  # noqa: PLC0415

        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        self._model = str(random_gguf.write(folder / "model.gguf", "llama"))
        self._adapter = random_gguf.write(folder / "sound.gguf", "adapter").read_bytes()
        self._path = folder / "adapter.gguf"
        self._path.write_bytes(self._adapter)
        with ic.load_model(self._model, backend="llamacpp", check_in_child=False) as model:
            self._use(model)  # what is changed below runs as it is; all is imported by now

    def case(self, random: Random) -> str:
        """Change the adapter, put it on the model, and use both."""
        self._path.write_bytes(self._changed(random))
        return loaded("llamacpp", self._model, self._use, adapters=(str(self._path),))

    def _use(self, model: ic.Model) -> None:
        spec = ic.AdapterSpec(path=str(self._path))
        fields = {"n_ctx": 64, "n_batch": 16, "n_threads": 1, "n_threads_batch": 1}
        with model.new_context(adapters=(spec,), **fields) as context:
            context.decode([(11 * i + 3) % model.tokenizer.n_vocab for i in range(40)])
            context.set_adapters([])
            context.decode_one(3)
            context.set_adapters([spec])
            context.decode_one(3)

    def _changed(self, random: Random) -> bytes:
        data = self._adapter
        if random.random() < 0.3:
            name = random.choice(_NAMES)
            places = [at for at in range(len(data)) if data.startswith(name, at)]
            return gguf.retyped(data, random.choice(places) + len(name), random)
        return damaged(data, random, 4, None if random.random() < 0.2 else 700)


def open_target() -> Adapters:
    """Return the target."""
    return Adapters()
