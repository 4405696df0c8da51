"""Prompts as tokens: exactly what the engine will get."""

import pytest

from orchestrator.data import tokenize_tasks
from orchestrator.data_errors import DataError
from orchestrator.tasks import TaskRow

ASK = [{"role": "user", "content": "What is 2+2?"}]
SYSTEM = {"role": "system", "content": "Be brief."}


class CharTokenizer:
    """One token per character, BOS in front of texts; its chat template brings its own BOS."""

    bos_token_id = 1
    eos_token_id = 2

    def __init__(self, *, chat: bool = False, ends_texts: bool = False) -> None:
        self.chat_template = "{{ messages }}" if chat else None
        self._ends_texts = ends_texts

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        ids = [{"^": 1, "$": 2}.get(char, ord(char)) for char in text]
        if not add_special_tokens:
            return ids
        return [1, *ids, *([2] if self._ends_texts else [])]

    def apply_chat_template(
        self, conversation, *, add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ):
        assert (tokenize, return_dict) == (True, False)
        text = "".join(f"<{m['role'][0]}>{m['content']}" for m in conversation)
        return self.encode(
            f"^{text}{'<a>' if add_generation_prompt else ''}", add_special_tokens=False
        )


def row(prompt, name="t") -> TaskRow:
    return TaskRow(name, prompt, "4", "exact", "here", {"k": 1})


def text_of(prompt, *, chat=False, ends_texts=False, **options) -> str:
    tokenizer = CharTokenizer(chat=chat, ends_texts=ends_texts)
    (task,) = tokenize_tasks([row(prompt)], tokenizer, max_prompt_tokens=99, **options).tasks
    return "".join({1: "^", 2: "$"}.get(i, chr(i)) for i in task.prompt_ids)


def test_the_rest_of_a_task_stays_as_it_was():
    (task,) = tokenize_tasks([row("ab")], CharTokenizer(), max_prompt_tokens=9).tasks
    assert (task.task_id, task.prompt, task.answer, task.verifier) == ("t", "ab", "4", "exact")
    assert (task.source, task.extra, task.prompt_ids) == ("here", {"k": 1}, (1, 97, 98))


@pytest.mark.parametrize(
    ("prompt", "options", "expected"),
    [
        ("2+2=", {}, "^2+2="),
        ("2+2=", {"template": "Q: {prompt} A:"}, "^Q: 2+2= A:"),
        ("^2+2=", {}, "^2+2="),
        ("2+2=", {"ends_texts": True}, "^2+2="),
        ("2+2=$", {}, "^2+2=$"),
        ("2+2=", {"chat": True}, "^<u>2+2=<a>"),
        ("x", {"chat": True, "template": "[{prompt}]", "system_prompt": "S"}, "^<s>S<u>[x]<a>"),
        (tuple(ASK), {"chat": True}, "^<u>What is 2+2?<a>"),
        (tuple(ASK), {"chat": True, "system_prompt": "S"}, "^<s>S<u>What is 2+2?<a>"),
        ((SYSTEM, *ASK), {"chat": True, "system_prompt": "S"}, "^<s>Be brief.<u>What is 2+2?<a>"),
    ],
)
def test_prompts_become_tokens_with_one_beginning_and_no_end(prompt, options, expected):
    assert text_of(prompt, **options) == expected


@pytest.mark.parametrize(("prompt", "system"), [(tuple(ASK), None), ("text", "Be brief.")])
def test_what_needs_a_chat_template_is_refused_without_one(prompt, system):
    with pytest.raises(DataError, match="t, column `prompt`: expected a tokenizer with a chat"):
        tokenize_tasks([row(prompt)], CharTokenizer(), max_prompt_tokens=9, system_prompt=system)


def test_prompts_above_the_limit_are_refused_by_name():
    rows = [row("abc", "fits"), row("abcd", "long")]
    with pytest.raises(
        DataError, match="long, column `prompt`: expected at most 4 prompt tokens, f"
    ):
        tokenize_tasks(rows, CharTokenizer(), max_prompt_tokens=4)


def test_prompts_above_the_limit_are_dropped_and_reported_if_that_is_asked_for():
    rows = [row("abc", "fits"), row("abcd", "long")]
    result = tokenize_tasks(rows, CharTokenizer(), max_prompt_tokens=4, too_long="drop")
    assert [task.task_id for task in result.tasks] == ["fits"]
    assert [(p.task_id, p.tokens) for p in result.dropped] == [("long", 5)]
    assert result.report() == "1 of 2 tasks dropped, prompt too long: here 1"


def test_dropping_every_task_is_refused():
    with pytest.raises(DataError, match="1 of 1 prompts are too long"):
        tokenize_tasks([row("abcd")], CharTokenizer(), max_prompt_tokens=2, too_long="drop")


def test_the_text_of_messages_is_what_a_verifier_reads_as_the_prompt():
    assert row((SYSTEM, *ASK)).prompt_text == "Be brief.\n\nWhat is 2+2?"
    assert row("plain").prompt_text == "plain"
