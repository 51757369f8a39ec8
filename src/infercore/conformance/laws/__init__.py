"""The laws, a module for each group or two."""
