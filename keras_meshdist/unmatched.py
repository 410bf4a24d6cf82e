"""Rules that match nothing: judged when a model is whole."""

import difflib
import re
import warnings

from keras_meshdist import keras_hooks
from keras_meshdist.layout import matching_rules


def unmatched_rules(model, layout_map):
    """Returns the rules that match nothing, and what may have been meant.

    Args:
        model: `keras.Model`, whose variables exist.
        layout_map: `keras.distribution.LayoutMap`. Rules that have matched
            another model's variables before count as matched.

    Returns:
        Dict from rule to a message.
    """
    paths = [variable.path for variable in model.variables]
    paths += [f"{layer.path}/output" for layer in keras_hooks.layers_of(model)]
    used = set(getattr(layout_map, "_used_rules", ()))
    used.update(getattr(layout_map, "optional", ()))
    for path in paths:
        used.update(matching_rules(layout_map, path))
    messages = {}
    for rule in layout_map:
        if rule not in used:
            plain = re.sub(r"[\\^$.*+?()\[\]{}|]", "", rule)
            near = difflib.get_close_matches(plain, paths, 1, 0)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            messages[rule] = (
                f"the rule {rule!r} matches no variable and no output{hint}"
            )
    return messages


def judge(model, layout_map):
    """Warns of the rules that match nothing, once each, or raises.

    Args:
        model: `keras.Model`, whose variables exist.
        layout_map: `keras.distribution.LayoutMap`; `on_unmatched` of ours says
            what to do.

    Raises:
        ValueError: if `on_unmatched` is `"raise"`, and a rule matches nothing.
    """
    action = getattr(layout_map, "on_unmatched", "warn")
    if action == "ignore":
        return
    warned = vars(layout_map).setdefault("_unmatched_rules", set())
    messages = {
        rule: message
        for rule, message in unmatched_rules(model, layout_map).items()
        if rule not in warned
    }
    if not messages:
        return
    text = (
        "Every layout rule should match something. Received: "
        f"{'; '.join(messages.values())}. `kmd.inspect` shows all paths."
    )
    if action == "raise":
        raise ValueError(text)
    warned.update(messages)
    warnings.warn(text, stacklevel=2)
