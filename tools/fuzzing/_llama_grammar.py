"""llama.cpp's own grammar sampler, to compare with."""

from __future__ import annotations

import ctypes

import llama_cpp


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
        sampler = llama_cpp.llama_sampler_init_grammar(self.vocab, grammar.encode(), b"root")
        return LlamaGrammar(self, sampler) if sampler else None


class LlamaGrammar:
    """A grammar, and how far a text has come in it."""

    def __init__(self, vocabulary: LlamaVocabulary, sampler: ctypes.c_void_p) -> None:
        self._sampler = sampler
        n_vocab = vocabulary.n_vocab
        self._rows = (llama_cpp.llama_token_data * n_vocab)()
        self._n_vocab = n_vocab

    def allowed(self) -> set[int]:
        """Return the tokens that may come next."""
        for token in range(self._n_vocab):
            self._rows[token].id, self._rows[token].logit = token, 0.0
        array = llama_cpp.llama_token_data_array(
            data=self._rows, size=self._n_vocab, selected=-1, sorted=False
        )
        llama_cpp.llama_sampler_apply(self._sampler, ctypes.byref(array))
        return {row.id for row in self._rows if row.logit == 0.0}

    def accept(self, token: int) -> None:
        """Go on by a token that is allowed; any other would end the process."""
        llama_cpp.llama_sampler_accept(self._sampler, token)

    def close(self) -> None:
        """Free it."""
        llama_cpp.llama_sampler_free(self._sampler)
