# SPDX-License-Identifier: Apache-2.0
"""What cannot be a store, and what a store's client raises, is explained."""

import socket

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from components.store_transport import Transport, find_url_problem
from object_memory import URL

HOST = ConnectionKey("storage.example", 443, True, True, None, None, None)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("runs/full", "write it as s3://BUCKET/RUN"),
        ("s3://", "write it as s3://BUCKET/RUN"),
        ("nosuch://bucket/run", "fsspec knows no nosuch://"),
        ("memory://bucket/run", "is lost when the run ends"),
        (URL, None),
    ],
)
def test_wrong_urls_are_explained(url, says):
    problem = find_url_problem(url)
    assert problem is None if says is None else says in problem


@pytest.mark.parametrize(
    "error",
    [
        # As gcsfs raises it without a network: a class derived from ClientConnectorError
        aiohttp.ClientConnectorDNSError(HOST, socket.gaierror(-3, "Temporary failure")),
        aiohttp.ServerDisconnectedError(),
        aiohttp.ServerTimeoutError(),
        ConnectionRefusedError(),
    ],
)
def test_a_store_out_of_reach_has_the_code_69(error):
    code, text = Transport(URL).describe(error)
    assert code == 69 and text.startswith(f"--output_url {URL}: cannot be reached: ")
