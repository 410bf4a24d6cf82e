"""A process of the planner's own: it takes jobs, and answers with figures.

Jobs come as pickles on standard input, each after its length; answers leave as
lines of JSON on what was standard output when it began. Whatever a library
prints goes to standard error.
"""

import json
import os
import pickle
import struct
import sys


def main():
    """Answers jobs until there are no more, or one has been compiled."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    settings = _read(sys.stdin.buffer)
    sys.path[:] = settings["path"]
    import jax
    import keras

    jax.config.update("jax_enable_x64", settings["x64"])
    keras.config.set_floatx(settings["floatx"])
    keras.config.set_dtype_policy(settings["dtype_policy"])
    while (job := _read(sys.stdin.buffer)) is not None:
        found = job.answer()
        answers.write(json.dumps(found) + "\n")
        answers.flush()
        if found.get("compiled", True):
            # The next compilation gets a process of its own.
            break


def _read(stream):
    head = stream.read(4)
    if len(head) < 4:
        return None
    (size,) = struct.unpack("<I", head)
    return pickle.loads(stream.read(size))


if __name__ == "__main__":
    main()
