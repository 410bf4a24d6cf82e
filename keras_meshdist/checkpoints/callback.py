"""The callback that saves, and goes on where a `fit` before it was."""

import dataclasses
import signal
import threading
import warnings
from typing import Any

import jax
import keras

from keras_meshdist import keras_hooks
from keras_meshdist.checkpoints import together
from keras_meshdist.checkpoints.keys import variables_of
from keras_meshdist.checkpoints.restoring import (
    best_step,
    describe,
    restore_from,
    source_of,
)
from keras_meshdist.checkpoints.store import Store
from keras_meshdist.positions import Position, Progress


class Checkpoint(keras.callbacks.Callback):
    """Saves all of a training run, and resumes it in the middle of an epoch.

    Weights, optimizer, metrics, the states of random generators and the
    position in the data are saved with Orbax, each process its part. Another
    mesh, another number of processes and other layouts may go on from there,
    and get the rows, losses and weights that the run would have had.

    On SIGTERM, as a machine that is taken away gets it, all processes save
    after the step at hand and end with `SystemExit(143)`.

    Example:

    ```python
    model.fit(
        x, y, epochs=10, validation_split=0.1,
        callbacks=[kmd.callbacks.Checkpoint(
            "checkpoints", monitor="val_loss", save_freq=100, resume=True
        )],  # after 100 batches, and at the end of each epoch
    )
    ```

    Args:
        directory: str or path, which all processes see. Each checkpoint is a
            folder in it, whose name is the number of batches trained on.
        monitor: str, the name of the logged value that tells the best
            checkpoint; one is saved at the end of each epoch for that. Defaults
            to `None`: none is the best.
        mode: `"min"` or `"max"`, which value is better. Defaults to `"min"`.
        save_freq: `"epoch"`, or int, how many batches to train on between two
            checkpoints, also over the ends of epochs. Defaults to `"epoch"`.
            The end of training is saved in any case.
        keep: int, how many of the newest are kept, besides the best one.
            Defaults to 3.
        resume: bool, whether to go on from the newest checkpoint in the
            directory; if there is none, from what `kmd.restore` restored. Then
            the dataset must be the same. Defaults to `False`: the directory
            must not have checkpoints.
        asynchronous: bool, whether training goes on while files are written;
            a failure then ends it at a later step, or at the end. Defaults to
            `True`.

    Raises:
        ValueError: if an argument isn't valid.
    """

    def __init__(
        self,
        directory,
        monitor=None,
        mode="min",
        save_freq="epoch",
        keep=3,
        resume=False,
        asynchronous=True,
    ):
        super().__init__()
        if mode not in ("min", "max"):
            raise ValueError(
                f"`mode` must be 'min' or 'max'. Received: mode={mode!r}."
            )
        whole = isinstance(save_freq, int) and save_freq > 0
        if save_freq != "epoch" and not whole:
            raise ValueError(
                "`save_freq` must be 'epoch' or a positive int, a number of "
                f"batches. Received: save_freq={save_freq!r}."
            )
        if not isinstance(keep, int) or keep < 1:
            raise ValueError(
                f"`keep` must be a positive int. Received: keep={keep!r}."
            )
        self.directory = directory
        self.monitor, self.mode = monitor, mode
        self.save_freq, self.keep = save_freq, keep
        self.resume, self.asynchronous = resume, asynchronous
        self._store: Store | None = None
        self._signal: int | None = None
        self._listens, self._before = False, None

    def on_train_begin(self, logs=None):
        self._distribution = keras.distribution.distribution()
        if not isinstance(self._distribution, keras_hooks.HookedDistribution):
            raise ValueError(
                "Checkpoints need a distribution that tells which rows were "
                "read. Received: the distribution "
                f"{self._distribution}. Set a `kmd.ModelParallel` or a "
                "`kmd.DataParallel`, on one device `kmd.DataParallel("
                "devices=jax.devices()[:1])`."
            )
        self._close()  # of a `fit` that failed
        together.try_to_write(self._distribution, self.directory)
        self._store = Store(self.directory, self.asynchronous, create=True)
        self._metas = {}
        steps = self._store.steps()
        if steps and not self.resume:
            raise ValueError(
                "A directory must have no checkpoints of another run. "
                f"Received: {self._store.directory!r}, which has the steps "
                f"{steps}. Go on from there with resume=True, or give another "
                "directory."
            )
        self._metas = {step: self._store.meta(step) for step in steps}
        meta = self._restore(steps) if self.resume else None
        self._saved = steps[-1] if steps else None
        self._due_from = meta["step"] if meta else 0
        position = Position(**meta["position"]) if meta else None
        self._progress = Progress(position, self._due_from)
        self._distribution.progress = self._progress
        self._in_epoch = 0
        keras_hooks.set_initial_epoch(
            self.model, position.epoch if position else None
        )
        self._first = position
        self._restored = [(v, v.value) for v in self.model.metrics_variables]
        self._listen()

    def on_epoch_begin(self, epoch, logs=None):
        keras_hooks.set_initial_epoch(self.model, None)
        self._progress.begin_epoch(epoch)
        self._in_epoch = 0
        if self._first is not None:
            # Keras resets metrics at the beginning of each epoch.
            self._in_epoch = self._first.step
            if self._first.step:
                for variable, value in self._restored:
                    variable.assign(value)
            self._first = self._restored = None

    def on_train_batch_end(self, batch, logs=None):
        self._in_epoch = batch + 1
        if isinstance(self._store.state(), Exception):
            self._progress.leaving = True  # to raise, all at the same step
        leaves = self._progress.must_leave(jax.process_count() == 1)
        due = self.save_freq != "epoch" and self._is_due()
        if not (leaves or due):
            return
        self._settle()
        # An epoch that has no step left can't be resumed.
        if not self._is_last():
            self._save(self._progress.within(self._in_epoch), logs)
        elif leaves:
            self._progress.end_epoch()
            self._save(self._progress.between(), None)
        if leaves:
            self._settle()
            self._close()
            raise SystemExit(128 + signal.SIGTERM)

    def on_epoch_end(self, epoch, logs=None):
        self._progress.end_epoch()
        if self.monitor is not None and self.monitor not in logs:
            warnings.warn(
                "`monitor` must be among what is logged at the end of an epoch "
                f"for a checkpoint to be the best. Received: {self.monitor!r}, "
                f"where {sorted(logs)} are logged.",
                stacklevel=2,
            )
        if self.save_freq == "epoch" or self.monitor or self._is_due():
            self._save(self._progress.between(), logs)

    def on_train_end(self, logs=None):
        keras_hooks.set_initial_epoch(self.model, None)
        if self._progress.trained != (self._saved or 0):
            self._save(self._progress.between(), logs)
        self._settle()
        self._prune()
        self._close()
        if self._signal is not None:
            signal.raise_signal(self._signal)

    def _restore(self, steps):
        """Returns what is written beside the checkpoint that was restored."""
        if steps:
            return restore_from(
                self._store, self.model, steps[-1], strict=True, metrics=True
            )
        source = source_of(self.model)
        if source is None:
            return None
        with Store(source[0]) as store:
            return restore_from(
                store, self.model, source[1], strict=True, metrics=True
            )

    def _is_due(self):
        return self._progress.trained - self._due_from >= self.save_freq

    def _is_last(self):
        """Whether the epoch has no further batch; all come to the same."""
        steps = self.params.get("steps")
        if steps:
            return self._in_epoch >= steps
        return self._progress.at_end()

    def _save(self, position, logs):
        step = self._progress.trained
        if self._saved == step:
            return
        self._settle()
        self._prune()
        together.try_to_write(self._distribution, self.directory)
        variables = variables_of(self.model)
        arrays = {key: v.value for key, v in variables.items()}
        value = (logs or {}).get(self.monitor)
        self._metas[step] = {
            "step": step,
            "position": dataclasses.asdict(position),
            "monitor": self.monitor,
            "mode": self.mode,
            "value": None if value is None else float(value),
            "variables": {k: describe(v) for k, v in variables.items()},
            "mesh": str(self._distribution.device_mesh),
            "versions": {"keras": keras.__version__, "jax": jax.__version__},
        }
        self._store.save(step, arrays, self._metas[step])
        self._saved = self._due_from = step
        if not self.asynchronous:
            self._settle()

    def _settle(self):
        together.settle(self._distribution, self._store)

    def _prune(self):
        """Deletes what isn't kept, now that the newest is whole."""
        best = best_step(self._metas)
        for step in sorted(self._metas)[: -self.keep]:
            if step != best:
                self._store.delete(step)
                del self._metas[step]

    def _listen(self):
        # Python lets no other thread.
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
            self._listens = True

    def _stop_listening(self):
        if self._listens:
            # `None` if it wasn't Python that took it.
            signal.signal(signal.SIGTERM, self._before or signal.SIG_DFL)
            self._listens = False

    def _on_signal(self, number: int, frame: Any) -> None:
        if keras_hooks.is_fitting(self._model, frame):
            self._signal = number
            self._progress.leaving = True
        else:  # `fit` has raised, which no callback is told
            self._stop_listening()
            signal.raise_signal(number)

    def _close(self):
        store, self._store = self._store, None
        if store is None:
            return
        self._distribution.progress = None
        self._stop_listening()
        with store:
            pass
