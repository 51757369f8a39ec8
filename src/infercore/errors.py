"""Every error that infercore raises, in one tree.

::

    InferCoreError
    ├── BackendNotFoundError        (LookupError)
    ├── BackendUnavailableError     (ImportError)
    ├── ModelLoadError              (OSError)
    │   ├── ModelNotFoundError
    │   └── ModelFormatError
    ├── OutOfMemoryError            (MemoryError)
    ├── InvalidInputError           (ValueError)
    │   ├── InvalidTokenError
    │   ├── InvalidSequenceError
    │   └── InvalidPositionError
    ├── InvalidStateError           (RuntimeError)
    │   └── OutputNotAvailableError
    ├── ContextOverflowError        (ValueError)
    ├── ManifestMismatchError       (ValueError)
    ├── UnsupportedFeatureError     (NotImplementedError)
    ├── SnapshotError               (ValueError)
    ├── GrammarError                (ValueError)
    ├── DecodeAbortedError          (RuntimeError)
    ├── SessionClosedError          (RuntimeError)
    ├── SessionBusyError            (RuntimeError)
    ├── SessionFatalError           (RuntimeError)
    ├── PoolFullError               (RuntimeError)
    ├── CallTimeoutError            (TimeoutError)
    ├── TransientEngineError        (RuntimeError)
    └── PluginError                 (RuntimeError)
        ├── PluginLoadError
        ├── PluginConflictError
        └── PluginVersionError

Each error also subclasses the closest builtin, so ``except ValueError`` works, and carries its
facts as attributes. ``state_after`` says what became of the object that raised it:

``unchanged``
    as before the call;
``partial``
    part of the work stays; ``resident_tokens`` says how much;
``cleared``
    its resident tokens are gone, it can be used again;
``closed``
    it can only be closed (and a session explained).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self

StateAfter = Literal["unchanged", "partial", "cleared", "closed"]


class InferCoreError(Exception):
    """Base of all errors of infercore. State afterwards: see ``state_after``."""

    state_after: StateAfter = "unchanged"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(
    cls: type[InferCoreError], args: tuple[object, ...], facts: dict[str, object]
) -> InferCoreError:
    error = cls.__new__(cls, *args)
    super(InferCoreError, error).__init__(*args)  # the builtin's: ImportError has a ``msg``
    error.__dict__.update(facts)
    return error


class BackendNotFoundError(InferCoreError, LookupError):
    """There is no such backend, or none can read this file. State afterwards: unchanged.

    ``name`` is the backend requested (None when the file decides), ``candidates`` the known names.
    """

    def __init__(
        self, message: str, *, name: str | None = None, candidates: Sequence[str] = ()
    ) -> None:
        super().__init__(message)
        self.name = name
        self.candidates = tuple(candidates)


class BackendUnavailableError(InferCoreError, ImportError):
    """The backend is installed but cannot run here; ``reason`` says why. State: unchanged."""

    def __init__(self, message: str, *, backend: str, reason: str) -> None:
        super().__init__(message)
        self.backend = backend
        self.reason = reason


class ModelLoadError(InferCoreError, OSError):
    """The model at ``path`` could not be loaded. State afterwards: unchanged, nothing is held."""

    def __init__(self, message: str, *, path: str) -> None:
        super().__init__(message)
        self.path = path


class ModelNotFoundError(ModelLoadError):
    """There is no file or folder at ``path``. State afterwards: unchanged."""


class ModelFormatError(ModelLoadError):
    """``path`` is truncated, corrupt, of another format or architecture. State: unchanged."""


class OutOfMemoryError(InferCoreError, MemoryError):
    """Memory ran out; ``attempts`` lists what was tried.

    State afterwards: unchanged, or partial where a call of several pieces kept some before.
    """

    def __new__(cls, *args: object, **_: object) -> Self:
        """Make one as `Exception` does: MemoryError's own refuses a class with another base."""
        return Exception.__new__(cls, *args)

    def __init__(self, message: str, *, attempts: Sequence[object] = ()) -> None:
        super().__init__(message)
        self.attempts = tuple(attempts)


class InvalidInputError(InferCoreError, ValueError):
    """An argument was rejected before the engine was called. State afterwards: unchanged.

    ``field`` names the argument, ``value`` is what was given, ``allowed`` what would be accepted.
    """

    def __init__(
        self, message: str, *, field: str, value: object = None, allowed: object = None
    ) -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.allowed = allowed


class InvalidTokenError(InvalidInputError):
    """A token id is outside the vocabulary. State afterwards: unchanged."""


class InvalidSequenceError(InvalidInputError):
    """A sequence id is outside ``0 <= seq_id < n_seq_max``. State afterwards: unchanged."""


class InvalidPositionError(InvalidInputError):
    """A position is negative, or leaves a gap. State afterwards: unchanged."""


class InvalidStateError(InferCoreError, RuntimeError):
    """A call came out of order: ``operation`` is not possible in ``state``. State: unchanged."""

    def __init__(self, message: str, *, operation: str, state: str) -> None:
        super().__init__(message)
        self.operation = operation
        self.state = state


class OutputNotAvailableError(InvalidStateError):
    """The last call did not produce this output, or it is stale. State afterwards: unchanged."""


class ContextOverflowError(InferCoreError, ValueError):
    """The tokens would not fit the window.

    Raised before any change (state *unchanged*), except with ``stage="engine"``: there the engine
    ran out of room during the call, and ``resident_tokens`` is what stayed (state *partial*).
    ``n_ctx`` is the enforced window in tokens.
    """

    def __init__(
        self,
        message: str | None = None,
        *,
        stage: str,
        resident_tokens: int,
        additional_tokens: int,
        n_ctx: int,
    ) -> None:
        super().__init__(
            message
            or f"{stage}: {resident_tokens} resident + {additional_tokens} more tokens exceed the "
            f"window of {n_ctx}; shorten the text, or open with a larger n_ctx"
        )
        self.stage = stage
        self.resident_tokens = resident_tokens
        self.additional_tokens = additional_tokens
        self.n_ctx = n_ctx
        if stage == "engine":
            self.state_after = "partial"


