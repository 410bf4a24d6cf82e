"""The code on the pages runs, and gives what the pages say."""

import ast
import os
import re
import runpy
import shlex
import subprocess
import sys

import keras
import pytest

import keras_meshdist as kmd
from tests.blocks import PAGES, ROOT, on_page, run
from tests.clusters import local_only


def with_blocks(kind):
    return [page for page in PAGES if any(True for _ in on_page(page, kind))]


def name_of(page):
    return page.name


@pytest.fixture
def undo():
    keras.utils.set_random_seed(0)
    yield
    keras.distribution.set_distribution(None)
    keras.utils.clear_session()
    kmd.keras_hooks.install()


@pytest.mark.parametrize("page", with_blocks("python"), ids=name_of)
def test_code_on_page(page, undo):
    namespace = {"__name__": "__main__"}
    for title, code in on_page(page, "python"):
        if not title:
            run(code, namespace, str(page.relative_to(ROOT)))


def files_and_commands(page):
    """The scripts on a page by their names, and the commands for them."""
    blocks = list(on_page(page, "python"))
    files = {title: code for title, code in blocks if title}
    if page.name == "README.md":
        files = {"train.py": blocks[0][1]}
    lines = "".join(code for _, code in on_page(page, "sh")).split("\n")
    return files, [
        line for line in lines if files and re.match("(meshdist|python) ", line)
    ]


SCRIPTS = [
    (page, command) for page in PAGES for command in files_and_commands(page)[1]
]


@pytest.mark.extra
@local_only
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("page", "command"), SCRIPTS, ids=[f"{p.name}: {c}" for p, c in SCRIPTS]
)
def test_command_on_page(page, command, tmp_path):
    for title, code in files_and_commands(page)[0].items():
        (tmp_path / title).write_text(code)
    program, *arguments = shlex.split(command)
    module = ["-m", "keras_meshdist"] if program == "meshdist" else []
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    subprocess.run(
        [sys.executable, *module, *arguments],
        cwd=tmp_path,
        env={
            **os.environ,
            "KERAS_BACKEND": "jax",
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        },
        check=True,
    )


def test_every_script_on_a_page_is_run():
    ran = {name for _, command in SCRIPTS for name in command.split()}
    for page in PAGES:
        # What one script imports of another isn't named in a command.
        files = files_and_commands(page)[0]
        imported = {f"{m}.py" for code in files.values() for m in imports(code)}
        assert not set(files) - ran - imported


def imports(code):
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom):
            yield node.module


def test_code_that_is_not_run_is_python_too():
    for page in PAGES:
        for _, code in on_page(page, "py"):
            ast.parse(code)


@pytest.mark.parametrize("page", with_blocks("yaml"), ids=name_of)
def test_settings_of_kubernetes(page):
    yaml = pytest.importorskip("yaml")
    for _, code in on_page(page, "yaml"):
        found = yaml.safe_load(code)
        if "kind" in found:
            (job,) = found["spec"]["replicatedJobs"]
            spec = job["template"]["spec"]
            # Each host has one process, and all start together.
            assert spec["parallelism"] == spec["completions"]
            pod = spec["template"]["spec"]
            assert pod["containers"][0]["command"][0] == "python"


@pytest.mark.parametrize("page", with_blocks("sh"), ids=name_of)
def test_commands_are_of_the_shell(page):
    for _, code in on_page(page, "sh"):
        subprocess.run(["bash", "-n"], input=code, text=True, check=True)


def test_pictures_are_those_that_are_drawn():
    folder = ROOT / "docs" / "images"
    drawn = runpy.run_path(str(folder / "draw.py"))["pictures"]()
    for name, picture in drawn.items():
        same = (folder / name).read_text() == picture._repr_svg_()
        assert same, f"{name} is out of date: python docs/images/draw.py"
    stored = {path.name for path in folder.glob("*.svg")}
    assert stored == set(drawn)
    text = "".join(page.read_text() for page in PAGES)
    unused = [name for name in stored if f"images/{name})" not in text]
    assert not unused


def test_messages_under_troubleshooting_exist():
    constants = [
        node.value
        for path in (ROOT / "keras_meshdist").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    headings = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    assert headings
    for heading in headings:
        found = any(
            text.startswith(heading) or heading.startswith(text.strip(" `"))
            for text in constants
            if len(text) > 20
        )
        assert found, f"no message begins with {heading!r}"


def test_every_disagreement_is_under_troubleshooting():
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    of_hosts = (ROOT / "docs" / "multi-host.md").read_text()
    headings = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    rules = [
        "All processes must",
        "No process may",
        "A batch must be read",
        "Processes that hold",
        "The feeds of all",
    ]
    for path in (ROOT / "keras_meshdist").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = getattr(node, "value", None)
            if isinstance(text, str) and text.startswith(tuple(rules)):
                known = text.startswith(tuple(headings))
                assert known or text[:40] in of_hosts, text


def test_each_row_of_the_table_is_a_test():
    text = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\|.*\| `(test_\w+)` \|$", text, re.MULTILINE)
    tree = ast.parse((ROOT / "tests" / "test_table.py").read_text())
    functions = [n.name for n in tree.body if isinstance(n, ast.FunctionDef)]
    tests = [name for name in functions if name.startswith("test_")]
    assert sorted(rows) == sorted(tests)


def test_local_links_lead_somewhere():
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    pages += (ROOT / "benchmarks").glob("*.md")
    for page in pages:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if re.match(r"https?:|#", link):
                continue
            target = page.parent / link.partition("#")[0]
            assert target.exists(), f"{page.name} links to {link}"


def test_links_of_notebooks_lead_somewhere():
    folder = ROOT / "colabs"
    for notebook in folder.glob("*.ipynb"):
        for link in re.findall(r"\]\(([^)\s]+)\)", notebook.read_text()):
            if not re.match(r"https?:|#", link):
                target = folder / link.partition("#")[0]
                assert target.exists(), f"{notebook.name}: {link}"


def test_the_table_of_notebooks_has_all():
    page = (ROOT / "docs" / "notebooks.md").read_text()
    named = set(re.findall(r"^\| `(\w+)`", page, re.MULTILINE))
    stored = {path.stem for path in (ROOT / "colabs").glob("*.ipynb")}
    assert named == stored
