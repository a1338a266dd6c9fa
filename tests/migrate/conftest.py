"""Fixtures of the migration tests: the two real parsers, each in a process of its own, started once."""

from __future__ import annotations

import sys
from typing import Iterator

import pytest

from tests.migrate.v0_parser import V0Parser
from tests.migrate.v1_wheel import Parser, environment


@pytest.fixture(scope="session")
def v1_parser() -> Iterator[Parser]:
    """The parser of the real vLLM 0.33.0, which needs Python 3.11."""
    if sys.version_info < (3, 11):
        pytest.skip("vLLM 0.33.0 needs Python 3.11")
    parser = Parser(environment())
    yield parser
    parser.close()


@pytest.fixture(scope="session")
def v0_parser() -> Iterator[V0Parser]:
    """The parser of the real vLLM 0.6.4.post1 with our plugin."""
    parser = V0Parser()
    yield parser
    parser.close()
