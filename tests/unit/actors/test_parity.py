"""Each way in which the engine can disagree with the learner is named, and nothing else is.

The policies are small softmax models of three tensors, computed twice: as the learner does and as
a (possibly broken) engine does.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors import parity
from actors.parity import ParityReport, ProbeExpectation, check_samples, compare, tolerance

VOCAB, HIDDEN, TOP_K = 50, 24, 8
FULL = 52
TEMPERATURE = 0.7
FP32 = tolerance("float32", "float32", None)


@dataclass(frozen=True)
class Policy:
    """Next-token logits = head @ tanh(hidden @ (decayed sum of embeddings))."""

    embedding: np.ndarray
    hidden: np.ndarray
    head: np.ndarray

    def logits(self, prefix: tuple[int, ...], digits: int = FULL) -> np.ndarray:
        """`digits` bits of mantissa are kept in every intermediate: 7 for bfloat16."""
        weights = 0.8 ** np.arange(len(prefix))[::-1]
        state = rounded(weights @ rounded(self.embedding, digits)[list(prefix)], digits)
        state = rounded(np.tanh(rounded(self.hidden, digits) @ state), digits)
        return rounded(rounded(self.head, digits) @ state, digits)

    def logprobs(self, prefix: tuple[int, ...], heat: float, digits: int = FULL) -> np.ndarray:
        logits = self.logits(prefix, digits) / heat
        return logits - np.logaddexp.reduce(logits)

    def updated(self, rng: np.random.Generator, size: float = 0.05) -> "Policy":
        moved = (t + size * rng.normal(size=t.shape) * t.std() for t in self.tensors())
        return Policy(*moved)

    def tensors(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.embedding, self.hidden, self.head


def rounded(values: np.ndarray, digits: int) -> np.ndarray:
    if digits == FULL:
        return values
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.round(np.ldexp(mantissa, digits + 1)), exponent - digits - 1)


def random_policy(rng: np.random.Generator) -> Policy:
    return Policy(
        rng.normal(size=(VOCAB, HIDDEN)),
        rng.normal(size=(HIDDEN, HIDDEN)) / np.sqrt(HIDDEN),
        rng.normal(size=(VOCAB, HIDDEN)) * 0.6,
    )


def probe_prefixes(rng: np.random.Generator, prompts: int = 4, positions: int = 12) -> tuple:
    texts = rng.integers(0, VOCAB, size=(prompts, positions + 1)).tolist()
    return tuple(tuple(text[: n + 1]) for text in texts for n in range(1, positions + 1))


def expectation(policy: Policy, prefixes: tuple, heat: float, label: str = "") -> ProbeExpectation:
    scaled = np.array([policy.logprobs(p, heat) for p in prefixes])
    raw = np.array([policy.logprobs(p, 1.0) for p in prefixes])
    ids = np.argsort(-scaled, axis=1)[:, :TOP_K].astype(np.int32)

    def take(table: np.ndarray) -> np.ndarray:
        return np.take_along_axis(table, ids, axis=1).astype(np.float32)

    return ProbeExpectation(prefixes, ids, take(scaled), take(raw), label)


def engine_row(logprobs: np.ndarray, rng: np.random.Generator) -> dict[int, float]:
    """The likeliest tokens and, as engines report it too, the one that was sampled."""
    listed = {*np.argsort(-logprobs)[:TOP_K].tolist(), int(rng.integers(VOCAB))}
    return {token: float(np.float32(logprobs[token])) for token in listed}


def engine_rows(
    policy: Policy, prefixes: tuple, heat: float, rng: np.random.Generator, digits: int = FULL
) -> list[dict[int, float]]:
    return [engine_row(policy.logprobs(p, heat, digits), rng) for p in prefixes]


@dataclass(frozen=True)
class Case:
    rng: np.random.Generator
    before: Policy
    now: Policy
    prefixes: tuple
    expected: ProbeExpectation
    previous: ProbeExpectation

    def observe(self, policy: Policy, heat: float = TEMPERATURE, digits: int = FULL) -> list[dict]:
        return engine_rows(policy, self.prefixes, heat, self.rng, digits)

    def compare(self, observed: list[dict]) -> ParityReport:
        return compare(self.expected, observed, self.previous, FP32)


def case(seed: int, size: float = 0.05) -> Case:
    rng = np.random.default_rng(seed)
    before = random_policy(rng)
    now = before.updated(rng, size)
    prefixes = probe_prefixes(rng)
    return Case(
        rng,
        before,
        now,
        prefixes,
        expectation(now, prefixes, TEMPERATURE, "0.12"),
        expectation(before, prefixes, TEMPERATURE, "0.11"),
    )


seeds = pytest.mark.parametrize("seed", range(3))
untimed = settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@seeds
def test_agreement_passes(seed: int) -> None:
    c = case(seed)
    report = c.compare(c.observe(c.now))
    assert report.passed and report.cause == ""
    assert report.max_abs < 1e-5 and report.mean_abs <= report.max_abs


@seeds
def test_raw_logprobs(seed: int) -> None:
    c = case(seed)
    observed = c.observe(c.now, heat=1.0)
    for previous in (None, c.previous):
        report = compare(c.expected, observed, previous, FP32)
        assert not report.passed and report.cause == parity.RAW
        assert report.max_abs > 0.1


@seeds
def test_engine_still_at_the_version_before(seed: int) -> None:
    c = case(seed)
    cause = c.compare(c.observe(c.before)).cause
    assert cause == "engine still serves the weights of version 0.11"
    unnamed = replace(c.previous, label="")
    cause = compare(c.expected, c.observe(c.before), unnamed, FP32).cause
    assert cause == "engine still serves the weights of version before"


@seeds
def test_version_before_and_raw(seed: int) -> None:
    c = case(seed)
    cause = c.compare(c.observe(c.before, heat=1.0)).cause
    assert "weights of version 0.11" in cause and parity.RAW in cause


@seeds
@pytest.mark.parametrize(
    ("step", "cause"), [(1, parity.SHIFTED_AHEAD), (-1, parity.SHIFTED_BEHIND)]
)
def test_shift_by_one(seed: int, step: int, cause: str) -> None:
    c = case(seed)
    per_prompt = 12
    rows = c.observe(c.now)
    observed = []
    for i, row in enumerate(rows):
        inside = i // per_prompt == (i + step) // per_prompt
        observed.append(rows[i + step] if inside else row)
    for previous in (None, c.previous):
        report = compare(c.expected, observed, previous, FP32)
        assert not report.passed and report.cause == cause
        assert parity.SHIFTED in report.cause


@seeds
@pytest.mark.parametrize("size", [0.01, 0.05, 0.3])
@pytest.mark.parametrize("tensor", ["embedding", "hidden", "head"])
def test_one_stale_tensor(seed: int, size: float, tensor: str) -> None:
    c = case(seed, size)
    engine = replace(c.now, **{tensor: getattr(c.before, tensor)})
    report = c.compare(c.observe(engine))
    assert not report.passed and report.cause == parity.TENSORS


@seeds
def test_tied_head_that_kept_its_packed_copy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    start = random_policy(rng)
    before = replace(start, head=start.embedding * 0.6)
    moved = before.updated(rng)
    now = replace(moved, head=moved.embedding * 0.6)
    prefixes = probe_prefixes(rng)
    expected = expectation(now, prefixes, 1.0, "0.1")
    previous = expectation(before, prefixes, 1.0, "0.0")
    observed = engine_rows(replace(now, head=before.head), prefixes, 1.0, rng)
    assert compare(expected, observed, previous, FP32).cause == parity.TENSORS


@seeds
@pytest.mark.parametrize("with_previous", [False, True])
def test_wrongly_packed_tensor(seed: int, with_previous: bool) -> None:
    c = case(seed)
    engine = replace(c.now, hidden=c.now.hidden.T)
    previous = c.previous if with_previous else None
    report = compare(c.expected, c.observe(engine), previous, FP32)
    assert not report.passed and report.cause == parity.TENSORS


@seeds
@pytest.mark.parametrize("size", [0.0, 0.0005])
def test_engine_in_lower_precision(seed: int, size: float) -> None:
    c = case(seed, size)
    observed = c.observe(c.now, digits=7)
    for previous in (None, c.previous):
        report = compare(c.expected, observed, previous, FP32)
        assert not report.passed and report.cause == parity.DTYPE
    allowed = tolerance("bfloat16", "float32", None)
    assert compare(c.expected, observed, c.previous, allowed).passed


@untimed
@given(
    seed=st.integers(0, 2**32 - 1),
    times=st.floats(1.1, 2.9),
    size=st.sampled_from([0.0, 0.001, 0.01, 0.1]),
    heat=st.sampled_from([0.5, 0.9, 1.0, 1.5]),
    rows=st.integers(1, 30),
)
def test_small_noise_is_never_blamed_on_the_sync(
    seed: int, times: float, size: float, heat: float, rows: int
) -> None:
    rng = np.random.default_rng(seed)
    before = random_policy(rng)
    now = before.updated(rng, size)
    prefixes = probe_prefixes(rng)[:rows]
    expected, previous = (expectation(p, prefixes, heat) for p in (now, before))
    observed = []
    for prefix in prefixes:
        noise = rng.uniform(-1, 1, VOCAB)
        noise *= times * FP32 / np.abs(noise).max()
        observed.append(engine_row(now.logprobs(prefix, heat) + noise, rng))
    for known in (None, previous):
        report = compare(expected, observed, known, FP32)
        assert report.cause == ("" if report.passed else parity.DTYPE)


def test_near_tie_at_the_last_rank_is_no_difference() -> None:
    ids = np.array([[4, 9]], np.int32)
    values = np.array([[-0.5, -2.0]], np.float32)
    expected = ProbeExpectation(((1, 2),), ids, values, values)
    report = compare(expected, [{4: -0.5, 7: -2.0 + 1e-5}], None, FP32)
    assert report.passed and 0 < report.max_abs < 1e-4


def test_absent_token_counts_with_the_least_difference_possible() -> None:
    ids = np.array([[4, 9]], np.int32)
    values = np.array([[-0.5, -1.0]], np.float32)
    expected = ProbeExpectation(((1, 2),), ids, values, values)
    report = compare(expected, [{4: -0.5, 7: -3.0, 8: -9.0}], None, FP32)
    assert not report.passed and report.max_abs == pytest.approx(2.0)
    report = compare(expected, [{4: -0.5, 7: -0.75}], None, FP32)
    assert not report.passed and report.max_abs == pytest.approx(0.25)


def test_what_the_engine_returns_is_checked() -> None:
    c = case(0)
    rows = c.observe(c.now)
    with pytest.raises(ValueError, match="48 prefixes, 47 observed"):
        c.compare(rows[:-1])
    for bad in (float("nan"), float("-inf")):
        broken = [dict.fromkeys(rows[0], bad), *rows[1:]]
        report = c.compare(broken)
        assert not report.passed and report.cause == parity.NOT_FINITE
    short = [dict(list(rows[0].items())[: TOP_K - 1]), *rows[1:]]
    assert c.compare(short).cause == parity.TOO_FEW


def test_probe_shapes_are_checked() -> None:
    ids = np.zeros((2, 3), np.int32)
    values = np.zeros((2, 3), np.float32)
    ProbeExpectation(((1,), (2,)), ids, values, values)
    for prefixes, raw in ((((1,),), values), (((1,), (2,)), values[:, :2])):
        with pytest.raises(ValueError, match=r"\[P, K\]"):
            ProbeExpectation(prefixes, ids, values, raw)


def test_previous_probe_of_other_prefixes_is_not_used() -> None:
    c = case(1)
    other = expectation(c.before, probe_prefixes(c.rng), TEMPERATURE, "0.11")
    report = compare(c.expected, c.observe(c.now), other, FP32)
    assert report.passed


@dataclass(frozen=True)
class Samples:
    """`heat` is the sampling temperature; `tokens` [N], `offsets` [samples + 1]."""

    prompts: tuple[tuple[int, ...], ...]
    tokens: np.ndarray
    offsets: np.ndarray
    heat: float

    def score(self, policy: Policy, heat: float | None = None, digits: int = FULL) -> np.ndarray:
        scores = []
        for i, prompt in enumerate(self.prompts):
            response = tuple(self.tokens[self.offsets[i] : self.offsets[i + 1]].tolist())
            for t, token in enumerate(response):
                table = policy.logprobs(prompt + response[:t], heat or self.heat, digits)
                scores.append(table[token])
        return np.array(scores, np.float32)

    def check(self, policy: Policy, behavior: np.ndarray, limit: float = FP32) -> ParityReport:
        expected, raw = self.score(policy), self.score(policy, heat=1.0)
        return check_samples(behavior, expected, raw, self.offsets, limit)


def sampled(policy: Policy, heat: float, rng: np.random.Generator, longest: int = 12) -> Samples:
    prompts, tokens, offsets = [], [], [0]
    for _ in range(8):
        prompt = tuple(rng.integers(0, VOCAB, 4).tolist())
        response: tuple[int, ...] = ()
        for _ in range(int(rng.integers(1, longest + 1))):
            table = np.exp(policy.logprobs(prompt + response, heat))
            response += (int(rng.choice(VOCAB, p=table / table.sum())),)
        prompts.append(prompt)
        tokens += response
        offsets.append(len(tokens))
    return Samples(tuple(prompts), np.array(tokens), np.array(offsets), heat)


@seeds
@pytest.mark.parametrize("heat", [0.7, 1.0])
def test_samples_agree(seed: int, heat: float) -> None:
    rng = np.random.default_rng(seed)
    policy = random_policy(rng)
    samples = sampled(policy, heat, rng)
    report = samples.check(policy, samples.score(policy))
    assert report.passed and report.cause == ""


@seeds
def test_samples_with_raw_logprobs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    policy = random_policy(rng)
    samples = sampled(policy, 0.7, rng)
    report = samples.check(policy, samples.score(policy, heat=1.0))
    assert not report.passed and report.cause == parity.RAW


@seeds
@pytest.mark.parametrize("heat", [0.7, 1.0])
@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize(
    ("step", "cause"), [(1, parity.SHIFTED_AHEAD), (-1, parity.SHIFTED_BEHIND)]
)
def test_samples_shifted_by_one(seed: int, heat: float, raw: bool, step: int, cause: str) -> None:
    rng = np.random.default_rng(seed)
    policy = random_policy(rng)
    samples = sampled(policy, heat, rng)
    behavior = samples.score(policy, heat=1.0 if raw else None)
    for i in range(len(samples.prompts)):
        part = slice(samples.offsets[i], samples.offsets[i + 1])
        behavior[part] = np.roll(behavior[part], -step)
    report = samples.check(policy, behavior)
    assert not report.passed
    assert report.cause == (f"{cause}; {parity.RAW}" if raw and heat != 1.0 else cause)


@seeds
def test_samples_of_another_model(seed: int) -> None:
    rng = np.random.default_rng(seed)
    policy = random_policy(rng)
    samples = sampled(policy, 0.7, rng)
    report = samples.check(policy, samples.score(random_policy(rng)))
    assert not report.passed and report.cause == parity.WEIGHTS


@seeds
def test_samples_with_another_token_before_the_prompt(seed: int) -> None:
    rng = np.random.default_rng(seed)
    policy = random_policy(rng)
    samples = sampled(policy, 0.7, rng)
    doubled = replace(samples, prompts=tuple((3, 3, *prompt) for prompt in samples.prompts))
    report = samples.check(policy, doubled.score(policy))
    assert not report.passed
    assert report.cause not in (parity.RAW, parity.SHIFTED_AHEAD, parity.SHIFTED_BEHIND)


@seeds
def test_samples_in_lower_precision(seed: int) -> None:
    rng = np.random.default_rng(seed)
    policy = random_policy(rng)
    samples = sampled(policy, 0.7, rng)
    behavior = samples.score(policy, digits=7)
    report = samples.check(policy, behavior)
    assert not report.passed and report.cause == parity.DTYPE
    assert samples.check(policy, behavior, tolerance("float32", "bfloat16", None)).passed


@untimed
@given(
    seed=st.integers(0, 2**32 - 1),
    times=st.floats(1.1, 2.9),
    heat=st.sampled_from([0.5, 0.99, 1.0, 1.5]),
    longest=st.integers(1, 12),
)
def test_small_noise_in_samples_is_called_rounding(
    seed: int, times: float, heat: float, longest: int
) -> None:
    rng = np.random.default_rng(seed)
    policy = random_policy(rng)
    samples = sampled(policy, heat, rng, longest)
    noise = rng.uniform(-1, 1, len(samples.tokens))
    noise *= times * FP32 / np.abs(noise).max()
    report = samples.check(policy, samples.score(policy) + noise)
    assert not report.passed and report.cause == parity.DTYPE


def test_sample_arrays_are_checked() -> None:
    ones = np.full(3, -1.0)
    report = check_samples(np.array([-1.0, np.nan, -1.0]), ones, ones, np.array([0, 3]), FP32)
    assert not report.passed and report.cause == parity.NOT_FINITE
    for behavior, offsets in ((ones[:2], [0, 3]), (ones, [0, 2])):
        with pytest.raises(ValueError, match="one list of tokens"):
            check_samples(behavior, ones, ones, np.array(offsets), FP32)
    with pytest.raises(ValueError, match="one list of tokens"):
        check_samples(ones[:0], ones[:0], ones[:0], np.array([0]), FP32)


def test_tolerance_follows_the_coarser_dtype_and_step_0() -> None:
    assert tolerance("float32", "torch.float32", None) == FP32
    assert tolerance("bfloat16", "float32", None) == tolerance("float32", "bfloat16", None)
    assert FP32 < tolerance("float16", "float32", None) < tolerance("bfloat16", "float32", None)
    assert tolerance("float32", "float32", 0.01) == pytest.approx(0.05)
    assert tolerance("float32", "float32", 2e-5) == FP32
    with pytest.raises(ValueError, match="float8"):
        tolerance("float8", "float32", None)
    with pytest.raises(ValueError, match="step 0"):
        tolerance("float32", "float32", float("nan"))


def test_report_reads_as_one_sentence() -> None:
    report = ParityReport(0.5, 0.1, 0.001, False, parity.RAW)
    assert parity.RAW in str(report) and "0.5" in str(report) and "0.001" in str(report)
    assert "within" in str(ParityReport(1e-5, 1e-6, 1e-3, True, ""))
