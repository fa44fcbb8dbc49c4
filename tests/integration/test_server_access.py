"""Who may ask and how: addresses, TLS, tokens, health, metrics, traces, export."""

from __future__ import annotations

import contextlib
import socket
import ssl
import urllib.request
from pathlib import Path

import _serving_models as models
import grpc
import pytest
from _serving import add, rows, settings

from edgeweave.cli import main
from edgeweave.inference_server import (
    BackgroundServer,
    Client,
    Limits,
    ModelConfigError,
    TlsSettings,
)
from edgeweave.inference_server._messages import message_class

PATIENCE_S = 120.0


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])
def test_other_machines_need_tls_or_a_word(tmp_path: Path, host: str) -> None:
    with pytest.raises(ModelConfigError, match="pass --tls-cert and --tls-key, or --insecure"):
        settings(tmp_path, host=host)
    assert settings(tmp_path, host=host, insecure=True).host == host
    tls = TlsSettings(tmp_path / "c", tmp_path / "k")
    assert settings(tmp_path, host=host, tls=tls).tls == tls
    for own in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        assert settings(tmp_path, host=own).host == own


def test_port_that_is_taken(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = settings(tmp_path, port=listener.getsockname()[1])
        with pytest.raises(ModelConfigError, match="must be free"), BackgroundServer(taken):
            pass
    with BackgroundServer(settings(tmp_path)) as server:
        again = settings(tmp_path, port=server.port)
        with pytest.raises(ModelConfigError, match="must be free"), BackgroundServer(again):
            pass


def test_tokens(tmp_path: Path) -> None:
    add(tmp_path, "m", models.Affine())
    file = tmp_path / "tokens"
    file.write_text("first-token\nsecond-token\n")
    with BackgroundServer(settings(tmp_path, token_file=file)) as server:
        target = f"127.0.0.1:{server.port}"
        for token in ("first-token", "second-token"):
            with Client(target, token=token) as client:
                assert client.infer("m", rows(1)).outputs["OUTPUT0"][0, 0] == 3.0
                assert client.server_ready()
                assert len(list(client.infer_stream("m", [rows(1)]))) == 1
        for token, code in ((None, "UNAUTHENTICATED"), ("wrong", "PERMISSION_DENIED")):
            with Client(target, token=token) as client:
                for call in (
                    lambda c=client: c.infer("m", rows(1)),
                    client.server_ready,
                    lambda c=client: list(c.infer_stream("m", [rows(1)])),
                ):
                    with pytest.raises(grpc.RpcError) as caught:
                        call()
                    assert caught.value.code().name == code
        # A probe carries no token.
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        with grpc.insecure_channel(target) as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    file.write_text("")
    with pytest.raises(ModelConfigError, match="must hold 1 to"):
        BackgroundServer(settings(tmp_path, token_file=file)).__enter__()


def test_health_of_models_and_its_changes(tmp_path: Path) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    add(tmp_path, "m", models.Affine())
    serving = health_pb2.HealthCheckResponse.SERVING
    not_serving = health_pb2.HealthCheckResponse.NOT_SERVING
    with BackgroundServer(settings(tmp_path, allow_repository_control=True)) as server:
        target = f"127.0.0.1:{server.port}"
        with grpc.insecure_channel(target) as channel, Client(target) as client:
            stub = health_pb2_grpc.HealthStub(channel)
            assert stub.Check(health_pb2.HealthCheckRequest(service="m")).status == serving
            with pytest.raises(grpc.RpcError) as caught:
                stub.Check(health_pb2.HealthCheckRequest(service="nothing"))
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            # The stub of this version of grpc_health may not know List.
            listing = channel.unary_unary("/grpc.health.v1.Health/List")(b"")
            statuses = message_class("grpc.health.v1.HealthListResponse").FromString(listing)
            listed = statuses.statuses
            assert {name: s.status for name, s in listed.items()} == {
                "": serving,
                "inference.GRPCInferenceService": serving,
                "m": serving,
            }
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="m"), timeout=PATIENCE_S)
            assert next(watch).status == serving
            client.unload("m")
            assert next(watch).status == not_serving
            client.load("m")
            assert next(watch).status == serving
            watch.cancel()


