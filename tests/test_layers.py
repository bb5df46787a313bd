"""The house rules: nothing on a lower layer imports a higher one, the package never imports itself by name, and one table has all
environment variables.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

from needle.config import VARIABLES

PACKAGE = Path(__file__).parent.parent / "python" / "needle"
LAYERS = [
    {"dtype", "errors", "config", "files", "locks", "objects", "command_line"}, {"backend_ndarray"}, {"backend_numpy"}, {"backend_selection"}, {"graph", "autograd", "backward"}, {"init"}, {"ops"},
    {"nn"}, {"amp", "optim", "data", "checkpoints", "testing"}, {"memory"}, {"models"}, {"__version__"}, {"__main__"},
]  # fmt: skip
# Upwards go Tensor's operators, which are ops, and sums of gradients.
ALLOWED = {("autograd", "ops"), ("backward", "ops")}


def layer(name):
    return next(i for i, names in enumerate(LAYERS) if name in names)


def imported(path):
    """Names of top-level parts of the package that the file imports."""
    depth = len(path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == depth:
            yield from [node.module.split(".")[0]] if node.module else [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            assert not any(alias.name.split(".")[0] == "needle" for alias in node.names), path
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert node.module.split(".")[0] != "needle", path


def test_imports_go_downwards():
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for name in imported(path):
            if layer(name) > layer(own) and (own, name) not in ALLOWED:
                wrong.append(f"{path.relative_to(PACKAGE)} imports {name}")
    assert wrong == []


def test_only_backend_ndarray_touches_handles():
    users = {p.relative_to(PACKAGE).parts[0] for p in PACKAGE.rglob("*.py") if "._handle" in p.read_text()}
    assert users == {"backend_ndarray"}


def test_every_environment_variable_is_in_the_table():
    sources = [*PACKAGE.rglob("*.py"), *(path for path in (PACKAGE.parent.parent / "src").rglob("*") if path.is_file())]
    named = {name for path in sources for name in re.findall(r'"(NEEDLE_[A-Z0-9_]+)"', path.read_text())}
    assert named == set(VARIABLES)


def test_import_needs_numpy_alone():
    code = (
        "import sys; sys.path.insert(0, 'python'); import needle; "
        "print([m for m in ('tokenizers', 'plotly', 'yaml', 'rich', 'safetensors', 'ml_dtypes', 'torch') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent.parent, check=True)
    assert out.stdout == "[]\n"
