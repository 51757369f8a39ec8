"""Run language models on your own machine, with any engine.

>>> import infercore as ic
>>> with ic.load_model("model.gguf") as model:                  # doctest: +SKIP
...     with model.new_session(n_ctx=4096) as session:
...         session.ensure_prefix("You are a careful reviewer. ")
...         session.prefill_suffix("Review this diff: ...")
...         for chunk in session.decode(max_tokens=128):
...             print(chunk.text, end="", flush=True)

Names are imported when they are first used: ``import infercore`` loads no engine, no NumPy and
scans no plugins.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infercore.api import aopen_context as aopen_context
    from infercore.api import aopen_pool as aopen_pool
    from infercore.api import aopen_session as aopen_session
    from infercore.api import backends as backends
    from infercore.api import embed as embed
    from infercore.api import get_backend as get_backend
    from infercore.api import load_model as load_model
    from infercore.api import open_pool as open_pool
    from infercore.api import open_session as open_session
    from infercore.api import plan_memory as plan_memory
    from infercore.api import rerank as rerank
    from infercore.errors import BackendNotFoundError as BackendNotFoundError
    from infercore.errors import BackendUnavailableError as BackendUnavailableError
    from infercore.errors import CallTimeoutError as CallTimeoutError
    from infercore.errors import ContextOverflowError as ContextOverflowError
    from infercore.errors import DecodeAbortedError as DecodeAbortedError
    from infercore.errors import GrammarError as GrammarError
    from infercore.errors import InferCoreError as InferCoreError
    from infercore.errors import InvalidInputError as InvalidInputError
    from infercore.errors import InvalidPositionError as InvalidPositionError
    from infercore.errors import InvalidSequenceError as InvalidSequenceError
    from infercore.errors import InvalidStateError as InvalidStateError
    from infercore.errors import InvalidTokenError as InvalidTokenError
    from infercore.errors import ManifestMismatchError as ManifestMismatchError
    from infercore.errors import ModelFormatError as ModelFormatError
    from infercore.errors import ModelLoadError as ModelLoadError
    from infercore.errors import ModelNotFoundError as ModelNotFoundError
    from infercore.errors import OutOfMemoryError as OutOfMemoryError
    from infercore.errors import OutputNotAvailableError as OutputNotAvailableError
    from infercore.errors import PluginConflictError as PluginConflictError
    from infercore.errors import PluginError as PluginError
    from infercore.errors import PluginLoadError as PluginLoadError
    from infercore.errors import PluginVersionError as PluginVersionError
    from infercore.errors import PoolFullError as PoolFullError
    from infercore.errors import SessionBusyError as SessionBusyError
    from infercore.errors import SessionClosedError as SessionClosedError
    from infercore.errors import SessionFatalError as SessionFatalError
    from infercore.errors import SnapshotError as SnapshotError
    from infercore.errors import TransientEngineError as TransientEngineError
    from infercore.errors import UnsupportedFeatureError as UnsupportedFeatureError
    from infercore.protocols.hooks import API_VERSION as API_VERSION
    from infercore.protocols.hooks import hookimpl as hookimpl
    from infercore.protocols.public import Backend as Backend
    from infercore.protocols.public import Context as Context
    from infercore.protocols.public import Model as Model
    from infercore.protocols.public import Sampler as Sampler
    from infercore.protocols.public import Tokenizer as Tokenizer
    from infercore.protocols.session import Session as Session
    from infercore.protocols.spi import EngineContext as EngineContext
    from infercore.protocols.spi import EngineModel as EngineModel
    from infercore.protocols.spi import EngineTokenizer as EngineTokenizer
    from infercore.session.async_context import AsyncContext as AsyncContext
    from infercore.session.asynchronous import AsyncSession as AsyncSession
    from infercore.session.observer import set_observer as set_observer
    from infercore.session.pool import SessionPool as SessionPool
    from infercore.values.config import AdapterSpec as AdapterSpec
    from infercore.values.config import ContextConfig as ContextConfig
    from infercore.values.config import DecodeConfig as DecodeConfig
    from infercore.values.config import KVType as KVType
    from infercore.values.config import ModelConfig as ModelConfig
    from infercore.values.config import SamplingConfig as SamplingConfig
    from infercore.values.config import SpeculativeConfig as SpeculativeConfig
    from infercore.values.config import refuse_unhonoured as refuse_unhonoured
    from infercore.values.files import open_regular as open_regular
    from infercore.values.files import read_regular as read_regular
    from infercore.values.info import BackendDescriptor as BackendDescriptor
    from infercore.values.info import BackendInfo as BackendInfo
    from infercore.values.info import Capabilities as Capabilities
    from infercore.values.info import DeviceInfo as DeviceInfo
    from infercore.values.info import FimTokens as FimTokens
    from infercore.values.info import MemoryPlan as MemoryPlan
    from infercore.values.info import ModelInfo as ModelInfo
    from infercore.values.info import PerfCounters as PerfCounters
    from infercore.values.manifest import ContextManifest as ContextManifest
    from infercore.values.manifest import ManifestSegment as ManifestSegment
    from infercore.values.manifest import hash_token_ids as hash_token_ids
    from infercore.values.memory import free_bytes as free_bytes
    from infercore.values.pool import PoolConfig as PoolConfig
    from infercore.values.pool import PoolStats as PoolStats
    from infercore.values.session import Beam as Beam
    from infercore.values.session import Completion as Completion
    from infercore.values.session import ContextReport as ContextReport
    from infercore.values.session import Message as Message
    from infercore.values.session import PrefixInput as PrefixInput
    from infercore.values.session import PrefixStatus as PrefixStatus
    from infercore.values.session import Snapshot as Snapshot
    from infercore.values.session import StreamChunk as StreamChunk
    from infercore.values.session import SuffixInput as SuffixInput
    from infercore.values.session import SuffixStatus as SuffixStatus
    from infercore.values.session import TokenLogprob as TokenLogprob
    from infercore.values.session import ToolCall as ToolCall
    from infercore.values.session import Usage as Usage

__version__ = "0.1.0"

_HOMES = {
    "infercore.api": (
        "aopen_context aopen_pool aopen_session backends embed get_backend load_model open_pool "
        "open_session plan_memory rerank"
    ),
    "infercore.errors": (
        "BackendNotFoundError BackendUnavailableError CallTimeoutError ContextOverflowError "
        "DecodeAbortedError GrammarError InferCoreError InvalidInputError InvalidPositionError "
        "InvalidSequenceError InvalidStateError InvalidTokenError ManifestMismatchError "
        "ModelFormatError ModelLoadError ModelNotFoundError OutOfMemoryError "
        "OutputNotAvailableError PluginConflictError PluginError PluginLoadError "
        "PluginVersionError PoolFullError SessionBusyError SessionClosedError SessionFatalError "
        "SnapshotError TransientEngineError UnsupportedFeatureError"
    ),
    "infercore.protocols.hooks": "API_VERSION hookimpl",
    "infercore.protocols.public": "Backend Context Model Sampler Tokenizer",
    "infercore.protocols.session": "Session",
    "infercore.protocols.spi": "EngineContext EngineModel EngineTokenizer",
    "infercore.session.async_context": "AsyncContext",
    "infercore.session.asynchronous": "AsyncSession",
    "infercore.session.observer": "set_observer",
    "infercore.session.pool": "SessionPool",
    "infercore.values.config": (
        "AdapterSpec ContextConfig DecodeConfig KVType ModelConfig SamplingConfig "
        "SpeculativeConfig refuse_unhonoured"
    ),
    "infercore.values.files": "open_regular read_regular",
    "infercore.values.info": (
        "BackendDescriptor BackendInfo Capabilities DeviceInfo FimTokens MemoryPlan ModelInfo "
        "PerfCounters"
    ),
    "infercore.values.manifest": "ContextManifest ManifestSegment hash_token_ids",
    "infercore.values.memory": "free_bytes",
    "infercore.values.pool": "PoolConfig PoolStats",
    "infercore.values.session": (
        "Beam Completion ContextReport Message PrefixInput PrefixStatus Snapshot StreamChunk "
        "SuffixInput SuffixStatus TokenLogprob ToolCall Usage"
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}

__all__ = sorted(_HOME_OF)  # noqa: PLE0605  (the names stand once, in _HOMES)


def __getattr__(name: str) -> Any:
    module = _HOME_OF.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
