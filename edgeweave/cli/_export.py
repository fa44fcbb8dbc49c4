"""`edgeweave export`: write a trained module as a model that `edgeweave serve` loads."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from pathlib import Path
from typing import Any

__all__ = ["add_parser", "run"]

_DESCRIPTION = """\
Writes DIR/NAME/VERSION from a Python object. MODEL is `module:attribute`: a dictionary with the
keyword arguments of `edgeweave.inference_server.export_model` (at least `module`), or a function
without arguments that returns one. The module is rebuilt from its class, arguments and weights, and
must give the same results as the original for the `examples`."""

_EPILOG = """\
example, in my_models.py:
  def classifier():
      arguments = {"in_features": 4, "out_features": 2}
      module = torch.nn.Linear(**arguments)
      module.load_state_dict(torch.load("trained.pt", weights_only=True))
      return {"module": module, "arguments": arguments, "examples": [torch.zeros(1, 4)],
              "options": {"max_batch_size": 64}}

  edgeweave export my_models:classifier models/
  edgeweave serve --model-repository models/ --allow-architecture torch.nn.modules.linear:Linear

The server builds only classes that it knows (docs/serving.md) or that are allowed by name."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the `export` subcommand.

    Args:
        subparsers: Of the `edgeweave` command's parser.
    """
    parser = subparsers.add_parser(
        "export",
        help="write a model for `edgeweave serve`",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="module:attribute")
    parser.add_argument("repository", type=Path, metavar="DIR", help="folder of models")
    parser.add_argument("--name", help="the model's name (the attribute's)")
    parser.add_argument("--version", type=int, help="its version (1)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Export.

    Args:
        args: The parsed command line.

    Returns:
        0, or 1 if the model cannot be found or written.
    """
    from edgeweave.inference_server import ModelConfigError, ServingError, export_model

    try:
        attribute, arguments = _find(args.model)
        known = set(inspect.signature(export_model).parameters) - {"repository"}
        unknown = ", ".join(sorted(str(key) for key in arguments.keys() - known))
        if unknown:
            raise ModelConfigError(
                f"MODEL must give keys among {', '.join(sorted(known))}, got {unknown}"
            )
        if args.version is not None:
            arguments["version"] = args.version
        name = arguments.pop("name", attribute)
        module = arguments.pop("module")
        folder = export_model(module, args.repository, args.name or name, **arguments)
    except (ModelConfigError, ServingError) as error:
        print(f"edgeweave export: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0


def _find(text: str) -> tuple[str, dict[str, Any]]:
    from edgeweave.inference_server import ModelConfigError

    module_name, _, attribute = text.partition(":")
    if not module_name or not attribute:
        raise ModelConfigError(f"MODEL must be module:attribute, got {text!r}")
    # As `python -m` does: modules of the current folder are importable.
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise ModelConfigError(f"MODEL must be module:attribute, got {text!r} ({error})") from error
    arguments = found() if callable(found) else found
    if not isinstance(arguments, dict):
        raise ModelConfigError(
            f"MODEL must give a dictionary with `module`, got {type(arguments).__name__}"
        )
    if "module" not in arguments:
        keys = ", ".join(map(str, arguments))
        got = f"one with {keys}" if keys else "an empty one"
        raise ModelConfigError(f"MODEL must give a dictionary with `module`, got {got}")
    return attribute, dict(arguments)
