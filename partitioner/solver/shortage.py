"""Why nothing fits."""
from __future__ import annotations
def shortage(*args): return "does not fit"