def _certificates(folder: Path) -> dict[str, Path]:
    """A CA, and certificates for the server and a client, made for this test."""
    from datetime import datetime, timedelta, timezone

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    now = datetime.now(timezone.utc)
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("ca", "server", "client")}
    names = {
        name: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"test {name}")]) for name in keys
    }
    files: dict[str, Path] = {}
    for name, key in keys.items():
        builder = (
            x509.CertificateBuilder()
            .subject_name(names[name])
            .issuer_name(names["ca"])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(hours=1))
            .not_valid_after(now + timedelta(hours=1))
            .add_extension(x509.BasicConstraints(ca=name == "ca", path_length=None), True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), False)
        )
        certificate = builder.sign(keys["ca"], hashes.SHA256())
        files[f"{name}.crt"] = folder / f"{name}.crt"
        files[f"{name}.crt"].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        files[f"{name}.key"] = folder / f"{name}.key"
        files[f"{name}.key"].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
    return files


@pytest.mark.parametrize("transport", ["http2", "grpcio"])
def test_tls_and_mutual_tls(tmp_path: Path, transport: str) -> None:
    files = _certificates(tmp_path)
    repository = tmp_path / "repository"
    add(repository, "m", models.Affine())
    tls = TlsSettings(files["server.crt"], files["server.key"])
    with BackgroundServer(settings(repository, tls=tls, transport=transport)) as server:
        target = f"localhost:{server.port}"
        with Client(target, root_certificates=files["ca.crt"]) as client:
            assert client.infer("m", rows(1)).outputs["OUTPUT0"][0, 0] == 3.0
        with Client(target, timeout_s=5.0) as plain, pytest.raises(grpc.RpcError):
            plain.server_ready()
    mutual = TlsSettings(files["server.crt"], files["server.key"], files["ca.crt"])
    with BackgroundServer(settings(repository, tls=mutual, transport=transport)) as server:
        target = f"localhost:{server.port}"
        known = {"certificate": files["client.crt"], "key": files["client.key"]}
        with Client(target, root_certificates=files["ca.crt"], **known) as client:
            assert client.server_ready()
        with (
            Client(target, root_certificates=files["ca.crt"], timeout_s=5.0) as stranger,
            pytest.raises(grpc.RpcError) as caught,
        ):
            stranger.server_ready()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    missing = TlsSettings(tmp_path / "none", files["server.key"])
    with pytest.raises(ModelConfigError, match="tls_cert must be readable"):
        BackgroundServer(settings(repository, tls=missing, transport=transport)).__enter__()


def _first_bytes(port: int, ca: Path, protocols: list[str]) -> bytes:
    """What the server says to a client that offers these protocols; empty if it hangs up."""
    context = ssl.create_default_context(cafile=str(ca))
    if protocols:
        context.set_alpn_protocols(protocols)
    with (
        socket.create_connection(("localhost", port), timeout=PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as secure,
    ):
        try:
            secure.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
            return secure.recv(1)
        except OSError:
            return b""


def test_tls_has_to_agree_on_http2(tmp_path: Path) -> None:
    files = _certificates(tmp_path)
    add(tmp_path / "repository", "m", models.Affine())
    tls = TlsSettings(files["server.crt"], files["server.key"])
    with BackgroundServer(settings(tmp_path / "repository", tls=tls)) as server:
        for protocols in (["h2"], ["http/1.1", "h2"]):
            assert _first_bytes(server.port, files["ca.crt"], protocols)
        for protocols in ([], ["http/1.1"]):
            assert not _first_bytes(server.port, files["ca.crt"], protocols)
        # Neither kind, nor plain text, harms the others.
        with socket.create_connection(("localhost", server.port), timeout=PATIENCE_S) as plain:
            plain.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            try:
                answer = plain.recv(1 << 16)
            except OSError:
                answer = b""
            # An alert of TLS at most.
            assert answer[:1] in (b"", b"\x15")
        target = f"localhost:{server.port}"
        with Client(target, root_certificates=files["ca.crt"]) as client:
            assert client.server_ready()


def test_connections_above_the_limit(tmp_path: Path) -> None:
    add(tmp_path, "m", models.Affine())
    with BackgroundServer(settings(tmp_path, limits=Limits(connections=1))) as server:
        target = f"127.0.0.1:{server.port}"
        with Client(target) as client:
            assert client.server_ready()
            with (
                socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S) as more,
                contextlib.suppress(ConnectionResetError),
            ):
                assert more.recv(1) == b""
            assert client.server_ready()


