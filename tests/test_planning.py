"""`multihead plan`: a call that is described, for devices that need not be there."""

import pytest
import torch

import multihead as mh
from multihead import cli


def plan(capsys, *arguments):
    status = cli.main(["plan", *arguments])
    found = capsys.readouterr()
    return status, found.out, found.err


def test_a_plan_in_the_shell_is_the_plan_in_python(capsys):
    status, out, _ = plan(capsys, "--q", "2,16,512,128", "--dtype", "bf16", "--mask", "causal & window(100)")
    q = torch.empty(2, 16, 512, 128, dtype=torch.bfloat16, device="meta")
    assert status == 0
    assert out == f"{mh.plan(q, q, q, mask=mh.Causal() & mh.Window(100))}\n"


def test_keys_of_another_shape(capsys):
    status, out, _ = plan(capsys, "--q", "1,8,3,64", "--kv", "2,100,32", "--dropout", "0.1", "--softcap", "30", "--lse")
    assert status == 0
    assert "2,400 of 2,400 (100.0%) may attend" in out
    assert "not fused" in out


def test_a_gpu_need_not_be_there(capsys):
    status, out, _ = plan(capsys, "--device", "cuda", "--q", "2,16,8192,128", "--dtype", "bf16", "--mask", "causal")
    assert status == 0
    assert out.startswith("kernel         fused\n")
    assert "not blocked    it is for CPU, and the call is on cuda" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--q", "2,16"], "multihead plan: --q must be whole numbers ≥ 1, batch,heads,q_len,head_dim; it is '2,16'"),
        (["--q", "2,x,3,4"], "it is '2,x,3,4'"),
        (["--q", "1,2,3,4", "--kv", "0,3"], "--kv must be whole numbers ≥ 1, kv_heads,kv_len[,v_dim]; it is '0,3'"),
        (["--q", "1,3,3,4", "--kv", "2,3"], "heads (3) must be a multiple of kv_heads (2)"),
        (["--q", "1,2,3,4", "--mask", "causl"], "did you mean causal?"),
        (["--q", "1,2,3,4", "--mask", "lengths([1, 2])"], "the mask was made for batch 2 but the call has batch 1"),
        (["--q", "1,2,3,4", "--device", "tpu"], "--device must be cpu or cuda; it is 'tpu'"),
        (["--q", "1,2,3,4", "--dropout", "2"], "dropout is the probability to drop a weight"),
        (["--q", "1,2,3,4", "--softcap", "3", "--kernel", "fused"], 'kernel="fused" cannot do this: SDPA has no softcap'),
    ],
    ids=str,
)
def test_what_cannot_be_planned_is_one_sentence(capsys, arguments, said):
    status, out, err = plan(capsys, *arguments)
    assert (status, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
