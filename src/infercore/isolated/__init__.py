"""A pool whose engine lives in a process of its own: what crosses, who starts it, what is kept."""
