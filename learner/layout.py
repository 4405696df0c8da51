"""How a folder of checkpoints is laid out, for others than the learner too. No torch."""

import re
from pathlib import Path

COMPLETE = "COMPLETE"
"""The file that makes a folder a finished checkpoint."""


def finished_steps(folder: Path) -> list[int]:
    """Steps of the finished checkpoints `step_N` in `folder`, lowest first.

    One that a kill caught while it was being replaced counts: loading it brings it back.
    """
    found = (
        (re.fullmatch(r"step_(\d+)|\.step_(\d+)\.replaced", entry.name), entry)
        for entry in folder.iterdir()
    )
    return sorted(
        {
            int(match.group(1) or match.group(2))
            for match, entry in found
            if match and (entry / COMPLETE).is_file()
        }
    )
