"""Builds the models that ship in the ``infercore-models`` distribution."""
