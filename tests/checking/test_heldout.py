"""A sample of machine-made mistakes in implementations that nobody wrote for this; benchmarks/checking.py runs them all."""

import ast
import collections
import warnings

import pytest

from .heldout import HELD, outcomes
from .mutate import FLIP, MUTATIONS, mutants

CODE = """
class Attention:
    def forward(self, x):
        q = self.q_proj(x).view(1, 2, 3, 4).transpose(1, 2)
        scores = q @ q.transpose(-2, -1) / math.sqrt(4)
        scores = scores.masked_fill(self.mask == 0, -1e9)
        return self.o_proj(torch.softmax(scores, dim=-1) @ q)
"""


@pytest.mark.parametrize("name", HELD)
def test_mutants_of_held_out_implementations_are_named(tmp_path, name):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kinds = collections.Counter(o.kind for o in outcomes(name, tmp_path, every=6, first=1))
    judged = kinds["named"] + kinds["missed"] + kinds["other"]
    assert kinds["named"] >= judged - 1
    assert sum(kinds.values()) >= 1


def test_mutants_are_python_and_differ_in_one_place():
    plain = ast.unparse(ast.parse(FLIP + CODE))
    made = list(mutants(CODE, {"Attention"}))
    assert {m.mutation for m in made} == {
        "split by reshape", "softmax over queries", "softmax over heads", "softmax gone", "softmax twice", "root gone", "scale gone",
        "scale inverted", "output projection gone", "mask backwards", "mask tiny", "masked_fill lost",
    }  # fmt: skip
    for mutant in made:
        changed = [a for a, b in zip(mutant.code.splitlines(), plain.splitlines(), strict=True) if a != b]
        assert len(changed) == 1
        assert mutant.line >= 3
    assert len(made) == len({m.code for m in made})


def test_every_mutation_names_mistakes_of_the_catalogue():
    from multihead.checking.mistakes import CATALOGUE

    assert {name for _, expected in MUTATIONS.values() for name in expected} <= set(CATALOGUE)
