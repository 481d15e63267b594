"""Decide where every weight of a model lives and where it is computed, from measurements alone."""

__version__ = "0.4.6"  # of atsplan as a whole; here because every layer may import it

from .hardware import Hardware, Software
from .measurements import Profile
from .plan import Placement, Plan
from .records import read_record, write_record
from .solve import solve
from .workload import Workload

__all__ = [
    "Hardware", "Placement", "Plan", "Profile", "Software", "Workload",
    "read_record", "solve", "write_record",
]  # fmt: skip
