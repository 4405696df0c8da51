"""What all tables of the orchestrator's configuration share: the strict base, and input paths."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo


class Table(BaseModel):
    """Base of every table: strict about its keys, immutable, documented field by field."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )


def against_folder(path: Path, info: ValidationInfo) -> Path:
    """`path`, counted from the configuration file's folder where it is relative."""
    folder = Path((info.context or {}).get("folder", "."))
    return (folder / path.expanduser()).resolve()


InputPath = Annotated[Path, AfterValidator(against_folder)]
"""A path that is relative to the folder of the configuration file (validation context `folder`)."""