class ManifestMismatchError(InferCoreError, ValueError):
    """The stated identity ``field`` differs from the session's. State afterwards: unchanged."""

    def __init__(
        self, message: str | None = None, *, field: str, expected: object, actual: object
    ) -> None:
        super().__init__(
            message
            or f"{field} changed: the caller states {expected!r}, the session has {actual!r}; "
            "open a session of that identity, or leave the field out"
        )
        self.field = field
        self.expected = expected
        self.actual = actual


class UnsupportedFeatureError(InferCoreError, NotImplementedError):
    """The loaded model or backend cannot do this. State afterwards: unchanged."""

    def __init__(
        self, message: str | None = None, *, feature: str, backend: str = "", hint: str = ""
    ) -> None:
        where = f" on backend {backend!r}" if backend else ""
        verb = (
            "are"
            if feature in ("adapters", "embeddings", "logprobs", "processors", "tools")
            else "is"
        )
        super().__init__(
            message or f"{feature} {verb} not supported{where}" + (f"; {hint}" if hint else "")
        )
        self.feature = feature
        self.backend = backend
        self.hint = hint


class SnapshotError(InferCoreError, ValueError):
    """Saved state is corrupt, truncated, or of another model or shape; ``reason`` says which.

    State afterwards: *unchanged* when refused by its header, else *cleared*.
    """

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class GrammarError(InferCoreError, ValueError):
    """A grammar, schema or regular expression (``source``) is wrong. State: unchanged."""

    def __init__(self, message: str, *, source: str) -> None:
        super().__init__(message)
        self.source = source


class DecodeAbortedError(InferCoreError, RuntimeError):
    """The work was cancelled. State: partial; ``resident_tokens`` are held and can be built on."""

    state_after: StateAfter = "partial"

    def __init__(self, message: str, *, resident_tokens: int) -> None:
        super().__init__(message)
        self.resident_tokens = resident_tokens


class SessionClosedError(InferCoreError, RuntimeError):
    """A model, context, sampler or session was used after ``close``. State afterwards: closed."""

    state_after: StateAfter = "closed"


class SessionBusyError(InferCoreError, RuntimeError):
    """Another thread, or an open decode iterator, holds the object. State: unchanged."""


class SessionFatalError(InferCoreError, RuntimeError):
    """Resident tokens can no longer be trusted. State: closed; ``cause`` is the first failure."""

    state_after: StateAfter = "closed"

    def __init__(self, message: str, *, cause: BaseException) -> None:
        super().__init__(message)
        self.cause = cause


class PoolFullError(InferCoreError, RuntimeError):
    """The pool's queue is full. State afterwards: unchanged.

    ``n_waiting`` counts the waiting calls, ``retry_after`` estimates the seconds until there is
    room for one more (None while there is nothing to estimate from).
    """

    def __init__(
        self, message: str | None = None, *, n_waiting: int, retry_after: float | None = None
    ) -> None:
        super().__init__(
            message
            or f"{n_waiting} calls are already waiting for a place{_again(retry_after)}, or "
            f"open the pool "
            "with a larger max_waiting"
        )
        self.n_waiting = n_waiting
        self.retry_after = retry_after


class CallTimeoutError(InferCoreError, TimeoutError):
    """The call's ``timeout`` passed before its first token. State afterwards: partial.

    ``elapsed_ms`` is how long the call took, including waiting; ``resident_tokens`` stay, so that
    calling again continues from there.
    """

    state_after: StateAfter = "partial"

    def __init__(
        self, message: str | None = None, *, elapsed_ms: float, resident_tokens: int
    ) -> None:
        super().__init__(
            message
            or f"the call did not finish within {elapsed_ms:.0f} ms; {resident_tokens} tokens are "
            "resident, so call again to continue from there, or give a longer timeout"
        )
        self.elapsed_ms = elapsed_ms
        self.resident_tokens = resident_tokens


class TransientEngineError(InferCoreError, RuntimeError):
    """An engine call failed and changed nothing: the engine is remote or busy. Try again.

    A plugin raises it where it knows this; the core does where texts and grammars of others are
    worked on for too long (``backend`` is ""). ``retry_after`` is in seconds, None where the engine
    does not say. State afterwards: unchanged; *partial* where the engine had taken earlier parts of
    a long call (see ``n_past``).
    """

    def __init__(
        self, message: str | None = None, *, backend: str, retry_after: float | None = None
    ) -> None:
        super().__init__(
            message
            or f"the engine of backend {backend!r} could not take the call{_again(retry_after)}"
        )
        self.backend = backend
        self.retry_after = retry_after


def _again(retry_after: float | None) -> str:
    return "; ask again later" if retry_after is None else f"; ask again in {retry_after:.3g} s"


class PluginError(InferCoreError, RuntimeError):
    """A plugin is broken. The other plugins work. State afterwards: unchanged."""

    def __init__(self, message: str, *, plugin: str, distribution: str | None = None) -> None:
        super().__init__(message)
        self.plugin = plugin
        self.distribution = distribution


class PluginLoadError(PluginError):
    """The plugin could not be imported, or did not provide a valid backend. State: unchanged."""


class PluginConflictError(PluginError):
    """Two distributions offer a backend of the same name. State: unchanged."""


class PluginVersionError(PluginError):
    """The plugin was written for another version of the plugin interface. State: unchanged."""
