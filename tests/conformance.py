"""Training on every kind of dataset, compared with one device.

The functions here run in the processes of a cluster; `check` and the choice of
cases run in the test.
"""

import atexit
import dataclasses
import functools
import itertools
import shutil
import tempfile

import numpy as np

from tests import parity
from tests.kept import kept
from tests.kinds import KINDS, Batches

STEPS, FEATURES = 4, 4
MESHES = {
    "first": ({"batch": 4, "model": 2}, "batch"),
    "last": ({"model": 2, "batch": 4}, "batch"),
    "two": ({"data": 2, "model": 1, "fsdp": 4}, ("data", "fsdp")),
}
# Of four processes of two devices each two hold the same batch shard.
HALVES = {"halves": ({"batch": 2, "model": 4}, "batch")}
# Rows of the dataset, and of a batch.
SIZES = ((61, 16), (7, 3), (1, 1), (5, 5))
STYLES = ("plain", "two", "train_step", "executions", "eagerly", "loop")
LAYOUTS = ((1, 8), (2, 4), (4, 2))


@dataclasses.dataclass(frozen=True)
class Case:
    """What to train on, and how; on one device if it has no mesh.

    With `feeds` each process has but its own feed, of so many rows; `size` is
    the rows of all, and of a batch of each feed. Without `auc` there is a
    third less to compile.
    """

    kind: str
    processes: tuple[int, int]
    size: tuple[int, int]
    mesh: str
    style: str = "plain"
    feeds: tuple[int, ...] = ()
    auc: bool = True

    def __str__(self):
        processes = "x".join(map(str, self.processes))
        sizes = "by".join(map(str, self.size))
        feeds = map(str, self.feeds)
        return "_".join(
            [self.kind, processes, sizes, self.mesh, self.style, *feeds]
        )

    @property
    def data(self):
        # Keras itself reads in another order with workers, and ends an epoch
        # of several steps an execution differently if it knows its length.
        own = self.style == "executions" or (
            self.kind == "py_dataset_workers" and self.style != "loop"
        )
        kind = "feeds" if self.feeds else self.kind if own else "numpy"
        return dataclasses.replace(self, kind=kind, processes=(), mesh="")


