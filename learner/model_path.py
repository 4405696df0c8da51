"""A model as a configuration names it: a folder, or a name on a model hub. Nothing heavy."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field, ValidationInfo


def _resolved(path: str, info: ValidationInfo) -> str:
    """A folder if one is there or the text can only be one; otherwise a model-hub name, kept."""
    base = Path((info.context or {}).get("folder", "."))
    folder = (base / Path(path).expanduser()).resolve()
    explicit = path.startswith(("/", "./", "../", "~")) or path.count("/") > 1
    return str(folder) if explicit or folder.is_dir() else path


ModelPath = Annotated[str, AfterValidator(_resolved), Field(min_length=1)]
"""Folder in Hugging Face layout, relative to the configuration file's folder (validation context
`folder`), or a model-hub name."""
