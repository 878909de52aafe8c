"""What every test shares: the device, the kinds of masks, seeded generators."""

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

settings.register_profile("ci", max_examples=60, deadline=None, derandomize=True)
settings.load_profile("ci")

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")])


@pytest.fixture(params=["cpu", CUDA])
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    """A test leaves torch.compile as it was: whoever turns it off makes every later test of it a test of nothing."""
    yield
    frames = sys.modules.get("torch._dynamo.eval_frame")
    assert frames is None or frames._stance.stance == "default"


def pytest_configure() -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))))
