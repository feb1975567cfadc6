"""A server of the S3 protocol on loopback, which can be stopped, restarted, and made to refuse credentials."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pytest

ACCESS_KEY, SECRET = "AKIDFORTESTS", "not-to-be-shown-5b2f"
BUCKET = "corpora"


@dataclass
class S3Server:
    """moto's server.

    Attributes:
        port: port on 127.0.0.1, chosen at the first start and then kept.
    """

    port: int = 0
    _server: Any = field(default=None, repr=False)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        from moto.server import ThreadedMotoServer

        logging.getLogger("werkzeug").setLevel(logging.WARNING)
        self._server = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self._server.start()
        self.port = self._server.get_host_and_port()[1]

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop()
            self._server = None

    def call(self, path: str, body: str = "") -> None:
        """A request to moto's own interface."""
        import requests

        requests.post(f"{self.endpoint}/moto-api/{path}", data=body, timeout=10).raise_for_status()

    def refuse_credentials(self, *, refuse: bool = True) -> None:
        self.call("reset-auth", "0" if refuse else "inf")

    def client(self) -> Any:
        import boto3

        return boto3.client("s3", endpoint_url=self.endpoint)

    def names(self) -> list[str]:
        return sorted(each["Key"] for each in self.client().list_objects_v2(Bucket=BUCKET).get("Contents", ()))

    def content(self, key: str) -> bytes:
        found: bytes = self.client().get_object(Bucket=BUCKET, Key=key)["Body"].read()
        return found

    def put(self, key: str, content: bytes) -> None:
        self.client().put_object(Bucket=BUCKET, Key=key, Body=content)


def set_environment(patch: pytest.MonkeyPatch, server: S3Server) -> None:
    """The usual variables of S3, and none of the machine's own settings."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3"):
        patch.delenv(name, raising=False)
    values = {
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }
    for name, value in values.items():
        patch.setenv(name, value)
