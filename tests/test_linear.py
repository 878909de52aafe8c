"""nn.Linear by another library: the same numbers and gradients, and the module itself wherever more is to happen."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from multihead.kernels import linear as room
from multihead.kernels import products
from multihead.kernels.linear import linear


@pytest.fixture(autouse=True)
def _onednn(monkeypatch):
    before = products.use("onednn")
    monkeypatch.setattr(room, "LEAST", 1)
    yield
    products.use(before)


@pytest.fixture
def taken(monkeypatch):
    """How often the other library was asked."""
    calls = []
    original = products.affine
    monkeypatch.setattr(products, "affine", lambda *a: calls.append(1) or original(*a))
    return calls


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 5, 7), (11, 7), (7,), (0, 7)], ids=str)
def test_numbers_and_gradients_are_the_modules(bias, shape, taken):
    module, x = nn.Linear(7, 13, bias), torch.randn(shape, requires_grad=True)
    dout = torch.randn(*shape[:-1], 13)
    results = []
    for call in (linear, lambda m, x: m(x)):
        y = call(module, x)
        results.append((y, *torch.autograd.grad((y * dout).sum(), [x, *module.parameters()])))
    torch.testing.assert_close(*results)
    assert taken == ([1] if x.numel() else [])
    with torch.no_grad():
        torch.testing.assert_close(linear(module, x), module(x))
    y = linear(module, x.detach())
    assert y.requires_grad
    (dw,) = torch.autograd.grad(y.sum(), module.weight)
    torch.testing.assert_close(dw, torch.autograd.grad(module(x).sum(), module.weight)[0])


def test_it_can_be_differentiated_twice():
    module, x = nn.Linear(3, 2).double().float(), torch.randn(4, 3, requires_grad=True)
    results = []
    for call in (linear, lambda m, x: m(x)):
        (dx,) = torch.autograd.grad(call(module, x).pow(3).sum(), x, create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), [x, module.weight]))
    torch.testing.assert_close(*results)


def hooked(module):
    module.register_forward_hook(lambda m, args, out: out * 2)
    return module


def patched(module):
    module.forward = lambda x: nn.functional.linear(x, module.weight) * 3
    return module


class Other(nn.Linear):
    def forward(self, x):
        return super().forward(x) + 1


@pytest.mark.parametrize(
    "module",
    [
        hooked(nn.Linear(7, 5)),
        patched(nn.Linear(7, 5)),
        Other(7, 5),
        parametrizations.weight_norm(nn.Linear(7, 5)),
        nn.Sequential(nn.Linear(7, 5), nn.ReLU()),
        nn.Linear(7, 5).double(),
        nn.Linear(7, 5).bfloat16(),
    ],
    ids=lambda m: type(m).__name__,
)
def test_whatever_is_more_than_a_linear_is_called_itself(module, taken):
    x = torch.randn(2, 7, dtype=next(module.parameters()).dtype)
    assert torch.equal(linear(module, x), module(x))
    assert taken == []


def test_modes_of_torch_are_left_to_torch(taken):
    module, x = nn.Linear(7, 5), torch.randn(2, 7)
    with torch.autocast("cpu", torch.bfloat16):
        assert linear(module, x).dtype == torch.bfloat16
    torch.testing.assert_close(torch.func.vmap(lambda x: linear(module, x))(x), module(x))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        assert torch.autograd.forward_ad.unpack_dual(linear(module, dual)).tangent is not None
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        linear(module, torch.randn(2, 6))
    handle = nn.modules.module.register_module_forward_hook(lambda m, args, out: out * 2)
    try:
        assert torch.equal(linear(module, x), module(x))
    finally:
        handle.remove()
    products.use("torch")
    linear(module, x)
    assert taken == []
