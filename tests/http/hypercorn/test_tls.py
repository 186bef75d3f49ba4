"""TLS and HTTP/2 through hypercorn, with a certificate made here, and the guard behind them."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path

import h2.config
import h2.connection
import httpx
import pytest
import trustme

from tests.http.processes import ServerProcess

pytestmark = pytest.mark.timeout(180)

KEY = "sk-over-tls-0123456789"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def authority_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("authority") / "ca.pem"


@pytest.fixture(scope="module")
def server(
    authority: trustme.CA,
    authority_file: Path,
    environment: dict[str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("tls")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    settings = folder / "hypercorn.toml"
    settings.write_text(f'certfile = "{folder / "cert.pem"}"\nkeyfile = "{folder / "key.pem"}"\n')
    authority.cert_pem.write_to_path(authority_file)
    with ServerProcess.serve(
        {**environment, "SLIPSTREAM_HTTP__API_KEYS": KEY},
        *("--host", "127.0.0.1", "--hypercorn-config", str(settings)),
    ) as process:
        process.use_tls(authority_file)
        process.wait_ready()
        yield process


@pytest.mark.parametrize(("http2", "version"), [(True, "HTTP/2"), (False, "HTTP/1.1")])
def test_both_versions_of_http_over_tls(server: ServerProcess, http2: bool, version: str) -> None:
    with httpx.Client(base_url=server.url, http2=http2, verify=server.verify, timeout=60) as client:
        refused = client.get("/v1/models")
        assert (refused.status_code, refused.http_version) == (401, version)
        assert refused.headers["www-authenticate"].startswith("Bearer")
        client.headers["authorization"] = f"Bearer {KEY}"
        body = {"prompt": "hello", "max_tokens": 8, "ignore_eos": True, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            text = "".join(answer.iter_text())
        assert answer.http_version == version
        assert text.endswith("data: [DONE]\n\n")
        # A body over the limit, and one to nowhere: neither holds up the connection.
        large = client.post("/v1/completions", content=b" " * 300_000)
        assert large.status_code == 413
        assert client.post("/nowhere", content=b" " * 300_000).status_code == 404
        assert client.get("/v1/models").status_code == 200


def test_a_client_that_does_not_know_the_certificate_gets_nothing(server: ServerProcess) -> None:
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"{server.url}/live")
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{server.port}/live")


def flooded(server: ServerProcess, authority: Path, flood: bytes) -> bytes | None:
    """What comes back from a connection that begins like this, until the server ends it.

    None where the server ended it while it was still sent to: the system then drops what the server
    has answered.
    """
    context = ssl.create_default_context(cafile=authority)
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
    ):
        assert connection.selected_alpn_protocol() == "h2"
        answer = b""
        try:
            connection.sendall(flood)
            while piece := connection.recv(65536):
                answer += piece
        # Not OSError: a server that ends nothing lets this wait in vain, which is one too.
        except (ConnectionError, ssl.SSLError):
            return answer or None
    return answer


def rapid_resets(count: int) -> bytes:
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    connection.initiate_connection()
    data = connection.data_to_send()
    headers = [(":method", "GET"), (":path", "/live"), (":scheme", "https"), (":authority", "s")]
    for stream in range(1, 2 * count, 2):
        connection.send_headers(stream, headers, end_stream=True)
        connection.reset_stream(stream)
        data += connection.data_to_send()
    return data


FLOODS = {
    "resets": rapid_resets(2000),
    "settings": rapid_resets(0) + b"\0\0\0\x04\0\0\0\0\0" * 5000,
    "pings": rapid_resets(0) + (b"\0\0\x08\x06\0\0\0\0\0" + bytes(8)) * 3000,
    "priorities": rapid_resets(0)
    + b"".join(
        b"\0\0\x05\x02\0" + stream.to_bytes(4) + b"\0\0\0\0\x10" for stream in range(1, 9999, 2)
    ),
}


@pytest.mark.parametrize("flood", FLOODS.values(), ids=FLOODS)
def test_a_flood_of_frames_ends_its_connection_and_is_no_traceback(
    server: ServerProcess, authority_file: Path, flood: bytes
) -> None:
    lines = server.output.count("\n")
    answer = flooded(server, authority_file, flood)
    # GOAWAY, with ENHANCE_YOUR_CALM.
    if answer is not None:
        assert answer.endswith(b"\0\0\x08\x07\0\0\0\0\0" + bytes(4) + b"\0\0\0\x0b")
    with httpx.Client(base_url=server.url, http2=True, verify=server.verify, timeout=60) as client:
        assert client.get("/live").status_code == 200
    assert "Traceback" not in server.output
    assert server.output.count("\n") <= lines + 2
