"""Language models that are tables of counts, as a backend of infercore."""
