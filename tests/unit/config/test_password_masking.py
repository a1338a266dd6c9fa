"""No output of `validate` holds a password that stands in metadata_server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from mooncake_v0.cli.validate import validate

SECRETS = ["s3cr3t", "s3/cr3t", "s3@cr3t", "s3?cr3t#x", "s3:cr3t", "s3,cr3t"]
FORMS = [
    "etcd://root:{}@10.0.0.1:2379",
    " ETCD://root:{}@10.0.0.1:2379",
    "redis://:{}@10.0.0.1:6379/metadata",
    "http://u:{}@10.0.0.1:8080",
    "etcd://http://u:{}@10.0.0.1:2379",
    "etcds://u:{}@10.0.0.1",
    "redis://u:{}@10.0.0.1:99999",
    "htpp://u:{}@10.0.0.1:8080/metadata",
    "redis://u:{}@10.0.0.1:6379?x=1",
    "root:{}@10.0.0.1",
    "192.168.0.137?user:{}@",
    "redis://192.168.0.137?user:{}@",
    "127.0.0.1#user:{}@",
]


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("output", ["text", "json", "sarif", "github"])
def test_password_is_in_no_output(tmp_path: Path, form: str, secret: str, output: str) -> None:
    base = {"prefill_url": "10.0.0.1:13003", "decode_url": "10.0.0.2:13003"}
    (tmp_path / "a.json").write_text(json.dumps({**base, "metadata_server": form.format(secret)}))
    (tmp_path / "b.json").write_text(json.dumps({**base, "metadata_server": "etcd://10.0.0.1:2379"}))
    arguments = [str(tmp_path / "b.json"), str(tmp_path / "a.json"), "--format", output, "--fix"]

    result = CliRunner().invoke(validate, arguments, standalone_mode=False)

    assert result.exception is None
    assert secret not in result.output and "cr3t" not in result.output
