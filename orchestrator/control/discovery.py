"""Finding the control service of a run: by its directory, its address, or its Ray cluster."""

import json
import os
from pathlib import Path
from typing import Any

from orchestrator.control.endpoint import (
    ACTOR_PREFIX,
    FILE_NAME,
    RAY_NAMESPACE,
    TOKEN_VARIABLE,
    Endpoint,
)
from orchestrator.errors import RunError, UsageError
from orchestrator.joining import join
from orchestrator.run_directory import LATEST, RunDirectory

RUNS_FOLDER = Path("runs")
WHERE_TIMEOUT_S = 30.0


def find(
    reference: str | None,
    *,
    ray_address: str | None = None,
    tls_ca: Path | None = None,
    runs_folder: Path = RUNS_FOLDER,
) -> Endpoint:
    """The control service that `reference` names.

    A run directory or a name in the runs folder (the newest run without one), host:port, or with
    `ray_address` the name of a run on that cluster. Raises UsageError or RunError.
    """
    trusted = None if tls_ca is None else _certificates(tls_ca)
    if ray_address is not None:
        found = by_ray(ray_address, reference)
    elif reference and _is_address(reference, runs_folder):
        return by_address(reference, trusted)
    else:
        found = by_directory(RunDirectory.find(runs_folder, reference or LATEST).path)
    return found if trusted is None else Endpoint(**{**found.as_dict(), "tls_ca": trusted})


def by_directory(directory: Path) -> Endpoint:
    """The service of the run in `directory`, from its control.json."""
    path = directory / FILE_NAME
    try:
        return Endpoint.parse(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        ended = (directory / "summary.json").is_file()
        why = (
            "it has ended (summary.json has its result)"
            if ended
            else "it has ended or is still starting, or control.enabled is false"
        )
        raise RunError(f"run {directory.name} has no control service: {why}.") from None
    except PermissionError:
        raise RunError(
            f"{path} may not be read: it holds the run's token and is its owner's only. Ask as the "
            f"user who started the run, or by address with {TOKEN_VARIABLE} set."
        ) from None
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path} is of no use: {error}. Expected what a live run of this version writes; ask "
            "by address instead."
        ) from error


def by_address(address: str, tls_ca: str | None = None) -> Endpoint:
    """The service at host:port, with the token of the environment."""
    return Endpoint(address=address, token=os.environ.get(TOKEN_VARIABLE) or None, tls_ca=tls_ca)


def by_ray(address: str, run: str | None) -> Endpoint:
    """The service of a run on the Ray cluster at `address`; without `run`, the only one there."""
    join(address, namespace=RAY_NAMESPACE)
    import ray

    try:
        return _ask_actor(ray, address, run)
    finally:
        ray.shutdown()


def _ask_actor(ray: Any, address: str, run: str | None) -> Endpoint:
    runs = sorted(
        actor["name"].removeprefix(ACTOR_PREFIX)
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if actor["namespace"] == RAY_NAMESPACE and actor["name"].startswith(ACTOR_PREFIX)
    )
    if not runs:
        raise RunError(
            f"no run with a control service is on the Ray cluster at {address}. It may have ended, "
            "be starting still, or have control.enabled = false."
        )
    if run is None and len(runs) > 1:
        raise UsageError(
            f"{len(runs)} runs are on the Ray cluster at {address}; name one: {', '.join(runs)}."
        )
    name = run or runs[0]
    if name not in runs:
        raise UsageError(
            f"no run {name!r} on the Ray cluster at {address}; there: {', '.join(runs)}."
        )
    try:
        actor = ray.get_actor(f"{ACTOR_PREFIX}{name}", namespace=RAY_NAMESPACE)
        return Endpoint.parse(ray.get(actor.where.remote(), timeout=WHERE_TIMEOUT_S))
    except (ValueError, ray.exceptions.RayError) as error:
        raise RunError(
            f"run {name} did not say where its control service is: {' '.join(str(error).split())}. "
            "It may just have ended."
        ) from error


def _is_address(reference: str, runs_folder: Path) -> bool:
    host, colon, port = reference.rpartition(":")
    exists = any(path.exists() for path in (Path(reference), runs_folder / reference))
    if not colon or not host or "/" in host or exists:
        return False
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise UsageError(f"{reference!r} is no address: expected host:port, with a port to 65535.")
    return True


def _certificates(path: Path) -> str:
    try:
        text = path.read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        raise UsageError(f"--tls-ca {path} cannot be read: {error}.") from error
    if "-----BEGIN CERTIFICATE-----" not in text:
        raise UsageError(f"--tls-ca {path} holds no certificate; expected a PEM file.")
    return text
