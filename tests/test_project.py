"""The arrows of the house, and that the documentation keeps up with it."""

import ast
import inspect
import itertools
import pathlib
import re
import runpy
import tomllib

import pytest

import keras_meshdist as kmd

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "keras_meshdist"
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
MOST_LINES = 320

# Which modules of this package a module, or any of a folder, may import. What
# isn't here may be imported by nobody but the package itself.
ARROWS = {
    "feeds": [],
    "coordination": [],
    "mesh": [],
    "pieces": [],
    "layout": ["mesh", "pieces"],
    "arguments": ["mesh", "pieces"],
    "model_layout_map": ["layout", "pieces"],
    "abstract": ["keras_hooks"],
    "unmatched": ["keras_hooks", "layout"],
    "layouts": [
        "abstract",
        "keras_hooks",
        "model_layout_map",
        "pieces",
        "unmatched",
    ],
    "pictures": ["feeds", "pieces"],
    "reports": ["abstract", "layout", "pictures", "pieces", "unmatched"],
    "arrays": [],
    "padded": [],
    "scatters": [],
    "batches": ["arrays", "feeds", "padded", "scatters"],
    "predictions": [],
    "verdicts": [],
    "datasets": ["arrays", "feeds", "verdicts"],
    "convolutions": [],
    "agreement": ["coordination", "verdicts"],
    "heartbeat": ["agreement", "coordination"],
    "inputs": ["agreement", "datasets", "weights"],
    "weights": ["arrays", "keras_hooks", "predictions", "verdicts"],
    "blocks": [],
    "drawing": ["blocks", "keras_hooks"],
    "initial_values": ["drawing", "keras_hooks", "layout"],
    "saving": ["agreement", "coordination", "keras_hooks", "verdicts"],
    "mesh_weights": [
        "initial_values",
        "keras_hooks",
        "layout",
        "mesh",
        "predictions",
        "saving",
        "weights",
    ],
    "keras_hooks": ["arrays", "coordination", "scatters"],
    "positions": ["keras_hooks"],
    "checkpoints": [
        "coordination",
        "keras_hooks",
        "layout",
        "layouts",
        "model_layout_map",
        "positions",
        "weights",
    ],
    "callbacks": ["checkpoints"],
    "mesh_distribution": [
        "batches",
        "convolutions",
        "datasets",
        "feeds",
        "heartbeat",
        "inputs",
        "keras_hooks",
        "layout",
        "mesh",
        "mesh_weights",
        "pictures",
        "pieces",
        "predictions",
        "weights",
    ],
    "distribution": [
        "arguments",
        "keras_hooks",
        "layout",
        "mesh",
        "mesh_distribution",
        "model_layout_map",
        "pieces",
        "unmatched",
    ],
    "environments": [],
    "hardware": [],
    "rendezvous": ["coordination"],
    "joining": ["coordination", "environments", "keras_hooks", "rendezvous"],
    "checkup": [
        "coordination",
        "environments",
        "hardware",
        "joining",
        "keras_hooks",
        "mesh",
        "verdicts",
    ],
    "cluster": ["coordination", "hardware", "joining"],
    "options": [],
    "planner": [
        "abstract",
        "batches",
        "cluster",
        "distribution",
        "keras_hooks",
        "layout",
        "layouts",
        "mesh",
        "options",
        "pieces",
    ],
    "demo": ["", "cluster", "keras_hooks", "predictions"],
    "cli": [
        "checkup",
        "cluster",
        "demo",
        "layouts",
        "mesh",
        "options",
        "planner",
        "reports",
    ],
    "__main__": ["cli"],
    "": [
        "abstract",
        "callbacks",
        "checkpoints",
        "checkup",
        "cluster",
        "distribution",
        "initial_values",
        "joining",
        "keras_hooks",
        "layout",
        "layouts",
        "mesh",
        "planner",
        "predictions",
        "reports",
        "weights",
    ],
}
# Who may touch what isn't public, or must do without.
ONLY = {
    "keras.src": ["keras_hooks"],
    "jax._src": ["keras_hooks", "coordination"],
    "tensorflow": ["demo"],
}
WITHOUT = {"feeds": ["jax", "keras"], "coordination": ["keras"]}


def room(module):
    """`keras_meshdist.cluster.pod` -> `cluster`; the package itself -> ''."""
    parts = module.removesuffix(".__init__").split(".")
    return parts[1] if len(parts) > 1 else ""


