"""The one error that users see: what is wrong and what to do about it."""

from __future__ import annotations


class AtsplanError(Exception):
    """A problem the user can act on. The CLI prints `message`, then `remedy`, and exits with `exit_code`."""

    exit_code = 1

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()


class UsageError(AtsplanError):
    """What was typed does not mean anything."""

    exit_code = 2  # as for an unknown option


class InvalidFileError(AtsplanError):
    """A file cannot be used: missing, truncated, not of the expected format, or of another schema."""


class InfeasibleError(AtsplanError):
    """No plan can satisfy the request, for example because the budget is below the minimum."""


class MismatchError(AtsplanError):
    """A plan or profile belongs to another model, machine or software version."""


class DeviceError(AtsplanError):
    """A device is missing, refused the work, or ran out of memory."""
