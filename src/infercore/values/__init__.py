"""Configs, statuses, capabilities and identities: frozen values without behaviour."""
