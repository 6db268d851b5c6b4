# SPDX-License-Identifier: Apache-2.0
"""What cannot be a store, and what a store's client raises, is explained."""

import logging
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
    ("error", "says"),
    [
        # As s3fs raises it for NoSuchBucket
        (FileNotFoundError("The specified bucket does not exist"), "The specified bucket does not"),
        (FileNotFoundError(2, "No such file or directory", "runs/a.json"), "'runs/a.json'"),
    ],
)
def test_what_was_not_found_is_said(error, says):
    code, text = Transport(URL).describe(error)
    assert code == 73 and text.startswith(f"--output_url {URL}: not found: ") and says in text
    assert ("bucket does" in text) == ("bucket does" in says)


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


def test_an_address_of_a_store_that_cannot_be_read_has_the_code_64():
    code, text = Transport(URL).describe(
        ValueError("Invalid endpoint: nosuch")
    )  # as botocore says it
    assert code == 64 and "Invalid endpoint: nosuch: write AWS_ENDPOINT_URL" in text
    assert Transport(URL).describe(ValueError("Invalid bucket name"))[0] == 73


def test_what_a_client_logs_with_a_traceback_is_one_line(capsys):
    Transport(URL)
    try:
        raise OSError("no network")
    except OSError as error:
        logging.getLogger("gcsfs").exception("out of retries: %s", error)  # as gcsfs/retry.py
    assert capsys.readouterr().err == "out of retries: no network\n"


def test_a_wrong_url_ends_with_64_and_one_line(new_process, capsys):
    with pytest.raises(SystemExit, match="64"):
        Transport("memory://bucket/run")
    said = capsys.readouterr().err
    assert said.startswith("error: --output_url memory://bucket/run: ") and said.count("\n") == 1
