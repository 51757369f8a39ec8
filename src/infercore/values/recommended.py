"""The sampling that a model's files recommend, in the names of `SamplingConfig`."""

from __future__ import annotations

import logging
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from infercore.errors import InvalidInputError
from infercore.values.config import SamplingConfig

if TYPE_CHECKING:
    from collections.abc import Mapping

_logger = logging.getLogger("infercore")

_GGUF = "general.sampling."
_OF_GGUF = {  # llama.cpp: LLAMA_MODEL_META_KEY_SAMPLING_*
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "penalty_last_n": "penalty_last_n",
    "penalty_repeat": "repeat_penalty",
    "mirostat": "mirostat",
    "mirostat_tau": "mirostat_tau",
    "mirostat_eta": "mirostat_eta",
}
_JSON = "generation_config."
_OF_JSON = {  # transformers: GenerationConfig
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "repetition_penalty": "repeat_penalty",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
}
RECOMMENDED = frozenset((*_OF_GGUF.values(), *_OF_JSON.values()))
"""The fields of `SamplingConfig` that files know."""
_WHOLE = ("top_k", "penalty_last_n", "mirostat")


def recommended_sampling(metadata: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the fields of `SamplingConfig` that a model's metadata states, with their values.

    Read are ``general.sampling.*`` (GGUF) and ``generation_config.*`` (the file of that name,
    where ``do_sample`` being false means ``temperature=0``). A value that no `SamplingConfig`
    takes is left out, with a warning in the log: a file is not trusted.
    """
    found: dict[str, Any] = {}
    for key, text in metadata.items():
        name = _name_of(key)
        if name is not None:
            value = _value(name, text)
            if value is None:
                _logger.warning("the model's files recommend %s=%s; it is left out", key, text)
            else:
                found[name] = value
    if f"{_JSON}repetition_penalty" in metadata and "repeat_penalty" in found:
        found["penalty_last_n"] = -1  # there it looks back over the whole text
    if metadata.get(f"{_JSON}do_sample", "").lower() == "false":
        found["temperature"] = 0.0
    return MappingProxyType(found)


def _name_of(key: str) -> str | None:
    if key.startswith(_GGUF):
        return _OF_GGUF.get(key[len(_GGUF) :])
    return _OF_JSON.get(key[len(_JSON) :]) if key.startswith(_JSON) else None


def _value(name: str, text: str) -> Any:
    """Return the value, None where it is none that a `SamplingConfig` takes."""
    try:
        number = float(text)
        value: Any = int(number) if name in _WHOLE else number
        if name == "top_k":
            value = max(0, value)  # -1 is off in some files
        SamplingConfig(**{name: value})
    except (ValueError, OverflowError, InvalidInputError):
        return None
    return value
