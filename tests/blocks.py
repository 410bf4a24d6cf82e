"""Blocks of code on pages and in docstrings, and running them."""

import ast
import pathlib
import re
import textwrap

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(
    r"^```(?P<kind>\w*)(?: title=\"(?P<title>[\w.]+)\")?\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_DOCSTRING = re.compile(r"```python\n(.*?)```", re.DOTALL)


def on_page(page, kind):
    """Yields title and code of each block of a kind.

    Empty lines stand in front of the code, so that its line numbers are those
    of the page.
    """
    text = page.read_text()
    for fence in _FENCE.finditer(text):
        if fence["kind"] == kind:
            above = text[: fence.start("code")].count("\n")
            yield fence["title"], "\n" * above + fence["code"]


def in_docstrings(package):
    """Yields module, name of the function or class, and code of each block."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                for code in _DOCSTRING.findall(ast.get_docstring(node) or ""):
                    yield module, node.name, textwrap.dedent(code)


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
