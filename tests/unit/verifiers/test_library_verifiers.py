import pytest
import reasoning_gym

from verifiers.math_answers import MathAnswers
from verifiers.reasoning_gym_tasks import ReasoningGym, answer_text
from verifiers.verdict import Question, Verdict, VerdictStatus


@pytest.fixture(scope="module")
def math() -> MathAnswers:
    return MathAnswers()


@pytest.fixture(scope="module")
def gym() -> ReasoningGym:
    return ReasoningGym()


@pytest.mark.parametrize(
    ("reference", "completion", "reward"),
    [
        (r"\frac{1}{2}", r"Hence \boxed{0.5}.", 1.0),
        (r"\frac{1}{2}", r"Hence $\frac{2}{4}$.", 1.0),
        (r"$\frac{1}{2}$", "<answer>1/2</answer>", 1.0),
        (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}", 0.0),
        (r"\boxed{x^2+2x+1}", r"\boxed{(x+1)^2}", 1.0),
        ("1234", "The total is 1,234.", 1.0),
        (r"\{1,2\}", r"\boxed{\{2,1\}}", 1.0),
        ("(0,1]", r"\boxed{(0,1]}", 1.0),
        ("(0,1]", r"\boxed{[0,1]}", 0.0),
        ("x=3", r"\boxed{3}", 1.0),
        (r"\sqrt{8}", r"<answer>$2\sqrt{2}$</answer>", 1.0),
        (r"50\%", r"\boxed{0.5}", 1.0),
        ("42", r"\boxed{1} or \boxed{42}", 0.0),
        ("42", r"\boxed{42} but <answer>41</answer>", 0.0),
        ("42", "<answer></answer> 42", 0.0),
        ("42", "", 0.0),
        ("42", "I do not know", 0.0),
    ],
)
def test_math_equivalence(
    math: MathAnswers, reference: str, completion: str, reward: float
) -> None:
    assert math(Question("task", "prompt", reference), completion) == reward


@pytest.mark.parametrize("reference", [None, "", "  ", "$$"])
def test_math_without_a_reference_is_unscorable(math: MathAnswers, reference: str | None) -> None:
    verdict = math(Question("task", "prompt", reference), "42")
    assert isinstance(verdict, Verdict) and verdict.status is VerdictStatus.UNSCORABLE


@pytest.mark.parametrize(
    ("completion", "reference", "text"),
    [
        ("so\n<answer> 7 </answer>\nbye", "7", "7"),
        ("so\n7\n", "7", "7"),
        ("1 0\n0 1\n", "1 0\n0 1", "1 0\n0 1"),
        ("a\nb", None, "a\nb"),
        ("", "7", ""),
    ],
)
def test_what_reaches_the_scorer(completion: str, reference: str | None, text: str) -> None:
    assert answer_text(completion, reference) == text


def gym_question(family: str, index: int = 0, **config: object) -> Question:
    entry = reasoning_gym.create_dataset(family, seed=5, size=index + 1, **config)[index]
    extra = {"metadata": entry["metadata"], "config": config}
    return Question("task", entry["question"], entry["answer"], extra)


@pytest.mark.parametrize(
    "family",
    [
        "basic_arithmetic",
        "binary_matrix",
        "chain_sum",
        "countdown",
        "decimal_arithmetic",
        "mini_sudoku",
        "n_queens",
        "polynomial_multiplication",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    ],
)
def test_a_reference_gets_the_full_score_and_fillers_do_not(gym: ReasoningGym, family: str) -> None:
    question = gym_question(family)
    for completion in (f"<answer>{question.answer}</answer>", str(question.answer)):
        verdict = gym(question, completion)
        assert (verdict.reward, verdict.outcome) == (1.0, 1.0)
    hidden = f"<answer>4 8 {question.answer} 15 16 23</answer>"
    for completion in ("", "<answer></answer>", question.prompt, hidden):
        verdict = gym(question, completion)
        assert verdict.status is VerdictStatus.OK
        assert verdict.outcome == 0.0
        assert verdict.reward is not None and verdict.reward < 0.5


def test_containing_the_answer_earns_nothing(gym: ReasoningGym) -> None:
    question = gym_question("chain_sum")
    for completion in (f"{question.answer} 8 9", f"<answer>{question.answer} 8</answer>"):
        assert gym(question, completion).reward == 0.0


def test_partial_credit_of_the_family_is_kept_apart_from_the_outcome(gym: ReasoningGym) -> None:
    verdict = gym(gym_question("countdown"), "<answer>1 + 1</answer>")
    assert (verdict.reward, verdict.outcome) == (0.05, 0.0)


def test_the_scorer_gets_the_settings_of_the_family(gym: ReasoningGym) -> None:
    small = gym_question("puzzle24", max_value=6)
    default = Question(small.task_id, small.prompt, small.answer, {**small.extra, "config": {}})
    answer = "<answer>8 * 3 * 1 * 1</answer>"
    assert (gym(small, answer).outcome, gym(default, answer).outcome) == (0.0, 1.0)


def test_an_answer_that_the_scorer_cannot_read_is_wrong_not_an_error(gym: ReasoningGym) -> None:
    verdict = gym(gym_question("prime_factorization"), "<answer>two times three</answer>")
    assert (verdict.status, verdict.reward) == (VerdictStatus.OK, 0.0)
    assert verdict.detail == "unreadable answer (ValueError)"


def test_a_scorer_that_fails_on_its_own_reference_is_an_error(gym: ReasoningGym) -> None:
    question = gym_question("prime_factorization")
    broken = Question("task", question.prompt, "not a number", question.extra)
    with pytest.raises(ValueError, match="invalid literal"):
        gym(broken, "<answer>two</answer>")


@pytest.mark.parametrize(
    ("family", "attack"),
    [
        ("string_insertion", "oracle_answer"),
        ("string_insertion", "[oracle_answer]"),
        ("string_insertion", "__import__('os')._exit(1)"),
        ("spiral_matrix", "[open('/etc/passwd').read()]"),
        ("spiral_matrix", "entry['answer'].split()"),
        ("binary_matrix", "[[c for c in r.split()] for r in oracle_answer.splitlines()]"),
        ("n_queens", "[b.split() for b in valid_solutions[0].splitlines()]"),
        ("countdown", "exec('import os; os._exit(1)')"),
        ("countdown", "preview(x)"),
        ("countdown", "(exec)(x)"),
        ("countdown", "x.func"),
        ("simple_integration", "[0][exit]"),
        ("polynomial_multiplication", "lambda: 0"),
    ],
)
def test_answers_that_would_run_code_are_not_evaluated(
    gym: ReasoningGym, family: str, attack: str
) -> None:
    verdict = gym(gym_question(family), f"<answer>{attack}</answer>")
    assert (verdict.reward, verdict.outcome) == (0.0, 0.0)
    assert verdict.detail == "not evaluated: more than a plain value"


@pytest.mark.parametrize("extra", [{}, {"metadata": {}}, {"metadata": {"source_dataset": "none"}}])
def test_an_unknown_family_is_unscorable(gym: ReasoningGym, extra: dict) -> None:
    verdict = gym(Question("task", "prompt", "7", extra), "7")
    assert verdict.status is VerdictStatus.UNSCORABLE
