"""Headers that mean nothing are the caller's fault: 400 that says which, never 500."""

import asyncio
import json

import pytest
from gateway_cases import entry, gateway_with
from wire_cases import VLLM, vllm_body

from rose.gateway import Gateway
from tests.fakes.replica import StandInReplica

INVALID_UTF8 = b"a\xff\xfe"


async def exchange(gateway: Gateway, path: str, *headers: bytes, body: bytes = b"") -> bytes:
    """The whole answer to one request, sent as raw bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.port)
    head = b"POST %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: %d\r\n" % (
        path.encode(),
        len(body),
    )
    writer.write(head + b"".join(line + b"\r\n" for line in headers) + b"\r\n" + body)
    answer = await reader.read()
    writer.close()
    return answer


def error_of(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "header",
    [
        b"Last-Event-ID: \xc2\xb2",
        b"Last-Event-ID: \xd9\xa3",
        b"Last-Event-ID: " + b"1" * 5_000,
        b"Last-Event-ID: -1",
        b"X-Request-Id: " + INVALID_UTF8,
        b"X-Session-ID: " + INVALID_UTF8,
        b"X-Group-ID: " + INVALID_UTF8,
        b"X-Rose-Job: " + INVALID_UTF8,
        b"X-Request-Timeout: " + INVALID_UTF8,
        b"X-Request-Timeout: nan",
        b"Transfer-Encoding: gzip",
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_header_that_means_nothing_is_400(header: bytes, stream: bool) -> None:
    body = json.dumps(vllm_body(2, stream=stream)).encode()
    async with StandInReplica() as replica, gateway_with(entry(replica, "guest-0")) as gw:
        status, message = error_of(await exchange(gw, VLLM, header, body=body))
    assert status == 400
    assert message


async def test_a_session_to_finish_has_a_printable_name() -> None:
    async with gateway_with() as gw:
        answer = await exchange(gw, "/finish_session", b"X-Session-ID: " + INVALID_UTF8)
    assert error_of(answer)[0] == 400


async def test_a_reader_with_more_tokens_than_there_are_gets_the_end() -> None:
    body = json.dumps(vllm_body(2, stream=True, resume_from=10**30)).encode()
    async with StandInReplica() as replica, gateway_with(entry(replica, "guest-0")) as gw:
        status, message = error_of(await exchange(gw, VLLM, body=body))
    assert (status, "resume_from" in message) == (400, True)


@pytest.mark.parametrize("coding", [b"gzip", b"deflate", b"br", b"zstd", b"gzip, gzip"])
async def test_a_compressed_body_is_refused_unread(coding: bytes) -> None:
    async with gateway_with() as gw:
        answer = await exchange(gw, VLLM, b"Content-Encoding: " + coding, body=b"zz" * 99)
    status, message = error_of(answer)
    assert status == 415
    assert "Content-Encoding" in message


async def test_bytes_that_are_no_http_get_a_structured_400() -> None:
    async with gateway_with() as gw:
        reader, writer = await asyncio.open_connection("127.0.0.1", gw.port)
        writer.write(b"\x16\x03\x01\x02\x00\x01 not HTTP\r\n\r\n")
        status, message = error_of(await reader.read())
        writer.close()
    assert (status, "HTTP" in message) == (400, True)


@pytest.mark.parametrize("path", [VLLM, "/nowhere"])
@pytest.mark.parametrize("expects", [b"a miracle", INVALID_UTF8])
async def test_what_cannot_be_expected_is_417(path: str, expects: bytes) -> None:
    async with gateway_with() as gw:
        answer = await exchange(gw, path, b"Expect: " + expects)
    assert error_of(answer)[0] == 417
