"""What a worker reads from its environment; a value that it cannot use is named in the log, and the default used."""

from __future__ import annotations

import logging
import os

logger = logging.getLogger(__name__)


def choice(variable: str, choices: tuple[str, ...]) -> str:
    """One of the choices; the first is the default."""
    text = os.environ.get(variable, choices[0])
    if text not in choices:
        logger.warning("%s is %r, not one of %s: %s is used", variable, text, ", ".join(choices), choices[0])
        return choices[0]
    return text


def seconds(variable: str, default: float) -> float:
    """A number of seconds, not negative."""
    text = os.environ.get(variable)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value < 0:
        logger.warning("%s is %r, not a number of seconds: %s is used", variable, text, default)
        return default
    return value
