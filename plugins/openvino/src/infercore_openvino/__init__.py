"""The OpenVINO backend of infercore. Use it through `infercore`; nothing here is public."""

__version__ = "0.1.0"
