"""Which backends there are: finds the plugins, keeps their failures apart, and chooses.

`Registry.get` answers by name, `Registry.choose` by file, `Registry.infos` lists everything,
what is broken included. Nothing is scanned before the first question.
"""

from infercore.registry.catalogue import Registry, default_registry
from infercore.registry.choice import Match
from infercore.registry.record import Record

__all__ = ["Match", "Record", "Registry", "default_registry"]
