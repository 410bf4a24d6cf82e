"""Compiled programs on disk, found again by what was compiled."""

import gzip
import hashlib
import json
import os
import pathlib
import tempfile


def folder():
    """Returns the folder of the cache.

    That is `keras_meshdist/plans` in `$XDG_CACHE_HOME`, or in `~/.cache`.
    """
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "keras_meshdist" / "plans"


def key_of(*parts):
    """Returns the key of what was compiled, from all that it depends on.

    Args:
        *parts: str, or what `json` takes.
    """
    digest = hashlib.sha256()
    for part in parts:
        text = part if isinstance(part, str) else json.dumps(part)
        digest.update(f"{len(text)}:".encode())
        digest.update(text.encode())
    return digest.hexdigest()


def load(key):
    """Returns what was stored under a key, or `None`.

    A file that can't be read counts as none.
    """
    try:
        with gzip.open(folder() / f"{key}.json.gz", "rt") as file:
            return json.load(file)
    except (OSError, EOFError, ValueError):
        return None


def store(key, value):
    """Stores what `json` takes under a key; does without where it can't."""
    place = folder()
    try:
        place.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=place, suffix=".part")
        with (
            os.fdopen(handle, "wb") as raw,
            gzip.open(raw, "wt", compresslevel=4) as file,
        ):
            json.dump(value, file)
        os.replace(name, place / f"{key}.json.gz")
    except OSError:
        return
