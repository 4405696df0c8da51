"""One log file per process: everything that it and its libraries print."""

import os
from datetime import UTC, datetime
from pathlib import Path


def redirect_output(path: str | Path) -> None:
    """Send this process's standard output and error to the end of `path`, for good. The first line
    says which process it is, so that a log that ends there tells of one that was killed."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    print(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S}Z process {os.getpid()} begins", flush=True)


def last_lines(path: str | Path, count: int, max_bytes: int = 1 << 16) -> list[str]:
    """Up to `count` last lines that are not empty; none where the file cannot be read."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]
