"""`doctor`: each process looks around, and all compare what they saw."""

import pickle
import time

from rich.console import Console

from keras_meshdist import coordination, environments, joining
from keras_meshdist.checkup import checks, comparisons, facts, together
from keras_meshdist.checkup.report import Checkup, Finding


def doctor(timeout=60.0, verbose=True):
    """Says whether training will go right here, and if not, what helps.

    Looks at versions, hooks, devices, threads, and what started the
    processes. On several processes each of them must call it; they first join
    as `initialize` does, if they haven't, then compare what they see, and add
    up a number over all devices. All get the same report.

    Example:

    ```python
    report = kmd.doctor()
    assert report.ok, report.findings
    ```

    Args:
        timeout: float, seconds that it waits for other processes, at each
            place where it does. Defaults to 60.
        verbose: bool, whether process 0 prints the report. Defaults to
            `True`.

    Returns:
        A report: `ok`, `findings` (each with `message` and `remedy`),
        `checks` (each with `name`, `status`, `message` and `findings`),
        `to_dict()` and `to_json()`.
    """
    report = _examine(timeout)
    if verbose and report.process == 0:
        Console(soft_wrap=True).print(report)
    return report


def _examine(timeout):
    expected, findings = _join(timeout)
    meeting = _Meeting(timeout)
    # In this thread, since Keras keeps seed and distribution for each.
    meeting.look(facts.of_program)
    meeting.look(lambda: together.within(facts.of_devices, timeout))
    meeting.look(lambda: together.within(together.collective, timeout))
    meeting.look(lambda: together.clock(timeout))
    everyone = meeting.everyone
    return Checkup(
        coordination.process_id(),
        expected,
        everyone,
        [
            checks.launcher(everyone),
            checks.processes(everyone, expected, findings + meeting.findings),
            checks.versions(everyone),
            checks.hooks(everyone),
            checks.devices(everyone),
            checks.threads(everyone),
            comparisons.code(everyone),
            comparisons.settings(everyone),
            comparisons.mesh(everyone),
            comparisons.seeds(everyone),
            comparisons.hosts(everyone),
            comparisons.clocks(everyone),
            comparisons.collective(everyone),
        ],
    )


def _join(timeout):
    """Joins the other processes; returns their number, and what went wrong."""
    expected = None
    try:
        for environment in environments.found():
            if expected is None:
                expected = environment.processes
        if not coordination.initialized() and (expected or 1) > 1:
            joining.initialize(timeout=timeout)
    except TimeoutError as error:
        remedy = (
            "Start `doctor` on every process, and see to it that each reaches "
            "the port of process 0. Every process shows its own report now."
        )
        return expected, [Finding(str(error), remedy)]
    except ValueError as error:
        remedy = "Correct the arguments or variables that start the processes."
        return expected, [Finding(str(error), remedy)]
    except RuntimeError as error:
        remedy = "Call `initialize` or `doctor` first, on free ports."
        return expected, [Finding(str(error), remedy)]
    return expected or coordination.process_count(), []


class _Meeting:
    """Looks at something on all processes, and shows it to all.

    Args:
        timeout: float, seconds for each look.
    """

    def __init__(self, timeout):
        self._timeout = timeout
        self._steps = 0
        self.everyone = [{} for _ in range(coordination.process_count())]
        self.findings = []

    def look(self, function):
        """Adds what a function returns on each process, or that it failed."""
        if self.findings or any("error" in seen for seen in self.everyone):
            return
        self._steps += 1
        began = time.monotonic()
        try:
            seen = function()
        except Exception as error:
            seen = {"error": f"{type(error).__name__}: {error}"}
        # Another one may need all of its time.
        left = 2 * self._timeout - (time.monotonic() - began)
        try:
            answers = coordination.exchange(
                f"doctor/{self._steps}", pickle.dumps(seen), left
            )
        except (TimeoutError, RuntimeError) as error:
            self.everyone = [
                {**self.everyone[coordination.process_id()], **seen}
            ]
            remedy = (
                "Call `doctor` on every process, and look at the output of "
                "those that are missing."
            )
            self.findings = [Finding(str(error), remedy)]
            return
        for known, answer in zip(self.everyone, answers, strict=True):
            known.update(pickle.loads(answer))
