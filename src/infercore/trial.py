"""What a child process does with a file before its parent loads it; see `infercore.engine.trial`.

Run as ``python -m infercore.trial BACKEND`` with the request as a line of JSON on standard input;
the engine is imported before that line is there. What is raised here the parent will be told by its
own load: only the child's death counts.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infercore.protocols.public import Context, Model
    from infercore.values.info import BackendDescriptor

BEGUN, ENDED = "infercore: begun", "infercore: ended"
_SMALL_BYTES = 1 << 28  # of such a model more is evaluated than a large one has time for
_TEXT = "Once upon a time \t\r\n {x: 1}  \u00e9\u2028\u6f22\U0001f600 \u2581 </s> <0x0A>"
_N_PIECES = 4096


def main() -> None:
    """Load the model that standard input names, use it a little, and end without destructors."""
    gc.disable()  # what is made here is kept to the end
    import infercore as ic  # noqa: PLC0415  (the parent reads only names from here)
    from infercore.registry import default_registry  # noqa: PLC0415

    descriptor = default_registry().get(sys.argv[1])
    loader = descriptor.loader
    with contextlib.suppress(Exception):
        import infercore.engine.model  # noqa: PLC0415

        if descriptor.prepare is not None:
            loader = descriptor.prepare(in_child=True)
    asked = json.loads(sys.stdin.readline())
    config = ic.ModelConfig(**asked["config"], check_in_child=False)
    _say(BEGUN)
    with contextlib.suppress(Exception):
        if asked["until"] == "plan":
            fields = {**asked["config"], "check_in_child": False}
            ic.plan_memory(asked["path"], backend=asked["backend"], **fields)
        else:
            with _guarded(loader(asked["path"], config), descriptor) as model:
                if asked["until"] == "load":
                    _tokenize(model)
                else:
                    use(model, asked.get("adapters", ()), asked["options"])
    _say(ENDED)
    os._exit(0)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _guarded(inner: Any, descriptor: BackendDescriptor) -> Model:
    """Return the model without what sessions and chats need: their import would take a while."""
    from infercore.engine.model import GuardedModel, Services  # noqa: PLC0415

    none: Any = None
    services = Services(new_sampler=none, new_session=none, new_pool=none, dialect=none)
    return GuardedModel(inner, descriptor=descriptor, services=services, load_ms=0.0)


def use(
    model: Model, adapters: Sequence[str] = (), options: Mapping[str, Any] | None = None
) -> None:
    """Tokenize a text and evaluate some tokens, with ``adapters`` where there are any.

    ``options`` are the context's ``backend_options``.
    """
    import infercore as ic  # noqa: PLC0415  (the parent reads only names from here)

    with contextlib.suppress(Exception):  # a file may hold no vocabulary
        _tokenize(model)
    window = min(64, model.info.n_ctx_train or 64)
    fields: dict[str, Any] = {"n_ctx": window, "n_batch": min(16, window)}
    if is_small := model.info.size_bytes <= _SMALL_BYTES:  # threads would only wait for each other
        fields.update(n_threads=1, n_threads_batch=1)
    chosen = tuple(ic.AdapterSpec(path=path) for path in adapters)
    with model.new_context(adapters=chosen, backend_options=options or {}, **fields) as context:
        _evaluate(context, model, 40 if is_small else 3)


def _tokenize(model: Model) -> None:
    tokenizer = model.tokenizer
    tokens = tokenizer.encode(_TEXT)
    tokenizer.decode(tokens)
    for token in range(0, tokenizer.n_vocab, max(1, tokenizer.n_vocab // _N_PIECES)):
        tokenizer.token_bytes(token)


def _evaluate(context: Context, model: Model, n: int) -> None:
    n_vocab = model.tokenizer.n_vocab
    tokens = [(7 * i + n_vocab - 1) % n_vocab for i in range(min(n, context.n_ctx - 2))]
    if model.info.has_encoder:
        context.encode(tokens[: context.n_batch])
    if model.capabilities.logits_all:
        context.decode(tokens)
        context.decode_one(tokens[0])


if __name__ == "__main__":
    main()
