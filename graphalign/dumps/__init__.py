"""The gap in files that trainers already write: formats, what is wrong with them, statistics. No model is needed.

`graphalign gap --dump FILE…` is made of this; `docs/dumps.md` describes the formats, and `write_rows` writes our own.
"""

from graphalign.dumps.write import write_rows

__all__ = ["write_rows"]
