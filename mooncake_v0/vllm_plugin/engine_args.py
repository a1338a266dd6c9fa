"""Adds --kv-transfer-config to vLLM 0.6.4.post1: the flag, the argument of `LLM`, the attribute of VllmConfig.

`patch_engine_args` runs once, right after `vllm.engine.llm_engine` was imported and before any command line is parsed.
Without the flag every patched function returns what the original returns.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import logging
import os
from pathlib import Path
from typing import Any, Callable

import wrapt

from mooncake_v0.config.load import load_config
from mooncake_v0.config.model import MAX_RANKS, MooncakeConfig
from mooncake_v0.errors import ConfigError, CouldNotCheckError, MooncakeV0Error, UnsupportedError
from mooncake_v0.transfer.engine import check_engine_version
from mooncake_v0.vllm_plugin import client_gone, early_decode, tokenizing
from mooncake_v0.vllm_plugin.engine_start import patch_engine_start
from mooncake_v0.vllm_plugin.guided_decoding import provide_airports
from mooncake_v0.vllm_plugin.kv_transfer_config import KVTransferConfig, parse_kv_transfer_config
from mooncake_v0.vllm_plugin.output_reader import patch_output_reader
from mooncake_v0.vllm_plugin.parallel_samples import patch_parallel_samples
from mooncake_v0.vllm_plugin.plugin_logging import set_up_logging

logger = logging.getLogger(__name__)

FLAG = "--kv-transfer-config"
ATTRIBUTE = "kv_transfer_config"
_FROM_CLI = "_mooncake_v0_cli"


def patch_engine_args() -> None:
    """Patch EngineArgs and AsyncEngineArgs; safe to call again."""
    from vllm.engine import arg_utils

    base: Any = arg_utils.EngineArgs
    subclass: Any = arg_utils.AsyncEngineArgs
    if getattr(base, "_mooncake_v0_patched", False):
        return
    base._mooncake_v0_patched = True
    base.add_cli_args = staticmethod(_with_flag(base.add_cli_args))
    base.from_cli_args = classmethod(_with_cli_value(base.from_cli_args.__func__))
    base.create_engine_config = _with_config(base.create_engine_config)
    for cls in (base, subclass):
        cls.__init__ = _with_argument(cls.__init__)


def _with_flag(add_cli_args: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(add_cli_args)
    def add(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        add_cli_args(parser)
        parser.add_argument(
            FLAG,
            type=_cli_value,
            default=None,
            help="JSON of the KV transfer between a prefill and a decode instance (mooncake-v0).",
        )
        return parser

    return add


def _cli_value(text: str) -> KVTransferConfig:
    try:
        return parse_kv_transfer_config(text)
    except UnsupportedError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _with_cli_value(from_cli_args: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(from_cli_args)
    def from_cli(cls: type, args: argparse.Namespace) -> Any:
        engine_args = from_cli_args(cls, args)
        config = getattr(args, ATTRIBUTE, None)
        if config is not None:
            port = getattr(args, "port", None)
            setattr(engine_args, ATTRIBUTE, config)
            setattr(engine_args, _FROM_CLI, (getattr(args, "host", None), port))
        return engine_args

    return from_cli


def _with_argument(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def initialise(self: Any, *args: Any, kv_transfer_config: Any = None, **kwargs: Any) -> None:
        if kv_transfer_config is not None:
            setattr(self, ATTRIBUTE, parse_kv_transfer_config(kv_transfer_config))
        init(self, *args, **kwargs)

    return initialise


def _with_config(create_engine_config: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create_engine_config)
    def create(self: Any) -> Any:
        config: KVTransferConfig | None = getattr(self, ATTRIBUTE, None)
        if config is None:
            return create_engine_config(self)
        set_up_logging()
        patch_output_reader()
        patch_engine_start()
        patch_parallel_samples()
        tokenizing.pass_token_lists()
        _patch_server()
        provide_airports()
        try:
            config = _prepare(self, config)
            vllm_config = create_engine_config(self)
            _refuse_model(vllm_config.model_config)
        except MooncakeV0Error as error:
            if hasattr(self, _FROM_CLI):
                # a server's user made a mistake: one clear message, no traceback
                raise SystemExit(f"error: {error.what}\n  fix: {error.fix}") from None
            raise
        vllm_config.kv_transfer_config = config
        return vllm_config

    return create


def _patch_server() -> None:
    """What is changed in the OpenAI server: now in the server's process, never in an engine's that does not import it."""
    server = "vllm.entrypoints.openai"
    for name, patch in (
        ("starlette.requests", tokenizing.patch_requests),
        (f"{server}.serving_engine", early_decode.patch_serving),
        (f"{server}.serving_engine", tokenizing.patch_serving),
        (f"{server}.serving_completion", tokenizing.patch_completions),
        (f"{server}.serving_completion", client_gone.patch_completions),
        (f"{server}.serving_chat", client_gone.patch_chat),
        (f"{server}.serving_tokenization", tokenizing.patch_tokenization),
    ):
        wrapt.register_post_import_hook(patch, name)


def _prepare(engine_args: Any, config: KVTransferConfig) -> KVTransferConfig:
    """Everything that can be checked before vLLM reads the model's configuration."""
    check_engine_version()
    if os.environ.get("VLLM_USE_V1") == "1":
        raise UnsupportedError("VLLM_USE_V1=1 selects vLLM's unfinished V1 engine", fix="unset VLLM_USE_V1")
    _refuse_arguments(engine_args)
    mooncake = _load_mooncake_config(engine_args.tensor_parallel_size)
    _check_secret()
    if not config.is_producer:
        _switch_chunked_prefill_off(engine_args)
    api_host, api_port = getattr(engine_args, _FROM_CLI, (None, None))
    if api_host in (None, "", "0.0.0.0", "::"):
        api_host = mooncake.endpoint(config.role).host
    api_url = f"http://{api_host}:{api_port}" if api_port else None
    return dataclasses.replace(config, mooncake=mooncake, api_url=api_url)


