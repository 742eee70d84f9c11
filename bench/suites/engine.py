"""The example engine: tokens a second, and memory over its start-up, beside a start-up that guesses its size."""

from __future__ import annotations

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
from bench.timing import Samples

if TYPE_CHECKING:
    from bench.session import Session
    from examples.engine.engine import Engine

LEGACY = "legacy"  # everything committed before capture, by a guess
WARM_BLOCKS = 1024
SCRUB_S = 3.0  # the driver scrubs the memory that an engine gave back; creating meanwhile is slow


@dataclass(frozen=True)
class EngineCase:
    """`num_requests` prompts of `prompt_tokens`, each continued by `new_tokens`. Weights are random."""

    id: str
    num_requests: int
    prompt_tokens: int
    new_tokens: int
    num_layers: int
    hidden_size: int
    num_query_heads: int
    num_kv_heads: int
    vocab_size: int
    capacity: int | None = None  # blocks; None is what the device's memory could hold
    quick: bool = False


def run(session: Session, case: EngineCase) -> dict[str, Any]:
    """Measures one case: a step of decoding is the sample, tokens a second are over the whole run."""
    from examples.engine.model import LlamaConfig

    config = LlamaConfig(
        num_layers=case.num_layers,
        hidden_size=case.hidden_size,
        intermediate_size=-(-case.hidden_size * 8 // 3 // 64) * 64,
        num_query_heads=case.num_query_heads,
        num_kv_heads=case.num_kv_heads,
        head_dim=case.hidden_size // case.num_query_heads,
        vocab_size=case.vocab_size,
        context_tokens=2048,
    )
    dtype = torch.bfloat16 if session.on_gpu else torch.float32
    weights = random_weights(config, dtype, session.device)
    _warm_up(session, case, config, weights)
    results: dict[str, dict[str, Any]] = {}
    outputs: dict[str, list[list[int]]] = {}
    for name in (OURS, LEGACY):
        session.enter(case.id, name)
        try:
            results[name], outputs[name] = _serve(session, case, config, weights, legacy=name == LEGACY)
        except Exception as error:
            results[name] = {"ok": False, "error": describe(error)}
            require_device(session, name, error)
        if session.on_gpu:
            torch.cuda.empty_cache()
            time.sleep(SCRUB_S)
    if len(outputs) == 2 and outputs[OURS] != outputs[LEGACY]:
        results[OURS] = {"ok": False, "error": "WrongResultError: the two start-ups generate different tokens"}
    parameters = {
        name: getattr(case, name)
        for name in ("num_requests", "prompt_tokens", "new_tokens", "num_layers", "hidden_size", "vocab_size")
    }
    return case_result(
        case.id,
        results,
        required=(LEGACY,),
        bytes_moved=0,
        flops=0,
        floor=None,
        parameters={**parameters, "dtype": str(dtype).removeprefix("torch.")},
    )


def _make_engine(session: Session, case: EngineCase, *, legacy: bool) -> Engine:
    from examples.engine.engine import Engine, EngineOptions

    memory = tkv.open_memory(session.device) if session.on_gpu else tkv.HostMemory(budget_bytes=64 << 20)
    options = EngineOptions(
        max_seqs=case.num_requests,
        max_tokens=2048 if session.on_gpu else 64,
        capacity=case.capacity,
        utilization=0.92 if session.on_gpu else 1.0,
        headroom_bytes=150 << 20 if session.on_gpu else 0,
        legacy=legacy,
    )
    return Engine(memory, options)


def _warm_up(session: Session, case: EngineCase, config: Any, weights: Any) -> None:
    """Starts an engine with a small cache: what is compiled or loaded once belongs to neither start-up."""
    from examples.engine.model import Llama

    engine = _make_engine(session, replace(case, capacity=min(case.capacity or WARM_BLOCKS, WARM_BLOCKS)), legacy=False)
    try:
        engine.start(Llama(config, weights))
        engine.generate([[1] * case.prompt_tokens], 2)
    finally:
        engine.close()


def _serve(
    session: Session, case: EngineCase, config: Any, weights: Any, *, legacy: bool
) -> tuple[dict[str, Any], list[list[int]]]:
    from examples.engine.model import Llama

    chooser = random.Random(7)
    prompts = [
        [chooser.randrange(config.vocab_size) for _ in range(case.prompt_tokens)] for _ in range(case.num_requests)
    ]
    engine = _make_engine(session, case, legacy=legacy)
    started = time.perf_counter()
    try:
        engine.start(Llama(config, weights))
        startup_s = time.perf_counter() - started
        engine.generate(prompts[:1], 2)  # the first request pays for what is lazy
        requests = [engine.add(prompt, case.new_tokens) for prompt in prompts]
        steps = Samples()
        started = time.perf_counter()
        while engine.scheduler.has_work:
            before = time.perf_counter()
            made = engine.step()
            if len(made) == case.num_requests:  # a step of decoding, all requests in it
                steps.add((time.perf_counter() - before) * 1e6)
        seconds = time.perf_counter() - started
        outputs = [list(request.output_ids) for request in requests]
        tokens = sum(map(len, outputs))
        stages = [
            {
                "name": stage.name,
                "seconds": round(stage.seconds, 4),
                "free_bytes": stage.free_bytes,
                "mapped_bytes": stage.mapped_bytes,
                "num_blocks": stage.num_blocks,
            }
            for stage in engine.ledger.stages
        ]
        settings = "commit all before capture, by a guess" if legacy else "reserve, capture, plan, extend"
        return {
            "ok": True,
            "settings": settings,
            **steps.summary(),
            "tokens_per_s": round(tokens / seconds, 1),
            "startup_s": round(startup_s, 3),
            "num_blocks": engine.cache.num_blocks,
            "stages": stages,
        }, outputs
    finally:
        engine.close()


SUITE = Suite(
    name="engine",
    about="the example engine's tokens a second and start-up",
    cases=(
        EngineCase("engine/135m-B16", 16, 128, 64, 30, 576, 9, 3, 49152, quick=True),
        EngineCase("engine/135m-B1", 1, 128, 64, 30, 576, 9, 3, 49152),
        EngineCase("engine/1b-B16", 16, 512, 64, 16, 2048, 32, 8, 32768),
    ),
    smoke_cases=(EngineCase("engine/tiny-B2", 2, 20, 5, 2, 32, 4, 2, 97, capacity=64),),
    run=run,
    case_s=15.0,
    quick_case_s=14.0,
    setup_s=2.0,
)
