"""Asks one model server that the administrator names: for vectors, or for how well passages answer a question.

Knows HTTP, with the standard library: calls come from threads, a few a second. Knows neither what is sent nor
whether it may be: the callers ask `locality` first.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import socket
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import SplitResult, urlsplit

from perilune.errors import ConfigError

_CONNECT_S = 5.0
_MAX_ANSWER_BYTES = 64 * 1024**2


class NoAnswer(Exception):
    """The server gave none that can be used; the text says why, for people."""


class ModelServer:
    """Thread-safe. `url` is the base that paths follow (`http://host:port/v1`).

    Raises `ConfigError` for an unusable URL: `what` names the server in it, `param` the setting.
    """

    def __init__(self, url: str, *, key: str = "", what: str, param: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not _has_port(parts):
            raise ConfigError(
                f"{url!r} is no URL of {what}.",
                hint="Give one like http://host:8000/v1.",
                param=param,
            )
        self._parts = parts
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._open: set[http.client.HTTPConnection] = set()
        self._closed = False

    @property
    def remote(self) -> bool:
        """Whether what is sent leaves this machine: a server on a loopback address is on it."""
        host = self._parts.hostname or ""
        try:
            return not ipaddress.ip_address(host).is_loopback
        except ValueError:
            return host != "localhost"

    def post(self, path: str, payload: Mapping[str, Any], patience_s: float) -> bytes:
        """The body of the answer to a POST. `patience_s` bounds each wait on the network, not their sum. Raises
        `NoAnswer`."""
        secure = self._parts.scheme == "https"
        connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = connect(self._parts.hostname or "", self._parts.port, timeout=min(patience_s, _CONNECT_S))
        self._open.add(connection)
        try:
            if self._closed:
                raise NoAnswer("it is closed")
            connection.connect()
            connection.sock.settimeout(patience_s)
            target = f"{self._parts.path.rstrip('/')}/{path}"
            connection.request("POST", target, json.dumps(payload), self._headers)
            response = connection.getresponse()
            data = response.read(_MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException, UnicodeError) as error:
            raise NoAnswer(f"{self._parts.hostname} did not answer ({type(error).__name__})") from None
        finally:
            self._open.discard(connection)
            connection.close()
        if response.status != http.client.OK:
            raise NoAnswer(f"{self._parts.hostname} answered with status {response.status}")
        return data

    def close(self) -> None:
        """End the calls under way; their callers get an error at once."""
        self._closed = True
        for connection in list(self._open):
            if connection.sock is not None:
                with suppress(OSError):  # the other side was faster
                    connection.sock.shutdown(socket.SHUT_RDWR)


def _has_port(parts: SplitResult) -> bool:
    """Whether the port, where there is one, is a port."""
    try:
        return parts.port != 0
    except ValueError:
        return False
