"""How many blocks a start-up ends with: measured after capture, beside a guess before it, up to the last memory.

`estimate_then_measure`: each method starts the example engine at rising utilization, with graphs for 22 batch sizes,
and serves a full batch, until it runs out of memory. The first start of a case makes the weights, in a stage of its
ledger, and they serve all others. Small models leave memory to spare at any utilization, so they are started at the two
ends only, beside the bolder guesses. Each attempt is printed when it is over.
"""

from __future__ import annotations

import gc
import random
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

import triton_kv as tkv
from bench.candidate import OURS
from bench.case_result import case_result
from bench.measure import describe, require_device
from bench.random_weights import random_weights
from bench.suite import Suite
from bench.timing import Samples, host_samples

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.session import Session
    from examples.engine.engine import Engine
    from examples.engine.model import LlamaConfig, LlamaWeights

GIB = 1 << 30
UTILIZATIONS = (0.90, 0.95, 0.98, 0.99, 0.995)
ENDS = (UTILIZATIONS[0], UTILIZATIONS[-1])
BATCH_SIZES = (1, 2, 4, 8, 16, 24, *range(32, 513, 32))  # 22 graphs
# What the guesses keep for graphs: vLLM's log told its users that they may take 1 to 3 GiB.
# 0 is no estimate at all, as in the runner that docs/sizing.md moves. The bolder ones come last: what they break hurts
# no other.
GUESSES = {"legacy-3GiB": 3 * GIB, "legacy-1GiB": 1 * GIB, "legacy-0": 0}
HEADROOM_BYTES = 150 << 20
# The driver scrubs the memory that an engine gave back, 0.02 s a GiB, and creating meanwhile is slow: a start-up that
# commits early would pay for the one before.
SCRUB_S = 2.5
OUT_OF_MEMORY = "out of memory in "  # how the error of an attempt begins that ended so
OUT_OF_MEMORY_WORDS = ("out of memory", "out_of_memory", "alloc_failed", "enomem")


@dataclass(frozen=True)
class SizingCase:
    """A model's shape; weights are random. `batch` sequences are served at once, `step_tokens` in one step."""

    id: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    tied: bool
    batch: int = 512
    step_tokens: int = 8192
    utilizations: tuple[float, ...] = UTILIZATIONS  # --quick takes the first
    guesses: tuple[str, ...] = tuple(GUESSES)  # --quick takes the last
    budget_bytes: int | None = None  # of a host driver
    quick: bool = False


@dataclass(frozen=True)
class Attempt:
    """One start at one utilization. Amounts in bytes, None where it ended before."""

    utilization: float
    ok: bool
    error: str = ""
    num_blocks: int | None = None
    mapped_bytes: int | None = None
    used_in_capture_bytes: int | None = None  # of the device, at most
    free_at_end_bytes: int | None = None  # after a full batch was served
    graph_bytes: int | None = None
    plan_error_bytes: int | None = None  # free after extend, against what the plan said
    plan_tolerance_bytes: int | None = None  # a granule a segment
    within_budget: bool | None = None  # after the start, with the headroom and what a step needs again kept free
    startup_s: float | None = None
    lost_bytes: int | None = None  # that the next attempt does not find


class CaseWeights:
    """A case's weights: made inside the first start that asks for them, and kept for all others."""

    def __init__(self, make: Callable[[], LlamaWeights]) -> None:
        self._make = make
        self._made: LlamaWeights | None = None

    @property
    def num_bytes(self) -> int | None:
        return self._made.num_bytes if self._made else None

    def load(self, ledger: tkv.MemoryLedger) -> LlamaWeights:
        """The weights; where they have to be made, in the stage `weights` of `ledger`."""
        if self._made is None:
            with ledger.stage("weights") as notes:
                self._made = self._make()
                notes.append(f"{self._made.num_bytes / (1 << 20):.0f} MiB of weights")
        return self._made


