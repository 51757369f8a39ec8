"""For tests of backends and of what is built on them: a reference, faults, and a toy.

- `reference_backend` and `load_reference_model`: a llama in plain NumPy that can do everything,
  or as little as a test needs, and is the oracle for logits;
- `Faults`: lets chosen engine calls fail in chosen ways;
- `engine_of`: the plugin's own context, for a look past the API;
- `load_toy_model`: a model without files that knows bytes and a hash.
"""

from infercore.testing.faults import Faults
from infercore.testing.reference import engine_of, load_reference_model, reference_backend
from infercore.testing.toy import load_toy_model

__all__ = [
    "Faults",
    "engine_of",
    "load_reference_model",
    "load_toy_model",
    "reference_backend",
]
