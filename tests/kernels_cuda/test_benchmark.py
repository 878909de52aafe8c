"""The benchmark for a GPU, as far as it goes without one."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attention_cuda.py"


def run(*options):
    return subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=False)


def test_its_arguments():
    helped = run("--help")
    assert helped.returncode == 0
    assert "--repro" in helped.stdout
    assert "invalid choice: 'nothing'" in run("--only", "nothing").stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine could run it")
def test_without_a_gpu_its_cases_are_built():
    found = run()
    assert found.returncode == 2
    assert found.stderr.strip().endswith(
        "rows were built and none was measured (none, D 64 S 2048 forward … layer, compiled step)"
    )
