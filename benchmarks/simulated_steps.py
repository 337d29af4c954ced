"""Steps of training in simulated time: generation and training in turn, or on separate GPUs.

Times may be of any numeric type, so that tests can be exact.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# simulated, and left out before the mean
STEPS = 16
WARM = 4
Number = Any  # float, or Fraction in the tests


@dataclass(frozen=True)
class Job:
    """A step's work.

    Attributes:
        prompts: of a step.
        lengths: of the n-th prompt that is handed out, the response tokens of each sample.
        decode, row: seconds of a decode step of an engine, and what each row in it adds.
        training: GPU-seconds for a token of prompt and response, in log-prob passes and update.
        prompt: tokens of a prompt.
        fixed: seconds of the trainers' step however many they are.
        reward: seconds from a response's end to its score, as far as no log-prob pass hides them.
        refit, send: seconds to hand weights over, colocated and apart; trainers wait.
        engine, trainer: GPUs of an engine, and of a copy of the model that trains.
        slots: rows that an engine decodes together at most.
    """

    prompts: int
    lengths: Callable[[int], Sequence[int]]
    decode: Number
    row: Number
    training: Number
    prompt: int = 0
    fixed: Number = 0
    reward: Number = 0
    refit: Number = 0
    send: Number = 0
    engine: int = 1
    trainer: int = 1
    slots: int = 256

    def train_seconds(self, gpus: int, groups: Sequence[Sequence[int]]) -> Number:
        tokens = sum(self.prompt + length for group in groups for length in group)
        return self.training * tokens / gpus + self.fixed

    def groups(self, step: int) -> list[Sequence[int]]:
        """Of the step, from 0, in order."""
        return [self.lengths(step * self.prompts + i) for i in range(self.prompts)]


@dataclass(frozen=True)
class StepTimes:
    """Means over the steps after the first `WARM`."""

    seconds: Number  # a step
    waiting: Number = 0  # share of them in which trainers wait
    age: Number = 0  # steps
    dropped: Number = 0  # groups that got too old, a group that trained


class Engine:
    """Continuous batching: all rows get a token a decode step, and those that are too many wait."""

    def __init__(self, job: Job):
        self._job = job
        self._time: Number = 0
        self._tokens: Number = 0
        self._count = itertools.count()
        self._active: list[tuple[Number, int, Any]] = []
        self._waiting = deque[tuple[int, Any]]()

    @property
    def rows(self) -> int:
        return len(self._active) + len(self._waiting)

    @property
    def end(self) -> Number:
        """When the next row ends; infinite without rows."""
        if not self._active:
            return math.inf
        last_token, _, _ = self._active[0]
        return self._time + (last_token - self._tokens) * self._pace

    @property
    def _pace(self) -> Number:
        return self._job.decode + self._job.row * len(self._active)

    def add(self, time: Number, lengths: Sequence[int], tag: Any = None) -> None:
        if self._active:
            self._tokens += (time - self._time) / self._pace
        self._time = time
        self._waiting.extend((length, tag) for length in lengths)
        self._fill()

    def pop(self) -> Any:
        """Go on until the next row's end; return its tag."""
        self._time = self.end
        self._tokens, _, tag = heapq.heappop(self._active)
        self._fill()
        return tag

    def _fill(self) -> None:
        while self._waiting and len(self._active) < self._job.slots:
            length, tag = self._waiting.popleft()
            heapq.heappush(self._active, (self._tokens + length, next(self._count), tag))


def call_seconds(job: Job, groups: Sequence[Sequence[int]]) -> Number:
    """Of groups that an engine generates in one call."""
    engine = Engine(job)
    end = 0
    engine.add(0, [length for group in groups for length in group])
    while engine.rows:
        end = engine.end
        engine.pop()
    return end


def generate_seconds(job: Job, gpus: int, step: int) -> Number:
    """Of a colocated step: each engine has its share of the prompts."""
    engines = gpus // job.engine
    groups = job.groups(step)
    busy = min(engines, len(groups))
    return max(call_seconds(job, groups[i::engines]) for i in range(busy))


def colocated(job: Job, gpus: int, steps: int = STEPS) -> StepTimes:
    handed = job.reward + job.refit
    seconds = []
    for step in range(WARM, steps):
        generation = generate_seconds(job, gpus, step)
        training = job.train_seconds(gpus, job.groups(step))
        seconds.append(generation + handed + training)
    return StepTimes(sum(seconds) / len(seconds))


