"""Upstream's pipe where it cannot run; where it can, an environment with vllm 0.6.5 is needed that tests do not have."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_v0.bench.shapes import SHAPES
from mooncake_v0.bench.upstream import UpstreamPipe
from mooncake_v0.errors import CouldNotCheckError


def test_a_program_that_is_no_python_with_upstream_is_named_with_the_fix(tmp_path: Path) -> None:
    pipe = UpstreamPipe(
        "true", SHAPES["tiny"], folder=tmp_path, port=1, metadata_url="http://127.0.0.1:1/", device="cpu"
    )

    with pytest.raises(CouldNotCheckError, match=r"--peer-python \S*/true: upstream prefill") as caught:
        pipe.transfer(16)

    assert "vllm 0.6.5" in caught.value.fix
