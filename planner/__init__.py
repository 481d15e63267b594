"""Decide where every weight of a model lives and where it is computed, from measurements alone."""

__version__ = "0.1.0"  # of atsplan as a whole; here because every layer may import it