def in_order(job: Job, trainers: int, generators: int, k: int, steps: int = STEPS) -> StepTimes:
    """Draw step s, from 1, with version max(0, s - 1 - k).

    The next micro-batch goes to the engine that is free first.
    """
    engines = generators // job.engine
    size = -(-job.prompts // engines)
    free: list[Number] = [0] * engines
    # versions: when each is there
    versions = list[Number]([0])
    waits = list[Number]()
    ages = list[Number]()
    for step in range(1, steps + 1):
        groups = job.groups(step - 1)
        version = max(0, step - 1 - k)
        ready = 0
        for start in range(0, job.prompts, size):
            begin = max(heapq.heappop(free), versions[version])
            end = begin + call_seconds(job, groups[start : start + size])
            heapq.heappush(free, end)
            ready = max(ready, end + job.reward)
        wait = max(0, ready - versions[-1])
        waits.append(wait)
        ages.append(step - 1 - version)
        trained = versions[-1] + wait + job.train_seconds(trainers, groups)
        versions.append(trained + job.send)
    return _after_warm(versions, waits, ages, 0)


def _after_warm(
    versions: list[Number], waits: list[Number], ages: list[Number], dropped: Number
) -> StepTimes:
    count = len(waits) - WARM
    whole = versions[-1] - versions[WARM]
    waiting = sum(waits[WARM:]) / whole
    age = sum(ages[WARM:]) / count
    return StepTimes(whole / count, waiting, age, dropped)


@dataclass
class Group:
    """The samples of a prompt, drawn as they finish."""

    lengths: Sequence[int]
    version: int  # of the weights that it began with
    running: int  # samples that are not at their end
    scored: Number = math.inf  # when


class Generators:
    """Engines that are given whole groups, the emptiest first."""

    def __init__(self, job: Job, count: int):
        self._slots = job.slots
        self._engines = [Engine(job) for _ in range(count)]
        self._ends: list[tuple[Number, int]] = []  # of engines; some are out of date

    @property
    def end(self) -> Number:
        """When the next row ends."""
        while self._ends and self._engines[self._ends[0][1]].end != self._ends[0][0]:
            heapq.heappop(self._ends)
        return self._ends[0][0] if self._ends else math.inf

    def give(self, time: Number, group: Group) -> bool:
        """Give a group to the emptiest engine; return whether there was room."""
        at = min(range(len(self._engines)), key=lambda i: self._engines[i].rows)
        engine = self._engines[at]
        if engine.rows and engine.rows + group.running > self._slots:
            return False
        engine.add(time, group.lengths, group)
        heapq.heappush(self._ends, (engine.end, at))
        return True

    def pop(self) -> Group:
        """Finish the row that ends next; return its group."""
        _, at = heapq.heappop(self._ends)
        engine = self._engines[at]
        group = engine.pop()
        heapq.heappush(self._ends, (engine.end, at))
        return group


def as_finished(job: Job, trainers: int, generators: int, k: int, steps: int = STEPS) -> StepTimes:
    """Train on the first finished groups.

    Responses in flight continue when the weights change. The age of a group is the age of the
    weights that it began with.
    """
    pool = Generators(job, generators // job.engine)
    ready = deque[Group]()
    taken: list[Group] = []
    time = 0
    trained = math.inf
    drawn = 0
    under_way = 0
    dropped = 0
    versions = list[Number]([0])
    waits = list[Number]()
    ages = list[Number]()
    while len(versions) <= steps:
        version = len(versions) - 1
        while under_way < (k + 1) * job.prompts:
            lengths = job.lengths(drawn)
            if not pool.give(time, Group(lengths, version, len(lengths))):
                break
            drawn += 1
            under_way += 1
        scored = math.inf
        if not taken and len(ready) >= job.prompts:
            scored = ready[job.prompts - 1].scored
        if scored <= time:
            taken = [ready.popleft() for _ in range(job.prompts)]
            waits.append(time - versions[-1])
            total_age = sum(version - group.version for group in taken)
            ages.append(total_age / len(taken))
            lengths = [group.lengths for group in taken]
            trained = time + job.train_seconds(trainers, lengths) + job.send
            continue
        time = min(trained, scored, pool.end)
        if time == trained:
            versions.append(time)
            under_way -= len(taken)
            taken = []
            trained = math.inf
            fresh = deque(group for group in ready if version + 1 - group.version <= k)
            too_old = len(ready) - len(fresh)
            dropped += too_old
            under_way -= too_old
            ready = fresh
        elif time == pool.end:
            group = pool.pop()
            group.running -= 1
            if not group.running and version - group.version <= k:
                group.scored = time + job.reward
                ready.append(group)
            elif not group.running:
                dropped += 1
                under_way -= 1
    return _after_warm(versions, waits, ages, dropped / (steps * job.prompts))


def best_split(
    job: Job, gpus: int, simulate: Callable[..., StepTimes], k: int, steps: int = STEPS
) -> tuple[int, int, StepTimes]:
    """The numbers of trainers and generators, of at most 15 splits, with the shortest step."""
    unit = math.lcm(job.engine, job.trainer, max(1, gpus // 16))
    splits = []
    for trainers in range(unit, gpus, unit):
        generators = gpus - trainers
        step = simulate(job, trainers, generators, k, steps)
        splits.append((trainers, generators, step))
    return min(splits, key=lambda split: split[2].seconds)
