"""The objective's presets and the sentences with which the learner's config refuses and warns."""

import pickle
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from learner.config import CORRECTIONS, PRESETS, LearnerConfig, ObjectiveConfig, expand


@pytest.mark.parametrize("name", PRESETS)
def test_a_resolved_preset_reloads_to_itself(name):
    config = expand(name)
    assert ObjectiveConfig.model_validate(config.model_dump()) == config
    assert ObjectiveConfig.model_validate_json(config.model_dump_json()) == config


def test_preset_numbers():
    dapo, gspo, cispo = expand("dapo"), expand("gspo"), expand("cispo")
    assert (dapo.clip.low, dapo.clip.high) == (0.2, 0.28)
    assert dapo.dynamic_sampling
    assert dapo.overlong_window == 0.2
    assert dapo.aggregation.kind == "token_mean"
    assert (gspo.ratio.unit, gspo.clip.low, gspo.clip.high) == ("sequence", 3e-4, 4e-4)
    assert (cispo.ratio.anchor, cispo.correction.weight, cispo.clip.high) == ("behavior", "none", 5)
    assert expand("dr_grpo").aggregation.kind == "constant"
    assert expand("rloo").advantage.baseline == "leave_one_out"
    assert expand("reinforce_pp").advantage.scale == "batch_std"
    assert all(expand(name).correction.cap == 2.0 for name in PRESETS if name != "cispo")


def test_no_preset_means_grpo():
    assert ObjectiveConfig() == expand("grpo")
    assert LearnerConfig().objective == expand("grpo")


def test_overrides_are_nested_and_keep_the_rest_of_the_preset():
    config = expand("dapo", {"clip": {"dual": 3.0}, "correction": {"cap": 4.0}, "max_staleness": 2})
    assert (config.clip.low, config.clip.high, config.clip.dual) == (0.2, 0.28, 3.0)
    assert (config.correction.weight, config.correction.cap) == ("token", 4.0)
    assert config.max_staleness == 2
    assert config.dynamic_sampling


@pytest.mark.parametrize("name", CORRECTIONS)
def test_a_correction_name_replaces_the_whole_correction(name):
    config = expand("grpo", {"correction": name})
    assert config.correction.model_dump(mode="json") == CORRECTIONS[name]


def test_a_correction_table_is_merged_into_the_presets():
    correction = expand("grpo", {"correction": {"weight": "product"}}).correction
    assert (correction.weight, correction.cap) == ("product", 2.0)


def test_objective_table_with_a_preset_inside_the_learner_table():
    config = LearnerConfig.model_validate({"objective": {"preset": "gspo", "clip": {"high": 5e-4}}})
    assert config.objective == expand("gspo", {"clip": {"high": 5e-4}})


