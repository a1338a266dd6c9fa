from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_v0.errors import MetadataError
from mooncake_v0.metadata.store_url import StoreURL, mask_url, parse_store_url


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("memory:", StoreURL("memory")),
        ("sqlite:///keys.db", StoreURL("sqlite", path="keys.db")),
        ("sqlite:////var/lib/keys.db", StoreURL("sqlite", path="/var/lib/keys.db")),
        ("redis://h", StoreURL("redis", (("h", 6379),))),
        ("redis://:p%40w@h:1/2", StoreURL("redis", (("h", 1),), "2", None, "p@w")),
        ("redis+sentinel://a,b:2/meta/1", StoreURL("redis+sentinel", (("a", 26379), ("b", 2)), "meta/1")),
        ("rediss+cluster://a,b?ca=f", StoreURL("rediss+cluster", (("a", 6379), ("b", 6379)), ca="f")),
        ("etcd://a,b:1,[::1]:2", StoreURL("etcd", (("a", 2379), ("b", 1), ("::1", 2)))),
        ("etcds://u:p@a?cert=c&key=k", StoreURL("etcds", (("a", 2379),), "", "u", "p", None, "c", "k")),
        ("10.0.0.1:2379", StoreURL("etcd", (("10.0.0.1", 2379),))),
        ("a:2379,b:2379", StoreURL("etcd", (("a", 2379), ("b", 2379)))),
        ("http://h/metadata", StoreURL("http", (("h", 80),), "/metadata")),
        ("https://u:p@h:8443/m", StoreURL("https", (("h", 8443),), "/m", "u", "p")),
    ],
)
def test_every_form_is_read(text: str, expected: StoreURL) -> None:
    assert parse_store_url(text) == expected


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "store URL"),
        ("foo", "store URL"),
        ("HTTP://h", "store URL"),
        ("P2PHANDSHAKE", "store URL"),
        ("redis://u:geheim@", "HOST:PORT"),
        ("redis://u:geheim@h:x", "HOST:PORT"),
        ("redis://u:geheim@h:0", "HOST:PORT"),
        ("redis://u:geheim@h:70000", "HOST:PORT"),
        ("redis://u:geheim@a,b", "one host"),
        ("etcd://u:geheim@a,,b", "HOST:PORT"),
        ("redis://u:geheim@h?db=1", "'db'"),
        ("sqlite://keys.db", "sqlite:///FILE"),
        ("ftp://u:geheim@h", "store URL"),
        ("redis://h?password_file=/does/not/exist", "/does/not/exist"),
        ("redis://h?sentinel_user=u", "no sentinels"),
        ("user:geheim@h", "store URL"),
        ("redis://u:geheim/x@h", "'/' in the password"),
        ("etcd://h:1?u:geheim@", "no option 'u'"),
        ("etcd://h:1#u:geheim@", "fragment"),
        ("redis://@h", "before the '@'"),
        ("redis://u:geheim@ca=x", "HOST:PORT"),
        ("sqlite:///keys.db?db=1", "'db'"),
        ("redis+sentinel://h/meta?sentinel_password_file=/does/not/exist", "/does/not/exist"),
    ],
)
def test_a_wrong_url_is_named_without_its_password(text: str, part: str) -> None:
    with pytest.raises(MetadataError) as caught:
        parse_store_url(text)
    assert part in str(caught.value)
    assert "geheim" not in str(caught.value)


def test_a_password_comes_from_its_file(tmp_path: Path) -> None:
    (tmp_path / "pw").write_text("geheim\n")

    assert parse_store_url(f"etcd://u@h?password_file={tmp_path}/pw").password == "geheim"


SECRET = st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="/?@:%#,"), min_size=6)


@given(st.sampled_from(["redis", "rediss", "etcd", "etcds", "http", "redis+cluster"]), SECRET)
def test_no_form_of_a_url_shows_its_password(scheme: str, secret: str) -> None:
    url = f"{scheme}://user:{secret}@host:1"
    parsed = parse_store_url(url)

    assert parsed.password == secret
    assert f":{secret}@" not in f"{parsed} {parsed!r} {mask_url(url)}"
    assert str(parsed) == f"{scheme}://user:***@host:1"


@given(st.text())
def test_any_text_is_read_or_refused_with_our_error(text: str) -> None:
    try:
        parse_store_url(text)
    except MetadataError as error:
        assert error.fix
