"""What two instances must agree on before KV moves between them, and what a key must depend on."""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from mooncake_v0.kv.layout import KVLayout

_SAMPLES = 16  # elements of each parameter
_ADAPTER_FILES = ("adapter_*", "new_embeddings.*")  # lora/models.py from_local_checkpoint, prompt_adapter/utils.py
_VOLATILE = ("_name_or_path", "transformers_version", "architectures_override", "_attn_implementation_autoset")


def model_fingerprint(vllm_config: Any, model: torch.nn.Module, layout: KVLayout, backend: str) -> dict[str, str]:
    """Field → value, compared field by field in the handshake. Each rank has its own (weights are sharded)."""
    model_config, cache_config = vllm_config.model_config, vllm_config.cache_config
    return {
        "model": _config_digest(model_config.hf_config),
        "weights": _weights_digest(model),
        "dtype": str(model_config.dtype),
        "kv_cache_dtype": str(cache_config.cache_dtype),
        "quantization": str(model_config.quantization),
        "block_size": str(cache_config.block_size),
        "block_bytes": str(layout.block_bytes),
        "planes": str(len(layout.planes)),
        "attention_backend": backend,
    }


def _config_digest(hf_config: Any) -> str:
    raw = {name: value for name, value in hf_config.to_dict().items() if name not in _VOLATILE}
    return hashlib.sha256(json.dumps(raw, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _weights_digest(model: torch.nn.Module) -> str:
    """A hash over a few evenly spread elements of every floating-point parameter: milliseconds, not a full read.

    Two fine-tunes of one base have equal configs and would otherwise exchange wrong KV. Integer parameters of quantised
    models are left out: a dummy load leaves them uninitialised.
    """
    digest = hashlib.sha256()
    samples = []
    for name, parameter in sorted(model.named_parameters()):
        if parameter.numel() and parameter.is_floating_point():
            digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
            flat = parameter.detach().reshape(-1)
            samples.append(flat[:: max(1, flat.numel() // _SAMPLES)][:_SAMPLES].float())
    for name, module in model.named_modules():
        if hasattr(module, "_k_scale"):  # of an fp8 cache, plain numbers by now; the cached bytes depend on them
            digest.update(f"{name} {float(module._k_scale)} {float(module._v_scale)}".encode())
    if samples:
        digest.update(torch.cat(samples).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def adapter_identity(lora_request: Any, prompt_adapter_request: Any) -> bytes:
    """What the KV of a request depends on beside the model: the content of its LoRA and prompt adapters."""
    if lora_request is None and prompt_adapter_request is None:
        return b""
    parts = []
    if lora_request is not None:
        parts.append(_folder_digest(lora_request.lora_path, lora_request.lora_int_id))
    if prompt_adapter_request is not None:
        path, number = prompt_adapter_request.prompt_adapter_local_path, prompt_adapter_request.prompt_adapter_id
        parts.append("prompt:" + _folder_digest(path, number))
    return "|".join(parts).encode()


@functools.lru_cache(maxsize=4096)
def _folder_digest(path: str, number: int) -> str:
    """Hash of the files that vLLM loads of an adapter; their content, since the two sides may have other names for it.

    number: vLLM's own for this load of the adapter. An adapter that is unloaded and loaded again, perhaps with other
    weights under the same path, has another number and is hashed again.
    """
    from vllm.lora.utils import get_adapter_absolute_path

    try:
        digest = _digest_files(Path(get_adapter_absolute_path(path)))
    except OSError:  # not there, not readable, or a name that the hub does not answer for: vLLM will say so
        digest = ""
    return digest or f"{path}#{number}"


def _digest_files(folder: Path) -> str:
    """Empty for a folder without an adapter."""
    digest = hashlib.sha256()
    files = sorted(file for pattern in _ADAPTER_FILES for file in folder.glob(pattern))
    for file in files:
        content = file.read_bytes()
        digest.update(f"{file.name}:{len(content)}:".encode())
        digest.update(content)
    return digest.hexdigest() if files else ""
