"""What holds for every input: no crash, no other exit code than 0, 1 and 2, and findings that point at the mistake."""

from __future__ import annotations

import itertools
import json
import string
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from mooncake_v0.cli.validate import validate
from mooncake_v0.config.addresses import parse_endpoint, parse_metadata
from mooncake_v0.config.check import Checked, check_bytes
from mooncake_v0.config.fix import fixed_bytes
from mooncake_v0.config.rules import CheckOptions
from mooncake_v0.config.rules.shape import KV_TRANSFER_FIELDS
from mooncake_v0.config.schema import schema
from mooncake_v0.errors import ERROR, INFO, MetadataError
from mooncake_v0.metadata.store_url import StoreURL, parse_store_url

# a deadline would measure the machine, not the code
PROPERTY = settings(deadline=None, max_examples=200)
VALID = sorted((Path(__file__).parents[2] / "examples" / "valid").glob("*.json"))
FIELDS = ("prefill_url", "decode_url", "metadata_server", "metadata_backend", "protocol", "device_name")
# pieces that addresses and lists are made of
PIECES = (
    [
        "127.0.0.1",
        "192.168.0.137",
        "0.0.0.0",
        "localhost",
        "[::1]",
        "fd00::1",
        "h",
        "h-1",
        "-h",
        "a.b",
        "::",
        "255.255.255.255",
    ]
    + [
        ":",
        ":13003",
        ":0",
        ":65535",
        ":65536",
        ":٣",
        "/",
        "//",
        "/metadata",
        "?",
        "#",
        "@",
        ",",
        " ",
        "\t",
        "\0",
        "é",
        "\ud800",
    ]
    + [
        "etcd://",
        "ETCD://",
        "etcds://",
        "http://",
        "https://",
        "redis://",
        "redis+sentinel://",
        "tcp://",
        "etcd",
        "http",
    ]
    + ["mlx5_0", "eth0", "tcp", "RDMA", "2379", "1", "%", "${X}", "P2PHANDSHAKE", "?ca=x", "user:pw@"]
)
TEXTS = st.lists(st.sampled_from(PIECES), max_size=6).map("".join) | st.text(max_size=20)
ANY_VALUE = TEXTS | st.none() | st.booleans() | st.integers() | st.floats() | st.lists(TEXTS, max_size=2) | st.just({})
CONFIGS = st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=8), ANY_VALUE, max_size=8)
OPTIONS = st.builds(
    CheckOptions,
    st.none() | st.integers(1, 16),
    st.dictionaries(st.sampled_from(["prefill", "decode"]), st.integers(1, 65535)),
)


