"""A pool in simulated time: the decisions of `scheduling` and `routing`, without engines and without waiting."""

from __future__ import annotations

import heapq
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tinkex.engine.interface import Spot
from tinkex.server.routing import Line, Load, find_spot
from tinkex.server.scheduling import Candidate, Shares


@dataclass(eq=False)
class Trainee:
    """A model whose client sends a pass and an optimizer step, waits for both, thinks, and begins again."""

    name: str
    key: int
    home: str
    step: float
    thinks: float
    queue: deque[float] = field(default_factory=deque)
    since: float = 0.0
    running: bool = False
    at_step: bool = True
    usual: Counter[bool] = field(default_factory=Counter)


class SimulatedPool:
    """Engines by name; `moving` is the seconds that a model needs to change its engine."""

    def __init__(self, engines: int, *, moving: float = 0.2, seed: int = 0) -> None:
        self.loads = {f"e{number:02d}": Load() for number in range(engines)}
        self.shares = Shares()
        self.models: dict[str, Trainee] = {}
        self.now = 0.0
        self.moves = 0
        self._since = 0.0
        #: The key of each request, and when its engine worked on it.
        self._worked: list[tuple[int, float, float]] = []
        self._moving = moving
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._free_at = dict.fromkeys(self.loads, 0.0)

    def add(self, key: int, home: str, *, step: float, thinks: float) -> None:
        model = Trainee(f"m{len(self.models):03d}", key, home, step, thinks)
        self.models[model.name] = model
        self.loads[home].models += 1
        self._after(self._random.random(), lambda: self._ask(model))

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        self.now = until

    def _after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, self._random.getrandbits(62), event))

    def _ask(self, model: Trainee) -> None:
        busy = {each.key for each in self.models.values() if each.queue or each.running}
        if model.key not in busy:
            self.shares.arrive(model.key, busy)
        varied = model.step * self._random.uniform(0.9, 1.1)
        model.queue.extend([varied * 0.9, varied * 0.1])
        model.since = self.now
        self._schedule()

    def _schedule(self) -> None:
        while True:
            ready = [each for each in self.models.values() if each.queue and not each.running]
            shortest = min(
                self.loads.items(), key=lambda each: (each[1].in_line, each[1].models, each[0])
            )
            candidates = []
            for model in ready:
                home = model.home, self.loads[model.home]
                spot = find_spot(home, shortest if model.at_step else None, self._moving)
                if spot is not None:
                    candidates.append(Candidate(model.name, model.key, model.since, spot))
            chosen = self.shares.choose(candidates)
            if chosen is None:
                return
            self._start(self.models[chosen.model_id], chosen.spot)

    def _start(self, model: Trainee, spot: Spot) -> None:
        seconds = model.queue.popleft()
        if spot.moves:
            self.loads[model.home].models -= 1
            model.home = spot.engine
            self.loads[model.home].models += 1
            self.moves += 1
            seconds += self._moving
        model.running = True
        line, joined = self.loads[model.home].line, self.now
        line.join()
        begins = max(self.now, self._free_at[model.home])
        self._free_at[model.home] = ends = begins + seconds
        self._worked.append((model.key, begins, ends))
        expected = model.usual[model.at_step]
        self.shares.begin(model.key, expected)
        self._after(ends - self.now, lambda: self._end(model, line, joined, expected))

    def _end(self, model: Trainee, line: Line, joined: float, expected: float) -> None:
        used = line.leave(joined, self.now)
        model.usual[model.at_step] = used  # type: ignore[assignment]
        self.shares.end(model.key, expected, used)
        model.running, model.since = False, self.now
        model.at_step = not model.queue
        if not model.queue:
            self._after(self._random.expovariate(1 / model.thinks), lambda: self._ask(model))
        self._schedule()

    def begin_measuring(self) -> None:
        self.moves, self._since = 0, self.now

    def used(self) -> Counter[int]:
        """Seconds of engines that each key has used since measuring began."""
        seconds: Counter[int] = Counter()
        for key, begins, ends in self._worked:
            within = max(0.0, min(ends, self.now) - max(begins, self._since))
            seconds[key] += within  # type: ignore[assignment]
        return seconds

    @property
    def busy(self) -> float:
        """The part of the time that engines have worked since measuring began."""
        return sum(self.used().values()) / (self.now - self._since) / len(self.loads)

    @property
    def spread(self) -> float:
        """How far the most and the least served key are from the mean, as a part of it."""
        used = self.used().values()
        mean = sum(used) / len(used)
        return max(max(used) - mean, mean - min(used)) / mean
