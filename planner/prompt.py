"""Prompts: what each host weight does while many tokens are computed at once, from which batch size on."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from .experts import Experts
from .measurements import Profile
from .patterns import take_turns
from .plan import WeightClass
from .problem import Costs, Graph, costs, mean_past
from .timeline import Timeline, simulate
from .workload import Workload

_TURN_RESERVE = 0.7


@dataclass(frozen=True)
class PromptProblem:
    """A model's prompts of the workload's length, at one thread count. Classes are per use of a weight.

    Batches too small for the prefill classes have the decode classes, and experts are computed one by one as there,
    with a cache of `cache_bytes`; None: they are not.
    """

    profile: Profile
    graph: Graph
    unit_of: tuple[int, ...]  # per use, -1 where nothing is decided
    n_threads: int
    workload: Workload
    experts: Experts | None = None
    _costs: dict[int, Costs] = field(default_factory=dict)  # by number of tokens

    def simulate(
        self,
        classes: Sequence[WeightClass],
        ring_bytes: int,
        n_tokens: int,
        *,
        are_prefill: bool = True,
        cache_bytes: int | None = None,
    ) -> Timeline:
        """Return a batch's timeline. With prefill classes, the engine launches what streams one by one."""
        costs = self._costs_of(n_tokens)
        if self.experts is not None and cache_bytes is not None and not are_prefill:
            costs = replace(costs, expert_steps=self.experts.batch_steps(classes, cache_bytes, costs))
        return simulate(self.graph, costs, classes, ring_bytes, may_merge=not are_prefill)

    def choose_classes(self, decode: Sequence[WeightClass], ring_bytes: int) -> list[WeightClass]:
        """Return the classes that compute a full micro-batch fastest, with the residents of `decode`."""
        batch = self._costs_of(self.profile.n_ubatch)
        host = [use for use, cls in enumerate(decode) if cls != "gpu"]
        fitting = [use for use in host if self.graph.ring_bytes[use] <= ring_bytes]
        faster = [use for use in fitting if batch.link[use] < batch.cpu[use]]
        residents = {unit for unit, cls in zip(self.unit_of, decode, strict=True) if unit >= 0 and cls == "gpu"}
        turns = (
            take_turns(self.graph, batch, self.unit_of, residents, ring_bytes, 1.0, _TURN_RESERVE) if host else set()
        )
        options = [
            self._with_streams(decode, fitting),
            self._with_streams(decode, self._whole_units(faster)),
            self._with_streams(decode, [use for use in fitting if self.unit_of[use] in turns]),
            self._with_streams(decode, []),
        ]
        return min(options, key=lambda classes: self.simulate(classes, ring_bytes, self.profile.n_ubatch).seconds)

    def min_tokens(
        self,
        decode: Sequence[WeightClass],
        prefill: Sequence[WeightClass],
        ring_bytes: int,
        cache_bytes: int | None = None,
    ) -> int:
        """Return the smallest batch, at least 2, that the prefill classes compute faster than the decode classes."""
        low, high = 2, self.profile.n_ubatch if list(decode) != list(prefill) else 2
        while low < high:
            middle = (low + high) // 2
            faster = self.simulate(prefill, ring_bytes, middle)
            slower = self.simulate(decode, ring_bytes, middle, are_prefill=False, cache_bytes=cache_bytes)
            if faster.seconds < slower.seconds:
                high = middle
            else:
                low = middle + 1
        return max(2, low)

    def seconds(
        self,
        decode: Sequence[WeightClass],
        prefill: Sequence[WeightClass],
        ring_bytes: int,
        min_tokens: int,
        n_prompt_tokens: int,
        cache_bytes: int | None = None,
    ) -> float:
        """Return the time of a prompt: full micro-batches and the rest, the first one without prefetched weights."""
        n_full, n_rest = divmod(n_prompt_tokens, self.profile.n_ubatch)
        total = 0.0
        for n_batches, n_tokens in ((n_full, self.profile.n_ubatch), (1 if n_rest else 0, n_rest)):
            if n_batches:
                are_prefill = n_tokens >= min_tokens
                classes = prefill if are_prefill else decode
                timeline = self.simulate(
                    classes, ring_bytes, n_tokens, are_prefill=are_prefill, cache_bytes=cache_bytes
                )
                n_cold = 1 if total == 0.0 else 0
                total += n_cold * timeline.first_seconds + (n_batches - n_cold) * timeline.seconds
        return total

    def _costs_of(self, n_tokens: int) -> Costs:
        if n_tokens not in self._costs:
            n_past, _ = mean_past(self.workload)
            self._costs[n_tokens] = costs(self.profile, self.graph, n_tokens, self.n_threads, n_past)
        return self._costs[n_tokens]

    def _whole_units(self, uses: Sequence[int]) -> list[int]:
        """Keep the uses whose whole unit is among `uses`."""
        missing = {unit for use, unit in enumerate(self.unit_of) if use not in set(uses)}
        return [use for use in uses if self.unit_of[use] not in missing]

    @staticmethod
    def _with_streams(decode: Sequence[WeightClass], streamed: Collection[int]) -> list[WeightClass]:
        classes: list[WeightClass] = ["gpu" if cls == "gpu" else "cpu" for cls in decode]
        for use in streamed:
            classes[use] = "stream"
        return classes