@pytest.mark.parametrize(
    ("preset", "overrides", "sentence"),
    [
        ("grpo", {"advantage": {"baseline": "critic"}}, "set scale to 'none'"),
        ("grpo", {"kl": {"coefficient": -0.001}}, "greater than or equal to 0"),
        (
            "grpo",
            {"kl": {"estimator": "k4"}},
            "kl.estimator is 'k4', expected 'k1', 'k2' or 'k3'",
        ),
        ("dapo", {"covariance": {"low": 6.0}}, "covariance.low 6.0 is above covariance.high 5.0"),
        (
            "gspo",
            {
                "ratio": {"unit": "sequence_pure"},
                "correction": "none",
                "covariance": {"kind": "clip"},
            },
            "covariance.kind 'clip' acts per token",
        ),
        ("dap0", {}, "unknown objective.preset 'dap0'; did you mean 'dapo'"),
        ("grpo", {"correction": "icepo"}, "unknown correction 'icepo'; did you mean 'icepop'"),
        ("cispo", {"correction": "tis"}, "would count it twice"),
        ("grpo", {"ratio": {"anchor": "behavior"}}, "would count it twice"),
        ("grpo", {"correction": {"cap": 0.9}}, "correction.cap 0.9 is below 1"),
        ("grpo", {"correction": {"cap": float("nan")}}, "is below 1"),
        ("gspo", {"ratio": {"unit": "sequence_pure"}}, "takes only whole-sample weights and masks"),
        (
            "gspo",
            {
                "ratio": {"unit": "sequence_pure"},
                "correction": {
                    "weight": "product",
                    "keep": [{"statistic": "token", "low": 0.5, "high": 2.0}],
                },
            },
            "takes only whole-sample weights and masks",
        ),
        ("grpo", {"clip": {"low": 1.5}}, "puts the lower bound 1 - low below 0"),
        ("grpo", {"clip": {"kind": "cispo"}}, "must enclose 1"),
        ("grpo", {"clip": {"dual": 1.0}}, "clip.dual must be above 1"),
        ("cispo", {"clip": {"dual": 3.0}}, "clip.dual belongs to clip.kind 'ppo'"),
        (
            "grpo",
            {"correction": {"keep": [{"statistic": "token", "low": 1.2}]}},
            "less than or equal to 1",
        ),
        ("grpo", {"clp": {"low": 0.1}}, "unknown key 'clp'; did you mean 'clip'?"),
        ("grpo", {"clip": {"lwo": 0.1}}, "unknown key 'clip.lwo'; did you mean 'low'?"),
        ("grpo", {"correction": {"kep": []}}, "unknown key 'correction.kep'; did you mean 'keep'?"),
        (
            "grpo",
            {"correction": {"keep": [{"statistic": "token", "hgh": 2.0}]}},
            "unknown key 'correction.keep.0.hgh'; did you mean 'high'?",
        ),
        ("grpo", {"clip": 3}, "clip is 3, expected a table of fields"),
        ("grpo", {"correction": 3}, "correction is 3, expected a table of fields"),
        ("grpo", {"entropy_bonus": "much"}, "entropy_bonus is 'much', expected a valid number"),
        ("grpo", {"kl": {"optional": True}}, "unknown key 'kl.optional'; known are coefficient"),
        ("grpo", {"preset": "dapo"}, "overrides name the preset 'dapo', expected none"),
        ("grpo", [1], "overrides are [1], expected a table of fields"),
        (["grpo"], {}, "unknown objective.preset ['grpo']"),
    ],
)
def test_refusals_say_why(preset, overrides, sentence):
    with pytest.raises(ValueError) as refused:
        expand(preset, overrides)
    assert sentence in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_every_problem_of_the_overrides_has_a_sentence():
    with pytest.raises(ValueError) as refused:
        expand("grpo", {"clip": {"low": -1, "high": "wide"}, "max_staleness": -2})
    assert str(refused.value).splitlines() == [
        "clip.low is -1, expected greater than or equal to 0",
        "clip.high is 'wide', expected a valid number, unable to parse string as a number",
        "max_staleness is -2, expected greater than or equal to 0",
    ]


def test_keep_intervals_on_a_behavior_anchor_are_accepted():
    keep = [{"statistic": "geometric", "low": 0.9, "high": 1.1}]
    config = expand("cispo", {"correction": {"keep": keep}})
    assert config.needs_old
    assert config.per_sequence
    assert not expand("cispo").needs_old


@pytest.mark.parametrize("statistic", ["product", "geometric"])
def test_the_pure_sequence_form_accepts_whole_sample_corrections(statistic):
    correction = {"weight": statistic, "keep": [{"statistic": statistic, "low": 0.5}], "veto": 0.01}
    overrides = {"ratio": {"unit": "sequence_pure"}, "correction": correction}
    assert expand("gspo", overrides).per_sequence


