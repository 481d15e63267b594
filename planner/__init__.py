"""Decide where every weight of a model lives and where it is computed, from measurements alone."""
