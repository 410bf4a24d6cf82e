"""The notebooks run from their first cell to the last, and are true."""

import importlib.util
import pathlib
import re
import shlex
import tomllib
import types

import pytest

from keras_meshdist import cluster

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

ROOT = pathlib.Path(__file__).parent.parent
FOLDER = ROOT / "colabs"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))

# What they say in words, beyond what they assert: the last cell, with the names
# that the others have left.
CLAIMS = {
    "01_batch_axis_anywhere": """
# Plain Keras is right on one process, and wrong on two, without an error.
np.testing.assert_allclose(keras_alone, on_one_device, rtol=1e-4)
first, second = keras_on_two
assert abs(first - second).max() > 0.01
assert all(abs(one - on_one_device).max() > 0.01 for one in keras_on_two)
""",
    "02_three_axes": """
assert mesh.shape == (2, 2, 2)
assert rows_only.num_model_replicas == 4
assert len(results) == 6
assert {f.kind for f in report.findings} == {"large and replicated"}
""",
    "03_finetune_gemma": """
assert not real
assert report.device_bytes < report.total_bytes / 2
assert not [f for f in report.findings if f.kind == "unmatched rule"]
assert trained < everything / 8
plain_text = dict(zip([row[0] for row in rows], plain))
sailors = dict(zip([row[0] for row in rows], sailor))
for prompt, was, then in zip(prompts, before, after):
    assert was.strip() == plain_text[prompt]
    assert then.strip() == sailors[prompt]
assert size < report.total_bytes / 4
""",
    "04_finetune_llama": """
assert not real
assert report.device_bytes < report.total_bytes / 4
for prompt, was, then in zip(prompts, before, after):
    assert was.strip() in plain
    assert then.strip() in rhymes
""",
    "05_any_batch_size": """
assert distribution.num_model_replicas == 4
assert batch.physical.shape == (16,)
assert seen.shape == (13,)
assert len(ours) == 6
""",
    "06_plan_before_you_rent": """
assert not [mesh.name for mesh in report.meshes if mesh.error]
assert report.meshes[-1].name == "batch=8"
assert report.best.axes == tuple(map(tuple, plan["meshes"][0]["axes"]))
for name, shards in {"fsdp=8": 8, "model=4, batch=2": 4, "batch=8": 1}.items():
    held = found[name].bytes["weights"] * shards / (4 * weights)
    assert 1 <= held < 1.01
assert 0.95 < gradients / (4 * weights) < 1.05
(_, again), (change, fits) = alone.suggestions
assert not again.fits and fits.fits
assert change.startswith("FSDP")
assert again.bytes["peak"] > 0.9 * found["batch=8"].bytes["peak"]
assert set(pictures) == {"memory", "time", "grid"}
""",
    "07_save_and_resume_elsewhere": """
assert len(whole.losses) == 80
assert max(first.losses) == 37
assert min(int(step) for step in two) == 31
""",
    "08_many_hosts": """
assert status == 1
assert len({tuple(np.round(found, 4)) for found in losses.values()}) == 1
""",
}
# What is printed of an error is a claim too.
PRINTED = {
    "05_any_batch_size": ["IndivisibleError", "(1, 10)", "Wrap the call in"],
    "06_plan_before_you_rent": ["1,224,820,736 weights"],
    "08_many_hosts": ["DisagreementError", "61 of 61 rows, 1000 predictions"],
}
EXPECTED = [
    # What fetches presets asks for a progress bar that not all have.
    "TqdmWarning",
    # Plain Keras, where it trains wrong.
    "UserWarning: Your input ran out of data",
]
NEEDS = {"03_finetune_gemma": "keras_hub", "04_finetune_llama": "keras_hub"}


def read(path):
    return nbformat.read(path, as_version=4)


def kinds(notebook):
    """The kinds of pictures that cells show."""
    return {
        kind
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        for kind in output.get("data", {})
    }


def printed(notebook, name):
    return "".join(
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.get("name") == name
    )


def test_there_are_claims_of_every_notebook():
    assert set(CLAIMS) == {path.stem for path in NOTEBOOKS}


@pytest.mark.extra
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_runs(path):
    if cluster.on_pod():
        pytest.skip("A notebook is one process.")
    needed = NEEDS.get(path.stem)
    if needed and not importlib.util.find_spec(needed):
        pytest.skip(f"needs {needed}: nox -s notebooks")
    notebook = read(path)
    claims = nbformat.v4.new_code_cell(CLAIMS[path.stem])
    notebook.cells.append(claims)
    client = nbclient.NotebookClient(
        notebook,
        timeout=240,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    )
    client.execute()
    # What went wrong without an exception shows on standard error.
    errors = printed(notebook, "stderr")
    for expected in EXPECTED:
        errors = errors.replace(expected, "")
    assert "Warning" not in errors
    assert {"image/png", "image/svg+xml"} <= kinds(notebook)
    for words in PRINTED.get(path.stem, []):
        assert words in printed(notebook, "stdout") + errors


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_without_outputs(path):
    for cell in read(path).cells:
        assert not cell.get("outputs"), "clear all outputs before you commit"
        assert not cell.get("execution_count")


def code(path):
    return [c.source for c in read(path).cells if c.cell_type == "code"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_first_cell_of_code_installs_and_the_second_takes_devices(path):
    install, devices = code(path)[:2]
    assert "%pip install" in install
    assert "keras_meshdist as" not in install
    assert "accelerator_count" in devices or path.stem == "08_many_hosts"


def asked_of_pip(path, folder, monkeypatch, spec=None):
    """What the first cell asks pip for where the package isn't installed."""
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    shell = interactive.InteractiveShell()
    asked = []
    shell.register_magic_function(asked.append, magic_name="pip")
    monkeypatch.chdir(folder)
    # Names are completed and looked up in threads of the shell's own.
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: spec)
        shell.run_cell(code(path)[0]).raise_error()
    return asked


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_installs_from_the_clone_in_which_it_lies(path, monkeypatch):
    (asked,) = asked_of_pip(path, FOLDER, monkeypatch)
    command, _, package, *others = shlex.split(asked)
    place, extras = re.fullmatch(r"(.+)\[([\w,]+)\]", package).groups()
    assert command == "install"
    assert (FOLDER / place).resolve() == ROOT
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    assert set(others) <= {"tensorflow-cpu"}


def test_installs_from_a_clone_beside_it(tmp_path, monkeypatch):
    package = tmp_path / "keras_meshdist" / "keras_meshdist"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    # Python takes the folder of the clone for a package, an empty one.
    folder = types.SimpleNamespace(origin=None)
    for path in NOTEBOOKS:
        (asked,) = asked_of_pip(path, tmp_path, monkeypatch, folder)
        assert '"keras_meshdist[' in asked


def test_says_what_to_do_without_a_clone(tmp_path, monkeypatch):
    for path in NOTEBOOKS:
        with pytest.raises(FileNotFoundError, match="git clone"):
            asked_of_pip(path, tmp_path, monkeypatch)


def test_installs_nothing_where_the_package_is(tmp_path, monkeypatch):
    there = importlib.util.find_spec("keras_meshdist")
    for path in NOTEBOOKS:
        assert asked_of_pip(path, tmp_path, monkeypatch, there) == []
