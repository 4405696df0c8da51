"""Where the control service of a run is and what opens it: the content of control.json."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

FILE_NAME = "control.json"
TOKEN_VARIABLE = "SLIPSTREAM_TOKEN"
RAY_NAMESPACE = "slipstream"
ACTOR_PREFIX = "control/"


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """One control service. Its text form leaves the token out."""

    address: str
    """host:port, IPv6 in brackets."""
    token: str | None
    tls_ca: str | None = None
    """PEM text of the certificates to trust; None without TLS."""
    run: str = ""
    """Name of the run; empty when only its address is known."""
    pid: int = 0
    """Process of the driver; 0 when unknown."""

    def __repr__(self) -> str:
        return f"Endpoint({self.address}, run {self.run!r}, pid {self.pid})"

    @property
    def host(self) -> str:
        """The address without port and brackets."""
        return self.address.rpartition(":")[0].strip("[]")

    def as_dict(self) -> dict[str, Any]:
        """JSON form, the token included."""
        return asdict(self)

    @classmethod
    def parse(cls, content: Any) -> Self:
        """The endpoint of `as_dict`. Raises ValueError when something is missing or of no use."""
        try:
            kinds = {"address": str, "token": (str, type(None)), "tls_ca": (str, type(None))}
            for key, kind in {**kinds, "run": str, "pid": int}.items():
                if not isinstance(content[key], kind):  # type: ignore[arg-type]
                    raise ValueError(f"{key} is {type(content[key]).__name__}")
            return cls(**{key: content[key] for key in (*kinds, "run", "pid")})
        except (KeyError, TypeError) as error:
            raise ValueError(f"{error} is missing") from error

    def write(self, directory: Path) -> None:
        """Replace the directory's control.json in one step; only its owner can ever read it."""
        temporary = directory / f".{FILE_NAME}-{os.getpid()}"
        temporary.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(temporary, flags, 0o600), "w", encoding="utf-8") as file:
            json.dump(self.as_dict(), file, indent=2)
            file.write("\n")
        temporary.replace(directory / FILE_NAME)


def join(host: str, port: int) -> str:
    """host:port, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