def to_bytes(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")


def assert_sound(checked: Checked) -> None:
    """What every result promises."""
    assert (checked.config is None) == any(item.severity == ERROR for item in checked.diagnostics)
    for item in checked.diagnostics:
        assert item.what and item.fix and item.where.startswith("$")
        assert item.what.isprintable() and len(item.what) < 400, item.what
        assert len(item.fix) < 600
        assert item.line is not None and item.line >= 1 and item.column is not None and item.column >= 1


@PROPERTY
@given(st.binary() | st.text().map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes_are_checked_without_an_exception(data: bytes) -> None:
    assert_sound(check_bytes(data))


@PROPERTY
@given(CONFIGS, OPTIONS)
@example({"metadata_server": "127.0.0.1/\0"}, CheckOptions(None, {}))
def test_any_object_is_checked_without_an_exception(config: dict[str, Any], options: CheckOptions) -> None:
    assert_sound(check_bytes(to_bytes(config), options))


@PROPERTY
@given(st.fixed_dictionaries({name: TEXTS for name in FIELDS[:3]}, optional={name: TEXTS for name in FIELDS[3:]}))
def test_any_texts_in_the_known_fields_are_checked_without_an_exception(config: dict[str, str]) -> None:
    assert_sound(check_bytes(to_bytes(config)))


@PROPERTY
@given(TEXTS)
def test_endpoint_has_no_error_exactly_when_it_is_one(text: str) -> None:
    config = {"prefill_url": text, "decode_url": "192.168.0.139:13003", "metadata_server": "etcd://192.168.0.139:2379"}

    endpoint_errors = {
        item.rule
        for item in check_bytes(to_bytes(config)).diagnostics
        if item.severity == ERROR
        and item.where == "$.prefill_url"
        and item.rule.startswith(("endpoint", "placeholder"))
    }

    assert (
        not endpoint_errors
        or parse_endpoint(text) is None
        or endpoint_errors <= {"endpoint-wildcard", "endpoint-not-unicast"}
    )
    assert endpoint_errors or parse_endpoint(text) is not None


def metadata_errors(text: str, backend: str | None) -> list[str]:
    config = {"prefill_url": "192.168.0.137:13003", "decode_url": "192.168.0.139:13003", "metadata_server": text}
    found = check_bytes(to_bytes({**config, "metadata_backend": backend})).diagnostics
    return [item.rule for item in found if item.severity == ERROR]


def as_the_store_reads_it(url: str) -> StoreURL | None:
    try:
        return parse_store_url(url)
    except MetadataError:
        return None


@PROPERTY
@given(TEXTS, st.sampled_from([None, "etcd", "redis", "http"]))
@example("192.168.0.137?user:pw@", None)
@example("192.168.0.137?user:pw@", "redis")
@example("127.0.0.1#user:pw@", None)
@example("127.0.0.1#user:pw@", "redis")
def test_metadata_server_without_an_error_is_one_for_the_stores_too(text: str, backend: str | None) -> None:
    address = parse_metadata(text, backend)

    assert metadata_errors(text, backend) or address is not None and parse_store_url(address.url).hosts


# every order of what ends a part of a URL, as a slip of the keyboard puts it
URL_PIECES = ("10.0.0.1", ":6379", "/2", "?", "?ca=x", "#", "@", ",", "u:p@")


@pytest.mark.parametrize("scheme", ["", "etcds://", "http://", "redis://"])
def test_check_and_stores_read_a_url_alike_wherever_its_separators_stand(scheme: str) -> None:
    accepted = 0
    for length in range(4):
        for pieces in itertools.product(URL_PIECES, repeat=length):
            text = scheme + "".join(pieces)
            address = parse_metadata(text)
            store = as_the_store_reads_it(address.url) if address else None
            if metadata_errors(text, None):
                continue
            accepted += 1
            assert address is not None and store is not None, text
            assert tuple((host, port or address.port) for host, port in address.hosts) == store.hosts, text
            assert address.path.lstrip("/") == store.path.lstrip("/"), text
            assert bool(address.user_info) == bool(store.user or store.password), text
            assert (address.query == "ca=x") == (store.ca == "x"), text
    assert accepted


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("192.168.0.137?user:pw@", "metadata-query"),
        ("127.0.0.1#user:pw@", "metadata-query"),
        ("redis://10.0.0.1?user:pw@", "metadata-query"),
        ("redis://10.0.0.1?ca=a#b", "metadata-query"),
        ("redis://10.0.0.1/2@", "metadata-path"),
        ("10.0.0.1/metadata@", "metadata-path"),
        ("etcd://@10.0.0.1:2379", "metadata-login"),
        ("redis://u:p?w@10.0.0.1", "metadata-login"),
        ("redis://:@", "metadata-host-missing"),
        ("etcd://user:pw@", "metadata-host-missing"),
        ("etcd://", "metadata-host-missing"),
        ("#10.0.0.1:2379", "metadata-host-missing"),
    ],
)
def test_a_separator_in_an_odd_place_is_one_error_which_the_stores_share(text: str, rule: str) -> None:
    url = text if "://" in text else f"etcd://{text}"

    assert metadata_errors(text, None) == [rule]
    assert as_the_store_reads_it(url) is None or rule == "metadata-path"


@PROPERTY
@given(CONFIGS)
@example({"prefill_url": " \ud800"})
def test_certain_fixes_are_reached_in_one_go_and_never_change_the_meaning(config: dict[str, Any]) -> None:
    data = to_bytes(config)

    fixed = fixed_bytes(data, CheckOptions())

    assert fixed_bytes(fixed, CheckOptions()) == fixed
    before, after = check_bytes(data), check_bytes(fixed)
    assert before.config == after.config
    assert {item.rule for item in after.diagnostics if item.severity == ERROR} <= {
        item.rule for item in before.diagnostics
    }


