"""The commands on a live run: thin clients of its control service.

Their arguments are defined here and cost no import; what a command needs is imported when it runs.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.errors import EXIT_FAILED, EXIT_OK, UsageError

if TYPE_CHECKING:
    from orchestrator.control.client import Client
    from orchestrator.steering import RunStatus

EPILOG = (
    "RUN is a run directory, a name in ./runs, or the host:port of a control service; the newest "
    "run when left out. At host:port the token is that of SLIPSTREAM_TOKEN. With --ray, RUN is the "
    "name of a run on that cluster and may be left out if it is the only one."
)
ACTIVITIES = ("generation", "training")


def add_arguments(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the commands to the parser of `slipstream`."""
    status = _add(commands, "status", _status, "what a live run is doing, and what holds it up")
    status.add_argument("--watch", action="store_true", help="keep showing it, until Ctrl-C")
    status.add_argument("--json", action="store_true", help="as JSON, one line each with --watch")
    scale = _add(commands, "scale", _scale, "change the number of a live run's workers")
    scale.add_argument("--rollout", type=_count, metavar="N", help="rollout workers to have")
    scale.add_argument(
        "--verifier", "--verifiers", type=_count, metavar="N", help="verifier workers to have"
    )
    limits = _add(commands, "limits", _limits, "change bounds of a live run, or show them")
    limits.add_argument(
        "--max-staleness", type=_count, metavar="N", help="versions that a token may be behind"
    )
    limits.add_argument(
        "--max-groups", type=_count, metavar="N", help="groups between admission and training"
    )
    _add(
        commands,
        "pause",
        _pause,
        "let a live run start no new groups, or no new steps",
        ("activity", {"choices": ACTIVITIES, "help": "what to hold"}),
    )
    _add(
        commands,
        "resume",
        _resume,
        "let a paused run go on (`run --resume` is for one that ended)",
        (
            "activity",
            {"choices": ACTIVITIES, "nargs": "?", "help": "what goes on; all by default"},
        ),
    )
    _add(commands, "checkpoint", _checkpoint, "save a live run after its step, and wait for it")
    _add(commands, "evaluate", _evaluate, "evaluate a live run after its step, and wait for it")
    _add(commands, "stop", _stop, "let a live run finish its step, save and end")


def _count(text: str) -> int:
    """A number that the service's messages can carry; what it may be there, the service says."""
    try:
        number = int(text)
    except ValueError:
        number = 1 << 31
    if abs(number) >= 1 << 31:
        raise argparse.ArgumentTypeError(f"{text!r} is no such number; expected a whole one")
    return number


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    command: Callable[[argparse.Namespace], int],
    text: str,
    *positionals: tuple[str, dict[str, Any]],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    for positional, options in positionals:
        parser.add_argument(positional, **options)
    parser.add_argument("run", nargs="?", metavar="RUN", help="the run (see below)")
    parser.add_argument(
        "--ray",
        metavar="ADDRESS",
        help="find the run on this Ray cluster, such as ray://head:10001",
    )
    parser.add_argument(
        "--tls-ca", type=Path, metavar="FILE", help="certificates (PEM) to trust the service by"
    )
    parser.set_defaults(command=command)
    return parser


def _client(arguments: argparse.Namespace) -> "Client":
    from orchestrator.control.discovery import find

    endpoint = find(arguments.run, ray_address=arguments.ray, tls_ca=arguments.tls_ca)

    from orchestrator.control.client import Client

    return Client(endpoint)


def _status(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
        if arguments.watch:
            return _watch(client, as_json=arguments.json)
        else:
            _show(client.status(), as_json=arguments.json)
    return EXIT_OK


def _show(status: "RunStatus", *, as_json: bool) -> None:
    from orchestrator.control.convert import status_json
    from orchestrator.control.view import plain, screen

    if as_json:
        print(json.dumps(status_json(status), indent=2, ensure_ascii=False))
    elif sys.stdout.isatty():
        from rich.console import Console

        Console(highlight=False).print(screen(status))
    else:
        print(plain(status))


def _watch(client: "Client", *, as_json: bool) -> int:
    """Show snapshots until the run ends; the code says whether it ended well."""
    from orchestrator.control.convert import status_json
    from orchestrator.control.view import plain, screen
    from orchestrator.steering import RunState

    status = None
    if as_json or not sys.stdout.isatty():
        for status in client.watch():
            line = json.dumps(status_json(status), ensure_ascii=False)
            print(line if as_json else f"{plain(status)}\n", flush=True)
    else:
        from rich.live import Live

        with Live(auto_refresh=False) as live:
            for status in client.watch():
                live.update(screen(status), refresh=True)
    if status is not None and status.state is RunState.FAILED:
        print("the run has failed; its console and its driver.log say why", file=sys.stderr)
        return EXIT_FAILED
    print("the run has ended", file=sys.stderr)
    return EXIT_OK


def _scale(arguments: argparse.Namespace) -> int:
    from orchestrator.steering import Role

    wanted = [
        (role, target)
        for role, target in ((Role.ROLLOUT, arguments.rollout), (Role.VERIFIER, arguments.verifier))
        if target is not None
    ]
    if not wanted:
        raise UsageError("scale needs --rollout N or --verifier N, the number of workers to have.")
    with _client(arguments) as client:
        for role, target in wanted:
            fleet = client.scale(role, target)
            print(
                f"{role.value}: target {fleet.target}, {fleet.count('ready')} ready now; "
                "`slipstream status --watch` shows them come and go"
            )
    return EXIT_OK


def _limits(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
        if arguments.max_staleness is None and arguments.max_groups is None:
            limits = client.status().limits
        else:
            limits = client.set_limits(
                max_staleness=arguments.max_staleness, max_groups=arguments.max_groups
            )
    print(f"max_staleness {limits.max_staleness}, max_groups {limits.max_groups}")
    return EXIT_OK


def _pause(arguments: argparse.Namespace) -> int:
    from orchestrator.steering import Activity

    with _client(arguments) as client:
        print(_paused(client.pause(Activity(arguments.activity))))
    return EXIT_OK


def _resume(arguments: argparse.Namespace) -> int:
    from orchestrator.steering import Activity

    with _client(arguments) as client:
        names = [arguments.activity] if arguments.activity else ACTIVITIES
        for name in names:
            paused = client.resume(Activity(name))
    print(_paused(paused))
    return EXIT_OK


def _paused(paused: frozenset[str]) -> str:
    return f"paused: {', '.join(sorted(paused))}" if paused else "nothing is paused"


def _checkpoint(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
        done = client.checkpoint()
    print(f"checkpoint of step {done.step}: {done.path}")
    return EXIT_OK


def _evaluate(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
        done = client.evaluate()
    unscored = f", {done.unscored} without a verdict" if done.unscored else ""
    print(
        f"held-out accuracy {done.accuracy:.1%} of {done.samples} samples{unscored}, "
        f"step {done.step}, version {done.version}"
    )
    return EXIT_OK


def _stop(arguments: argparse.Namespace) -> int:
    with _client(arguments) as client:
        client.stop()
    print("stopping: the run finishes its step, saves and ends")
    return EXIT_OK
