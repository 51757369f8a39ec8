"""What ``tools/mutate.py`` is made of: operators, subjects, loading, running and scores."""
