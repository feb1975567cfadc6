"""URLs of stores: their meaning, and error messages that do not repeat a secret."""

from __future__ import annotations

import pytest

from bertkit.errors import UsageError
from bertkit.stores.url import StoreUrl, has_scheme, is_url


@pytest.mark.parametrize(
    ("text", "scheme", "path", "name"),
    [
        ("s3://corpora/text/a.jsonl.gz", "s3", "corpora/text/a.jsonl.gz", "a.jsonl.gz"),
        ("s3://corpora/runs/x/", "s3", "corpora/runs/x", "x"),
        ("gs://corpora", "gs", "corpora", "corpora"),
        ("file:///srv/runs/x", "file", "/srv/runs/x", "x"),
    ],
)
def test_scheme_and_path(text: str, scheme: str, path: str, name: str) -> None:
    url = StoreUrl.parse(text)
    assert (url.scheme, url.path, url.name, str(url)) == (scheme, path, name, text.rstrip("/"))
    assert is_url(text)
    assert has_scheme(text)


@pytest.mark.parametrize("text", ["runs/x", "hub:org/name", "builtin:pydocs", "/a/b", "s3:/a", "C:/a"])
def test_other_names_are_no_urls(text: str) -> None:
    assert not is_url(text)
    assert not has_scheme(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3:///key", "s3:///key: does not name a bucket; expected s3://BUCKET/KEY"),
        ("file://srv/x", "file://srv/x: expected file:///DIRECTORY, with three slashes and an absolute path"),
        ("s4://corpora/x", "no such scheme; expected one of s3://, gs://, file://"),
        ("s3://corpora/../x", "stores do not support `..`"),
    ],
)
def test_a_wrong_url_is_told(text: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        StoreUrl.parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text", ["s3://key:secret@corpora/x", "http://key:secret@corpora/x", "s3://corpora?secret=1/x"]
)
def test_credentials_in_a_url_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        StoreUrl.parse(text)
    assert "secret" not in str(caught.value).replace("AWS_SECRET_ACCESS_KEY", "")
