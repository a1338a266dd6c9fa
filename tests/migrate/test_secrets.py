"""No secret of the input is in any output, whatever form it had and wherever it stood."""

from __future__ import annotations

from pathlib import Path

import pytest

from mooncake_v0.migrate.emit import emit
from mooncake_v0.migrate.render import FORMATS, render
from mooncake_v0.migrate.report import build
from mooncake_v0.migrate.secrets import Secrets, is_secret_name
from tests.migrate.deployments import NEWEST, migration

PLANTED = {
    "secrets-everywhere": [
        "sk-prod-6f1c2e9d7b41",
        "hf_QwErTyUiOpAsDfGhJk",
        "wJalrXUtnFEMI/K7MDENG",
        "aGZfUXdFclR5VWlPcEFzRGZHaEpr",
        "S3cr3tPassw0rd",
        "Sup3rMeta",
        "abcdef123456",
    ],
    "redis-password": ["Tr0ub4dor-And-3"],
    "compose-variables": ["hf_ZxCvBnMaSdFgHjKl"],
}
CASES = [(name, secret) for name, secrets in PLANTED.items() for secret in secrets]


@pytest.mark.parametrize(("name", "secret"), CASES)
def test_planted_secret_is_in_no_form_of_the_report(name: str, secret: str) -> None:
    outputs = "".join(render(migration(name).report, form) for form in FORMATS)
    assert secret not in outputs
    assert "***" in outputs or "${HF_TOKEN}" in outputs


@pytest.mark.parametrize(("name", "secret"), CASES)
def test_planted_secret_is_in_no_emitted_file(name: str, secret: str, tmp_path: Path) -> None:
    texts = [Path(path).read_text() for path in emit(migration(name), tmp_path)]
    assert texts
    assert [text for text in texts if secret in text] == []


FORMS = {
    "a flag": "vllm serve m --api-key SECRET",
    "a flag with an equals sign": "vllm serve m --api-key=SECRET",
    "a flag of a later version": "vllm serve m --hf-token SECRET",
    "an unknown flag": "vllm serve m --proxy-password SECRET",
    "a variable before the command": "OPENAI_API_KEY=SECRET vllm serve m",
    "an exported variable": "export REDIS_PASSWORD='SECRET'\nvllm serve m",
    "a variable used as a flag's value": "k=SECRET; vllm serve m --api-key $k",
    "a default value": 'vllm serve m --api-key "${KEY:-SECRET}"',
    "docker": "docker run -e HF_TOKEN=SECRET vllm/vllm-openai:v0.6.4.post1 --model m",
    "a url": "MC_METADATA=http://user:SECRET@host:1/x vllm serve m",
    "a url in an unknown command": "curl -s http://user:SECRET@host/vllm ; foo vllm http://u:SECRET@h",
    "a bearer header": "foo vllm -H 'Authorization: Bearer SECRET'",
    "compose": "services:\n  a:\n    image: vllm/vllm-openai:v0.6.4\n    command: --model m\n"
    "    environment:\n      - API_KEY=SECRET",
    "kubernetes": "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n  - image: vllm:1\n"
    "    args: [--model, m, --api-key, SECRET]",
    "systemd": '[Service]\nEnvironment="HF_TOKEN=SECRET"\nExecStart=/usr/bin/vllm serve m',
    "supervisord": '[program:a]\ncommand=vllm serve m\nenvironment=HF_TOKEN="SECRET"',
    "broken yaml": "services:\n  a: [vllm\n  password: SECRET",
}


@pytest.mark.parametrize("text", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("secret", ["pw9", "Zq8-kLm2_pRt5xYw", "correcthorsebattery"])
def test_secret_is_masked_in_every_way_of_writing_it(text: str, secret: str, tmp_path: Path) -> None:
    read = build(["-"], NEWEST, {}, text.replace("SECRET", secret))
    outputs = [render(read.report, form) for form in FORMATS]
    outputs += [Path(path).read_text() for path in emit(read, tmp_path)]
    assert [output for output in outputs if secret in output] == []


@pytest.mark.parametrize("name", ["HF_TOKEN", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY", "--api-key", "redisPassword"])
def test_name_of_a_secret(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        "key",
        "keyword",
        "monkey",
        "secretName",
        "eos-token-ids",
        "--tokenizer",
        "--max-num-batched-tokens",
        "--ssl-keyfile",
        "--num-speculative-tokens",
        "--tokenizer-mode",
        "MODEL",
    ],
)
def test_name_that_only_looks_like_a_secret(name: str) -> None:
    assert not is_secret_name(name)


def test_a_word_of_every_report_is_not_masked_because_somebody_uses_it_as_a_password() -> None:
    secrets = Secrets()
    secrets.add("mooncake")
    assert secrets.mask("mooncake proxy at redis://u:mooncake@h") == "mooncake proxy at redis://u:***@h"


def test_keys_of_manifests_and_prose_are_not_taken_for_secrets() -> None:
    secrets = Secrets()
    secrets.scan("items: [{key: mooncake.json, path: x}]\nsecretKeyRef: {name: tokens, key: hub-entry}")
    secrets.scan("The keyword: foolish. A token: somebody must set it.", prose=True)
    text = "mooncake.json hub-entry foolish somebody"
    assert secrets.mask(text) == text
