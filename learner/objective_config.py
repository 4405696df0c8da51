"""The objective as data: independent choices, and presets that name usual combinations.

Knows no torch and no run: what a choice computes is in `learner.objective`, and what depends on
the run (its staleness bound, response limit, reference and critic) enters by `for_run`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Self

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import ErrorDetails

from learner.objective_choices import (
    AdvantageConfig,
    AggregationConfig,
    ClipConfig,
    CorrectionConfig,
    CovarianceConfig,
    CriticConfig,
    KeepInterval,
    KLConfig,
    RatioConfig,
    Table,
    nearest,
)
from learner.presets import CORRECTIONS, PRESETS

__all__ = [
    "CORRECTIONS",
    "PRESETS",
    "AdvantageConfig",
    "AggregationConfig",
    "ClipConfig",
    "CorrectionConfig",
    "CovarianceConfig",
    "CriticConfig",
    "KLConfig",
    "KeepInterval",
    "ObjectiveConfig",
    "RatioConfig",
    "expand",
]


class ObjectiveConfig(Table):
    """A preset, expanded, with any field overridden; `ObjectiveConfig()` is plain grpo.

    Fields not given come from the preset, section by section and field by field; `correction` may
    be a name, which replaces the preset's whole correction.
    """

    preset: str = "grpo"
    """Name of the combination that the other fields start from."""
    advantage: AdvantageConfig = AdvantageConfig()
    """Baseline and scale."""
    critic: CriticConfig = CriticConfig()
    """GAE and the value loss, where the baseline is a critic."""
    ratio: RatioConfig = RatioConfig()
    """Unit and anchor of the policy ratio."""
    clip: ClipConfig = ClipConfig()
    """Bounds on the policy ratio."""
    correction: CorrectionConfig = CorrectionConfig()
    """Engine-mismatch correction: a table, or one of tis, icepop, none."""
    aggregation: AggregationConfig = AggregationConfig()
    """How token losses become one number."""
    kl: KLConfig = KLConfig()
    """Divergence from a reference model."""
    covariance: CovarianceConfig = CovarianceConfig()
    """Restraint of the tokens that use up entropy."""
    entropy_bonus: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Coefficient of the mean token entropy, added to what is maximised."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Largest lag, in versions, at which a token trains; None takes the run's bound."""
    dynamic_sampling: bool = False
    """Replace groups whose samples all had the same outcome, since they teach nothing."""
    overlong_window: float = Field(default=0.0, ge=0, le=1)
    """Last share of the response limit, over which the reward falls by up to 1; 0 is off."""
    mask_truncated: bool = False
    """Leave samples that were cut off by the length limit out of training."""

    _kl_is_the_presets: bool = PrivateAttr(default=False)
    """Whether the KL coefficient is the preset's own, so that it stays off without a reference
    model instead of refusing the run. Nobody's to set: a field would let a KL that is asked for
    get past that refusal."""

    @model_validator(mode="wrap")
    @classmethod
    def _expand_preset(cls, data: object, make: ModelWrapValidatorHandler[Self]) -> Self:
        if not isinstance(data, Mapping):
            return make(data)
        name = data.get("preset", "grpo")
        if not isinstance(name, str) or name not in PRESETS:
            raise ValueError(f"unknown objective.preset {name!r}{nearest(str(name), PRESETS)}")
        made = make(_merged(PRESETS[name], data))
        given = data.get("kl", {})
        own = isinstance(given, Mapping) and "coefficient" not in given
        made._kl_is_the_presets = own and made.kl.coefficient > 0
        return made

    @model_serializer(mode="wrap")
    def _leave_the_presets_kl_to_it(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Written out, the preset's coefficient would read as one that was asked for."""
        content: dict[str, Any] = dump(self)
        if self._kl_is_the_presets and "kl" in content:
            content["kl"].pop("coefficient", None)
        return content

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.ratio.anchor == "behavior" and self.correction.weight != "none":
            raise ValueError(
                "ratio.anchor 'behavior' already holds the engine mismatch, so correction.weight "
                f"{self.correction.weight!r} would count it twice; set correction.weight to 'none' "
                "(keep intervals are fine)"
            )
        if self.ratio.unit == "sequence_pure" and "token" in self.correction.statistics:
            raise ValueError(
                "ratio.unit 'sequence_pure' takes only whole-sample weights and masks, and "
                "correction uses a token statistic; use ratio.unit 'sequence', or the product or "
                "geometric statistic"
            )
        if self.ratio.unit == "sequence_pure" and self.covariance.kind == "clip":
            raise ValueError(
                "ratio.unit 'sequence_pure' takes only whole-sample weights and masks, and "
                "covariance.kind 'clip' acts per token; use ratio.unit 'sequence'"
            )
        return self

    @property
    def per_sequence(self) -> bool:
        """Whether the ratio or a mismatch statistic is of the whole sample, so that a sample with
        one stale token is stale as a whole."""
        return self.ratio.unit != "token" or bool(
            self.correction.statistics & {"product", "geometric"}
        )

    @property
    def needs_old(self) -> bool:
        """Whether `old_logprobs` must be computed at all."""
        return (
            self.ratio.anchor != "behavior"
            or self.correction.needs_old
            or self.covariance.kind == "kl"
            or (self.kl.coefficient > 0 and self.kl.place == "reward")
        )

    @property
    def needs_reference(self) -> bool:
        """Whether a run without a reference model is refused."""
        return self.kl.coefficient > 0 and not self._kl_is_the_presets

    @property
    def kl_in_loss(self) -> bool:
        """Whether a reference changes the loss, rather than only what is reported."""
        return self.kl.coefficient > 0 and self.kl.place == "loss"

    @property
    def needs_critic(self) -> bool:
        """Whether the run must have a value model."""
        return self.advantage.baseline == "critic"

    def warnings(self) -> tuple[str, ...]:
        """Sentences about choices that are allowed but do nothing useful."""
        widest = max(self.clip.low, self.clip.high)
        if self.ratio.unit != "token" and self.clip.kind == "ppo" and widest > 0.05:
            return (
                f"clip {widest} on a sequence ratio practically never clips; "
                "GSPO's bounds are about 3e-4 and 4e-4",
            )
        return ()

    def for_run(
        self,
        *,
        max_staleness: int,
        max_response_tokens: int,
        samples_per_group: int,
        has_reference: bool = False,
        has_critic: bool = False,
    ) -> "ObjectiveConfig":
        """This objective with the run's bounds filled in where it has none of its own, and the
        preset's own KL term switched off where the run has no reference model.

        Raises ValueError when the run lacks what `needs_critic` or `needs_reference` say, when a
        group statistic is asked of groups of one, and when `max_staleness` was set here to
        something else than the run's.
        """
        if problem := self._lacking(samples_per_group, has_reference, has_critic):
            raise ValueError(problem)
        if self.max_staleness not in (None, max_staleness):
            raise ValueError(
                f"objective.max_staleness {self.max_staleness} contradicts the run's max_staleness "
                f"{max_staleness}; set the run's only"
            )
        changes: dict[str, Any] = {"max_staleness": max_staleness}
        if self.aggregation.kind == "constant" and self.aggregation.max_tokens is None:
            limit = {"max_tokens": max_response_tokens}
            changes["aggregation"] = self.aggregation.model_copy(update=limit)
        if self._kl_is_the_presets and not has_reference:
            changes["kl"] = self.kl.model_copy(update={"coefficient": 0.0})
        filled = self.model_copy(update=changes)
        filled._kl_is_the_presets = False
        return filled

    def _lacking(self, samples_per_group: int, has_reference: bool, has_critic: bool) -> str:
        if self.needs_critic and not has_critic:
            return (
                "advantage.baseline 'critic' (preset ppo) needs a critic (value model), which this "
                "run does not have; choose another baseline, such as 'group_mean'"
            )
        if self.needs_reference and not has_reference:
            return (
                f"objective.kl.coefficient {self.kl.coefficient:g} needs a reference model, which "
                "this run does not have; add the table [learner.reference], or set it to 0"
            )
        if self.advantage.per_group and samples_per_group < 2:
            return (
                f"advantage baseline {self.advantage.baseline!r} with scale "
                f"{self.advantage.scale!r} compares the samples of a group and needs at least two "
                f"samples per group, got {samples_per_group}"
            )
        return ""


def expand(name: str, overrides: Mapping[str, Any] | None = None) -> ObjectiveConfig:
    """The preset `name` with `overrides` (nested like the fields) applied.

    Raises ValueError with one sentence per problem, a line each.
    """
    overrides = {} if overrides is None else overrides
    if not isinstance(overrides, Mapping):
        raise ValueError(f"overrides are {overrides!r}, expected a table of fields")
    if (other := overrides.get("preset", name)) != name:
        raise ValueError(
            f"overrides name the preset {other!r}, expected none: the preset is {name!r}"
        )
    try:
        return ObjectiveConfig.model_validate({**overrides, "preset": name})
    except ValidationError as error:
        details = error.errors(include_url=False)
    raise ValueError("\n".join(map(_sentence, details)))


def _sentence(detail: ErrorDetails) -> str:
    """Key, what was found there and what was expected."""
    *above, last = detail["loc"] or ("",)
    key = ".".join(map(str, detail["loc"]))
    match detail["type"]:
        case "value_error":
            return detail["msg"].removeprefix("Value error, ")
        case "extra_forbidden":
            known = dict.fromkeys(_fields_at(above))
            return f"unknown key {key!r}{nearest(str(last), known)}"
        case "model_type":
            expected = "a table of fields"
        case _:
            message = detail["msg"]
            expected = (message[:1].lower() + message[1:]).removeprefix("input should be ")
    return f"{key} is {detail['input']!r}, expected {expected}"


def _fields_at(path: list[int | str]) -> Iterator[str]:
    """Names of the fields of the table at `path`."""
    table: Any = ObjectiveConfig
    for part in path:
        if isinstance(part, str):
            # keep is the one list of tables that there is.
            table = KeepInterval if part == "keep" else table.model_fields[part].annotation
    yield from table.model_fields


def _merged(base: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in overrides.items():
        default = merged.get(key)
        if key == "correction" and isinstance(default, str):
            default = CORRECTIONS[default]
        if isinstance(default, Mapping) and isinstance(value, Mapping):
            value = {**default, **value}
        merged[key] = value
    return merged
