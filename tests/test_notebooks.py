"""The notebooks run from their first cell to the last."""

import pathlib

import pytest

from keras_meshdist import cluster

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

FOLDER = pathlib.Path(__file__).parent.parent / "colabs"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def read(path):
    return nbformat.read(path, as_version=4)


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.extra
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_runs(path):
    if cluster.on_pod():
        pytest.skip("A notebook is one process.")
    notebook = read(path)
    client = nbclient.NotebookClient(
        notebook,
        timeout=240,
        kernel_name="python3",
        resources={"metadata": {"path": str(FOLDER)}},
    )
    client.execute()
    # What went wrong without an exception shows on standard error.
    warned = [
        output.text
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if output.get("name") == "stderr" and "Warning" in output.text
    ]
    assert not warned


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_is_stored_without_outputs(path):
    for cell in read(path).cells:
        assert not cell.get("outputs"), "clear all outputs before you commit"
        assert not cell.get("execution_count")
