"""The context over an encoder: each call takes whole texts, and nothing is resident after it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from infercore import Capabilities, InvalidInputError, UnsupportedFeatureError
from infercore_openvino.base import BaseContext
from infercore_openvino.compiled import NOTHING
from infercore_openvino.encoder_graph import HIDDEN, SCORES
from infercore_openvino.engine import BACKEND
from infercore_openvino.facts import trained_window
from infercore_openvino.limits import computing
from infercore_openvino.settings import (
    DEFAULT_N_BATCH,
    FLASH_ATTENTION,
    POOLING,
    RANK,
    settings,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from infercore import ContextConfig
    from infercore_openvino.additions import Additions
    from infercore_openvino.base import Floats, Tokens
    from infercore_openvino.compiled import Compiled, CompiledGraphs
    from infercore_openvino.files import ModelFiles
    from infercore_openvino.settings import Settings

    Sequences = Mapping[int, Tokens]

_PROBED = 4  # tokens
_SAME = 1e-3  # of the largest number; bfloat16 rounds in another order


def capabilities(settings: Settings) -> Capabilities:
    """Return what an encoder's context can do."""
    return Capabilities(
        multi_sequence=True,
        live_threads=True,
        embeddings=True,
        pooling=(RANK,) if settings.pooling == RANK else POOLING,
        encoder=True,
        abort=True,
        kv_types=settings.kv_types,
        flash_attention=FLASH_ATTENTION,
    )


def settings_of(config: ContextConfig, files: ModelFiles, device: str) -> Settings:
    """Return the settings that ``config`` asks for, of an encoder.

    Which attention the graph has shows when it runs: see `EncoderContext`. Raises what `settings`
    raises, and `InvalidInputError` for a window beyond the trained one: positions are looked up
    in a table that ends there, and the engine does not check.
    """
    attention = config.attention_type or "non-causal"
    found = settings(config, files, device=device, attention=attention)
    if found.form is not None:
        raise _unsupported("form", found.form, "an encoder has a form of its own; leave it out")
    if config.adapters:
        raise _unsupported(
            "adapters", config.adapters, "an encoder's graph takes none; leave it out"
        )
    if config.embeddings is False:
        raise _no_other_output("embeddings")
    trained = trained_window(files)
    if 0 < trained < found.n_ctx:
        raise InvalidInputError(
            f"n_ctx={found.n_ctx} is more than the {trained} positions that this encoder has; "
            f"give n_ctx={trained} or less",
            field="n_ctx",
            value=found.n_ctx,
            allowed=f"at most {trained}",
        )
    n_batch = config.n_batch or max(DEFAULT_N_BATCH, config.n_ubatch or 0)
    n_batch = min(n_batch, found.n_ctx)
    return replace(
        found,
        n_batch=n_batch,
        n_ubatch=min(n_batch, config.n_ubatch or n_batch),
        embeddings=True,
        pooling=RANK if files.ranks else config.pooling_type or files.pooling,
        fixed={**found.fixed, "attention_type": config.attention_type},
    )


def _unsupported(name: str, value: object, hint: str) -> UnsupportedFeatureError:
    return UnsupportedFeatureError(
        f"{name}={value!r} is not supported on backend {BACKEND!r}; {hint}",
        feature=name,
        backend=BACKEND,
        hint=hint,
    )


def _no_other_output(name: str) -> UnsupportedFeatureError:
    return _unsupported(name, value=False, hint="an encoder only makes embeddings")


