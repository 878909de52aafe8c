"""The benchmark for a GPU, as far as it goes without one; what importing the package costs."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from multihead.kernels import lazily

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


def test_the_kernels_for_cuda_are_read_when_asked_for():
    code = (
        "import sys, multihead as mh, torch; from multihead.kernels import lazily; "
        "print('multihead.kernels.runs' in sys.modules, 'torch._dynamo' in sys.modules); "
        "q = torch.zeros(1, 1, 4, 8); print(mh.plan(q, q, q).refusals['packed'], lazily('flex') is mh.plan.__globals__['KERNELS']['flex']); "
        "print('multihead.kernels.runs' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["False False", "varlen attention runs on CUDA only True", "True"]
    with pytest.raises(ModuleNotFoundError, match="there is no file for the kernel 'nothing'"):
        lazily("nothing")
