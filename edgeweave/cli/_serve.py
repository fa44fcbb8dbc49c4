"""`edgeweave serve`: a gRPC server of a folder of models."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Serves a repository of models by the Open Inference Protocol v2 over gRPC, as Triton's clients and
KServe speak it. SIGTERM lets the requests inside finish. docs/serving.md has the settings file,
deployment and tuning."""

_EPILOG = """\
examples:
  edgeweave export my_models:classifier models/        write a model's folder
  edgeweave serve --model-repository models/ --check   load everything, answer, exit
  edgeweave serve --model-repository models/ --allow-architecture torch.nn.modules.linear:Linear
                                                       a class that is not built in
  edgeweave serve --model-repository models/           serve on 127.0.0.1:8001"""

# Options whose names are those of `ServerSettings`, with type and help.
_VALUES: tuple[tuple[str, Any, str], ...] = (
    ("host", str, "address to listen on (127.0.0.1)"),
    ("port", int, "port of gRPC (8001); 0 for any"),
    ("metrics-port", int, "port of Prometheus metrics (8002); -1 for none"),
    ("metrics-host", str, "address of the metrics (127.0.0.1)"),
    ("workers", int, "processes that share the port (1)"),
    ("instances", int, "threads per model (1)"),
    ("threads", int, "torch threads per instance (an equal share)"),
    ("tls-cert", str, "certificate chain, PEM"),
    ("tls-key", str, "private key, PEM"),
    ("client-ca", str, "certificates that clients' must be signed by, PEM"),
    ("token-file", str, "file with a bearer token per line"),
    ("transport", str, "http2, our own, or grpcio, the server of grpc.aio (http2)"),
    ("drain-s", float, "time for requests to finish after SIGTERM (20)"),
)
_SWITCHES: tuple[tuple[str, str], ...] = (
    ("insecure", "serve other machines without TLS"),
    ("allow-repository-control", "take load and unload requests"),
    ("allow-graph-updates", "take changes of resident graphs"),
    ("tracing", "make OpenTelemetry spans"),
)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `serve` subcommand.

    Args:
        subparsers: Of the `edgeweave` command's parser.
    """
    parser = subparsers.add_parser(
        "serve",
        help="serve models over gRPC",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings, TOML or JSON")
    parser.add_argument("--model-repository", metavar="DIR", help="folder of models")
    parser.add_argument("--model", action="append", metavar="NAME", help="only this model")
    for name, kind, text in _VALUES:
        parser.add_argument(f"--{name}", type=kind, metavar="X", help=text)
    for name, text in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true", default=None, help=text)
    parser.add_argument(
        "--max-message-bytes", type=int, metavar="N", help="the same as --limit message_bytes=N"
    )
    parser.add_argument(
        "--limit", action="append", type=_pair, metavar="NAME=N", help="see docs/serving.md"
    )
    parser.add_argument(
        "--allow-architecture",
        action="append",
        metavar="MODULE:CLASS",
        help="also build models of this class, beyond the built-in ones; repeat for several",
    )
    parser.add_argument(
        "--trust-model",
        action="append",
        type=_pair,
        metavar="NAME=SHA256",
        help="load the model's .pt2 archive, which is executable content",
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="info"
    )
    parser.add_argument("--check", action="store_true", help="load everything, answer, exit")
    parser.add_argument("--worker-index", type=int, help=argparse.SUPPRESS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve.

    Args:
        args: The parsed command line.

    Returns:
        0, or 1 for wrong settings, a failed check, or requests that did not finish.
    """
    import dataclasses

    from edgeweave.inference_server import ModelConfigError
    from edgeweave.inference_server._logs import configure_logs
    from edgeweave.inference_server._process import check, end_with_parent, serve
    from edgeweave.inference_server._settings import read_settings
    from edgeweave.inference_server._workers import supervise

    configure_logs(args.log_format, args.log_level)
    try:
        settings = read_settings(args.config, _overrides(args))
        if args.check:
            return _report(check(settings))
        if args.worker_index is not None:
            end_with_parent()
            own = dataclasses.replace(settings, reuse_port=True, worker_index=args.worker_index)
            return serve(own)
        if settings.workers > 1:
            return supervise(settings, ["-m", "edgeweave", *sys.argv[1:]])
        return serve(settings)
    except (ModelConfigError, ValueError) as error:
        print(f"edgeweave serve: {error}", file=sys.stderr)
        return 1


def _overrides(args: argparse.Namespace) -> dict[str, Any]:
    names = [name.replace("-", "_") for name, *_ in (*_VALUES, *_SWITCHES)]
    given = {name: getattr(args, name) for name in names}
    limits = {name: _integer(name, value) for name, value in args.limit or []}
    if args.max_message_bytes is not None:
        limits["message_bytes"] = args.max_message_bytes
    return {
        **given,
        "model_repository": args.model_repository,
        "models": args.model,
        "limits": limits or None,
        "allow_architectures": args.allow_architecture,
        "trust_models": dict(args.trust_model) if args.trust_model else None,
    }


def _report(problems: dict[str, str]) -> int:
    for name, problem in problems.items():
        print(f"edgeweave serve: {name or 'server'}: {problem}", file=sys.stderr)
    if not problems:
        print("all models load and answer")
    return int(bool(problems))


def _pair(text: str) -> tuple[str, str]:
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise argparse.ArgumentTypeError(f"must be NAME=VALUE, got {text!r}")
    return name, value


def _integer(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"--limit {name} must be an integer, got {text!r}") from None
