"""What parent and child of the pool say to each other.

Requests are length-prefixed pickles (the parent is trusted), answers are JSON lines: nothing that
a verifier does to its process is ever unpickled by the parent.
"""

import struct
from typing import Any

from verifiers.verdict import Verdict, VerdictStatus

LENGTH = struct.Struct("!Q")


def encode_verdict(verdict: Verdict) -> list[Any]:
    """The JSON form of a verdict, read by `decode_verdict`."""
    status, parts = str(verdict.status), dict(verdict.parts)
    return [verdict.reward, verdict.outcome, parts, status, verdict.detail, verdict.seconds]


def decode_verdict(fields: list[Any]) -> Verdict:
    """Inverse of `encode_verdict`; raises TypeError or ValueError on anything else."""
    reward, outcome, parts, status, detail, seconds = fields
    return Verdict(reward, outcome, parts, VerdictStatus(status), detail, seconds)
