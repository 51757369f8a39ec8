"""A loaded GGUF model: its facts, its tokenizer, and the contexts made on it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from infercore import OutOfMemoryError, free_bytes
from infercore_llamacpp import capabilities, gguf, loading, log, plan, rope, settings, threads
from infercore_llamacpp.adapters import Adapters
from infercore_llamacpp.context import LlamaContext, RecurrentContext
from infercore_llamacpp.library import api
from infercore_llamacpp.owned import Owned
from infercore_llamacpp.tokenizer import open_tokenizer
from infercore_llamacpp.traits import POOLING, read_traits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from infercore import ContextConfig, MemoryPlan, ModelConfig, SamplingConfig
    from infercore_llamacpp.sampler import LlamaSampler

_PLENTY = 2**29  # bytes; where limits leave less, what computing takes is looked at too
_SWITCHES = ("LLAMA_ATTN_ROT_DISABLE",)  # of the environment: they change what a cache holds


@log.raising
class LlamaModel:
    """Weights in memory, shared by all contexts; ``handle`` is the engine's model.

    ``owned`` frees it.
    """

    def __init__(
        self, path: str, config: ModelConfig, loaded: loading.Loaded, owned: Owned
    ) -> None:
        self._path, self._config = path, config
        self.handle = loaded.handle
        self._owned: Owned | None = owned
        overrides = config.backend_options.get("kv_overrides") or {}
        self.traits = read_traits(self.handle, has_gpu=loaded.has_gpu, overrides=overrides)
        self.info = self.traits.info
        self.vocab: int = api.llama_model_get_vocab(self.handle)
        template = api.llama_model_chat_template(self.handle, None)
        self.tokenizer = open_tokenizer(
            self.vocab, template.decode("utf-8", "replace") if template else None
        )
        if self.info.metadata.get("tokenizer.ggml.add_sep_token") == "true":
            self.tokenizer.separate_pairs()
        self.capabilities = capabilities.of_model(self.traits)
        self.adapters = Adapters(self.handle)
        self.files: Sequence[str] = gguf.parts(path)
        self.runtime: Mapping[str, Any] = {
            "device": loaded.device,
            "n_gpu_layers": loaded.n_gpu_layers,
            **{name: os.environ[name] for name in _SWITCHES if os.environ.get(name)},
        }

    @classmethod
    def load(cls, path: str, config: ModelConfig, *, is_checked: bool = False) -> LlamaModel:
        """Return the model at ``path``; see `loading.load` for what it takes and raises."""
        loaded = loading.load(str(path), config, is_checked=is_checked)
        owned = Owned(api.llama_model_free, loaded.handle)
        try:
            return cls(str(path), config, loaded, owned)
        except BaseException:
            owned.free()  # the error refers to what refers to it, so that it would wait
            raise

    def new_context(self, config: ContextConfig) -> LlamaContext:
        """Return a new context; every field of ``config`` is honoured or refused."""
        chosen = settings.resolve(config, self.traits)
        self._check_fits(config, chosen)
        with log.listening() as lines:
            handle = api.llama_init_from_model(self.handle, settings.to_params(chosen, self.traits))
            if not handle:
                raise log.explain(
                    OutOfMemoryError(
                        f"llama.cpp could not allocate a context of n_ctx={chosen['n_ctx']}"
                    )
                )
        owned = Owned(api.llama_free, handle, self._owned)
        try:
            self.adapters.apply(handle, config.adapters)
            kind = RecurrentContext if self.traits.is_recurrent else LlamaContext
            return kind(self, handle, owned, self._in_force(handle, chosen, lines))
        except BaseException:
            owned.free()  # as in `load`
            raise

    def plan_memory(self, config: ContextConfig) -> MemoryPlan:
        """Return the bytes that such a context will take, the weights' own beside them."""
        return plan.plan_memory(self._path, self._config, config)

    def _check_fits(self, config: ContextConfig, chosen: dict[str, Any]) -> None:
        """Refuse what the system would grant now and kill the process for later.

        The engine writes to all of its cache at once, so a cache beyond the free memory does not
        fail: the process is ended from outside.
        """
        free, in_system = free_bytes(), free_bytes(address_space=False)
        n_bytes, n_stacks = plan.most_kv_bytes(chosen, self.traits), threads.stack_bytes(chosen)
        is_limited = free < in_system // 2 and free < 2 * (n_bytes + n_stacks) + _PLENTY
        if self.traits.has_gpu or (n_bytes <= free // 2 and not is_limited):
            return
        if n_bytes <= free or not self.traits.keeps_whole_window:
            needed = self.plan_memory(config)
            n_bytes = needed.kv_bytes + needed.compute_bytes
        if n_bytes <= free < n_bytes + n_stacks and is_limited:
            raise OutOfMemoryError(
                f"the limits of this process (ulimit -v, -d) leave {free:,} bytes; a context takes "
                f"{n_bytes:,}, and the stacks of its threads {n_stacks:,}; give smaller n_threads "
                "and n_threads_batch"
            )
        if n_bytes > free:
            raise OutOfMemoryError(
                f"a context of n_ctx={chosen['n_ctx']} takes {n_bytes:,} bytes and {free:,} are "
                "free; give a smaller n_ctx or type_k and type_v"
            )

    def _in_force(
        self, handle: int, chosen: dict[str, Any], lines: Sequence[str]
    ) -> dict[str, Any]:
        """Return the value of each field as the engine has it."""
        return {
            **chosen,
            **rope.in_force(chosen, self.traits),
            "n_ctx": api.llama_n_ctx(handle),
            "n_batch": api.llama_n_batch(handle),
            "n_ubatch": api.llama_n_ubatch(handle),
            "n_seq_max": api.llama_n_seq_max(handle),
            "n_threads": api.llama_n_threads(handle),
            "n_threads_batch": api.llama_n_threads_batch(handle),
            "pooling_type": POOLING[api.llama_pooling_type(handle)],
            "attention_type": "causal" if api.llama_get_causal_attn(handle) else "non-causal",
            "flash_attn": settings.flash_in_force(chosen["flash_attn"], lines),
        }

    def native_handle(self) -> int:
        """Return the address of the ``llama_model``."""
        return self.handle

    def new_sampler(self, config: SamplingConfig) -> LlamaSampler:
        """Return the engine's own sampler for ``config``."""
        from infercore_llamacpp.sampler import LlamaSampler  # noqa: PLC0415

        return LlamaSampler.build(self, config)

    def close(self) -> None:
        """Free weights, and adapters with them. All contexts are closed."""
        owned, self._owned = self._owned, None
        if owned is not None:
            owned.let_go()
