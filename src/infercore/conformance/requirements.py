"""What laws may need of a backend, and the smallest call that must be refused without it.

A requirement is declared by capabilities of the loaded model in a context, never by the
backend's class. Each has a docstring in `Requirement.text`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from infercore.errors import UnsupportedFeatureError
from infercore.values.config import AdapterSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from infercore.conformance.rig import Rig

TAIL = 6
"""Tokens that laws remove from a sequence's end at most."""


@attrs.frozen(kw_only=True)
class Requirement:
    """A named need: what it means, whether it is declared, and what is refused without it.

    ``probe(rig, context)`` gets a context of one sequence that holds 8 tokens.
    """

    text: str
    declared: Callable[[Rig], bool]
    probe: Callable[[Rig, Any], object]


def _capability(name: str) -> Callable[[Rig], bool]:
    def declared(rig: Rig) -> bool:
        return bool(getattr(rig.context().capabilities, name))

    return declared


def _removes(rig: Rig) -> bool:
    kinds = rig.context().capabilities
    if kinds.kv_remove == "rollback":
        return bool(kinds.max_rollback >= TAIL)
    return kinds.kv_remove in ("any", "suffix")


def _probe_tail(_: Rig, context: Any) -> None:
    back = min(context.capabilities.max_rollback, TAIL) + 1
    context.eval(context.tokens()[:1], context.n_past() - back)


def _probe_hole(_: Rig, context: Any) -> None:
    if context.seq_remove(0, 1, 2) is not False:
        return
    raise UnsupportedFeatureError(feature="seq_remove returned False, as it should")


def _shifts(rig: Rig) -> bool:
    kinds = rig.context().capabilities
    return bool(kinds.kv_shift and kinds.kv_remove == "any")


def _probe_shift(rig: Rig, context: Any) -> None:
    if context.capabilities.kv_shift:
        rig.session(overflow="shift")
    context.seq_shift(0, 0, -1, 1)


def _copies_parts(rig: Rig) -> bool:
    return any(kind == "any" for kind in _copy_kinds(rig))


def _copy_kinds(rig: Rig) -> list[str]:
    if rig.context().capabilities.kv_copy == "none":
        return ["none"]
    kinds = [rig.two().capabilities.kv_copy]
    try:
        kinds.append(rig.two(kv_unified=True).capabilities.kv_copy)
    except UnsupportedFeatureError:
        return kinds
    return kinds


def copying_parts(rig: Rig) -> Any:
    """Return a context of two sequences that copies parts of them."""
    plain = rig.two()
    return plain if plain.capabilities.kv_copy == "any" else rig.two(kv_unified=True)


def _probe_copy_part(rig: Rig, context: Any) -> None:
    if context.capabilities.kv_copy == "none":
        context.seq_copy(0, 0, 0, 1)
        return
    two = rig.two()
    two.decode(context.tokens())
    two.seq_copy(0, 1, 0, 3)


def _probe_embeddings(rig: Rig, context: Any) -> None:
    if context.capabilities.embeddings:
        return
    try:
        context.embeddings()
    except UnsupportedFeatureError:
        rig.context(embeddings=True)


def _plans(rig: Rig) -> bool:
    try:
        rig.model.plan_memory(n_ctx=64)
    except UnsupportedFeatureError:
        return False
    return True


REQUIREMENTS = {
    "kv_remove": Requirement(
        text="the end of a sequence can be removed, at least six tokens of it",
        declared=_removes,
        probe=_probe_tail,
    ),
    "kv_remove_any": Requirement(
        text="any part of a sequence can be removed",
        declared=lambda rig: rig.context().capabilities.kv_remove == "any",
        probe=_probe_hole,
    ),
    "kv_copy": Requirement(
        text="a whole sequence can be copied to another one",
        declared=lambda rig: rig.context().capabilities.kv_copy != "none",
        probe=lambda _, context: context.seq_copy(0, 0),
    ),
    "kv_copy_any": Requirement(
        text="a part of a sequence can be copied to another one",
        declared=_copies_parts,
        probe=_probe_copy_part,
    ),
    "kv_shift": Requirement(
        text="positions can be moved",
        declared=_capability("kv_shift"),
        probe=lambda _, context: context.seq_shift(0, 0, -1, 1),
    ),
    "shift": Requirement(
        text="a hole can be made and what follows it moved there",
        declared=_shifts,
        probe=_probe_shift,
    ),
    "kv_divide": Requirement(
        text="positions can be divided",
        declared=_capability("kv_divide"),
        probe=lambda _, context: context.seq_divide(0, 0, -1, 2),
    ),
    "multi_sequence": Requirement(
        text="several sequences can be decoded in one call",
        declared=_capability("multi_sequence"),
        probe=lambda _, context: context.decode_batch([(context.tokens()[0], (0,), True)]),
    ),
    "state": Requirement(
        text="the state of a context can be saved and restored",
        declared=_capability("state"),
        probe=lambda _, context: context.save_state(),
    ),
    "sequence_state": Requirement(
        text="the state of one sequence can be saved and restored",
        declared=_capability("sequence_state"),
        probe=lambda _, context: context.save_sequence(0),
    ),
    "logits_all": Requirement(
        text="one call makes the logits of each of its tokens",
        declared=_capability("logits_all"),
        probe=lambda _, context: context.decode(context.tokens()[:2], logits="all"),
    ),
    "embeddings": Requirement(
        text="embeddings of tokens and texts can be read",
        declared=_capability("embeddings"),
        probe=_probe_embeddings,
    ),
    "encoder": Requirement(
        text="there is an encoder",
        declared=lambda rig: rig.is_encoder or rig.encoder is not None,
        probe=lambda _, context: context.encode(context.tokens()[:2]),
    ),
    "live_threads": Requirement(
        text="the number of threads can be changed while a context is open",
        declared=_capability("live_threads"),
        probe=lambda _, context: context.set_threads(1),
    ),
    "lora": Requirement(
        text="LoRA adapters can be applied",
        declared=_capability("lora"),
        probe=lambda _, context: context.set_adapters([AdapterSpec(path="none")]),
    ),
    "native_sampler": Requirement(
        text="the engine has a sampler of its own",
        declared=_capability("native_sampler"),
        probe=lambda rig, _: rig.model.new_sampler(implementation="native"),
    ),
    "chat_template": Requirement(
        text="the model has a chat template",
        declared=lambda rig: rig.tokenizer.chat_template is not None,
        probe=lambda rig, _: rig.tokenizer.apply_chat_template([{"role": "user", "content": "a"}]),
    ),
    "plan_memory": Requirement(
        text="the memory of a context can be planned",
        declared=_plans,
        probe=lambda rig, _: rig.model.plan_memory(n_ctx=64),
    ),
}
