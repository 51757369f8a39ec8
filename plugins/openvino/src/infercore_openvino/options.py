"""The backend options of this engine: their names, and what each accepts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from infercore import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

MAX_STREAMS = 64
MAX_GROUP = 2**20


def _one_of(*choices: str) -> tuple[Callable[[Any], bool], str]:
    return (lambda value: value in choices), "one of " + ", ".join(map(repr, choices))


def _integer(low: int, high: int) -> tuple[Callable[[Any], bool], str]:
    return (
        lambda value: type(value) is int and low <= value <= high,
        f"an integer from {low} to {high}",
    )


_BOOLEAN = (lambda value: isinstance(value, bool)), "True or False"
_TEXT = (
    lambda value: isinstance(value, str) and value != "" and "\0" not in value,
    "the path of a folder",
)

CONTEXT_OPTIONS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "form": _one_of("paged", "stateful"),
    "inference_precision": _one_of("f32", "bf16", "f16"),
    "dynamic_quantization_group_size": _integer(0, MAX_GROUP),
    "num_streams": _integer(1, MAX_STREAMS),
    "enable_hyper_threading": _BOOLEAN,
    "enable_cpu_pinning": _BOOLEAN,
}
MODEL_OPTIONS: Mapping[str, tuple[Callable[[Any], bool], str]] = {"cache_dir": _TEXT}


def check(options: Mapping[str, Any], known: Mapping[str, tuple[Any, str]]) -> None:
    """Raise `InvalidInputError` for the first option whose value is not accepted."""
    for name, value in options.items():
        accepts, allowed = known[name]
        if not accepts(value):
            raise InvalidInputError(
                f"backend_options[{name!r}]={value!r} is not allowed; give {allowed}",
                field=name,
                value=value,
                allowed=allowed,
            )
