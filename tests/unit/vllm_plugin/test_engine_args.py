"""The flag and the refusals on the real vLLM's own parser and configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mooncake_v0.errors import ConfigError, UnsupportedError
from mooncake_v0.pin.environment import cache_folder
from mooncake_v0.pin.tiny_model import make_tiny_model

pytestmark = pytest.mark.pin

ROLES = {"kv_producer": 0, "kv_consumer": 1}


def transfer(role: str) -> dict[str, Any]:
    return {
        "kv_connector": "MooncakeConnector",
        "kv_role": role,
        "kv_rank": ROLES[role],
        "kv_parallel_size": 2,
        "kv_buffer_size": 2e9,
    }


@pytest.fixture(scope="module")
def model() -> str:
    return str(make_tiny_model(cache_folder() / "tiny-qwen2"))


@pytest.fixture(autouse=True)
def mooncake_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mooncake.json"
    endpoint = {"prefill_url": "127.0.0.1:13003", "decode_url": "127.0.0.1:13003"}
    path.write_text(json.dumps({**endpoint, "metadata_server": "etcd://127.0.0.1:2379", "protocol": "tcp"}))
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(path))
    return path


def parse(*arguments: str) -> Any:
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)


def engine_args(model: str, **changes: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(model=model, dtype="bfloat16", max_model_len=2048, **changes)


@pytest.mark.parametrize("role", ROLES)
def test_the_documented_flag_reaches_the_engine_configuration(model: str, role: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    args = parse("--model", model, "--port", "8100", "--dtype", "bfloat16", "--max-model-len", "2048",
                 "--kv-transfer-config", json.dumps(transfer(role)))  # fmt: skip
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config().kv_transfer_config

    assert config.kv_role == role
    assert str(config.mooncake.decode) == "127.0.0.1:13103"
    assert config.api_url == "http://127.0.0.1:8100"


@pytest.mark.parametrize("as_text", [True, False], ids=["json", "dict"])
def test_llm_takes_the_configuration_as_an_argument(model: str, as_text: bool) -> None:
    value = json.dumps(transfer("kv_consumer")) if as_text else transfer("kv_consumer")

    config = engine_args(model, kv_transfer_config=value).create_engine_config()

    assert config.kv_transfer_config.role == "decode"


def test_without_the_flag_the_configuration_is_vllms_own(model: str) -> None:
    assert not hasattr(engine_args(model).create_engine_config(), "kv_transfer_config")
    assert parse("--model", model).kv_transfer_config is None


def test_engine_args_survive_the_way_to_the_engine_process(model: str) -> None:
    import pickle

    args = pickle.loads(pickle.dumps(engine_args(model, kv_transfer_config=transfer("kv_producer"))))

    assert args.create_engine_config().kv_transfer_config.is_producer


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ('{"kv_role":"kv_both"}', "kv_connector is None"), ("[1]", "not a JSON object")],
)
def test_a_wrong_value_ends_the_command_line_with_one_message(
    model: str, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse("--model", model, "--kv-transfer-config", text)

    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallel"),
        ({"num_scheduler_steps": 4, "device": "auto"}, "multi-step"),
        ({"speculative_model": "[ngram]", "num_speculative_tokens": 2, "ngram_prompt_lookup_max": 2}, "speculative"),
        ({"tensor_parallel_size": 32}, "16 ranks"),
        ({"task": "embedding"}, "embedding"),
        ({"enable_lora": True, "enable_prefix_caching": True}, "--enable-lora with --enable-prefix-caching"),
        ({"enable_prompt_adapter": True, "enable_prefix_caching": True}, "does not tell adapters apart"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_features_that_cannot_be_served_are_refused_with_the_reason(
    model: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedError, match=reason):
        engine_args(model, kv_transfer_config=transfer("kv_producer"), **changes).create_engine_config()


def test_a_consumer_has_no_chunked_prefill_and_a_producer_keeps_it(model: str) -> None:
    consumer = engine_args(model, kv_transfer_config=transfer("kv_consumer"), enable_chunked_prefill=True)
    producer = engine_args(model, kv_transfer_config=transfer("kv_producer"), enable_chunked_prefill=True)

    assert consumer.create_engine_config().scheduler_config.chunked_prefill_enabled is False
    assert producer.create_engine_config().scheduler_config.chunked_prefill_enabled is True


def test_a_chunk_size_given_to_both_sides_does_not_stop_a_consumer(model: str) -> None:
    """Without chunks vLLM refuses a batch that is smaller than the longest prompt."""
    chunked = {"enable_chunked_prefill": True, "max_num_batched_tokens": 512}
    consumer = engine_args(model, kv_transfer_config=transfer("kv_consumer"), **chunked).create_engine_config()
    producer = engine_args(model, kv_transfer_config=transfer("kv_producer"), **chunked).create_engine_config()

    assert consumer.scheduler_config.max_num_batched_tokens == 2048
    assert producer.scheduler_config.max_num_batched_tokens == 512


def test_a_batch_size_that_holds_every_prompt_is_kept(model: str) -> None:
    args = engine_args(
        model,
        kv_transfer_config=transfer("kv_consumer"),
        enable_chunked_prefill=True,
        max_num_batched_tokens=3000,
    )

    assert args.create_engine_config().scheduler_config.max_num_batched_tokens == 3000


OTHER_MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "bart": ({"architectures": ["BartForConditionalGeneration"], "model_type": "bart"}, "encoder-decoder"),
    "mamba": ({"architectures": ["MambaForCausalLM"], "model_type": "mamba", "vocab_size": 512}, "recurrent state"),
}


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("name", OTHER_MODELS)
def test_models_whose_state_is_not_a_kv_cache_are_refused(name: str, role: str, tmp_path: Path) -> None:
    config, reason = OTHER_MODELS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = engine_args(str(tmp_path), kv_transfer_config=transfer(role), tokenizer=str(tmp_path))
    args.max_model_len = 512

    with pytest.raises(UnsupportedError, match=reason):
        args.create_engine_config()


def test_a_missing_config_path_is_named(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH")

    with pytest.raises(ConfigError, match="MOONCAKE_CONFIG_PATH is not set"):
        engine_args(model, kv_transfer_config=transfer("kv_producer")).create_engine_config()


@pytest.mark.parametrize(("content", "reason"), [(None, "cannot be read"), ("\n", "is empty")])
def test_an_unusable_secret_is_named_at_the_start(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None, reason: str
) -> None:
    secret = tmp_path / "secret"
    monkeypatch.setenv("MOONCAKE_V0_SECRET_FILE", str(secret))
    if content is not None:
        secret.write_text(content)

    with pytest.raises(ConfigError, match=reason):
        engine_args(model, kv_transfer_config=transfer("kv_producer")).create_engine_config()


def test_an_unreadable_config_is_named_and_ends_a_server_without_traceback(
    model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(tmp_path / "nowhere.json"))
    args = parse("--model", model, "--kv-transfer-config", json.dumps(transfer("kv_producer")))

    with pytest.raises(SystemExit, match="nowhere.json") as stopped:
        AsyncEngineArgs.from_cli_args(args).create_engine_config()

    assert "fix:" in str(stopped.value)


@pytest.mark.parametrize("version", ["0.3.3", "0.3.4", "0.3.6"])
def test_an_untested_engine_version_is_refused(model: str, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)

    with pytest.raises(UnsupportedError, match=f"mooncake-transfer-engine {version} is not one of the tested"):
        engine_args(model, kv_transfer_config=transfer("kv_producer")).create_engine_config()
