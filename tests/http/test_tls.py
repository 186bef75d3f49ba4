"""TLS and HTTP/2 through hypercorn, with a certificate made here, and the guard behind them."""

from __future__ import annotations

from collections.abc import Iterator

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
def server(
    authority: trustme.CA, environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("tls")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    certificate.private_key_pem.write_to_path(folder / "key.pem")
    settings = folder / "hypercorn.toml"
    settings.write_text(f'certfile = "{folder / "cert.pem"}"\nkeyfile = "{folder / "key.pem"}"\n')
    authority.cert_pem.write_to_path(folder / "ca.pem")
    with ServerProcess.serve(
        {**environment, "SLIPSTREAM_HTTP__API_KEYS": KEY},
        *("--host", "127.0.0.1", "--hypercorn-config", str(settings)),
    ) as process:
        process.use_tls(folder / "ca.pem")
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
