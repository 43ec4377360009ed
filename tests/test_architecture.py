"""Dependencies point one way, and the library needs torch alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fop

ROOT = Path(fop.__file__).parent

# Each part of the library imports those before it, and itself. A new one is put where it belongs.
ORDER = [
    "_torch",
    "validate",
    "schedules",
    "presets",
    "slices",
    "trainers",
    "linalg",
    "projection",
    "scaling",
    "likelihood",
    "loss_reading",
    "loss_graph",
    "layers",
    "capture",
    "entries",
    "curvature",
    "rules",
    "costs",
    "settings",
    "layer",
    "discovery",
    "groups",
    "messages",
    "distributed",
    "checkpoints",
    "context",
    "skips",
    "disabling",
    "collect",
    "update",
    "replay",
    "trust",
    "sizing",
    "directions",
    "refresh",
    "step",
    "optimizer",
    "api",
    "integrations",
    "diagnostics",
    "testing",
    "__init__",
]

# Packages besides torch: only where a user of that package asks for its glue.
FOREIGN = {"integrations/lightning.py": {"lightning"}}


def imported_parts(path: Path) -> tuple[set[str], set[str]]:
    """Parts of fop, and other packages, that a file imports."""
    ours: set[str] = set()
    others: set[str] = set()
    tree = ast.parse(path.read_text())
    # What is imported for annotations alone is no dependency.
    tree.body = [node for node in tree.body if "TYPE_CHECKING" not in ast.unparse(node)[:16]]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.module == "fop":
                names = [f"fop.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            head, _, rest = name.partition(".")
            if head == "fop":
                ours.add(rest.partition(".")[0])
            else:
                others.add(head)
    return ours, others


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_follow_the_architecture(path: Path) -> None:
    part = path.relative_to(ROOT).parts[0].removesuffix(".py")
    ours, others = imported_parts(path)
    assert ours <= set(ORDER[: ORDER.index(part) + 1])
    foreign = FOREIGN.get(path.relative_to(ROOT).as_posix(), set())
    assert others <= {"torch", *foreign, *sys.stdlib_module_names}


def test_the_library_imports_no_more_than_torch_does() -> None:
    """Importing fop after torch brings in nothing but fop and the standard library."""
    code = (
        "import sys, torch; before = set(sys.modules); import fop; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(sorted(new - set(sys.stdlib_module_names) - {'fop', 'torch'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names() -> None:
    names = "FOP KFAC LayerAdapter diagnostics noise_scale presets register_layer "
    names += "scale_to_batch"
    assert sorted(fop.__all__) == names.split()
    assert set(dir(fop)) == {*fop.__all__, "__version__"}
    assert (ROOT / "py.typed").exists()
