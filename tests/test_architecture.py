"""Dependencies point one way, and the library needs torch alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fop

ROOT = Path(fop.__file__).parent

# What each module may import of fop, directly. A new module is added here with what it needs.
ALLOWED = {
    "_torch": set(),
    "validate": set(),
    "settings": {"scaling", "validate"},
    "linalg": {"linalg"},
    "costs": {"linalg"},
    "scaling": set(),
    "schedules": set(),
    "shards": set(),
    "slices": {"shards"},
    "entries": {"linalg"},
    "checkpoints": {"capture", "entries", "settings"},
    "stagger": set(),
    "trainers": set(),
    "projection": {"settings"},
    "layers": {"layers"},
    "curvature": {"capture", "curvature", "entries", "linalg", "projection"},
    "capture": {"_torch", "capture", "layers", "linalg", "settings", "shards", "slices"},
    "groups": {"_torch", "layers", "settings", "shards"},
    "rules": {"capture", "scaling"},
    "skips": {"linalg", "scaling", "shards"},
    "block": {"capture", "costs", "curvature", "layers", "scaling", "settings", "slices"},
    "checks": {"block", "distributed"},
    "notices": {"block", "scaling"},
    "renewal": {"block", "capture", "curvature", "linalg", "scaling"},
    "distributed": {
        "_torch",
        "block",
        "capture",
        "costs",
        "distributed",
        "linalg",
        "scaling",
        "settings",
        "shards",
    },
    "engine": {
        "block",
        "capture",
        "checkpoints",
        "checks",
        "curvature",
        "distributed",
        "linalg",
        "notices",
        "projection",
        "renewal",
        "rules",
        "scaling",
        "settings",
        "shards",
        "skips",
        "stagger",
    },
    "optimizer": {
        "_torch",
        "capture",
        "checkpoints",
        "distributed",
        "engine",
        "groups",
        "layers",
        "rules",
        "scaling",
        "settings",
        "slices",
        "trainers",
    },
    "integrations": {"optimizer"},
    "diagnostics": {
        "block",
        "curvature",
        "engine",
        "linalg",
        "optimizer",
        "projection",
        "scaling",
    },
    "__init__": {"diagnostics", "optimizer", "schedules"},
}

# Packages besides torch: only where a user of that package asks for its glue.
FOREIGN = {"integrations/lightning.py": {"lightning"}}


def imported_parts(path: Path) -> tuple[set[str], set[str]]:
    """Parts of fop, and other packages, that a file imports."""
    ours: set[str] = set()
    others: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
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
    assert ours <= ALLOWED[part]
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
    assert sorted(fop.__all__) == ["FOP", "KFAC", "diagnostics", "noise_scale", "scale_to_batch"]
    assert set(dir(fop)) == {*fop.__all__, "__version__"}
    assert (ROOT / "py.typed").exists()
