"""Bytes only: frames, peeks, rewriting, record batches, link messages. No I/O, no clock."""

import sys
from importlib import import_module

# kio loads hypothesis where it happens to be installed: 15 MB and 0.2 s of every process, for what nobody uses here.
if "hypothesis" not in sys.modules:
    sys.modules["hypothesis"] = None  # type: ignore[assignment]
    try:
        import_module("kio.static.primitive")
    finally:
        del sys.modules["hypothesis"]
