"""Nothing in the sources runs what comes from elsewhere: no pickle, no text that is executed, no shell."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import hora

SOURCES = sorted(Path(str(hora.__file__)).parent.rglob("*.py"))

MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
CALLS = {
    "eval",
    "exec",
    "compile",
    "__import__",
    "os.system",
    "os.popen",
    "torch.load",
    "torch.save",
    "yaml.load",
    "yaml.unsafe_load",
    "yaml.full_load",
}
OBJECTS = {
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list",
}  # fmt: skip

ALLOWED = {
    # A file of torch.save is read when the user asks for it, by the loader for weights alone.
    ("train/weights.py", "torch.load"),
    # Objects that the typed encoding cannot say, where the user has allowed it by HORA_HVD_ALLOW_PICKLE=1.
    ("hvd/pickled.py", "pickle"),
    # Test bodies are loaded with pytest's assertions.
    ("testing/bodies.py", "exec"),
    ("testing/bodies.py", "compile"),
}


def forbidden(tree: ast.AST) -> Iterator[str]:
    """What must not be there, by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in MODULES:
                yield node.module
            if node.module.startswith("torch.distributed"):
                yield from (alias.name for alias in node.names if alias.name in OBJECTS)
        elif isinstance(node, ast.Call):
            yield from _forbidden_call(node)


def _forbidden_call(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    owner, _, last = name.rpartition(".")
    words = {word.arg: ast.unparse(word.value) for word in call.keywords}
    if name in CALLS:
        yield name
    if last in OBJECTS and owner in ("dist", "torch.distributed", "distributed"):
        yield name
    yield from (f"{word}={words[word]}" for word in ("shell", "allow_pickle") if words.get(word, "False") != "False")
    if words.get("weights_only") == "False":
        yield "weights_only=False"


def test_the_sources_have_none() -> None:
    root = Path(str(hora.__file__)).parent
    found = {(path.relative_to(root).as_posix(), name) for path in SOURCES for name in forbidden(ast.parse(path.read_bytes()))}
    assert found == ALLOWED


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import pickle", "pickle"),
        ("from pickle import loads", "pickle"),
        ("import torch\ntorch.load('x', weights_only=False)", "weights_only=False"),
        ("eval(text)", "eval"),
        ("subprocess.run('ls', shell=True)", "shell=True"),
        ("numpy.load(path, allow_pickle=True)", "allow_pickle=True"),
        ("yaml.load(text, Loader=yaml.Loader)", "yaml.load"),
        ("dist.all_gather_object(told, mine)", "dist.all_gather_object"),
        ("from torch.distributed import broadcast_object_list", "broadcast_object_list"),
    ],
)
def test_planted_ones_are_found(text: str, name: str) -> None:
    assert name in list(forbidden(ast.parse(text)))
    assert not list(forbidden(ast.parse("json.loads(text)\nsubprocess.run(['ls'])\nhora.all_gather_object(1)\nmodel.eval()")))
