"""Why the plan is not faster."""
from __future__ import annotations
def reasons(*args): return ()
