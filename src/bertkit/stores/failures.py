"""What the errors of a store's client mean, and whether to retry.

Not from a paper. The clients of S3 (botocore under s3fs) and of Google Cloud Storage (gcsfs) raise their own errors, or
an OSError whose cause has the service's code. A message never contains a key, a token or a signature.
"""

from __future__ import annotations

import errno
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass

from bertkit.errors import first_line
from bertkit.files import without_credentials

_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_SIGNED = re.compile(r"(?i)((?:X-Amz-|X-Goog-)?(?:Signature|Credential|Security-Token)=)[^&\s\"']+")

_FULL = frozenset(
    {"507", "InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded"}
)
_REFUSED = frozenset(
    {"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
    | {"AllAccessDisabled", "AccountProblem", "TokenRefreshRequired", "RequestTimeTooSkewed", "Forbidden"}
)
_NO_CREDENTIALS = frozenset(
    {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "ProfileNotFound"}
    | {"DefaultCredentialsError", "RefreshError", "TokenRetrievalError", "SSOTokenLoadError"}
)
_BUSY = frozenset(
    {"429", "500", "502", "503", "SlowDown", "ServiceUnavailable", "InternalError", "Throttling", "RequestTimeout"}
)
_TIMED_OUT = frozenset({"504", "ConnectTimeoutError", "ReadTimeoutError", "TimeoutError", "ServerTimeoutError"})
_UNREACHABLE = frozenset(
    {
        "EndpointConnectionError",
        "ConnectionClosedError",
        "HTTPClientError",
        "ClientConnectorError",
        "ProxyConnectionError",
    }
    | {"ServerDisconnectedError", "ClientOSError", "ClientPayloadError", "ConnectionError", "IncompleteReadError"}
    | {"ClientConnectorDNSError", "ResponseStreamingError"}
)
_MAY_PASS = frozenset({errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ENOTCONN})
"""Errors of file systems, such as those over a network."""


@dataclass(frozen=True)
class Failure:
    """Why an operation of a store failed.

    Attributes:
        reason: in words, with what to do.
        may_pass: whether a retry may succeed a little later.
        is_missing: whether there is no such file or directory; False for a missing bucket, which is always an error.
    """

    reason: str
    may_pass: bool = False
    is_missing: bool = False

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """The meaning of a client's error."""
        signs = set(_signs(error))
        number = getattr(error, "errno", None)
        if signs & _FULL or number in (errno.ENOSPC, errno.EDQUOT):
            return cls("the store is full, or its quota is used up; free some space there")
        if signs & _NO_CREDENTIALS:
            return cls("no usable credentials were found; set the store's credentials in the environment, or log in")
        if "NoSuchBucket" in signs or "bucket does not exist" in str(error):
            return cls("there is no such bucket; create it, or correct its name")
        if signs & _REFUSED or isinstance(error, PermissionError):
            code = min(signs & _REFUSED - {"401", "403", "Forbidden"}, default="")
            return cls(f"access is refused{f' ({code})' if code else ''}; check the credentials and their permissions")
        # On a disk, too, nothing can be below a file, as with objects.
        if isinstance(error, FileNotFoundError | NotADirectoryError) or signs & {"404", "NoSuchKey"}:
            return cls("there is no file or directory with this name", is_missing=True)
        if signs & _TIMED_OUT or isinstance(error, TimeoutError):
            return cls("the store did not answer in time", may_pass=True)
        if signs & _UNREACHABLE or isinstance(error, ConnectionError | socket.gaierror):
            return cls("the store cannot be reached; check the network and the endpoint", may_pass=True)
        if signs & _BUSY:
            return cls(f"the store cannot serve this now ({min(signs & _BUSY)})", may_pass=True)
        return cls(without_secrets(first_line(error)), may_pass=number in _MAY_PASS)


def without_secrets(text: str) -> str:
    """The text without credentials of the environment, user names in URLs, and signatures of signed requests."""
    for name in _SECRETS:
        if secret := os.environ.get(name):
            text = text.replace(secret, "***")
    return _SIGNED.sub(r"\1***", without_credentials(text))


def _signs(error: BaseException) -> Iterator[str]:
    """The names of an error's class and its base classes, and the service's codes in the error or its cause."""
    for each in (error, error.__cause__):
        if each is None:
            continue
        yield from (kind.__name__ for kind in type(each).__mro__ if kind not in (OSError, Exception, BaseException))
        response = getattr(each, "response", None)
        if isinstance(response, dict):
            yield str(response.get("Error", {}).get("Code", ""))
            yield str(response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
        yield from (str(getattr(each, name)) for name in ("code", "status") if hasattr(each, name))