@pytest.mark.parametrize(
    ("preset", "overrides", "whole"),
    [
        ("grpo", {}, False),
        ("gspo", {}, True),
        ("grpo", {"correction": "icepop"}, False),
        ("grpo", {"correction": {"weight": "product"}}, True),
    ],
)
def test_which_objectives_are_per_sequence(preset, overrides, whole):
    assert expand(preset, overrides).per_sequence is whole


def test_wide_clip_on_a_sequence_ratio_warns():
    (warning,) = expand("gspo", {"clip": {"high": 0.2}}).warnings()
    assert "practically never clips" in warning
    assert expand("gspo").warnings() == ()
    assert expand("grpo").warnings() == ()


def test_step_start_with_one_optimizer_step_warns():
    objective = {"preset": "grpo", "ratio": {"anchor": "step_start"}}
    (warning,) = LearnerConfig.model_validate({"objective": objective}).warnings()
    assert "with one optimizer step per batch never clips" in warning
    several = {"objective": objective, "optimizer_steps_per_batch": 2}
    assert LearnerConfig.model_validate(several).warnings() == ()


def test_for_run_fills_in_the_runs_bounds():
    config = expand("dr_grpo").for_run(max_staleness=2, max_response_tokens=64, samples_per_group=4)
    assert (config.max_staleness, config.aggregation.max_tokens) == (2, 64)
    own = expand("dr_grpo", {"aggregation": {"max_tokens": 10}, "max_staleness": 2})
    own = own.for_run(max_staleness=2, max_response_tokens=64, samples_per_group=4)
    assert own.aggregation.max_tokens == 10
    token_mean = expand("dapo").for_run(
        max_staleness=0, max_response_tokens=64, samples_per_group=2
    )
    assert token_mean.aggregation.max_tokens is None


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_a_group_baseline_refuses_groups_of_one(name):
    with pytest.raises(ValueError, match="needs at least two samples per group, got 1"):
        expand(name).for_run(max_staleness=0, max_response_tokens=8, samples_per_group=1)


def test_a_batch_baseline_accepts_groups_of_one():
    config = expand("reinforce_pp")
    config = config.for_run(max_staleness=1, max_response_tokens=8, samples_per_group=1)
    assert config.max_staleness == 1


def test_two_different_staleness_bounds_are_refused():
    with pytest.raises(ValueError, match="contradicts the run's max_staleness 1"):
        expand("grpo", {"max_staleness": 3}).for_run(
            max_staleness=1, max_response_tokens=8, samples_per_group=2
        )


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"optimizer": {"betas": [0.9, 1.0]}}, r"optimizer.betas must lie in \[0, 1\)"),
        ({"groups_per_batch": 2, "optimizer_steps_per_batch": 3}, "at least as many groups"),
        ({"ranks": 0}, "greater than or equal to 1"),
        ({"rank": 1}, "Extra inputs are not permitted"),
    ],
)
def test_learner_table_refusals(table, sentence):
    with pytest.raises(ValidationError, match=sentence):
        LearnerConfig.model_validate(table)


