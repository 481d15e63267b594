"""Between two tokens: measure the one that ended, apply what the controller decides, watch the VRAM that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from planner.errors import DeviceError
from planner.hardware import Hardware
from planner.plan import Plan, WeightClass
from planner.trace import CardSample, Change, PromptSample, TokenSample, Trace
from planner.units import MIB, format_count, format_size

from .adapt import Controller
from .adapt_policy import Measured, Policy
from .bindings import Helper, Statistics
from .host_load import HostLoad, ThreadCount

LOW_VRAM_BYTES = 256 * MIB  # free on the card: below, the ring shrinks to its smallest size
NO_VRAM_BYTES = 24 * MIB  # below, the driver may fail to load a kernel or to capture a graph
# Plans may fill the card. Where they leave less than that, the limits are these fractions of what they leave.
_LOW_FRACTION, _NO_FRACTION = 0.5, 0.25
_GROWTH_RESERVE = 1.5  # of what is low: to be left by a ring that grows again, so that it need not shrink at once
_N_WARMUP = 8  # tokens after which the engine itself takes no more VRAM
_MAX_CHANGES = 10_000  # kept where no trace is: a server may run for months
_CHECK_SECONDS = 1.0
_PAUSE_SECONDS = 1.0  # between two evaluations
_Clock = Callable[[], float]


class LoadAware:
    """Watches what one engine evaluates. `before` and `after` belong around every evaluation."""

    def __init__(
        self,
        helper: Helper,
        plan: Plan,
        set_n_threads: Callable[[int], None],
        *,
        adapts: bool,
        keeps_trace: bool,
        clock: _Clock = time.perf_counter,
        host_load: HostLoad | None = None,
    ) -> None:
        self._helper, self._plan, self._set_n_threads, self._clock = helper, plan, set_n_threads, clock
        self._host_load = host_load or HostLoad()
        self._threads = ThreadCount(plan.workload.n_threads)
        self._adapts, self._keeps_trace = adapts, keeps_trace
        self._is_held = False
        self._policy = Policy(plan, helper.choose_transfers)
        self._controller = Controller(self._policy)
        self._ring_bytes = plan.vram.ring_bytes
        self._started = self._checked = self._ended = clock()
        self._pending: tuple[float, int] | None = None  # when an evaluation began, and of how many tokens
        self._n_warmup = _N_WARMUP  # tokens to go
        self._usually_free_bytes: int | None = None  # on the card, since the engine is complete; None: unknown yet
        self._counters = helper.statistics()
        self._tokens: list[TokenSample] = []
        self._prompts: list[PromptSample] = []
        self.changes: list[Change] = []
        if adapts or keeps_trace:
            helper.set_option("statistics", 1)

    @property
    def is_adaptive(self) -> bool:
        return self._adapts

    @property
    def n_tokens(self) -> int:
        """Return how many tokens the trace has."""
        return len(self._tokens)

    def hold(self) -> None:
        """Compute as planned from now on, whatever the load, until `follow`. The ring stays as it is."""
        self.after()
        self._is_held = True
        self._set_classes(self._policy.planned)
        self._set_n_threads(self._plan.workload.n_threads)

    def follow(self) -> None:
        """Go on as before `hold`."""
        self.after()
        self._is_held = False
        self._controller.interrupt()
        self._host_load.restart()
        self._set_classes(self._controller.streamed)
        self._set_n_threads(self._threads.n)

    def before(self, n_tokens: int) -> None:
        """Note the start of an evaluation. Raises DeviceError if another program has taken the VRAM."""
        self.after()
        if not (self._adapts or self._keeps_trace):
            return
        now = self._clock()
        if n_tokens > 1 or now - self._ended > _PAUSE_SECONDS:
            self._controller.interrupt()
        if self._adapts and not self._is_held and self._n_warmup <= 0 and now - self._checked >= _CHECK_SECONDS:
            self._checked = now
            self._check_vram()
        self._counters = self._helper.statistics()
        self._pending = (self._clock(), n_tokens)

    def after(self) -> None:
        """Take up the evaluation that has just ended, if one has."""
        if self._pending is None:
            return
        (began, n_tokens), self._pending = self._pending, None
        now = self._ended = self._clock()
        if n_tokens > 1:
            if self._keeps_trace:
                self._prompts.append(PromptSample(now - self._started, now - began, n_tokens))
            return
        self._n_warmup -= 1
        token = _measured(now - began, self._counters, self._helper.statistics())
        if self._keeps_trace:
            self._tokens.append(_sample(now - self._started, token))
        if self._adapts and not self._is_held:
            self._follow_free_cores()  # first: what tokens took while a thread waited for a core tells nothing
            decision = self._controller.add(token)
            if decision:
                before = self._streamed_bytes(decision.before)
                self._set_classes(decision.streamed)
                self._note(decision.reason, before, decision.cpu_speed, decision.link_speed)

    def abandon(self) -> None:
        """Forget the evaluation that has begun: it failed, or was interrupted."""
        self._pending = None
        self._controller.interrupt()

    def trace(self, hardware: Hardware, card: Sequence[CardSample] = ()) -> Trace:
        """Return what was kept so far. `hardware` is where it ran."""
        return Trace(
            self._plan,
            hardware,
            self._adapts,
            tuple(self._tokens),
            tuple(self._prompts),
            tuple(self.changes),
            tuple(card),
        )

    def _set_classes(self, streamed: Sequence[int]) -> None:
        names = {self._policy.movable[i].name for i in streamed}
        movable = {p.name for p in self._policy.movable}

        def decode(name: str, planned: WeightClass) -> WeightClass:
            return planned if name not in movable else "stream" if name in names else "cpu"

        self._helper.set_classes(
            (item.name, decode(item.name, item.decode), item.prefill) for item in self._plan.host_placements
        )

    def _follow_free_cores(self) -> None:
        """Compute with fewer threads while other programs take cores: one thread that waits for a core stops all."""
        free = self._host_load.free_cores(self._threads.n)
        if free is not None and self._threads.update(free):
            self._set_n_threads(self._threads.n)
            self._controller.restart("the number of threads has changed")
            self._note(
                f"{free:.1f} cores are free: {format_count(self._threads.n, 'thread')}",
                self._streamed_bytes(self._controller.streamed), 1.0, 1.0,
            )  # fmt: skip

    def _check_vram(self) -> None:
        """Let the ring shrink while VRAM is short, and grow again after that."""
        free, total = self._helper.device_memory()
        if not total or not self._plan.vram.ring_bytes:
            return
        if self._usually_free_bytes is None:
            self._usually_free_bytes = free
        low = min(LOW_VRAM_BYTES, _LOW_FRACTION * self._usually_free_bytes)
        smallest, planned = self._smallest_ring_bytes(), self._plan.vram.ring_bytes
        if self._ring_bytes > smallest and free < low:
            self._resize_ring(smallest, f"{format_size(free)} of VRAM free: the ring shrinks")
        elif self._ring_bytes < planned and free - (planned - self._ring_bytes) > _GROWTH_RESERVE * low:
            self._resize_ring(planned, "VRAM is free again: the ring grows")
        elif free < min(NO_VRAM_BYTES, _NO_FRACTION * self._usually_free_bytes):
            raise DeviceError(
                f"Another program has taken the VRAM: {format_size(free)} are free.",
                "Close it, or solve with a smaller --vram.",
            )

    def _smallest_ring_bytes(self) -> int:
        """Return the room for the largest weight that is streamed, if only in prompts; all, if experts share it."""
        return self._plan.vram.ring_bytes if self._plan.shares_ring else self._plan.largest_streamed_bytes

    def _resize_ring(self, ring_bytes: int, reason: str) -> None:
        self._ring_bytes = ring_bytes
        self._helper.set_option("ring_bytes", ring_bytes)
        self._note(reason, self._streamed_bytes(self._controller.streamed), 1.0, 1.0)

    def _streamed_bytes(self, streamed: Sequence[int]) -> int:
        return sum(self._policy.movable[i].size_bytes for i in streamed)

    def _note(self, reason: str, streamed_bytes_before: int, cpu_speed: float, link_speed: float) -> None:
        if len(self.changes) == _MAX_CHANGES and not self._keeps_trace:
            return
        after = self._streamed_bytes(self._controller.streamed)
        self.changes.append(
            Change(
                self._clock() - self._started,
                reason,
                streamed_bytes_before,
                after,
                self._ring_bytes,
                cpu_speed,
                link_speed,
                self._threads.n,
            )
        )


def _sample(at_seconds: float, token: Measured) -> TokenSample:
    return TokenSample(
        at_seconds, token.seconds, token.cpu_seconds, token.wait_seconds, token.link_seconds, token.streamed_bytes
    )


def _measured(seconds: float, before: Statistics, after: Statistics) -> Measured:
    """Return one token from the engine's counters before and after it."""
    return Measured(
        seconds=seconds,
        cpu_seconds=max(0, after.cpu_ns - before.cpu_ns) / 1e9,
        wait_seconds=max(0, after.wait_gpu_ns - before.wait_gpu_ns) / 1e9,
        link_seconds=max(0, after.link_busy_ns - before.link_busy_ns) / 1e9,
        streamed_bytes=max(0, after.streamed_bytes - before.streamed_bytes),
    )
