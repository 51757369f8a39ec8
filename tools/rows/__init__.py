"""The rows of the coverage page: what the seeds and peers have, each with its assertion."""
