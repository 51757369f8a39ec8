"""How fast a model is on this machine: what ``infercore bench`` and ``benchmarks/`` share."""
