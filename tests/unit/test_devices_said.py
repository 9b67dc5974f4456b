"""Tensors that Hora makes for itself are where it wants them, also where `torch.set_default_device` names another device."""

import ast
from collections.abc import Iterator
from pathlib import Path

import hora

ROOT = Path(str(hora.__file__)).parent
SOURCES = [path for folder in ("comm", "sync", "data", "train", "hvd") for path in sorted((ROOT / folder).rglob("*.py"))]
FACTORIES = {
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "normal", "ones", "rand", "randint", "randn",
    "randperm", "scalar_tensor", "sparse_coo_tensor", "tensor", "zeros",
}  # fmt: skip


def without_device(tree: ast.AST) -> Iterator[int]:
    """The lines that make a tensor and do not say where."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and not any(word.arg in ("device", None) for word in node.keywords):
            owner, _, name = ast.unparse(node.func).rpartition(".")
            if owner == "torch" and name in FACTORIES:
                yield node.lineno


def test_the_sources_say_on_which_device_a_tensor_is_made() -> None:
    found = [f"{path.relative_to(ROOT)}:{line}" for path in SOURCES for line in without_device(ast.parse(path.read_bytes()))]
    assert found == []
    assert list(without_device(ast.parse("torch.ones(2)\ntorch.ones(2, device=here)\ntorch.ones_like(x)\nx.new_empty(2)"))) == [1]