def test_config_imports_without_torch_ray_vllm_or_transformers():
    code = (
        "import sys, learner.config; "
        "print(sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


RUN = {"max_staleness": 1, "max_response_tokens": 8, "samples_per_group": 2}


def test_grpos_own_kl_stays_off_without_a_reference_and_is_on_with_one():
    grpo = expand("grpo")
    assert (grpo.kl.coefficient, grpo.needs_reference) == (0.001, False)
    assert grpo.for_run(**RUN).kl.coefficient == 0.0
    assert grpo.for_run(**RUN, has_reference=True).kl.coefficient == 0.001
    assert expand("dapo").kl.coefficient == 0.0
    assert expand("grpo", {"kl": {"estimator": "k1"}}).for_run(**RUN).kl.coefficient == 0.0


def test_grpos_own_kl_is_still_its_own_after_a_round_trip_and_decided_after_for_run():
    for overrides in ({}, {"kl": {"estimator": "k1"}}):
        grpo = expand("grpo", overrides)
        for again in (
            ObjectiveConfig.model_validate(grpo.model_dump(mode="json")),
            LearnerConfig.model_validate(
                LearnerConfig(objective=grpo).model_dump(mode="json")
            ).objective,
            pickle.loads(pickle.dumps(grpo)),
        ):
            assert again == grpo
            assert again.for_run(**RUN).kl.coefficient == 0.0
        for has_reference, coefficient in ((False, 0.0), (True, 0.001)):
            decided = grpo.for_run(**RUN, has_reference=has_reference)
            content = decided.model_dump(mode="json")
            assert content["kl"]["coefficient"] == coefficient
            assert ObjectiveConfig.model_validate(content) == decided
            assert decided.needs_reference is has_reference


def test_no_key_gets_a_kl_that_is_asked_for_past_its_refusal():
    for name in ("optional", "_kl_is_the_presets", "kl_is_the_presets"):
        for overrides in ({"kl": {"coefficient": 0.1, name: True}}, {name: True}):
            with pytest.raises(ValueError, match="unknown key"):
                expand("grpo", overrides)


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_kl_that_is_asked_for_is_refused_without_a_reference(name):
    asked = expand(name, {"kl": {"coefficient": 0.001}})
    assert asked.needs_reference
    for config in (asked, ObjectiveConfig.model_validate(asked.model_dump())):
        with pytest.raises(ValueError, match=r"kl.coefficient 0.001 needs a reference model"):
            config.for_run(**RUN)
        assert config.for_run(**RUN, has_reference=True).kl.coefficient == 0.001
    assert not expand(name, {"kl": {"coefficient": 0.0}}).needs_reference


def test_ppo_says_that_it_needs_a_critic():
    ppo = expand("ppo")
    assert (ppo.critic.gamma, ppo.critic.lam, ppo.critic.whiten) == (1.0, 0.95, True)
    assert ppo.needs_critic and not expand("grpo").needs_critic
    with pytest.raises(ValueError, match=r"'critic' \(preset ppo\) needs a critic"):
        ppo.for_run(**RUN)
    alone = RUN | {"samples_per_group": 1}
    assert ppo.for_run(**alone, has_critic=True).max_staleness == 1


def test_kl_in_the_reward_needs_old_log_probabilities():
    assert expand("cispo", {"kl": {"coefficient": 0.1, "place": "reward"}}).needs_old
    assert not expand("cispo", {"kl": {"coefficient": 0.1}}).needs_old
    assert expand("cispo", {"covariance": {"kind": "kl"}}).needs_old


def test_no_blank_line_cuts_a_table_of_the_page_of_presets():
    lines = (Path(__file__).parents[3] / "docs/presets.md").read_text().splitlines()
    rows = [number for number, line in enumerate(lines) if line.startswith("|")]
    heads = [number for number in rows if not lines[number - 1].startswith("|")]
    assert all(lines[number + 1].startswith("| ---") for number in heads)


@pytest.mark.parametrize("name", PRESETS)
def test_the_page_of_presets_has_the_presets_numbers(name):
    page = (Path(__file__).parents[3] / "docs/presets.md").read_text()
    (row,) = [line for line in page.splitlines() if line.startswith(f"| `{name}` |")]
    _, _, advantage, ratio, clip, correction, aggregation, *_ = (c.strip() for c in row.split("|"))
    config, bounds = expand(name), [float(n) for n in re.findall(r"[\d.]+(?:e-\d+)?", clip)]
    assert bounds == [config.clip.low, config.clip.high]
    assert clip.split()[0].strip(",") == config.clip.kind
    assert correction == PRESETS[name]["correction"]
    assert aggregation.split(":")[0] == config.aggregation.kind
    assert ratio.endswith(config.ratio.anchor)
    assert ratio.startswith(config.ratio.unit)
    assert advantage.replace("leave one out", "leave_one_out").startswith(
        config.advantage.baseline.split("_")[0]
    )
