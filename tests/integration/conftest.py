"""Fixtures of the tests that run the whole."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import _serving_models as models
import pytest


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Shuts the gate of `Gated`, and opens it in the end."""
    models.Gated.gate.clear()
    models.Gated.entered.clear()
    yield models.Gated.gate
    models.Gated.gate.set()
