"""Sampling: from a row of logits to a token, the same on every backend."""

from infercore.sampling.constraints import Constraint, compile_constraint
from infercore.sampling.factory import new_portable_sampler
from infercore.sampling.portable import PortableSampler

__all__ = ["Constraint", "PortableSampler", "compile_constraint", "new_portable_sampler"]
