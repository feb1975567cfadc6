"""The name of a place on a store: `s3://BUCKET/KEY`, `gs://BUCKET/KEY`, `file:///DIRECTORY`.

Not from a paper. Nothing here reads a store, so arguments can be parsed without one.
"""

from __future__ import annotations

import glob
import hashlib
from dataclasses import dataclass
from pathlib import PurePosixPath

from bertkit.errors import UsageError

SCHEMES = {"s3": "s3", "gs": "gs", "file": None}
"""Each scheme, and bertkit's optional dependencies that it needs; None: none."""
_SIGN = "://"
_FORBIDDEN = "@?#"
"""Not allowed in a bucket's name: characters that delimit user names, queries and fragments of a URL."""


def is_url(text: str) -> bool:
    """Whether a text names a place on a store, judged by its scheme."""
    scheme, sign, _ = text.partition(_SIGN)
    return bool(sign) and scheme in SCHEMES


def has_scheme(text: str) -> bool:
    """Whether a text begins with any scheme: then it is not a path, and can only name a store."""
    return _SIGN in text


@dataclass(frozen=True)
class StoreUrl:
    """A place on a store.

    Attributes:
        scheme: `s3`, `gs` or `file`.
        path: bucket and key without slashes at the ends, or the absolute path of a directory.
    """

    scheme: str
    path: str

    @classmethod
    def parse(cls, text: str) -> StoreUrl:
        """The place that a text names.

        Raises:
            UsageError: another scheme, no bucket, credentials in the URL (not repeated in the message), or `..` in it.
        """
        scheme, _, rest = text.partition(_SIGN)
        bucket = rest.partition("/")[0]
        if scheme not in SCHEMES:
            shown = f"{scheme}{_SIGN}{rest.rpartition('@')[2]}"
            raise UsageError(f"{shown}: no such scheme; expected one of {', '.join(_shown(SCHEMES))}")
        if any(sign in bucket for sign in _FORBIDDEN):
            raise UsageError(
                f"{scheme}{_SIGN}...: expected {_form(scheme)}; credentials come from the environment, such as"
                " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or GOOGLE_APPLICATION_CREDENTIALS, and the endpoint from"
                " AWS_ENDPOINT_URL"
            )
        if scheme == "file":
            if bucket:
                raise UsageError(f"{text}: expected {_form(scheme)}, with three slashes and an absolute path")
        elif not bucket:
            raise UsageError(f"{text}: does not name a bucket; expected {_form(scheme)}")
        if ".." in PurePosixPath(rest).parts:
            raise UsageError(f"{text}: stores do not support `..`; write the full path")
        path = rest.rstrip("/") if scheme == "file" else rest.strip("/")
        return cls(scheme, path or "/")

    def __str__(self) -> str:
        return f"{self.scheme}{_SIGN}{self.path}"

    def __truediv__(self, name: str) -> StoreUrl:
        return StoreUrl(self.scheme, f"{self.path.rstrip('/')}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return PurePosixPath(self.path).name

    @property
    def is_pattern(self) -> bool:
        """Whether it contains `*`, `?` or `[`."""
        return glob.has_magic(self.path)

    @property
    def uses_network(self) -> bool:
        """Whether it is read over the network; a `file://` place may be, too, but only the system knows."""
        return self.scheme != "file"

    @property
    def digest(self) -> str:
        """32 hexadecimal digits that identify it in directory names."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:32]


def _shown(schemes: dict[str, str | None]) -> list[str]:
    return [f"{scheme}{_SIGN}" for scheme in schemes]


def _form(scheme: str) -> str:
    return "file:///DIRECTORY" if scheme == "file" else f"{scheme}{_SIGN}BUCKET/KEY"
