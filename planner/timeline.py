"""An event simulator of the three lanes: GPU, CPU and the link. It mirrors how the engine orders its work.

GPU work is queued in graph order. A CPU step begins when the GPU has reached it, and everything queued later waits for
its result, except work that does not depend on it: that is queued before the step starts. Streamed weights travel in
order of use, ahead of time and across rounds, into a ring of fixed regions; one launch waits for all its copies.

The thread that hands work to the GPU is the one that computes on the CPU. What follows a CPU step is handed over before
the step is computed, while the GPU still makes its inputs; handing over takes the CPU lane's time. The first piece of
each kind after a CPU step takes longer: the step's weights have pushed the driver's code and data out of the caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from .plan import WeightClass
from .problem import Costs, ExpertStep, Graph

_MAX_ROUNDS = 8
_STEADY = 1e-4  # relative difference of two rounds that counts as none

_LAUNCH, _PUBLISH, _COMPUTE, _EXPERTS = range(4)
# launch: (kind, GPU seconds, first stream, end of streams, hand-over seconds); publish: (kind, down seconds, 0, 0, 0);
# compute: (kind, CPU seconds, up seconds, 0, seconds to hand over everything up to the next compute);
# experts: likewise, with the index of the expert step instead of 0.
# Tuples, because a search runs through millions of them.
_Operation = tuple[int, float, float, int, float]


@dataclass(frozen=True)
class Event:
    lane: str  # "gpu" | "cpu" | "link"
    uses: tuple[int, ...]  # indices into Profile.weights
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Timeline:
    """One round (a token, or a micro-batch) in steady state, and the first one, whose copies start with it."""

    seconds: float
    first_seconds: float
    gpu_busy_seconds: float
    cpu_busy_seconds: float
    link_busy_seconds: float
    n_cpu_steps: int
    events: tuple[Event, ...] = ()  # of one steady round, times from its start; a copy may start before it


def simulate(
    graph: Graph,
    costs: Costs,
    classes: Sequence[WeightClass],
    ring_bytes: int,
    *,
    is_rough: bool = False,
    with_events: bool = False,
    may_merge: bool = True,
) -> Timeline:
    """Return the timeline of `classes`, one per use of a weight. With `may_merge`, neighbouring streams share a launch.

    How much the CPU and the link slow each other down follows from how busy the other one turns out to be; a rough
    timeline takes both as always busy, which is nearly true of good plans and takes half the time.
    Expert steps, where all lanes work at once, have that in their times already.
    """
    program = _Program(graph, costs, classes, ring_bytes, may_merge)
    streams = program.streams
    ends = [end for kind, _, first, end, _ in program.operations if kind == _LAUNCH for _ in range(int(first), end)]
    blockers = ring_blockers([graph.ring_bytes[use] for use in streams], ends, ring_bytes)
    alone_link = sum(costs.link[use] for use in streams)
    alone_cpu = sum(operation[1] for operation in program.operations if operation[0] == _COMPUTE)
    experts = program.expert_steps
    # Assume first that both are always busy, then use the shares that this gives.
    link_share, cpu_share = (1.0 if streams else 0.0), (1.0 if alone_cpu else 0.0)
    both = bool(streams) and alone_cpu > 0 and not is_rough
    while True:
        cpu_factor = 1.0 + (costs.cpu_slowdown - 1.0) * link_share
        link_factor = 1.0 + (costs.link_slowdown - 1.0) * cpu_share
        lanes = _Lanes()
        copies = [costs.link[use] * link_factor for use in streams]
        lengths = [lanes.run_round(program, copies, blockers, cpu_factor)]
        while len(lengths) < _MAX_ROUNDS:
            lengths.append(lanes.run_round(program, copies, blockers, cpu_factor))
            if len(lengths) > 2 and abs(lengths[-1] - lengths[-2]) <= _STEADY * lengths[-1]:
                break
        seconds = (lengths[-1] + lengths[-2]) / 2
        if not both:
            break
        both = False
        link_share = min(1.0, alone_link * link_factor / seconds)
        cpu_share = min(1.0, alone_cpu * cpu_factor / seconds)
    events: list[Event] = []
    if with_events:
        lanes.run_round(program, copies, blockers, cpu_factor, events)
    return Timeline(
        seconds=seconds,
        first_seconds=lengths[0],
        gpu_busy_seconds=sum(operation[1] for operation in program.operations if operation[0] == _LAUNCH)
        + sum(step.gpu_seconds for step in experts),
        cpu_busy_seconds=alone_cpu * cpu_factor + sum(step.cpu_seconds for step in experts),
        link_busy_seconds=alone_link * link_factor + sum(step.link_seconds for step in experts),
        n_cpu_steps=sum(operation[0] >= _COMPUTE for operation in program.operations),
        events=tuple(events),
    )


def ring_blockers(sizes_bytes: Sequence[int], launch_ends: Sequence[int], ring_bytes: int) -> list[int]:
    """Return for every stream how many uses back (cyclically, 1..n) the last use of an overlapping region lies.

    A copy may start when that use is over. Regions follow each other and start again at 0 where one does not fit; if
    copies get farther ahead that way, launches (`launch_ends`: the end of each stream's) take turns at the ring's ends.
    """
    blockers = _blockers(sizes_bytes, _in_turn(sizes_bytes, ring_bytes))
    if not sizes_bytes or 3 * max(sizes_bytes) <= ring_bytes:
        return blockers
    others = _blockers(sizes_bytes, _at_both_ends(sizes_bytes, launch_ends, ring_bytes))
    return others if sum(others) > sum(blockers) else blockers


def _in_turn(sizes_bytes: Sequence[int], ring_bytes: int) -> list[int]:
    starts = []
    following = 0
    for size in sizes_bytes:
        if following + size > ring_bytes:
            following = 0
        starts.append(following)
        following += size
    return starts


def _at_both_ends(sizes_bytes: Sequence[int], launch_ends: Sequence[int], ring_bytes: int) -> list[int]:
    starts: list[int] = []
    is_at_start = True
    while len(starts) < len(sizes_bytes):
        sizes = sizes_bytes[len(starts) : launch_ends[len(starts)]]
        following = 0 if is_at_start else ring_bytes - sum(sizes)
        for size in sizes:
            starts.append(following)
            following += size
        is_at_start = not is_at_start
    return starts


def _blockers(sizes_bytes: Sequence[int], starts: Sequence[int]) -> list[int]:
    n = len(sizes_bytes)
    blockers = []
    for i in range(n):
        start, end = starts[i], starts[i] + sizes_bytes[i]
        distance = 1
        while distance < n:
            j = i - distance
            if starts[j] < end and start < starts[j] + sizes_bytes[j]:
                break
            distance += 1
        blockers.append(distance)
    return blockers


@dataclass
class _Program:
    """The operations of one round in the order in which the engine hands them out."""

    graph: Graph
    costs: Costs
    classes: Sequence[WeightClass]
    ring_bytes: int
    may_merge: bool
    operations: list[_Operation] = field(default_factory=list)
    uses: list[tuple[int, ...]] = field(default_factory=list)  # of each operation
    streams: list[int] = field(default_factory=list)  # uses, in order
    expert_steps: list[ExpertStep] = field(default_factory=list)  # in order

    def __post_init__(self) -> None:
        graph, costs, classes = self.graph, self.costs, self.classes
        self._launch_seconds = 0.0
        self._launch_uses: list[int] = []
        self._launch_first_stream = 0
        self._launch_ring_bytes = 0
        self._coldness: list[float] = []  # of each CPU step: the part of a core's cache that its weights fill
        step: list[int] = []  # uses in the CPU step that is being collected
        for use, cls in enumerate(classes):
            on_cpu = cls == "cpu"
            before = costs.gpu_before[use]
            if step:
                # What reads a result of the step ends it; so does a CPU use that reads what the GPU makes meanwhile.
                ends = graph.leaves_cpu[step[-1]] or (on_cpu and before > 0.0)
                for source in graph.inputs[use]:
                    if source >= step[0] and (classes[source] == "cpu") is not on_cpu:
                        ends = True
                if ends:
                    self._end_step(step)
                    step = []
            if on_cpu:
                if before > 0.0:
                    self._add_gpu_work(use, before)
                if not step:
                    self._end_launch()
                    self._append((_PUBLISH, costs.down[use], 0.0, 0, 0.0), ())
                step.append(use)
                continue
            if cls == "stream":
                size = graph.ring_bytes[use]
                is_first = len(self.streams) == self._launch_first_stream
                if is_first or not self.may_merge or 2 * (self._launch_ring_bytes + size) > self.ring_bytes:
                    self._end_launch()
                self.streams.append(use)
                self._launch_ring_bytes += size
            self._add_gpu_work(use, before + costs.gpu[use])
        if step:
            self._end_step(step)
        self._end_launch()
        self._hand_over_before_computing()

    def _hand_over_before_computing(self) -> None:
        """Move the hand-over time of operations that follow a CPU step to that step, and add what cold caches cost."""
        if not self._coldness:
            return
        cold_launch, cold_stream, cold_crossing = self.costs.host_cold
        coldness = launch_coldness = stream_coldness = self._coldness[-1]  # at the end of the round before
        n_steps, step = 0, -1  # so far, and where the last one is
        added = []
        for index, (kind, _, extra, end_stream, handover) in enumerate(self.operations):
            if kind == _LAUNCH:
                if launch_coldness:
                    handover += launch_coldness * cold_launch
                    launch_coldness = 0.0
                if stream_coldness and end_stream > extra:
                    handover += stream_coldness * cold_stream
                    stream_coldness = 0.0
            elif kind >= _COMPUTE:
                if n_steps:
                    coldness = launch_coldness = stream_coldness = self._coldness[n_steps - 1]
                n_steps, step = n_steps + 1, index
                handover += coldness * cold_crossing
                if kind == _EXPERTS:
                    handover += launch_coldness * cold_launch
                    launch_coldness = 0.0
            added.append(handover)
            if step >= 0 and step != index:
                added[step] += handover
                added[index] = 0.0
        self.operations = [
            (kind, seconds, extra, end_stream, handover)
            for (kind, seconds, extra, end_stream, _), handover in zip(self.operations, added, strict=True)
        ]

    def _add_gpu_work(self, use: int, seconds: float) -> None:
        if seconds > 0.0 or self.classes[use] == "stream":
            self._launch_seconds += seconds
            self._launch_uses.append(use)

    def _end_launch(self) -> None:
        if self._launch_uses:
            costs, first, end = self.costs, self._launch_first_stream, len(self.streams)
            handover = costs.host_launch + (end - first) * costs.host_stream
            if costs.padding:  # tiny copies: the link takes as long as queueing them
                handover += sum(costs.padding[use] for use in self.streams[first:end])
            seconds = self._launch_seconds + costs.launch_gap
            self._append((_LAUNCH, seconds, first, end, handover), tuple(self._launch_uses))
        self._launch_seconds, self._launch_uses = 0.0, []
        self._launch_first_stream, self._launch_ring_bytes = len(self.streams), 0

    def _end_step(self, step: list[int]) -> None:
        self._end_launch()  # what does not depend on the step runs meanwhile
        experts = self.costs.expert_steps.get(tuple(step)) if self.costs.expert_steps else None
        filled = 0.0
        for use in step if self.costs.coldness else ():
            filled += self.costs.coldness[use]
        self._coldness.append(min(1.0, filled))
        up, handover = self.costs.up[step[-1]], self.costs.host_crossing
        if experts is None:
            self._append((_COMPUTE, sum(self.costs.cpu[use] for use in step), up, 0, handover), tuple(step))
        else:
            handover += self.costs.host_launch  # of the GPU's share
            self._append((_EXPERTS, experts.cpu_seconds, up, len(self.expert_steps), handover), tuple(step))
            self.expert_steps.append(experts)

    def _append(self, operation: _Operation, uses: tuple[int, ...]) -> None:
        self.operations.append(operation)
        self.uses.append(uses)


class _Lanes:
    """When each lane is free, and when each streamed weight so far was last read. Seconds from the first round."""

    def __init__(self) -> None:
        self._gpu = self._cpu = self._link = 0.0
        self._read: list[float] = []
        self._launched: list[float] = []  # when the launch that reads each streamed weight was handed over

    def run_round(
        self,
        program: _Program,
        copies: list[float],
        blockers: list[int],
        cpu_factor: float,
        events: list[Event] | None = None,
    ) -> float:
        """Run every operation once and return how long that took. A round starts when the one before has ended."""
        start = gpu = cpu = max(self._gpu, self._cpu)
        link, read, launched = self._link, self._read, self._launched
        base = len(read)
        signal = program.costs.handshake / 2  # from the link to the GPU, or back
        ready = 0.0
        handed_over = cpu  # when the operations up to the next compute were handed over
        for index, (kind, seconds, extra, end_stream, handover) in enumerate(program.operations):
            if kind == _LAUNCH:
                if handover:  # before the first CPU step
                    handed_over = cpu = cpu + handover
                first_stream = int(extra)
                for stream in range(first_stream, end_stream):
                    blocker = base + stream - blockers[stream]
                    begin = link
                    if blocker >= 0:  # its region is free once it was read, and known to be once that was handed over
                        if read[blocker] > begin:
                            begin = read[blocker]
                        if launched[blocker] > begin:
                            begin = launched[blocker]
                    link = begin + copies[stream]
                    if events is not None:
                        events.append(Event("link", (program.streams[stream],), begin - start, link - start))
                    # Within one launch no region is used twice, so the end of the launch is known below.
                    read.append(0.0)
                    launched.append(handed_over)
                if handed_over > gpu:
                    gpu = handed_over
                if end_stream > first_stream and link + signal > gpu:
                    gpu = link + signal
                if events is not None:
                    events.append(Event("gpu", program.uses[index], gpu - start, gpu + seconds - start))
                gpu += seconds
                for stream in range(first_stream, end_stream):
                    read[base + stream] = gpu + signal
            elif kind == _PUBLISH:
                ready = gpu + seconds
            else:
                handed_over = cpu + handover
                begin = handed_over if handed_over > ready else ready
                cpu = end = begin + seconds * (cpu_factor if kind == _COMPUTE else 1.0)
                if events is not None:
                    events.append(Event("cpu", program.uses[index], begin - start, cpu - start))
                if kind == _EXPERTS:
                    step = program.expert_steps[end_stream]
                    end = begin + step.seconds
                    begin = max(begin, link)
                    link = begin + step.link_seconds
                    if events is not None:
                        uses = program.uses[index]
                        events.append(Event("link", uses, begin - start, link - start))
                        events.append(Event("gpu", uses, max(gpu, end - step.gpu_seconds) - start, end - start))
                if end + extra > gpu:
                    gpu = end + extra
        self._gpu, self._cpu, self._link = gpu, cpu, link
        return max(gpu, cpu) - start
