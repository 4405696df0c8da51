"""The working directory as Ray will upload it: which files, how many bytes, what is too big.

Ray's own rules pick the files, so that what is judged here is what is sent.
"""

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

EXCLUDES = (
    "/runs",
    "/.mypy_cache",
    "/.ruff_cache",
    "/.pytest_cache",
    "/.hypothesis",
    "*.egg-info",
    "*.pyc",
    "node_modules",
)
"""What a working directory holds and no run needs, beyond what Ray leaves out by itself: .git,
.venv, venv, __pycache__, and whatever .gitignore and .rayignore name."""

_FILE_OVERHEAD_BYTES = 76
_ARCHIVE_OVERHEAD_BYTES = 22
_BIGGEST = 5


@dataclass(frozen=True)
class Package:
    """The files of a working directory that go to the cluster."""

    folder: Path
    """The working directory, absolute."""
    files: dict[str, int]
    """Path inside the folder, with slashes → bytes."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the archive: Ray does not compress."""
        headers = sum(_FILE_OVERHEAD_BYTES + 2 * len(os.fsencode(name)) for name in self.files)
        return _ARCHIVE_OVERHEAD_BYTES + headers + sum(self.files.values())

    def biggest(self, count: int = _BIGGEST) -> list[tuple[str, int]]:
        """The biggest files, the biggest first."""
        return sorted(self.files.items(), key=lambda item: (-item[1], item[0]))[:count]

    def inside(self, path: Path) -> str | None:
        """`path` as the package names it, None where it lies outside of the folder."""
        absolute = Path(os.path.abspath(path))
        if not absolute.is_relative_to(self.folder):
            return None
        return absolute.relative_to(self.folder).as_posix()

    def holds(self, name: str) -> bool:
        """Whether the file, or anything of the folder, of this name is in the package."""
        return name in self.files or any(file.startswith(f"{name}/") for file in self.files)


def list_package(folder: Path, excludes: Sequence[str] = EXCLUDES) -> Package:
    """The files that Ray would upload of `folder`, by its rules and `excludes`."""
    from ray._private.ray_constants import (
        RAY_RUNTIME_ENV_IGNORE_GITIGNORE,
        get_runtime_env_default_excludes,
    )
    from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

    # Ray tells of every ignore file that it finds.
    logging.getLogger("ray._private.runtime_env.packaging").setLevel(logging.ERROR)
    root = Path(os.path.abspath(folder))
    files: dict[str, int] = {}

    def keep(path: Path) -> None:
        if path.is_file():
            files[path.relative_to(root).as_posix()] = path.stat().st_size

    _dir_travel(
        root,
        [_get_excludes(root, [*get_runtime_env_default_excludes(), *excludes])],
        keep,
        include_gitignore=os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1",
    )
    return Package(root, files)


def upload_limit_bytes() -> int:
    """The most that a Ray dashboard takes in one upload; the 512 MiB that Ray's own messages name
    hold for uploads from inside a cluster."""
    from ray._private.ray_constants import DASHBOARD_CLIENT_MAX_SIZE

    return int(DASHBOARD_CLIENT_MAX_SIZE)


def size_problem(package: Package, limit_bytes: int) -> str | None:
    """The paragraph about a package that Ray will not take."""
    if package.size_bytes <= limit_bytes:
        return None
    biggest = ", ".join(f"{name} ({mebibytes(size)})" for name, size in package.biggest())
    return (
        f"the working directory {package.folder} is too big to upload: "
        f"{mebibytes(package.size_bytes)} in {len(package.files)} files, and Ray's dashboard takes "
        f"{mebibytes(limit_bytes)}. Its biggest files: {biggest}. Leave out what the run does not "
        "need by a line in .rayignore; put big models and data on storage that all nodes mount, "
        "and give their absolute paths in the configuration."
    )


def mebibytes(size: int) -> str:
    """`size` bytes for a reader."""
    return f"{size / (1 << 20):.1f} MiB" if size >= 100 << 10 else f"{size / 1024:.1f} KiB"
