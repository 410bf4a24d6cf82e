"""Names for all that training changes, the same in every build of a model.

Keras numbers layers, optimizers and seed generators anew in every build:
`dense_3` may be next time what `dense` was before. Here names that Keras gave
count from zero within the layer that they lie in.
"""

import collections

from keras_meshdist import weights
from keras_meshdist.layouts.rules import automatic_names
from keras_meshdist.model_layout_map import split_number

# The first part of the keys of what isn't the model's own.
OPTIMIZER, METRICS = "optimizer", "metrics"


def variables_of(model):
    """Returns all variables of a model, of its optimizer and its metrics.

    Args:
        model: built Keras model, or layer.

    Returns:
        Dict from keys to `keras.Variable`s. The optimizer's begin with
        `optimizer/`, the metrics' with `metrics/`.
    """
    metrics = list(getattr(model, "metrics_variables", []))
    measured = {id(variable) for variable in metrics}
    of_model, slots = weights.variables_of(model)
    own = [v for v in of_model if id(v) not in measured]
    keys = _renumbered([v.path for v in own], automatic_names(model))
    by_id = {id(v): key for v, key in zip(own, keys, strict=True)}
    named = [(f"model/{key}", v) for v, key in zip(own, keys, strict=True)]
    for slot, weight in slots:
        if weight is None:
            named.append((f"{OPTIMIZER}/{slot.name}", slot))
        else:
            kind = slot.name[len(weight.path) + 1 :]
            named.append((f"{OPTIMIZER}/{by_id[id(weight)]}/{kind}", slot))
    named += [
        (f"{METRICS}/{i}/{split_number(v.name)[0]}", v)
        for i, v in enumerate(metrics)
    ]
    return _unique(named)


def _renumbered(paths, automatic):
    # By the renamed path of what it lies in and its name without number: the
    # names that were found, in their order.
    found = collections.defaultdict(list)
    keys = []
    for path in paths:
        parts = []
        for name in path.split("/"):
            base = split_number(name)[0]
            if name in automatic or base == "seed_generator":
                names = found["/".join(parts), base]
                if name not in names:
                    names.append(name)
                number = names.index(name)
                name = f"{base}:{number}" if number else base
            parts.append(name)
        keys.append("/".join(parts))
    return keys


def _unique(named):
    counts = collections.Counter()
    unique = {}
    for key, variable in named:
        counts[key] += 1
        if counts[key] > 1:
            key = f"{key}:{counts[key] - 1}"
        unique[key] = variable
    return unique