def all_cases():
    """The whole matrix; styles take turns."""
    factors = itertools.product(KINDS, LAYOUTS, SIZES, MESHES)
    for n, values in enumerate(factors):
        # Seven is no divisor of how often a value comes back.
        yield Case(*values, STYLES[n // 7 % len(STYLES)])


def pairwise():
    """Cases with each pair of values of any two factors, few of each."""
    factors = (tuple(KINDS), LAYOUTS, SIZES, tuple(MESHES), STYLES)
    pairs = set()
    for (i, a), (j, b) in itertools.combinations(enumerate(factors), 2):
        pairs.update(((i, x), (j, y)) for x in a for y in b)
    # A kind of dataset doesn't know what is done with its batches; and what is
    # run eagerly compiles each operation for each shape.
    few = ((4, "eagerly"), (2, SIZES[0])), ((4, "eagerly"), (2, SIZES[1]))
    pairs = {
        pair
        for pair in pairs
        if (pair[0][0], pair[1][0]) != (0, 4) and pair[::-1] not in few
    }

    def of(case):
        return pairs & set(itertools.combinations(enumerate(case), 2))

    def cheap(case):
        # Each shape of a batch is a program, which each process compiles.
        _, (processes, _), (rows, batch), _, style = case
        shapes = 1 if rows % batch == 0 else 2
        return -processes * shapes * (3 if style == "eagerly" else 1)

    programs = set()
    candidates = [
        case
        for case in itertools.product(*factors)
        if case[4] != "eagerly" or case[2] in SIZES[2:]
    ]
    while pairs:
        best = max(
            candidates,
            key=lambda case: (len(of(case)), case[1:] in programs, cheap(case)),
        )
        programs.add(best[1:])
        pairs -= of(best)
        yield Case(*best)


def train(case):
    """Trains as a case says, and returns what a user sees of it."""
    import jax
    import keras

    jax.config.update("jax_disable_most_optimizations", True)
    if jax.process_count() == 1:
        # Kinds of datasets share programs; several processes can't keep them.
        jax.config.update("jax_compilation_cache_dir", _programs())
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.config.update("jax_enable_x64", True)
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")  # which may have been made before
    keras.distribution.set_distribution(
        _distribution(case.mesh, bool(case.feeds)) if case.mesh else None
    )
    try:
        return (_loop if case.style == "loop" else _fit)(case)
    finally:
        keras.distribution.set_distribution(None)


@functools.cache
def _distribution(mesh, feeds):
    import keras_meshdist as kmd

    axes, batch = (MESHES | HALVES)[mesh]
    layout_map = kmd.LayoutMap(kmd.make_mesh(axes))
    layout_map[".*up.*/kernel"] = (None, "model")
    return kmd.ModelParallel(
        layout_map=layout_map,
        batch_dim_name=batch,
        auto_shard_dataset=not feeds,
    )


@functools.cache
def _programs():
    folder = tempfile.mkdtemp(prefix="meshdist-programs-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def arrays(case):
    rows = case.size[0]
    rng = np.random.default_rng(3)
    x = rng.normal(size=(rows, STEPS, FEATURES))
    x[:, -1] *= rng.integers(0, 2, size=(rows, 1))  # some steps are masked
    x = x.reshape(rows, -1)
    y = rng.integers(0, 2, size=(rows, 1)).astype(float)
    weight = rng.uniform(0.5, 2.0, size=rows)
    if case.style == "two":
        x = {"left": x, "right": x[:, ::-1].copy()}
        y = {"first": y, "second": 1 - y}
        weight = {"first": weight, "second": weight[::-1].copy()}
    return x, y, weight


def _fit(case):
    import keras

    import keras_meshdist as kmd

    data = arrays(case)
    dist = keras.distribution.distribution()
    if case.feeds and dist is not None:
        data = _feed(data, case, dist.data_shard_id)
    (model,) = kept(_key(case), lambda: _compiled(case))
    if case.kind == "feeds":
        make = functools.partial(_side_by_side, data, case)
    else:
        make = functools.partial(KINDS[case.kind], data, case.size[1])
    (dataset, *rest), further = make(True)
    history = model.fit(
        dataset, *rest, epochs=2, verbose=0, shuffle=False, **further
    ).history
    numbers = {name: np.array(values) for name, values in history.items()}
    (dataset, *rest), further = make(False)
    numbers["evaluate"] = np.array(
        model.evaluate(dataset, *rest, verbose=0, **further)
    )
    (dataset, *rest), further = make(None)
    predictions = model.predict(dataset, verbose=0, **further)
    if case.feeds and dist is not None:
        (dataset, *rest), further = make(None)
        with kmd.local_predictions():
            own = model.predict(dataset, verbose=0, **further)
        state = {"own": own, "feed": dist.data_shard_id}
    else:
        state = {}
    batch = data if case.feeds else tuple(_last(leaf, case) for leaf in data)
    numbers["test_on_batch"] = np.array(model.test_on_batch(*batch))
    on_batch = model.predict_on_batch(batch[0])
    for name, outputs in (("predict", predictions), ("on_batch", on_batch)):
        outputs = outputs if isinstance(outputs, dict) else {"": outputs}
        numbers |= {f"{name} {key}": value for key, value in outputs.items()}
    return {"numbers": numbers, **state, **_state(model)}


def _key(case):
    if case.kind == "py_dataset_workers":
        return case  # the order also differs where a model has been trained
    return case.mesh, bool(case.feeds), case.style, case.auc


def _compiled(case):
    model = _model(case)
    model.compile(
        _optimizer(),
        "binary_crossentropy",
        metrics=_each(case, lambda: ["mae", "auc"] if case.auc else ["mae"]),
        weighted_metrics=_each(case, lambda: ["mse"]),
        steps_per_execution=3 if case.style == "executions" else 1,
        run_eagerly=case.style == "eagerly",
    )
    return (model,)


def _last(leaf, case):
    import keras

    return keras.tree.map_structure(lambda a: a[-case.size[1] :], leaf)


def _starts(case):
    return np.cumsum([0, *case.feeds])


def _feed(data, case, feed):
    start, stop = _starts(case)[feed : feed + 2]
    return tuple(leaf[start:stop] for leaf in data)


def rows_of_batches(case):
    """The rows of each batch, one array for each feed."""
    size = case.size[1]
    starts = _starts(case)
    for step in range(-(-max(case.feeds) // size)):
        yield [
            np.arange(start, stop)[step * size :][:size]
            for start, stop in itertools.pairwise(starts)
        ]


def _side_by_side(data, case, fit):
    rows = [np.concatenate(feeds) for feeds in rows_of_batches(case)]
    return (Batches([tuple(leaf[r] for leaf in data) for r in rows]),), {}


def _each(case, make):
    return (
        {"first": make(), "second": make()} if case.style == "two" else make()
    )


def _optimizer():
    import keras

    return keras.optimizers.SGD(0.01, momentum=0.9)


def _model(case):
    """All that depends on which rows there are, and on how many."""
    import keras

    class RowLoss(keras.layers.Layer):
        def call(self, x):
            self.add_loss(0.1 * keras.ops.mean(keras.ops.square(x)))
            return x

    class OwnStep(keras.Model):
        def train_step(self, state, data):
            logs, state = super().train_step(state, data)
            rows = keras.ops.shape(data[0])[0]
            return {**logs, "rows": keras.ops.cast(rows, "float64")}, state

    layers = keras.layers
    names = ("left", "right") if case.style == "two" else ("left",)
    inputs = {
        name: keras.Input((STEPS * FEATURES,), name=name) for name in names
    }
    outputs = []
    for x in inputs.values():
        x = layers.Reshape((STEPS, FEATURES))(x)
        x = layers.Masking(mask_value=0.0)(x)
        # Both take the mask; the loop takes XLA long.
        take = case.style in ("train_step", "eagerly")
        pool = layers.GlobalAveragePooling1D()
        outputs.append((layers.SimpleRNN(8) if take else pool)(x))
    x = outputs[0] if len(outputs) == 1 else layers.Add()(outputs)
    x = layers.Dense(16, use_bias=False, name="up")(x)
    # Of one row BatchNormalization leaves nothing but noise, and no gradient;
    # and Keras computes it in float32 in part, which few rows amplify.
    x = layers.Add()([x, layers.BatchNormalization(epsilon=0.1)(x)])
    x = RowLoss(activity_regularizer="l2")(x)
    x = layers.Dropout(0.3)(x)
    # No biases: of few rows the gradient of a single one may all but cancel,
    # and what is left of it is that noise.
    if case.style == "two":
        outputs = {
            name: layers.Dense(1, "sigmoid", use_bias=False, name=name)(x)
            for name in ("first", "second")
        }
    else:
        inputs = inputs["left"]
        outputs = layers.Dense(
            1, "sigmoid", use_bias=False, kernel_regularizer="l2"
        )(x)
    own = case.style == "train_step"
    return (OwnStep if own else keras.Model)(inputs, outputs)


def _with_step(case):
    """A model, and a user's own step under the user's own `jax.jit`."""
    import jax
    import keras

    model, optimizer = _model(case), _optimizer()
    model.optimizer = optimizer
    loss_of = keras.losses.BinaryCrossentropy()

    def compute(trainable, others, x, y, weight):
        outputs, others, losses = model.stateless_call(
            trainable, others, x, training=True, return_losses=True
        )
        return loss_of(y, outputs, weight) + sum(losses), others

    @jax.jit
    def step(state, batch):
        trainable, others, slots = state
        grad = jax.value_and_grad(compute, has_aux=True)
        (loss, others), grads = grad(trainable, others, *batch)
        trainable, slots = optimizer.stateless_apply(slots, grads, trainable)
        return loss, (trainable, others, slots)

    return model, step


def _loop(case):
    import keras

    model, step = kept(_key(case), lambda: _with_step(case))
    optimizer = model.optimizer
    variables = (
        model.trainable_variables,
        model.non_trainable_variables,
        optimizer.variables,
    )
    state = tuple([v.value for v in group] for group in variables)
    dist = keras.distribution.distribution()
    losses = []
    for start in range(0, case.size[0], case.size[1]):
        rows = slice(start, start + case.size[1])
        batch = tuple(leaf[rows] for leaf in arrays(case))
        if dist is not None:
            batch = dist.place_batch(batch)
        loss, state = step(state, batch)
        losses.append(float(loss))
    for group, values in zip(variables, state, strict=True):
        for variable, value in zip(group, values, strict=True):
            variable.assign(value)
    return {"numbers": {"losses": np.array(losses)}, **_state(model)}


def _state(model):
    return parity.on_devices([*model.variables, *model.optimizer.variables])


@functools.cache
def oracle(case):
    """What one device gives; computed once for each kind of case."""
    from keras_meshdist import cluster
    from tests.clusters import shared_cluster

    if cluster.on_pod():
        return train(case)
    return shared_cluster(1, 8).call(train, case)[0]


def check(case, results):
    """Compares what all processes of a mesh saw with one device."""
    expected = oracle(case.data)
    parity.compare(expected, results, 1e-6)
    for result in results if case.feeds else ():
        feed, place, mine = result["feed"], 0, []
        for batch in rows_of_batches(case):
            before = place + sum(map(len, batch[:feed]))
            mine += range(before, before + len(batch[feed]))
            place += sum(map(len, batch))
        rows = expected["numbers"]["predict "][mine]
        parity.close(f"own rows of feed {feed}", result["own"], rows, 1e-6)
