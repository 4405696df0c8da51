import subprocess
import sys

import pytest
import verifier_doubles

from verifiers.registry import BUILT_IN, UnknownVerifierError, resolve, verifier
from verifiers.verdict import Question

QUESTION = Question("task", "prompt", "right")


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_built_in_verifiers_are_found_by_name_and_by_path(name: str) -> None:
    found = resolve(name)
    assert found.name == name
    assert resolve(found.path) is found


def test_only_what_cannot_hang_runs_inline() -> None:
    inline = {name for name in BUILT_IN if not resolve(name).isolated}
    assert inline == {"exact", "numeric"}


def test_the_decorator_leaves_the_function_callable() -> None:
    assert verifier_doubles.lengths(QUESTION, ["a", "bb"]) == [0.0, 1.0]
    assert resolve("double_group").target is verifier_doubles.lengths


def test_an_import_path_finds_decorated_and_plain_verifiers() -> None:
    assert resolve("verifier_doubles:parts") is resolve("double_parts")
    plain = resolve("verifier_doubles:Plain")
    assert plain.isolated and plain.reward_range == (0.0, 1.0)
    assert plain.call(QUESTION, "right") == 1.0
    assert plain.call is plain.call


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("numerik", "did you mean 'numeric'"),
        ("zzz", "known are .*exact.*reasoning_gym"),
        ("no_such_package.module:Name", "cannot be imported: No module named"),
        ("verifier_doubles:nothing", "cannot be imported: .*no attribute 'nothing'"),
        (":nothing", "cannot be imported"),
        ("verifier_doubles:NOT_CALLABLE", "is a int, not callable"),
    ],
)
def test_unknown_names_are_refused_with_a_hint(name: str, message: str) -> None:
    with pytest.raises(UnknownVerifierError, match=message):
        resolve(name)


def test_a_name_belongs_to_one_verifier() -> None:
    with pytest.raises(ValueError, match="'double_parts' is verifier_doubles:parts already"):
        verifier("double_parts")(lambda question, completion: 1.0)
    with pytest.raises(ValueError, match="reward_range"):
        verifier("double_empty", reward_range=(1.0, 1.0))


def test_resolving_the_built_ins_imports_no_library() -> None:
    program = (
        "import sys\n"
        "from verifiers.config import VerifierConfig\n"
        "assert 'pyarrow' not in sys.modules\n"
        "from verifiers.registry import BUILT_IN, resolve\n"
        "[resolve(name) for name in BUILT_IN]\n"
        "heavy = 'math_verify sympy reasoning_gym transformers torch ray vllm'.split()\n"
        "print([name for name in heavy if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
