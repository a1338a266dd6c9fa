"""A vLLM plugin of the tests: the pin learns what a model class can do in its own process instead of in a new one.

The pin starts a Python that imports all of vLLM only to ask a class six questions, in the API server and again in the
engine, lest CUDA be initialised. A class that is registered is asked directly. Same class, same answers, half of the imports.
With this folder in PYTHONPATH, vLLM finds the entry point in the `dist-info` beside this file.
"""

from __future__ import annotations

ARCHITECTURES = ("Qwen2ForCausalLM", "MistralForCausalLM")


def register() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
