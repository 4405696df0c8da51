"""Tasks: what is asked, what the right answer is, and who judges.

A `TaskRow` is a task as its source describes it; a `Task` also has the prompt's tokens, made once
with the run's tokenizer. Knows neither files nor tokenizers.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Message = Mapping[str, Any]
"""One chat message: `role` and `content`, both text, and what else its template understands."""

Prompt = str | tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class TaskRow:
    """One task, before tokenisation."""

    task_id: str
    """Unique over all sources of a run."""
    prompt: Prompt
    """Text, or chat messages of which the last is not the assistant's."""
    answer: str | None
    """Reference answer; None where the verifier needs none or finds it in `extra`."""
    verifier: str
    """Registered name or `package.module:Name`."""
    source: str
    """Where the task comes from, for metrics by source."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What else the verifier may need; JSON values."""

    @property
    def prompt_text(self) -> str:
        """The prompt as plain text: the contents of its messages, a blank line between them."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n\n".join(message["content"] for message in self.prompt)


@dataclass(frozen=True, slots=True)
class Task(TaskRow):
    """A task that can be given to a rollout worker."""

    prompt_ids: tuple[int, ...] = ()
    """Prompt tokens, never empty in a task made by `data.tokenize_tasks`."""
