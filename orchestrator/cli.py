"""The `slipstream` command: parsing, and how a command ends.

What a command needs is imported when it runs, so that `--help` answers at once.
"""

import argparse
import difflib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.control import commands as control
from orchestrator.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    SlipstreamError,
    UsageError,
)
from orchestrator.history import commands as history
from orchestrator.submission import command as submission

OVERRIDES_HELP = (
    "Any key of the configuration may be set on the command line: --seed 3, "
    "--learner.optimizer.lr 1e-4, --rollout.engine.dtype=float32. Values are TOML; a bare word is "
    "a string. Relative paths count from the configuration's folder."
)
CONFIGURED = {
    "run": ("--help", "--resume", "--runs-folder"),
    "check": ("--help",),
    "submit": submission.OPTIONS,
}
"""Commands that read a configuration, with the options that are not keys of it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code.

    0 done, 1 failed, 2 wrong usage or configuration, 130 interrupted; argparse exits by itself.
    """
    try:
        words = list(sys.argv[1:] if argv is None else argv)
        overrides: list[tuple[str, str]] = []
        if own_options := CONFIGURED.get(next((w for w in words if not w.startswith("-")), "")):
            words, overrides = split_overrides(words, own_options)
        arguments = _parser().parse_args(words)
        arguments.overrides = overrides
        command: Callable[[argparse.Namespace], int] = arguments.command
        code = command(arguments)
        sys.stdout.flush()
        return code
    except SlipstreamError as error:
        print(f"slipstream: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        # Whoever read the output has enough; what is still buffered must not be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("slipstream: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except Exception as error:
        print(f"slipstream: {_unexpected(error)}", file=sys.stderr)
        return EXIT_FAILED


def split_overrides(
    argv: Sequence[str], own_options: Sequence[str]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Separate `--key value` and `--key=value` of the configuration from the command's own words.

    The word after an override is its value whatever it looks like, unless it is an option itself.
    Raises UsageError for an override without a value and for an option that cannot be a key.
    """
    rest: list[str] = []
    overrides: list[tuple[str, str]] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        option, equals, value = word.partition("=")
        if not option.startswith("--") or option == "--" or option in own_options:
            rest.append(word)
            continue
        key = option.removeprefix("--")
        _require_key(key, own_options)
        if not equals:
            if not words or words[0].startswith("--"):
                raise UsageError(f"{option} needs a value, as in {option} VALUE.")
            value = words.pop(0)
        overrides.append((key, value))
    return rest, overrides


def _require_key(key: str, own_options: Sequence[str]) -> None:
    if all(part.isidentifier() or part.isdecimal() for part in key.split(".")):
        return
    options = [option for option in own_options if option != "--help"]
    close = difflib.get_close_matches(f"--{key}", [*options, f"--{key.replace('-', '_')}"], n=1)
    hint = f" Did you mean {close[0]}?" if close else " See slipstream --help."
    raise UsageError(f"--{key} is neither an option nor a key of the configuration.{hint}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slipstream",
        description="Asynchronous reinforcement-learning post-training of language models on Ray.",
        epilog="slipstream COMMAND --help tells more about a command.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_configured(commands)
    control.add_arguments(commands)
    submission.add_arguments(commands)
    history.add_arguments(commands)
    return parser


def _add_configured(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    run = _add(commands, "run", _run, "train, until the steps are done or Ctrl-C")
    run.add_argument(
        "--resume",
        nargs="?",
        const="latest",
        metavar="RUN",
        help="go on after the last step of RUN, a directory or a name in the runs folder "
        "(default: the newest run); write it after CONFIG",
    )
    run.add_argument(
        "--runs-folder",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="where run directories are made (default: ./runs)",
    )
    _add(commands, "check", _check, "validate, and print the resource plan; allocates nothing")


def _add(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    command: Callable[[argparse.Namespace], int],
    text: str,
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=OVERRIDES_HELP,
        allow_abbrev=False,
        usage=f"slipstream {name} CONFIG [options] [--section.key value]...",
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="the run's TOML file")
    parser.set_defaults(command=command)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"slipstream {version('slipstream-rl')}")
        parser.exit()


def _run(arguments: argparse.Namespace) -> int:
    from orchestrator.check import require_inputs
    from orchestrator.config_file import load

    config = load(arguments.config, arguments.overrides)
    require_inputs(config, str(arguments.config))
    resume = None
    if arguments.resume is not None:
        from orchestrator.run_directory import RunDirectory

        resume = RunDirectory.find(arguments.runs_folder, arguments.resume).path

    from orchestrator.run import run

    return run(config, runs_folder=arguments.runs_folder, resume=resume)


def _check(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from orchestrator.check import require_inputs, show
    from orchestrator.config_file import load

    config = load(arguments.config, arguments.overrides)
    show(config, Console(highlight=False))
    sys.stdout.flush()  # a refusal comes after it
    require_inputs(config, str(arguments.config))
    return EXIT_OK


def _unexpected(error: Exception) -> str:
    """One paragraph about an error that nobody wrote a message for."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = " ".join(str(error).split()) or "no message"
    return (
        f"unexpected {type(error).__name__}: {text} (at {frame.filename}:{frame.lineno}, "
        f"{frame.name}). This is a fault of Slipstream or of a plug-in; the whole traceback is in "
        f"{_kept_traceback(error)}."
    )


def _kept_traceback(error: Exception) -> str:
    """Path of a new file in the system's temporary folder that holds the traceback."""
    with tempfile.NamedTemporaryFile(
        "w", prefix="slipstream-", suffix=".traceback", delete=False, encoding="utf-8"
    ) as file:
        traceback.print_exception(error, file=file)
    return file.name


if __name__ == "__main__":
    sys.exit(main())
