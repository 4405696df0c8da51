"""Tasks from parquet and JSONL files, and their prompts as tokens.

Every bad row is named and refused; none is skipped. Which column means what is decided in
`columns`; families of generated tasks are in `gym`. The tokenizer is the caller's.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator.columns import ColumnsError, layout, task_row
from orchestrator.data_errors import BadRow, CellError, DataError
from orchestrator.tasks import Message, Task, TaskRow

PARQUET = (".parquet",)
JSON_LINES = (".jsonl", ".json", ".ndjson")
COMPRESSED = (".gz", ".bz2", ".zst")


class PromptTokenizer(Protocol):
    """The part of a transformers tokenizer that prompts are made with."""

    chat_template: Any
    bos_token_id: int | None
    eos_token_id: int | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def apply_chat_template(
        self, conversation: list[dict[str, Any]], **options: Any
    ) -> list[int]: ...


@dataclass(frozen=True)
class LongPrompt:
    """A prompt above the limit."""

    task_id: str
    source: str
    tokens: int


@dataclass(frozen=True)
class TokenizedTasks:
    """Tasks ready to run, and what was left out because the configuration says so."""

    tasks: tuple[Task, ...]
    dropped: tuple[LongPrompt, ...]

    def report(self) -> str:
        """One line on what was dropped, by source; empty if nothing was."""
        if not self.dropped:
            return ""
        total = len(self.tasks) + len(self.dropped)
        by_source = Counter(prompt.source for prompt in self.dropped)
        sources = ", ".join(f"{source} {count}" for source, count in sorted(by_source.items()))
        return f"{len(self.dropped)} of {total} tasks dropped, prompt too long: {sources}"


def read_file(
    path: Path | str,
    *,
    columns: Mapping[str, str] | None = None,
    verifier: str | None = None,
) -> list[TaskRow]:
    """All tasks of a parquet or JSONL file (which may be compressed).

    columns: our field → the file's column, for names that are not usual. verifier: for rows that
    name none. A row without an id is called after its file and row, a row without a source after
    its file. Raises DataError with every bad row of the file.
    """
    path = Path(path)
    numbered, problems = _read(path)
    if not numbered and not problems:
        raise DataError([BadRow(str(path), None, "", "at least one row", "none")])
    try:
        names = _column_names(row for _, row in numbered)
        plan = layout(names, columns or {})
    except ColumnsError as error:
        problem = BadRow(str(path), None, "", "columns that exist", str(error))
        raise DataError([problem, *problems]) from None
    tasks: list[TaskRow] = []
    for number, row in numbered:
        try:
            tasks.append(
                task_row(
                    row,
                    plan,
                    task_id=f"{path.parent.name}/{path.name}:{number}",
                    source=path.name.split(".")[0],
                    verifier=verifier,
                )
            )
        except CellError as error:
            problems.append(BadRow(str(path), number, error.column, error.expected, error.found))
    problems += _duplicates((task.task_id for task in tasks), str(path))
    if problems:
        raise DataError(sorted(problems, key=lambda problem: problem.row or 0))
    return tasks


def merge(sources: Iterable[Sequence[TaskRow]]) -> list[TaskRow]:
    """The tasks of several sources, in order. Raises DataError for ids that occur twice."""
    tasks = [task for source in sources for task in source]
    problems = _duplicates((task.task_id for task in tasks), "all sources together")
    if problems:
        raise DataError(problems, "Give the rows an `id` column that tells them apart.")
    return tasks


def tokenize_tasks(
    rows: Sequence[TaskRow],
    tokenizer: PromptTokenizer,
    *,
    max_prompt_tokens: int,
    too_long: Literal["refuse", "drop"] = "refuse",
    system_prompt: str | None = None,
    template: str | None = None,
) -> TokenizedTasks:
    """Prompts as tokens, exactly as the engine will get them.

    Text goes into `template` at `{prompt}`; with a chat template it then becomes the user's
    message, after `system_prompt` unless the messages bring their own. Raises DataError for
    prompts above `max_prompt_tokens` (unless they are to be dropped), for messages without a chat
    template, and if nothing is left.
    """
    tasks: list[Task] = []
    long: list[LongPrompt] = []
    for row in rows:
        ids = _prompt_ids(row, tokenizer, system_prompt, template)
        if len(ids) > max_prompt_tokens:
            long.append(LongPrompt(row.task_id, row.source, len(ids)))
            continue
        fields = {name: getattr(row, name) for name in TaskRow.__dataclass_fields__}
        tasks.append(Task(**fields, prompt_ids=ids))
    if long and (too_long == "refuse" or not tasks):
        limit = f"at most {max_prompt_tokens} prompt tokens"
        raise DataError(
            [BadRow(p.task_id, None, "prompt", limit, f"{p.tokens}") for p in long],
            f"{len(long)} of {len(rows)} prompts are too long: raise the engine's max_model_len, "
            "shorten the response limit, or remove the tasks.",
        )
    return TokenizedTasks(tuple(tasks), tuple(long))


def _read(path: Path) -> tuple[list[tuple[int, Any]], list[BadRow]]:
    """Rows with their numbers from 1, and the lines that are no row."""
    suffixes = [s for s in path.suffixes if s not in COMPRESSED]
    kind = suffixes[-1] if suffixes else ""
    try:
        if kind in PARQUET:
            return list(enumerate(pq.ParquetFile(path).read().to_pylist(), start=1)), []
        if kind in JSON_LINES:
            return _read_lines(path)
    except (OSError, pa.ArrowException) as error:
        found = f"{type(error).__name__}: {error}"
        raise DataError([BadRow(str(path), None, "", "a readable file", found)]) from None
    expected = f"a name ending in {', '.join((*PARQUET, *JSON_LINES))}"
    raise DataError([BadRow(str(path), None, "", expected, path.name)])


def _read_lines(path: Path) -> tuple[list[tuple[int, Any]], list[BadRow]]:
    """JSON Lines; blank lines count as lines but are no rows.

    Arrow opens and decompresses, but its JSON reader would guess one type per column over all
    rows: it turns answers that look like dates into timestamps and cannot name a bad row.
    """
    rows: list[tuple[int, Any]] = []
    problems: list[BadRow] = []
    with pa.input_stream(str(path)) as stream:
        lines = stream.read().splitlines()
    if next((line for line in lines if line.strip()), b"").lstrip().startswith(b"["):
        return [], [BadRow(str(path), 1, "", "one JSON object a line", "a JSON array")]
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            problems.append(BadRow(str(path), number, "", "a JSON object", f"{error}"))
            continue
        if isinstance(row, dict):
            rows.append((number, row))
        else:
            problems.append(
                BadRow(str(path), number, "", "a JSON object", f"a {type(row).__name__}")
            )
    return rows, problems


def _column_names(rows: Iterator[Mapping[str, Any]]) -> set[str]:
    """Names over all rows, members of structs as `column.member`."""
    names: set[str] = set()
    for row in rows:
        for name, cell in row.items():
            names.add(name)
            if isinstance(cell, Mapping):
                names.update(f"{name}.{member}" for member in cell)
    return names


def _duplicates(task_ids: Iterable[str], source: str) -> list[BadRow]:
    return [
        BadRow(source, None, "id", "ids that differ", f"{task_id!r} {count} times")
        for task_id, count in Counter(task_ids).items()
        if count > 1
    ]


def _prompt_ids(
    row: TaskRow, tokenizer: PromptTokenizer, system_prompt: str | None, template: str | None
) -> tuple[int, ...]:
    conversation = _conversation(row, tokenizer, system_prompt, template)
    if isinstance(conversation, str):
        ids = _text_ids(conversation, tokenizer)
    else:
        # Tokenised by the template itself: rendering to text first would add a second BOS.
        ids = tokenizer.apply_chat_template(
            conversation, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    if not ids:
        raise DataError([BadRow(row.task_id, None, "prompt", "at least one token", "none")])
    return tuple(int(token) for token in ids)


def _text_ids(text: str, tokenizer: PromptTokenizer) -> list[int]:
    """Tokens of a text with the tokenizer's own beginning, once, and without its end."""
    ids = list(tokenizer.encode(text))
    if ids[:2] == [tokenizer.bos_token_id] * 2:
        del ids[0]
    if ids and ids[-1] == tokenizer.eos_token_id:
        # A prompt that the tokenizer itself ends with EOS asks for nothing.
        plain = tokenizer.encode(text, add_special_tokens=False)
        if not plain or plain[-1] != tokenizer.eos_token_id:
            del ids[-1]
    return ids


def _conversation(
    row: TaskRow, tokenizer: PromptTokenizer, system_prompt: str | None, template: str | None
) -> str | list[dict[str, Any]]:
    """Messages for the chat template, or text where the tokenizer has none."""
    prompt = row.prompt
    if isinstance(prompt, str):
        text = template.replace("{prompt}", prompt) if template else prompt
        if tokenizer.chat_template is None and system_prompt is None:
            return text
        messages: list[Message] = [{"role": "user", "content": text}]
    else:
        messages = list(prompt)
    if tokenizer.chat_template is None:
        what = "messages" if not isinstance(prompt, str) else "a system prompt"
        expected = f"a tokenizer with a chat template, since there is {what}"
        raise DataError([BadRow(row.task_id, None, "prompt", expected, "none")])
    if system_prompt is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system_prompt})
    return [dict(message) for message in messages]
