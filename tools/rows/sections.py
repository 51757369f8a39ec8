"""The sections of the coverage page, in their order; modules beside add the rows."""

from __future__ import annotations

from rows.bench import Section

ION7 = Section("ion7-core: Context")
MULLAMA = Section("mullama: Context")
CREATION = Section("llama.cpp: context creation, `llama_init_from_model`")
GO = Section("The session contract in Go")
FIELDS = Section(
    "Fields of a context (mullama `ContextParams`, `ContextBuilder`; `llama_init_from_model`)"
)
CONTEXTS = Section("What peers test: contexts")
ENDS = Section("What peers test: decoding and its ends")
SAMPLING = Section("What peers test: sampling and constraints")
CACHE = Section("What peers test: sessions, caches, many at once")
CHAT = Section("What peers test: chats and tools")
TOKENS = Section("What peers test: tokenizer and embeddings")
MODELS = Section("What peers test: models and adapters")

SEEDS = (ION7, MULLAMA, FIELDS, CREATION, GO)
PEERS = (CONTEXTS, ENDS, SAMPLING, CACHE, CHAT, TOKENS, MODELS)