def run(session: Session, case: SizingCase) -> dict[str, Any]:
    """Measures one case. The samples are the start-up times of the attempts that worked."""
    config = _config(case)
    if session.quick:
        case = replace(case, utilizations=case.utilizations[:1], guesses=case.guesses[-1:])
    dtype = torch.bfloat16 if session.on_gpu else torch.float32

    def make() -> LlamaWeights:
        return random_weights(config, dtype, session.device, tied=case.tied)

    if session.on_gpu:  # what is compiled or loaded once belongs to nobody's start-up
        _attempt(session, case, config, CaseWeights(make), OURS, 0.5, [])
        _settle(session, scrub_s=0.5)  # its weights
    weights = CaseWeights(make)
    results: dict[str, dict[str, Any]] = {}
    outputs: list[tuple[str, list[list[int]]]] = []
    for name in (OURS, *case.guesses):
        startups, attempts = Samples(), []
        extra: dict[str, Any] = {}
        for utilization in case.utilizations:
            if session.is_banned(case.id, name):
                attempts.append(Attempt(utilization, ok=False, error=session.ban_reason(case.id, name)))
                break
            session.enter(case.id, name)
            attempt, details = _attempt(session, case, config, weights, name, utilization, outputs)
            attempts.append(attempt)
            print(f"  {case.id} {name}: {_in_words(attempt)}  t={session.elapsed_s:.0f}s", flush=True)
            if not attempt.ok:
                break
            startups.add((attempt.startup_s or 0.0) * 1e6)
            extra = extra or details
        if startups.values_us:
            results[name] = {"ok": True, **startups.summary(), **extra}
        else:
            results[name] = {"ok": False, "error": attempts[-1].error}
        furthest = max((attempt.utilization for attempt in attempts if attempt.ok), default=0.0)
        results[name] |= {
            "settings": "reserve, capture, plan, extend" if name == OURS else f"{GUESSES[name]} bytes kept for graphs",
            "furthest_utilization": furthest,
            "attempts": [vars(attempt) for attempt in attempts],
        }
    problems = _problems(case, results, outputs)
    if problems:
        results[OURS] |= {"ok": False, "error": "; ".join(problems)}
    return case_result(
        case.id,
        results,
        required=("legacy",),
        bytes_moved=0,
        flops=0,
        floor=None,
        parameters={
            **{name: value for name, value in vars(case).items() if name not in ("id", "quick", "guesses")},
            "batch_sizes": [size for size in BATCH_SIZES if size <= case.batch],
            "weight_bytes": weights.num_bytes,
        },
    )


def _in_words(attempt: Attempt) -> str:
    if not attempt.ok:
        return f"at {attempt.utilization}: {attempt.error}"
    return (
        f"at {attempt.utilization}: {attempt.num_blocks} blocks, started in {attempt.startup_s} s, graphs "
        f"{(attempt.graph_bytes or 0) / GIB:.2f} GiB, free at the end {(attempt.free_at_end_bytes or 0) / GIB:.2f} GiB"
    )


def _problems(
    case: SizingCase, results: dict[str, dict[str, Any]], outputs: list[tuple[str, list[list[int]]]]
) -> list[str]:
    """What ours must keep: as far as any guess, no fewer blocks than one within its budget, an exact plan.

    And ours may not end by anything but a lack of memory; how a guess ended is in its attempts.
    """
    ours = {attempt["utilization"]: attempt for attempt in results[OURS]["attempts"]}
    found = [
        f"failed at {attempt['utilization']}: {attempt['error']}"
        for attempt in ours.values()
        if not attempt["ok"] and not attempt["error"].startswith(OUT_OF_MEMORY)
    ]
    for name in case.guesses:
        if results[name]["furthest_utilization"] > results[OURS]["furthest_utilization"]:
            found.append(f"{name} goes further")
        for attempt in results[name]["attempts"]:
            mine = ours.get(attempt["utilization"], {"ok": False})
            sound = attempt["ok"] and attempt["within_budget"] and mine["ok"]
            if sound and attempt["num_blocks"] > mine["num_blocks"]:
                found.append(f"{name} has more blocks at {attempt['utilization']}")
    for attempt in ours.values():
        if attempt["ok"] and attempt["plan_error_bytes"] > attempt["plan_tolerance_bytes"]:
            found.append(f"the plan is {attempt['plan_error_bytes']} bytes off at {attempt['utilization']}")
    if any(tokens != outputs[0][1] for _, tokens in outputs):
        found.append("the methods generate different tokens")
    return found


def _attempt(
    session: Session,
    case: SizingCase,
    config: LlamaConfig,
    weights: CaseWeights,
    name: str,
    utilization: float,
    outputs: list[tuple[str, list[list[int]]]],
) -> tuple[Attempt, dict[str, Any]]:
    """Starts an engine, serves a full batch, takes it down. The first tokens of each method go into `outputs`."""
    from examples.engine.engine import Engine, EngineOptions
    from examples.engine.model import Llama

    memory = tkv.open_memory(session.device) if session.on_gpu else tkv.HostMemory(4096, case.budget_bytes)
    options = EngineOptions(
        max_seqs=case.batch,
        max_tokens=case.step_tokens,
        graph_sizes=BATCH_SIZES,
        legacy=name != OURS,
        utilization=utilization,
        headroom_bytes=(HEADROOM_BYTES + GUESSES.get(name, 0)) if session.on_gpu else 0,
    )
    free_before = memory.memory_info()[0]
    peaks: list[int] = []

    def on_stage(stage: tkv.StageRecord) -> None:
        if stage.name == "capture":
            held = torch.cuda.max_memory_reserved(session.device) if session.on_gpu else stage.torch_bytes
            peaks.append(stage.total_bytes - stage.free_bytes - stage.torch_bytes + held)

    engine = Engine(memory, options, on_stage)
    attempt = Attempt(utilization, ok=False)
    details: dict[str, Any] = {}
    try:
        loaded = weights.load(engine.ledger)
        if made := engine.ledger.find("weights"):
            free_before = made.free_bytes  # they stay
        started = time.perf_counter()
        engine.start(Llama(config, loaded))
        startup_s = time.perf_counter() - started
        after_start = engine.ledger.stages[-1].free_bytes
        tolerance = engine.cache.layout.num_segments * memory.granularity
        within_budget = _is_within_budget(engine, utilization, 0 if options.legacy else tolerance)
        tokens = _serve_full_batch(engine, case, config)
        if name not in [other for other, _ in outputs]:
            outputs.append((name, tokens))
        session.synchronize()
        details = _details(session, engine)
        attempt = replace(
            attempt,
            ok=True,
            free_at_end_bytes=memory.memory_info()[0],
            plan_error_bytes=None if options.legacy else abs(after_start - engine.plan.free_after_bytes),
            plan_tolerance_bytes=tolerance,
            within_budget=within_budget,
            startup_s=round(startup_s, 3),
        )
    except Exception as error:
        where = next((stage.name for stage in engine.ledger.stages if stage.failed), "serving a full batch")
        if _is_out_of_memory(error):
            attempt = replace(attempt, error=f"{OUT_OF_MEMORY}{where!r}: {describe(error)[:200]}")
        else:  # kept, so that the other methods' attempts are not lost with it
            require_device(session, name, error)
            attempt = replace(attempt, error=f"in {where!r}: {describe(error)}")
    cache = getattr(engine, "cache", None)
    attempt = replace(
        attempt,
        num_blocks=cache.num_blocks if cache else None,
        mapped_bytes=cache.mapped_bytes if cache else None,
        used_in_capture_bytes=peaks[0] if peaks else None,
        graph_bytes=engine.ledger.graph_bytes,
    )
    engine.close()
    del engine, cache
    _settle(session)
    return replace(attempt, lost_bytes=max(free_before - memory.memory_info()[0], 0)), details


