"""The code on the pages runs, and gives what the pages say."""

import ast
import pathlib
import re

import keras
import pytest

import keras_meshdist as kmd

ROOT = pathlib.Path(__file__).parent.parent
FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = [
    path
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if FENCE.search(path.read_text())
]


def run(source, namespace, name):
    """Runs statements, and checks those that end in `# -> value`."""
    lines = source.splitlines()
    for statement in ast.parse(source).body:
        last = lines[statement.end_lineno - 1]
        _, arrow, wanted = last.partition("# -> ")
        if isinstance(statement, ast.Expr) and arrow:
            expression = ast.Expression(statement.value)
            got = eval(compile(expression, name, "eval"), namespace)
            assert repr(got) == wanted, f"{name}: {last.strip()}"
        else:
            module = ast.Module([statement], type_ignores=[])
            exec(compile(module, name, "exec"), namespace)


@pytest.fixture
def undo():
    keras.utils.set_random_seed(0)
    yield
    keras.distribution.set_distribution(None)
    keras.utils.clear_session()
    kmd.keras_hooks.install()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_code_on_page(page, undo):
    text = page.read_text()
    namespace = {"__name__": "__main__"}
    for block in FENCE.finditer(text):
        # Empty lines in front make the line numbers those of the page.
        above = text[: block.start(1)].count("\n")
        run("\n" * above + block[1], namespace, str(page.relative_to(ROOT)))


def test_local_links_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    pages += (ROOT / "benchmarks").glob("*.md")
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if re.match(r"https?:|#", link):
                continue
            target = page.parent / link.partition("#")[0]
            assert target.exists(), f"{page.name} links to {link}"
