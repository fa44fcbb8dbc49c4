"""`edgeweave explain`: what the compiler pipeline makes of a model."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Compiles a model as `edgeweave.optimize` does, calls it, and prints the graphs, graph breaks,
recompilations, each rewrite with the line of Python that it came from, the engine of each graph and
the time of each stage. Where the model holds message-passing layers of PyG, it begins with what
`edgeweave.accelerate()` makes of each: fused or why not, time and memory. FILE.py:NAME is a pair
(model, inputs) in a Python file, or a function without arguments that returns one; `inputs` is a
tuple of arguments, or a list of such tuples to call one after the other."""

_EPILOG = """\
example, in my_model.py:
  def example():
      return MyModel(), (torch.randn(100, 16), torch.randint(100, (2, 500)))

  edgeweave explain my_model.py
  edgeweave explain my_model.py:example --engine eager --json
  edgeweave explain my_model.py --inference --draw graphs.svg

The file is run."""

_DEFAULT_NAME = "example"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `explain` subcommand.

    Args:
        subparsers: Of the `edgeweave` command's parser.
    """
    parser = subparsers.add_parser(
        "explain",
        help="show what the compiler pipeline makes of a model",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="FILE.py[:NAME]", help=f"NAME: {_DEFAULT_NAME}")
    parser.add_argument(
        "--engine",
        choices=("auto", "onednn", "inductor", "eager"),
        default="auto",
        help="what runs what the passes leave (default: %(default)s)",
    )
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument(
        "--dynamic", action="store_true", help="leave all sizes open from the start"
    )
    parser.add_argument(
        "--inference", action="store_true", help="eval mode, without recording gradients"
    )
    parser.add_argument(
        "--no-layers", action="store_true", help="leave out the layers of PyG, which are timed"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--draw",
        type=Path,
        metavar="FILE",
        help="draw the graphs before and after (.svg, or .png with matplotlib)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Explain.

    Args:
        args: The parsed command line.

    Returns:
        0, or 1 if the file has no such model, or a picture cannot be of that kind.
    """
    try:
        model, inputs = _find(args.model)
    except _NotFoundError as error:
        print(f"edgeweave explain: {error}", file=sys.stderr)
        return 1
    if args.draw is not None and args.draw.suffix not in (".svg", ".png"):
        print(
            f"edgeweave explain: --draw must end in .svg or .png, got {args.draw}", file=sys.stderr
        )
        return 1
    from edgeweave.compile import explain

    if args.inference:
        model.eval()
    layers = None if args.no_layers else _layers_of(model, inputs, args.inference)
    report = explain(
        model,
        inputs,
        precision=args.precision,
        training=False if args.inference else None,
        dynamic=True if args.dynamic else None,
        engine=args.engine,
    )
    if args.json:
        record = report.record()
        record["layers"] = None if layers is None else dataclasses.asdict(layers)
        print(json.dumps(record, indent=2))
    else:
        print(report if layers is None else f"{layers}\n\n{report}")
    if args.draw is not None:
        report.draw(args.draw)
    return 0


def _layers_of(model: Any, inputs: Any, inference: bool) -> Any:
    """Each message-passing layer with PyG's code and accelerated; None without such layers."""
    # A model with PyG's layers has imported it.
    if "torch_geometric" not in sys.modules:
        return None
    import torch
    from torch_geometric.nn import MessagePassing

    if not any(isinstance(module, MessagePassing) for module in model.modules()):
        return None
    from edgeweave.pyg import compare

    first = inputs[0] if isinstance(inputs, list) else inputs
    with torch.set_grad_enabled(not inference):
        return compare(model, *first)


class _NotFoundError(Exception):
    """The command line names no model."""


def _find(text: str) -> tuple[Any, Any]:
    path, name = text, _DEFAULT_NAME
    if not text.endswith(".py"):
        path, _, name = text.rpartition(":")
    file = Path(path)
    if not path.endswith(".py") or not name:
        raise _NotFoundError(f"MODEL must be FILE.py or FILE.py:NAME, got {text!r}")
    if not file.is_file():
        raise _NotFoundError(f"there is no file {path!r}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None, "a path that ends in .py has a loader"
    assert spec.loader is not None, "a path that ends in .py has a loader"
    module = importlib.util.module_from_spec(spec)
    # As `python FILE.py` does: its neighbours are importable, and it can be found by its name.
    sys.path.insert(0, str(file.resolve().parent))
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise _NotFoundError(f"{path} has no {name!r}")
    found = getattr(module, name)
    import torch

    if callable(found) and not isinstance(found, torch.nn.Module):
        found = found()
    pair = isinstance(found, tuple) and len(found) == 2
    if not pair or not isinstance(found[0], torch.nn.Module):
        got = type(found).__name__
        if isinstance(found, tuple):
            got = f"({', '.join(type(item).__name__ for item in found)})"
        raise _NotFoundError(f"{name} must give (model, inputs), got {got}")
    model, inputs = found
    return model, inputs