def test_metrics(tmp_path: Path) -> None:
    add(tmp_path, "m", models.Affine())
    with BackgroundServer(settings(tmp_path, metrics_port=0)) as server:
        with Client(f"127.0.0.1:{server.port}") as client:
            for _ in range(3):
                client.infer("m", rows(2))
            with pytest.raises(grpc.RpcError):
                client.infer("m", rows(2, columns=5))
            with pytest.raises(grpc.RpcError):
                client.infer("nothing", rows(2))
        with urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as page:
            text = page.read().decode()
    lines = text.splitlines()
    for line in (
        'edgeweave_requests_total{model="m",outcome="success",version="1"} 3.0',
        'edgeweave_requests_total{model="m",outcome="invalid_argument",version="1"} 1.0',
        'edgeweave_inferences_total{model="m",version="1"} 6.0',
        'edgeweave_stage_seconds_count{model="m",stage="total",version="1"} 3.0',
        'edgeweave_batch_size_bucket{le="2.0",model="m",version="1"} 3.0',
        'edgeweave_queue_requests{model="m",version="1"} 0.0',
        'edgeweave_server_rejects_total{reason="not_found"} 1.0',
        "edgeweave_ready 1.0",
    ):
        assert line in lines


def test_spans(tmp_path: Path) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="the extra `dev` brings it")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    add(tmp_path, "m", models.Affine())
    with (
        BackgroundServer(settings(tmp_path, tracing=True)) as server,
        Client(f"127.0.0.1:{server.port}") as client,
    ):
        client._metadata = (("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),)
        client.infer("m", rows(1))
        with pytest.raises(grpc.RpcError):
            client.infer("nothing", rows(1))
    good, bad = exporter.get_finished_spans()
    assert (good.name, f"{good.context.trace_id:x}") == ("inference/ModelInfer", "a" * 32)
    assert bad.status.status_code is trace.StatusCode.ERROR


def test_export_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "exported_by_test.py"
    source.write_text(
        "import torch\n"
        "def linear():\n"
        "    arguments = {'in_features': 4, 'out_features': 2}\n"
        "    return {'module': torch.nn.Linear(**arguments), 'arguments': arguments,\n"
        "            'examples': [torch.zeros(1, 4)], 'options': {'max_batch_size': 8}}\n"
        "forgotten = {'module': torch.nn.Linear(4, 2), 'arguments': {'in_features': 4}}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    repository = tmp_path / "repository"
    assert main(["export", "exported_by_test:linear", str(repository), "--version", "3"]) == 0
    assert capsys.readouterr().out.strip() == str(repository / "linear" / "3")
    linear = settings(repository, allow_architectures=("torch.nn.modules.linear:Linear",))
    with BackgroundServer(linear) as server, Client(f"127.0.0.1:{server.port}") as client:
        assert server.failures == {}
        assert client.infer("linear", rows(2)).outputs["OUTPUT0"].shape == (2, 2)
    assert main(["export", "exported_by_test:linear", str(repository), "--version", "3"]) == 1
    assert "version must be new" in capsys.readouterr().err
    assert main(["export", "exported_by_test:forgotten", str(repository)]) == 1
    assert "must take its arguments" in capsys.readouterr().err
    assert main(["export", "exported_by_test:nothing", str(repository)]) == 1
    assert "must be module:attribute" in capsys.readouterr().err
