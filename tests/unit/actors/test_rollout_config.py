"""What the rollout table accepts, refuses and derives."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from actors.config import EngineConfig, RolloutConfig, SamplingConfig


def test_defaults_make_a_valid_configuration() -> None:
    config = RolloutConfig()
    assert config.max_groups_in_flight == 8
    assert config.bundles() == [{"CPU": 1.0}]


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p"])
def test_truncated_sampling_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name} is not offered: it renormalises"):
        SamplingConfig.model_validate({name: 1})


def test_unknown_keys_are_refused_at_every_level() -> None:
    for table in ({"worker": 1}, {"engine": {"seeds": 1}}, {"probe": {"k": 1}}):
        with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
            RolloutConfig.model_validate(table)


@pytest.mark.parametrize(
    "values",
    [
        {"workers": 0},
        {"sampling": {"temperature": 0.0}},
        {"sampling": {"max_tokens": 0}},
        {"engine": {"dtype": "float8"}},
        {"engine": {"kv_cache_bytes": 4}},
        {"probe": {"top_k": 21}},
        {"sync_timeout_s": 0},
    ],
)
def test_values_out_of_bounds_are_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        RolloutConfig.model_validate(values)


def test_a_group_has_to_fit_the_engine() -> None:
    with pytest.raises(ValidationError, match="a group has to fit the engine at once"):
        RolloutConfig(samples_per_group=9, engine=EngineConfig(max_num_seqs=8))
    config = RolloutConfig(samples_per_group=5, engine=EngineConfig(max_num_seqs=14))
    assert config.max_groups_in_flight == 2


def test_a_response_has_to_leave_room_for_a_prompt() -> None:
    with pytest.raises(ValidationError, match="leaves no room for a prompt"):
        RolloutConfig(sampling=SamplingConfig(max_tokens=64), engine=EngineConfig(max_model_len=64))


def test_seeds_need_whole_prefills() -> None:
    with pytest.raises(ValidationError, match=r"engine\.chunked_prefill = false"):
        RolloutConfig(seeded=True)
    assert RolloutConfig(seeded=True, engine=EngineConfig(chunked_prefill=False)).seeded


def test_without_chunks_a_prompt_has_to_fit_a_step() -> None:
    with pytest.raises(ValidationError, match="a prompt has to fit one step"):
        EngineConfig(chunked_prefill=False, max_model_len=512, max_batched_tokens=256)
    with pytest.raises(ValidationError, match="needs max_model_len"):
        EngineConfig(chunked_prefill=False, max_batched_tokens=256)
    EngineConfig(chunked_prefill=False, max_model_len=512, max_batched_tokens=512)
    EngineConfig(chunked_prefill=True, max_model_len=512, max_batched_tokens=256)


def test_tensor_parallel_workers_need_their_gpus() -> None:
    with pytest.raises(ValidationError, match="needs gpus = 2 per worker, got 1"):
        RolloutConfig(gpus=1, engine=EngineConfig(tensor_parallel_size=2))
    RolloutConfig(gpus=2, engine=EngineConfig(tensor_parallel_size=2))


def test_bundles_follow_the_executor() -> None:
    local = RolloutConfig(
        cpus=2, gpus=2, resources={"a100": 1}, engine=EngineConfig(tensor_parallel_size=2)
    )
    assert local.bundles() == [{"CPU": 2.0, "GPU": 2.0, "a100": 1.0}]
    spread = local.model_copy(
        update={"engine": EngineConfig(tensor_parallel_size=2, executor="ray")}
    )
    assert spread.bundles() == [{"CPU": 2.0, "a100": 1.0}, {"GPU": 1.0}, {"GPU": 1.0}]


def test_every_field_is_documented() -> None:
    for table in (RolloutConfig, SamplingConfig, EngineConfig):
        missing = [name for name, field in table.model_fields.items() if not field.description]
        assert missing == []


def test_the_configuration_imports_no_heavy_package() -> None:
    code = (
        "import sys, actors.config; "
        "print(sorted({'torch', 'ray', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