@settings(deadline=None, max_examples=100)
@given(
    st.binary(max_size=200) | CONFIGS.map(to_bytes), st.sampled_from(["text", "json", "sarif", "github"]), st.booleans()
)
def test_any_input_ends_with_exit_code_0_1_or_2(data: bytes, output: str, strict: bool) -> None:
    arguments = ["-", "--format", output, *(["--strict"] if strict else [])]

    result = CliRunner().invoke(validate, arguments, input=data, standalone_mode=False)

    assert result.exception is None
    assert result.return_value in (0, 1, 2)


def mutate_text(text: str, position: int, kind: str, character: str) -> str:
    """One slip of the keyboard."""
    at = position % (len(text) + 1)
    if kind == "insert":
        return text[:at] + character + text[at:]
    if kind == "delete":
        return text[:at] + text[at + 1 :]
    if kind == "replace":
        return text[:at] + character + text[at + 1 :]
    return text[:at]


MUTATIONS = st.tuples(
    st.sampled_from(FIELDS[:3] + FIELDS[4:]),
    st.integers(0, 200),
    st.sampled_from(["insert", "delete", "replace", "cut"]),
    st.sampled_from(string.printable + "é\u200b"),
)


@PROPERTY
@given(st.sampled_from(VALID), MUTATIONS)
def test_a_mutated_value_is_still_valid_or_the_finding_points_at_it(
    path: Path, mutation: tuple[str, int, str, str]
) -> None:
    name, position, kind, character = mutation
    original = json.loads(path.read_bytes())
    assume(isinstance(original.get(name), str))
    before = check_bytes(path.read_bytes())
    mutated = {**original, name: mutate_text(original[name], position, kind, character)}

    checked = check_bytes(to_bytes(mutated))

    known = {(item.rule.name, item.finding.path) for item in before.found}
    new = [item for item in checked.found if (item.rule.name, item.finding.path) not in known]
    for item in new:
        assert (name,) == item.finding.path or (name,) in item.finding.related, (item.diagnostic, mutated)
    assert checked.config is not None or any(item.diagnostic.severity == ERROR for item in new)


@PROPERTY
@given(st.sampled_from(VALID), st.sampled_from(FIELDS))
def test_a_dropped_field_is_optional_or_reported_by_its_name(path: Path, name: str) -> None:
    original = json.loads(path.read_bytes())
    assume(name in original)
    before = {item.rule for item in check_bytes(path.read_bytes()).diagnostics}

    checked = check_bytes(to_bytes({key: value for key, value in original.items() if key != name}))

    errors = [item for item in checked.diagnostics if item.severity != INFO and item.rule not in before]
    assert all(item.where == f"$.{name}" or name in ("metadata_backend", "protocol") for item in errors)
    assert (name in schema()["required"]) == any(item.rule == "missing-field" for item in errors)


@PROPERTY
@given(st.sampled_from(VALID), st.sampled_from(FIELDS), st.sampled_from([None, 1, 1.5, True, [], {}, ["a"]]))
def test_a_value_of_another_type_is_reported_at_its_place(path: Path, name: str, value: Any) -> None:
    original = json.loads(path.read_bytes())
    assume(name in original and not (name == "metadata_backend" and value is None))

    checked = check_bytes(to_bytes({**original, name: value}))

    assert [item.where for item in checked.diagnostics if item.rule == "wrong-type"] == [f"$.{name}"]


@PROPERTY
@given(st.sampled_from(VALID), st.text(max_size=12))
@example(VALID[0], "kv_role")
def test_an_added_field_is_reported_at_its_place(path: Path, name: str) -> None:
    original = json.loads(path.read_bytes())
    assume(name not in schema()["properties"])

    checked = check_bytes(to_bytes({**original, name: "x"}))

    rule = "kv-transfer-config-file" if name in KV_TRANSFER_FIELDS else "unknown-field"
    assert [item.finding.path for item in checked.found if item.rule.name == rule] == [(name,)]


@pytest.mark.parametrize("path", VALID, ids=lambda path: path.stem)
def test_every_prefix_of_a_valid_file_is_reported_as_cut(path: Path) -> None:
    data = path.read_bytes().rstrip()

    rules = {
        item.rule
        for end in range(1, len(data))
        for item in check_bytes(data[:end]).diagnostics
        if item.severity == ERROR
    }

    assert rules <= {"json-truncated", "json-string", "json-syntax", "json-quotes"}
    assert all(check_bytes(data[:end]).config is None for end in range(len(data)))
