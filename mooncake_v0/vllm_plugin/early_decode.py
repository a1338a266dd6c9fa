"""Lets decode take a request while prefill still computes it: the part that is in vLLM's server and scheduler.

The proxy sends both legs at once with one header (`handoff.py`). The server hands it to the engine among the request's
trace headers, the only part of a request that vLLM 0.6.4.post1 passes on without looking at it
(entrypoints/openai/serving_engine.py:540, sequence.py:634). Decode's parking lot then waits for the KV, although nobody has
announced it yet; prefill's scheduler tells when a leg has ended, stored or not.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Callable, Mapping

from mooncake_v0.handoff import HEADER, Handoff, parse_handoff
from mooncake_v0.vllm_plugin.wrapping import wrap_once


def patch_serving(module: ModuleType) -> None:
    """Wrap OpenAIServing._get_trace_headers of entrypoints/openai/serving_engine.py."""
    wrap_once(module.OpenAIServing, "_get_trace_headers", _with_handoff)


def _with_handoff(original: Callable[..., Any]) -> Callable[..., Any]:
    async def _get_trace_headers(self: Any, headers: Mapping[str, str]) -> Mapping[str, str] | None:
        found: Mapping[str, str] | None = await original(self, headers)
        value = headers.get(HEADER)
        return found if value is None else {**(found or {}), HEADER: value}

    return _get_trace_headers


def handoff_of(group: Any) -> Handoff | None:
    """The handoff that a sequence group is one leg of."""
    return parse_handoff((group.trace_headers or {}).get(HEADER, ""))


def tell_ends(scheduler: Any, tell: Callable[[list[bytes]], None]) -> None:
    """Call tell(ids) for the handoffs whose leg on this scheduler has ended, however it did."""
    open_legs: dict[str, tuple[Any, bytes]] = {}

    def note(original: Callable[[Any], None]) -> Callable[[Any], None]:
        def add_seq_group(group: Any) -> None:
            handoff = handoff_of(group)
            if handoff is not None:
                open_legs[group.request_id] = (group, handoff.id)
            original(group)

        return add_seq_group

    def then_tell(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            ended = [name for name, (group, _) in open_legs.items() if group.is_finished()]
            if ended:
                tell([open_legs.pop(name)[1] for name in ended])
            return result

        return wrapped

    wrap_once(scheduler, "add_seq_group", note)
    wrap_once(scheduler, "free_finished_seq_groups", then_tell)
    wrap_once(scheduler, "abort_seq_group", then_tell)