def imports(path, module):
    """Dotted names that a module imports, and `a.b.c` used on `import a`."""
    is_package = path.name == "__init__.py"
    here = module.removesuffix(".__init__").split(".")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = [node.module] if node.module else []
            if node.level:
                up = node.level - is_package
                base = here[: len(here) - up] + base
            yield from (".".join([*base, a.name]) for a in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def within(name, prefix):
    return f"{name}.".startswith(f"{prefix}.")


@pytest.mark.parametrize("module", MODULES)
def test_arrows_of_the_house(module):
    names = set(imports(MODULES[module], module))
    here = room(module)
    assert here in ARROWS, f"give {module} a place in ARROWS"
    for name in names:
        if not within(name, "keras_meshdist"):
            continue
        there = next(
            (
                room(known)
                for known in MODULES
                if room(known) and within(name, f"keras_meshdist.{room(known)}")
            ),
            "",
        )
        assert there == here or there in ARROWS[here], (
            f"{module} may not import {name}"
        )
    for private, allowed in ONLY.items():
        found = [name for name in names if within(name, private)]
        assert here in allowed or not found, f"{module} may not use {found}"
    for other in WITHOUT.get(here, []):
        found = [name for name in names if within(name, other)]
        assert not found, f"{module} must do without {found}"


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_small_and_have_no_bare_assert(module):
    text = MODULES[module].read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), f"{module} says what it is for"
    assert len(text.splitlines()) <= MOST_LINES
    asserts = [n.lineno for n in ast.walk(tree) if isinstance(n, ast.Assert)]
    assert not asserts, f"{module} asserts in lines {asserts}; raise instead"


def test_arrows_go_one_way():
    done = set()
    while len(done) < len(ARROWS):
        ready = {
            here
            for here, there in ARROWS.items()
            if here not in done and set(there) <= done
        }
        assert ready, f"a circle among {sorted(set(ARROWS) - done)}"
        done |= ready


PUBLIC = dict(
    runpy.run_path(str(ROOT / "docs" / "public.py"))["public_objects"]()
)


def members(name, found):
    """An object, and its public methods that no base class declares."""
    yield name, found
    if inspect.isclass(found):
        declared = set().union(*map(dir, found.__bases__))
        for inner, value in vars(found).items():
            if (
                inspect.isfunction(value)
                and not inner.startswith("_")
                and inner not in declared
            ):
                yield f"{name}.{inner}", value


CALLABLE = dict(
    itertools.chain.from_iterable(members(n, f) for n, f in PUBLIC.items())
)


def test_table_of_contents():
    assert kmd.__all__ == sorted(kmd.__all__)
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    assert not [
        node
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
    ], "`__init__.py` is a table of contents and nothing else"


@pytest.mark.parametrize("name", CALLABLE)
def test_docstring_has_its_sections(name):
    found = CALLABLE[name]
    doc = inspect.getdoc(found)
    assert doc, f"{name} says what it is for"
    assert doc.splitlines()[0].endswith("."), f"{name}: one line says it"
    is_class = inspect.isclass(found)
    function = found.__init__ if is_class else found
    parameters = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.name not in ("self", "cls")
        and not (is_class and p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    ]
    missing = [
        p for p in parameters if not re.search(rf"^ +\*?\*?{p}:", doc, re.M)
    ]
    assert not missing, f"{name}: `Args:` lacks {missing}"
    if is_class:
        return
    tree = ast.parse(inspect.cleandoc("\n" + inspect.getsource(found)))
    own = list(statements(tree.body[0]))
    if any(isinstance(n, ast.Return) and n.value is not None for n in own):
        says = doc.startswith("Returns ") or "\nReturns:" in doc
        assert says, f"{name}: what does it return?"
    if any(isinstance(n, ast.Raise) and n.exc is not None for n in own):
        assert "\nRaises:" in doc, f"{name}: what does it raise?"


def statements(function):
    """The nodes of a function, without those of functions within it."""
    queue = list(ast.iter_child_nodes(function))
    while queue:
        node = queue.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.Lambda | ast.ClassDef):
            queue.extend(ast.iter_child_nodes(node))


def test_every_public_name_is_in_the_api_page():
    page = (ROOT / "docs" / "api.md").read_text()
    documented = re.findall(r"^::: ([\w.]+)$", page, re.M)
    assert sorted(documented) == sorted(set(documented)), "twice in docs/api.md"
    assert set(documented) == set(PUBLIC)


def test_every_page_is_in_the_table_of_contents():
    # mkdocs.yml has tags that only mkdocs knows, so it's read as text.
    config = (ROOT / "mkdocs.yml").read_text()
    pages = {path.name for path in (ROOT / "docs").rglob("*.md")}
    assert set(re.findall(r"([\w-]+\.md)\s*$", config, re.M)) == pages


def test_every_hook_is_explained():
    page = (ROOT / "docs" / "architecture.md").read_text()
    installed = kmd.keras_hooks.installed()
    assert installed
    missing = [path for path in installed if f"`{path}`" not in page]
    assert not missing


def test_versions_agree():
    oldest = {
        "keras": str(kmd.keras_hooks.OLDEST_KERAS),
        "jax": str(kmd.keras_hooks.OLDEST_JAX),
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needs = dict(d.split(">=") for d in project["dependencies"])
    for package, version in oldest.items():
        assert version.removesuffix(".0") == needs[package].removesuffix(".0")
        for page in ("README.md", "docs/compatibility.md"):
            assert version in (ROOT / page).read_text(), f"{version} in {page}"
    for lock in ("constraints.txt", "constraints-oldest.txt"):
        lines = (ROOT / ".ci" / lock).read_text().splitlines()
        pinned = dict(line.split("==") for line in lines if "==" in line)
        assert {"keras", "jax", "jaxlib", "numpy", "pytest"} <= set(pinned)
        if "oldest" in lock:
            assert {package: pinned[package] for package in oldest} == oldest
    changes = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## (\S+)", changes, re.M)
    assert newest[1] == kmd.__version__
