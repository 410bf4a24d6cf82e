"""The estimated time of a step: a walk through the compiler's own schedule.

What an operation takes is what the compiler expects it to (its estimated
cycles, which count the memory that it waits for), and a collective what the
links allow. A collective that is begun and ended apart goes on beside what
stands between; any other is waited for. Those that are under way at the same
time follow each other.
"""

import dataclasses

from keras_meshdist.planner.collectives import kind_of

# How a program calls a kernel that was written for TPUs by hand.
_KERNEL = 'custom_call_target="tpu_custom_call"'


@dataclasses.dataclass(frozen=True)
class Duration:
    """Seconds of a step, or of a part of one.

    Args:
        compute: float, of operations on a chip.
        exchange: float, of collectives, hidden or not.
        exposed: float, of collectives that are waited for.
    """

    compute: float = 0.0
    exchange: float = 0.0
    exposed: float = 0.0

    @property
    def total(self):
        """Seconds from the beginning to the end."""
        return self.compute + self.exposed

    def times(self, count):
        """Returns this so many times after one another."""
        return Duration(
            self.compute * count, self.exchange * count, self.exposed * count
        )


class Walk:
    """Walks through a program.

    Args:
        program: `Program`, in the order of its schedule.
        clock: float, cycles a second.
        seconds: dict from the name of a collective to what it takes.
    """

    def __init__(self, program, clock, seconds):
        self._program, self._clock, self._seconds = program, clock, seconds
        self._known = {}

    def step(self):
        """Returns the `Duration` of the whole program."""
        return self.of(self._program.entry)

    def of(self, computation):
        """Returns the `Duration` of a computation."""
        if computation not in self._known:
            self._known[computation] = self._walk(computation)
        return self._known[computation]

    def _walk(self, computation):
        now = compute = exchange = exposed = 0.0
        free, ends = 0.0, {}
        for line in self._program.computations.get(computation, ()):
            done = [o for o in line.operands if o in ends]
            if line.opcode.endswith("-done") and done:
                waited = max(0.0, ends.pop(done[0]) - now)
                exposed, now = exposed + waited, now + waited
                continue
            if line.opcode.endswith("-update") and done:
                ends[line.name] = ends.pop(done[0])
                continue
            inside = self._inside(line)
            own = line.cycles / self._clock
            alone = self._seconds.get(line.name, 0.0) if kind_of(line) else 0.0
            sent = alone + inside.exchange
            if line.opcode.endswith("-start") and sent:
                free = max(free, now) + sent
                ends[line.name] = free
                exchange += sent
                continue
            if line.opcode == "fusion":
                # Its cycles are those of all that is within it.
                spent = own
                waited = max(0.0, inside.exchange - own)
            elif kind_of(line):
                spent, waited = 0.0, alone
            else:
                spent = own + inside.compute
                waited = inside.exposed
            compute += spent
            exposed += waited
            exchange += sent
            now += spent + waited
        return Duration(compute, exchange, exposed)

    def _inside(self, line):
        found = Duration()
        for how, called in line.called:
            if how == "to_apply" and line.opcode != "call":
                continue
            if how in ("body", "condition"):
                trips = self._program.runs[called] // max(
                    1, self._runs_of(line)
                )
                part = self.of(called).times(trips)
            else:
                part = self.of(called)
            found = Duration(
                found.compute + part.compute,
                found.exchange + part.exchange,
                found.exposed + part.exposed,
            )
        return found

    def _runs_of(self, line):
        for name, lines in self._program.computations.items():
            if any(other is line for other in lines):
                return self._program.runs.get(name, 1)
        return 1


def what_is_unknown(program):
    """Returns sentences about what the estimate can't know, as a list."""
    found = [
        f"the loop {name!r} runs an unknown number of times, and counts once"
        for name in program.loops_of_unknown_length
    ]
    kernels = sum(
        times
        for name, times in program.runs.items()
        for line in program.computations.get(name, ())
        if _KERNEL in line.attributes and not line.cycles
    )
    if kernels:
        found.append(
            f"{kernels} calls of hand-written kernels take a time that the "
            "compiler doesn't estimate, and count as nothing"
        )
    return found
