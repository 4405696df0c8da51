"""Configuration of the verifier fleet. Imports nothing heavy."""

from pydantic import BaseModel, ConfigDict, Field


class _Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, use_attribute_docstrings=True
    )


class VerifierConfig(_Strict):
    """One table of the run configuration: how completions are scored."""

    workers: int = Field(default=1, ge=1, le=1024)
    """Verifier workers (Ray actors)."""

    cpus: float = Field(default=0.0, ge=0.0)
    """CPUs that Ray reserves for each worker."""

    resources: dict[str, float] = Field(default_factory=dict)
    """Custom Ray resources that each worker needs."""

    processes: int = Field(default=1, ge=1, le=256)
    """Killable child processes of each worker, for verifiers that may hang or crash."""

    deadline_s: float = Field(default=10.0, gt=0.0, le=3600.0)
    """Seconds that one completion may take; then its verdict is a timeout."""

    memory_limit_bytes: int = Field(default=2 << 30, ge=64 << 20)
    """Address space that a child may add to what it holds at its start."""

    start_timeout_s: float = Field(default=120.0, gt=0.0, le=3600.0)
    """Seconds in which a child must start, and a verifier must load in it."""
