"""Every error graphalign raises on purpose.

An error says what failed, where, and what to do next. `exit_code` is what the command line exits with.
"""

from __future__ import annotations


class GraphalignError(Exception):
    """Base of all errors that are a message to the user, never a traceback.

    Args:
        what: what failed, one sentence.
        where: the file, node or excerpt it failed at (may span lines).
        hint: what to do next.
    """

    exit_code = 2

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        if self.where:
            lines += ["  where: " + self.where.replace("\n", "\n         ")]
        if self.hint:
            lines += ["  try:   " + self.hint.replace("\n", "\n         ")]
        return "\n".join(lines)


class BadInputError(GraphalignError):
    """A path, option, capture or spec that cannot be used."""


class CaptureFileError(BadInputError):
    """A capture file that is truncated, malformed, of a future version, or hostile."""


class CaptureFailedError(GraphalignError):
    """The engine or the trainer could not be captured: refused, died, or hung."""

    exit_code = 4


class KernelMismatchError(GraphalignError):
    """Generated kernels do not round where the captured map says: the map is wrong."""

    exit_code = 4


class UnsupportedOpError(GraphalignError):
    """An op whose meaning is not known; alignment stops for that region only."""


class AlignmentError(GraphalignError):
    """Nothing could be aligned at all. Zero matches is an error, not an empty result."""


class PatchError(BadInputError):
    """A patch that cannot be applied to this model: unmatched, ambiguous, overlapping or stale."""


class PatchNotLiveError(GraphalignError, RuntimeError):
    """A patched module ran without all its edits. Never ignored: the forward raises."""


class GapInputError(BadInputError):
    """Log-probabilities that cannot be compared: not of the same tokens, not finite, or not those of the policy as it samples."""
