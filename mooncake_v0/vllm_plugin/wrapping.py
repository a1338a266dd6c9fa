"""Wrap a method of one of vLLM's classes or objects, once."""

from __future__ import annotations

import functools
from typing import Any, Callable

_MARK = "_mooncake_v0_wrapper"


def wrap_once(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace owner.name by make(original). A method that was wrapped already stays as it is: plugins load repeatedly."""
    original = getattr(owner, name)
    if hasattr(original, _MARK):
        return
    wrapper = functools.wraps(original)(make(original))
    setattr(wrapper, _MARK, True)
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
