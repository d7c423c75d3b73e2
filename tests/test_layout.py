"""What would rot unseen: the top level, import directions, names that shadow the standard library, imports of torch."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOP_LEVEL = {"pyproject.toml", "launcher", "models", "tests", "launch.sh", "README.md", "LICENSE"}
BASE = {
    "launcher",
    *(f"launcher.{name}" for name in ("errors", "config", "config_sections", "config_errors", "topology")),
}
# `--help`, a bad option, the parent of a run and the commands that look at machines answer without loading torch.
TORCH_FREE = (
    *sorted(BASE),
    "launcher.cli",
    "launcher.main",
    "launcher.worker",
    "launcher.supervisor",
    "launcher.compile_cache",
    "launcher.cache_command",
    "launcher.environment",
    "launcher.doctor",
    "launcher.balance",
    "launcher.plan",
)
HEAVY = {"torch", "transformers", "datasets", "accelerate", "matplotlib"}
# Who may import the roles and the words of the command line.
TOP = {"launcher.main", "launcher.worker", "launcher.commands"}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {name_of(path): path for package in ("launcher", "models") for path in (ROOT / package).glob("*.py")}


def statements(body: Iterable[ast.stmt], deep: bool) -> Iterator[ast.stmt]:
    """Statements that run at import; with `deep` those in functions too. Never those under TYPE_CHECKING."""
    for node in body:
        yield node
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from statements(node.orelse, deep)
        elif deep or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            inner = [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
            yield from inner if deep else statements(getattr(node, "body", []), deep)


@functools.cache
def imports(module: str, deep: bool = False) -> frozenset[str]:
    """Modules that `module` imports, ours by their full names, others by their first."""
    found: set[str] = set()
    for node in statements(ast.parse(SOURCES[module].read_text()).body, deep):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    ours = {name for name in found if name in SOURCES}
    return frozenset(ours | {name.partition(".")[0] for name in found}) - {module, "launcher", "models"}


def imported_with(module: str) -> set[str]:
    """Everything that importing `module` imports, by the sources."""
    seen: set[str] = set()
    open_ends = [module]
    while open_ends:
        name = open_ends.pop()
        if name not in seen:
            seen.add(name)
            open_ends += imports(name) if name in SOURCES else ()
    return seen


def test_the_top_level_holds_nothing_else() -> None:
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT)
    if listed.returncode:
        pytest.skip("not a git checkout")
    top = {path.partition("/")[0] for path in listed.stdout.splitlines()}
    assert {name for name in top if not name.startswith(".")} - TOP_LEVEL == set()


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_no_module_shadows_the_standard_library(module: str) -> None:
    # torchrun puts launcher/ itself on the path.
    assert module.rpartition(".")[2] not in sys.stdlib_module_names


@pytest.mark.parametrize("module", sorted(name for name in SOURCES if name.startswith("models")))
def test_models_never_import_the_launcher(module: str) -> None:
    assert not {name for name in imports(module, deep=True) if name.startswith("launcher")}


@pytest.mark.parametrize("module", sorted(BASE))
def test_the_base_stands_alone(module: str) -> None:
    assert {name for name in imports(module) if name in SOURCES} <= BASE


def test_imports_go_one_way() -> None:
    TopologicalSorter({name: imports(name) & set(SOURCES) for name in SOURCES}).prepare()  # raises on a cycle


def test_only_the_top_imports_roles_and_commands() -> None:
    upper = {name for name in SOURCES if name.endswith(("_role", "_command"))} | TOP
    for module in set(SOURCES) - TOP:
        assert imports(module, deep=True) & upper <= {module}, module


@pytest.mark.parametrize("module", TORCH_FREE)
def test_answers_without_torch(module: str) -> None:
    assert not imported_with(module) & HEAVY


def test_the_walk_over_imports_sees_torch() -> None:
    assert "torch" in imported_with("launcher.drafter_role")


def test_a_bad_option_is_refused_in_a_second_without_torch() -> None:
    program = "import sys, runpy\nsys.argv = ['launcher/main.py', '--train.lrr', '1']\n"
    program += "try: runpy.run_path('launcher/main.py', run_name='__main__')\n"
    program += "finally: assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=30)
    assert done.returncode == 78, done.stderr
    assert "train.lr" in done.stderr