def _is_within_budget(engine: Engine, utilization: float, tolerance_bytes: int) -> bool:
    """Whether a start left what it promised: a guess that ate up the headroom only looks as if it had more blocks."""
    reading = engine.ledger.read()
    headroom_bytes = HEADROOM_BYTES if engine.memory.device.type == "cuda" else 0
    kept_bytes = engine.ledger.activation_bytes(reading) + headroom_bytes
    return reading.used_bytes + kept_bytes <= int(utilization * reading.total_bytes) + tolerance_bytes


def _is_out_of_memory(error: BaseException | None) -> bool:
    """By the text: torch, Triton, cuBLAS and the driver each say it in their own way, and a broken capture hides it."""
    while error is not None:
        if any(word in str(error).lower() for word in OUT_OF_MEMORY_WORDS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _details(session: Session, engine: Engine) -> dict[str, Any]:
    """The ledger of a start-up, and what a plan costs once more."""

    def plan() -> None:
        tkv.plan_blocks(engine.cache, engine.ledger, cache_bytes=engine.cache.mapped_bytes)

    times = host_samples(plan, calls=5, groups=6, between=session.synchronize)
    return {
        "plan_us": round(times.median_us, 1),
        "stages": [{"mapped_bytes": stage.cache_bytes, **vars(stage)} for stage in engine.ledger.stages],
        "plan": str(engine.plan),
    }


def _serve_full_batch(engine: Engine, case: SizingCase, config: LlamaConfig) -> list[list[int]]:
    """Prompts that fill whole steps, then decoding with every sequence in the batch."""
    chooser = random.Random(5)
    length = max(2 * case.step_tokens // case.batch, 2)
    prompts = [[chooser.randrange(config.vocab_size) for _ in range(length)] for _ in range(case.batch)]
    return engine.generate(prompts, 6)


def _settle(session: Session, scrub_s: float = SCRUB_S) -> None:
    """Gives back what is left of the last engine, and waits until the driver has cleaned it."""
    gc.collect()
    if session.on_gpu:
        torch.cuda.synchronize(session.device)
        torch.cuda.empty_cache()
        time.sleep(scrub_s)


def _config(case: SizingCase) -> LlamaConfig:
    from examples.engine.model import LlamaConfig

    return LlamaConfig(
        num_layers=case.num_layers,
        hidden_size=case.hidden_size,
        intermediate_size=case.intermediate_size,
        num_query_heads=case.num_query_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.head_dim,
        vocab_size=case.vocab_size,
        context_tokens=8192,
    )


SUITE = Suite(
    name="sizing",
    about="blocks measured after capture against a guess before it, up to the last memory",
    cases=(
        SizingCase("sizing/llama-8b", 32, 4096, 14336, 32, 8, 128, 128256, tied=False),
        SizingCase(
            "sizing/qwen3-0.6b", 28, 1024, 3072, 16, 8, 128, 151936, tied=True,
            utilizations=ENDS, guesses=("legacy-1GiB", "legacy-0"),
        ),
        SizingCase(
            "sizing/smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, tied=True,
            utilizations=ENDS, guesses=("legacy-1GiB", "legacy-0"), quick=True,
        ),
    ),
    smoke_cases=(
        SizingCase(
            "sizing/tiny", 2, 64, 96, 4, 2, 16, 97, tied=True, batch=2, step_tokens=16,
            utilizations=(0.5, 1.0), budget_bytes=1 << 20,
        ),
    ),
    run=run,
    case_s=70.0,
    quick_case_s=14.0,
    setup_s=20.0,
)  # fmt: skip
