"""Wrap a method of one of vLLM's classes or objects, once."""

from __future__ import annotations

import functools
from typing import Any, Callable

_MARK = "_mooncake_v0_wrappers"


def wrap_once(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace owner.name by make(original). What was wrapped so already stays as it is: plugins load repeatedly."""
    original = getattr(owner, name)
    wrappers: frozenset[str] = getattr(original, _MARK, frozenset())
    own = f"{make.__module__}.{make.__qualname__}"
    if own in wrappers:
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _MARK, wrappers | {own})
    setattr(owner, name, wrapper)


def call_after(action: Callable[[], None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For `wrap_once`: the original, then action()."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            action()
            return result

        return wrapped

    return make