def _switch_chunked_prefill_off(engine_args: Any) -> None:
    """A consumer takes a prompt's KV as a whole. What was given as the size of a chunk would then be refused by vLLM."""
    if engine_args.enable_chunked_prefill:
        logger.warning("chunked prefill is switched off: a kv_consumer takes a prompt's KV as a whole")
        chunk, longest = engine_args.max_num_batched_tokens, engine_args.max_model_len
        if chunk is not None and (longest is None or chunk < longest):
            logger.warning("--max-num-batched-tokens %d is ignored: without chunks a batch must hold a prompt", chunk)
            engine_args.max_num_batched_tokens = None
    engine_args.enable_chunked_prefill = False


def _load_mooncake_config(tensor_parallel_size: int) -> MooncakeConfig:
    path = os.environ.get("MOONCAKE_CONFIG_PATH")
    if not path:
        raise ConfigError(
            f"{FLAG} is given, but MOONCAKE_CONFIG_PATH is not set",
            fix="set it to the path of mooncake.json, the same file on prefill and decode",
        )
    try:
        return load_config(path, tensor_parallel_size=tensor_parallel_size)
    except CouldNotCheckError as error:
        raise ConfigError(f"MOONCAKE_CONFIG_PATH={path!r}: {error.what}", fix=error.fix) from error


def _check_secret() -> None:
    """An agent that cannot read the shared secret would only say so after the model is loaded."""
    path = os.environ.get("MOONCAKE_V0_SECRET_FILE")
    if path is None:
        return
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"MOONCAKE_V0_SECRET_FILE={path!r} cannot be read: {error.strerror}",
            fix="name a file that the server's user may read, with the same content on both sides, or unset it",
        ) from None
    if not secret:
        raise ConfigError(f"MOONCAKE_V0_SECRET_FILE={path!r} is empty", fix="write a long random secret into it")


def _refuse_arguments(engine_args: Any) -> None:
    """Features whose use the command line shows, each with its reason."""
    if engine_args.pipeline_parallel_size > 1:
        raise UnsupportedError(
            f"pipeline parallel size {engine_args.pipeline_parallel_size} with KV transfer: a stage has only its layers' "
            "KV and no hidden states of the prompt",
            fix="use --tensor-parallel-size instead of --pipeline-parallel-size",
        )
    if engine_args.tensor_parallel_size > MAX_RANKS:
        raise UnsupportedError(
            f"tensor parallel size {engine_args.tensor_parallel_size}: the port plan has room for {MAX_RANKS} ranks",
            fix=f"use --tensor-parallel-size {MAX_RANKS} or less",
        )
    if engine_args.speculative_model is not None:
        raise UnsupportedError(
            "speculative decoding with KV transfer: the draft model's KV is not transferred",
            fix="remove --speculative-model",
        )
    adapters = "--enable-lora" if engine_args.enable_lora else "--enable-prompt-adapter"
    if engine_args.enable_prefix_caching and (engine_args.enable_lora or engine_args.enable_prompt_adapter):
        raise UnsupportedError(
            f"{adapters} with --enable-prefix-caching and KV transfer: the prefix cache of this vLLM does not tell adapters "
            "apart, and the wrong blocks would be moved",
            fix=f"remove --enable-prefix-caching or {adapters}",
        )
    if engine_args.num_scheduler_steps > 1:
        raise UnsupportedError(
            f"multi-step scheduling ({engine_args.num_scheduler_steps} steps) with KV transfer: its worker prepares "
            "several steps at once",
            fix="remove --num-scheduler-steps",
        )


def _refuse_model(model: Any) -> None:
    """Models whose state is not, or not only, in a KV cache of blocks."""
    if model.is_encoder_decoder:
        raise UnsupportedError(
            "an encoder-decoder model with KV transfer: its cross-attention KV is not transferred",
            fix="serve it without --kv-transfer-config",
        )
    if model.task == "embedding":
        raise UnsupportedError("an embedding model has no decode phase", fix="serve it without --kv-transfer-config")
    if model.is_attention_free or model.has_inner_state:
        raise UnsupportedError(
            "a model with recurrent state (Mamba, Jamba) with KV transfer: its state is not in the KV cache",
            fix="serve it without --kv-transfer-config",
        )
