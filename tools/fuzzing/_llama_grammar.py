"""llama.cpp's own grammar sampler, to compare with, in a fork that is ended when it is too slow.

It follows each way through nested repeats, so that one call can take minutes after others that took
none.
"""

from __future__ import annotations

import array
import ctypes
import os
import signal
import socket
from typing import TYPE_CHECKING

import llama_cpp

from fuzzing import Patience

if TYPE_CHECKING:
    from collections.abc import Iterable

LIMIT_S = 2.0
_REFUSED = b"r"


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator,unused-ignore]
def _say_nothing(level: int, text: bytes, data: ctypes.c_void_p) -> None:
    del level, text, data


class LlamaVocabulary:
    """The vocabulary of a GGUF file, and grammars over it."""

    def __init__(self, path: str) -> None:
        llama_cpp.llama_log_set(_say_nothing, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        self.vocab = llama_cpp.llama_model_get_vocab(self._model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)

    def open(self, grammar: str) -> LlamaGrammar | None:
        """Return the grammar at its beginning; None where llama.cpp refuses it."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            _serve(self, grammar, theirs)
        theirs.close()
        opened = LlamaGrammar(pid, ours)
        if opened.answer() == _REFUSED:
            opened.close()
            return None
        return opened


class Slow(Exception):  # noqa: N818  (nothing of ours is wrong)
    """llama.cpp took too long, or ended its process."""


class LlamaGrammar:
    """A grammar, and how far a text has come in it."""

    def __init__(self, pid: int, pipe: socket.socket) -> None:
        self._pid = pid
        self._pipe = pipe

    def allowed(self) -> set[int]:
        """Return the tokens that may come next."""
        return set(array.array("i", self._asked([])))

    def accept(self, token: int) -> None:
        """Go on by a token that is allowed; any other would end the process."""
        self._asked([token])

    def _asked(self, tokens: Iterable[int]) -> bytes:
        try:
            self._pipe.send(b"?" + array.array("i", tokens).tobytes())
        except BrokenPipeError as error:
            raise Slow("llama.cpp ended its process") from error
        return self.answer()

    def answer(self) -> bytes:
        """Wait for what the fork says; raises `Slow`."""
        patience = Patience(LIMIT_S)
        while patience.left_s > 0:
            self._pipe.settimeout(patience.step_s() or 0.01)
            try:
                data = self._pipe.recv(1 << 20)
            except TimeoutError:
                patience.spend()
                continue
            except ConnectionResetError:
                data = b""
            if not data:
                raise Slow("llama.cpp ended its process")
            return data[1:] if data[:1] == b"=" else data
        raise Slow(f"llama.cpp took more than {LIMIT_S:g} s")

    def close(self) -> None:
        """End the fork."""
        self._pipe.close()
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _serve(vocabulary: LlamaVocabulary, grammar: str, pipe: socket.socket) -> None:
    """Answer in the fork, and end it without any destructor."""
    try:
        sampler = llama_cpp.llama_sampler_init_grammar(vocabulary.vocab, grammar.encode(), b"root")
        pipe.send(b"=" if sampler else _REFUSED)
        rows = (llama_cpp.llama_token_data * vocabulary.n_vocab)()
        while asked := pipe.recv(1 << 10):
            if token := array.array("i", asked[1:]):
                llama_cpp.llama_sampler_accept(sampler, token[0])
                pipe.send(b"=")
            else:
                pipe.send(b"=" + array.array("i", _allowed(sampler, rows)).tobytes())
    finally:
        os._exit(0)


def _allowed(sampler: ctypes.c_void_p, rows: ctypes.Array[llama_cpp.llama_token_data]) -> list[int]:
    for token, row in enumerate(rows):
        row.id, row.logit = token, 0.0
    candidates = llama_cpp.llama_token_data_array(
        data=rows, size=len(rows), selected=-1, sorted=False
    )
    llama_cpp.llama_sampler_apply(sampler, ctypes.byref(candidates))
    return [row.id for row in rows if row.logit == 0.0]
