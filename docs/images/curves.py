"""Trains on two processes, and draws the loss curves of the README.

    python docs/images/curves.py

Keras by itself and this package train the same network on the same rows, on the
mesh ("model", "batch") of 4 x 2 devices that lie on two processes, and this
package on one device too. The losses go into `curves.json`, beside the picture.
"""

import json
import pathlib
import tempfile

import jax
import keras

from keras_meshdist.cluster import Cluster
from keras_meshdist.demo import training
from keras_meshdist.demo.cases import Case
from keras_meshdist.demo.command import load_digits

FOLDER = pathlib.Path(__file__).parent
CASE = Case(2, (("model", 4), ("batch", 2)), 64)
EPOCHS = 8


def train():
    """Returns the losses of each run, by who trains and the process."""
    digits = load_digits()
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        for case, who in (
            (CASE.reference, training.OURS),
            (CASE, training.OURS),
            (CASE, training.KERAS_TF_DATA),
        ):
            name = who if case.axes else "one device"
            with Cluster(case.processes, case.devices) as cluster:
                runs = cluster.call(
                    training.train, case, who, digits, EPOCHS, f"{folder}/done"
                )
            curves[name] = [run.losses for run in runs]
    return curves


def draw(curves, path):
    """Draws the wound on the left, and the cure on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    epochs = range(1, EPOCHS + 1)
    (one,) = curves["one device"]
    for axes, who, title, color in (
        (panels[0], training.KERAS_TF_DATA, "plain Keras", "tab:red"),
        (panels[1], training.OURS, "with keras_meshdist", "tab:blue"),
    ):
        axes.plot(
            epochs,
            one,
            color="gray",
            linewidth=8,
            alpha=0.35,
            label="one device",
        )
        for process, losses in enumerate(curves[who]):
            axes.plot(
                epochs,
                losses,
                color=color,
                marker="xo"[process],
                fillstyle="none",
                linestyle=("-", "--")[process],
                label=f"process {process}",
            )
        axes.set(title=title, xlabel="epoch", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend()
    panels[0].set_ylabel("training loss")
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    found = train()
    versions = {"keras": keras.__version__, "jax": jax.__version__}
    text = json.dumps({"versions": versions, "losses": found}, indent=1)
    (FOLDER / "curves.json").write_text(text + "\n")
    draw(found, FOLDER / "curves.png")