class EncoderContext(BaseContext):
    """Texts over one infer request; several of a call are rows of it, padded to one length."""

    def __init__(
        self,
        compiled: Compiled,
        graphs: CompiledGraphs,
        settings: Settings,
        added: Additions = NOTHING,
    ) -> None:
        super().__init__(compiled, graphs, settings, added)
        self.capabilities = capabilities(settings)
        self.separator: int | None = None
        self._ranks = settings.pooling == RANK
        self._output = SCORES if self._ranks else HIDDEN
        kinds = compiled.graph.config.get("type_vocab_size")
        self._has_types = isinstance(kinds, int) and kinds > 1
        if compiled.is_causal is None:
            compiled.is_causal = not self._ranks and self._looks_back_only()
        self._set_attention("causal" if compiled.is_causal else "non-causal")

    def _looks_back_only(self) -> bool:
        """Run a text alone and with more behind it: is its first token's output the same."""
        tokens = np.arange(_PROBED, dtype=np.int32)
        followed = self._infer(self._request, [tokens])[0, 0].copy()
        alone = self._infer(self._request, [tokens[:1]])[0, 0]
        return np.allclose(alone, followed, rtol=0, atol=_SAME * np.abs(alone).max())

    def _set_attention(self, found: str) -> None:
        asked = self.effective["attention_type"]
        if asked not in {None, found}:
            raise _unsupported(
                "attention_type", asked, f"the exported graph is {found}; leave it out"
            )
        self.effective["attention_type"] = found

    def _move_to(self, compiled: Compiled, request: Any, added: Additions) -> None:
        """Nothing is held."""

    # -- texts in ------------------------------------------------------------------------------

    def encode(self, tokens: Tokens) -> None:
        """Work out the hidden states of a text, as sequence 0."""
        self.decode(tokens, seq_id=0, logits="none")

    def decode(self, tokens: Tokens, *, seq_id: int, logits: str) -> None:  # noqa: ARG002
        """Do what `encode` does, for one sequence: the tokens are all of its text."""
        self._run({seq_id: tokens})
        self._hidden_all.add(self._hidden[seq_id], last=True)

    def decode_batch(
        self,
        tokens: Tokens,
        positions: Any,  # noqa: ARG002  (each text is whole, so they count from 0)
        seq_ids: Sequence[Sequence[int]],
        wanted: Any,  # noqa: ARG002
    ) -> None:
        """Work out several texts in one call."""
        places: dict[int, list[int]] = {}
        for i, ids in enumerate(seq_ids):
            for seq_id in ids:
                places.setdefault(seq_id, []).append(i)
        self._run({seq_id: tokens[at] for seq_id, at in places.items()})
        if self._ranks:
            return
        rows = np.empty((len(tokens), self._compiled.graph.shape.n_embd), dtype=np.float32)
        for seq_id, at in reversed(places.items()):
            rows[at] = self._hidden[seq_id]
        self._hidden_all.add(rows, last=True)

    def _run(self, texts: Sequences) -> None:
        self._begin_outputs()
        for seq_ids in _groups(texts, self.n_ubatch):
            self._check_abort(seq_ids[0])
            found = self._infer(self._request, [texts[s] for s in seq_ids])
            for row, seq_id in enumerate(seq_ids):
                end = None if self._ranks else len(texts[seq_id])
                self._hidden[seq_id] = np.atleast_2d(found[row, :end]).copy()
        self.n_evaluated += sum(map(len, texts.values()))

    def _infer(self, request: Any, texts: Sequence[Tokens]) -> Floats:
        """Return the hidden states [texts, longest, n_embd]; a view, with what padding gave."""
        shape = (len(texts), max(map(len, texts)))
        ids, mask, kinds = np.zeros((3, *shape), dtype=np.int64)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
            mask[row, : len(text)] = 1
        if self._ranks and self._has_types:  # of a pair the second text is of another kind
            for row, text in enumerate(texts):
                ends = np.flatnonzero(text == self.separator)
                kinds[row, ends[0] + 1 if len(ends) else len(text) : len(text)] = 1
        inputs = self._compiled.given(
            input_ids=ids,
            attention_mask=mask,
            token_type_ids=kinds,
            position_ids=np.broadcast_to(np.arange(shape[1]), shape),
        )
        with computing("a compute step"):
            request.infer(inputs, share_inputs=True, share_outputs=True)
        found: Floats = request.get_tensor(self._output).data
        return found

    def warmup(self) -> None:
        """Run a token in a request of its own."""
        request = self._compiled.engine.create_infer_request()
        self._infer(request, [np.zeros(1, dtype=np.int32)])

    # -- what is not there ---------------------------------------------------------------------

    def n_past(self, seq_id: int) -> int:  # noqa: ARG002
        """Return 0: nothing is kept."""
        return 0

    def seq_remove(self, seq_id: int, p0: int, p1: int) -> bool:  # noqa: ARG002
        """Do nothing: nothing is kept."""
        return True

    def clear(self) -> None:
        """Forget the outputs."""
        self._begin_outputs()

    def set_embeddings(self, on: bool) -> None:  # noqa: FBT001  (the contract's signature)
        """Refuse to switch them off."""
        if not on:
            raise _no_other_output("set_embeddings")


def _groups(texts: Sequences, n_tokens: int) -> Iterator[list[int]]:
    """Cut the sequences, long ones first, into groups of up to ``n_tokens`` with their padding."""
    waiting = sorted(texts, key=lambda seq_id: -len(texts[seq_id]))
    while waiting:
        n_rows = max(1, n_tokens // len(texts[waiting[0]]))
        yield waiting[:n_rows]
        waiting = waiting[n_rows:]
